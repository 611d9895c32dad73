/*
 * A queue pair moved to RTR and RTS with its own number and GID: SEND, RDMA WRITE with immediate, RDMA
 * READ and atomics by libibverbs, an error, and a reset after which it is connected again.
 */
#include "connect.h"

#include <stdint.h>

enum { HALF = 4096, RECEIVES = 4 };

static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static union ibv_gid gid;
static uint64_t memory[2 * HALF / 8];

static void to_init(void)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC,
	};

	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			      IBV_QP_ACCESS_FLAGS), "to INIT");
}

static void post_receive(uint64_t wr_id)
{
	struct ibv_sge place = { (uintptr_t)memory + HALF, HALF, mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = wr_id, .sg_list = &place, .num_sge = 1 }, *bad;

	expect(!ibv_post_recv(qp, &receive, &bad), "ibv_post_recv");
}

static void post(enum ibv_wr_opcode opcode, uint32_t length, uint32_t rkey)
{
	struct ibv_sge place = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_send_wr send = { .wr_id = 100, .sg_list = &place, .num_sge = 1,
				    .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;

	send.imm_data = 0x01020304;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		send.wr.atomic.remote_addr = (uintptr_t)memory + HALF;
		send.wr.atomic.rkey = rkey;
		send.wr.atomic.compare_add = 5;
	} else {
		send.wr.rdma.remote_addr = (uintptr_t)memory + HALF;
		send.wr.rdma.rkey = rkey;
	}
	expect(!ibv_post_send(qp, &send, &bad), "ibv_post_send");
}

static struct ibv_wc take_completion(void)
{
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		;
	expect(got == 1 && wc.qp_num == qp->qp_num, "ibv_poll_cq");
	return wc;
}

/* Takes the completions of a request and, if it needs one, of a receive. */
static void complete(int with_receive, enum ibv_wc_opcode received)
{
	int n;

	for (n = 0; n <= with_receive; n++) {
		struct ibv_wc wc = take_completion();

		expect(wc.status == IBV_WC_SUCCESS, ibv_wc_status_str(wc.status));
		if (wc.wr_id != 100)
			expect(wc.opcode == received, "a receive");
	}
}

static void use_all(void)
{
	memset(memory, 0x5a, HALF);
	memset(memory + HALF / 8, 0, HALF);
	post_receive(1);
	post(IBV_WR_SEND, 1000, 0);
	complete(1, IBV_WC_RECV);
	expect(!memcmp(memory, memory + HALF / 8, 1000), "the bytes of the SEND");
	post_receive(2);
	post(IBV_WR_RDMA_WRITE_WITH_IMM, HALF, mr->rkey);
	complete(1, IBV_WC_RECV_RDMA_WITH_IMM);
	expect(!memcmp(memory, memory + HALF / 8, HALF), "the bytes of the WRITE");
	memset(memory + HALF / 8, 0x33, HALF);
	post(IBV_WR_RDMA_READ, HALF, mr->rkey);
	complete(0, 0);
	expect(!memcmp(memory, memory + HALF / 8, HALF), "the bytes of the READ");
	memory[HALF / 8] = 37;
	post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, mr->rkey);
	complete(0, 0);
	expect(memory[0] == 37 && memory[HALF / 8] == 42, "the sum");
}

/* A wrong key fails its request; the receives are flushed. */
static void use_wrong_key(void)
{
	int n, flushed = 0;

	for (n = 0; n < RECEIVES; n++)
		post_receive(n);
	post(IBV_WR_RDMA_WRITE, 8, mr->rkey ^ 0x100);
	for (n = 0; n <= RECEIVES; n++) {
		struct ibv_wc wc = take_completion();

		flushed += wc.status == IBV_WC_WR_FLUSH_ERR;
		if (wc.wr_id == 100)
			expect(wc.status == IBV_WC_REM_ACCESS_ERR, ibv_wc_status_str(wc.status));
	}
	expect(flushed == RECEIVES, "the receives are flushed");
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_pd *pd;
	int round;

	expect(devices && devices[0] && (context = ibv_open_device(devices[0])), "a device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	expect(pd && cq && !ibv_query_gid(context, 1, 0, &gid), "a completion queue");
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE |
			IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	init.send_cq = init.recv_cq = cq;
	init.cap = (struct ibv_qp_cap){ 16, 16, 1, 1, 0 };
	expect(mr && (qp = ibv_create_qp(pd, &init)), "a queue pair");
	for (round = 0; round < 3; round++) {
		to_init();
		connect_qp(qp, qp, gid);
		use_all();
		use_wrong_key();
		expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RESET");
	}
	/* It is destroyed with requests outstanding. */
	to_init();
	connect_qp(qp, qp, gid);
	post(IBV_WR_SEND, HALF, 0);
	post(IBV_WR_RDMA_READ, HALF, mr->rkey);
	expect(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq), "ibv_destroy_qp");
	expect(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context), "the end");
	ibv_free_device_list(devices);
	puts("done");
	return 0;
}
