/*
 * A program that closes descriptors which it did not open, or puts its own files at their numbers:
 *
 *   closed_descriptors close|range|dup|closeall|few
 *
 * The libraries keep their descriptors at numbers that programs do not use. Those that the interface gives to
 * the program belong to the program: the libraries do not use a number any more that has another file. No
 * call may hang or change a file of the program.
 *
 * close, range: closes 3 to 255, as daemons do. dup: puts a file at each number up to 1023. closeall: closes
 * all descriptors that it has. few: may have only 64 descriptors, of which it uses all but a few.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define VICTIMS 16
#define VICTIM_LENGTH 8192
/* Seconds after which the program counts as hanging. */
#define PATIENCE 100

extern char **environ;

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qps[2];
static union ibv_gid gid;
static struct rdma_event_channel *events;
static struct rdma_cm_id *listener;
static struct ibv_context **cm_contexts;
static int rsockets[3];
static int victims[VICTIMS];
static char *memory;
static struct ibv_mr *mr;

enum { KEPT = 1 << 20 };
static char *kept;
static struct ibv_mr *kept_mr;

static struct ibv_qp *create_qp(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp *qp;

	init.cap = (struct ibv_qp_cap){ 4, 4, 1, 1, 0 };
	qp = ibv_create_qp(pd, &init);
	expect(qp && !ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				    IBV_QP_ACCESS_FLAGS), "a queue pair");
	return qp;
}

static void connect_rsockets(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	socklen_t length = sizeof(address);

	inet_pton(AF_INET, "10.77.0.1", &address.sin_addr);
	rsockets[0] = rsocket(AF_INET, SOCK_STREAM, 0);
	expect(rsockets[0] >= 0 && !rbind(rsockets[0], (struct sockaddr *)&address, sizeof(address)) &&
	       !rlisten(rsockets[0], 4) &&
	       !rgetsockname(rsockets[0], (struct sockaddr *)&address, &length), "rlisten");
	rsockets[1] = rsocket(AF_INET, SOCK_STREAM, 0);
	expect(rsockets[1] >= 0 && !rconnect(rsockets[1], (struct sockaddr *)&address, sizeof(address)),
	       "rconnect");
	rsockets[2] = raccept(rsockets[0], NULL, NULL);
	expect(rsockets[2] >= 0, "raccept");
}

static void create_objects(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct sockaddr_in any = { .sin_family = AF_INET };

	expect(devices && (context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)) &&
	       !ibv_query_gid(context, 1, 0, &gid), "a device");
	expect((channel = ibv_create_comp_channel(context)) &&
	       (cq = ibv_create_cq(context, 64, NULL, channel, 0)), "a completion queue");
	expect((srq = ibv_create_srq(pd, &srq_init)) != NULL, "a shared receive queue");
	qps[0] = create_qp();
	qps[1] = create_qp();
	connect_qp(qps[0], qps[1], gid);
	connect_qp(qps[1], qps[0], gid);
	expect((events = rdma_create_event_channel()) &&
	       !rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) &&
	       !rdma_bind_addr(listener, (struct sockaddr *)&any) && !rdma_listen(listener, 1) &&
	       (cm_contexts = rdma_get_devices(NULL)), "a listener");
	connect_rsockets();
}

static int is_given_to_program(int fd)
{
	int n;

	if (fd < 3 || fd == context->async_fd || fd == context->cmd_fd || fd == channel->fd || fd == events->fd)
		return 1;
	for (n = 0; cm_contexts[n]; n++)
		if (fd == cm_contexts[n]->async_fd || fd == cm_contexts[n]->cmd_fd)
			return 1;
	for (n = 0; n < 3; n++)
		if (fd == rsockets[n])
			return 1;
	return 0;
}

