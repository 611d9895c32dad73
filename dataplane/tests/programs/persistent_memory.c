/*
 * librpma: a server whose memory a client writes, flushes and reads.
 *
 *   persistent_memory server ADDRESS PORT
 *   persistent_memory client ADDRESS PORT
 */
#include <librpma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH = 1 << 20, PIECE = 64 << 10 };

static void check(int result, const char *what)
{
	if (result) {
		fprintf(stderr, "%s: %s\n", what, rpma_err_2str(result));
		exit(1);
	}
}

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s\n", what);
		exit(1);
	}
}

static void fill(uint8_t *memory)
{
	for (size_t i = 0; i < LENGTH; i++)
		memory[i] = (uint8_t)(i * 7 + i / 251);
}

static void await(struct rpma_conn *connection, enum rpma_conn_event expected)
{
	enum rpma_conn_event event;

	check(rpma_conn_next_event(connection, &event), "rpma_conn_next_event");
	expect(event == expected, rpma_utils_conn_event_2str(event));
}

/* Waits for the completion with this context. */
static void await_completion(struct rpma_conn *connection, const void *context)
{
	struct rpma_cq *queue;
	struct ibv_wc completion;

	check(rpma_conn_get_cq(connection, &queue), "rpma_conn_get_cq");
	check(rpma_cq_wait(queue), "rpma_cq_wait");
	check(rpma_cq_get_wc(queue, 1, &completion, NULL), "rpma_cq_get_wc");
	expect(completion.status == IBV_WC_SUCCESS, ibv_wc_status_str(completion.status));
	expect(completion.wr_id == (uintptr_t)context, "the completion of another request");
}

static void serve(struct rpma_peer *peer, const char *address, const char *port)
{
	uint8_t *memory = calloc(1, LENGTH), *expected = malloc(LENGTH), descriptor[64];
	struct rpma_conn_private_data data = { .ptr = descriptor };
	struct rpma_mr_local *region;
	struct rpma_conn_req *request;
	struct rpma_conn *connection;
	struct rpma_ep *endpoint;
	size_t length;

	check(rpma_mr_reg(peer, memory, LENGTH,
			  RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY,
			  &region), "rpma_mr_reg");
	check(rpma_mr_get_descriptor_size(region, &length), "rpma_mr_get_descriptor_size");
	expect(length <= sizeof descriptor, "a longer descriptor than expected");
	check(rpma_mr_get_descriptor(region, descriptor), "rpma_mr_get_descriptor");
	data.len = (uint8_t)length;
	check(rpma_ep_listen(peer, address, port, &endpoint), "rpma_ep_listen");
	check(rpma_ep_next_conn_req(endpoint, NULL, &request), "rpma_ep_next_conn_req");
	check(rpma_conn_req_connect(&request, &data, &connection), "rpma_conn_req_connect");
	await(connection, RPMA_CONN_ESTABLISHED);
	await(connection, RPMA_CONN_CLOSED);
	fill(expected);
	expect(!memcmp(memory, expected, LENGTH), "the memory of the server");
	check(rpma_conn_disconnect(connection), "rpma_conn_disconnect");
	check(rpma_conn_delete(&connection), "rpma_conn_delete");
	check(rpma_ep_shutdown(&endpoint), "rpma_ep_shutdown");
	check(rpma_mr_dereg(&region), "rpma_mr_dereg");
}

static void use(struct rpma_peer *peer, const char *address, const char *port)
{
	uint8_t *memory = malloc(LENGTH), *got = calloc(1, LENGTH);
	struct rpma_mr_local *source, *sink;
	struct rpma_conn_private_data data;
	struct rpma_conn_req *request;
	struct rpma_conn *connection;
	struct rpma_mr_remote *there;

	fill(memory);
	check(rpma_mr_reg(peer, memory, LENGTH, RPMA_MR_USAGE_WRITE_SRC, &source), "rpma_mr_reg");
	check(rpma_mr_reg(peer, got, LENGTH, RPMA_MR_USAGE_READ_DST, &sink), "rpma_mr_reg");
	check(rpma_conn_req_new(peer, address, port, NULL, &request), "rpma_conn_req_new");
	check(rpma_conn_req_connect(&request, NULL, &connection), "rpma_conn_req_connect");
	await(connection, RPMA_CONN_ESTABLISHED);
	check(rpma_conn_get_private_data(connection, &data), "rpma_conn_get_private_data");
	check(rpma_mr_remote_from_descriptor(data.ptr, data.len, &there), "rpma_mr_remote_from_descriptor");
	for (size_t at = 0; at < LENGTH; at += PIECE) {
		check(rpma_write(connection, there, at, source, at, PIECE, RPMA_F_COMPLETION_ON_ERROR, NULL),
		      "rpma_write");
		check(rpma_flush(connection, there, at, PIECE, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS,
				 memory + at), "rpma_flush");
		await_completion(connection, memory + at);
		check(rpma_read(connection, sink, at, there, at, PIECE, RPMA_F_COMPLETION_ALWAYS, got + at),
		      "rpma_read");
		await_completion(connection, got + at);
	}
	expect(!memcmp(got, memory, LENGTH), "the memory that was read");
	check(rpma_mr_remote_delete(&there), "rpma_mr_remote_delete");
	check(rpma_conn_disconnect(connection), "rpma_conn_disconnect");
	await(connection, RPMA_CONN_CLOSED);
	check(rpma_conn_delete(&connection), "rpma_conn_delete");
	check(rpma_mr_dereg(&source), "rpma_mr_dereg");
	check(rpma_mr_dereg(&sink), "rpma_mr_dereg");
}

int main(int argc, char **argv)
{
	struct ibv_context *device;
	struct rpma_peer *peer;
	int is_server;

	expect(argc == 4, "three arguments");
	is_server = !strcmp(argv[1], "server");
	check(rpma_utils_get_ibv_context(argv[2],
					 is_server ? RPMA_UTIL_IBV_CONTEXT_LOCAL : RPMA_UTIL_IBV_CONTEXT_REMOTE,
					 &device), "rpma_utils_get_ibv_context");
	check(rpma_peer_new(device, &peer), "rpma_peer_new");
	if (is_server)
		serve(peer, argv[2], argv[3]);
	else
		use(peer, argv[2], argv[3]);
	check(rpma_peer_delete(&peer), "rpma_peer_delete");
	puts("done");
	return 0;
}
