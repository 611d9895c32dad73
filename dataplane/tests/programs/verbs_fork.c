/*
 * fork(2) with registered memory, with and without ibv_fork_init(3):
 *
 *   verbs_fork none|init
 *
 * A child sees its parent's memory as it was at the fork, and its own writes stay private. It ends by
 * exit(3), which runs the exit handlers of its parent's libraries, or executes another program. The peer
 * writes to the parent's regions before the child exists, while it exists, and after its end. A thread whose
 * stack is registered forks, too.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define LENGTH 20000

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
static union ibv_gid gid;

static struct ibv_qp *create_qp(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags =
					    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	struct ibv_qp *qp;

	init.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	qp = ibv_create_qp(pd, &init);
	expect(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				    IBV_QP_ACCESS_FLAGS), "a queue pair");
	return qp;
}

/* Makes the second queue pair write its region into that of the first, and then read a byte. */
static void transfer(struct ibv_mr *from, struct ibv_mr *to)
{
	enum ibv_wr_opcode opcodes[2] = { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
	int n;

	for (n = 0; n < 2; n++) {
		/* The completion of the READ shows that the WRITE before it was placed. */
		struct ibv_sge place = { (uintptr_t)from->addr, n ? 1 : LENGTH, from->lkey };
		struct ibv_send_wr wr = { .sg_list = &place, .num_sge = 1, .opcode = opcodes[n],
					  .send_flags = IBV_SEND_SIGNALED }, *bad;
		struct ibv_wc wc;
		int got;

		wr.wr.rdma.remote_addr = (uintptr_t)to->addr;
		wr.wr.rdma.rkey = to->rkey;
		expect(!ibv_post_send(qps[1], &wr, &bad), "ibv_post_send");
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		expect(got == 1 && !wc.status, "completion");
	}
}

static int is_filled(const char *bytes, char with)
{
	int n;

	for (n = 0; n < LENGTH; n++)
		if (bytes[n] != with)
			return 0;
	return 1;
}

/* Checks the memory in the child, and ends by _exit(2), exit(3) or execlp(3), depending on `way`. */
static void be_child(char *target, char *source, char *beside, int way)
{
	expect(is_filled(target, 'b') && is_filled(source, 'b') && is_filled(beside, 'x'),
	       "the child sees the memory as it was");
	memset(target, 'c', LENGTH);
	memset(source, 'c', LENGTH);
	memset(beside, 'c', LENGTH);
	expect(is_filled(target, 'c') && is_filled(source, 'c'), "the child has its own memory");
	if (way == 1)
		exit(0);
	if (way == 2)
		execlp("true", "true", NULL);
	_exit(way == 0 ? 0 : 1);
}

static pthread_barrier_t registered;

/* Forks on a registered stack: parent and child use it at once, and have their own thread ids. */
static void *fork_on_stack(void *unused)
{
	volatile int local = 1;
	pid_t child;
	int round, status;

	pthread_barrier_wait(&registered);
	for (round = 0; round < 100; round++) {
		sigset_t before, after;

		expect(!pthread_sigmask(SIG_BLOCK, NULL, &before), "the mask");
		child = fork();
		expect(child >= 0, "fork on a registered stack");
		expect(!pthread_sigmask(SIG_BLOCK, NULL, &after), "the mask");
		/* The C library writes only the part of the kernel's signals. */
		for (int number = 1; number < 65; number++)
			expect(sigismember(&before, number) == sigismember(&after, number), "the mask stays");
		if (!child) {
			local = 2;
			_exit(raise(0) || local != 2);
		}
		local = 3;
		expect(waitpid(child, &status, 0) == child && !status, "the child of a thread");
		expect(local == 3 && !pthread_kill(pthread_self(), 0), "the thread goes on");
	}
	return unused;
}

static void register_stack(void)
{
	size_t length = 1 << 20;
	void *stack = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;
	pthread_attr_t attr;
	pthread_t thread;

	expect(stack != MAP_FAILED && !pthread_attr_init(&attr) && !pthread_barrier_init(&registered, NULL, 2) &&
	       !pthread_attr_setstack(&attr, stack, length) &&
	       !pthread_create(&thread, &attr, fork_on_stack, NULL), "a thread");
	mr = ibv_reg_mr(pd, stack, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	expect(mr != NULL, "the stack is registered");
	pthread_barrier_wait(&registered);
	expect(!pthread_join(thread, NULL) && !ibv_dereg_mr(mr) && !munmap(stack, length), "joined");
}

int main(int argc, char **argv)
{
	int with_init = argc > 1 && !strcmp(argv[1], "init");
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_device **devices;
	char *target = malloc(LENGTH), *beside = malloc(LENGTH), *source = malloc(LENGTH);
	struct ibv_mr *to, *from;
	int way, n;

	if (with_init)
		expect(!ibv_fork_init(), "ibv_fork_init");
	devices = ibv_get_device_list(NULL);
	expect(devices && (context = ibv_open_device(devices[0])), "ibv_open_device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	expect(pd && cq && !ibv_query_gid(context, 1, 0, &gid), "objects");
	to = ibv_reg_mr(pd, target, LENGTH, access);
	from = ibv_reg_mr(pd, source, LENGTH, access);
	expect(to && from, "ibv_reg_mr");
	for (n = 0; n < 2; n++)
		qps[n] = create_qp();
	for (n = 0; n < 2; n++)
		connect_qp(qps[n], qps[!n], gid);
	for (way = 0; way < 3; way++) {
		int status;
		pid_t child;

		memset(source, 'b', LENGTH);
		memset(beside, 'x', LENGTH);
		transfer(from, to);
		expect(is_filled(target, 'b'), "written before the fork");
		child = fork();
		expect(child >= 0, "fork");
		if (!child)
			be_child(target, source, beside, way);
		/* While the child exists, or has just ended. */
		memset(source, 'd', LENGTH);
		transfer(from, to);
		expect(is_filled(target, 'd') && is_filled(beside, 'x'), "written while it exists");
		expect(waitpid(child, &status, 0) == child && !status, "the child");
		expect(is_filled(target, 'd') && is_filled(source, 'd') && is_filled(beside, 'x'),
		       "the child disturbs nobody");
		memset(source, 'e', LENGTH);
		transfer(from, to);
		expect(is_filled(target, 'e'), "written after it has ended");
	}
	register_stack();
	expect(!ibv_destroy_qp(qps[0]) && !ibv_destroy_qp(qps[1]) && !ibv_dereg_mr(to) &&
	       !ibv_dereg_mr(from) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) &&
	       !ibv_close_device(context), "destroying all");
	printf("%s: three children\n", ibv_is_fork_initialized() == IBV_FORK_UNNEEDED
	       ? "unneeded" : "needed");
	return 0;
}
