/* ibv_rereg_mr(3) of access rights keeps the keys, which peers know: atomics work, fail and work again with the
 * same key, on a queue pair that is connected with itself. */
#include "connect.h"

#include <stdint.h>

static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *local, *remote;
static union ibv_gid gid;
static _Alignas(4096) uint64_t memory[2][512];

static void connect_again(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RESET");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1,
				     .qp_access_flags = IBV_ACCESS_REMOTE_ATOMIC };
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			      IBV_QP_ACCESS_FLAGS), "to INIT");
	connect_qp(qp, qp, gid);
}

static enum ibv_wc_status fetch_add(uint32_t rkey)
{
	struct ibv_sge place = { (uintptr_t)memory[0], 8, local->lkey };
	struct ibv_send_wr send = { .sg_list = &place, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
				    .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD }, *bad;
	struct ibv_wc wc;
	int got;

	send.wr.atomic.remote_addr = (uintptr_t)memory[1];
	send.wr.atomic.rkey = rkey;
	send.wr.atomic.compare_add = 1;
	expect(!ibv_post_send(qp, &send, &bad), "ibv_post_send");
	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		;
	expect(got == 1, "ibv_poll_cq");
	return wc.status;
}

static void change(int access)
{
	uint32_t lkey = remote->lkey, rkey = remote->rkey;

	expect(!ibv_rereg_mr(remote, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, access), "ibv_rereg_mr");
	expect(remote->lkey == lkey && remote->rkey == rkey, "the keys stay");
}

int main(void)
{
	enum { WRITE = IBV_ACCESS_LOCAL_WRITE, ATOMIC = WRITE | IBV_ACCESS_REMOTE_ATOMIC };
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_pd *pd;

	expect(devices && devices[0] && (context = ibv_open_device(devices[0])), "a device");
	pd = ibv_alloc_pd(context);
	init.send_cq = init.recv_cq = cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	expect(pd && cq && !ibv_query_gid(context, 1, 0, &gid), "a completion queue");
	expect((qp = ibv_create_qp(pd, &init)) != NULL, "a queue pair");
	local = ibv_reg_mr(pd, memory[0], sizeof memory[0], WRITE);
	remote = ibv_reg_mr(pd, memory[1], sizeof memory[1], ATOMIC);
	expect(local && remote, "regions");
	connect_again();
	expect(fetch_add(remote->rkey) == IBV_WC_SUCCESS && memory[1][0] == 1, "an atomic");
	change(WRITE);
	change(ATOMIC);
	expect(fetch_add(remote->rkey) == IBV_WC_SUCCESS && memory[1][0] == 2, "the right is back");
	change(0);
	expect(fetch_add(remote->rkey) == IBV_WC_REM_ACCESS_ERR && memory[1][0] == 2, "no right");
	change(ATOMIC);
	connect_again();
	expect(fetch_add(remote->rkey) == IBV_WC_SUCCESS && memory[1][0] == 3, "both rights at once");
	expect(!ibv_destroy_qp(qp) && !ibv_dereg_mr(remote) && !ibv_dereg_mr(local), "the end");
	expect(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context), "the end");
	ibv_free_device_list(devices);
	puts("done");
	return 0;
}
