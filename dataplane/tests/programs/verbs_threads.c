/*
 * Every object of verbs used by several threads at once, over two contexts for each of two devices:
 *
 *   verbs_threads MESSAGES
 *
 * Four threads post SENDs to one queue pair, half of them by ibv_wr_start(3), and four receive from it
 * through one shared receive queue. Four poll one completion queue at either end, half of them asleep on
 * one completion channel and half by ibv_start_poll(3). Meanwhile others register memory, and create and
 * destroy queues in the same protection domain. Each message must arrive once, whole, and each request
 * must complete once.
 */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define SLOTS 64
#define WORDS 8

struct message {
	uint64_t words[WORDS];
};

struct end {
	struct ibv_context *context, *second;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	union ibv_gid gid;
	struct message *slots;
	/* Slots in use; each is one request. */
	atomic_int busy[SLOTS];
};

static struct end sender, receiver;
static unsigned int total;
static atomic_uint next, sent, received;
static atomic_uchar *arrived, *completed;
static atomic_int over;

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void expect(int holds, const char *what)
{
	if (!holds)
		fail(what);
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;
	int n;

	expect(devices != NULL, "ibv_get_device_list");
	for (n = 0; devices[n]; n++)
		if (!strcmp(ibv_get_device_name(devices[n]), name))
			context = ibv_open_device(devices[n]);
	ibv_free_device_list(devices);
	expect(context != NULL, "ibv_open_device");
	return context;
}

static void open_end(struct end *end, const char *name)
{
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = SLOTS, .max_sge = 1 } };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1, .send_ops_flags = IBV_QP_EX_WITH_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
	};
	struct ibv_cq_init_attr_ex queue = { .cqe = 2 * SLOTS, .cq_context = end,
					     .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	end->context = open_device(name);
	end->second = open_device(name);
	expect(end->context != end->second, "two contexts");
	end->pd = ibv_alloc_pd(end->context);
	end->channel = ibv_create_comp_channel(end->context);
	expect(end->pd && end->channel, "protection domain and channel");
	expect(!fcntl(end->channel->fd, F_SETFL, O_NONBLOCK), "fcntl");
	queue.channel = end->channel;
	end->cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(end->context, &queue));
	end->srq = ibv_create_srq(end->pd, &shared);
	expect(end->cq && end->srq, "completion queue and shared receive queue");
	end->slots = calloc(SLOTS, sizeof *end->slots);
	end->mr = ibv_reg_mr(end->pd, end->slots, SLOTS * sizeof *end->slots, IBV_ACCESS_LOCAL_WRITE);
	expect(end->mr != NULL, "ibv_reg_mr");
	init.send_cq = init.recv_cq = end->cq;
	init.srq = end->srq;
	init.cap = (struct ibv_qp_cap){ .max_send_wr = SLOTS, .max_send_sge = 1 };
	init.pd = end->pd;
	end->qp = ibv_create_qp_ex(end->context, &init);
	expect(end->qp && !ibv_query_gid(end->context, 1, 0, &end->gid), "ibv_create_qp");
	expect(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			      IBV_QP_ACCESS_FLAGS), "to INIT");
}

