/*
 * Memory of a program before, during and after its registration:
 *
 *   registered_memory uring        a buffer registered with io_uring
 *   registered_memory aio FILE     a read by io_submit(2) with O_DIRECT under way; FILE is filled with 0x5a
 *   registered_memory private      memory behaves as before after its last registration
 *   registered_memory threads      the same beside other threads, none of whose updates is lost
 *   registered_memory maps         thousands of regions need few mappings
 *   registered_memory denied       a program with threads that may not use userfaultfd(2)
 *   registered_memory blocked      the same with a thread that blocks all signals
 *
 * Ends with 77 after the reason if this machine lacks something.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <stddef.h>
#include <sys/wait.h>

#define MISSING 77
#define REMOTE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

static struct ibv_pd *pd;

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;

	expect(context && (pd = ibv_alloc_pd(context)), "a device");
	ibv_free_device_list(list);
}

static unsigned char *map_pages(size_t length)
{
	void *pages = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(pages != MAP_FAILED, "mmap");
	memset(pages, 0, length);
	return pages;
}

static size_t count(const unsigned char *bytes, size_t length, unsigned char value)
{
	size_t i, found = 0;

	for (i = 0; i < length; i++)
		found += bytes[i] == value;
	return found;
}

static int lacks(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	return MISSING;
}

struct ring {
	int fd;
	char *sq, *cq;
	struct io_uring_sqe *sqes;
	struct io_uring_params params;
};

static int open_ring(struct ring *ring)
{
	struct io_uring_params *p = &ring->params;

	memset(ring, 0, sizeof(*ring));
	ring->fd = syscall(SYS_io_uring_setup, 8, p);
	if (ring->fd < 0)
		return -1;
	ring->sq = mmap(NULL, p->sq_off.array + p->sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED,
			ring->fd, IORING_OFF_SQ_RING);
	ring->cq = mmap(NULL, p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe),
			PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_CQ_RING);
	ring->sqes = mmap(NULL, p->sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
			  MAP_SHARED, ring->fd, IORING_OFF_SQES);
	expect(ring->sq != MAP_FAILED && ring->cq != MAP_FAILED && ring->sqes != MAP_FAILED, "rings");
	return 0;
}

/* Reads from or writes to a file with registered buffer 0. */
static void transfer_fixed(struct ring *ring, int opcode, int fd, void *buffer, size_t length)
{
	unsigned *tail = (unsigned *)(ring->sq + ring->params.sq_off.tail);
	unsigned *array = (unsigned *)(ring->sq + ring->params.sq_off.array);
	unsigned *head = (unsigned *)(ring->cq + ring->params.cq_off.head);
	unsigned slot = *tail & (ring->params.sq_entries - 1);
	unsigned index = *head & (ring->params.cq_entries - 1);
	struct io_uring_cqe *cqes = (void *)(ring->cq + ring->params.cq_off.cqes);

	memset(&ring->sqes[slot], 0, sizeof(ring->sqes[slot]));
	ring->sqes[slot].opcode = opcode;
	ring->sqes[slot].fd = fd;
	ring->sqes[slot].addr = (uintptr_t)buffer;
	ring->sqes[slot].len = length;
	array[slot] = slot;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	expect(syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1,
	       "io_uring_enter");
	expect(cqes[index].res == (int)length, "a whole transfer");
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
}

static int file_of(unsigned char value, size_t length)
{
	int fd = memfd_create("source", 0);
	unsigned char *bytes = malloc(length);

	expect(fd >= 0 && bytes, "a file");
	memset(bytes, value, length);
	expect(write(fd, bytes, length) == (ssize_t)length, "write");
	free(bytes);
	return fd;
}

