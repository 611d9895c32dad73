/* Forks with registered memory while the process has as many mappings as vm.max_map_count permits. */
#define _GNU_SOURCE
#include "connect.h"
#include <sys/mman.h>
#include <sys/wait.h>

enum { PAGE = 4096, LENGTH = 4 * PAGE, MOST = 1 << 17 };
/* Mappings left to the library, which needs two of them around the system call of fork(2). */
enum { LEFT = 4 };

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	unsigned char *bytes = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char *base = mmap(NULL, (size_t)MOST * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *region;
	int i, status;
	pid_t child;

	expect(pd && bytes != MAP_FAILED && base != MAP_FAILED, "a device and memory");
	memset(bytes, 1, LENGTH);
	region = ibv_reg_mr(pd, bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	expect(region != NULL, "ibv_reg_mr");
	for (i = 1; i < MOST && !mprotect(base + (size_t)i * PAGE, PAGE, PROT_READ); i += 2)
		;
	if (i >= MOST) {
		printf("vm.max_map_count is high\n");
		return 77;
	}
	/* Each page made inaccessible again joins three mappings to one. */
	for (i -= 2, status = 0; status < LEFT; status += 2, i -= 2)
		expect(!mprotect(base + (size_t)i * PAGE, PAGE, PROT_NONE), "mprotect");
	child = fork();
	expect(child >= 0, "fork");
	if (!child) {
		for (i = 0; i < LENGTH; i++)
			if (bytes[i] != 1)
				_exit(1);
		memset(bytes, 2, LENGTH);
		_exit(0);
	}
	expect(waitpid(child, &status, 0) == child, "waitpid");
	expect(!status, "the child has the content");
	for (i = 0; i < LENGTH; i++)
		expect(bytes[i] == 1, "the child's pages are its own");
	munmap(base, (size_t)MOST * PAGE);
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
	printf("own pages\n");
	return 0;
}
