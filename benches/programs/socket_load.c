/*
 * Opens, uses and closes connections of sockets, both ends in this process: SERVER-ADDRESS COUNT.
 *
 * One after another: the client connects and sends 64 bytes, the server receives them and closes, and the
 * client meets the end of data and closes. Prints one line of JSON: such connections per second.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "load.h"

#define MESSAGE 64

static int listener, total;

static void *serve(void *none)
{
	char data[MESSAGE];

	for (int done = 0; done < total; done++) {
		int accepted = accept(listener, NULL, NULL);

		if (accepted < 0)
			die("accept");
		if (recv(accepted, data, sizeof data, MSG_WAITALL) != sizeof data)
			die("recv at the server");
		if (close(accepted))
			die("close");
	}
	return none;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	socklen_t length = sizeof address;
	const int on = 1;
	char data[MESSAGE] = { 0 };
	pthread_t server;
	double begun;

	if (argc != 3 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1 || (total = atoi(argv[2])) < 1) {
		fprintf(stderr, "usage: %s SERVER-ADDRESS COUNT\n", argv[0]);
		return 2;
	}
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on))
		die("socket");
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128))
		die("listen");
	if (getsockname(listener, (struct sockaddr *)&address, &length))
		die("getsockname");
	if ((errno = pthread_create(&server, NULL, serve, NULL)))
		die("pthread_create");
	begun = now();
	for (int done = 0; done < total; done++) {
		int made = socket(AF_INET, SOCK_STREAM, 0);

		if (made < 0 || connect(made, (struct sockaddr *)&address, sizeof address))
			die("connect");
		if (send(made, data, sizeof data, 0) != sizeof data)
			die("send");
		if (recv(made, data, sizeof data, 0))
			die("recv at the client");
		if (close(made))
			die("close");
	}
	pthread_join(server, NULL);
	printf("{\"per_second\":%.0f}\n", total / (now() - begun));
	return 0;
}
