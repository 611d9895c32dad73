/*
 * Children of a process whose other threads are inside of calls at the fork: a lock that such a thread holds
 * is never released in the child. Each call with an object of the parent fails at once or, if it destroys the
 * object, succeeds without effect; new objects of the child work.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#define CHILDREN 60
/* Seconds after which a child counts as hanging. */
#define PATIENCE 60

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_cq_ex *extended_cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp, *sharing_qp;
static struct ibv_qp_ex *extended_qp;
static struct ibv_mr *mr;
static struct ibv_mw *mw;
static struct rdma_event_channel *events;
static struct rdma_cm_id *id;
static int rsocket_number;
static char buffer[4096];
static atomic_int is_over;

static struct ibv_qp *create_qp(struct ibv_srq *shared)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
					 .srq = shared };

	init.cap = (struct ibv_qp_cap){ 16, 16, 1, 1, 0 };
	return ibv_create_qp(pd, &init);
}

static int post_receive(void)
{
	struct ibv_sge place = { (uintptr_t)buffer, 8, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &place, .num_sge = 1 }, *bad;

	return ibv_post_recv(qp, &wr, &bad);
}

static int post_shared_receive(void)
{
	struct ibv_sge place = { (uintptr_t)buffer, 8, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &place, .num_sge = 1 }, *bad;

	return ibv_post_srq_recv(srq, &wr, &bad);
}

static int post_send(void)
{
	struct ibv_sge place = { (uintptr_t)buffer, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &place, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static int post_extended(void)
{
	ibv_wr_start(extended_qp);
	ibv_wr_send(extended_qp);
	ibv_wr_set_sge(extended_qp, mr->lkey, (uintptr_t)buffer, 8);
	return ibv_wr_complete(extended_qp);
}

/* Calls of the parent's threads, each of which takes other locks. */

static void use_domains(void)
{
	struct ibv_pd *one = ibv_alloc_pd(context);

	expect(one && !ibv_dealloc_pd(one), "a protection domain");
}

static void use_queues(void)
{
	struct ibv_cq *one = ibv_create_cq(context, 4, NULL, channel, 0);

	expect(one && !ibv_resize_cq(one, 64) && !ibv_destroy_cq(one), "a completion queue");
}

static void use_queue_pairs(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_qp *one = create_qp(srq);

	expect(one && !ibv_query_qp(one, &attr, IBV_QP_STATE, &init) && !ibv_destroy_qp(one), "a queue pair");
}

static void use_memory(void)
{
	struct ibv_mr *one = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);

	expect(one && !ibv_dereg_mr(one), "a region");
}

static void use_rings(void)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_wc wc;
	int n;

	for (n = 0; n < 100; n++) {
		post_receive();
		post_shared_receive();
		ibv_poll_cq(cq, 1, &wc);
		ibv_req_notify_cq(cq, 0);
		if (!ibv_start_poll(extended_cq, &attr))
			ibv_end_poll(extended_cq);
		ibv_wr_start(extended_qp);
		ibv_wr_abort(extended_qp);
	}
}

static void use_identifiers(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct rdma_cm_id *one;

	expect(!rdma_create_id(events, &one, NULL, RDMA_PS_TCP) &&
	       !rdma_bind_addr(one, (struct sockaddr *)&any) && !rdma_destroy_id(one), "an identifier");
}

static void use_rsockets(void)
{
	int one = rsocket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in any = { .sin_family = AF_INET };

	expect(one >= 0 && !rbind(one, (struct sockaddr *)&any, sizeof(any)) && !rlisten(one, 1) &&
	       !rclose(one), "an rsocket");
}

static void *repeat(void *call)
{
	while (!is_over)
		((void (*)(void))call)();
	return NULL;
}

static void *await_completion_event(void *unused)
{
	struct ibv_cq *from;
	void *cookie;

	ibv_get_cq_event(channel, &from, &cookie);
	return unused;
}

static void create_objects(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_cq_init_attr_ex cq_init = { .cqe = 16 };
	struct ibv_qp_init_attr_ex qp_init = { .qp_type = IBV_QPT_RC };

	expect(devices && (context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)), "a device");
	expect((channel = ibv_create_comp_channel(context)) &&
	       (cq = ibv_create_cq(context, 64, NULL, channel, 0)) &&
	       (extended_cq = ibv_create_cq_ex(context, &cq_init)), "completion queues");
	expect((srq = ibv_create_srq(pd, &srq_init)) != NULL, "a shared receive queue");
	expect((qp = create_qp(NULL)) && (sharing_qp = create_qp(srq)), "queue pairs");
	qp_init.send_cq = qp_init.recv_cq = cq;
	qp_init.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	qp_init.pd = pd;
	qp_init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	qp_init.send_ops_flags = IBV_QP_EX_WITH_SEND;
	struct ibv_qp *extended = ibv_create_qp_ex(context, &qp_init);
	expect(extended && (extended_qp = ibv_qp_to_qp_ex(extended)), "an extended queue pair");
	expect((mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE)) &&
	       (mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1)), "memory");
	expect((events = rdma_create_event_channel()) && !rdma_create_id(events, &id, NULL, RDMA_PS_TCP) &&
	       (rsocket_number = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0, "rdma_cm and rsockets");
}

