/* All work requests that change memory keys or words of the peer, between two devices
 * of one daemon: immediate data, atomics, memory windows of both types, fast
 * registration, re-registration: `windows [socket]`. Prints "ok".
 *
 *   cc windows.c -I../include -lsiw
 */
#include <siw.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define PAGE 4096

static void die(const char *what, int err)
{
	fprintf(stderr, "windows: %s: %s (errno %d)\n", what, siw_last_error(), err);
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
			fprintf(stderr, "windows: %s\n", #what); \
			exit(1);                                 \
		}                                                \
	} while (0)

struct end {
	siw_context *ctx;
	siw_pd *pd;
	siw_cq *cq;
	siw_cm_channel *cm;
	siw_qp *qp;
};

static struct end open_end(const char *socket)
{
	struct end e;
	struct siw_qp_init_attr attr = {
		.size = sizeof(struct siw_qp_init_attr),
		.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1,
		.max_inline_data = 64,
	};

	CHECK(siw_open(socket, &e.ctx));
	CHECK(siw_alloc_pd(e.ctx, &e.pd));
	CHECK(siw_create_cq(e.ctx, 64, NULL, 0, &e.cq));
	CHECK(siw_create_cm_channel(e.ctx, &e.cm));
	attr.send_cq = attr.recv_cq = e.cq;
	CHECK(siw_create_qp(e.pd, &attr, &e.qp));
	return e;
}

static void close_end(struct end *e)
{
	siw_destroy_qp(e->qp);
	siw_destroy_cm_channel(e->cm);
	siw_destroy_cq(e->cq);
	siw_dealloc_pd(e->pd);
	siw_close(e->ctx);
}

static struct siw_cm_event cm_event(siw_cm_channel *cm, uint32_t type)
{
	struct siw_cm_event ev;

	CHECK(siw_get_cm_event(cm, &ev, TIMEOUT_MS));
	if (ev.type != type) {
		fprintf(stderr, "windows: event %u (wanted %u): %s\n", ev.type, type, ev.reason);
		exit(1);
	}
	return ev;
}

static struct siw_wc completed(siw_cq *cq, uint32_t opcode)
{
	struct siw_wc wc;
	int n = siw_wait_cq(cq, 1, &wc, TIMEOUT_MS);

	if (n != 1)
		die("no completion", -n);
	if (wc.status != SIW_WC_SUCCESS || wc.opcode != opcode) {
		fprintf(stderr, "windows: %s, opcode %u (wanted %u)\n",
			siw_wc_status_str(wc.status), wc.opcode, opcode);
		exit(1);
	}
	return wc;
}

static void post(siw_qp *qp, const struct siw_send_wr *wr)
{
	CHECK(siw_post_send(qp, wr, 1, NULL));
}

static void post_recv(siw_qp *qp, siw_mr *mr)
{
	struct siw_sge sge = { siw_mr_addr(mr), 64, siw_mr_lkey(mr) };
	struct siw_recv_wr wr = { .sg_list = &sge, .num_sge = 1 };

	CHECK(siw_post_recv(qp, &wr, 1, NULL));
}

