/*
 * Registers the first blocks of each thread's heap, in whose page malloc(3) of glibc has its state, with all
 * rights. A peer's atomic operations reach them. The threads fork while others free their blocks, and the
 * children allocate.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/wait.h>

enum { THREADS = 4, BLOCKS = 16, BATCH = 64, ROUNDS = 50, PAGE = 4096 };
enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };
/* Alignment of the heaps that glibc makes for threads (HEAP_MAX_SIZE). */
enum { HEAP_ALIGNMENT = 64 << 20 };

struct batch {
	void *blocks[BATCH];
};

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
static pthread_barrier_t started, registered, posted;
static uint64_t *blocks[THREADS][BLOCKS];
static struct ibv_mr *regions[THREADS][BLOCKS];
static atomic_int beside_state, working = THREADS;
static _Atomic(struct batch *) handed_over;

/* A child of a thread whose blocks other threads free allocates from the same heap. */
static void make_child(void)
{
	void *own[4 * BATCH];
	int i, status;
	pid_t child = fork();

	expect(child >= 0, "fork");
	if (!child) {
		for (i = 0; i < 4 * BATCH; i++)
			expect((own[i] = malloc(24)) && memset(own[i], 0xcc, 24), "malloc in a child");
		for (i = 0; i < 4 * BATCH; i++)
			free(own[i]);
		_exit(0);
	}
	expect(waitpid(child, &status, 0) == child && !status, "a child");
}

static void release(struct batch *batch)
{
	int i;

	for (i = 0; batch && i < BATCH; i++)
		free(batch->blocks[i]);
	free(batch);
}

static void *work(void *argument)
{
	size_t number = (size_t)argument;
	int i, round;

	pthread_barrier_wait(&started);
	for (i = 0; i < BLOCKS; i++) {
		expect((blocks[number][i] = malloc(8)) != NULL, "malloc");
		*blocks[number][i] = 1;
		if ((uintptr_t)blocks[number][i] % HEAP_ALIGNMENT < PAGE)
			atomic_fetch_add(&beside_state, 1);
	}
	for (i = 0; i < BLOCKS; i++)
		expect((regions[number][i] = ibv_reg_mr(pd, blocks[number][i], 8, RIGHTS)) != NULL, "ibv_reg_mr");
	pthread_barrier_wait(&registered);
	pthread_barrier_wait(&posted);
	for (round = 0; round < ROUNDS; round++) {
		struct batch *batch = malloc(sizeof *batch);

		for (i = 0; i < BATCH; i++)
			batch->blocks[i] = malloc(24);
		release(atomic_exchange(&handed_over, batch));
		make_child();
	}
	for (i = 0; i < BLOCKS; i++)
		expect(!ibv_dereg_mr(regions[number][i]) && *blocks[number][i] == 6, "the block");
	atomic_fetch_sub(&working, 1);
	return NULL;
}

static void *release_all(void *unused)
{
	while (atomic_load(&working) || atomic_load(&handed_over))
		release(atomic_exchange(&handed_over, NULL));
	return unused;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	pthread_t threads[THREADS], releaser;
	static uint64_t before;
	struct ibv_mr *result;
	size_t n;
	int i;

	expect(context && (pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 8, NULL, NULL, 0)), "a device");
	expect((result = ibv_reg_mr(pd, &before, 8, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	create_pair(context, pd, cq, qps, RIGHTS);
	pthread_barrier_init(&started, NULL, THREADS);
	pthread_barrier_init(&registered, NULL, THREADS + 1);
	pthread_barrier_init(&posted, NULL, THREADS + 1);
	for (n = 0; n < THREADS; n++)
		expect(!pthread_create(&threads[n], NULL, work, (void *)n), "a thread");
	pthread_barrier_wait(&registered);
	for (n = 0; n < THREADS; n++)
		for (i = 0; i < BLOCKS; i++)
			run_atomic(qps[0], result, regions[n][i], IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 0);
	pthread_barrier_wait(&posted);
	expect(!pthread_create(&releaser, NULL, release_all, NULL), "a thread");
	for (n = 0; n < THREADS; n++)
		pthread_join(threads[n], NULL);
	pthread_join(releaser, NULL);
	if (!beside_state) {
		printf("malloc has its state elsewhere\n");
		return 77;
	}
	printf("%d blocks beside the state of malloc\n", beside_state);
	return 0;
}
