/* A peer for the interop tests that runs in the lab guest on rdma-core: moves data over one
 * connection in every way that both sides know, in lockstep, and checks every byte.
 *
 *   matrix listen|connect ADDR PORT LEN ORD IRD OP...
 *
 * LEN bytes are registered for the other side; address and key go in the private data. An
 * operation is a letter and a size. Small letters: this side does it; capital ones: the other.
 *   w r s  writes, reads, sends
 *   i      writes by a key made for this operation, then sends and invalidates that key
 *   k      the same, then reads by that key, which must fail: the connection is lost
 *   q      READS reads of this size, all posted at once
 *   b      BURST requests of this size, all posted at once: writes from the beginning of the
 *          memory, each fourth a read of what follows. The connection is lost in the middle;
 *          each must complete once
 * After each one both sides have said so with a word: its number and a key, big-endian. The
 * initiator says word 0 first. Byte i of operation n is pattern(n, i). The host's side is
 * dataplane/tests/common/matrix.rs.
 * Prints "ready" when it listens, "depth ORD IRD" as negotiated, "refused: STATUS" of the read of
 * k, "lost OK FAILED" after a burst, "done N" at the end. Errors go to stderr, exit status 1.
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 64
#define READS 32
#define BURST 48

struct hello {
	uint64_t addr;
	uint32_t key;
};

struct word {
	uint32_t number;
	uint32_t key;
};

/* Two, because the last message of an operation and the first of the next may follow each other. */
#define INBOXES 2

static struct rdma_event_channel *channel;
static struct rdma_cm_id *id;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;
static struct ibv_mr *mr, *inbox_mr[INBOXES];
static uint8_t *memory, *inbox[INBOXES];
static size_t length;
static struct hello peer;
/* Messages that arrived, and that were looked at. */
static unsigned arrived, taken;
static uint32_t sizes[INBOXES];
static unsigned finished;

static uint8_t pattern(unsigned n, size_t i)
{
	return i * 31 + (i >> 8) * 7 + (i >> 16) * 3 + (i >> 24) * 5 + n * 13 + 1;
}

static void die(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "matrix: ");
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	exit(1);
}

static struct rdma_cm_event *event(enum rdma_cm_event_type want)
{
	struct rdma_cm_event *e;
	if (rdma_get_cm_event(channel, &e))
		die("no event: %m");
	if (e->event != want)
		die("%s (status %d) instead of %s", rdma_event_str(e->event), e->status,
		    rdma_event_str(want));
	return e;
}

static void post_inbox(unsigned n)
{
	struct ibv_sge sge = {(uintptr_t)inbox[n], length + 64, inbox_mr[n]->lkey};
	struct ibv_recv_wr wr = {.wr_id = DEPTH + n, .sg_list = &sge, .num_sge = 1}, *bad;
	if (ibv_post_recv(id->qp, &wr, &bad))
		die("post_recv: %m");
}

static struct ibv_mr *reg(void *p, size_t bytes)
{
	struct ibv_mr *m = ibv_reg_mr(id->pd, p, bytes,
				      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
					  IBV_ACCESS_REMOTE_WRITE);
	if (!m)
		die("reg_mr of %zu bytes: %m", bytes);
	return m;
}

static uint8_t *alloc(struct ibv_mr **m)
{
	uint8_t *p = calloc(1, length + 64);
	if (!p)
		die("no memory");
	*m = reg(p, length + 64);
	return p;
}

