/*
 * Hooks calls that change memory, as caches of registrations do, and checks that every call on registered
 * memory reaches its hook and has its effect:
 *
 *   hooked_memory code | own | table [late]
 *
 * "code" replaces the first instructions of the C library's functions, "own" those of the functions that the
 * program calls, "table" the entries of all global offset tables. "late" installs the hooks after the first registration.
 */
#define _GNU_SOURCE
#include "connect.h"
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>

enum { PAGE = 4096, LENGTH = 8 << 20, MOST = 256 };
enum { READ_WRITE = PROT_READ | PROT_WRITE, PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS };
enum call { MMAP, MUNMAP, MREMAP, MADVISE, MLOCK, SHMAT, SHMDT, CALLS };

static const char *const names[CALLS] = { "mmap", "munmap", "mremap", "madvise", "mlock", "shmat", "shmdt" };

static struct ibv_pd *pd;
/* Calls of the main thread since the last one of forget(). */
static struct event { enum call call; uintptr_t start, end; } events[MOST];
static int event_count;
static __thread int is_main;

static void note(enum call call, const void *address, size_t length)
{
	if (is_main && event_count < MOST)
		events[event_count++] = (struct event){ call, (uintptr_t)address, (uintptr_t)address + length };
}

static void forget(void)
{
	event_count = 0;
}

/* Checks that a hook was called with all of a range. */
static void expect_seen_at(enum call call, uintptr_t start, size_t length, const char *what)
{
	int i;

	for (i = 0; i < event_count; i++)
		if (events[i].call == call && events[i].start <= start && start + length <= events[i].end)
			break;
	if (i == event_count) {
		fprintf(stderr, "no hook of %s was called: %s\n", names[call], what);
		exit(1);
	}
	forget();
}

static void expect_seen(enum call call, const void *address, size_t length, const char *what)
{
	expect_seen_at(call, (uintptr_t)address, length, what);
}

static void *on_mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
	void *mapped = (void *)syscall(SYS_mmap, address, length, prot, flags, fd, offset);

	note(MMAP, mapped, length);
	return mapped;
}

static int on_munmap(void *address, size_t length)
{
	note(MUNMAP, address, length);
	return syscall(SYS_munmap, address, length);
}

static void *on_mremap(void *old, size_t length, size_t new_length, int flags, ...)
{
	va_list more;
	void *to;

	va_start(more, flags);
	to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
	va_end(more);
	note(MREMAP, old, length);
	return (void *)syscall(SYS_mremap, old, length, new_length, flags, to);
}

static int on_madvise(void *address, size_t length, int advice)
{
	note(MADVISE, address, length);
	return syscall(SYS_madvise, address, length, advice);
}

static int on_mlock(const void *address, size_t length)
{
	note(MLOCK, address, length);
	return syscall(SYS_mlock, address, length);
}

static void *on_shmat(int id, const void *address, int flags)
{
	void *mapped = (void *)syscall(SYS_shmat, id, address, flags);

	note(SHMAT, mapped, PAGE);
	return mapped;
}

static int on_shmdt(const void *address)
{
	note(SHMDT, address, PAGE);
	return syscall(SYS_shmdt, address);
}

static void *const hooks[CALLS] = { on_mmap, on_munmap, on_mremap, on_madvise, on_mlock, on_shmat, on_shmdt };

/* mov $hook, %rax; jmp *%rax */
static void hook_code(void *library)
{
	unsigned char jump[12] = { 0x48, 0xb8, [10] = 0xff, 0xe0 };
	int i;

	for (i = 0; i < CALLS; i++) {
		unsigned char *code = dlsym(library, names[i]);
		unsigned char *page = (unsigned char *)((uintptr_t)code / PAGE * PAGE);

		expect(code != NULL, names[i]);
		memcpy(jump + 2, &hooks[i], sizeof hooks[i]);
		expect(!mprotect(page, 2 * PAGE, READ_WRITE | PROT_EXEC), "mprotect");
		memcpy(code, jump, sizeof jump);
		expect(!mprotect(page, 2 * PAGE, PROT_READ | PROT_EXEC), "mprotect");
	}
}

static void hook_entries(const struct dl_phdr_info *object, const ElfW(Rela) *table, size_t size,
			 const ElfW(Sym) *symbols, const char *strings)
{
	const ElfW(Rela) *entry;
	int i;

	for (entry = table; (const char *)entry < (const char *)table + size; entry++) {
		const char *name = strings + symbols[ELF64_R_SYM(entry->r_info)].st_name;

		for (i = 0; i < CALLS; i++)
			if (!strcmp(name, names[i])) {
				void **place = (void **)(object->dlpi_addr + entry->r_offset);
				char *page = (char *)((uintptr_t)place / PAGE * PAGE);

				expect(!mprotect(page, PAGE, READ_WRITE), "mprotect");
				*place = hooks[i];
			}
	}
}

