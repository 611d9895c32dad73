/*
 * dlsym(3) releases memory, as that of the GNU C library 2.43 does with the text of an earlier error. The functions
 * of the drop-in library that it calls look for the next one of their name by dlsym(3) themselves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

static int calls;

/* The call at the end is a jump, so that RTLD_NEXT means the object after the caller of this function. */
void *dlsym(void *handle, const char *name)
{
	static void *(*next)(void *, const char *);
	void *volatile block;

	if (!next) {
		next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
		if (!next)
			next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
	}
	calls++;
	block = malloc(16);
	free(block);
	return next(handle, name);
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	void *volatile block = malloc(100000);

	if (!devices || !devices[0])
		return 1;
	ibv_free_device_list(devices);
	block = realloc(block, 1000000);
	free(block);
	if (!calls)
		return 2;
	puts("done");
	return 0;
}
