/*
 * Transfers by NCCL's network layer for InfiniBand and RoCE (net_ib), between two processes and in host memory.
 * NCCL calls it by a table of functions (ncclNet_v12_t) that libnccl.so does not export; the library's symbol
 * table has it. No GPU is needed.
 *
 * Usage: nccl_net LIBRARY
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Constants of NCCL's interface for network plugins. */
enum { HANDLE_SIZE = 128, POINTER_HOST = 1, MAX_DEVICES_OF_NIC = 8 };

/* Sizes of this program: requests in flight, receives of one request, bytes of the largest message. */
enum { FLIGHT = 8, GROUP = 8, LARGEST = 16 << 20, LARGE = 1 << 20, GUARD = 64 };
/* Memory of one process, and the distance of the messages in flight. */
enum { PLACE = LARGE + 4096, ROOM = LARGEST + 4096 };

/* The members of ncclNetProperties_v12_t that this program reads come first; the rest is room. */
struct properties {
	char *name, *pci_path;
	uint64_t guid;
	int pointers, is_global, force_flush, speed, port;
	float latency;
	int max_comms, max_receives;
	char room[512];
};

struct devices_of_nic { int count, devices[MAX_DEVICES_OF_NIC]; };

/* ncclNet_v12_t */
struct net {
	const char *name;
	int (*init)(void **context, uint64_t id, int *traffic_class, void *log, void *profiler);
	int (*devices)(int *count);
	int (*get_properties)(int device, struct properties *properties);
	int (*listen)(void *context, int device, void *handle, void **listener);
	int (*connect)(void *context, int device, void *handle, void **sender, void **offload);
	int (*accept)(void *listener, void **receiver, void **offload);
	int (*reg_mr)(void *comm, void *data, size_t size, int kind, void **region);
	int (*reg_dmabuf)(void *comm, void *data, size_t size, int kind, uint64_t offset, int fd, void **region);
	int (*dereg_mr)(void *comm, void *region);
	int (*isend)(void *sender, void *data, size_t size, int tag, void *region, void *profile, void **request);
	int (*irecv)(void *receiver, int count, void **data, size_t *sizes, int *tags, void **regions,
		     void **profiles, void **request);
	int (*iflush)(void *receiver, int count, void **data, int *sizes, void **regions, void **request);
	int (*test)(void *request, int *done, int *sizes);
	int (*close_send)(void *sender);
	int (*close_receive)(void *receiver);
	int (*close_listen)(void *listener);
	void *get_device_region, *receive_consumed;
	int (*make_virtual)(int *device, struct devices_of_nic *members);
	int (*finalize)(void *context);
	void *set_attributes;
};

static struct net *net;
static void *context;
static char *memory;
static int peer;	/* socket to the other process */
static const char *role;

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s: %s: %s\n", role ? role : "begin", what, strerror(errno));
		exit(1);
	}
}

static void succeed(int result, const char *what)
{
	if (result) {
		fprintf(stderr, "%s: %s: NCCL's error %d\n", role, what, result);
		exit(1);
	}
}

/* Looks a symbol up in the section .symtab; with `at`, any symbol of that value. Returns its name, or NULL. */
static const char *find_symbol(const char *file, const char *name, uint64_t at, uint64_t *value, uint64_t *size)
{
	const Elf64_Ehdr *header = (const void *)file;
	const Elf64_Shdr *sections = (const void *)(file + header->e_shoff);
	int n;

	for (n = 0; n < header->e_shnum; n++) {
		const Elf64_Sym *symbol = (const void *)(file + sections[n].sh_offset);
		const Elf64_Sym *end = symbol + sections[n].sh_size / sizeof(*symbol);
		const char *names = file + sections[sections[n].sh_link].sh_offset;

		if (sections[n].sh_type != SHT_SYMTAB)
			continue;
		for (; symbol < end; symbol++) {
			if (name ? strcmp(names + symbol->st_name, name) : symbol->st_value != at)
				continue;
			if (value)
				*value = symbol->st_value;
			if (size)
				*size = symbol->st_size;
			return names + symbol->st_name;
		}
	}
	return NULL;
}

static void load_net(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	int fd = open(path, O_RDONLY);
	struct link_map *map;
	struct stat status;
	uint64_t value, size;
	const char *file, *name;

	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	expect(library && fd >= 0 && !fstat(fd, &status) && !dlinfo(library, RTLD_DI_LINKMAP, &map), "the library");
	file = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	expect(file != MAP_FAILED, "the library's file");
	expect(find_symbol(file, "ncclNetIb", 0, &value, &size) != NULL, "ncclNetIb is not in .symtab");
	expect(size == sizeof(*net), "ncclNetIb has another size than ncclNet_v12_t");
	net = (struct net *)(map->l_addr + value);
	expect(!strcmp(net->name, "IB"), "ncclNetIb is called IB");
	/* A name of C++ has the types of its arguments. */
	name = find_symbol(file, NULL, (uint64_t)net->init - map->l_addr, NULL, NULL);
	expect(name && strstr(name, "ncclNetCommConfig_v12_t"), "ncclNetIb is of version 12");
	munmap((void *)file, status.st_size);
	close(fd);
}

