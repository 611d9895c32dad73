/*
 * Transfers by GASNet-EX between all processes of a job: puts and gets, Active Messages of each category with
 * replies, atomics, barriers, broadcasts and reductions, with data that the receiver checks.
 */
#include <gasnetex.h>
#include <gasnet_coll.h>
#include <gasnet_ratomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST = 4 << 20, SEGMENT = 4 * LARGEST, FLIGHT = 64, PIECE = 4000, ROUNDS = 60 };
enum { ASK_SHORT = GEX_AM_INDEX_BASE, ASK_MEDIUM, ASK_LONG, ANSWER_SHORT, ANSWER_MEDIUM };

static gex_Client_t client;
static gex_EP_t endpoint;
static gex_TM_t team;
static gex_Rank_t rank, count, right, left;
static volatile int answers, longs;
static unsigned char *own, *theirs;	/* segment of this process, and that of the right one */
static unsigned char source[LARGEST], back[LARGEST];	/* outside of the segment */

static void expect(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "rank %u: %s\n", rank, what);
	if (!team)
		exit(1);
	gasnet_exit(1);
}

static unsigned char byte_of(size_t at, unsigned seed)
{
	return (unsigned char)(at * 7 + (at >> 9) + seed * 31);
}

static void fill(unsigned char *data, size_t size, unsigned seed)
{
	size_t n;

	for (n = 0; n < size; n++)
		data[n] = byte_of(n, seed);
}

static int is_filled(const unsigned char *data, size_t size, unsigned seed)
{
	size_t n;

	for (n = 0; n < size; n++)
		if (data[n] != byte_of(n, seed))
			return 0;
	return 1;
}

static void meet(void)
{
	gex_Event_Wait(gex_Coll_BarrierNB(team, 0));
}

/* Handlers. Each request is answered; a medium one by its own data. */
static void on_short(gex_Token_t token, gex_AM_Arg_t first, gex_AM_Arg_t second)
{
	gex_AM_ReplyShort1(token, ANSWER_SHORT, 0, first * 3 + second);
}

static void on_medium(gex_Token_t token, void *data, size_t size, gex_AM_Arg_t seed)
{
	gex_AM_ReplyMedium1(token, ANSWER_MEDIUM, data, size, GEX_EVENT_NOW, 0, seed);
}

static void on_long(gex_Token_t token, void *data, size_t size, gex_AM_Arg_t seed)
{
	expect(data == own && is_filled(data, size, seed), "a long message");
	longs++;
	gex_AM_ReplyShort1(token, ANSWER_SHORT, 0, seed);
}

static gex_AM_Arg_t answer;

static void on_short_answer(gex_Token_t token, gex_AM_Arg_t value)
{
	(void)token;
	answer = value;
	answers++;
}

static void on_medium_answer(gex_Token_t token, void *data, size_t size, gex_AM_Arg_t seed)
{
	(void)token;
	expect(is_filled(data, size, seed), "a medium answer");
	answers++;
}

static gex_AM_Entry_t handlers[] = {
	{ ASK_SHORT, (gex_AM_Fn_t)on_short, GEX_FLAG_AM_SHORT | GEX_FLAG_AM_REQUEST, 2, NULL, "on_short" },
	{ ASK_MEDIUM, (gex_AM_Fn_t)on_medium, GEX_FLAG_AM_MEDIUM | GEX_FLAG_AM_REQUEST, 1, NULL, "on_medium" },
	{ ASK_LONG, (gex_AM_Fn_t)on_long, GEX_FLAG_AM_LONG | GEX_FLAG_AM_REQUEST, 1, NULL, "on_long" },
	{ ANSWER_SHORT, (gex_AM_Fn_t)on_short_answer, GEX_FLAG_AM_SHORT | GEX_FLAG_AM_REPLY, 1, NULL, "short_answer" },
	{ ANSWER_MEDIUM, (gex_AM_Fn_t)on_medium_answer, GEX_FLAG_AM_MEDIUM | GEX_FLAG_AM_REPLY, 1, NULL, "medium_answer" },
};

static const size_t SIZES[] = { 1, 8, 72, 128, 1024, 4096, 65535, 1 << 20, LARGEST };
enum { SIZE_COUNT = sizeof(SIZES) / sizeof(*SIZES) };

/* Puts and gets from memory outside of the segment, and from within, one by one and many at a time. */
static void put_and_get(void)
{
	unsigned n, k;

	for (n = 0; n < SIZE_COUNT; n++) {
		size_t size = SIZES[n];

		fill(source, size, n + rank);
		gex_RMA_PutBlocking(team, right, theirs, source, size, 0);
		memset(back, 0, size);
		gex_RMA_GetBlocking(team, back, right, theirs, size, 0);
		expect(is_filled(back, size, n + rank), "what was put is got back");
		meet();
		expect(is_filled(own, size, n + left), "what the left process put");
		memcpy(own + LARGEST, own, size);
		gex_RMA_PutBlocking(team, right, theirs + 2 * LARGEST, own + LARGEST, size, 0);
		meet();
		expect(is_filled(own + 2 * LARGEST, size, n + (left + count - 1) % count), "what came from two left");
		meet();
	}
	for (k = 0; k < ROUNDS; k++) {
		gex_Event_t events[FLIGHT];

		fill(source, FLIGHT * PIECE, k + rank);
		for (n = 0; n < FLIGHT; n++)
			events[n] = gex_RMA_PutNB(team, right, theirs + n * PIECE, source + n * PIECE, PIECE,
						  GEX_EVENT_DEFER, 0);
		gex_Event_WaitAll(events, FLIGHT, 0);
		for (n = 0; n < FLIGHT; n++)
			gex_RMA_GetNBI(team, back + n * PIECE, right, theirs + n * PIECE, PIECE, 0);
		gex_NBI_Wait(GEX_EC_ALL, 0);
		expect(is_filled(back, FLIGHT * PIECE, k + rank), "many at a time");
	}
	meet();
	expect(is_filled(own, FLIGHT * PIECE, ROUNDS - 1 + left), "the last of many");
	meet();
}

