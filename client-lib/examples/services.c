/* A datagram service: one end asks it for its queue pair and sends to that, refusals, and a port without a
 * service, in one process: `services [socket]`. Prints "ok".
 *
 *   cc services.c -I../include -lsiw
 */
#include <siw.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define ROOM 256

static void die(const char *what, int err)
{
	fprintf(stderr, "services: %s: %s (errno %d)\n", what, siw_last_error(), err);
	exit(1);
}

#define CHECK(call)                            \
	do {                                   \
		int check_err = (call);        \
		if (check_err)                 \
			die(#call, check_err); \
	} while (0)

#define MUST(what)                                                \
	do {                                                      \
		if (!(what)) {                                    \
			fprintf(stderr, "services: %s\n", #what); \
			exit(1);                                  \
		}                                                 \
	} while (0)

/* A queue pair of datagrams, and a channel for the events of services. */
struct end {
	siw_context *ctx;
	siw_pd *pd;
	siw_cq *cq;
	siw_mr *mr;
	siw_qp *qp;
	siw_cm_channel *ch;
};

static void open_end(const char *socket_path, uint32_t device, struct end *end)
{
	struct siw_qp_init_attr attr;

	memset(&attr, 0, sizeof attr);
	CHECK(siw_open(socket_path, &end->ctx));
	CHECK(siw_alloc_pd(end->ctx, &end->pd));
	CHECK(siw_create_cq(end->ctx, 16, NULL, 0, &end->cq));
	CHECK(siw_alloc_mr(end->pd, ROOM, SIW_ACCESS_LOCAL_WRITE, &end->mr));
	attr.size = sizeof attr;
	attr.send_cq = attr.recv_cq = end->cq;
	attr.max_send_wr = attr.max_recv_wr = 4;
	attr.max_send_sge = attr.max_recv_sge = 1;
	attr.max_inline_data = 64;
	attr.sq_sig_all = 1;
	CHECK(siw_create_qp(end->pd, &attr, &end->qp));
	CHECK(siw_start_datagrams(end->qp, device, SIW_SERVICE_QKEY));
	CHECK(siw_create_cm_channel(end->ctx, &end->ch));
}

static void close_end(struct end *end)
{
	siw_destroy_cm_channel(end->ch);
	siw_destroy_qp(end->qp);
	siw_free_mr(end->mr);
	siw_destroy_cq(end->cq);
	siw_dealloc_pd(end->pd);
	siw_close(end->ctx);
}

static struct sockaddr_in address(const char *text, uint16_t port)
{
	struct sockaddr_in at;

	memset(&at, 0, sizeof at);
	at.sin_family = AF_INET;
	at.sin_port = htons(port);
	MUST(inet_pton(AF_INET, text, &at.sin_addr) == 1);
	return at;
}

/* Asks for the service, from the first device. */
static siw_search *find(struct end *end, struct sockaddr_in to, const char *text, uint64_t cookie)
{
	struct siw_search_param param;
	siw_search *search;

	memset(&param, 0, sizeof param);
	param.size = sizeof param;
	param.private_data = text;
	param.private_data_len = text ? (uint32_t)strlen(text) + 1 : 0;
	param.timeout_ms = TIMEOUT_MS;
	param.cookie = cookie;
	CHECK(siw_find_service(end->ch, 0, (struct sockaddr *)&to, sizeof to, &param, &search));
	return search;
}

static siw_service_request *await_request(struct end *server, const char *text)
{
	struct siw_service_event event;
	struct sockaddr_in *local = (struct sockaddr_in *)&event.local;

	CHECK(siw_get_service_event(server->ch, &event, TIMEOUT_MS));
	MUST(event.type == SIW_SERVICE_REQUEST && event.err == 0 && event.request);
	MUST(event.cookie == 5 && event.device == 1);
	MUST(local->sin_addr.s_addr == inet_addr("10.77.0.2"));
	MUST(event.private_data_len == 180 && strcmp((char *)event.private_data, text) == 0);
	return event.request;
}

static struct siw_service_event await_reply(struct end *client, uint64_t cookie)
{
	struct siw_service_event event;

	CHECK(siw_get_service_event(client->ch, &event, TIMEOUT_MS));
	MUST(event.type == SIW_SERVICE_REPLY && event.request == NULL);
	MUST(event.cookie == cookie && event.device == 0);
	return event;
}

static void send_text(struct end *end, const struct siw_service_event *to, const char *text)
{
	struct siw_sge sge = { (uintptr_t)text, (uint32_t)strlen(text) + 1, 0 };
	struct siw_ah_attr attr;
	struct siw_send_wr wr;
	struct siw_wc wc;
	siw_ah *ah;

	memset(&attr, 0, sizeof attr);
	attr.size = sizeof attr;
	attr.device = to->device;
	attr.remote = (const struct sockaddr *)&to->peer;
	attr.remote_len = sizeof to->peer;
	CHECK(siw_create_ah(end->ctx, &attr, &ah));
	memset(&wr, 0, sizeof wr);
	wr.wr_id = 1;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.opcode = SIW_WR_SEND;
	wr.flags = SIW_SEND_INLINE | SIW_SEND_TO_AH;
	wr.ud.ah = ah;
	wr.ud.remote_qpn = to->qp_num;
	wr.ud.remote_qkey = to->qkey;
	CHECK(siw_post_send(end->qp, &wr, 1, NULL));
	MUST(siw_wait_cq(end->cq, 1, &wc, TIMEOUT_MS) == 1);
	MUST(wc.status == SIW_WC_SUCCESS);
	siw_destroy_ah(ah);
}

static void expect_text(struct end *end, const char *text)
{
	struct siw_wc wc;

	MUST(siw_wait_cq(end->cq, 1, &wc, TIMEOUT_MS) == 1);
	MUST(wc.wr_id == 2 && wc.status == SIW_WC_SUCCESS);
	MUST(strcmp((char *)siw_mr_ptr(end->mr) + SIW_GRH_LEN, text) == 0);
}

int main(int argc, char **argv)
{
	const char *socket_path = argc > 1 ? argv[1] : NULL;
	struct end client, server;
	struct siw_service_event event;
	struct sockaddr_storage bound;
	struct sockaddr_in at, to;
	siw_listener *listener;
	siw_search *search;

	open_end(socket_path, 0, &client);
	open_end(socket_path, 1, &server);
	at = address("10.77.0.2", 0);
	CHECK(siw_listen_service(server.ch, SIW_ANY_DEVICE, (struct sockaddr *)&at, sizeof at, 8, 5, &listener));
	CHECK(siw_listener_addr(listener, &bound));
	to = *(struct sockaddr_in *)&bound;
	MUST(to.sin_port != 0 && to.sin_addr.s_addr == at.sin_addr.s_addr);

	/* The service names its queue pair, and gets a datagram. */
	search = find(&client, to, "who?", 1);
	CHECK(siw_accept_service(await_request(&server, "who?"), server.qp, SIW_SERVICE_QKEY, "me", 3));
	event = await_reply(&client, 1);
	siw_end_search(search);
	MUST(event.err == 0 && event.sidr_status == 0);
	MUST(event.qp_num == siw_qp_num(server.qp) && event.qkey == SIW_SERVICE_QKEY);
	MUST(event.private_data_len == 136 && strcmp((char *)event.private_data, "me") == 0);
	{
		struct siw_sge sge = { siw_mr_addr(server.mr), ROOM, siw_mr_lkey(server.mr) };
		struct siw_recv_wr wr = { 2, &sge, 1, 0 };

		CHECK(siw_post_recv(server.qp, &wr, 1, NULL));
	}
	send_text(&client, &event, "hello");
	expect_text(&server, "hello");

	/* It refuses. */
	search = find(&client, to, NULL, 2);
	CHECK(siw_reject_service(await_request(&server, ""), "no", 3));
	event = await_reply(&client, 2);
	siw_end_search(search);
	MUST(event.err == ECONNREFUSED && event.sidr_status == 2 && event.qp_num == 0);
	MUST(strcmp((char *)event.private_data, "no") == 0 && event.reason[0]);

	/* An answer that cannot be given ends the request, too. */
	search = find(&client, to, "long", 3);
	{
		static const char text[137];

		MUST(siw_accept_service(await_request(&server, "long"), server.qp, 1, text, sizeof text) == EINVAL);
	}
	event = await_reply(&client, 3);
	siw_end_search(search);
	MUST(event.err == ECONNREFUSED && event.sidr_status == 2);

	/* Nobody listens any more. */
	siw_destroy_listener(listener);
	CHECK(siw_await_releases(server.ctx));
	search = find(&client, to, NULL, 4);
	event = await_reply(&client, 4);
	siw_end_search(search);
	MUST(event.err == ECONNREFUSED && event.sidr_status == 1);

	/* A search that is ended has no event. */
	to.sin_addr.s_addr = inet_addr("10.77.0.99");
	siw_end_search(find(&client, to, NULL, 5));
	CHECK(siw_await_releases(client.ctx));
	MUST(siw_get_service_event(client.ch, &event, 0) == ETIMEDOUT);

	close_end(&client);
	close_end(&server);
	puts("ok");
	return 0;
}
