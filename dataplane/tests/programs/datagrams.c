/*
 * datagrams GID_INDEX: UD queue pairs of siw0 and siw1: states, address handles, datagrams by ibv_post_send and by
 * ibv_wr_*, completions of both kinds of queues, and refused calls.
 */
#include "connect.h"

#include <arpa/inet.h>

enum { QKEY = 0x11111111, OTHER_QKEY = 0x22222222, GRH = 40, LENGTH = 100, ROOM = 4096 };

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq_ex *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	union ibv_gid gid;
	char *memory;
};

static struct end ends[2];
static int gid_index;

static int to_state(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1, .qkey = QKEY };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask);
}

static void expect_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t qkey)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	expect(!ibv_query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_QKEY, &init), "ibv_query_qp");
	expect(attr.qp_state == state && qp->state == state, "the state");
	expect(attr.qkey == qkey && init.qp_type == IBV_QPT_UD, "Q_Key and type");
}

/* Each transition wants the attributes of the manual page. */
static void start(struct ibv_qp *qp)
{
	expect_state(qp, IBV_QPS_RESET, 0);
	expect(to_state(qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT) == EINVAL, "INIT without a Q_Key");
	expect(to_state(qp, IBV_QPS_RTR, 0) == EINVAL, "RESET to RTR");
	expect(!to_state(qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	expect(to_state(qp, IBV_QPS_RTR, IBV_QP_DEST_QPN) == EINVAL, "RTR with a peer");
	expect(!to_state(qp, IBV_QPS_RTR, 0), "to RTR");
	expect_state(qp, IBV_QPS_RTR, QKEY);
	expect(to_state(qp, IBV_QPS_RTS, 0) == EINVAL, "RTS without a PSN");
	expect(!to_state(qp, IBV_QPS_RTS, IBV_QP_SQ_PSN), "to RTS");
	expect_state(qp, IBV_QPS_RTS, QKEY);
}

static void make_end(struct end *end, struct ibv_device *device)
{
	struct ibv_cq_init_attr_ex cq = { .cqe = 32, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_UD, .sq_sig_all = 1, .cap = { 16, 16, 2, 2, 64 } };

	expect((end->context = ibv_open_device(device)) != NULL, "ibv_open_device");
	expect(!ibv_query_gid(end->context, 1, gid_index, &end->gid), "ibv_query_gid");
	expect((end->pd = ibv_alloc_pd(end->context)) != NULL, "ibv_alloc_pd");
	expect((end->cq = ibv_create_cq_ex(end->context, &cq)) != NULL, "ibv_create_cq_ex");
	expect((end->memory = calloc(2, ROOM)) != NULL, "calloc");
	expect((end->mr = ibv_reg_mr(end->pd, end->memory, 2 * ROOM, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(end->cq);
	init.pd = end->pd;
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
	expect(!ibv_create_qp_ex(end->context, &init) && errno == EOPNOTSUPP, "RDMA WRITE of datagrams");
	init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	expect((end->qp = ibv_create_qp_ex(end->context, &init)) != NULL, "ibv_create_qp_ex");
	start(end->qp);
}

static struct ibv_ah *make_handle(struct end *end, union ibv_gid gid)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
				    .grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 3, .traffic_class = 0x68 } };
	struct ibv_ah *ah = ibv_create_ah(end->pd, &attr);

	expect(ah != NULL, "ibv_create_ah");
	return ah;
}

static void post_receive(struct end *end)
{
	struct ibv_sge to = { (uintptr_t)end->memory, ROOM, end->mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 7, .sg_list = &to, .num_sge = 1 }, *bad;

	memset(end->memory, 0, ROOM);
	expect(!ibv_post_recv(end->qp, &receive, &bad), "ibv_post_recv");
}

static int post_plain(struct end *end, enum ibv_wr_opcode opcode, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey,
		      char letter)
{
	struct ibv_sge from = { (uintptr_t)end->memory + ROOM, LENGTH, end->mr->lkey };
	struct ibv_send_wr send = { .wr_id = 8, .sg_list = &from, .num_sge = 1, .opcode = opcode }, *bad = NULL;
	int status;

	memset(end->memory + ROOM, letter, LENGTH);
	send.imm_data = htonl(0x12345678);
	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = qpn;
	send.wr.ud.remote_qkey = qkey;
	status = ibv_post_send(end->qp, &send, &bad);
	expect(!status || bad == &send, "the refused request");
	return status;
}

/* The next completion. */
static struct ibv_wc take(struct end *end)
{
	struct ibv_wc wc;
	int found;

	while (!(found = ibv_poll_cq(ibv_cq_ex_to_cq(end->cq), 1, &wc)))
		;
	expect(found == 1, "ibv_poll_cq");
	expect(wc.status == IBV_WC_SUCCESS, ibv_wc_status_str(wc.status));
	expect(wc.qp_num == end->qp->qp_num, "qp_num");
	return wc;
}

static void expect_sent(struct end *end)
{
	struct ibv_wc wc = take(end);

	expect(wc.wr_id == 8 && wc.opcode == IBV_WC_SEND, "the completion of a SEND");
}

static void expect_data(const struct end *end, char letter)
{
	for (int n = 0; n < LENGTH; n++)
		expect(end->memory[GRH + n] == letter, "the data");
	expect(!end->memory[GRH + LENGTH], "no more data");
}

/* RoCEv2 over IPv4 or IPv6, in the place of the service level as with mlx5's adapters: UCX reads it. */
static int packet_kind(void)
{
	return gid_index == 0 ? 10 : 9;
}

static void expect_received(struct end *end, uint32_t sender, unsigned flags, char letter, struct ibv_wc *wc)
{
	*wc = take(end);
	expect(wc->wr_id == 7 && wc->opcode == IBV_WC_RECV, "the completion of a receive");
	expect(wc->byte_len == GRH + LENGTH, "byte_len");
	expect(wc->src_qp == sender, "src_qp");
	expect(wc->wc_flags == flags, "wc_flags");
	expect(!(flags & IBV_WC_WITH_IMM) || wc->imm_data == htonl(0x12345678), "imm_data");
	expect(!wc->slid && !wc->pkey_index && !wc->dlid_path_bits, "fields of InfiniBand's links");
	expect(wc->sl == packet_kind(), "the kind of packet");
	expect_data(end, letter);
}

/* The GRH area names sender and receiver. */
static void check_grh(const struct end *at, const struct end *from)
{
	struct ibv_grh grh;

	memcpy(&grh, at->memory, sizeof grh);
	if (gid_index == 0) {
		expect(!memcmp(at->memory + 32, from->gid.raw + 12, 4), "the source address");
		expect(!memcmp(at->memory + 36, at->gid.raw + 12, 4), "the destination address");
		expect(at->memory[28] == 3 && at->memory[21] == 0x68, "TTL and traffic class");
	} else {
		expect(!memcmp(&grh.sgid, &from->gid, 16) && !memcmp(&grh.dgid, &at->gid, 16), "the addresses");
		expect(grh.hop_limit == 3 && ntohl(grh.version_tclass_flow) >> 20 == 0x668, "hop limit and class");
	}
}

static void post_by_calls(struct end *end, struct ibv_ah *ah, uint32_t qpn, char letter)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(end->qp);
	char data[LENGTH];

	memset(data, letter, LENGTH);
	memcpy(end->memory + ROOM, data, LENGTH);
	ibv_wr_start(qp);
	qp->wr_id = 8;
	qp->wr_flags = 0;
	ibv_wr_send_imm(qp, htonl(0x12345678));
	ibv_wr_set_ud_addr(qp, ah, qpn, QKEY);
	ibv_wr_set_sge(qp, end->mr->lkey, (uintptr_t)end->memory + ROOM, LENGTH);
	expect(!ibv_wr_complete(qp), "ibv_wr_complete");

	/* Without a destination, and without a handle. */
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, data, 8);
	expect(ibv_wr_complete(qp) == EINVAL, "no destination");
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_ud_addr(qp, NULL, qpn, QKEY);
	ibv_wr_set_inline_data(qp, data, 8);
	expect(ibv_wr_complete(qp) == EINVAL, "no handle");
}