static int hook_object(struct dl_phdr_info *object, size_t size, void *unused)
{
	const ElfW(Rela) *jumps = NULL, *others = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *strings = NULL;
	size_t jumps_size = 0, others_size = 0;
	const ElfW(Dyn) *entry;
	int i;

	(void)size, (void)unused;
	/* The kernel's object has no addresses in its tables. */
	if (strstr(object->dlpi_name, "vdso"))
		return 0;
	for (i = 0; i < object->dlpi_phnum; i++) {
		if (object->dlpi_phdr[i].p_type != PT_DYNAMIC)
			continue;
		entry = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
		for (; entry->d_tag != DT_NULL; entry++) {
			if (entry->d_tag == DT_JMPREL)
				jumps = (const void *)entry->d_un.d_ptr;
			else if (entry->d_tag == DT_PLTRELSZ)
				jumps_size = entry->d_un.d_val;
			else if (entry->d_tag == DT_RELA)
				others = (const void *)entry->d_un.d_ptr;
			else if (entry->d_tag == DT_RELASZ)
				others_size = entry->d_un.d_val;
			else if (entry->d_tag == DT_SYMTAB)
				symbols = (const void *)entry->d_un.d_ptr;
			else if (entry->d_tag == DT_STRTAB)
				strings = (const void *)entry->d_un.d_ptr;
		}
	}
	if (jumps && symbols && strings)
		hook_entries(object, jumps, jumps_size, symbols, strings);
	if (others && symbols && strings)
		hook_entries(object, others, others_size, symbols, strings);
	return 0;
}

static struct ibv_mr *register_all(void *bytes, size_t length)
{
	struct ibv_mr *region = ibv_reg_mr(pd, bytes, length, IBV_ACCESS_LOCAL_WRITE);

	expect(region != NULL, "ibv_reg_mr");
	return region;
}

static void deregister(struct ibv_mr *region)
{
	expect(!ibv_dereg_mr(region), "ibv_dereg_mr");
	forget();
}

static unsigned char *map(void)
{
	unsigned char *bytes = mmap(NULL, LENGTH, READ_WRITE, PRIVATE, -1, 0);

	expect(bytes != MAP_FAILED, "mmap");
	return bytes;
}

static void expect_bytes(const unsigned char *bytes, size_t length, int value, const char *what)
{
	size_t i;

	for (i = 0; i < length; i += 64)
		if (bytes[i] != value) {
			fprintf(stderr, "%s: byte %zu is %02x\n", what, i, bytes[i]);
			exit(1);
		}
}

/* Calls that all hooks see, and that have their effect on memory without a region. */
static void check_calls(const char *what)
{
	unsigned char *bytes = map(), *block;
	int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);

	expect_seen(MMAP, bytes, LENGTH, what);
	memset(bytes, 1, LENGTH);
	deregister(register_all(bytes, LENGTH));
	expect_bytes(bytes, LENGTH, 1, what);
	expect(!mlock(bytes, PAGE), "mlock");
	expect_seen(MLOCK, bytes, PAGE, what);
	expect(!munlock(bytes, PAGE), "munlock");
	expect(!madvise(bytes, LENGTH, MADV_DONTNEED), "madvise");
	expect_seen(MADVISE, bytes, LENGTH, what);
	expect_bytes(bytes, LENGTH, 0, "discarded memory without a region");

	memset(bytes, 2, LENGTH);
	deregister(register_all(bytes, LENGTH));
	block = mremap(bytes, LENGTH, 2 * LENGTH, MREMAP_MAYMOVE);
	expect(block != MAP_FAILED, "mremap");
	expect_seen(MREMAP, bytes, LENGTH, what);
	expect_bytes(block, LENGTH, 2, "moved memory without a region");
	expect_bytes(block + LENGTH, LENGTH, 0, "new memory behind it");

	deregister(register_all(block, LENGTH));
	bytes = mmap(block, LENGTH, READ_WRITE, PRIVATE | MAP_FIXED, -1, 0);
	expect(bytes == block, "mmap with MAP_FIXED");
	expect_seen(MMAP, bytes, LENGTH, what);
	expect_bytes(bytes, LENGTH, 0, "memory that replaces memory");
	expect(!munmap(bytes, 2 * LENGTH), "munmap");
	expect_seen(MUNMAP, bytes, 2 * LENGTH, what);

	expect(id >= 0, "shmget");
	block = shmat(id, NULL, 0);
	expect(block != (void *)-1, "shmat");
	expect_seen(SHMAT, block, PAGE, what);
	expect(!shmctl(id, IPC_RMID, NULL), "shmctl");
	expect(!shmdt(block), "shmdt");
	expect_seen(SHMDT, block, PAGE, what);
}

