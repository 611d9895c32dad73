/*
 * Faults of plans at verbs, as the test in fault_plans.rs gives them: `planned_faults CASE`. Two queue pairs of
 * one process are connected; the first sends, the second receives.
 */
#include "connect.h"

#include <poll.h>
#include <stdint.h>
#include <time.h>

enum { SIZE = 4096 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cqs[2];
static struct ibv_qp *qps[2];
static char memory[SIZE];

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void open_siw0(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int n;

	expect(list != NULL, "ibv_get_device_list");
	for (n = 0; list[n] && strcmp(ibv_get_device_name(list[n]), "siw0"); n++)
		;
	context = ibv_open_device(list[n]);
	expect(context != NULL, "ibv_open_device");
	ibv_free_device_list(list);
}

static struct ibv_qp *create_qp(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	return ibv_create_qp(pd, &init);
}

static void connect_both(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	union ibv_gid gid;
	int n;

	pd = ibv_alloc_pd(context);
	expect(pd != NULL, "ibv_alloc_pd");
	mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	expect(mr != NULL, "ibv_reg_mr");
	channel = ibv_create_comp_channel(context);
	expect(channel != NULL, "ibv_create_comp_channel");
	expect(!ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
	for (n = 0; n < 2; n++) {
		cqs[n] = ibv_create_cq(context, 128, NULL, n == 0 ? channel : NULL, 0);
		expect(cqs[n] != NULL, "ibv_create_cq");
		qps[n] = create_qp(cqs[n]);
		expect(qps[n] != NULL, "ibv_create_qp");
		expect(!ibv_modify_qp(qps[n], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				      IBV_QP_ACCESS_FLAGS), "to INIT");
	}
	connect_qp(qps[0], qps[1], gid);
	connect_qp(qps[1], qps[0], gid);
}

static int post_receive(int end)
{
	struct ibv_sge place = { (uintptr_t)memory, SIZE, mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 7, .sg_list = &place, .num_sge = 1 }, *bad = NULL;
	int errno_of_call = ibv_post_recv(qps[end], &receive, &bad);

	expect(!errno_of_call || bad == &receive, "bad_wr");
	return errno_of_call;
}

static int post_send(int end)
{
	struct ibv_sge place = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr send = { .wr_id = 8, .sg_list = &place, .num_sge = 1,
				    .opcode = IBV_WR_SEND }, *bad = NULL;
	int errno_of_call = ibv_post_send(qps[end], &send, &bad);

	expect(!errno_of_call || bad == &send, "bad_wr");
	return errno_of_call;
}

static enum ibv_wc_status take_status(int end)
{
	double until = seconds() + 20;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cqs[end], 1, &wc)))
		expect(seconds() < until, "a completion in 20 s");
	expect(got == 1, "ibv_poll_cq");
	return wc.status;
}

/* Waits until a descriptor of events is readable: then there is an event. */
static void await_readable(int fd)
{
	struct pollfd waited = { .fd = fd, .events = POLLIN };

	expect(poll(&waited, 1, 5000) == 1, "an event in 5 s");
}

static void *create(const char *object)
{
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };

	if (!strcmp(object, "pd"))
		return ibv_alloc_pd(context);
	if (!strcmp(object, "mr"))
		return ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	if (!strcmp(object, "mw"))
		return ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	if (!strcmp(object, "cq"))
		return ibv_create_cq(context, 8, NULL, NULL, 0);
	if (!strcmp(object, "qp"))
		return create_qp(cqs[0]);
	return ibv_create_srq(pd, &srq);
}

static void test_create(const char *object)
{
	if (strcmp(object, "pd"))
		pd = ibv_alloc_pd(context);
	if (!strcmp(object, "qp"))
		cqs[0] = ibv_create_cq(context, 8, NULL, NULL, 0);
	errno = 0;
	expect(!create(object) && errno == ENOSPC, "a first creation that fails");
	expect(create(object) != NULL, "a second creation");
}

static void test_post(void)
{
	connect_both();
	expect(post_receive(0) == EINVAL, "a receive that is refused");
	expect(!post_receive(0), "a second receive");
	expect(!post_receive(1) && !post_receive(1) && !post_receive(1), "receives of the peer");
	expect(!post_send(0) && !post_send(0), "two sends");
	expect(post_send(0) == EAGAIN, "a third send that is refused");
	expect(!post_send(0), "a fourth send");
	expect(take_status(0) == IBV_WC_SUCCESS, "first");
	expect(take_status(0) == IBV_WC_SUCCESS, "second");
	expect(take_status(0) == IBV_WC_SUCCESS, "fourth");
}

