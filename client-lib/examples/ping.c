/* A SEND, an RDMA WRITE and an RDMA READ between two devices of one daemon, in one
 * process: `ping [socket [server-device client-device]]`, default siw0 and siw1.
 * Prints "ok".
 *
 *   cc ping.c -I../include -lsiw
 */
#include <siw.h>

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define SIZE 65536

struct side {
	siw_pd *pd;
	siw_channel *channel;
	siw_cq *cq;
	siw_cm_channel *cm;
	siw_mr *mr;
	siw_qp *qp;
};

/* Address and key of a buffer for the peer, sent as private data. */
struct buffer {
	uint64_t addr;
	uint32_t rkey;
	uint32_t len;
};

static void die(const char *what, int err)
{
	fprintf(stderr, "ping: %s: %s (errno %d)\n", what, siw_last_error(), err);
	exit(1);
}

#define CHECK(call)                            \
	do {                                   \
		int check_err = (call);        \
		if (check_err)                 \
			die(#call, check_err); \
	} while (0)

static void setup(siw_context *ctx, struct side *s)
{
	struct siw_qp_init_attr attr = {
		.size = sizeof(struct siw_qp_init_attr),
		.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1,
		.max_inline_data = 64,
	};

	CHECK(siw_alloc_pd(ctx, &s->pd));
	CHECK(siw_create_channel(ctx, &s->channel));
	CHECK(siw_create_cq(ctx, 32, s->channel, 0, &s->cq));
	CHECK(siw_create_cm_channel(ctx, &s->cm));
	CHECK(siw_alloc_mr(s->pd, 2 * SIZE,
			   SIW_ACCESS_LOCAL_WRITE | SIW_ACCESS_REMOTE_WRITE | SIW_ACCESS_REMOTE_READ,
			   &s->mr));
	attr.send_cq = s->cq;
	attr.recv_cq = s->cq;
	CHECK(siw_create_qp(s->pd, &attr, &s->qp));
}

static void teardown(struct side *s)
{
	siw_destroy_qp(s->qp);
	siw_free_mr(s->mr);
	siw_destroy_cm_channel(s->cm);
	siw_destroy_cq(s->cq);
	siw_destroy_channel(s->channel);
	siw_dealloc_pd(s->pd);
}

static struct siw_sge part(struct side *s, size_t off, uint32_t len)
{
	struct siw_sge sge = { siw_mr_addr(s->mr) + off, len, siw_mr_lkey(s->mr) };
	return sge;
}

static void expect(struct side *s, uint64_t wr_id)
{
	struct siw_wc wc;
	int n = siw_wait_cq(s->cq, 1, &wc, TIMEOUT_MS);

	if (n != 1)
		die("no completion", -n);
	if (wc.status != SIW_WC_SUCCESS || wc.wr_id != wr_id) {
		fprintf(stderr, "ping: completion %llu (wanted %llu): %s\n",
			(unsigned long long)wc.wr_id, (unsigned long long)wr_id,
			siw_wc_status_str(wc.status));
		exit(1);
	}
}

static void post(struct side *s, struct siw_send_wr *wr)
{
	CHECK(siw_post_send(s->qp, wr, 1, NULL));
}

static struct siw_cm_event next_event(struct side *s, uint32_t type)
{
	struct siw_cm_event ev;

	CHECK(siw_get_cm_event(s->cm, &ev, TIMEOUT_MS));
	if (ev.type != type) {
		fprintf(stderr, "ping: event %u (wanted %u): %s\n", ev.type, type, ev.reason);
		exit(1);
	}
	return ev;
}

static uint32_t find(struct siw_device_attr *devs, int n, const char *name)
{
	for (int i = 0; i < n; i++)
		if (!strcmp(devs[i].name, name) && devs[i].num_addrs > 0)
			return i;
	fprintf(stderr, "ping: no device %s with an address\n", name);
	exit(1);
}

int main(int argc, char **argv)
{
	struct siw_device_attr devs[16];
	struct side server, client;
	struct sockaddr_storage addr;
	siw_listener *listener;
	siw_context *ctx;

	CHECK(siw_open(argc > 1 ? argv[1] : NULL, &ctx));
	int n = siw_query_devices(ctx, devs, 16);
	if (n < 0)
		die("siw_query_devices", -n);
	if (n > 16)
		n = 16;
	uint32_t sdev = find(devs, n, argc > 3 ? argv[2] : "siw0");
	uint32_t cdev = find(devs, n, argc > 3 ? argv[3] : "siw1");

	setup(ctx, &server);
	setup(ctx, &client);

	/* Connect; the server sends the address of its memory. Port 0: any. */
	CHECK(siw_listen(server.cm, sdev, (struct sockaddr *)&devs[sdev].addrs[0],
			 sizeof(devs[sdev].addrs[0]), 1, 0, &listener));
	CHECK(siw_listener_addr(listener, &addr));
	CHECK(siw_connect(client.qp, client.cm, cdev, (struct sockaddr *)&addr, sizeof(addr), NULL));
	struct siw_cm_event req = next_event(&server, SIW_CM_CONNECT_REQUEST);

	struct siw_sge recv_sge = part(&server, SIZE, SIZE);
	struct siw_recv_wr recv = { .wr_id = 1, .sg_list = &recv_sge, .num_sge = 1 };
	CHECK(siw_post_recv(server.qp, &recv, 1, NULL));
	struct buffer mine = { siw_mr_addr(server.mr), siw_mr_rkey(server.mr), SIZE };
	struct siw_conn_param param = { .size = sizeof(param), .private_data = &mine, .private_data_len = sizeof(mine) };
	CHECK(siw_accept(req.request, server.qp, NULL, &param));
	struct siw_cm_event est = next_event(&client, SIW_CM_ESTABLISHED);
	next_event(&server, SIW_CM_ESTABLISHED);

	struct buffer theirs;
	if (est.private_data_len < sizeof(theirs)) {
		fprintf(stderr, "ping: no private data\n");
		return 1;
	}
	memcpy(&theirs, est.private_data, sizeof(theirs));

	/* WRITE, READ back into the other half, compare. */
	unsigned char *out = siw_mr_ptr(client.mr), *in = out + SIZE;
	for (int i = 0; i < SIZE; i++)
		out[i] = (unsigned char)(i * 7 + (i >> 8));
	struct siw_sge sge = part(&client, 0, SIZE);
	struct siw_send_wr wr = {
		.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = SIW_WR_RDMA_WRITE,
		.flags = SIW_SEND_SIGNALED, .remote_addr = theirs.addr, .rkey = theirs.rkey,
	};
	post(&client, &wr);
	expect(&client, 2);
	sge = part(&client, SIZE, SIZE);
	wr.wr_id = 3;
	wr.opcode = SIW_WR_RDMA_READ;
	post(&client, &wr);
	expect(&client, 3);
	if (memcmp(out, in, SIZE) || memcmp(out, siw_mr_ptr(server.mr), SIZE)) {
		fprintf(stderr, "ping: data mismatch\n");
		return 1;
	}

	/* An inline SEND. */
	static const char text[] = "hello";
	sge.addr = (uintptr_t)text;
	sge.length = sizeof(text);
	wr.wr_id = 4;
	wr.opcode = SIW_WR_SEND;
	wr.flags = SIW_SEND_SIGNALED | SIW_SEND_INLINE;
	post(&client, &wr);
	expect(&client, 4);
	expect(&server, 1);
	if (memcmp((char *)siw_mr_ptr(server.mr) + SIZE, text, sizeof(text))) {
		fprintf(stderr, "ping: message mismatch\n");
		return 1;
	}

	CHECK(siw_disconnect(client.qp));
	next_event(&client, SIW_CM_DISCONNECTED);
	siw_destroy_listener(listener);
	teardown(&client);
	teardown(&server);
	siw_close(ctx);
	puts("ok");
	return 0;
}
