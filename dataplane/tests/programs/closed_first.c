/* A device that is closed before its objects are destroyed, in several orders, as a garbage collector may do it
 * (pyverbs): every call succeeds, and no freed memory is used. */
#include "connect.h"

static void use_heap(void)
{
	void *blocks[512];
	int at;

	for (at = 0; at < 512; at++)
		memset(blocks[at] = malloc(16 + at * 8), 0x41, 16 + at * 8);
	for (at = 0; at < 512; at++)
		free(blocks[at]);
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	static char memory[4096];
	int round;

	expect(devices && devices[0], "a device");
	for (round = 0; round < 8; round++) {
		struct ibv_context *context = ibv_open_device(devices[0]);
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
		struct ibv_srq_init_attr shared = { .attr = { 4, 1, 0 } };

		expect(context != NULL, "ibv_open_device");
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
		struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, channel, 0);
		struct ibv_cq *other = ibv_create_cq(context, 8, NULL, NULL, 0);
		struct ibv_pd *pd = ibv_alloc_pd(context);
		expect(channel && cq && other && pd, "objects");
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
		struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
		struct ibv_srq *srq = ibv_create_srq(pd, &shared);
		init.send_cq = init.recv_cq = cq;
		struct ibv_qp *qp = ibv_create_qp(pd, &init);
		expect(mr && mw && srq && qp, "objects");
		if (round & 1)
			expect(!ibv_destroy_qp(qp), "ibv_destroy_qp");
		expect(!ibv_close_device(context), "ibv_close_device");
		use_heap();
		if (round & 2)
			expect(!ibv_destroy_cq(other), "ibv_destroy_cq");
		if (!(round & 1))
			expect(!ibv_destroy_qp(qp), "ibv_destroy_qp");
		use_heap();
		expect(!ibv_dereg_mr(mr) && !ibv_dealloc_mw(mw) && !ibv_destroy_srq(srq), "regions");
		if (round & 4)
			expect(!ibv_dealloc_pd(pd), "ibv_dealloc_pd");
		use_heap();
		expect(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel), "ibv_destroy_cq");
		if (!(round & 4))
			expect(!ibv_dealloc_pd(pd), "ibv_dealloc_pd");
		if (!(round & 2))
			expect(!ibv_destroy_cq(other), "ibv_destroy_cq");
	}
	ibv_free_device_list(devices);
	puts("done");
	return 0;
}
