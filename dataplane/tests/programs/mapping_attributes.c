/*
 * Checks that registered memory keeps the attributes that madvise(2), mlock(2) and mmap(2) have set for
 * it, while it is registered and afterwards.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <sys/mman.h>
#include <sys/wait.h>

enum { PAGE = 4096, LENGTH = 4 * PAGE, NONE = -1 };

static struct ibv_pd *pd;

/* Flags of the mapping at an address (proc_pid_smaps(5)). */
static int has_flag(const char *address, const char *flag)
{
	FILE *maps = fopen("/proc/self/smaps", "r");
	unsigned long start, end;
	int is_here = 0, found = 0;
	char line[512];

	expect(maps != NULL, "/proc/self/smaps");
	while (fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			is_here = (unsigned long)address >= start && (unsigned long)address < end;
		if (is_here && !strncmp(line, "VmFlags:", 8))
			found = strstr(line, flag) != NULL;
	}
	fclose(maps);
	return found;
}

static void check(const char *name, const char *flag, int advice, int flags)
{
	char *bytes = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags,
			   -1, 0);
	struct ibv_mr *region;
	int status;
	pid_t child;

	expect(bytes != MAP_FAILED, name);
	if (advice != NONE && madvise(bytes, LENGTH, advice)) {
		printf("skipped: %s: %s\n", name, strerror(errno));
		return;
	}
	if (!strcmp(name, "mlock") && mlock(bytes, LENGTH)) {
		printf("skipped: mlock: %s\n", strerror(errno));
		return;
	}
	memset(bytes, 7, LENGTH);
	/* A kernel without overcommit has no use for MAP_NORESERVE. */
	if (!has_flag(bytes, flag)) {
		printf("skipped: %s has no effect\n", name);
		return;
	}
	region = ibv_reg_mr(pd, bytes + PAGE, PAGE, IBV_ACCESS_LOCAL_WRITE);
	expect(region != NULL, name);
	/* Shared memory has no such flag. */
	if (strcmp(name, "MAP_NORESERVE"))
		expect(has_flag(bytes + PAGE, flag), name);
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
	expect(has_flag(bytes + PAGE, flag), name);
	if (advice == MADV_WIPEONFORK) {
		fflush(stdout);
		child = fork();
		if (!child)
			_exit(bytes[0] || bytes[PAGE]);
		expect(waitpid(child, &status, 0) == child && !status, "a child sees zeroes");
	}
	expect(bytes[0] == 7 && bytes[PAGE] == 7 && bytes[LENGTH - 1] == 7, "content");
	munmap(bytes, LENGTH);
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	expect(devices && devices[0], "ibv_get_device_list");
	pd = ibv_alloc_pd(ibv_open_device(devices[0]));
	expect(pd != NULL, "ibv_alloc_pd");
	check("mlock", " lo", NONE, 0);
	check("MADV_DONTDUMP", " dd", MADV_DONTDUMP, 0);
	check("MADV_DONTFORK", " dc", MADV_DONTFORK, 0);
	check("MADV_WIPEONFORK", " wf", MADV_WIPEONFORK, 0);
	check("MADV_HUGEPAGE", " hg", MADV_HUGEPAGE, 0);
	check("MADV_NOHUGEPAGE", " nh", MADV_NOHUGEPAGE, 0);
	check("MAP_NORESERVE", " nr", NONE, MAP_NORESERVE);
	puts("done");
	return 0;
}
