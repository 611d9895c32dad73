/*
 * ibv_destroy_qp(3) of the queue pair of an identifier, and then rdma_destroy_id(3): rdma-core does not look at the
 * queue pair again, whose memory may have become another's.
 */
#include <arpa/inet.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include "connect.h"

static struct ibv_qp_init_attr wanted(void)
{
	return (struct ibv_qp_init_attr){ .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
}

static void *accept_one(void *listener)
{
	struct rdma_cm_id *id;

	expect(!rdma_get_request(listener, &id) && !rdma_accept(id, NULL), "accept");
	return id;
}

static struct rdma_cm_id *connect_to(struct rdma_cm_id *listener, struct rdma_cm_id **server)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = wanted();
	struct rdma_cm_id *id;
	pthread_t thread;
	char port[8];
	void *accepted;

	snprintf(port, sizeof(port), "%d", ntohs(rdma_get_src_port(listener)));
	expect(!pthread_create(&thread, NULL, accept_one, listener), "thread");
	expect(!rdma_getaddrinfo("10.77.0.2", port, &hints, &found), "address");
	expect(!rdma_create_ep(&id, found, NULL, &attr) && !rdma_connect(id, NULL), "connect");
	rdma_freeaddrinfo(found);
	pthread_join(thread, &accepted);
	*server = accepted;
	return id;
}

int main(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = wanted();
	struct rdma_cm_id *listener;

	expect(!rdma_getaddrinfo("10.77.0.2", "0", &hints, &found), "address");
	expect(!rdma_create_ep(&listener, found, NULL, &attr) && !rdma_listen(listener, 4), "listen");
	for (int round = 0; round < 8; round++) {
		enum { BLOCKS = 400 };
		struct rdma_cm_id *server, *second_server;
		struct rdma_cm_id *id = connect_to(listener, &server), *second;
		struct ibv_qp_attr state;
		struct ibv_qp_init_attr init;
		void *blocks[BLOCKS];

		expect(!ibv_destroy_qp(id->qp), "ibv_destroy_qp");
		/* A queue pair that may get the memory and the number of the destroyed one. */
		second = connect_to(listener, &second_server);
		for (int i = 0; i < BLOCKS; i++) {
			expect((blocks[i] = malloc(64 + i * 8)) != NULL, "malloc");
			memset(blocks[i], 0x41, 64 + i * 8);
		}
		expect(!rdma_destroy_id(id), "rdma_destroy_id");
		expect(!ibv_query_qp(second->qp, &state, IBV_QP_STATE, &init) && state.qp_state == IBV_QPS_RTS,
		       "the other connection");
		for (int i = 0; i < BLOCKS; i++)
			free(blocks[i]);
		rdma_destroy_ep(second);
		rdma_destroy_ep(second_server);
		rdma_destroy_ep(server);
	}
	puts("done");
	return 0;
}
