/* Helpers of programs with two queue pairs in one process. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%d: %s: %s\n", (int)getpid(), what, strerror(errno));
		exit(1);
	}
}

/* Moves a queue pair from INIT to RTS, connected to `peer` on the device with this GID. */
static inline void connect_qp(struct ibv_qp *qp, struct ibv_qp *peer, union ibv_gid gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
				    .dest_qp_num = peer->qp_num, .max_dest_rd_atomic = 1 };

	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1 };
	attr.ah_attr.grh.dgid = gid;
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			      IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			      IBV_QP_MIN_RNR_TIMER), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

/* Creates two queue pairs with one completion queue and these rights, connected to each other. */
static inline void create_pair(struct ibv_context *context, struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_qp **qps,
			       int rights)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = rights };
	union ibv_gid gid;
	int n;

	expect(!ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
	for (n = 0; n < 2; n++)
		expect((qps[n] = ibv_create_qp(pd, &init)) &&
		       !ibv_modify_qp(qps[n], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				      IBV_QP_ACCESS_FLAGS), "a queue pair");
	connect_qp(qps[0], qps[1], gid);
	connect_qp(qps[1], qps[0], gid);
}

/* Runs an atomic operation on the first word of a region, and waits until it has succeeded. */
static inline void run_atomic(struct ibv_qp *qp, const struct ibv_mr *result, const struct ibv_mr *to,
			      enum ibv_wr_opcode opcode, uint64_t number, uint64_t swap)
{
	struct ibv_sge place = { (uintptr_t)result->addr, 8, result->lkey };
	struct ibv_send_wr wr = { .sg_list = &place, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	int got;

	wr.wr.atomic.remote_addr = (uintptr_t)to->addr;
	wr.wr.atomic.compare_add = number;
	wr.wr.atomic.swap = swap;
	wr.wr.atomic.rkey = to->rkey;
	expect(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
	while (!(got = ibv_poll_cq(qp->send_cq, 1, &wc)))
		;
	expect(got == 1 && !wc.status, ibv_wc_status_str(wc.status));
}
