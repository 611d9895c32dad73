/* A SEND between two queue pairs of the first device. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char memory[2][4096] __attribute__((aligned(4096)));

static void require(int holds, const char *what)
{
	if (!holds) {
		perror(what);
		exit(1);
	}
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	require(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				     IBV_QP_ACCESS_FLAGS), "ibv_create_qp");
	return qp;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *peer, const union ibv_gid *gid)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *gid, .hop_limit = 64 } },
	};

	require(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			       IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			       IBV_QP_MIN_RNR_TIMER), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	require(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			       IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	require(devices && devices[0], "no RDMA device");
	struct ibv_context *context = ibv_open_device(devices[0]);
	require(context != NULL, "ibv_open_device");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	union ibv_gid gid;

	require(pd && cq && mr && !ibv_query_gid(context, 1, 0, &gid), "objects");
	struct ibv_qp *qps[2] = { create_qp(pd, cq), create_qp(pd, cq) };
	connect_qp(qps[0], qps[1], &gid);
	connect_qp(qps[1], qps[0], &gid);

	strcpy(memory[0], "hello");
	struct ibv_sge to = { (uintptr_t)memory[1], sizeof memory[1], mr->lkey };
	struct ibv_sge from = { (uintptr_t)memory[0], 6, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &to, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	require(!ibv_post_recv(qps[1], &receive, &bad_receive), "ibv_post_recv");
	require(!ibv_post_send(qps[0], &send, &bad_send), "ibv_post_send");
	for (int done = 0; done < 2;) {
		struct ibv_wc completion;
		int count = ibv_poll_cq(cq, 1, &completion);

		require(count >= 0 && (count == 0 || completion.status == IBV_WC_SUCCESS), "completion");
		done += count;
	}
	require(!strcmp(memory[1], "hello"), "the message");
	printf("%s: ok\n", ibv_get_device_name(devices[0]));
	return 0;
}