/* Calls that the child must not make with objects of its parent. */
static void use_inherited_objects(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct ibv_async_event async;
	struct ibv_poll_cq_attr poll_attr = { 0 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr init;
	struct ibv_srq_attr srq_attr = { .srq_limit = 1 };
	struct ibv_cq *from;
	struct ibv_wc wc;
	struct rdma_cm_event *event;
	void *cookie;

	expect(!ibv_alloc_pd(context), "ibv_alloc_pd fails");
	expect(!ibv_create_cq(context, 4, NULL, channel, 0), "ibv_create_cq fails");
	expect(!ibv_create_comp_channel(context), "ibv_create_comp_channel fails");
	expect(!create_qp(NULL) && !create_qp(srq), "ibv_create_qp fails");
	expect(!ibv_reg_mr(pd, buffer, sizeof(buffer), 0), "ibv_reg_mr fails");
	expect(!ibv_alloc_mw(pd, IBV_MW_TYPE_1), "ibv_alloc_mw fails");
	expect(post_receive() && post_shared_receive() && post_send(), "posting fails");
	expect(post_extended(), "ibv_wr_complete fails");
	expect(ibv_poll_cq(cq, 1, &wc) < 0, "ibv_poll_cq fails");
	expect(ibv_start_poll(extended_cq, &poll_attr), "ibv_start_poll fails");
	expect(ibv_resize_cq(cq, 128), "ibv_resize_cq fails");
	expect(ibv_modify_qp(qp, &attr, IBV_QP_STATE), "ibv_modify_qp fails");
	expect(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp fails");
	expect(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_LIMIT), "ibv_modify_srq fails");
	expect(ibv_query_srq(srq, &srq_attr), "ibv_query_srq fails");
	expect(ibv_get_cq_event(channel, &from, &cookie), "ibv_get_cq_event fails");
	/* The device is gone for the child, which is reported once. */
	expect(!ibv_get_async_event(context, &async) && async.event_type == IBV_EVENT_DEVICE_FATAL &&
	       ibv_get_async_event(context, &async), "ibv_get_async_event fails");
	expect(rdma_get_cm_event(events, &event), "rdma_get_cm_event fails");
	expect(rdma_bind_addr(id, (struct sockaddr *)&any), "rdma_bind_addr fails");
	expect(rdma_listen(id, 1), "rdma_listen fails");
	expect(rsend(rsocket_number, buffer, 1, 0) < 0, "rsend fails");
}

static void destroy_inherited_objects(void)
{
	expect(!ibv_destroy_qp(qp) && !ibv_destroy_qp(sharing_qp) && !ibv_destroy_qp(&extended_qp->qp_base),
	       "ibv_destroy_qp");
	expect(!ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && !ibv_destroy_cq(ibv_cq_ex_to_cq(extended_cq)),
	       "ibv_destroy_cq");
	expect(!ibv_destroy_comp_channel(channel), "ibv_destroy_comp_channel");
	expect(!ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd), "ibv_dereg_mr");
	expect(!rdma_destroy_id(id), "rdma_destroy_id");
	rdma_destroy_event_channel(events);
	expect(!ibv_close_device(context), "ibv_close_device");
}

static void be_child(int number)
{
	struct rdma_event_channel *own;

	alarm(PATIENCE);
	if (number % 2)
		use_inherited_objects();
	destroy_inherited_objects();
	create_objects();
	use_domains();
	expect((own = rdma_create_event_channel()) != NULL, "an event channel of the child");
	_exit(0);
}

static void await_child(pid_t child)
{
	int status;

	expect(child > 0 && waitpid(child, &status, 0) == child, "a child");
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
		expect(0, "the child does not hang");
	expect(!status, "the child ends well");
}

static atomic_int child_of_handler;

static void fork_in_handler(int signal)
{
	pid_t child = fork();

	(void)signal;
	if (!child) {
		alarm(PATIENCE);
		_exit(ibv_alloc_pd(context) != NULL);
	}
	child_of_handler = child;
}

int main(void)
{
	void (*calls[])(void) = { use_domains, use_queues, use_queue_pairs, use_memory, use_rings,
				  use_identifiers, use_rsockets };
	enum { CALLS = sizeof(calls) / sizeof(calls[0]) };
	struct sigaction on_signal = { .sa_handler = fork_in_handler, .sa_flags = SA_RESTART };
	pthread_t threads[CALLS], waiting;
	int n;

	create_objects();
	/* Alone, so that no other thread holds a lock of the C library in the handler's child. */
	expect(!sigaction(SIGUSR1, &on_signal, NULL) &&
	       !pthread_create(&waiting, NULL, await_completion_event, NULL) &&
	       !pthread_kill(waiting, SIGUSR1), "a signal");
	while (!child_of_handler)
		sched_yield();
	await_child(child_of_handler);
	for (n = 0; n < CALLS; n++)
		expect(!pthread_create(&threads[n], NULL, repeat, (void *)calls[n]), "a thread");
	for (n = 0; n < CHILDREN; n++) {
		pid_t child = fork();

		if (!child)
			be_child(n);
		await_child(child);
	}
	is_over = 1;
	for (n = 0; n < CALLS; n++)
		pthread_join(threads[n], NULL);
	/* The objects of the parent are as they were. */
	expect(!ibv_destroy_qp(qp) && !ibv_destroy_qp(sharing_qp), "ibv_destroy_qp in the parent");
	use_domains();
	puts("done");
	fflush(stdout);
	_exit(0);
}
