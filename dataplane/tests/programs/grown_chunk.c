/*
 * Grows blocks of malloc(3) by realloc(3) after their registration, while pages stay mappings of the
 * daemon's files because FILE is open with O_DIRECT, and checks that no other memory changes:
 *
 *   grown_chunk FILE
 */
#define _GNU_SOURCE
#include "connect.h"
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>

enum { KIB = 1024, PAGE = 4 * KIB, ABOVE = 1024 * KIB, LENGTH = 300 * KIB, GROWN = 900 * KIB };
enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE };

static struct ibv_pd *pd;

static void register_once(void *bytes, size_t length)
{
	struct ibv_mr *region = ibv_reg_mr(pd, bytes, length, RIGHTS);

	expect(region != NULL, "ibv_reg_mr");
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
}

static void check(const unsigned char *bytes, size_t length, unsigned char value, const char *what)
{
	size_t i;

	for (i = 0; i < length; i++)
		if (bytes[i] != value) {
			fprintf(stderr, "wrong byte: %s: %02x at %zu of %zu\n", what, bytes[i], i, length);
			exit(1);
		}
}

/* A block that is shrunk to `shrunk` bytes, registered before or after that, and grown. */
static void grow(size_t alignment, size_t shrunk, int registers_shrunk)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS;
	unsigned char *above = mmap(NULL, ABOVE, PROT_READ | PROT_WRITE, flags, -1, 0);
	void *block = NULL;
	unsigned char *bytes;

	expect(above != MAP_FAILED, "mmap");
	expect(!posix_memalign(&block, alignment, LENGTH), "posix_memalign");
	bytes = block;
	memset(above, 7, ABOVE);
	register_once(above, ABOVE);
	memset(bytes, 1, LENGTH);
	if (registers_shrunk) {
		bytes = realloc(bytes, shrunk);
		register_once(bytes, shrunk);
	} else {
		register_once(bytes, LENGTH);
		bytes = realloc(bytes, shrunk);
	}
	bytes = realloc(bytes, GROWN);
	expect(bytes != NULL, "realloc");
	check(bytes, shrunk, 1, "kept");
	memset(bytes, 9, GROWN);
	check(above, ABOVE, 7, "other memory");
	free(bytes);
	expect(!munmap(above, ABOVE), "munmap");
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	size_t alignments[] = { 16, 32, 64, 512, 2048, PAGE, 16 * PAGE };
	size_t lengths[] = { 100, PAGE, 3 * PAGE, 200 * KIB };
	size_t i, j;
	int fd;

	expect(context && (pd = ibv_alloc_pd(context)), "a device");
	ibv_free_device_list(list);
	if (argc < 2)
		return 2;
	/* The limit stays where it is when such a block is freed. */
	mallopt(M_MMAP_THRESHOLD, 128 * KIB);
	fd = open(argv[1], O_RDONLY | O_DIRECT);
	if (fd < 0) {
		printf("no O_DIRECT: %s\n", strerror(errno));
		return 77;
	}
	for (i = 0; i < sizeof(alignments) / sizeof(*alignments); i++)
		for (j = 0; j < sizeof(lengths) / sizeof(*lengths); j++) {
			grow(alignments[i], lengths[j], 0);
			grow(alignments[i], lengths[j], 1);
		}
	close(fd);
	printf("all bytes are right\n");
	return 0;
}
