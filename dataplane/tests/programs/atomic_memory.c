/*
 * Registers memory of every kind with all rights beside another thread, and has a peer add to it:
 *
 *   atomic_memory iwarp   atomics exclude the processor's, so memory that is copied is refused
 *   atomic_memory roce    they exclude each other, in all memory
 *
 * The other thread counts in the static data meanwhile, and loses nothing.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>

enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };
enum { PAGE = 4096, ROUNDS = 20 };

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[2];
static struct ibv_mr *result;
static uint64_t before;
/* On pages of the program's file, with a counter of the other thread beside it. */
static struct {
	uint64_t word;
	_Atomic uint64_t counter;
} initialised = { 1, 1 };
static uint64_t zeroed[3 * PAGE / 8];
static atomic_int done;

/* A region of one word is added to, compared and swapped; then the word is the program's again. */
static void use(const char *kind, uint64_t *word, int may_work)
{
	int round;

	for (round = 0; round < ROUNDS; round++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, word, 8, RIGHTS);
		volatile uint64_t *value = word;

		if (!may_work) {
			expect(!mr && errno == EOPNOTSUPP, kind);
			printf("%s: refused\n", kind);
			return;
		}
		expect(mr != NULL, kind);
		*value = 7;
		run_atomic(qps[0], result, mr, IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 0);
		expect(*value == 12 && *(volatile uint64_t *)&before == 7, kind);
		run_atomic(qps[0], result, mr, IBV_WR_ATOMIC_CMP_AND_SWP, 12, 99);
		expect(*value == 99 && *(volatile uint64_t *)&before == 12, kind);
		run_atomic(qps[0], result, mr, IBV_WR_ATOMIC_CMP_AND_SWP, 12, 5);
		expect(*value == 99 && *(volatile uint64_t *)&before == 99, kind);
		expect(!ibv_dereg_mr(mr) && *value == 99, kind);
	}
	printf("%s: works\n", kind);
}

static void *map(int flags, int file)
{
	void *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, flags, file, 0);

	expect(pages != MAP_FAILED, "mmap");
	return pages;
}

static void *count(void *own)
{
	uint64_t *added = own;

	while (!atomic_load(&done)) {
		atomic_fetch_add(&initialised.counter, 1);
		++*added;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int copies = argc > 1 && !strcmp(argv[1], "roce");
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	struct ibv_device_attr attr;
	static uint64_t added;
	uint64_t on_stack;
	pthread_t thread;
	void *wiped = map(MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int file = memfd_create("private", 0);

	expect(context && (pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 8, NULL, NULL, 0)), "a device");
	expect(!ibv_query_device(context, &attr) &&
	       attr.atomic_cap == (copies ? IBV_ATOMIC_HCA : IBV_ATOMIC_GLOB), "atomic_cap");
	expect((result = ibv_reg_mr(pd, &before, 8, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	create_pair(context, pd, cq, qps, RIGHTS);
	expect(!pthread_create(&thread, NULL, count, &added), "a thread");
	while (!atomic_load((_Atomic uint64_t *)&added))
		;
	expect(file >= 0 && !ftruncate(file, 2 * PAGE) && !madvise(wiped, 2 * PAGE, MADV_WIPEONFORK), "memory");
	use("heap", malloc(8), 1);
	use("initialised static data", &initialised.word, 1);
	use("zeroed static data", &zeroed[PAGE / 8], 1);
	use("shared memory", map(MAP_SHARED | MAP_ANONYMOUS, -1), 1);
	use("private mapping of a file", map(MAP_PRIVATE, file), 1);
	use("stack", &on_stack, copies);
	use("memory wiped on fork", wiped, copies);
	atomic_store(&done, 1);
	pthread_join(thread, NULL);
	expect(initialised.counter == 1 + added, "the counter of the other thread");
	puts("done");
	return 0;
}
