/*
 * Registers and deregisters blocks of the program's allocator while its threads use them, and checks every
 * byte:
 *
 *   registered_heap ROUNDS          blocks of malloc(3), calloc(3), realloc(3), posix_memalign(3) and mmap(2),
 *                                   read(2) into them, fork(2)
 *   registered_heap ROUNDS FILE     the same beside pread(2) with O_DIRECT, io_submit(2) and fixed buffers of
 *                                   io_uring; each page of FILE is filled with its number
 *   registered_heap ROUNDS FILE -   the same, and FILE is open only during each read
 *
 * ROUNDS counts the steps of each thread. LD_PRELOAD selects the allocator. The seed of a run is printed and
 * can be given as SEED.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

enum { FORK_INTERVAL = 48, PAGE = 4096, THREADS = 4, SLOTS = 48, REGIONS = 2, EXCHANGED = 16, FILE_PAGES = 64 };
enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

struct block {
	unsigned char *bytes;
	size_t length;
	uint64_t seed;
	struct ibv_mr *regions[REGIONS];
	int is_mapping;
};

struct worker {
	pthread_t thread;
	uint64_t random;
	struct block blocks[SLOTS];
	int number;
};

static struct ibv_pd *pd;
static long rounds;
static const char *path;
static int opens_each_time, contents;
static struct worker workers[THREADS];
static pthread_mutex_t exchange = PTHREAD_MUTEX_INITIALIZER;
static struct block exchanged[EXCHANGED];
static atomic_int ended;
static atomic_long registrations, forks, zeroes, kernel_reads, direct_reads;

static uint64_t draw(struct worker *worker)
{
	uint64_t x = worker->random;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return worker->random = x;
}

static uint64_t word_of(uint64_t seed, size_t index)
{
	return (seed + index) * 0x9e3779b97f4a7c15;
}

static void wrong(const struct block *block, size_t at, const char *when, uint64_t seen, uint64_t expected)
{
	fprintf(stderr, "wrong byte: %s: at %zu of %zu bytes at %p, seed %lx: %016lx instead of %016lx\n", when, at,
		block->length, (void *)block->bytes, block->seed, seen, expected);
	if (seen)
		fprintf(stderr, "the word would be right with the seed %lx\n",
			seen * 0xf1de83e19937733d - at / 8);
	abort();
}

static void fill(struct block *block, uint64_t seed)
{
	size_t i;

	block->seed = seed;
	for (i = 0; i < block->length / 8; i++)
		((volatile uint64_t *)block->bytes)[i] = word_of(seed, i);
}

static void check(const struct block *block, size_t length, const char *when)
{
	size_t i;

	for (i = 0; i < length / 8; i++) {
		uint64_t seen = ((volatile uint64_t *)block->bytes)[i];

		if (seen != word_of(block->seed, i))
			wrong(block, i * 8, when, seen, word_of(block->seed, i));
	}
}

static void check_zero(struct block *block, const char *when)
{
	size_t i;

	atomic_fetch_add(&zeroes, 1);
	for (i = 0; i < block->length / 8; i++) {
		uint64_t seen = ((volatile uint64_t *)block->bytes)[i];

		if (seen)
			wrong(block, i * 8, when, seen, 0);
	}
}

/* Most blocks are small, a few are mapped by the allocator. */
static size_t draw_length(struct worker *worker)
{
	size_t limit = (size_t)64 << draw(worker) % 14;

	return 16 + draw(worker) % limit / 8 * 8;
}

static size_t to_pages(size_t length)
{
	return (length + PAGE - 1) / PAGE * PAGE;
}

