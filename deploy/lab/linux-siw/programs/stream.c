/* A peer for the byte-stream tests that runs in the lab guest on its kernel's TCP: carries the
 * pattern of siw-stream both ways on some connections at once, and checks every byte.
 *
 *   stream listen|connect ADDR PORT SEED BYTES COUNT both|write-first|read-first
 *
 * Each of COUNT connections sends BYTES and shuts its sending side, and reads to the end, which
 * must come after BYTES of the pattern: both at the same time, or the one only when the other is
 * done, over a connection that is closed in one direction. The host's side is
 * dataplane/tests/guest/stream_netem.rs.
 * Prints "ready" when it listens, and for each connection "done BYTES RETRANSMITTED", segments
 * as TCP_INFO counts them. Errors go to stderr, exit status 1.
 */
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* Words of eight bytes; a block begins at a whole one. */
#define BLOCK 8192

static uint64_t seed, bytes;
static uint64_t block[BLOCK];

static void die(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "stream: ");
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	exit(1);
}

/* The word at 8 * index: the finaliser of SplitMix64 over a Weyl sequence; this machine and the
 * stream are little-endian. */
static uint64_t word(uint64_t index)
{
	uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
	return z ^ z >> 31;
}

static void fill(uint64_t at)
{
	for (int i = 0; i < BLOCK; i++)
		block[i] = word(at / 8 + i);
}

static void write_all(int s)
{
	for (uint64_t at = 0; at < bytes;) {
		fill(at);
		size_t n = bytes - at < sizeof block ? bytes - at : sizeof block;
		for (size_t done = 0; done < n;) {
			ssize_t r = send(s, (char *)block + done, n - done, MSG_NOSIGNAL);
			if (r <= 0)
				die("send after %llu: %m", (unsigned long long)(at + done));
			done += r;
		}
		at += n;
	}
	if (shutdown(s, SHUT_WR))
		die("shutdown: %m");
}

static void read_all(int s)
{
	static char got[sizeof block];
	uint64_t at = 0;
	size_t have = 0;
	fill(0);
	for (;;) {
		ssize_t r = recv(s, got + have, sizeof got - have, 0);
		if (r < 0)
			die("recv after %llu: %m", (unsigned long long)(at + have));
		if (memcmp(got + have, (char *)block + have, r))
			die("a wrong byte after %llu", (unsigned long long)(at + have));
		have += r;
		if (r == 0)
			break;
		if (have == sizeof got) {
			at += have;
			have = 0;
			fill(at);
		}
	}
	if (at + have != bytes)
		die("%llu bytes", (unsigned long long)(at + have));
}

static void join(pid_t child)
{
	int status;
	if (waitpid(child, &status, 0) < 0 || status)
		exit(1);
}

static void serve(int s, const char *order, int connects)
{
	if (!strcmp(order, "write-first")) {
		write_all(s);
		read_all(s);
	} else if (!strcmp(order, "read-first")) {
		read_all(s);
		write_all(s);
	} else {
		pid_t writer = fork();
		if (writer < 0)
			die("fork: %m");
		if (!writer) {
			write_all(s);
			exit(0);
		}
		read_all(s);
		join(writer);
	}
	struct tcp_info info;
	socklen_t length = sizeof info;
	if (getsockopt(s, IPPROTO_TCP, TCP_INFO, &info, &length))
		die("TCP_INFO: %m");
	/*
	 * Whoever reads the line may end a far side that listens: by then it has acknowledged
	 * everything. One that connects ends by itself, and may be gone before.
	 */
	struct linger acknowledged = { .l_onoff = connects, .l_linger = 60 };
	if (setsockopt(s, SOL_SOCKET, SO_LINGER, &acknowledged, sizeof acknowledged) || close(s))
		die("close: %m");
	printf("done %llu %u\n", (unsigned long long)bytes, info.tcpi_total_retrans);
	fflush(stdout);
	exit(0);
}

int main(int argc, char **argv)
{
	if (argc != 8)
		die("see the head of stream.c");
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM }, *to;
	int error = getaddrinfo(argv[2], argv[3], &hints, &to);
	if (error)
		die("%s %s: %s", argv[2], argv[3], gai_strerror(error));
	seed = strtoull(argv[4], NULL, 0);
	bytes = strtoull(argv[5], NULL, 0);
	int count = atoi(argv[6]), listener = -1, on = 1;
	if (!strcmp(argv[1], "listen")) {
		listener = socket(to->ai_family, to->ai_socktype, 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
		if (bind(listener, to->ai_addr, to->ai_addrlen) || listen(listener, count))
			die("listen: %m");
		printf("ready\n");
		fflush(stdout);
	}
	for (int i = 0; i < count; i++) {
		pid_t child;
		int s;
		if (listener >= 0)
			s = accept(listener, NULL, NULL);
		else
			s = socket(to->ai_family, to->ai_socktype, 0);
		if (s < 0)
			die("%s: %m", listener >= 0 ? "accept" : "socket");
		/* Where nothing moves any more, an error is better than a hang. */
		struct timeval patience = { .tv_sec = 60 };
		setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
		setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
		child = fork();
		if (child < 0)
			die("fork: %m");
		if (!child) {
			if (listener < 0 && connect(s, to->ai_addr, to->ai_addrlen))
				die("connect: %m");
			serve(s, argv[7], listener < 0);
		}
		close(s);
	}
	for (int i = 0; i < count; i++)
		join(-1);
	return 0;
}