static int report_nothing(void)
{
	return 0;
}

static void tell(const void *data, size_t size)
{
	expect(write(peer, data, size) == (ssize_t)size, "write to the other process");
}

static void hear(void *data, size_t size)
{
	expect(recv(peer, data, size, MSG_WAITALL) == (ssize_t)size, "read from the other process");
}

/* Waits for the other process at the same place. */
static void meet(void)
{
	char byte = 0;

	tell(&byte, 1);
	hear(&byte, 1);
}

static char byte_of(size_t at, unsigned seed)
{
	return (char)(at * 7 + (at >> 9) + seed * 31);
}

static void fill(char *data, size_t size, unsigned seed)
{
	size_t n;

	for (n = 0; n < size; n++)
		data[n] = byte_of(n, seed);
}

/* Checks a message, and that the bytes behind it are untouched. */
static void check(const char *data, size_t size, unsigned seed)
{
	size_t n;

	for (n = 0; n < size; n++) {
		if (data[n] != byte_of(n, seed)) {
			fprintf(stderr, "message %u of %zu bytes: byte %zu is wrong\n", seed, size, n);
			exit(1);
		}
	}
	for (n = size; n < size + GUARD; n++)
		expect(data[n] == 0x55, "bytes behind a message");
}

static void finish(void *request, int *sizes)
{
	int done = 0;

	while (!done) {
		succeed(net->test(request, &done, sizes), "test");
		if (!done)
			sched_yield();
	}
}

static void *start_send(void *sender, char *data, size_t size, int tag, void *region)
{
	void *request = NULL;

	/* NULL: the receiver's request is not here yet. */
	while (!request) {
		succeed(net->isend(sender, data, size, tag, region, NULL, &request), "isend");
		if (!request)
			sched_yield();
	}
	return request;
}

static void *start_receive(void *receiver, int count, char **data, size_t *sizes, int *tags, void **regions)
{
	void *request = NULL, *profiles[GROUP] = { NULL };

	while (!request)
		succeed(net->irecv(receiver, count, (void **)data, sizes, tags, regions, profiles, &request), "irecv");
	return request;
}

/* Makes received data visible, as NCCL does before it uses them. */
static void flush(void *receiver, int count, char **data, int *sizes, void **regions)
{
	void *request = NULL;

	succeed(net->iflush(receiver, count, (void **)data, sizes, regions, &request), "iflush");
	if (request)
		finish(request, NULL);
}

static const size_t SIZES[] = { 1, 7, 128, 4096, 65537, LARGE, LARGEST, 0 };
enum { COUNT = sizeof(SIZES) / sizeof(*SIZES), ROUNDS = 40 };

/* Sizes of messages in flight, up to LARGE. */
static size_t size_in_flight(unsigned n)
{
	return SIZES[n * 5 % (COUNT - 2)];
}

static void send_all(void *sender)
{
	void *region, *part, *requests[FLIGHT];
	unsigned n, k;
	int size;

	succeed(net->reg_mr(sender, memory, ROOM, POINTER_HOST, &region), "regMr");
	/* A part of it that begins within a page. */
	succeed(net->reg_mr(sender, memory + 100, 5000, POINTER_HOST, &part), "regMr of a part");
	for (n = 0; n < COUNT; n++) {
		fill(memory, SIZES[n], n);
		finish(start_send(sender, memory, SIZES[n], n, region), &size);
		expect(size == (int)SIZES[n], "the sent size");
	}
	fill(memory + 100, 4000, 99);
	finish(start_send(sender, memory + 100, 4000, 0, part), NULL);
	/* Several in flight, of sizes that differ; more of them than NCCL has requests. */
	for (k = 0; k < ROUNDS; k++) {
		for (n = 0; n < FLIGHT; n++) {
			fill(memory + n * PLACE, size_in_flight(n + k), n + k);
			requests[n] = start_send(sender, memory + n * PLACE, size_in_flight(n + k), 5, region);
		}
		for (n = 0; n < FLIGHT; n++)
			finish(requests[n], NULL);
	}
	/* Messages of one grouped receive, in another order than that of its tags. */
	for (n = 0; n < GROUP; n++) {
		k = GROUP - 1 - n;
		fill(memory + k * PLACE, size_in_flight(k), k + 200);
		requests[k] = start_send(sender, memory + k * PLACE, size_in_flight(k), 1000 + k, region);
	}
	for (n = 0; n < GROUP; n++)
		finish(requests[n], NULL);
	meet();
	succeed(net->dereg_mr(sender, part), "deregMr of a part");
	succeed(net->dereg_mr(sender, region), "deregMr");
}

static void receive_one(void *receiver, char *data, size_t room, int tag, void *region, size_t expected, unsigned seed)
{
	int size = -1;

	memset(data, 0x55, expected + GUARD);
	finish(start_receive(receiver, 1, &data, &room, &tag, &region), &size);
	expect(size == (int)expected, "the received size");
	flush(receiver, 1, &data, &size, &region);
	check(data, expected, seed);
}