static void test_withhold(void)
{
	double begin = seconds();

	connect_both();
	expect(!post_receive(1) && !post_receive(1), "receives");
	expect(!post_send(0) && !post_send(0), "sends");
	expect(take_status(1) == IBV_WC_SUCCESS && take_status(1) == IBV_WC_SUCCESS, "receives");
	expect(seconds() - begin >= 0.3, "300 ms");
}

static void test_withheld_flush(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	connect_both();
	expect(!post_receive(1) && !post_receive(1), "receives");
	expect(!ibv_modify_qp(qps[1], &attr, IBV_QP_STATE), "to ERR");
	expect(take_status(1) == IBV_WC_WR_FLUSH_ERR, "first");
	expect(take_status(1) == IBV_WC_WR_FLUSH_ERR, "second");
}

static void test_status(void)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	connect_both();
	expect(!post_receive(1) && !post_receive(1) && !post_receive(1), "receives");
	expect(!post_send(0) && !post_send(0) && !post_send(0), "sends");
	expect(take_status(0) == IBV_WC_SUCCESS, "first");
	expect(take_status(0) == IBV_WC_LOC_PROT_ERR, "second");
	expect(take_status(0) == IBV_WC_WR_FLUSH_ERR, "third");
	expect(!ibv_query_qp(qps[0], &attr, IBV_QP_STATE, &init), "ibv_query_qp");
	expect(attr.qp_state == IBV_QPS_ERR, "state ERR");
	/* Later requests are flushed by the device. */
	expect(!post_send(0) && take_status(0) == IBV_WC_WR_FLUSH_ERR, "fourth");
}

static void test_overrun(void)
{
	struct ibv_async_event event;
	struct ibv_wc wc;
	int n, got;

	connect_both();
	for (n = 0; n < 3; n++)
		expect(!post_receive(1) && !post_send(0), "a message");
	expect(take_status(0) == IBV_WC_SUCCESS && take_status(0) == IBV_WC_SUCCESS, "two");
	while (!(got = ibv_poll_cq(cqs[0], 1, &wc)))
		;
	expect(got < 0, "a poll that fails");
	expect(!ibv_get_async_event(context, &event), "ibv_get_async_event");
	expect(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == cqs[0], "CQ_ERR");
	ibv_ack_async_event(&event);
}

static void test_sleep(void)
{
	double begin;
	struct ibv_wc wc;
	int got, events = 0;

	connect_both();
	expect(!ibv_req_notify_cq(cqs[0], 0), "ibv_req_notify_cq");
	begin = seconds();
	expect(!post_receive(1) && !post_send(0), "a message");
	for (;;) {
		struct ibv_cq *cq;
		void *cookie;

		await_readable(channel->fd);
		expect(!ibv_get_cq_event(channel, &cq, &cookie) && cq == cqs[0], "ibv_get_cq_event");
		ibv_ack_cq_events(cq, 1);
		events++;
		expect(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
		got = ibv_poll_cq(cq, 1, &wc);
		if (got)
			break;
	}
	expect(got == 1 && wc.status == IBV_WC_SUCCESS, "a completion");
	expect(seconds() - begin >= 0.1 && events <= 3, "few events, and 100 ms");
}

static void test_events(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	int seen[3] = { 0 }, n;
	struct ibv_srq *srq;

	connect_both();
	srq = ibv_create_srq(pd, &init);
	expect(srq != NULL, "ibv_create_srq");
	for (n = 0; n < 3; n++)
		expect(!post_send(1), "a send");
	for (n = 0; n < 3; n++) {
		struct ibv_async_event event;

		await_readable(context->async_fd);
		expect(!ibv_get_async_event(context, &event), "ibv_get_async_event");
		seen[0] += event.event_type == IBV_EVENT_QP_FATAL &&
			   (event.element.qp == qps[0] || event.element.qp == qps[1]);
		seen[1] += event.event_type == IBV_EVENT_GID_CHANGE && event.element.port_num == 1;
		seen[2] += event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq;
		ibv_ack_async_event(&event);
	}
	expect(seen[0] == 1 && seen[1] == 1 && seen[2] == 1, "each event once");
}

int main(int argc, char **argv)
{
	const char *wanted = argc > 1 ? argv[1] : "";

	open_siw0();
	if (!strcmp(wanted, "create"))
		test_create(argv[2]);
	else if (!strcmp(wanted, "post"))
		test_post();
	else if (!strcmp(wanted, "withhold"))
		test_withhold();
	else if (!strcmp(wanted, "withheld-flush"))
		test_withheld_flush();
	else if (!strcmp(wanted, "status"))
		test_status();
	else if (!strcmp(wanted, "overrun"))
		test_overrun();
	else if (!strcmp(wanted, "sleep"))
		test_sleep();
	else if (!strcmp(wanted, "events"))
		test_events();
	else
		return 2;
	puts("done");
	return 0;
}