/* Calls on memory with a region, and those of the C library itself. */
static void check_calls_on_regions(void)
{
	unsigned char *bytes = map(), *block;
	struct ibv_mr *region;
	uintptr_t freed;

	memset(bytes, 1, LENGTH);
	region = register_all(bytes, LENGTH);
	forget();
	expect(!madvise(bytes, LENGTH / 2, MADV_DONTNEED), "madvise");
	expect_seen(MADVISE, bytes, LENGTH / 2, "a region");
	expect_bytes(bytes, LENGTH / 2, 0, "discarded memory of a region");
	expect_bytes(bytes + LENGTH / 2, LENGTH / 2, 1, "the rest of the region");
	memset(bytes, 1, LENGTH / 2);
	/* It is one mapping again, which the kernel moves. */
	deregister(region);
	region = register_all(bytes, LENGTH);
	forget();
	block = mremap(bytes, LENGTH, LENGTH, MREMAP_MAYMOVE | MREMAP_FIXED, map());
	expect(block != MAP_FAILED, "mremap with MREMAP_FIXED");
	expect_seen(MREMAP, bytes, LENGTH, "a region that moves");
	expect_bytes(block, LENGTH, 1, "a region that moved");
	expect(!madvise(block, LENGTH, MADV_DONTNEED), "madvise");
	expect_bytes(block, LENGTH, 0, "discarded memory of a region that moved");
	deregister(region);
	bytes = block;
	memset(bytes, 1, LENGTH);
	region = register_all(bytes, LENGTH);
	forget();
	block = mremap(bytes, LENGTH, 2 * LENGTH, MREMAP_MAYMOVE);
	expect(block != MAP_FAILED, "mremap");
	expect_seen(MREMAP, bytes, LENGTH, "a region");
	expect_bytes(block, LENGTH, 1, "moved memory of a region");
	expect_bytes(block + LENGTH, LENGTH, 0, "new memory behind it");
	deregister(region);

	region = register_all(block, LENGTH);
	bytes = block;
	forget();
	block = mremap(bytes, 2 * LENGTH, LENGTH / 2, 0);
	expect(block == bytes, "mremap to less");
	expect_seen(MREMAP, bytes, 2 * LENGTH, "a region that shrinks");
	deregister(region);
	expect(!munmap(block, LENGTH / 2), "munmap");

	block = malloc(LENGTH);
	expect(block != NULL, "malloc");
	memset(block, 3, LENGTH);
	deregister(register_all(block, LENGTH));
	block = realloc(block, 2 * LENGTH);
	expect(block != NULL, "realloc");
	expect_bytes(block, LENGTH, 3, "a block that grows");
	deregister(register_all(block, LENGTH));
	freed = (uintptr_t)block;
	free(block);
	expect_seen_at(MUNMAP, freed, LENGTH, "free");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	int in_code = !strcmp(what, "code"), is_late = argc > 2 && !strcmp(argv[2], "late");
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = devices && devices[0] ? ibv_open_device(devices[0]) : NULL;
	unsigned char *idle;

#ifndef __x86_64__
	puts("the jump is one of x86_64");
	return 77;
#endif
	expect(context && (pd = ibv_alloc_pd(context)), "a device");
	if (is_late) {
		idle = map();
		memset(idle, 5, LENGTH);
		deregister(register_all(idle, LENGTH));
	}
	is_main = 1;
	if (in_code)
		hook_code(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD));
	else if (!strcmp(what, "own"))
		hook_code(RTLD_DEFAULT);
	else
		dl_iterate_phdr(hook_object, NULL);
	check_calls("memory without a region");
	if (in_code)
		check_calls_on_regions();
	if (is_late) {
		/* Where hooks replace the library's functions, memory that stayed with it is private by now. */
		expect(!madvise(idle, LENGTH, MADV_DONTNEED), "madvise");
		expect_seen(MADVISE, idle, LENGTH, "memory registered before");
		expect_bytes(idle, LENGTH, 0, "discarded memory that was registered before");
	}
	puts("done");
	return 0;
}