/* The kernel's pages of a registered buffer and the program's stay the same pages. */
static int uring(void)
{
	size_t length = 1 << 16;
	unsigned char *pages = map_pages(3 * length), *buffer = pages + length;
	struct iovec whole = { buffer, length };
	struct ibv_mr *mr, *again;
	struct ring ring;
	int fd = file_of(0x5a, length), other = file_of(0x6b, length), written = file_of(0, length);
	int last = file_of(0x7c, length);

	if (open_ring(&ring))
		return lacks("io_uring");
	if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &whole, 1))
		return lacks("IORING_REGISTER_BUFFERS");
	mr = ibv_reg_mr(pd, pages, 3 * length, REMOTE);
	expect(mr != NULL, "ibv_reg_mr");
	transfer_fixed(&ring, IORING_OP_READ_FIXED, fd, buffer, length);
	expect(count(buffer, length, 0x5a) == length, "what io_uring read while registered");
	expect(!count(pages, length, 0x5a) && !count(buffer + length, length, 0x5a), "nothing else");
	memset(buffer, 0x11, length);
	transfer_fixed(&ring, IORING_OP_WRITE_FIXED, written, buffer, length);
	expect(pread(written, pages, length, 0) == (ssize_t)length, "pread");
	expect(count(pages, length, 0x11) == length, "what io_uring wrote");
	expect(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	transfer_fixed(&ring, IORING_OP_READ_FIXED, other, buffer, length);
	expect(count(buffer, length, 0x6b) == length, "what io_uring read after the registration");
	/* Registered with io_uring while it is registered with the device. */
	expect(!syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0),
	       "IORING_UNREGISTER_BUFFERS");
	mr = ibv_reg_mr(pd, buffer, length, REMOTE);
	again = ibv_reg_mr(pd, buffer, length, REMOTE);
	expect(mr && again, "ibv_reg_mr");
	expect(!syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &whole, 1),
	       "IORING_REGISTER_BUFFERS");
	expect(!ibv_dereg_mr(mr) && !ibv_dereg_mr(again), "ibv_dereg_mr");
	transfer_fixed(&ring, IORING_OP_READ_FIXED, last, buffer, length);
	expect(count(buffer, length, 0x7c) == length, "what io_uring read into pages pinned late");
	return 0;
}

/* Registers the end of a buffer that a disk is still writing. */
static int aio(const char *path)
{
	size_t length = 64 << 20, part = 4 << 20;
	int fd = open(path, O_RDONLY | O_DIRECT), round, under_way = 0;

	if (fd < 0)
		return lacks("O_DIRECT");
	for (round = 0; round < 20; round++) {
		unsigned char *bytes = map_pages(length), *end = bytes + length - part;
		struct iocb request = { .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD,
					.aio_buf = (uintptr_t)bytes, .aio_nbytes = length };
		struct iocb *list[1] = { &request };
		struct timespec now = { 0, 0 };
		struct io_event event;
		aio_context_t context = 0;
		struct ibv_mr *mr;
		long done;

		expect(!syscall(SYS_io_setup, 8, &context), "io_setup");
		expect(syscall(SYS_io_submit, context, 1, list) == 1, "io_submit");
		done = syscall(SYS_io_getevents, context, 0, 1, &event, &now);
		mr = ibv_reg_mr(pd, end, part, REMOTE);
		expect(mr != NULL, "ibv_reg_mr");
		if (!done) {
			under_way++;
			expect(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1, "the end");
		}
		expect(event.res == (long long)length, "a whole read");
		expect(count(end, part, 0x5a) == part, "all bytes read");
		expect(!ibv_dereg_mr(mr), "ibv_dereg_mr");
		expect(count(end, part, 0x5a) == part, "all bytes after deregistration");
		syscall(SYS_io_destroy, context);
		munmap(bytes, length);
	}
	printf("%d reads were under way\n", under_way);
	return 0;
}

static struct ibv_mr *reg(void *address, size_t length)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, address, length, REMOTE);

	expect(mr != NULL, "ibv_reg_mr");
	return mr;
}

static int mappings(void)
{
	FILE *file = fopen("/proc/self/maps", "r");
	int lines = 0, byte;

	expect(file != NULL, "/proc/self/maps");
	while ((byte = getc(file)) != EOF)
		lines += byte == '\n';
	fclose(file);
	return lines;
}

