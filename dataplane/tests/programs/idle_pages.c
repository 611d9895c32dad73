/*
 * Registers long memory, deregisters it, and checks that the program notices no difference to private
 * memory while its pages stay with the library for their next registration:
 *
 *   idle_pages fork | give-up | cycle | short | close
 */
#define _GNU_SOURCE
#include "connect.h"
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { PAGE = 4096, MIB = 1 << 20, LENGTH = 96 * MIB, COUNT = 400 };

static struct ibv_pd *pd;

static void register_once(void *bytes, size_t length)
{
	struct ibv_mr *region = ibv_reg_mr(pd, bytes, length, IBV_ACCESS_LOCAL_WRITE);

	expect(region != NULL, "ibv_reg_mr");
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
}

static unsigned char *map(size_t length)
{
	void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(bytes != MAP_FAILED, "mmap");
	return bytes;
}

/* Each page has its own content. */
static void fill(unsigned char *bytes, size_t length, unsigned seed)
{
	size_t page;

	for (page = 0; page < length; page += PAGE)
		*(unsigned *)(bytes + page) = page / PAGE + seed;
}

static void check(const unsigned char *bytes, size_t length, unsigned seed, const char *what)
{
	size_t page;

	for (page = 0; page < length; page += PAGE)
		if (*(const unsigned *)(bytes + page) != page / PAGE + seed) {
			fprintf(stderr, "wrong content: %s, page %zu\n", what, page / PAGE);
			exit(1);
		}
}

/* Lines of /proc/self/maps, or those with a name. */
static int count_mappings(const char *name)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int count = 0;

	expect(maps != NULL, "/proc/self/maps");
	while (fgets(line, sizeof line, maps))
		count += !name || strstr(line, name) != NULL;
	fclose(maps);
	return count;
}

static int count_descriptors(void)
{
	DIR *folder = opendir("/proc/self/fd");
	int count = 0;

	expect(folder != NULL, "/proc/self/fd");
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

/* A child has memory of its own, whatever either of the two writes. */
static void check_fork(void)
{
	unsigned char *bytes = map(LENGTH);
	int status, to_child[2], to_parent[2];
	char byte = 0;
	pid_t child;

	fill(bytes, LENGTH, 1);
	register_once(bytes, LENGTH);
	expect(!pipe(to_child) && !pipe(to_parent), "pipe");
	child = fork();
	if (!child) {
		check(bytes, LENGTH, 1, "in the child");
		fill(bytes, LENGTH, 2);
		expect(write(to_parent[1], &byte, 1) == 1, "write");
		expect(read(to_child[0], &byte, 1) == 1, "read");
		check(bytes, LENGTH, 2, "in the child, after its parent has written");
		_exit(0);
	}
	expect(child > 0, "fork");
	expect(read(to_parent[0], &byte, 1) == 1, "read");
	check(bytes, LENGTH, 1, "in the parent");
	fill(bytes, LENGTH, 3);
	register_once(bytes, LENGTH);
	expect(write(to_child[1], &byte, 1) == 1, "write");
	expect(waitpid(child, &status, 0) == child && !status, "the child");
	check(bytes, LENGTH, 3, "registered again");
	munmap(bytes, LENGTH);
}

/* Memory that the program gives up is not kept. `MADV_DONTNEED` discards content. */
static void check_give_up(void)
{
	int most = count_mappings("siwd-arena") + 2;
	unsigned char *bytes = map(LENGTH), *block;
	size_t half = LENGTH / 2 + 5 * PAGE;

	fill(bytes, LENGTH, 1);
	register_once(bytes, LENGTH);
	expect(!madvise(bytes, half, MADV_DONTNEED), "madvise");
	expect(!bytes[0] && !bytes[half - 1], "discarded pages are zero");
	check(bytes + half, LENGTH - half, half / PAGE + 1, "kept pages");
	register_once(bytes, LENGTH);
	munmap(bytes, half);
	check(bytes + half, LENGTH - half, half / PAGE + 1, "pages left by munmap");
	munmap(bytes + half, LENGTH - half);
	expect(count_mappings("siwd-arena") <= most, "files after munmap");

	block = malloc(LENGTH);
	fill(block, LENGTH, 1);
	register_once(block, LENGTH);
	free(block);
	expect(count_mappings("siwd-arena") <= most, "files after free");

	bytes = map(LENGTH);
	fill(bytes, LENGTH, 4);
	register_once(bytes, LENGTH);
	expect(mmap(bytes, LENGTH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == bytes,
	       "mmap with MAP_FIXED");
	expect(!bytes[0] && !bytes[LENGTH - 1], "mapped pages are zero");
	expect(count_mappings("siwd-arena") <= most, "files after mmap");
	munmap(bytes, LENGTH);
}

/* Registered again and again, memory costs no descriptors and no mappings. */
static void check_cycle(void)
{
	unsigned char *bytes = map(LENGTH);
	int descriptors, mappings, round;

	fill(bytes, LENGTH, 1);
	register_once(bytes, 16 * PAGE);
	descriptors = count_descriptors();
	register_once(bytes, LENGTH);
	mappings = count_mappings(NULL);
	for (round = 0; round < 5; round++) {
		register_once(bytes, LENGTH);
		check(bytes, LENGTH, 1, "after a registration");
	}
	expect(count_descriptors() == descriptors, "descriptors");
	expect(count_mappings(NULL) <= mappings, "mappings");
	munmap(bytes, LENGTH);
}

/* Short registrations leave no mappings behind. */
static void check_short(void)
{
	unsigned char *bytes = map(COUNT * 2 * PAGE);
	int mappings, i;

	fill(bytes, COUNT * 2 * PAGE, 1);
	register_once(bytes, PAGE);
	mappings = count_mappings(NULL);
	for (i = 0; i < COUNT; i++)
		register_once(bytes + i * 2 * PAGE, PAGE);
	expect(count_mappings(NULL) <= mappings + 20, "mappings");
	check(bytes, COUNT * 2 * PAGE, 1, "after the registrations");
}

/* Memory is private again when its device is closed. */
static void check_close(struct ibv_context *context)
{
	unsigned char *bytes = map(LENGTH);

	fill(bytes, LENGTH, 1);
	register_once(bytes, LENGTH);
	expect(!ibv_dealloc_pd(pd) && !ibv_close_device(context), "ibv_close_device");
	expect(!count_mappings("siwd-arena"), "mappings of siwd");
	check(bytes, LENGTH, 1, "after the device was closed");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;

	expect(devices && devices[0], "ibv_get_device_list");
	context = ibv_open_device(devices[0]);
	expect(context != NULL, "ibv_open_device");
	pd = ibv_alloc_pd(context);
	expect(pd != NULL, "ibv_alloc_pd");
	if (!strcmp(what, "fork"))
		check_fork();
	else if (!strcmp(what, "give-up"))
		check_give_up();
	else if (!strcmp(what, "cycle"))
		check_cycle();
	else if (!strcmp(what, "short"))
		check_short();
	else if (!strcmp(what, "close"))
		check_close(context);
	else
		expect(0, "an argument");
	puts("done");
	return 0;
}
