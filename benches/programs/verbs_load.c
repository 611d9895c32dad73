/*
 * WRITEs of one thread through libibverbs, from a queue pair of siw0 to one of siw1, both in this
 * process and connected by GID and QP number:
 *
 *   cost BYTES COUNT ROUNDS         nanoseconds for a call of ibv_post_send and one of ibv_poll_cq
 *   bandwidth BYTES DEPTH SECONDS   Gb/s, with DEPTH requests in flight
 *
 * benches/src/drop_in.rs does the same through the client library, with the same calls in the same
 * order: the difference between the two results is the cost of the drop-in library.
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "load.h"

#define BATCH 16
#define SILENCE_S 10.0
/* Longer than siwd needs for the requests of a round. */
#define SETTLE_US 1000

/* One end: a queue pair on a device, and memory from malloc. */
struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	union ibv_gid gid;
	char *memory;
};

static struct end sender, receiver;
static size_t bytes;
static int depth;

static void open_end(struct end *end, const char *name)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access };
	struct ibv_device **devices = ibv_get_device_list(NULL);
	size_t length;
	int n;

	if (!devices)
		die("ibv_get_device_list");
	for (n = 0; devices[n]; n++)
		if (!strcmp(ibv_get_device_name(devices[n]), name))
			end->context = ibv_open_device(devices[n]);
	ibv_free_device_list(devices);
	if (!end->context)
		die(name);
	end->pd = ibv_alloc_pd(end->context);
	end->cq = ibv_create_cq(end->context, depth, NULL, NULL, 0);
	/* Long enough that malloc takes fresh pages for it. */
	length = bytes * depth > 1 << 20 ? bytes * depth : 1 << 20;
	end->memory = malloc(length);
	if (!end->pd || !end->cq || !end->memory)
		die("cannot make the objects");
	memset(end->memory, 1, length);
	end->mr = ibv_reg_mr(end->pd, end->memory, length, access);
	if (!end->mr)
		die("ibv_reg_mr");
	init.send_cq = init.recv_cq = end->cq;
	init.cap = (struct ibv_qp_cap){ depth, 1, 1, 1, 0 };
	end->qp = ibv_create_qp(end->pd, &init);
	if (!end->qp || ibv_query_gid(end->context, 1, 0, &end->gid))
		die("ibv_create_qp");
	if (ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			  IBV_QP_ACCESS_FLAGS))
		die("to INIT");
}

static void connect_end(struct end *end, struct end *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = peer->qp->qp_num, .max_dest_rd_atomic = 1 };

	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1 };
	attr.ah_attr.grh.dgid = peer->gid;
	if (ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			  IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			  IBV_QP_MIN_RNR_TIMER))
		die("to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	if (ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			  IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		die("to RTS");
}

/* Posts a WRITE from the next slot. */
static void post_write(unsigned long number)
{
	size_t offset = number % depth * bytes;
	struct ibv_sge source = { (uintptr_t)sender.memory + offset, bytes, sender.mr->lkey };
	struct ibv_send_wr write = { .wr_id = number, .sg_list = &source, .num_sge = 1,
				     .opcode = IBV_WR_RDMA_WRITE,
				     .send_flags = IBV_SEND_SIGNALED }, *bad;

	write.wr.rdma.remote_addr = (uintptr_t)receiver.memory + offset;
	write.wr.rdma.rkey = receiver.mr->rkey;
	if (ibv_post_send(sender.qp, &write, &bad))
		die("ibv_post_send");
}

static void check(const struct ibv_wc *completion)
{
	if (completion->status) {
		fprintf(stderr, "completion: %s\n", ibv_wc_status_str(completion->status));
		exit(1);
	}
}

/* Polls until there are completions; takes at most `most`. */
static int await(struct ibv_wc *completions, int most)
{
	double begun = 0;
	int got, n;

	while (!(got = ibv_poll_cq(sender.cq, most, completions))) {
		if (!begun)
			begun = now();
		if (now() - begun > SILENCE_S) {
			fprintf(stderr, "no completion for %.0f s\n", SILENCE_S);
			exit(1);
		}
	}
	if (got < 0)
		die("ibv_poll_cq");
	for (n = 0; n < got; n++)
		check(&completions[n]);
	return got;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/*
 * The queue has room for all requests of a round, and their completions are present before the first
 * poll. siwd's worker shares the core and runs while this program sleeps, so siwd has no effect on
 * the time of a call: on another core it would contend for the queues' cache lines, depending on how
 * well it keeps up. A round with a late completion does not count.
 */
static void measure_cost(int rounds)
{
	double *post = calloc(rounds, sizeof *post), *poll = calloc(rounds, sizeof *poll);
	unsigned long posted = 0;
	int good = 0, tries, n;

	if (!post || !poll)
		die("calloc");
	for (tries = 0; good < rounds && tries < 10 * rounds; tries++) {
		struct ibv_wc completion;
		double begun = now();
		int missing = 0;

		for (n = 0; n < depth; n++)
			post_write(posted++);
		post[good] = (now() - begun) * 1e9 / depth;
		usleep(SETTLE_US);
		begun = now();
		for (n = 0; n < depth; n++) {
			if (ibv_poll_cq(sender.cq, 1, &completion) == 1)
				check(&completion);
			else
				missing++;
		}
		poll[good] = (now() - begun) * 1e9 / depth;
		good += !missing;
		for (; missing; missing--)
			await(&completion, 1);
	}
	if (good < rounds) {
		fprintf(stderr, "completions came late in most rounds\n");
		exit(1);
	}
	qsort(post, rounds, sizeof *post, compare);
	qsort(poll, rounds, sizeof *poll, compare);
	printf("{\"post_ns\":%.1f,\"poll_ns\":%.1f}\n", post[rounds / 2], poll[rounds / 2]);
}

static void measure_bandwidth(double seconds)
{
	struct ibv_wc completions[BATCH];
	unsigned long posted = 0, done = 0;
	double begun, passed;
	int got;

	while (posted < (unsigned long)depth)
		post_write(posted++);
	begun = now();
	do {
		got = await(completions, BATCH);
		done += got;
		while (got--)
			post_write(posted++);
	} while ((passed = now() - begun) < seconds);
	printf("{\"gbps\":%.4f}\n", done * bytes * 8e-9 / passed);
	while (done < posted)
		done += await(completions, BATCH);
}

int main(int argc, char **argv)
{
	struct ibv_wc completion;
	double last;

	if (argc != 5 || (bytes = strtoul(argv[2], NULL, 0)) < 1 || (depth = atoi(argv[3])) < 1 ||
	    (last = atof(argv[4])) <= 0) {
		fprintf(stderr, "usage: %s cost BYTES COUNT ROUNDS | bandwidth BYTES DEPTH SECONDS\n",
			argv[0]);
		return 2;
	}
	open_end(&sender, "siw0");
	open_end(&receiver, "siw1");
	connect_end(&sender, &receiver);
	connect_end(&receiver, &sender);
	/* The connection is fully established once a request has completed. */
	post_write(0);
	await(&completion, 1);
	if (!strcmp(argv[1], "cost"))
		measure_cost((int)last);
	else
		measure_bandwidth(last);
	return 0;
}
