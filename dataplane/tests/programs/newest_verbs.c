/*
 * The verbs of rdma-core 58 to 65, looked up by name because the distribution's header may be older:
 * ibv_reg_mr_ex(3), ibv_query_port_speed(3), and completion counters of a queue pair connected with
 * itself, which count without any poll of the completion queue.
 */
#define _GNU_SOURCE
#include "connect.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>

enum { HALF = 4096, BATCH = 5 };
enum { OP_SEND = 1, OP_RECV = 2, OP_READ = 4, OP_REMOTE_READ = 8, OP_WRITE = 16 };

struct counter { struct ibv_context *context; uint32_t handle; };
struct counter_init { uint32_t comp_mask, type, flags; };
struct attach_attr { uint32_t comp_mask, op_mask; };
struct caps { uint64_t max_value; uint32_t max_counters, ops; };
struct mr_init {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};

static int (*query_caps)(struct ibv_context *, struct caps *, size_t);
static struct counter *(*create_counter)(struct ibv_context *, struct counter_init *);
static int (*destroy_counter)(struct counter *);
static int (*set_count)(struct counter *, uint64_t), (*set_errors)(struct counter *, uint64_t);
static int (*add_count)(struct counter *, uint64_t), (*add_errors)(struct counter *, uint64_t);
static int (*read_count)(struct counter *, uint64_t *), (*read_errors)(struct counter *, uint64_t *);
static int (*attach)(struct ibv_qp *, struct counter *, struct attach_attr *);

static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static union ibv_gid gid;
static uint64_t memory[2 * HALF / 8];

static void *find(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);

	expect(found != NULL, name);
	return found;
}

static struct counter *new_counter(void)
{
	struct counter_init init = { 0 };
	struct counter *counter = create_counter(context, &init);

	expect(counter && counter->context == context, "a counter");
	return counter;
}

static int attach_ops(struct counter *counter, uint32_t ops)
{
	struct attach_attr attr = { 0, ops };

	return attach(qp, counter, &attr);
}

static uint64_t count(struct counter *counter)
{
	uint64_t value = ~0ull;

	expect(!read_count(counter, &value), "ibv_read_comp_cntr");
	return value;
}

static uint64_t errors(struct counter *counter)
{
	uint64_t value = ~0ull;

	expect(!read_errors(counter, &value), "ibv_read_err_comp_cntr");
	return value;
}

/* Waits without touching the completion queue. */
static void await_count(struct counter *counter, uint64_t value)
{
	while (count(counter) < value)
		;
	expect(count(counter) == value && errors(counter) == 0, "a count");
}

static void to_init(void)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};

	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			      IBV_QP_ACCESS_FLAGS), "to INIT");
}

static void post_receive(void)
{
	struct ibv_sge place = { (uintptr_t)memory + HALF, HALF, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &place, .num_sge = 1 }, *bad;

	expect(!ibv_post_recv(qp, &receive, &bad), "ibv_post_recv");
}

static void post(enum ibv_wr_opcode opcode, uint32_t rkey)
{
	struct ibv_sge place = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_send_wr send = { .sg_list = &place, .num_sge = 1, .opcode = opcode }, *bad;

	send.wr.rdma.remote_addr = (uintptr_t)memory + HALF;
	send.wr.rdma.rkey = rkey;
	expect(!ibv_post_send(qp, &send, &bad), "ibv_post_send");
}

static void register_memory(struct ibv_pd *pd)
{
	struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_init *) = find("ibv_reg_mr_ex");
	struct mr_init init = {
		.length = sizeof memory, .addr = memory, .comp_mask = 2, .fd = -1,
		.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};

	mr = reg_mr_ex(pd, &init);
	expect(mr && mr->addr == memory && mr->length == sizeof memory, "ibv_reg_mr_ex");
	init.comp_mask = 1;
	expect(!reg_mr_ex(pd, &init) && errno == EINVAL, "without an address");
	init.comp_mask = 4 | 8;
	expect(!reg_mr_ex(pd, &init) && errno == EOPNOTSUPP, "a dmabuf");
	init.comp_mask = 2 | 16;
	expect(!reg_mr_ex(pd, &init) && errno == EOPNOTSUPP, "a DMA handle");
	init.comp_mask = 2 | 1 << 20;
	expect(!reg_mr_ex(pd, &init) && errno == EOPNOTSUPP, "an unknown field");
	/* At an address of its own for peers. */
	init.comp_mask = 1 | 2;
	init.iova = 1 << 20;
	struct ibv_mr *moved = reg_mr_ex(pd, &init);
	expect(moved && !ibv_dereg_mr(moved), "an iova");
}

static void query_speed(void)
{
	int (*port_speed)(struct ibv_context *, uint32_t, uint64_t *) = find("ibv_query_port_speed");
	uint64_t speed = 0;

	expect(!port_speed(context, 1, &speed) && speed >= 25, "ibv_query_port_speed");
	expect(port_speed(context, 2, &speed) == EINVAL, "an unknown port");
	printf("speed %llu\n", (unsigned long long)speed);
}

static void find_counters(void)
{
	query_caps = find("_ibv_query_comp_cntr_caps");
	create_counter = find("ibv_create_comp_cntr");
	destroy_counter = find("ibv_destroy_comp_cntr");
	set_count = find("ibv_set_comp_cntr");
	set_errors = find("ibv_set_err_comp_cntr");
	add_count = find("ibv_inc_comp_cntr");
	add_errors = find("ibv_inc_err_comp_cntr");
	read_count = find("ibv_read_comp_cntr");
	read_errors = find("ibv_read_err_comp_cntr");
	attach = find("ibv_qp_attach_comp_cntr");
}

