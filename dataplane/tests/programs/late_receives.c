/*
 * One thread ends a connection, while another posts a receive and waits for its flush. The receive may come before
 * the end, during it, or after it; it always completes.
 */
#include <errno.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 200, MESSAGES = 20, LONGEST_PAUSE_US = 300, PATIENCE_S = 20 };

static struct rdma_cm_id *listener, *server, *client;
static char bytes[64];

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static struct rdma_cm_id *make_id(int flags, const char *port)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr init = { .cap = { 32, 32, 1, 1, 0 }, .sq_sig_all = 1 };
	struct rdma_cm_id *id;

	expect(!rdma_getaddrinfo("10.77.0.2", port, &hints, &found), "rdma_getaddrinfo");
	expect(!rdma_create_ep(&id, found, NULL, &init), "rdma_create_ep");
	rdma_freeaddrinfo(found);
	return id;
}

static void *accept_client(void *unused)
{
	expect(!rdma_get_request(listener, &server) && !rdma_accept(server, NULL), "rdma_accept");
	return unused;
}

static void *disconnect(void *pause)
{
	usleep((size_t)pause);
	/* The other side may have ended it. */
	rdma_disconnect(client);
	return NULL;
}

static void exchange(struct ibv_mr *of_client, struct ibv_mr *of_server)
{
	struct ibv_wc wc;
	int i;

	/* siwd polls the send queues of queue pairs that are used. */
	for (i = 0; i < MESSAGES; i++) {
		expect(!rdma_post_recv(client, NULL, bytes, 64, of_client), "a receive");
		expect(!rdma_post_recv(server, NULL, bytes, 64, of_server), "a receive");
		expect(!rdma_post_send(server, NULL, bytes, 8, of_server, 0), "a send");
		expect(!rdma_post_send(client, NULL, bytes, 8, of_client, 0), "a send");
		expect(rdma_get_recv_comp(client, &wc) == 1 && rdma_get_recv_comp(server, &wc) == 1, "a receive");
		expect(rdma_get_send_comp(client, &wc) == 1 && rdma_get_send_comp(server, &wc) == 1, "a send");
	}
}

static void wait_for_flush(int round)
{
	struct timespec began, now;
	struct ibv_wc wc;
	int found;

	clock_gettime(CLOCK_MONOTONIC, &began);
	while (!(found = ibv_poll_cq(client->recv_cq, 1, &wc))) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (now.tv_sec - began.tv_sec > PATIENCE_S) {
			fprintf(stderr, "round %d: the receive is lost\n", round);
			exit(1);
		}
	}
	expect(found == 1 && wc.status == IBV_WC_WR_FLUSH_ERR, "a flush");
}

int main(int argc, char **argv)
{
	const char *port = argc > 1 ? argv[1] : "7174";
	int round;

	listener = make_id(RAI_PASSIVE, port);
	expect(!rdma_listen(listener, 8), "rdma_listen");
	for (round = 0; round < ROUNDS; round++) {
		struct ibv_mr *of_client, *of_server;
		pthread_t thread;

		expect(!pthread_create(&thread, NULL, accept_client, NULL), "a thread");
		client = make_id(0, port);
		expect(!rdma_connect(client, NULL), "rdma_connect");
		pthread_join(thread, NULL);
		of_client = rdma_reg_msgs(client, bytes, 64);
		of_server = rdma_reg_msgs(server, bytes, 64);
		expect(of_client && of_server, "rdma_reg_msgs");
		exchange(of_client, of_server);
		expect(!pthread_create(&thread, NULL, disconnect, (void *)(size_t)(rand() % LONGEST_PAUSE_US)), "a thread");
		usleep(rand() % LONGEST_PAUSE_US);
		expect(!rdma_post_recv(client, NULL, bytes, 64, of_client), "the last receive");
		pthread_join(thread, NULL);
		wait_for_flush(round);
		rdma_dereg_mr(of_client);
		rdma_dereg_mr(of_server);
		rdma_destroy_ep(client);
		rdma_disconnect(server);
		rdma_destroy_ep(server);
	}
	rdma_destroy_ep(listener);
	puts("done");
	return 0;
}