/* Reads a completion of a receive field by field. */
static void expect_received_by_calls(struct end *end, uint32_t sender, char letter)
{
	struct ibv_poll_cq_attr attr = { 0 };
	int status;

	while ((status = ibv_start_poll(end->cq, &attr)) == ENOENT)
		;
	expect(!status && end->cq->status == IBV_WC_SUCCESS && end->cq->wr_id == 7, "ibv_start_poll");
	expect(ibv_wc_read_opcode(end->cq) == IBV_WC_RECV, "opcode");
	expect(ibv_wc_read_byte_len(end->cq) == GRH + LENGTH, "byte_len");
	expect(ibv_wc_read_src_qp(end->cq) == sender, "src_qp");
	expect(ibv_wc_read_wc_flags(end->cq) == (IBV_WC_GRH | IBV_WC_WITH_IMM), "wc_flags");
	expect(ibv_wc_read_imm_data(end->cq) == htonl(0x12345678), "imm_data");
	expect(!ibv_wc_read_slid(end->cq) && !ibv_wc_read_dlid_path_bits(end->cq), "fields of InfiniBand's links");
	expect(ibv_wc_read_sl(end->cq) == packet_kind(), "the kind of packet");
	ibv_end_poll(end->cq);
	expect_data(end, letter);
}