/* Everything that works on private anonymous memory works on memory that was registered. */
static int private_again(void)
{
	size_t length = 8 << 20, page = 4096, i;
	unsigned char *bytes = map_pages(length), *moved, *block;
	struct ibv_mr *mr, *other;
	int before, status;
	pid_t child;

	memset(bytes, 0xaa, length);
	expect(!ibv_dereg_mr(reg(bytes, length)), "ibv_dereg_mr");
	expect(count(bytes, length, 0xaa) == length, "content");
	expect(!madvise(bytes, length, MADV_DONTNEED), "MADV_DONTNEED");
	expect(count(bytes, length, 0) == length, "zeroes after MADV_DONTNEED");
	memset(bytes, 0xbb, length);
	expect(!madvise(bytes, length, MADV_FREE), "MADV_FREE");
	memset(bytes, 0xcc, length);

	/* Regions overlap: pages are private when the last has ended. */
	mr = reg(bytes + 100, 3 * page);
	other = reg(bytes + 2 * page, 4 * page);
	expect(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	expect(!madvise(bytes, 2 * page, MADV_DONTNEED), "MADV_DONTNEED");
	expect(count(bytes, 2 * page, 0) == 2 * page, "zeroes where no region is");
	expect(count(bytes + 2 * page, 4 * page, 0xcc) == 4 * page, "content of the other");
	child = fork();
	if (!child) {
		/* Its copy is private anonymous memory, too. */
		memset(bytes + 2 * page, 0x33, page);
		expect(!madvise(bytes + 2 * page, 4 * page, MADV_DONTNEED), "MADV_DONTNEED");
		expect(count(bytes + 2 * page, 4 * page, 0) == 4 * page, "zeroes in the child");
		_exit(0);
	}
	expect(waitpid(child, &status, 0) == child && !status, "a child");
	expect(!ibv_dereg_mr(other), "ibv_dereg_mr");
	expect(count(bytes + 2 * page, 4 * page, 0xcc) == 4 * page, "content of the other");

	/* It grows, with zeroes behind it. */
	munmap(bytes, length);
	bytes = map_pages(length);
	memset(bytes, 0xcc, length);
	expect(!ibv_dereg_mr(reg(bytes, length)), "ibv_dereg_mr");
	expect(!ibv_dereg_mr(reg(bytes + 5 * page, 3 * page)), "ibv_dereg_mr");
	moved = mremap(bytes, length, 2 * length, MREMAP_MAYMOVE);
	expect(moved != MAP_FAILED, "mremap");
	expect(count(moved + length, length, 0) == length, "zeroes behind");
	expect(count(moved + 2 * page, 4 * page, 0xcc) == 4 * page, "content after mremap");
	expect(!mprotect(moved, page, PROT_READ), "mprotect");
	expect(!ibv_dereg_mr(reg(moved + page, page)), "ibv_dereg_mr");
	expect(!mprotect(moved, page, PROT_READ | PROT_WRITE), "mprotect");

	munmap(moved, 2 * length);

	/* Registrations in a loop leave no mappings behind. */
	bytes = map_pages(2 * length);
	before = mappings();
	for (i = 0; i < 2000; i++)
		expect(!ibv_dereg_mr(reg(bytes + (1 + i * 7 % 3000) * page + 8, 2 * page)),
		       "ibv_dereg_mr");
	expect(mappings() <= before + 8, "mappings after a loop");
	munmap(bytes, 2 * length);

	/* What the allocator takes from the kernel again is zero. */
	for (i = 0; i < 20; i++) {
		block = malloc(length);
		memset(block, 0xdd, length);
		mr = reg(block, length);
		expect(!ibv_dereg_mr(mr), "ibv_dereg_mr");
		free(block);
		block = calloc(1, length);
		expect(count(block, length, 0) == length, "calloc");
		free(block);
	}
	return 0;
}

#define COUNTERS 600
static volatile unsigned long *counters;
static volatile int stopped;
static unsigned long counted;

static void *count_up(void *unused)
{
	while (!stopped) {
		int page;

		for (page = 0; page < COUNTERS; page++)
			counters[page * 512] += 1;
		counted++;
	}
	return unused;
}

/* Another thread's updates are not lost while pages are replaced and given back, nor its reads fail. */
static void *read_into(void *unused)
{
	int fd = file_of(0x42, 4096);

	while (!stopped)
		expect(pread(fd, (char *)counters + 4096 + 64, 512, 0) == 512, "pread");
	close(fd);
	return unused;
}

static void register_beside_threads(int rights)
{
	unsigned char *bytes = map_pages((COUNTERS + 2) * 4096);
	pthread_t thread, reader;
	int round, page;

	counters = (unsigned long *)(bytes + 4096);
	expect(!pthread_create(&thread, NULL, count_up, NULL), "a thread");
	expect(!pthread_create(&reader, NULL, read_into, NULL), "a thread");
	for (round = 0; round < 300; round++) {
		unsigned char *part = bytes + 4096 + round % COUNTERS * 4096 + 8;
		struct ibv_mr *all = ibv_reg_mr(pd, bytes + 4096, (round % COUNTERS + 1) * 4096, rights);
		struct ibv_mr *one = ibv_reg_mr(pd, part, 64, rights);

		expect(all && one, "ibv_reg_mr");
		expect(!ibv_dereg_mr(all) && !ibv_dereg_mr(one), "ibv_dereg_mr");
	}
	stopped = 1;
	expect(!pthread_join(thread, NULL) && !pthread_join(reader, NULL), "pthread_join");
	for (page = 0; page < COUNTERS; page++)
		if (counters[page * 512] != counted) {
			fprintf(stderr, "page %d: %lu of %lu\n", page, counters[page * 512], counted);
			exit(1);
		}
	expect(counted > 10, "updates");
	stopped = 0;
}

static int beside_threads(void)
{
	pthread_t thread;

	register_beside_threads(REMOTE);
	expect(!pthread_create(&thread, NULL, count_up, NULL), "a thread");
	private_again();
	stopped = 1;
	return pthread_join(thread, NULL);
}

static int few_mappings(void)
{
	enum { REGIONS = 3000 };
	static struct ibv_mr *mrs[REGIONS];
	unsigned char *bytes = map_pages(REGIONS * 2 * 4096);
	int before = mappings(), i;

	for (i = 0; i < REGIONS; i++)
		mrs[i] = reg(bytes + i * 2 * 4096, 2 * 4096);
	printf("%d mappings for %d regions\n", mappings() - before, REGIONS);
	expect(mappings() < before + 100, "few mappings");
	for (i = 0; i < REGIONS; i++)
		expect(!ibv_dereg_mr(mrs[i]), "ibv_dereg_mr");
	expect(mappings() < before + 100, "few mappings at the end");
	return 0;
}

static void *block_signals(void *unused)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, NULL);
	*(volatile int *)unused = 1;
	while (!stopped)
		usleep(1000);
	return NULL;
}

