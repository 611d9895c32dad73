/*
 * Memory of a program before, during and after its registration:
 *
 *   registered_memory uring        a buffer registered with io_uring
 *   registered_memory aio FILE     a read by io_submit(2) with O_DIRECT under way; FILE is filled with 0x5a
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

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";

	setvbuf(stdout, NULL, _IONBF, 0);
	open_device();
	if (!strcmp(what, "uring"))
		return uring();
	if (!strcmp(what, "aio") && argc > 2)
		return aio(argv[2]);
	return 2;
}
