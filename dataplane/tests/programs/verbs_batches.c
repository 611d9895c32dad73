/*
 * Requests built between ibv_wr_start(3) and ibv_wr_complete(3) are posted all or not at all: a batch
 * that does not fit, one that ends with an invalid request, and an aborted one leave nothing in the
 * queue.
 */
#include "connect.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cqs[2];
static struct ibv_qp *qps[2];
static struct ibv_mr *mr;
static union ibv_gid gid;
static uint64_t words[16];

static void create_qp(int n)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1, .send_ops_flags = IBV_QP_EX_WITH_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	cqs[n] = ibv_create_cq(context, 64, NULL, NULL, 0);
	init.pd = pd;
	init.send_cq = init.recv_cq = cqs[n];
	init.cap = (struct ibv_qp_cap){ 8, 16, 1, 1, 0 };
	qps[n] = ibv_create_qp_ex(context, &init);
	expect(qps[n] && !ibv_modify_qp(qps[n], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX |
					IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "a queue pair");
}

/* Builds `count` SENDs, numbered from `first`. */
static void build_sends(struct ibv_qp_ex *qp, int first, int count)
{
	int n;

	for (n = 0; n < count; n++) {
		qp->wr_id = first + n;
		qp->wr_flags = 0;
		ibv_wr_send(qp);
		ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)words, sizeof words[0]);
	}
}

/* Waits for the next completion of an end. */
static uint64_t take_completion(int end)
{
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cqs[end], 1, &wc)))
		;
	expect(got == 1 && !wc.status, "completion");
	return wc.wr_id;
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_qp_ex *qp;
	struct ibv_wc wc;
	int room, round, n;

	expect(devices && (context = ibv_open_device(devices[0])), "ibv_open_device");
	pd = ibv_alloc_pd(context);
	expect(pd && !ibv_query_gid(context, 1, 0, &gid), "a protection domain");
	mr = ibv_reg_mr(pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE);
	expect(mr != NULL, "ibv_reg_mr");
	for (n = 0; n < 2; n++)
		create_qp(n);
	for (n = 0; n < 2; n++)
		connect_qp(qps[n], qps[!n], gid);
	qp = ibv_qp_to_qp_ex(qps[0]);
	expect(!ibv_query_qp(qps[0], &attr, IBV_QP_CAP, &init), "ibv_query_qp");
	room = attr.cap.max_send_wr;
	for (round = 0; round < 20; round++) {
		struct ibv_sge place = { (uintptr_t)&words[8], 8, mr->lkey };
		struct ibv_recv_wr receive = { .wr_id = 7, .sg_list = &place, .num_sge = 1 }, *bad;

		/* One request more than fits. */
		ibv_wr_start(qp);
		build_sends(qp, 100, room + 1);
		expect(ibv_wr_complete(qp) == ENOMEM, "a batch that does not fit");
		/* An invalid request after valid ones: undefined flags. */
		ibv_wr_start(qp);
		build_sends(qp, 200, 3);
		qp->wr_flags = 1u << 30;
		ibv_wr_send(qp);
		expect(ibv_wr_complete(qp) == EINVAL, "a batch with an invalid request");
		ibv_wr_start(qp);
		build_sends(qp, 300, 3);
		ibv_wr_abort(qp);
		expect(!ibv_poll_cq(cqs[0], 1, &wc) && !ibv_poll_cq(cqs[1], 1, &wc), "nothing is posted");

		/* The next batch arrives first and fits completely. */
		for (n = 0; n < 2; n++)
			expect(!ibv_post_recv(qps[1], &receive, &bad), "ibv_post_recv");
		words[0] = round;
		ibv_wr_start(qp);
		build_sends(qp, round, 2);
		expect(!ibv_wr_complete(qp), "ibv_wr_complete");
		expect(take_completion(0) == (uint64_t)round && take_completion(0) == round + 1u,
		       "the numbers of the batch");
		expect(take_completion(1) == 7 && take_completion(1) == 7 &&
		       words[8] == (uint64_t)round, "what arrives");
	}
	printf("all or nothing\n");
	return 0;
}
