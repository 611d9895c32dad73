/*
 * A program may poll the descriptors of a completion channel and of asynchronous events, and may make
 * them blocking or non-blocking.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static struct ibv_comp_channel *channel;

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static int is_readable(int fd, int timeout)
{
	struct pollfd entry = { .fd = fd, .events = POLLIN };

	return poll(&entry, 1, timeout) == 1;
}

/* Posts a receive and flushes it: one completion and one event. */
static void complete_one(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_recv_wr wr = { .wr_id = 7 }, *bad;

	expect(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
	expect(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to ERR");
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp;

	init.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	qp = ibv_create_qp(pd, &init);
	expect(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				    IBV_QP_ACCESS_FLAGS), "a queue pair");
	return qp;
}

static void take_completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		;
	expect(got == 1 && wc.wr_id == 7 && wc.status == IBV_WC_WR_FLUSH_ERR, "the flushed receive");
}

/* Blocks until there is an event. */
static void *wait_for_event(void *unused)
{
	struct ibv_cq *cq;
	void *context;

	expect(!ibv_get_cq_event(channel, &cq, &context), "a blocking ibv_get_cq_event");
	expect(context == &channel, "the context of the queue");
	ibv_ack_cq_events(cq, 1);
	return unused;
}

/* Blocks until the channel is destroyed. */
static void *wait_for_end(void *unused)
{
	struct ibv_cq *cq;
	void *context;

	expect(ibv_get_cq_event(channel, &cq, &context) == -1 && errno == EIO, "no event");
	return unused;
}

static double cpu_seconds(void)
{
	struct timespec used;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	return used.tv_sec + used.tv_nsec / 1e9;
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct epoll_event interest = { .events = EPOLLIN | EPOLLET };
	struct ibv_context *device = NULL;
	struct ibv_async_event async;
	struct ibv_pd *pd;
	struct ibv_cq *cq, *found;
	struct ibv_qp *qp;
	pthread_t waiter;
	double used;
	int epoll = epoll_create1(0), n;
	void *context;

	expect(devices && (device = ibv_open_device(devices[0])), "ibv_open_device");
	pd = ibv_alloc_pd(device);
	channel = ibv_create_comp_channel(device);
	expect(pd && channel, "objects");
	cq = ibv_create_cq(device, 16, &channel, channel, 0);
	expect(cq != NULL, "ibv_create_cq");

	/* It blocks by default and uses no CPU time. */
	expect(!(fcntl(channel->fd, F_GETFL) & O_NONBLOCK), "a channel blocks at first");
	expect(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	expect(!pthread_create(&waiter, NULL, wait_for_event, NULL), "thread");
	used = cpu_seconds();
	expect(pthread_tryjoin_np(waiter, NULL) == EBUSY && !is_readable(channel->fd, 300),
	       "nothing comes");
	expect(cpu_seconds() - used < 0.05, "waiting uses no processor");
	qp = create_qp(pd, cq);
	complete_one(qp);
	expect(!pthread_join(waiter, NULL), "the waiter wakes");
	take_completion(cq);
	expect(!ibv_destroy_qp(qp), "ibv_destroy_qp");

	/* O_NONBLOCK, set by the program, stays set. */
	expect(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK), "fcntl");
	expect(ibv_get_cq_event(channel, &found, &context) == -1 && errno == EAGAIN, "no event");
	expect(!epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &interest), "epoll_ctl");
	for (n = 0; n < 3; n++) {
		expect(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
		qp = create_qp(pd, cq);
		complete_one(qp);
		/* Edge-triggered: each event is an edge. */
		expect(epoll_wait(epoll, &interest, 1, 5000) == 1, "epoll_wait");
		expect(!ibv_get_cq_event(channel, &found, &context) && found == cq &&
		       context == &channel, "an event that is there");
		ibv_ack_cq_events(cq, 1);
		expect(ibv_get_cq_event(channel, &found, &context) == -1 && errno == EAGAIN,
		       "one event for one completion");
		take_completion(cq);
		expect(!ibv_destroy_qp(qp), "ibv_destroy_qp");
	}
	expect(fcntl(channel->fd, F_GETFL) & O_NONBLOCK, "the flag stays");

	/* Asynchronous events likewise. */
	expect(!fcntl(device->async_fd, F_SETFL, O_NONBLOCK), "fcntl");
	expect(!is_readable(device->async_fd, 0), "no asynchronous event");
	expect(ibv_get_async_event(device, &async) == -1 && errno == EAGAIN, "none to take");
	expect(fcntl(device->async_fd, F_GETFL) & O_NONBLOCK, "the flag stays");

	/* Destroyed under a thread that waits, which ends at once; its memory may be used again. */
	expect(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel), "destroying a channel");
	for (n = 0; n < 10; n++) {
		struct timespec begun, ended;

		channel = ibv_create_comp_channel(device);
		expect(channel && !pthread_create(&waiter, NULL, wait_for_end, NULL), "a waiter");
		expect(!is_readable(channel->fd, 20), "nothing comes");
		clock_gettime(CLOCK_MONOTONIC, &begun);
		expect(!ibv_destroy_comp_channel(channel), "ibv_destroy_comp_channel");
		memset(malloc(sizeof *channel), -1, sizeof *channel);
		expect(!pthread_join(waiter, NULL), "the waiter ends");
		clock_gettime(CLOCK_MONOTONIC, &ended);
		expect(ended.tv_sec - begun.tv_sec < 5, "at once");
	}
	expect(!ibv_dealloc_pd(pd) &&
	       !ibv_close_device(device), "destroying all");
	printf("events are pollable\n");
	return 0;
}
