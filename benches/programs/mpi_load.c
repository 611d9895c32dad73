/*
 * Round trips of two ranks, and sums over all ranks (MPI_Allreduce), of a few bytes:
 *
 *   mpi_load BYTES COUNT
 *
 * Rank 0 prints a line of JSON: with two ranks half of a round trip, with more the time of a sum, in microseconds.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 4096 };

static char sent[MOST], received[MOST];

static void round_trip(int rank, int bytes)
{
	if (rank == 0)
		MPI_Send(sent, bytes, MPI_CHAR, 1, 1, MPI_COMM_WORLD);
	MPI_Recv(received, bytes, MPI_CHAR, !rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	if (rank == 1)
		MPI_Send(sent, bytes, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
}

static double run(int rank, int ranks, int bytes, int count)
{
	double begin;
	int i;

	MPI_Barrier(MPI_COMM_WORLD);
	begin = MPI_Wtime();
	for (i = 0; i < count; i++)
		if (ranks == 2)
			round_trip(rank, bytes);
		else
			MPI_Allreduce(sent, received, bytes, MPI_CHAR, MPI_SUM, MPI_COMM_WORLD);
	return (MPI_Wtime() - begin) / count * 1e6 / (ranks == 2 ? 2 : 1);
}

int main(int argc, char **argv)
{
	int rank, ranks, bytes = argc > 1 ? atoi(argv[1]) : 0, count = argc > 2 ? atoi(argv[2]) : 0;
	double us;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (bytes < 1 || bytes > MOST || count < 1 || ranks < 2) {
		fprintf(stderr, "usage: mpirun -np RANKS mpi_load BYTES COUNT; at most %d bytes, at least 2 ranks\n", MOST);
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	run(rank, ranks, bytes, count / 10 + 1);
	us = run(rank, ranks, bytes, count);
	if (rank == 0)
		printf("{\"us\":%.3f}\n", us);
	MPI_Finalize();
	return 0;
}
