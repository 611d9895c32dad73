/* A server whose queue pairs share one receive queue, and a client that stops and
 * resumes sending (SQD), in one process between two devices of one daemon:
 * `shared [socket]`. Prints "ok".
 *
 *   cc shared.c -I../include -lsiw
 */
#include <siw.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define CLIENTS 3
#define SLOT 64
#define DEPTH 16

static void die(const char *what, int err)
{
	fprintf(stderr, "shared: %s: %s (errno %d)\n", what, siw_last_error(), err);
	exit(1);
}

#define CHECK(call)                            \
	do {                                   \
		int check_err = (call);        \
		if (check_err)                 \
			die(#call, check_err); \
	} while (0)

#define MUST(what)                                            \
	do {                                                  \
		if (!(what)) {                                \
			fprintf(stderr, "shared: %s\n", #what); \
			exit(1);                              \
		}                                             \
	} while (0)

static struct siw_wc completion(siw_cq *cq)
{
	struct siw_wc wc;
	int n = siw_wait_cq(cq, 1, &wc, TIMEOUT_MS);

	if (n != 1)
		die("no completion", -n);
	return wc;
}

static void expect_event(siw_context *ctx, uint32_t type, uint32_t object)
{
	struct siw_async_event ev;

	CHECK(siw_get_async_event(ctx, &ev, TIMEOUT_MS));
	if (ev.type != type || ev.object != object) {
		fprintf(stderr, "shared: event %u of %u (wanted %u of %u): %s\n", ev.type, ev.object,
			type, object, ev.reason);
		exit(1);
	}
}

static struct siw_cm_event cm_event(siw_cm_channel *cm, uint32_t type)
{
	struct siw_cm_event ev;

	CHECK(siw_get_cm_event(cm, &ev, TIMEOUT_MS));
	if (ev.type != type) {
		fprintf(stderr, "shared: event %u (wanted %u): %s\n", ev.type, type, ev.reason);
		exit(1);
	}
	return ev;
}

static void post_shared(siw_srq *srq, siw_mr *mr, uint64_t slot)
{
	struct siw_sge sge = { siw_mr_addr(mr) + slot * SLOT, SLOT, siw_mr_lkey(mr) };
	struct siw_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 };

	CHECK(siw_post_srq_recv(srq, &wr, 1, NULL));
}

static void send_text(siw_qp *qp, uint64_t wr_id, const char *text)
{
	struct siw_sge sge = { (uintptr_t)text, (uint32_t)strlen(text) + 1, 0 };
	struct siw_send_wr wr = {
		.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = SIW_WR_SEND,
		.flags = SIW_SEND_SIGNALED | SIW_SEND_INLINE,
	};

	CHECK(siw_post_send(qp, &wr, 1, NULL));
}

static void count(const struct siw_wc *wc, void *arg)
{
	if (wc->status == SIW_WC_WR_FLUSH_ERR)
		++*(int *)arg;
}

int main(int argc, char **argv)
{
	struct siw_device_attr devs[2];
	struct sockaddr_storage addr;
	siw_context *server, *client;
	siw_pd *spd, *cpd;
	siw_cq *scq, *ccq;
	siw_cm_channel *scm, *ccm;
	siw_mr *mr;
	siw_srq *srq;
	siw_listener *listener;
	siw_qp *sqp[CLIENTS], *cqp[CLIENTS];
	struct siw_limits limits;

	CHECK(siw_open(argc > 1 ? argv[1] : NULL, &server));
	CHECK(siw_open(argc > 1 ? argv[1] : NULL, &client));
	MUST(siw_query_devices(server, devs, 2) >= 2);
	CHECK(siw_query_limits(server, &limits));
	MUST(limits.max_srq_wr >= DEPTH && limits.max_inline_data >= 256 && limits.max_sge >= 16);

	CHECK(siw_alloc_pd(server, &spd));
	CHECK(siw_create_cq(server, DEPTH, NULL, 0, &scq));
	CHECK(siw_create_cm_channel(server, &scm));
	CHECK(siw_alloc_mr(spd, DEPTH * SLOT, SIW_ACCESS_LOCAL_WRITE, &mr));
	struct siw_srq_attr srq_attr = { .size = sizeof(srq_attr), .max_wr = DEPTH / 2, .max_sge = 1 };
	CHECK(siw_create_srq(spd, &srq_attr, &srq));
	CHECK(siw_listen(scm, 0, (struct sockaddr *)&devs[0].addrs[0], sizeof(devs[0].addrs[0]), 8, 0,
			 &listener));
	CHECK(siw_listener_addr(listener, &addr));

	CHECK(siw_alloc_pd(client, &cpd));
	CHECK(siw_create_cq(client, DEPTH, NULL, 0, &ccq));
	CHECK(siw_create_cm_channel(client, &ccm));
	for (int i = 0; i < CLIENTS; i++) {
		struct siw_qp_init_attr to = {
			.size = sizeof(struct siw_qp_init_attr),
			.send_cq = scq, .recv_cq = scq, .max_send_wr = 1, .max_send_sge = 1, .srq = srq,
		};
		struct siw_qp_init_attr from = {
			.size = sizeof(struct siw_qp_init_attr),
			.send_cq = ccq, .recv_cq = ccq, .max_send_wr = 4, .max_recv_wr = 2,
			.max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64,
		};

		CHECK(siw_create_qp(spd, &to, &sqp[i]));
		CHECK(siw_create_qp(cpd, &from, &cqp[i]));
		CHECK(siw_connect(cqp[i], ccm, 1, (struct sockaddr *)&addr, sizeof(addr), NULL));
		struct siw_cm_event req = cm_event(scm, SIW_CM_CONNECT_REQUEST);
		CHECK(siw_accept(req.request, sqp[i], NULL, NULL));
		cm_event(ccm, SIW_CM_ESTABLISHED);
		cm_event(scm, SIW_CM_ESTABLISHED);
	}

	/* Grow it, fill it, wait for its low-water event. */
	srq_attr.max_wr = DEPTH;
	srq_attr.srq_limit = DEPTH - 1;
	CHECK(siw_modify_srq(srq, &srq_attr, SIW_SRQ_MAX_WR));
	for (uint64_t i = 0; i < DEPTH; i++)
		post_shared(srq, mr, i);
	CHECK(siw_modify_srq(srq, &srq_attr, SIW_SRQ_LIMIT));
	for (int i = 0; i < CLIENTS; i++) {
		char text[16];

		snprintf(text, sizeof(text), "from %d", i);
		send_text(cqp[i], 1, text);
		struct siw_wc wc = completion(scq);
		MUST(wc.status == SIW_WC_SUCCESS && wc.qp_num == siw_qp_num(sqp[i]));
		MUST(!strcmp((char *)siw_mr_ptr(mr) + wc.wr_id * SLOT, text));
		MUST(completion(ccq).status == SIW_WC_SUCCESS);
	}
	expect_event(server, SIW_EVENT_SRQ_LIMIT_REACHED, siw_srq_num(srq));
	CHECK(siw_query_srq(srq, &srq_attr));
	MUST(srq_attr.posted == DEPTH - CLIENTS && srq_attr.srq_limit == 0);

	/* Stop sending, query the state, resume. */
	struct siw_qp_attr attr;
	struct siw_wc wc;
	CHECK(siw_modify_qp(cqp[0], SIW_QPS_SQD));
	expect_event(client, SIW_EVENT_SQ_DRAINED, siw_qp_num(cqp[0]));
	send_text(cqp[0], 2, "held back");
	CHECK(siw_query_qp(cqp[0], &attr));
	MUST(attr.state == SIW_QPS_SQD && attr.verbs_state == 4 && !attr.sq_draining);
	MUST(siw_poll_cq(scq, 1, &wc) == 0);
	CHECK(siw_modify_qp(cqp[0], SIW_QPS_RTS));
	MUST(completion(scq).status == SIW_WC_SUCCESS);
	MUST(completion(ccq).wr_id == 2);

	/* A longer completion queue, with event moderation. */
	CHECK(siw_resize_cq(scq, 4 * DEPTH));
	MUST(siw_cq_capacity(scq) >= 4 * DEPTH);
	CHECK(siw_modify_cq(scq, 8, 100));

	/* All posted requests complete before the memory is freed. */
	int flushed = 0;
	struct siw_recv_wr recv = { .wr_id = 9 };
	CHECK(siw_post_recv(cqp[0], &recv, 1, NULL));
	CHECK(siw_drain_sq(cqp[0], count, &flushed, TIMEOUT_MS));
	CHECK(siw_drain_rq(cqp[0], count, &flushed, TIMEOUT_MS));
	MUST(flushed == 1 && siw_qp_state(cqp[0]) == SIW_QPS_ERROR);
	do
		CHECK(siw_get_async_event(server, &(struct siw_async_event){ 0 }, TIMEOUT_MS));
	while (siw_qp_state(sqp[0]) != SIW_QPS_ERROR);
	CHECK(siw_modify_qp(cqp[0], SIW_QPS_IDLE));
	MUST(siw_qp_state(cqp[0]) == SIW_QPS_IDLE);

	for (int i = 0; i < CLIENTS; i++) {
		siw_destroy_qp(cqp[i]);
		siw_destroy_qp(sqp[i]);
	}
	siw_destroy_listener(listener);
	siw_destroy_srq(srq);
	siw_free_mr(mr);
	siw_destroy_cq(scq);
	siw_destroy_cq(ccq);
	siw_destroy_cm_channel(scm);
	siw_destroy_cm_channel(ccm);
	siw_dealloc_pd(spd);
	siw_dealloc_pd(cpd);
	siw_close(server);
	siw_close(client);
	puts("ok");
	return 0;
}
