/* Unreliable datagrams between two devices of one daemon, and to a multicast group, in one process:
 * `datagrams [socket]`. Prints "ok".
 *
 *   cc datagrams.c -I../include -lsiw
 */
#include <siw.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define QKEY 0x11111111u
#define ROOM 256

static void die(const char *what, int err)
{
	fprintf(stderr, "datagrams: %s: %s (errno %d)\n", what, siw_last_error(), err);
	exit(1);
}

#define CHECK(call)                            \
	do {                                   \
		int check_err = (call);        \
		if (check_err)                 \
			die(#call, check_err); \
	} while (0)

#define MUST(what)                                               \
	do {                                                     \
		if (!(what)) {                                   \
			fprintf(stderr, "datagrams: %s\n", #what); \
			exit(1);                                 \
		}                                                \
	} while (0)

struct end {
	siw_pd *pd;
	siw_cq *cq;
	siw_mr *mr;
	siw_qp *qp;
};

static void open_end(siw_context *ctx, uint32_t device, struct end *end)
{
	struct siw_qp_init_attr attr;

	memset(&attr, 0, sizeof attr);
	CHECK(siw_alloc_pd(ctx, &end->pd));
	CHECK(siw_create_cq(ctx, 16, NULL, 0, &end->cq));
	CHECK(siw_alloc_mr(end->pd, ROOM, SIW_ACCESS_LOCAL_WRITE, &end->mr));
	attr.size = sizeof attr;
	attr.send_cq = attr.recv_cq = end->cq;
	attr.max_send_wr = attr.max_recv_wr = 4;
	attr.max_send_sge = attr.max_recv_sge = 1;
	attr.max_inline_data = 64;
	attr.sq_sig_all = 1;
	CHECK(siw_create_qp(end->pd, &attr, &end->qp));
	CHECK(siw_start_datagrams(end->qp, device, QKEY));
}

static void close_end(struct end *end)
{
	siw_destroy_qp(end->qp);
	siw_free_mr(end->mr);
	siw_destroy_cq(end->cq);
	siw_dealloc_pd(end->pd);
}

static void post_receive(struct end *end)
{
	struct siw_sge sge = { siw_mr_addr(end->mr), ROOM, siw_mr_lkey(end->mr) };
	struct siw_recv_wr wr = { 2, &sge, 1, 0 };

	CHECK(siw_post_recv(end->qp, &wr, 1, NULL));
}

static siw_ah *handle(siw_context *ctx, uint32_t device, struct sockaddr_in *to, const char *text)
{
	struct siw_ah_attr attr;
	siw_ah *ah;

	memset(to, 0, sizeof *to);
	to->sin_family = AF_INET;
	MUST(inet_pton(AF_INET, text, &to->sin_addr) == 1);
	memset(&attr, 0, sizeof attr);
	attr.size = sizeof attr;
	attr.device = device;
	attr.remote = (struct sockaddr *)to;
	attr.remote_len = sizeof *to;
	CHECK(siw_create_ah(ctx, &attr, &ah));
	return ah;
}

static void send_text(struct end *end, const siw_ah *ah, uint32_t qpn, const char *text)
{
	struct siw_sge sge = { (uintptr_t)text, (uint32_t)strlen(text) + 1, 0 };
	struct siw_send_wr wr;
	struct siw_wc wc;

	memset(&wr, 0, sizeof wr);
	wr.wr_id = 1;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.opcode = SIW_WR_SEND_WITH_IMM;
	wr.imm_data = 7;
	wr.flags = SIW_SEND_INLINE | SIW_SEND_TO_AH;
	wr.ud.ah = ah;
	wr.ud.remote_qpn = qpn;
	wr.ud.remote_qkey = QKEY;
	CHECK(siw_post_send(end->qp, &wr, 1, NULL));
	MUST(siw_wait_cq(end->cq, 1, &wc, TIMEOUT_MS) == 1);
	MUST(wc.wr_id == 1 && wc.status == SIW_WC_SUCCESS);
}

static void expect_text(struct end *end, struct end *from, const char *text)
{
	struct siw_wc wc;

	MUST(siw_wait_cq(end->cq, 1, &wc, TIMEOUT_MS) == 1);
	MUST(wc.wr_id == 2 && wc.status == SIW_WC_SUCCESS);
	MUST(wc.flags == (SIW_WC_GRH | SIW_WC_IPV4 | SIW_WC_WITH_IMM) && wc.imm_data == 7);
	MUST(wc.byte_len == SIW_GRH_LEN + strlen(text) + 1);
	MUST(wc.src_qp == siw_qp_num(from->qp));
	MUST(strcmp((char *)siw_mr_ptr(end->mr) + SIW_GRH_LEN, text) == 0);
}

int main(int argc, char **argv)
{
	struct end here, there;
	struct sockaddr_in to, group;
	siw_context *ctx;
	siw_ah *host, *all;

	CHECK(siw_open(argc > 1 ? argv[1] : NULL, &ctx));
	open_end(ctx, 0, &here);
	open_end(ctx, 1, &there);

	post_receive(&there);
	host = handle(ctx, 0, &to, "10.77.0.2");
	send_text(&here, host, siw_qp_num(there.qp), "to one host");
	expect_text(&there, &here, "to one host");

	all = handle(ctx, 0, &group, "239.7.7.7");
	CHECK(siw_attach_group(there.qp, (struct sockaddr *)&group, sizeof group));
	post_receive(&there);
	send_text(&here, all, SIW_MULTICAST_QPN, "to all");
	expect_text(&there, &here, "to all");
	CHECK(siw_detach_group(there.qp, (struct sockaddr *)&group, sizeof group));

	siw_destroy_ah(all);
	siw_destroy_ah(host);
	close_end(&here);
	close_end(&there);
	siw_close(ctx);
	puts("ok");
	return 0;
}