/* Values that the program sets, and what is refused. */
static void use_without_queue_pair(void)
{
	struct counter_init bytes = { 0, 1, 0 }, unknown = { 0, 9, 0 }, flags = { 0, 0, 1 };
	struct counter *counter = new_counter();
	struct caps caps[2] = { { 0 }, { 7, 7, 7 } };

	expect(!query_caps(context, caps, sizeof caps[0]) && caps[0].max_counters > 0, "the limits");
	expect(caps[0].max_value == UINT64_MAX && caps[1].max_value == 7, "the limits");
	expect(caps[0].ops == (OP_SEND | OP_RECV | OP_READ | OP_WRITE), "the operations");
	expect(!create_counter(context, &bytes) && errno == EOPNOTSUPP, "a counter of bytes");
	expect(!create_counter(context, &unknown) && errno == EINVAL, "a counter of something");
	expect(!create_counter(context, &flags) && errno == EINVAL, "a counter with flags");
	expect(!count(counter) && !errors(counter), "a new counter is zero");
	expect(!set_count(counter, UINT64_MAX) && !add_count(counter, 3), "set and add");
	expect(!set_errors(counter, 40) && !add_errors(counter, 2), "set and add");
	expect(count(counter) == 2 && errors(counter) == 42, "the values wrap to zero");
	expect(!destroy_counter(counter), "ibv_destroy_comp_cntr");
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct counter *sends, *receives, *tagged, *late;
	struct ibv_pd *pd;
	int n, round;

	expect(devices && devices[0] && (context = ibv_open_device(devices[0])), "a device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	expect(pd && cq && !ibv_query_gid(context, 1, 0, &gid), "a completion queue");
	register_memory(pd);
	query_speed();
	find_counters();
	use_without_queue_pair();

	init.send_cq = init.recv_cq = cq;
	init.cap = (struct ibv_qp_cap){ 16, 32, 1, 1, 0 };
	expect((qp = ibv_create_qp(pd, &init)) != NULL, "a queue pair");
	sends = new_counter();
	receives = new_counter();
	tagged = new_counter();
	late = new_counter();
	expect(!attach_ops(sends, OP_SEND) && !attach_ops(receives, OP_RECV), "attach");
	expect(attach_ops(late, OP_SEND | OP_READ) == EBUSY, "an operation of another counter");
	expect(attach_ops(late, OP_REMOTE_READ) == EOPNOTSUPP, "operations of the peer");
	expect(attach_ops(late, 0) == EINVAL, "no operation");
	expect(!attach_ops(tagged, OP_READ | OP_WRITE), "attach");
	expect(destroy_counter(sends) == EBUSY, "a counter in use");

	for (round = 1; round <= 2; round++) {
		to_init();
		connect_qp(qp, qp, gid);
		expect(attach_ops(late, 32) == EOPNOTSUPP && attach_ops(late, OP_SEND) == EINVAL,
		       "a connected queue pair");
		/* Unsignaled, more than the queue holds at once. */
		for (n = 0; n < BATCH; n++)
			post_receive();
		for (n = 0; n < BATCH; n++)
			post(IBV_WR_SEND, 0);
		await_count(sends, BATCH * round);
		await_count(receives, BATCH * round);
		for (n = 0; n < 4 * BATCH; n++) {
			post(n & 1 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, mr->rkey);
			await_count(tagged, 4 * BATCH * (round - 1) + n + 1);
		}
		expect(count(sends) == (uint64_t)BATCH * round, "each kind has its counter");
		expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RESET");
	}
	/* Wrong key: the request fails, and those behind it and the receives are flushed. */
	to_init();
	connect_qp(qp, qp, gid);
	expect(!set_count(sends, 0) && !set_count(receives, 0) && !set_count(tagged, 0), "set");
	post_receive();
	post_receive();
	post_receive();
	post(IBV_WR_SEND, 0);
	await_count(sends, 1);
	await_count(receives, 1);
	post(IBV_WR_RDMA_WRITE, mr->rkey);
	post(IBV_WR_RDMA_WRITE, mr->rkey ^ 0x100);
	while (errors(tagged) < 1 || errors(receives) < 2)
		;
	/* Posted in the error state, and flushed. */
	post(IBV_WR_SEND, 0);
	while (errors(sends) < 1)
		;
	expect(count(tagged) == 1 && errors(tagged) == 1, "a WRITE of two");
	expect(count(receives) == 1 && errors(receives) == 2, "a receive of three");
	expect(count(sends) == 1 && errors(sends) == 1, "a SEND of two");

	/* The values outlive the queue pair, which the counters are then free of. */
	expect(!ibv_destroy_qp(qp) && count(receives) == 1 && errors(receives) == 2, "values stay");
	expect(!destroy_counter(sends) && !destroy_counter(receives), "ibv_destroy_comp_cntr");
	expect(!destroy_counter(tagged) && !destroy_counter(late), "ibv_destroy_comp_cntr");
	expect(!ibv_destroy_cq(cq) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd), "the end");
	expect(!ibv_close_device(context), "ibv_close_device");
	ibv_free_device_list(devices);
	puts("done");
	return 0;
}