/* There and back, by a handle from the completion; and to the sender itself. */
static void exchange(void)
{
	struct end *near = ends, *far = ends + 1;
	struct ibv_ah *there = make_handle(near, far->gid), *back, *own;
	struct ibv_ah_attr attr;
	struct ibv_wc wc;

	post_receive(far);
	expect(!post_plain(near, IBV_WR_SEND_WITH_IMM, there, far->qp->qp_num, QKEY, 'a'), "ibv_post_send");
	expect_sent(near);
	expect_received(far, near->qp->qp_num, IBV_WC_GRH | IBV_WC_WITH_IMM, 'a', &wc);
	check_grh(far, near);

	expect(!ibv_init_ah_from_wc(far->context, 1, &wc, (struct ibv_grh *)far->memory, &attr), "ibv_init_ah_from_wc");
	expect(attr.is_global && attr.port_num == 1 && attr.grh.sgid_index == gid_index, "the attributes");
	expect(!memcmp(&attr.grh.dgid, &near->gid, 16) && attr.grh.traffic_class == 0x68, "the way back");
	expect(ibv_init_ah_from_wc(far->context, 2, &wc, (struct ibv_grh *)far->memory, &attr), "another port");
	back = ibv_create_ah_from_wc(far->pd, &wc, (struct ibv_grh *)far->memory, 1);
	expect(back != NULL, "ibv_create_ah_from_wc");
	post_receive(near);
	post_by_calls(far, back, wc.src_qp, 'b');
	expect_sent(far);
	expect_received_by_calls(near, far->qp->qp_num, 'b');

	own = make_handle(near, near->gid);
	post_receive(near);
	expect(!post_plain(near, IBV_WR_SEND, own, near->qp->qp_num, QKEY, 'c'), "to itself");
	wc = take(near);
	if (wc.wr_id == 8)
		expect_received(near, near->qp->qp_num, IBV_WC_GRH, 'c', &wc);
	else
		expect_sent(near);
	expect_data(near, 'c');

	/* A datagram with a wrong Q_Key, or to another number, is lost; bit 31 stands for the own Q_Key. */
	post_receive(far);
	expect(!post_plain(near, IBV_WR_SEND, there, far->qp->qp_num, OTHER_QKEY, 'd'), "another Q_Key");
	expect_sent(near);
	expect(!post_plain(near, IBV_WR_SEND, there, 0xfffff0, QKEY, 'e'), "another number");
	expect_sent(near);
	expect(!post_plain(near, IBV_WR_SEND, there, far->qp->qp_num, 0x80000000u, 'f'), "the own Q_Key");
	expect_sent(near);
	expect_received(far, near->qp->qp_num, IBV_WC_GRH, 'f', &wc);

	/* The receiver changes its Q_Key. */
	struct ibv_qp_attr other = { .qp_state = IBV_QPS_RTS, .qkey = OTHER_QKEY };
	expect(!ibv_modify_qp(far->qp, &other, IBV_QP_STATE | IBV_QP_QKEY), "another Q_Key");
	expect_state(far->qp, IBV_QPS_RTS, OTHER_QKEY);
	post_receive(far);
	expect(!post_plain(near, IBV_WR_SEND, there, far->qp->qp_num, QKEY, 'g'), "the old Q_Key");
	expect_sent(near);
	expect(!post_plain(near, IBV_WR_SEND, there, far->qp->qp_num, OTHER_QKEY, 'h'), "the new Q_Key");
	expect_sent(near);
	expect_received(far, near->qp->qp_num, IBV_WC_GRH, 'h', &wc);

	expect(ibv_dealloc_pd(near->pd) == EBUSY, "a domain in use");
	expect(!ibv_destroy_ah(there) && !ibv_destroy_ah(back) && !ibv_destroy_ah(own), "ibv_destroy_ah");
}