static void connect_end(struct end *end, struct end *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = peer->qp->qp_num, .max_dest_rd_atomic = 1 };

	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1 };
	attr.ah_attr.grh.dgid = peer->gid;
	expect(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			      IBV_QP_MIN_RNR_TIMER), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	expect(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

static void post_receive(int slot)
{
	struct ibv_sge place = { (uintptr_t)&receiver.slots[slot], sizeof(struct message),
				 receiver.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &place, .num_sge = 1 }, *bad;

	expect(!ibv_post_srq_recv(receiver.srq, &wr, &bad), "ibv_post_srq_recv");
}

/* Takes a free slot of the sender; each has at most one request. */
static int take_slot(void)
{
	int slot;

	for (;;) {
		for (slot = 0; slot < SLOTS / 2; slot++)
			if (!atomic_exchange(&sender.busy[slot], 1))
				return slot;
		sched_yield();
	}
}

static void *post_sends(void *builds)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(sender.qp);
	unsigned int number;
	int n;

	while ((number = atomic_fetch_add(&next, 1)) < total) {
		int slot = take_slot();
		struct ibv_sge source = { (uintptr_t)&sender.slots[slot], sizeof(struct message),
					  sender.mr->lkey };
		struct ibv_send_wr wr = { .wr_id = (uint64_t)number << 32 | slot, .sg_list = &source,
					  .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

		for (n = 0; n < WORDS; n++)
			sender.slots[slot].words[n] = (uint64_t)number * WORDS + n;
		if (builds) {
			ibv_wr_start(qp);
			qp->wr_id = wr.wr_id;
			qp->wr_flags = 0;
			ibv_wr_send(qp);
			ibv_wr_set_sge(qp, source.lkey, source.addr, source.length);
			expect(!ibv_wr_complete(qp), "ibv_wr_complete");
		} else {
			expect(!ibv_post_send(sender.qp, &wr, &bad), "ibv_post_send");
		}
	}
	return NULL;
}

static void on_sent(const struct ibv_wc *wc)
{
	unsigned int number = wc->wr_id >> 32;

	expect(number < total && !atomic_exchange(&completed[number], 1), "a send completed twice");
	atomic_store(&sender.busy[wc->wr_id & 0xffffffff], 0);
	atomic_fetch_add(&sent, 1);
}

static void on_received(const struct ibv_wc *wc)
{
	struct message *message = &receiver.slots[wc->wr_id];
	unsigned int number = message->words[0] / WORDS;
	int n;

	expect(wc->byte_len == sizeof *message, "the length of a message");
	expect(number < total && !atomic_exchange(&arrived[number], 1), "a message came twice");
	for (n = 0; n < WORDS; n++)
		expect(message->words[n] == (uint64_t)number * WORDS + n, "what a message says");
	post_receive(wc->wr_id);
	atomic_fetch_add(&received, 1);
}

/* Polls completions of one end; returns their number. */
static int take_completions(struct end *end)
{
	struct ibv_wc wc[5];
	int got = ibv_poll_cq(end->cq, 5, wc), n;

	expect(got >= 0, "ibv_poll_cq");
	for (n = 0; n < got; n++) {
		if (wc[n].status) {
			fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc[n].status));
			exit(1);
		}
		if (end == &sender)
			on_sent(&wc[n]);
		else
			on_received(&wc[n]);
	}
	return got;
}

static int is_done(struct end *end)
{
	return atomic_load(end == &sender ? &sent : &received) == total;
}

/* The same with the functions of an extended completion queue. */
static int take_by_functions(struct end *end)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)end->cq;
	int status = ibv_start_poll(cq, &attr), got = 0, n;
	struct ibv_wc wc[3];

	expect(!status || status == ENOENT, "ibv_start_poll");
	if (status)
		return 0;
	do {
		wc[got].wr_id = cq->wr_id;
		wc[got].status = cq->status;
		wc[got].byte_len = ibv_wc_read_byte_len(cq);
	} while (++got < 3 && !(status = ibv_next_poll(cq)));
	ibv_end_poll(cq);
	for (n = 0; n < got; n++) {
		expect(!wc[n].status, "the status of a completion");
		if (end == &sender)
			on_sent(&wc[n]);
		else
			on_received(&wc[n]);
	}
	return got;
}

static void *spin(void *argument)
{
	while (!is_done(argument))
		if (!take_by_functions(argument))
			sched_yield();
	return NULL;
}