/* Each descriptor that the program does not know has a number that it cannot get. */
static void check_numbers(void)
{
	DIR *all = opendir("/proc/self/fd");
	struct dirent *entry;

	expect(all != NULL, "/proc/self/fd");
	while ((entry = readdir(all))) {
		int fd = atoi(entry->d_name);

		if (entry->d_name[0] != '.' && fd != dirfd(all) && fd < 1024 && !is_given_to_program(fd)) {
			char path[64], name[256] = "";

			snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
			expect(readlink(path, name, sizeof(name) - 1) > 0, "a name");
			fprintf(stderr, "descriptor %d: %s\n", fd, name);
			expect(0, "descriptors of the libraries are high");
		}
	}
	closedir(all);
}

static void open_victims(void)
{
	char block[VICTIM_LENGTH];
	int n;

	memset(block, 'V', sizeof(block));
	for (n = 0; n < VICTIMS; n++) {
		char name[] = "/tmp/victimXXXXXX";

		victims[n] = mkstemp(name);
		expect(victims[n] >= 0 && !unlink(name) &&
		       write(victims[n], block, sizeof(block)) == sizeof(block), "a file");
		lseek(victims[n], 0, SEEK_SET);
	}
}

static void check_victims(void)
{
	char block[VICTIM_LENGTH];
	int n, byte;

	for (n = 0; n < VICTIMS; n++) {
		struct stat status;

		expect(!fstat(victims[n], &status) && S_ISREG(status.st_mode), "the file is open");
		expect(status.st_size == VICTIM_LENGTH &&
		       pread(victims[n], block, sizeof(block), 0) == sizeof(block), "its length");
		for (byte = 0; byte < VICTIM_LENGTH; byte++)
			expect(block[byte] == 'V', "its content");
	}
}

static void take_numbers(const char *way)
{
	int n;

	if (!strcmp(way, "range"))
		syscall(SYS_close_range, 3, 255, 0);
	else
		for (n = 3; n < 256; n++)
			close(n);
	if (!strcmp(way, "closeall"))
		syscall(SYS_close_range, 256, ~0U, 0);
	open_victims();
	if (!strcmp(way, "dup"))
		for (n = 256; n < 1024; n++)
			expect(dup2(victims[n % VICTIMS], n) == n, "dup2");
}

