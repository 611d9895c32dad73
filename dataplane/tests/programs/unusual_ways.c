/* Ways of programs with registered memory: the content stays theirs, and every call returns.
 *
 * usage: unusual_ways handler|spawn|unload|userfaultfd|seccomp */
#define _GNU_SOURCE
#include "connect.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { PAGE = 4096, LENGTH = 8 << 20 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *region;
static unsigned char *bytes;

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	context = list && *list ? ibv_open_device(*list) : NULL;
	pd = context ? ibv_alloc_pd(context) : NULL;
	expect(pd != NULL, "a device");
}

static void fill(unsigned char value) { memset(bytes, value, LENGTH); }

static int holds(unsigned char value)
{
	for (size_t at = 0; at < LENGTH; at++)
		if (bytes[at] != value)
			return 0;
	return 1;
}

static void *map_memory(void)
{
	void *made = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(made != MAP_FAILED, "mmap");
	return made;
}

static void open_region(void)
{
	open_device();
	bytes = map_memory();
	fill(1);
	region = ibv_reg_mr(pd, bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	expect(region != NULL, "ibv_reg_mr");
}

/* fork(2) in a handler, while the thread waits in a call. */

static volatile sig_atomic_t child_status = -1;

static void on_signal(int number)
{
	int status;
	pid_t child = fork();

	(void)number;
	if (!child) {
		int is_same = holds(1);

		fill(2);
		_exit(is_same ? 0 : 3);
	}
	child_status = waitpid(child, &status, 0) == child ? status : -2;
}

static struct ibv_comp_channel *channel;

static void *wait_for_event(void *argument)
{
	struct ibv_cq *cq;
	void *cookie;

	(void)argument;
	return (void *)(intptr_t)ibv_get_cq_event(channel, &cq, &cookie);
}

static void fork_in_handler(void)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	pthread_t thread;
	void *result;

	open_region();
	expect((channel = ibv_create_comp_channel(context)) != NULL, "a channel");
	expect(ibv_create_cq(context, 4, NULL, channel, 0) != NULL, "a completion queue");
	sigaction(SIGUSR1, &action, NULL);
	expect(!pthread_create(&thread, NULL, wait_for_event, NULL), "a thread");
	expect(!pthread_kill(thread, SIGUSR1), "a signal");
	while (child_status == -1)
		sched_yield();
	expect(!child_status && holds(1), "the child had a copy");
	expect(!pthread_cancel(thread) && !pthread_join(thread, &result), "the end of the thread");
	expect(result == PTHREAD_CANCELED, "it still waited");
}

/* posix_spawn(3) and vfork(2), whose children run on the parent's memory. */

static void spawn_programs(void)
{
	char *arguments[] = { "true", NULL };
	extern char **environ;
	int status;
	pid_t child;

	open_region();
	for (int count = 0; count < 3; count++) {
		expect(!posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ), "posix_spawn");
		expect(waitpid(child, &status, 0) == child && !status, "a spawned program");
		child = vfork();
		if (!child) {
			execve("/bin/true", arguments, environ);
			_exit(1);
		}
		expect(waitpid(child, &status, 0) == child && !status, "a program after vfork");
		expect(holds(1), "the content");
	}
}

/* dlclose(3) while memory is registered, and the library opened again. */

static void unload_library(void)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);

	open_region();
	expect(library && !dlclose(library), "dlclose");
	fill(3);
	expect(!ibv_dereg_mr(region) && holds(3), "the region after dlclose");
	expect(dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL) != NULL, "the library again");
	region = ibv_reg_mr(pd, bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	expect(region && holds(3), "the region again");
}

/* A program that handles the faults of its own memory. */

static int faults;
static long faults_handled;

static void *handle_faults(void *argument)
{
	static unsigned char page[PAGE];
	struct uffd_msg message;

	(void)argument;
	memset(page, 5, sizeof page);
	while (read(faults, &message, sizeof message) == sizeof message) {
		struct uffdio_copy copy = {
			.dst = message.arg.pagefault.address & ~(uint64_t)(PAGE - 1),
			.src = (uintptr_t)page,
			.len = PAGE,
		};

		if (message.event == UFFD_EVENT_PAGEFAULT && !ioctl(faults, UFFDIO_COPY, &copy))
			faults_handled++;
	}
	return NULL;
}

static void handle_own_faults(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register watched = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	pthread_t thread;

	faults = syscall(SYS_userfaultfd, O_CLOEXEC);
	if (faults < 0 || ioctl(faults, UFFDIO_API, &api)) {
		printf("no userfaultfd here: done\n");
		return;
	}
	open_device();
	bytes = map_memory();
	watched.range.start = (uintptr_t)bytes;
	watched.range.len = LENGTH;
	expect(!ioctl(faults, UFFDIO_REGISTER, &watched), "UFFDIO_REGISTER");
	expect(!pthread_create(&thread, NULL, handle_faults, NULL), "a thread");
	for (size_t at = 0; at < LENGTH; at += 2 * PAGE)
		expect(bytes[at] == 5, "a page from the handler");
	region = ibv_reg_mr(pd, bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	if (region)
		expect(holds(5), "the content of the handler");
	else
		expect(errno != 0, "a refusal");
	expect(!region || !ibv_dereg_mr(region), "ibv_dereg_mr");
	expect(holds(5), "the content after deregistration");
	printf("%s, %ld faults\n", region ? "registered" : "refused", faults_handled);
}

/* A seccomp filter that the program installs after registering: no more files are opened. */

static void lock_down(void)
{
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
	};
	struct sock_fprog program = { .len = sizeof rules / sizeof *rules, .filter = rules };
	struct ibv_mr *other;
	int status;
	pid_t child;

	open_region();
	expect(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges");
	expect(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program), "seccomp");
	other = ibv_reg_mr(pd, map_memory(), LENGTH, IBV_ACCESS_LOCAL_WRITE);
	printf("%s after the filter\n", other ? "registered" : "refused");
	fill(4);
	child = fork();
	if (!child)
		_exit(holds(4) ? 0 : 3);
	expect(waitpid(child, &status, 0) == child && !status, "a child");
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
	expect(holds(4), "the content after deregistration");
	fill(6);
	expect(holds(6), "writing");
	expect(!madvise(bytes, LENGTH, MADV_DONTNEED) && holds(0), "MADV_DONTNEED");
	expect(!munmap(bytes, LENGTH), "munmap");
}

int main(int count, char **arguments)
{
	const char *way = count > 1 ? arguments[1] : "";

	alarm(60);
	if (!strcmp(way, "handler"))
		fork_in_handler();
	else if (!strcmp(way, "spawn"))
		spawn_programs();
	else if (!strcmp(way, "unload"))
		unload_library();
	else if (!strcmp(way, "userfaultfd"))
		handle_own_faults();
	else
		lock_down();
	printf("done\n");
	return 0;
}