static void check_refusals(void)
{
	struct end *near = ends, *far = ends + 1;
	struct ibv_ah *of_other = make_handle(far, near->gid), *own = make_handle(near, far->gid);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = gid_index } };

	expect(post_plain(near, IBV_WR_SEND, NULL, 5, QKEY, 'x') == EINVAL, "no handle");
	expect(post_plain(near, IBV_WR_SEND, of_other, 5, QKEY, 'x') == EINVAL, "a handle of another domain");
	expect(post_plain(near, IBV_WR_RDMA_WRITE, own, 5, QKEY, 'x') == EINVAL, "RDMA WRITE");
	expect(post_plain(near, IBV_WR_ATOMIC_FETCH_AND_ADD, own, 5, QKEY, 'x') == EINVAL, "an atomic");
	inet_pton(AF_INET6, gid_index ? "::ffff:10.77.0.2" : "fd77::2", &attr.grh.dgid);
	expect(!ibv_create_ah(near->pd, &attr) && errno == EINVAL, "GIDs of different families");
	inet_pton(AF_INET6, gid_index ? "2001:db8::1" : "::ffff:192.0.2.1", &attr.grh.dgid);
	expect(!ibv_create_ah(near->pd, &attr) && errno == EHOSTUNREACH, "no route");
	expect(!ibv_destroy_ah(own) && !ibv_destroy_ah(of_other), "ibv_destroy_ah");
}

/* RESET forgets requests and Q_Key; a queue pair in the error state flushes. */
static void check_ends(void)
{
	struct end *end = ends;
	struct ibv_wc wc;

	expect(!to_state(end->qp, IBV_QPS_RESET, 0), "to RESET");
	expect(!to_state(end->qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	post_receive(end);
	expect(!to_state(end->qp, IBV_QPS_RTR, 0), "to RTR");
	expect(!to_state(end->qp, IBV_QPS_RTS, IBV_QP_SQ_PSN), "to RTS");
	expect(!to_state(end->qp, IBV_QPS_ERR, 0), "to ERR");
	while (!ibv_poll_cq(ibv_cq_ex_to_cq(end->cq), 1, &wc))
		;
	expect(wc.wr_id == 7 && wc.status == IBV_WC_WR_FLUSH_ERR, "a flushed receive");
}

int main(int count, char **arguments)
{
	int devices;
	struct ibv_device **list = ibv_get_device_list(&devices);

	expect(count == 2 && list && devices == 2, "two devices");
	gid_index = atoi(arguments[1]);
	for (int n = 0; n < 2; n++)
		make_end(ends + n, list[n]);
	exchange();
	check_refusals();
	check_ends();
	for (int n = 0; n < 2; n++) {
		struct end *end = ends + n;

		expect(!ibv_destroy_qp(end->qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(end->cq)), "queues");
		expect(!ibv_dereg_mr(end->mr) && !ibv_dealloc_pd(end->pd) && !ibv_close_device(end->context), "the end");
		free(end->memory);
	}
	ibv_free_device_list(list);
	printf("done\n");
	return 0;
}
