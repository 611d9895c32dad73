/*
 * Registers memory at addresses whose former pages another thread moves meanwhile. The program holds a file
 * open with O_DIRECT, so that pages stay mappings of the daemon's files after deregistration:
 *
 *   moved_memory ROUNDS FILE
 */
#define _GNU_SOURCE
#include "connect.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { PAGE = 4096, LENGTH = 4 * PAGE, BETWEEN = 2000, RIGHTS = IBV_ACCESS_LOCAL_WRITE };
enum { GUARD = 64 << 20 };
#define ROOM (4ul << 30)

static struct ibv_pd *pd;
static atomic_int is_moving, ended;
static atomic_long moves;
/* Two reserved places with many mappings between them; the block is in one of them. */
static unsigned char *places[2], *block;

static void register_once(unsigned char *bytes)
{
	struct ibv_mr *region = ibv_reg_mr(pd, bytes, LENGTH, RIGHTS);

	expect(region != NULL, "ibv_reg_mr");
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
}

static void move_to(unsigned char *place)
{
	block = mremap(block, LENGTH, LENGTH, MREMAP_MAYMOVE | MREMAP_FIXED, place);
	expect(block != MAP_FAILED, "mremap");
}

static void *move_block(void *unused)
{
	while (!atomic_load(&ended)) {
		if (!atomic_load(&is_moving))
			continue;
		for (; atomic_load(&is_moving); atomic_fetch_add(&moves, 1))
			move_to(places[block == places[0]]);
		atomic_store(&is_moving, -1);
		while (atomic_load(&is_moving) == -1 && !atomic_load(&ended))
			;
	}
	return unused;
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS, fd, round, i;
	unsigned char *reserved, *base, *home;
	pthread_t mover;
	long before;

	expect(context && (pd = ibv_alloc_pd(context)), "a device");
	ibv_free_device_list(list);
	if (argc < 3)
		return 2;
	fd = open(argv[2], O_RDONLY | O_DIRECT);
	if (fd < 0) {
		printf("no O_DIRECT: %s\n", strerror(errno));
		return 77;
	}
	/*
	 * Each move leaves a gap, over which this program maps later. The kernel must not give it to the library
	 * meanwhile: there is a larger gap above, of which it takes the upper end, and none beside it.
	 */
	reserved = mmap(NULL, (BETWEEN + 3) * LENGTH + 2 * GUARD + ROOM, PROT_NONE, flags | MAP_NORESERVE, -1, 0);
	expect(reserved != MAP_FAILED, "mmap");
	base = reserved + GUARD;
	home = base + (BETWEEN + 2) * LENGTH + GUARD;
	expect(!munmap(home + LENGTH, ROOM), "munmap");
	for (i = 1; i <= BETWEEN; i += 2)
		expect(!mprotect(base + i * LENGTH, LENGTH, PROT_READ), "mprotect");
	places[0] = base;
	places[1] = base + (BETWEEN + 1) * LENGTH;
	expect(!pthread_create(&mover, NULL, move_block, NULL), "pthread_create");
	for (round = 0; round < atol(argv[1]); round++) {
		block = mmap(home, LENGTH, prot, flags | MAP_FIXED, -1, 0);
		expect(block == home, "mmap");
		memset(block, 1, LENGTH);
		register_once(block);
		move_to(places[0]);
		before = atomic_load(&moves);
		atomic_store(&is_moving, 1);
		while (atomic_load(&moves) == before)
			;
		home = mmap(home, LENGTH, prot, flags | MAP_FIXED, -1, 0);
		expect(home != MAP_FAILED, "mmap");
		memset(home, 2, LENGTH);
		register_once(home);
		atomic_store(&is_moving, 0);
		while (atomic_load(&is_moving) != -1)
			;
		for (i = 0; i < LENGTH; i++)
			if (block[i] != 1 || home[i] != 2) {
				fprintf(stderr, "wrong byte: round %d, %02x and %02x at %d\n", round, block[i], home[i],
					i);
				return 1;
			}
		expect(!munmap(block, LENGTH), "munmap");
		expect(mmap(block, LENGTH, PROT_NONE, flags | MAP_FIXED, -1, 0) == block, "mmap");
	}
	atomic_store(&ended, 1);
	expect(!pthread_join(mover, NULL), "pthread_join");
	close(fd);
	printf("%d rounds\n", round);
	return 0;
}