/* Uses everything. `works`: the connection to siwd is as it was. */
static void use_objects(int works)
{
	struct ibv_sge place;
	struct ibv_send_wr wr = { .sg_list = &place, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	struct ibv_pd *other;
	int got = 0, sent, received;
	char byte = 0;

	other = ibv_alloc_pd(context);
	expect(!works || (other && !ibv_dealloc_pd(other)), "ibv_alloc_pd");
	mr = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	expect(!works || mr, "ibv_reg_mr");
	if (mr) {
		place = (struct ibv_sge){ (uintptr_t)memory, 64, mr->lkey };
		wr.wr.rdma.remote_addr = (uintptr_t)memory + 64;
		wr.wr.rdma.rkey = mr->rkey;
		if (!ibv_post_send(qps[0], &wr, &bad))
			while (!(got = ibv_poll_cq(cq, 1, &wc)))
				;
		expect(!works || (got == 1 && !wc.status), "a completion");
	}
	sent = rsend(rsockets[1], "x", 1, 0);
	received = sent == 1 ? rrecv(rsockets[2], &byte, 1, 0) : -1;
	expect(!works || (received == 1 && byte == 'x'), "rrecv");
}

static void fork_child(void)
{
	pid_t child = fork();
	char *arguments[] = { "true", NULL };
	int status;

	if (!child)
		_exit(ibv_alloc_pd(context) != NULL);
	expect(child > 0 && waitpid(child, &status, 0) == child && !status, "the child");
	child = vfork();
	if (!child)
		_exit(0);
	expect(child > 0 && waitpid(child, &status, 0) == child && !status, "the child of vfork");
	expect(!posix_spawnp(&child, "true", NULL, NULL, arguments, environ) &&
	       waitpid(child, &status, 0) == child && !status, "posix_spawn");
}

/* Destroys everything, but no number of the program is closed. */
static void destroy_objects(int works)
{
	struct rdma_cm_event *event;
	struct ibv_async_event async;
	int n;

	expect(rdma_get_cm_event(events, &event) && errno, "rdma_get_cm_event of a closed descriptor");
	expect(ibv_get_async_event(cm_contexts[0], &async) || async.event_type == IBV_EVENT_DEVICE_FATAL,
	       "ibv_get_async_event of a closed descriptor");
	for (n = 0; n < 3; n++)
		expect(rclose(rsockets[n]) && errno == EBADF, "rclose of a closed descriptor");
	rdma_destroy_id(listener);
	rdma_destroy_event_channel(events);
	if (mr)
		expect(!ibv_dereg_mr(mr) || !works, "ibv_dereg_mr");
	for (n = 0; n < 2; n++)
		expect(!ibv_destroy_qp(qps[n]) || !works, "ibv_destroy_qp");
	expect(!ibv_destroy_srq(srq) || !works, "ibv_destroy_srq");
	expect(!ibv_destroy_cq(cq) || !works, "ibv_destroy_cq");
	expect(!ibv_destroy_comp_channel(channel) || !works, "ibv_destroy_comp_channel");
	expect(!ibv_dealloc_pd(pd) || !works, "ibv_dealloc_pd");
	expect(!ibv_close_device(context) || !works, "ibv_close_device");
}

/* Registered memory of a child is a copy of its parent's, not of a file at a number of the library. */
static void check_kept_memory(void)
{
	pid_t child = fork();
	int status;

	if (!child)
		_exit(kept[0] != 'k' || memcmp(kept, kept + 1, KEPT - 1) != 0);
	expect(child > 0 && waitpid(child, &status, 0) == child && !status, "memory of a child");
}

/* Opens devices until a limit of 64 descriptors is reached: each call works or fails with EMFILE. */
static void use_few_descriptors(void)
{
	struct rlimit few = { 64, 64 };
	struct ibv_device **devices;
	int opened = 0;

	expect(!setrlimit(RLIMIT_NOFILE, &few), "setrlimit");
	devices = ibv_get_device_list(NULL);
	expect(devices != NULL, "ibv_get_device_list");
	for (;;) {
		struct ibv_context *one = ibv_open_device(devices[0]);

		if (!one)
			break;
		opened++;
		if (!ibv_create_comp_channel(one) || !ibv_alloc_pd(one))
			break;
	}
	printf("%d contexts: %s\n", opened, strerror(errno));
	expect(opened > 1 && errno == EMFILE, "EMFILE");
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "close";
	int works = strcmp(way, "closeall") != 0;
	struct rlimit limit;

	alarm(PATIENCE);
	if (!strcmp(way, "few")) {
		use_few_descriptors();
		puts("done");
		return 0;
	}
	expect(!getrlimit(RLIMIT_NOFILE, &limit), "getrlimit");
	if (limit.rlim_max < 4096) {
		printf("skipped: no more than %ld descriptors are allowed\ndone\n", (long)limit.rlim_max);
		return 0;
	}
	/* The default of most systems. */
	limit.rlim_cur = 1024;
	expect(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit");
	memory = calloc(2, 4096);
	/* Those of the program that has started this one. */
	syscall(SYS_close_range, 3, ~0U, 0);
	create_objects();
	kept = calloc(2, KEPT);
	kept += KEPT - (uintptr_t)kept % KEPT;
	memset(kept, 'k', KEPT);
	kept_mr = ibv_reg_mr(pd, kept, KEPT, IBV_ACCESS_LOCAL_WRITE);
	expect(kept_mr != NULL, "ibv_reg_mr");
	check_numbers();
	expect(!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur == 1024, "the limit is as it was");
	take_numbers(way);
	use_objects(works);
	fork_child();
	check_kept_memory();
	check_victims();
	/* A lower limit concerns new descriptors only. */
	limit.rlim_cur = 256;
	expect(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit");
	expect(!ibv_dereg_mr(kept_mr) || !works, "ibv_dereg_mr");
	destroy_objects(works);
	check_victims();
	puts("done");
	return 0;
}
