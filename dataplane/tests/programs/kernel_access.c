/*
 * Registers fresh memory, ROUNDS times, while other threads use it: one increments words in it, one makes
 * the kernel write to it (pread(2)), one makes the kernel read it (pwrite(2)).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGES 8
#define LENGTH (PAGES * 4096)

static char *memory;
static atomic_int stopped;
static pthread_barrier_t barrier;
static int file, rounds;
static long written, lost, kernel_writes, kernel_reads, failed_writes, failed_reads, last_errno;
/* The first word with an unexpected value: zero means a lost page, another number an old copy. */
static unsigned long first_round, first_page, first_seen, first_expected;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void *count_up(void *unused)
{
	int n, page;

	for (n = 0; n < rounds; n++) {
		unsigned long count = 0;

		pthread_barrier_wait(&barrier);
		while (!atomic_load(&stopped)) {
			for (page = 0; page < PAGES; page++) {
				volatile unsigned long *word = (void *)(memory + page * 4096 + 128);

				unsigned long seen = *word;

				if (seen != count && !lost++) {
					first_round = n;
					first_page = page;
					first_seen = seen;
					first_expected = count;
				}
				*word = count + 1;
			}
			count++;
			written++;
		}
		pthread_barrier_wait(&barrier);
	}
	return unused;
}

/* Makes the kernel write 64 bytes into each page, or read them. */
static void *call_kernel(void *argument)
{
	int is_write = argument != NULL;
	int n, page;

	for (n = 0; n < rounds; n++) {
		pthread_barrier_wait(&barrier);
		while (!atomic_load(&stopped)) {
			for (page = 0; page < PAGES; page++) {
				char *place = memory + page * 4096 + (is_write ? 256 : 512);
				ssize_t got = is_write ? pread(file, place, 64, 0)
						       : pwrite(file, place, 64, 4096);

				if (is_write)
					kernel_writes++;
				else
					kernel_reads++;
				if (got != 64) {
					last_errno = errno;
					if (is_write)
						failed_writes++;
					else
						failed_reads++;
				}
			}
		}
		pthread_barrier_wait(&barrier);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_pd *pd;
	pthread_t threads[3];
	int n;

	rounds = argc > 1 ? atoi(argv[1]) : 100;
	if (!devices || !devices[0] || !(context = ibv_open_device(devices[0])) ||
	    !(pd = ibv_alloc_pd(context)))
		die("no device");
	file = memfd_create("file", 0);
	if (file < 0 || ftruncate(file, 8192))
		die("memfd_create");
	pthread_barrier_init(&barrier, NULL, 4);
	if (pthread_create(&threads[0], NULL, count_up, NULL) ||
	    pthread_create(&threads[1], NULL, call_kernel, NULL) ||
	    pthread_create(&threads[2], NULL, call_kernel, &file))
		die("pthread_create");
	for (n = 0; n < rounds; n++) {
		struct ibv_mr *mr;

		memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			die("mmap");
		atomic_store(&stopped, 0);
		pthread_barrier_wait(&barrier);
		/* In every second round the memory may still be untouched at the registration. */
		if (n % 2)
			usleep(100);
		mr = ibv_reg_mr(pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		if (!mr)
			die("ibv_reg_mr");
		atomic_store(&stopped, 1);
		pthread_barrier_wait(&barrier);
		if (ibv_dereg_mr(mr))
			die("ibv_dereg_mr");
		munmap(memory, LENGTH);
	}
	printf("{\"rounds\":%d,\"written\":%ld,\"lost\":%ld,\"kernel_writes\":%ld,\"kernel_reads\":%ld,"
	       "\"failed_writes\":%ld,\"failed_reads\":%ld,\"errno\":%ld,\"first_lost\":"
	       "{\"round\":%lu,\"page\":%lu,\"seen\":%lu,\"expected\":%lu}}\n",
	       rounds, written, lost, kernel_writes, kernel_reads, failed_writes, failed_reads, last_errno,
	       first_round, first_page, first_seen, first_expected);
	return 0;
}
