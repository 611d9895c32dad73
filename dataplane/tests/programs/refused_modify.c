/*
 * ibv_modify_qp(3): a call that fails changes nothing; IBV_EVENT_SQ_DRAINED comes only if the program asks for it;
 * an empty inline element needs no address.
 */
#include <poll.h>
#include "connect.h"

#define TO_RTR (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | \
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define TO_RTS (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | \
		IBV_QP_MAX_QP_RD_ATOMIC)

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (int i = 0; list && list[i] && !context; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	expect(context != NULL, "device");
	return context;
}

static struct ibv_qp_attr query(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	expect(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), "query");
	return attr;
}

/* iWARP devices create queue pairs in INIT, others in RESET. */
static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

	if (qp->state == IBV_QPS_RESET)
		expect(!ibv_modify_qp(qp, &attr, mask), "to INIT");
}

/* Makes a call that has to fail, and compares the attributes. */
static void refuse(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask, const char *what)
{
	struct ibv_qp_attr before = query(qp), after;
	enum ibv_qp_state state = qp->state;

	expect(ibv_modify_qp(qp, &attr, mask) != 0, what);
	after = query(qp);
	expect(!memcmp(&before, &after, sizeof(before)), what);
	expect(qp->state == state, what);
}

/* Number of SQ_DRAINED events that are pending. */
static int drained_events(struct ibv_context *context)
{
	struct pollfd readable = { .fd = context->async_fd, .events = POLLIN };
	struct ibv_async_event event;
	int count = 0;

	while (poll(&readable, 1, 0) > 0 && !ibv_get_async_event(context, &event)) {
		count += event.event_type == IBV_EVENT_SQ_DRAINED;
		ibv_ack_async_event(&event);
	}
	return count;
}

/* Drains the send queue, and waits for the end of the drain. */
static void drain(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask)
{
	attr.qp_state = IBV_QPS_SQD;
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask), "to SQD");
	while (query(qp).sq_draining)
		;
	attr.qp_state = IBV_QPS_RTS;
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "SQD to RTS");
}

int main(void)
{
	struct ibv_context *context = open_device("siw0");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					 .cap = { 4, 4, 2, 2, 16 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init), *peer = ibv_create_qp(pd, &init);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = 7, .retry_cnt = 5, .rnr_retry = 3 };
	union ibv_gid gid;

	expect(qp && peer && !ibv_query_gid(context, 1, 0, &gid), "objects");
	to_init(qp);
	to_init(peer);

	refuse(qp, attr, TO_RTS, "INIT to RTS");
	attr.cur_qp_state = IBV_QPS_RTR;
	attr.qp_state = IBV_QPS_INIT;
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	refuse(qp, attr, IBV_QP_STATE | IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS, "a wrong current state");
	attr.port_num = 9;
	refuse(qp, attr, IBV_QP_PORT | IBV_QP_TIMEOUT, "a port that does not exist");

	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
				     .max_dest_rd_atomic = 1, .min_rnr_timer = 3 };
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = 77 } };
	refuse(qp, attr, TO_RTR, "an unknown GID index");
	attr.ah_attr.grh.sgid_index = 0;
	attr.ah_attr.port_num = 2;
	refuse(qp, attr, TO_RTR, "an address vector of another port");
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid.raw[12] = 203;
	refuse(qp, attr, TO_RTR, "no route");
	attr.ah_attr.grh.dgid = gid;
	refuse(qp, attr, TO_RTR & ~IBV_QP_RQ_PSN, "a missing attribute");

	connect_qp(qp, peer, gid);
	connect_qp(peer, qp, gid);

	/* An empty element without an address, alone and among others. */
	struct ibv_sge elements[2] = { { 0 }, { (uintptr_t)"x", 1, 0 } };
	char memory[16];
	struct ibv_mr *region = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge target = { (uintptr_t)memory, sizeof(memory), region ? region->lkey : 0 };
	struct ibv_recv_wr receive = { .sg_list = &target, .num_sge = 1 }, *bad_receive;

	for (int count = 1; count <= 2; count++) {
		struct ibv_send_wr send = { .sg_list = elements, .num_sge = count, .opcode = IBV_WR_SEND,
					    .send_flags = IBV_SEND_INLINE }, *bad_send;
		struct ibv_wc completion;
		int completed = 0;

		expect(region && !ibv_post_recv(peer, &receive, &bad_receive), "receive");
		expect(!ibv_post_send(qp, &send, &bad_send), "send");
		while (completed < 2) {
			int polled = ibv_poll_cq(cq, 1, &completion);

			expect(polled >= 0 && (polled == 0 || completion.status == IBV_WC_SUCCESS), "completion");
			if (polled && completion.opcode & IBV_WC_RECV)
				expect(completion.byte_len == (unsigned)count - 1, "length");
			completed += polled;
		}
	}

	/* The messages have shown that the connection is established, which changes attributes too. */
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .min_rnr_timer = 9 };
	refuse(qp, attr, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER, "RTS to INIT");

	/* The reply to a later query follows the event. */
	attr = (struct ibv_qp_attr){ 0 };
	drain(qp, attr, 0);
	drain(qp, attr, IBV_QP_EN_SQD_ASYNC_NOTIFY);
	query(qp);
	expect(drained_events(context) == 0, "no event that was not asked for");
	attr.en_sqd_async_notify = 1;
	drain(qp, attr, IBV_QP_EN_SQD_ASYNC_NOTIFY);
	struct pollfd readable = { .fd = context->async_fd, .events = POLLIN };
	expect(poll(&readable, 1, 60000) == 1, "event");
	expect(drained_events(context) == 1, "one event");
	puts("done");
	return 0;
}