static void make(struct worker *worker, struct block *block)
{
	void *bytes = NULL;

	block->length = draw_length(worker);
	block->is_mapping = 0;
	switch (draw(worker) % 8) {
	case 0:
		block->is_mapping = 1;
		block->length = to_pages(block->length);
		bytes = mmap(NULL, block->length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		expect(bytes != MAP_FAILED, "mmap");
		block->bytes = bytes;
		check_zero(block, "mmap");
		break;
	case 1:
		expect(!posix_memalign(&bytes, 512, block->length), "posix_memalign");
		break;
	case 2:
	case 3:
	case 4:
		bytes = block->bytes = calloc(1, block->length);
		expect(bytes != NULL, "calloc");
		check_zero(block, "calloc");
		break;
	default:
		bytes = malloc(block->length);
	}
	expect(bytes != NULL, "malloc");
	block->bytes = bytes;
	fill(block, draw(worker));
}

static void deregister(struct block *block)
{
	int i;

	for (i = 0; i < REGIONS; i++) {
		if (block->regions[i])
			expect(!ibv_dereg_mr(block->regions[i]), "ibv_dereg_mr");
		block->regions[i] = NULL;
	}
}

static void release(struct block *block)
{
	check(block, block->length, "before free");
	deregister(block);
	check(block, block->length, "after deregistration");
	if (block->is_mapping)
		expect(!munmap(block->bytes, block->length), "munmap");
	else
		free(block->bytes);
	block->bytes = NULL;
}

/* Memory that allows remote atomics is never copied. */
static int draw_atomics(struct worker *worker)
{
	return draw(worker) % 4 ? 0 : IBV_ACCESS_REMOTE_ATOMIC;
}

static void register_part(struct worker *worker, struct block *block, int index)
{
	size_t from = draw(worker) % block->length;
	size_t length = 1 + draw(worker) % (block->length - from);

	if (block->regions[index]) {
		expect(!ibv_dereg_mr(block->regions[index]), "ibv_dereg_mr");
		block->regions[index] = NULL;
		return;
	}
	if (draw(worker) % 2)
		from = 0, length = block->length;
	block->regions[index] = ibv_reg_mr(pd, block->bytes + from, length, RIGHTS | draw_atomics(worker));
	expect(block->regions[index] != NULL, "ibv_reg_mr");
	atomic_fetch_add(&registrations, 1);
}

static void resize(struct worker *worker, struct block *block)
{
	size_t length = draw_length(worker), kept;
	void *moved;

	deregister(block);
	if (block->is_mapping)
		length = to_pages(length);
	kept = length < block->length ? length : block->length;
	moved = block->is_mapping ? mremap(block->bytes, block->length, length, MREMAP_MAYMOVE)
				  : realloc(block->bytes, length);
	expect(moved && moved != MAP_FAILED, "realloc");
	block->bytes = moved;
	if (block->is_mapping && length > kept) {
		struct block grown = { .bytes = block->bytes + kept, .length = length - kept };

		check_zero(&grown, "mremap");
	}
	check(block, kept, "realloc");
	block->length = length;
	fill(block, block->seed);
}

/* The kernel writes to and reads from a block, beside the bytes of other blocks on the same pages. */
static void transfer(struct worker *worker, struct block *block)
{
	size_t length = block->length < 65536 ? block->length : 65536;
	off_t at = worker->number * 65536;

	expect(pwrite(contents, block->bytes, length, at) == (ssize_t)length, "pwrite");
	memset(block->bytes, 0x77, length);
	expect(pread(contents, block->bytes, length, at) == (ssize_t)length, "pread");
	check(block, block->length, "pread");
	atomic_fetch_add(&kernel_reads, 1);
}

static void discard(struct worker *worker, struct block *block)
{
	struct block pages = *block;

	deregister(block);
	if (!block->is_mapping)
		return;
	expect(!madvise(block->bytes, block->length, MADV_DONTNEED), "MADV_DONTNEED");
	check_zero(&pages, "MADV_DONTNEED");
	fill(block, draw(worker));
}

/* Another thread goes on with the block. */
static void hand_over(struct worker *worker, struct block *block)
{
	struct block *other = &exchanged[draw(worker) % EXCHANGED], before;

	pthread_mutex_lock(&exchange);
	before = *other;
	*other = *block;
	pthread_mutex_unlock(&exchange);
	*block = before;
	if (block->bytes)
		check(block, block->length, "of another thread");
}

/* A child has all memory of its parent and a working allocator, and what it writes stays its own. */
static void make_child(struct worker *worker)
{
	pid_t child;
	int status, i;

	child = fork();
	expect(child >= 0, "fork");
	if (!child) {
		for (i = 0; i < SLOTS; i++) {
			struct block *block = &worker->blocks[i];

			if (!block->bytes)
				continue;
			check(block, block->length, "in a child");
			fill(block, ~block->seed);
		}
		for (i = 0; i < SLOTS; i++) {
			struct block block = { 0 };

			make(worker, &block);
			check(&block, block.length, "made in a child");
			if (block.is_mapping)
				munmap(block.bytes, block.length);
			else if (i % 2)
				free(block.bytes);
		}
		_exit(0);
	}
	expect(waitpid(child, &status, 0) == child, "waitpid");
	if (status) {
		fprintf(stderr, "a child ended with %x\n", status);
		abort();
	}
	for (i = 0; i < SLOTS; i++)
		if (worker->blocks[i].bytes)
			check(&worker->blocks[i], worker->blocks[i].length, "after fork");
	atomic_fetch_add(&forks, 1);
}

static void *work(void *argument)
{
	struct worker *worker = argument;
	long i;

	for (i = 0; i < rounds; i++) {
		struct block *block = &worker->blocks[draw(worker) % SLOTS];
		unsigned step = draw(worker) % 32;

		if (i % FORK_INTERVAL == FORK_INTERVAL - 1)
			make_child(worker);
		if (!block->bytes) {
			make(worker, block);
			continue;
		}
		check(block, block->length, "at a step");
		if (step < 14)
			register_part(worker, block, step % REGIONS);
		else if (step < 18)
			release(block);
		else if (step < 22)
			resize(worker, block);
		else if (step < 25)
			transfer(worker, block);
		else if (step < 27)
			discard(worker, block);
		else if (step < 29)
			hand_over(worker, block);
		else
			fill(block, draw(worker));
	}
	for (i = 0; i < SLOTS; i++)
		if (worker->blocks[i].bytes)
			release(&worker->blocks[i]);
	return NULL;
}

/* Checks pages that were read from the file, from page `first` on. */
static void check_read(const unsigned char *bytes, size_t length, size_t first, const char *how)
{
	size_t i;

	atomic_fetch_add(&direct_reads, 1);
	for (i = 0; i < length; i++)
		if (bytes[i] != (unsigned char)(1 + first + i / PAGE)) {
			fprintf(stderr, "wrong byte: %s: %02x at %zu of %zu, page %zu of the file\n", how, bytes[i],
				i, length, first);
			abort();
		}
}

/* A buffer of the heap that a disk may write to; it shares its first and last page with other blocks. */
static unsigned char *disk_buffer(size_t length)
{
	void *bytes = NULL;

	expect(!posix_memalign(&bytes, 512, length), "posix_memalign");
	memset(bytes, 0, length);
	return bytes;
}

static int open_direct(void)
{
	int fd = open(path, O_RDONLY | O_DIRECT);

	expect(fd >= 0, "open with O_DIRECT");
	return fd;
}

static void *read_directly(void *unused)
{
	struct worker random = { .random = 0x1234567 };
	int fd = opens_each_time ? -1 : open_direct();

	while (!atomic_load(&ended)) {
		size_t length = PAGE * (1 + draw(&random) % 16), first = draw(&random) % (FILE_PAGES - 16);
		unsigned char *bytes = disk_buffer(length);
		struct ibv_mr *region = NULL;

		if (draw(&random) % 4 == 0)
			region = ibv_reg_mr(pd, bytes, length, RIGHTS);
		if (opens_each_time)
			fd = open_direct();
		expect(pread(fd, bytes, length, first * PAGE) == (ssize_t)length, "pread with O_DIRECT");
		if (opens_each_time)
			close(fd);
		check_read(bytes, length, first, "pread with O_DIRECT");
		if (region)
			expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
		check_read(bytes, length, first, "pread with O_DIRECT, after deregistration");
		free(bytes);
		if (opens_each_time)
			usleep(draw(&random) % 512);
	}
	return unused;
}

static void *read_by_aio(void *unused)
{
	enum { DEPTH = 4 };
	struct worker random = { .random = 0x7654321 };
	aio_context_t context = 0;
	int fd = open_direct(), i;

	expect(!syscall(SYS_io_setup, DEPTH, &context), "io_setup");
	while (!atomic_load(&ended)) {
		struct iocb requests[DEPTH] = { 0 }, *list[DEPTH];
		unsigned char *buffers[DEPTH];
		size_t lengths[DEPTH], first[DEPTH];
		struct ibv_mr *region;
		struct io_event events[DEPTH];

		for (i = 0; i < DEPTH; i++) {
			lengths[i] = PAGE * (1 + draw(&random) % 16);
			first[i] = draw(&random) % (FILE_PAGES - 16);
			buffers[i] = disk_buffer(lengths[i]);
			requests[i] = (struct iocb){ .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD,
				.aio_buf = (uintptr_t)buffers[i], .aio_nbytes = lengths[i],
				.aio_offset = first[i] * PAGE };
			list[i] = &requests[i];
		}
		expect(syscall(SYS_io_submit, context, DEPTH, list) == DEPTH, "io_submit");
		region = ibv_reg_mr(pd, buffers[0], lengths[0], RIGHTS);
		expect(region != NULL, "ibv_reg_mr");
		expect(syscall(SYS_io_getevents, context, DEPTH, DEPTH, events, NULL) == DEPTH, "io_getevents");
		for (i = 0; i < DEPTH; i++)
			check_read(buffers[i], lengths[i], first[i], "io_submit");
		expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
		check_read(buffers[0], lengths[0], first[0], "io_submit, after deregistration");
		for (i = 0; i < DEPTH; i++)
			free(buffers[i]);
	}
	syscall(SYS_io_destroy, context);
	close(fd);
	return unused;
}

static void *read_by_io_uring(void *unused)
{
	struct worker random = { .random = 0xabcdef };
	struct io_uring_params params = { 0 };
	int ring = syscall(SYS_io_uring_setup, 8, &params), fd = open_direct();
	char *sq, *cq;
	struct io_uring_sqe *sqes;
	size_t length = 16 * PAGE;

	if (ring < 0) {
		printf("no io_uring: %s\n", strerror(errno));
		close(fd);
		return unused;
	}
	sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring,
		  IORING_OFF_SQ_RING);
	cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe),
		  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
	sqes = mmap(NULL, params.sq_entries * sizeof(*sqes), PROT_READ | PROT_WRITE, MAP_SHARED, ring,
		    IORING_OFF_SQES);
	expect(sq != MAP_FAILED && cq != MAP_FAILED && sqes != MAP_FAILED, "rings");
	while (!atomic_load(&ended)) {
		unsigned char *buffer = disk_buffer(length);
		struct iovec whole = { buffer, length };
		struct ibv_mr *region = NULL;
		int i;

		if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &whole, 1)) {
			printf("no fixed buffers: %s\n", strerror(errno));
			free(buffer);
			break;
		}
		for (i = 0; i < 16; i++) {
			unsigned *tail = (unsigned *)(sq + params.sq_off.tail);
			unsigned *head = (unsigned *)(cq + params.cq_off.head);
			unsigned slot = *tail & (params.sq_entries - 1), index = *head & (params.cq_entries - 1);
			struct io_uring_cqe *cqes = (void *)(cq + params.cq_off.cqes);
			size_t first = draw(&random) % (FILE_PAGES - 16);

			if (region)
				expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
			region = NULL;
			if (i % 2)
				region = ibv_reg_mr(pd, buffer, length, RIGHTS);
			sqes[slot] = (struct io_uring_sqe){ .opcode = IORING_OP_READ_FIXED, .fd = fd,
				.addr = (uintptr_t)buffer, .len = length, .off = first * PAGE };
			((unsigned *)(sq + params.sq_off.array))[slot] = slot;
			__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
			expect(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1,
			       "io_uring_enter");
			expect(cqes[index].res == (int)length, "a whole read");
			__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
			check_read(buffer, length, first, "io_uring");
		}
		if (region)
			expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
		expect(!syscall(SYS_io_uring_register, ring, IORING_UNREGISTER_BUFFERS, NULL, 0),
		       "IORING_UNREGISTER_BUFFERS");
		free(buffer);
	}
	close(ring);
	close(fd);
	return unused;
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	const char *given = getenv("SEED");
	uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 1000003 + getpid();
	void *(*disk[])(void *) = { read_directly, read_by_aio, read_by_io_uring };
	pthread_t disk_threads[3];
	int i, disk_count = 0;

	setvbuf(stdout, NULL, _IONBF, 0);
	expect(context && (pd = ibv_alloc_pd(context)), "a device");
	ibv_free_device_list(list);
	if (argc < 2)
		return 2;
	rounds = atol(argv[1]);
	path = argc > 2 ? argv[2] : NULL;
	opens_each_time = argc > 3;
	contents = memfd_create("contents", MFD_CLOEXEC);
	expect(contents >= 0, "memfd_create");
	printf("SEED=%lu\n", seed);
	if (path) {
		i = open(path, O_RDONLY | O_DIRECT);
		if (i < 0) {
			printf("O_DIRECT: %s\n", strerror(errno));
			return 77;
		}
		close(i);
		disk_count = opens_each_time ? 1 : 3;
	}
	for (i = 0; i < disk_count; i++)
		expect(!pthread_create(&disk_threads[i], NULL, disk[i], NULL), "a thread");
	for (i = 0; i < THREADS; i++) {
		workers[i].random = (seed + i) * 0x9e3779b97f4a7c15 | 1;
		workers[i].number = i;
		expect(!pthread_create(&workers[i].thread, NULL, work, &workers[i]), "a thread");
	}
	for (i = 0; i < THREADS; i++)
		pthread_join(workers[i].thread, NULL);
	atomic_store(&ended, 1);
	for (i = 0; i < disk_count; i++)
		pthread_join(disk_threads[i], NULL);
	for (i = 0; i < EXCHANGED; i++)
		if (exchanged[i].bytes)
			release(&exchanged[i]);
	printf("%ld registrations, %ld children, %ld blocks of zeroes, %ld reads, %ld from the disk\n", registrations,
	       forks, zeroes, kernel_reads, direct_reads);
	return 0;
}