static void receive_all(void *receiver)
{
	void *region, *requests[FLIGHT], *regions[GROUP];
	char *places[GROUP];
	size_t rooms[GROUP];
	int tags[GROUP], sizes[GROUP] = { -1 }, five = 5;
	unsigned n, k;

	succeed(net->reg_mr(receiver, memory, ROOM, POINTER_HOST, &region), "regMr");
	for (n = 0; n < COUNT; n++)
		receive_one(receiver, memory, LARGEST, n, region, SIZES[n], n);
	receive_one(receiver, memory + 1, 4000, 0, region, 4000, 99);
	for (n = 0; n < GROUP; n++) {
		places[n] = memory + n * PLACE;
		rooms[n] = LARGE;
		tags[n] = 1000 + n;
		regions[n] = region;
	}
	for (k = 0; k < ROUNDS; k++) {
		for (n = 0; n < FLIGHT; n++) {
			memset(places[n], 0x55, size_in_flight(n + k) + GUARD);
			requests[n] = start_receive(receiver, 1, &places[n], rooms, &five, &region);
		}
		for (n = 0; n < FLIGHT; n++) {
			finish(requests[n], sizes);
			expect(sizes[0] == (int)size_in_flight(n + k), "a size in flight");
			check(places[n], size_in_flight(n + k), n + k);
		}
	}
	for (n = 0; n < GROUP; n++)
		memset(places[n], 0x55, size_in_flight(n) + GUARD);
	finish(start_receive(receiver, GROUP, places, rooms, tags, regions), sizes);
	flush(receiver, GROUP, places, sizes, regions);
	for (n = 0; n < GROUP; n++) {
		expect(sizes[n] == (int)size_in_flight(n), "a size of a grouped receive");
		check(places[n], size_in_flight(n), n + 200);
	}
	meet();
	succeed(net->dereg_mr(receiver, region), "deregMr");
}

/* Connects to the other process's device, sends, and disconnects. */
static void send_from(int device)
{
	char handle[HANDLE_SIZE];
	void *sender = NULL, *offload = NULL;

	role = "sender";
	hear(handle, sizeof(handle));
	while (!sender)
		succeed(net->connect(context, device, handle, &sender, &offload), "connect");
	send_all(sender);
	meet();
	succeed(net->close_send(sender), "closeSend");
}

static void receive_at(int device)
{
	char handle[HANDLE_SIZE];
	void *listener, *receiver = NULL, *offload = NULL;

	role = "receiver";
	succeed(net->listen(context, device, handle, &listener), "listen");
	tell(handle, sizeof(handle));
	while (!receiver)
		succeed(net->accept(listener, &receiver, &offload), "accept");
	receive_all(receiver);
	meet();
	succeed(net->close_receive(receiver), "closeRecv");
	succeed(net->close_listen(listener), "closeListen");
}

static int find_device(const char *name)
{
	struct properties properties;
	int count, device;

	succeed(net->devices(&count), "devices");
	for (device = 0; device < count; device++) {
		memset(&properties, 0, sizeof(properties));
		succeed(net->get_properties(device, &properties), "getProperties");
		if (!strcmp(properties.name, name)) {
			expect(properties.pointers & POINTER_HOST && properties.port == 1 && properties.speed > 0 &&
			       properties.max_comms > 0 && properties.max_receives >= GROUP, "properties");
			return device;
		}
	}
	fprintf(stderr, "%s is none of %d devices\n", name, count);
	exit(1);
}

/* One of the two processes. They use one device to the other, back, one to itself, and both as one. */
static void run(const char *library, int is_first)
{
	int traffic_class = -1, first, second, both;
	struct devices_of_nic members = { 2, { 0 } };

	load_net(library);
	succeed(net->init(&context, 1, &traffic_class, NULL, report_nothing), "init");
	memory = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	expect(memory != MAP_FAILED, "memory");
	first = find_device("siw0");
	second = find_device("siw1");
	members.devices[0] = first;
	members.devices[1] = second;
	succeed(net->make_virtual(&both, &members), "makeVDevice");
	if (is_first) {
		send_from(first);
		receive_at(first);
		send_from(first);
		receive_at(both);
	} else {
		receive_at(second);
		send_from(second);
		receive_at(first);
		send_from(both);
	}
	succeed(net->finalize(context), "finalize");
}

int main(int count, char **arguments)
{
	pid_t processes[2];
	int ends[2], n, status;

	expect(count == 2, "usage: nccl_net LIBRARY");
	expect(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "socketpair");
	for (n = 0; n < 2; n++) {
		processes[n] = fork();
		expect(processes[n] >= 0, "fork");
		if (processes[n])
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		peer = ends[n];
		close(ends[!n]);
		run(arguments[1], n == 0);
		return 0;
	}
	for (n = 0; n < 2; n++) {
		expect(wait(&status) > 0, "wait");
		if (status) {
			kill(processes[0], SIGKILL);
			kill(processes[1], SIGKILL);
			fprintf(stderr, "a process ended with status %x\n", status);
			return 1;
		}
	}
	printf("all messages are right\n");
	return 0;
}
