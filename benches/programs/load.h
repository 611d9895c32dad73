/* Functions that the load programs of this folder share. */
#ifndef LOAD_H
#define LOAD_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Reports a failed call, and ends the program. */
static inline void die(const char *what)
{
	perror(what);
	exit(1);
}

/* Seconds of the monotonic clock. */
static inline double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

#endif
