/*
 * Functions that the objects of GASNet's library refer to, as Debian unstable compiles it.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

/* Its spawner by MPI, which is not used. */
static void end_unused(void)
{
	abort();
}

#define UNUSED(name) void name(void) __attribute__((alias("end_unused")))
UNUSED(MPI_Abort);
UNUSED(MPI_Allgather);
UNUSED(MPI_Alltoall);
UNUSED(MPI_Barrier);
UNUSED(MPI_Bcast);
UNUSED(MPI_Comm_create);
UNUSED(MPI_Comm_free);
UNUSED(MPI_Comm_group);
UNUSED(MPI_Comm_rank);
UNUSED(MPI_Comm_size);
UNUSED(MPI_Finalize);
UNUSED(MPI_Finalized);
UNUSED(MPI_Group_free);
UNUSED(MPI_Init_thread);
UNUSED(MPI_Initialized);
UNUSED(MPI_Isend);
UNUSED(MPI_Query_thread);
UNUSED(MPI_Recv);
UNUSED(MPI_Waitall);
UNUSED(ompi_mpi_byte);
UNUSED(ompi_mpi_comm_world);

/* Names of the GNU C library 2.38 that older ones lack. */
#if __GLIBC__ == 2 && __GLIBC_MINOR__ < 38
long __isoc23_strtol(const char *text, char **end, int base)
{
	return strtol(text, end, base);
}

int __isoc23_sscanf(const char *text, const char *format, ...)
{
	va_list arguments;
	int found;

	va_start(arguments, format);
	found = vsscanf(text, format, arguments);
	va_end(arguments);
	return found;
}

int __isoc23_fscanf(FILE *file, const char *format, ...)
{
	va_list arguments;
	int found;

	va_start(arguments, format);
	found = vfscanf(file, format, arguments);
	va_end(arguments);
	return found;
}
#endif

/*
 * GASNet refuses to start with less than 128 MB of RLIMIT_MEMLOCK, which only privileged programs raise. siwd does not
 * lock the memory that it registers.
 */
int getrlimit(__rlimit_resource_t resource, struct rlimit *limit)
{
	if (resource != RLIMIT_MEMLOCK)
		return prlimit(0, resource, NULL, limit);
	limit->rlim_cur = limit->rlim_max = RLIM_INFINITY;
	return 0;
}
