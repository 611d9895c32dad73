/*
 * Times of ibv_reg_mr(3) and ibv_dereg_mr(3) of private memory, beside a memcpy(3) of the same memory into
 * fresh memory of ordinary pages:
 *
 *   registration_load MIB ROUNDS
 *
 * A line for each round: seconds of the copy, of the registration, of its end, of another registration of
 * the same memory with nothing in between, and MiB of memory that the program had at most during these
 * calls beyond its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "load.h"

enum { PAGE = 4096, RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

/* A field of /proc/self/status, in MiB. */
static double status_of(const char *field)
{
	FILE *file = fopen("/proc/self/status", "r");
	char line[256];
	double value = 0;

	expect(file != NULL, "/proc/self/status");
	while (fgets(line, sizeof line, file))
		if (!strncmp(line, field, strlen(field)))
			value = atof(line + strlen(field)) / 1024;
	fclose(file);
	return value;
}

static void reset_peak(void)
{
	FILE *file = fopen("/proc/self/clear_refs", "w");

	expect(file && fputs("5", file) >= 0 && !fclose(file), "/proc/self/clear_refs");
}

static unsigned char *map(size_t length)
{
	void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(bytes != MAP_FAILED, "mmap");
	expect(!madvise(bytes, length, MADV_NOHUGEPAGE) || errno == EINVAL, "madvise");
	return bytes;
}

static void *sleep_for_ever(void *unused)
{
	for (;;)
		pause();
	return unused;
}

int main(int argc, char **argv)
{
	size_t length = argc > 2 ? (size_t)atol(argv[1]) << 20 : 0, at;
	int rounds = argc > 2 ? atoi(argv[2]) : 0;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_pd *pd;
	pthread_t thread;

	expect(length && rounds > 0, "usage: registration_load MIB ROUNDS");
	expect(devices && devices[0], "ibv_get_device_list");
	pd = ibv_alloc_pd(ibv_open_device(devices[0]));
	expect(pd != NULL, "ibv_alloc_pd");
	/* Most programs have several threads. */
	expect(!pthread_create(&thread, NULL, sleep_for_ever, NULL), "pthread_create");
	while (rounds--) {
		unsigned char *bytes = map(length), *copy = map(length);
		double copied, times[4], own;
		struct ibv_mr *region;

		memset(bytes, 1, length);
		copied = now();
		memcpy(copy, bytes, length);
		copied = now() - copied;
		munmap(copy, length);
		reset_peak();
		own = status_of("VmRSS:");
		times[0] = now();
		region = ibv_reg_mr(pd, bytes, length, RIGHTS);
		times[1] = now();
		expect(region && !ibv_dereg_mr(region), "ibv_reg_mr");
		times[2] = now();
		region = ibv_reg_mr(pd, bytes, length, RIGHTS);
		times[3] = now();
		expect(region != NULL, "ibv_reg_mr");
		for (at = 0; at < length; at += PAGE)
			expect(bytes[at] == 1, "content");
		printf("%.6f %.6f %.6f %.6f %.0f\n", copied, times[1] - times[0], times[2] - times[1],
		       times[3] - times[2], status_of("VmHWM:") - own);
		fflush(stdout);
		expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
		munmap(bytes, length);
	}
	return 0;
}
