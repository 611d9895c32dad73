/* Helpers of programs with two queue pairs in one process. */
#include <errno.h>
#include <infiniband/verbs.h>
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
