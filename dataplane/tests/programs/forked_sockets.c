/*
 * Children of a process whose other threads are inside of calls of the preloaded libraries at the fork: they
 * create sockets and list interfaces as their parent does. Run with `siwrun --rsockets`.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILDREN 300
/* Seconds after which a child counts as hanging. */
#define PATIENCE 60

static atomic_int is_over;

static void expect(int holds, const char *what)
{
	if (!holds) {
		fprintf(stderr, "%d: %s: %s\n", (int)getpid(), what, strerror(errno));
		exit(1);
	}
}

static void use_socket(void)
{
	int made = socket(AF_INET, SOCK_STREAM, 0);

	expect(made >= 0 && !close(made), "a socket");
}

static void list_interfaces(void)
{
	struct ifaddrs *list;

	expect(!getifaddrs(&list), "getifaddrs");
	freeifaddrs(list);
}

static void listen_on_device(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int made = socket(AF_INET, SOCK_STREAM, 0);

	inet_pton(AF_INET, "10.77.0.1", &address.sin_addr);
	expect(made >= 0 && !bind(made, (struct sockaddr *)&address, sizeof(address)) && !listen(made, 1) &&
	       !close(made), "an rsocket");
}

static void *repeat(void *call)
{
	while (!is_over)
		((void (*)(void))call)();
	return NULL;
}

int main(void)
{
	void (*calls[])(void) = { use_socket, use_socket, list_interfaces, listen_on_device };
	pthread_t threads[4];
	int n, status;

	/* The libraries set themselves up in the first calls. */
	for (n = 0; n < 4; n++)
		calls[n]();
	for (n = 0; n < 4; n++)
		expect(!pthread_create(&threads[n], NULL, repeat, (void *)calls[n]), "a thread");
	for (n = 0; n < CHILDREN; n++) {
		pid_t child = fork();

		if (!child) {
			alarm(PATIENCE);
			use_socket();
			list_interfaces();
			_exit(0);
		}
		expect(child > 0 && waitpid(child, &status, 0) == child, "a child");
		expect(!status, "the child does not hang");
	}
	is_over = 1;
	for (n = 0; n < 4; n++)
		pthread_join(threads[n], NULL);
	puts("done");
	return 0;
}