static void send_messages(void)
{
	size_t medium = gex_AM_MaxRequestMedium(team, right, GEX_EVENT_NOW, 0, 1), size;
	unsigned n;

	if (medium > gex_AM_LUBReplyMedium())
		medium = gex_AM_LUBReplyMedium();
	for (n = 0; n < ROUNDS; n++) {
		gex_AM_RequestShort2(team, right, ASK_SHORT, 0, n, 5);
		GASNET_BLOCKUNTIL(answers == 1);
		expect(answer == (gex_AM_Arg_t)(n * 3 + 5), "the answer to a short message");
		answers = 0;
	}
	/* Many without waiting; each answer has the data. */
	for (n = 0; n < ROUNDS; n++) {
		size = n % 2 ? medium : (size_t)(n * 97) % medium;
		fill(source, size, n);
		gex_AM_RequestMedium1(team, right, ASK_MEDIUM, source, size, GEX_EVENT_NOW, 0, n);
	}
	GASNET_BLOCKUNTIL(answers == ROUNDS);
	answers = 0;
	meet();
	for (n = 0; n < SIZE_COUNT; n++) {
		size = SIZES[n] > gex_AM_LUBRequestLong() ? gex_AM_LUBRequestLong() : SIZES[n];
		fill(source, size, n + 100);
		gex_AM_RequestLong1(team, right, ASK_LONG, source, size, theirs, GEX_EVENT_NOW, 0, n + 100);
		GASNET_BLOCKUNTIL(answers == 1);
		answers = 0;
	}
	meet();
	expect(longs == SIZE_COUNT, "long messages");
}

/* All processes add to a word of the first one, and take a turn each by comparing. */
static void add_atomically(void *first)
{
	uint64_t *word = first, seen;
	gex_AD_t domain;
	unsigned n;

	if (rank == 0)
		memset(own, 0, 16);
	meet();
	gex_AD_Create(&domain, team, GEX_DT_U64, GEX_OP_FADD | GEX_OP_FCAS | GEX_OP_GET, 0);
	for (n = 0; n < ROUNDS; n++)
		gex_Event_Wait(gex_AD_OpNB_U64(domain, &seen, 0, word, GEX_OP_FADD, 1, 0, 0));
	meet();
	gex_Event_Wait(gex_AD_OpNB_U64(domain, &seen, 0, word, GEX_OP_GET, 0, 0, 0));
	expect(seen == (uint64_t)ROUNDS * count, "the sum");
	do
		gex_Event_Wait(gex_AD_OpNB_U64(domain, &seen, 0, word + 1, GEX_OP_FCAS, rank, rank + 1, 0));
	while (seen != rank);
	meet();
	gex_Event_Wait(gex_AD_OpNB_U64(domain, &seen, 0, word + 1, GEX_OP_GET, 0, 0, 0));
	expect(seen == count, "the turns");
	gex_AD_Destroy(domain);
}

static void call_collectives(void)
{
	static uint64_t numbers[1000], sums[1000];
	unsigned n;

	for (n = 0; n < SIZE_COUNT; n++) {
		fill(source, SIZES[n], n + 10 * rank);
		gex_Event_Wait(gex_Coll_BroadcastNB(team, count - 1, back, source, SIZES[n], 0));
		expect(is_filled(back, SIZES[n], n + 10 * (count - 1)), "a broadcast");
	}
	for (n = 0; n < 1000; n++)
		numbers[n] = n + rank;
	gex_Event_Wait(gex_Coll_ReduceToAllNB(team, sums, numbers, GEX_DT_U64, 8, 1000, GEX_OP_ADD, NULL, NULL, 0));
	for (n = 0; n < 1000; n++)
		expect(sums[n] == (uint64_t)n * count + count * (count - 1) / 2, "a sum");
}

int main(int argument_count, char **arguments)
{
	gex_Segment_t segment;
	void *owner, *first;
	uintptr_t size;

	expect(gex_Client_Init(&client, &endpoint, &team, "transfers", &argument_count, &arguments, 0) == GASNET_OK,
	       "gex_Client_Init");
	expect(gex_Segment_Attach(&segment, team, SEGMENT) == GASNET_OK, "gex_Segment_Attach");
	expect(gex_EP_RegisterHandlers(endpoint, handlers, sizeof(handlers) / sizeof(*handlers)) == GASNET_OK,
	       "gex_EP_RegisterHandlers");
	rank = gex_TM_QueryRank(team);
	count = gex_TM_QuerySize(team);
	right = (rank + 1) % count;
	left = (rank + count - 1) % count;
	own = gex_Segment_QueryAddr(segment);
	gex_Event_Wait(gex_EP_QueryBoundSegmentNB(team, right, &owner, NULL, &size, 0));
	expect(size >= SEGMENT, "the segment's size");
	theirs = owner;
	gex_Event_Wait(gex_EP_QueryBoundSegmentNB(team, 0, &first, NULL, NULL, 0));
	meet();
	put_and_get();
	send_messages();
	add_atomically(first);
	call_collectives();
	meet();
	printf("rank %u of %u is right\n", rank, count);
	fflush(stdout);
	meet();
	gasnet_exit(0);
	return 0;
}
