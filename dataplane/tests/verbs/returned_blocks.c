/*
 * Registers two blocks of malloc(3) while FILE is open with O_DIRECT, deregisters them, and grows each in
 * turn: the other one must not change.
 *
 *   returned_blocks SOCKET FILE
 */
#define _GNU_SOURCE
#include "siw.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH = 256 * 1024, SHORT = 100 };

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static void check(const char *block, size_t length, char value)
{
	for (size_t i = 0; i < length; i++)
		expect(block[i] == value, "the content of a block");
}

int main(int argc, char **argv)
{
	char *blocks[2];
	siw_mr *regions[2];
	siw_context *context;
	siw_pd *pd;

	expect(argc == 3, "two arguments");
	if (open(argv[2], O_RDWR | O_DIRECT) < 0) {
		printf("skipped: O_DIRECT: %s\n", strerror(errno));
		return 0;
	}
	expect(!siw_open(argv[1], &context) && !siw_alloc_pd(context, &pd), "siw_open");
	for (int i = 0; i < 2; i++) {
		blocks[i] = malloc(LENGTH);
		expect(blocks[i] != NULL, "malloc");
		memset(blocks[i], 'a' + i, LENGTH);
	}
	for (int i = 0; i < 2; i++)
		expect(!siw_reg_memory(pd, blocks[i], LENGTH, 1, &regions[i]), "siw_reg_memory");
	for (int i = 0; i < 2; i++)
		expect(!siw_dereg_mr(regions[i]), "siw_dereg_mr");
	for (int i = 0; i < 2; i++) {
		blocks[i] = realloc(blocks[i], SHORT);
		blocks[i] = realloc(blocks[i], 2 * LENGTH);
		expect(blocks[i] != NULL, "realloc");
		check(blocks[i], SHORT, 'a' + i);
		memset(blocks[i], 'a' + i, 2 * LENGTH);
		check(blocks[1 - i], LENGTH, 'b' - i);
	}
	check(blocks[0], LENGTH, 'a');
	puts("ok");
	return 0;
}