/* As in a container with the default seccomp profile. */
static int denied(int is_blocked)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(*code), code };
	volatile int is_ready = 0;
	struct ibv_mr *mr;
	pthread_t thread;

	expect(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) &&
	       !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), "seccomp");
	if (!is_blocked) {
		register_beside_threads(REMOTE | IBV_ACCESS_REMOTE_ATOMIC);
		printf("registered\n");
		return 0;
	}
	expect(!pthread_create(&thread, NULL, block_signals, (void *)&is_ready), "a thread");
	while (!is_ready)
		usleep(1000);
	mr = ibv_reg_mr(pd, map_pages(1 << 16), 1 << 16, REMOTE);
	printf("%s\n", mr ? "registered" : strerror(errno));
	stopped = 1;
	return pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	setvbuf(stdout, NULL, _IONBF, 0);
	open_device();
	if (!strcmp(what, "uring"))
		return uring();
	if (!strcmp(what, "aio") && argc > 2)
		return aio(argv[2]);
	if (!strcmp(what, "private"))
		return private_again();
	if (!strcmp(what, "threads"))
		return beside_threads();
	if (!strcmp(what, "maps"))
		return few_mappings();
	if (!strcmp(what, "denied") || !strcmp(what, "blocked"))
		return denied(!strcmp(what, "blocked"));
	return 2;
}