static void prepare(void)
{
	struct ibv_qp_init_attr attr = {
	    .qp_type = IBV_QPT_RC,
	    .sq_sig_all = 1,
	    .cap = {.max_send_wr = DEPTH, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};
	id->pd = ibv_alloc_pd(id->verbs);
	completions = ibv_create_comp_channel(id->verbs);
	cq = ibv_create_cq(id->verbs, 2 * DEPTH, NULL, completions, 0);
	attr.send_cq = attr.recv_cq = cq;
	if (!id->pd || !cq || rdma_create_qp(id, id->pd, &attr))
		die("queue pair: %m");
	memory = alloc(&mr);
	for (unsigned n = 0; n < INBOXES; n++) {
		inbox[n] = alloc(&inbox_mr[n]);
		post_inbox(n);
	}
}

static int poll_cq(struct ibv_wc *wc)
{
	int n = ibv_poll_cq(cq, 1, wc);
	if (n < 0)
		die("poll_cq: %m");
	return n;
}

/* The next completion, whatever it says. */
static struct ibv_wc any_completion(void)
{
	struct ibv_wc wc;
	struct ibv_cq *which;
	void *context;
	while (!poll_cq(&wc)) {
		if (ibv_req_notify_cq(cq, 0))
			die("req_notify_cq: %m");
		if (poll_cq(&wc))
			break;
		if (ibv_get_cq_event(completions, &which, &context))
			die("get_cq_event: %m");
		ibv_ack_cq_events(which, 1);
	}
	return wc;
}

/* The next completion, which must be a success; a message is remembered. */
static void completion(void)
{
	struct ibv_wc wc = any_completion();
	if (wc.status)
		die("completion of %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
	if (wc.wr_id < DEPTH)
		finished++;
	else
		sizes[arrived++ % INBOXES] = wc.byte_len;
}

static void post(unsigned wr_id, enum ibv_wr_opcode opcode, size_t at, size_t bytes, uint32_t key)
{
	struct ibv_sge sge = {(uintptr_t)memory + at, bytes, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcode};
	struct ibv_send_wr *bad;
	wr.wr.rdma.remote_addr = peer.addr + at;
	/* rdma-core's siw provider sends this one as the key to invalidate, not invalidate_rkey. */
	wr.wr.rdma.rkey = key;
	if (opcode == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = key;
	if (ibv_post_send(id->qp, &wr, &bad))
		die("post_send of opcode %d: %m", opcode);
}

/* Posts and waits for its completion; the answer to it may come before. */
static void transfer(enum ibv_wr_opcode opcode, size_t at, size_t bytes, uint32_t key)
{
	unsigned before = finished;
	post(0, opcode, at, bytes, key);
	while (finished == before)
		completion();
}

static void fill(size_t bytes, unsigned n)
{
	for (size_t i = 0; i < bytes; i++)
		memory[i] = pattern(n, i);
}

static void check(const uint8_t *p, size_t bytes, unsigned n, const char *op)
{
	for (size_t i = 0; i < bytes; i++)
		if (p[i] != pattern(n, i))
			die("operation %u (%s): byte %zu is %02x, not %02x", n, op, i, p[i],
			    pattern(n, i));
}

/* Looks at the next message; post_inbox gives its place back. */
static unsigned message(uint32_t bytes, unsigned n, const char *op)
{
	unsigned at = taken % INBOXES;
	while (arrived == taken)
		completion();
	taken++;
	if (sizes[at] != bytes)
		die("operation %u (%s): %u bytes came, not %u", n, op, sizes[at], bytes);
	return at;
}

static void say(unsigned n, uint32_t key)
{
	struct word word = {htonl(n), htonl(key)};
	memcpy(memory + length, &word, sizeof word);
	transfer(IBV_WR_SEND, length, sizeof word, 0);
}

static uint32_t hear(unsigned n, const char *op)
{
	struct word word;
	unsigned at = message(sizeof word, n, op);
	memcpy(&word, inbox[at], sizeof word);
	if (ntohl(word.number) != n)
		die("operation %u (%s): the other side is at %u", n, op, ntohl(word.number));
	post_inbox(at);
	return ntohl(word.key);
}

static void receive(size_t bytes, unsigned n, const char *op)
{
	unsigned at = message(bytes, n, op);
	check(inbox[at], bytes, n, op);
	post_inbox(at);
}

/* Until the connection is lost and everything posted has completed. */
static void burst(size_t bytes, unsigned n)
{
	int seen[DEPTH + INBOXES] = {0}, ok = 0, failed = 0;
	struct ibv_wc wc;
	fill(bytes, n);
	for (unsigned i = 0; i < BURST; i++)
		if (i % 4)
			post(i, IBV_WR_RDMA_WRITE, 0, bytes, peer.key);
		else
			post(i, IBV_WR_RDMA_READ, bytes, bytes, peer.key);
	for (unsigned i = 0; i < BURST + INBOXES; i++) {
		wc = any_completion();
		if (seen[wc.wr_id]++)
			die("%d completed twice", (int)wc.wr_id);
		if (wc.status)
			failed++;
		else
			ok++;
	}
	if (poll_cq(&wc))
		die("%d completed once more", (int)wc.wr_id);
	printf("lost %d %d\n", ok, failed);
}

/* False when the connection is gone after it. */
static int operation(unsigned n, const char *op)
{
	size_t bytes = strtoull(op + 1, NULL, 0);
	unsigned count = strchr("qQ", op[0]) ? READS : 1, before = finished;
	size_t all = count * bytes;
	struct ibv_mr *spare;
	struct ibv_wc wc;
	uint32_t key;
	if ((strchr("bB", op[0]) ? 2 * bytes : all) > length)
		die("%s is larger than the memory", op);
	switch (op[0]) {
	case 'w':
		fill(bytes, n);
		transfer(IBV_WR_RDMA_WRITE, 0, bytes, peer.key);
		say(n, 0);
		hear(n, op);
		return 1;
	case 'W':
		hear(n, op);
		check(memory, bytes, n, op);
		say(n, 0);
		return 1;
	case 'r': /* The other side has filled its memory and said so. */
	case 'q':
		hear(n, op);
		memset(memory, 0, all);
		for (unsigned i = 0; i < count; i++)
			post(0, IBV_WR_RDMA_READ, i * bytes, bytes, peer.key);
		while (finished - before < count)
			completion();
		check(memory, all, n, op);
		say(n, 0);
		return 1;
	case 'R':
	case 'Q':
		fill(all, n);
		say(n, 0);
		hear(n, op);
		return 1;
	case 's':
		fill(bytes, n);
		transfer(IBV_WR_SEND, 0, bytes, 0);
		hear(n, op);
		return 1;
	case 'S':
		receive(bytes, n, op);
		say(n, 0);
		return 1;
	case 'i':
	case 'k':
		key = hear(n, op);
		fill(bytes, n);
		transfer(IBV_WR_RDMA_WRITE, 0, bytes, key);
		transfer(IBV_WR_SEND_WITH_INV, 0, bytes, key);
		hear(n, op);
		if (op[0] == 'i')
			return 1;
		post(0, IBV_WR_RDMA_READ, 0, bytes, key);
		do
			wc = any_completion();
		while (wc.wr_id != 0);
		if (!wc.status)
			die("operation %u (%s): the key still works", n, op);
		printf("refused: %s\n", ibv_wc_status_str(wc.status));
		return 0;
	case 'I':
	case 'K':
		memset(memory, 0, bytes);
		spare = reg(memory, length);
		say(n, spare->rkey);
		receive(bytes, n, op);
		check(memory, bytes, n, op);
		say(n, 0);
		if (op[0] == 'I') {
			ibv_dereg_mr(spare);
			return 1;
		}
		rdma_ack_cm_event(event(RDMA_CM_EVENT_DISCONNECTED));
		return 0;
	case 'b':
		burst(bytes, n);
		return 0;
	case 'B':
		rdma_ack_cm_event(event(RDMA_CM_EVENT_DISCONNECTED));
		return 0;
	default:
		die("what is %s?", op);
	}
	return 0;
}

static uint64_t swap64(uint64_t v)
{
	return __builtin_bswap64(v);
}

static void learn(const struct rdma_conn_param *p)
{
	if (p->private_data_len < sizeof peer)
		die("%u bytes of private data", p->private_data_len);
	memcpy(&peer, p->private_data, sizeof peer);
	peer.addr = swap64(peer.addr);
	peer.key = ntohl(peer.key);
}

int main(int argc, char **argv)
{
	struct sockaddr_storage addr = {};
	struct rdma_cm_event *e;
	struct hello mine = {};
	struct rdma_conn_param param = {.private_data = &mine, .private_data_len = sizeof mine};
	int listens, n, alive = 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 7)
		die("usage: matrix listen|connect ADDR PORT LEN ORD IRD OP...");
	listens = !strcmp(argv[1], "listen");
	length = strtoull(argv[4], NULL, 0);
	param.initiator_depth = atoi(argv[5]);
	param.responder_resources = atoi(argv[6]);
	struct sockaddr_in *v4 = (void *)&addr;
	struct sockaddr_in6 *v6 = (void *)&addr;
	if (inet_pton(AF_INET, argv[2], &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(atoi(argv[3]));
	} else if (inet_pton(AF_INET6, argv[2], &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(atoi(argv[3]));
	} else {
		die("%s is no address", argv[2]);
	}
	channel = rdma_create_event_channel();
	if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
		die("librdmacm: %m");

	if (listens) {
		struct rdma_cm_id *listener = id;
		if (rdma_bind_addr(listener, (void *)&addr) || rdma_listen(listener, 4))
			die("listen: %m");
		puts("ready");
		e = event(RDMA_CM_EVENT_CONNECT_REQUEST);
		id = e->id;
		learn(&e->param.conn);
		rdma_ack_cm_event(e);
		prepare();
	} else {
		if (rdma_resolve_addr(id, NULL, (void *)&addr, 5000))
			die("resolve_addr: %m");
		rdma_ack_cm_event(event(RDMA_CM_EVENT_ADDR_RESOLVED));
		if (rdma_resolve_route(id, 5000))
			die("resolve_route: %m");
		rdma_ack_cm_event(event(RDMA_CM_EVENT_ROUTE_RESOLVED));
		prepare();
	}
	mine.addr = swap64((uintptr_t)memory);
	mine.key = htonl(mr->rkey);
	if (listens ? rdma_accept(id, &param) : rdma_connect(id, &param))
		die("%s: %m", argv[1]);
	e = event(RDMA_CM_EVENT_ESTABLISHED);
	if (!listens)
		learn(&e->param.conn);
	printf("depth %d %d\n", e->param.conn.initiator_depth, e->param.conn.responder_resources);
	rdma_ack_cm_event(e);
	if (listens) {
		hear(0, "hello");
		say(0, 0);
	} else {
		say(0, 0);
		hear(0, "hello");
	}
	for (n = 7; n < argc && alive; n++)
		alive = operation(n - 6, argv[n]);
	printf("done %d\n", n - 7);
	rdma_disconnect(id);
	return 0;
}