/* Sleeps on the completion channel, like other threads. */
static void *sleep_for_events(void *argument)
{
	struct end *end = argument;
	struct pollfd readable = { .fd = end->channel->fd, .events = POLLIN };

	while (!is_done(end)) {
		struct ibv_cq *cq;
		void *context;

		expect(!ibv_req_notify_cq(end->cq, 0), "ibv_req_notify_cq");
		if (take_completions(end))
			continue;
		/* The end of the transfer raises no event for sleeping threads. */
		if (poll(&readable, 1, 20) <= 0)
			continue;
		/* Another thread may have taken the event. */
		if (ibv_get_cq_event(end->channel, &cq, &context)) {
			expect(errno == EAGAIN, "ibv_get_cq_event");
			continue;
		}
		expect(cq == end->cq && context == end, "the queue of an event");
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

/* Creates and destroys objects during the transfer. */
static void *make_objects(void *argument)
{
	struct end *end = argument;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .srq = end->srq };
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	int rounds = 0;

	while (!atomic_load(&over)) {
		size_t length = 64 + rounds * 977 % 20000;
		char *bytes = malloc(length);
		struct ibv_mr *mr = ibv_reg_mr(end->pd, bytes, length, IBV_ACCESS_LOCAL_WRITE);
		struct ibv_mw *mw = ibv_alloc_mw(end->pd, IBV_MW_TYPE_2);
		struct ibv_cq *cq = ibv_create_cq(end->context, 8, NULL, end->channel, 0);
		struct ibv_pd *pd = ibv_alloc_pd(end->second);
		struct ibv_qp *qp;

		expect(mr && mw && cq && pd, "objects beside the transfer");
		init.send_cq = cq;
		init.recv_cq = end->cq;
		init.cap = (struct ibv_qp_cap){ .max_send_wr = 4, .max_send_sge = 1 };
		qp = ibv_create_qp(end->pd, &init);
		expect(qp != NULL, "a queue pair beside the transfer");
		expect(!ibv_query_device(end->context, &device) &&
		       !ibv_query_port(end->second, 1, &port), "queries");
		expect(!ibv_destroy_qp(qp) && !ibv_dealloc_pd(pd) && !ibv_destroy_cq(cq) &&
		       !ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr), "destroying objects");
		free(bytes);
		rounds++;
	}
	expect(rounds > 0, "objects were made");
	return NULL;
}

static void close_end(struct end *end)
{
	expect(!ibv_destroy_qp(end->qp), "ibv_destroy_qp");
	expect(!ibv_destroy_srq(end->srq), "ibv_destroy_srq");
	expect(!ibv_destroy_cq(end->cq), "ibv_destroy_cq");
	expect(!ibv_destroy_comp_channel(end->channel), "ibv_destroy_comp_channel");
	expect(!ibv_dereg_mr(end->mr), "ibv_dereg_mr");
	expect(!ibv_dealloc_pd(end->pd), "ibv_dealloc_pd");
	expect(!ibv_close_device(end->context), "ibv_close_device");
	expect(!ibv_close_device(end->second), "ibv_close_device");
	free(end->slots);
}

int main(int argc, char **argv)
{
	struct end *ends[2] = { &sender, &receiver };
	pthread_t threads[4 * THREADS], makers[4];
	int started = 0, n, at;

	total = argc > 1 ? atoi(argv[1]) : 20000;
	arrived = calloc(total, 1);
	completed = calloc(total, 1);
	expect(arrived && completed, "calloc");
	open_end(&sender, "siw0");
	open_end(&receiver, "siw1");
	for (n = 0; n < SLOTS; n++)
		post_receive(n);
	connect_end(&sender, &receiver);
	connect_end(&receiver, &sender);
	for (at = 0; at < 2; at++) {
		for (n = 0; n < THREADS; n++)
			expect(!pthread_create(&threads[started++], NULL,
					       n % 2 ? spin : sleep_for_events, ends[at]), "thread");
		for (n = 0; n < 2; n++)
			expect(!pthread_create(&makers[2 * at + n], NULL, make_objects, ends[at]),
			       "thread");
	}
	for (n = 0; n < THREADS; n++)
		expect(!pthread_create(&threads[started++], NULL, post_sends,
				       n % 2 ? &sender : NULL), "thread");
	for (n = 0; n < started; n++)
		pthread_join(threads[n], NULL);
	atomic_store(&over, 1);
	for (n = 0; n < 4; n++)
		pthread_join(makers[n], NULL);
	close_end(&sender);
	close_end(&receiver);
	printf("%u messages\n", total);
	return 0;
}
