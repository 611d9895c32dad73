/*
 * Opens connections through rdma_cm, both ends in this process: SERVER-ADDRESS COUNT WINDOW.
 *
 * WINDOW connections are being established at any time. When COUNT are open, a message on each proves
 * that it works while all others are open; then they are closed. Prints one line of JSON: connections
 * established per second, and the time of the messages.
 */
#include <infiniband/verbs.h>
#include <netdb.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

#define TIMEOUT_MS 2000

/* One end: its connection identifiers, and the objects that they share. */
struct end {
	struct rdma_event_channel *channel;
	struct rdma_cm_id **ids;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	uint64_t memory;
	int opened, closed, sent;
};

static int total;

static void create_qp(struct end *end, struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };

	if (!end->pd) {
		end->pd = ibv_alloc_pd(id->verbs);
		end->cq = ibv_create_cq(id->verbs, total, NULL, NULL, 0);
		if (!end->pd || !end->cq)
			die("cannot make the shared objects");
		end->mr = ibv_reg_mr(end->pd, &end->memory, sizeof end->memory, IBV_ACCESS_LOCAL_WRITE);
		if (!end->mr)
			die("ibv_reg_mr");
	}
	init.send_cq = init.recv_cq = end->cq;
	init.cap = (struct ibv_qp_cap){ 1, 1, 1, 1, 8 };
	if (rdma_create_qp(id, end->pd, &init))
		die("rdma_create_qp");
}

/* Takes and acknowledges the next event; returns its identifier. */
static struct rdma_cm_id *next_event(struct end *end, enum rdma_cm_event_type *kind)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	if (rdma_get_cm_event(end->channel, &event))
		die("rdma_get_cm_event");
	*kind = event->event;
	id = event->id;
	if (event->status) {
		fprintf(stderr, "%s: status %d\n", rdma_event_str(event->event), event->status);
		exit(1);
	}
	rdma_ack_cm_event(event);
	return id;
}

static void accept_request(struct end *end, struct rdma_cm_id *id)
{
	struct ibv_sge place;
	struct ibv_recv_wr receive = { .sg_list = &place, .num_sge = 1 }, *bad;
	struct rdma_conn_param param = { 0 };

	create_qp(end, id);
	place = (struct ibv_sge){ (uintptr_t)&end->memory, sizeof end->memory, end->mr->lkey };
	if (ibv_post_recv(id->qp, &receive, &bad))
		die("ibv_post_recv");
	if (rdma_accept(id, &param))
		die("rdma_accept");
}

/* Server thread: runs until all connections are open, then, after the messages, until all are closed. */
static void *serve(void *argument)
{
	struct end *end = argument;
	enum rdma_cm_event_type kind;

	while (end->opened < total || (end->sent && end->closed < total)) {
		struct rdma_cm_id *id = next_event(end, &kind);

		if (kind == RDMA_CM_EVENT_CONNECT_REQUEST)
			accept_request(end, id);
		else if (kind == RDMA_CM_EVENT_ESTABLISHED)
			end->ids[end->opened++] = id;
		else if (kind == RDMA_CM_EVENT_DISCONNECTED)
			end->closed++;
	}
	return NULL;
}

static void start_connection(struct end *end, struct sockaddr *address)
{
	struct rdma_cm_id *id;

	if (rdma_create_id(end->channel, &id, NULL, RDMA_PS_TCP))
		die("rdma_create_id");
	if (rdma_resolve_addr(id, NULL, address, TIMEOUT_MS))
		die("rdma_resolve_addr");
}

static void open_all(struct end *end, struct sockaddr *address, int window)
{
	struct rdma_conn_param param = { 0 };
	enum rdma_cm_event_type kind;
	int started = 0;

	while (end->opened < total) {
		struct rdma_cm_id *id;

		while (started < total && started < end->opened + window) {
			start_connection(end, address);
			started++;
		}
		id = next_event(end, &kind);
		switch (kind) {
		case RDMA_CM_EVENT_ADDR_RESOLVED:
			if (rdma_resolve_route(id, TIMEOUT_MS))
				die("rdma_resolve_route");
			break;
		case RDMA_CM_EVENT_ROUTE_RESOLVED:
			create_qp(end, id);
			if (rdma_connect(id, &param))
				die("rdma_connect");
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			end->ids[end->opened++] = id;
			break;
		default:
			fprintf(stderr, "unexpected: %s\n", rdma_event_str(kind));
			exit(1);
		}
	}
}

static void await_completions(struct end *end)
{
	struct ibv_wc wc;
	int got, left = total;

	while (left > 0) {
		got = ibv_poll_cq(end->cq, 1, &wc);
		if (got < 0)
			die("ibv_poll_cq");
		if (got && wc.status) {
			fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
			exit(1);
		}
		left -= got;
	}
}

static void send_on_all(struct end *end)
{
	struct ibv_sge source = { (uintptr_t)&end->memory, sizeof end->memory, 0 };
	struct ibv_send_wr send = { .sg_list = &source, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_INLINE }, *bad;
	int n;

	for (n = 0; n < total; n++)
		if (ibv_post_send(end->ids[n]->qp, &send, &bad))
			die("ibv_post_send");
	await_completions(end);
}

int main(int argc, char **argv)
{
	struct end client = { 0 }, server = { 0 };
	struct addrinfo *address;
	struct rdma_cm_id *listener;
	pthread_t thread;
	double begun, opened, sent;
	int n;

	if (argc != 4 || (total = atoi(argv[2])) < 1 || atoi(argv[3]) < 1) {
		fprintf(stderr, "usage: %s SERVER-ADDRESS COUNT WINDOW\n", argv[0]);
		return 2;
	}
	if (getaddrinfo(argv[1], "7777", NULL, &address))
		die(argv[1]);
	client.channel = rdma_create_event_channel();
	server.channel = rdma_create_event_channel();
	client.ids = calloc(total, sizeof *client.ids);
	server.ids = calloc(total, sizeof *server.ids);
	if (!client.channel || !server.channel || !client.ids || !server.ids)
		die("cannot begin");
	if (rdma_create_id(server.channel, &listener, NULL, RDMA_PS_TCP) ||
	    rdma_bind_addr(listener, address->ai_addr) || rdma_listen(listener, 1024))
		die("cannot listen");

	begun = now();
	if (pthread_create(&thread, NULL, serve, &server))
		die("pthread_create");
	open_all(&client, address->ai_addr, atoi(argv[3]));
	pthread_join(thread, NULL);
	opened = now();
	send_on_all(&client);
	await_completions(&server);
	sent = now();
	server.sent = 1;
	if (pthread_create(&thread, NULL, serve, &server))
		die("pthread_create");
	for (n = 0; n < total; n++)
		if (rdma_disconnect(client.ids[n]))
			die("rdma_disconnect");
	pthread_join(thread, NULL);
	printf("{\"open\":%d,\"per_second\":%.0f,\"messages_ms\":%.1f}\n", total,
	       total / (opened - begun), (sent - opened) * 1e3);
	return 0;
}