int main(int argc, char **argv)
{
	const char *socket = argc > 1 ? argv[1] : NULL;
	const uint32_t all = SIW_ACCESS_LOCAL_WRITE | SIW_ACCESS_REMOTE_WRITE |
			     SIW_ACCESS_REMOTE_READ | SIW_ACCESS_REMOTE_ATOMIC | SIW_ACCESS_MW_BIND;
	struct siw_device_attr devs[2];
	struct sockaddr_storage addr;
	siw_listener *listener;
	siw_arena *arena;
	siw_mr *mr, *part, *iova;
	siw_mw *one, *two;
	siw_fast_mr *fast;
	struct siw_limits limits;
	struct siw_wc wc;
	struct end a = open_end(socket), b = open_end(socket);

	MUST(siw_query_devices(a.ctx, devs, 2) == 2);
	CHECK(siw_query_limits(a.ctx, &limits));
	MUST(limits.max_mw > 0 && limits.max_fast_pages >= 256);
	CHECK(siw_listen(b.cm, 1, (struct sockaddr *)&devs[1].addrs[0], sizeof(devs[1].addrs[0]), 8,
			 0, &listener));
	CHECK(siw_listener_addr(listener, &addr));
	CHECK(siw_connect(a.qp, a.cm, 0, (struct sockaddr *)&addr, sizeof(addr), NULL));
	CHECK(siw_accept(cm_event(b.cm, SIW_CM_CONNECT_REQUEST).request, b.qp, NULL, NULL));
	cm_event(b.cm, SIW_CM_ESTABLISHED);
	cm_event(a.cm, SIW_CM_ESTABLISHED);

	CHECK(siw_alloc_mr(a.pd, PAGE, SIW_ACCESS_LOCAL_WRITE, &mr));
	CHECK(siw_alloc_arena(b.ctx, 8 * PAGE, 0, &arena));
	CHECK(siw_reg_mr(b.pd, arena, 0, PAGE, all, &part));
	uint64_t *words = siw_mr_ptr(part), *old = siw_mr_ptr(mr);
	struct siw_sge sge = { siw_mr_addr(mr), 8, siw_mr_lkey(mr) };
	struct siw_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .flags = SIW_SEND_SIGNALED,
		.remote_addr = siw_mr_addr(part), .rkey = siw_mr_rkey(part),
	};

	/* Atomics. */
	words[0] = 40;
	wr.opcode = SIW_WR_ATOMIC_FETCH_AND_ADD;
	wr.atomic.compare_add = 2;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_FETCH_ADD);
	MUST(*old == 40 && words[0] == 42);
	wr.opcode = SIW_WR_ATOMIC_CMP_AND_SWP;
	wr.atomic.compare_add = 42;
	wr.atomic.swap = 7;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_COMP_SWAP);
	MUST(*old == 42 && words[0] == 7);
	wr.atomic.compare_add = 0xff07;
	wr.atomic.compare_add_mask = 0xff;
	wr.atomic.swap = UINT64_MAX;
	wr.atomic.swap_mask = 0xff00;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_COMP_SWAP);
	MUST(*old == 7 && words[0] == 0xff07);

	/* Immediate data, with a Write and with a Send. */
	post_recv(b.qp, part);
	post_recv(b.qp, part);
	wr.opcode = SIW_WR_RDMA_WRITE_WITH_IMM;
	wr.imm_data = 0xfeedface;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_WRITE);
	wc = completed(b.cq, SIW_WC_RECV_RDMA_WITH_IMM);
	MUST(wc.imm_data == 0xfeedface && (wc.flags & SIW_WC_WITH_IMM) && words[0] == 7);
	wr.opcode = SIW_WR_SEND_WITH_IMM;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_SEND);
	wc = completed(b.cq, SIW_WC_RECV);
	MUST(wc.imm_data == 0xfeedface && wc.byte_len == 8);

	/* A window of type 1, by siw_bind_mw; its region cannot be freed while it is bound. */
	struct siw_mw_bind info = {
		.addr = siw_mr_addr(part) + 512, .length = 64, .lkey = siw_mr_lkey(part),
		.access = SIW_ACCESS_REMOTE_READ,
	};
	CHECK(siw_alloc_mw(b.pd, 1, &one));
	uint32_t before = siw_mw_rkey(one);
	CHECK(siw_bind_mw(b.qp, one, 1, SIW_SEND_SIGNALED, &info));
	completed(b.cq, SIW_WC_BIND_MW);
	MUST(siw_mw_rkey(one) == siw_inc_rkey(before));
	MUST(siw_dereg_mr(part) == EBUSY);
	MUST(siw_rereg_mr(part, SIW_REREG_ACCESS, NULL, NULL, 0, 0, all) == EBUSY);
	words[64] = 0x1234;
	wr.opcode = SIW_WR_RDMA_READ;
	wr.remote_addr = info.addr;
	wr.rkey = siw_mw_rkey(one);
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_READ);
	MUST(*old == 0x1234);
	siw_dealloc_mw(one);

	/* A window of type 2, by work request; the peer invalidates it. */
	CHECK(siw_alloc_mw(b.pd, 2, &two));
	info.access |= SIW_ACCESS_ZERO_BASED;
	struct siw_send_wr bind = {
		.wr_id = 2, .opcode = SIW_WR_BIND_MW, .flags = SIW_SEND_SIGNALED,
		.bind_mw = { .mw = two, .info = info, .rkey = siw_inc_rkey(siw_mw_rkey(two)) },
	};
	post(b.qp, &bind);
	completed(b.cq, SIW_WC_BIND_MW);
	MUST(siw_mw_rkey(two) == bind.bind_mw.rkey);
	*old = 0;
	wr.remote_addr = 0;
	wr.rkey = siw_mw_rkey(two);
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_READ);
	MUST(*old == 0x1234);
	post_recv(b.qp, part);
	wr.opcode = SIW_WR_SEND_WITH_INV;
	wr.inv_rkey = siw_mw_rkey(two);
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_SEND);
	wc = completed(b.cq, SIW_WC_RECV);
	MUST(wc.invalidated_rkey == siw_mw_rkey(two) && (wc.flags & SIW_WC_WITH_INV));
	siw_dealloc_mw(two);

	/* Pages 6 and 2 as one buffer, invalidated by LOCAL_INV. */
	struct siw_range pages[2] = { { 6 * PAGE + 96, PAGE - 96 }, { 2 * PAGE, 100 } };
	CHECK(siw_alloc_fast_mr(b.pd, arena, 8, &fast));
	MUST(siw_map_fast_mr(fast, pages, 2, 12) == 2);
	struct siw_send_wr reg = {
		.opcode = SIW_WR_REG_MR, .flags = SIW_SEND_SIGNALED,
		.reg_mr = {
			.mr = fast, .iova = 0x10000, .key = siw_inc_rkey(siw_fast_mr_key(fast)),
			.access = all,
		},
	};
	post(b.qp, &reg);
	completed(b.cq, SIW_WC_LOCAL_INV);
	memset(siw_mr_ptr(mr), 'x', PAGE);
	sge.length = PAGE;
	wr.opcode = SIW_WR_RDMA_WRITE;
	wr.remote_addr = 0x10000;
	wr.rkey = siw_fast_mr_key(fast);
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_WRITE);
	wr.opcode = SIW_WR_RDMA_READ;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_READ);
	const char *bytes = siw_arena_ptr(arena);
	MUST(bytes[6 * PAGE + 95] == 0 && bytes[6 * PAGE + 96] == 'x');
	MUST(bytes[2 * PAGE + 95] == 'x' && bytes[2 * PAGE + 96] == 0);
	struct siw_send_wr inv = {
		.opcode = SIW_WR_LOCAL_INV, .flags = SIW_SEND_SIGNALED,
		.inv_rkey = siw_fast_mr_key(fast),
	};
	post(b.qp, &inv);
	completed(b.cq, SIW_WC_LOCAL_INV);
	siw_free_fast_mr(fast);

	/* Another part of the arena under new keys, at an address chosen by the program. */
	before = siw_mr_rkey(part);
	CHECK(siw_rereg_mr(part, SIW_REREG_TRANSLATION, NULL, arena, 6 * PAGE, PAGE, 0));
	MUST(siw_mr_rkey(part) != before && siw_mr_ptr(part) == (void *)(bytes + 6 * PAGE));
	CHECK(siw_reg_mr_iova(b.pd, arena, PAGE, PAGE, 0x4000, all, &iova));
	MUST(siw_mr_addr(iova) == 0x4000);
	wr.rkey = siw_mr_rkey(iova);
	wr.remote_addr = 0x4000;
	wr.opcode = SIW_WR_RDMA_WRITE;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_WRITE);
	wr.opcode = SIW_WR_RDMA_READ_WITH_INV;
	post(a.qp, &wr);
	completed(a.cq, SIW_WC_RDMA_READ);
	MUST(bytes[PAGE] == 'x');

	CHECK(siw_dereg_mr(iova));
	CHECK(siw_dereg_mr(part));
	siw_free_mr(mr);
	siw_free_arena(arena);
	siw_destroy_listener(listener);
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
