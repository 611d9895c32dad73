/* Descriptors that are duplicated before their socket is bound or connected: they are descriptors of
 * the same socket afterwards. Run by siwrun --rsockets; with 127.0.0.1 the sockets are those of the
 * kernel. Usage: program ADDRESS. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { WAYS = 5, HIGH = 200 };

static struct sockaddr_in address = { .sin_family = AF_INET };
static int listener;

static int duplicate(int way, int number)
{
    switch (way) {
    case 0: return dup(number);
    case 1: return dup2(number, HIGH);
    case 2: return dup3(number, HIGH, O_CLOEXEC);
    case 3: return fcntl(number, F_DUPFD, HIGH);
    default: return fcntl(number, F_DUPFD_CLOEXEC, HIGH);
    }
}

static void *accept_one(void *accepted)
{
    *(int *)accepted = accept(listener, NULL, NULL);
    return NULL;
}

/* Connects by one number. */
static void connect_by(int number, int *accepted)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, accept_one, accepted) == 0);
    CHECK(connect(number, (void *)&address, sizeof address) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && *accepted >= 0);
}

static void expect_text(int number, const char *expected)
{
    char text[64];
    ssize_t count = recv(number, text, sizeof text, 0);
    CHECK(count == (ssize_t)strlen(expected) && memcmp(text, expected, count) == 0);
}

static void use_duplicate(int way, int connects_by_duplicate)
{
    int made = socket(AF_INET, SOCK_STREAM, 0), accepted;
    int same = duplicate(way, made), instance = epoll_create1(0);
    char text[8];
    CHECK(same >= 0 && same != made);
    int is_closed_on_exec = (fcntl(same, F_GETFD) & FD_CLOEXEC) != 0;
    struct epoll_event event = { .events = EPOLLIN, .data.fd = same };
    CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, same, &event) == 0);
    connect_by(connects_by_duplicate ? same : made, &accepted);
    CHECK(((fcntl(same, F_GETFD) & FD_CLOEXEC) != 0) == is_closed_on_exec);
    CHECK(send(made, "by the first", 12, 0) == 12);
    expect_text(accepted, "by the first");
    CHECK(send(same, "by the second", 13, 0) == 13);
    expect_text(accepted, "by the second");
    CHECK(send(accepted, "answer", 6, 0) == 6);
    CHECK(epoll_wait(instance, &event, 1, 10000) == 1 && event.data.fd == same);
    expect_text(same, "answer");
    /* The connection lives as long as one of them. */
    CHECK(close(made) == 0);
    struct pollfd pending = { accepted, POLLIN, 0 };
    CHECK(poll(&pending, 1, 20) == 0);
    CHECK(send(same, "still", 5, 0) == 5);
    expect_text(accepted, "still");
    CHECK(close(same) == 0 && recv(accepted, text, sizeof text, 0) == 0);
    CHECK(close(accepted) == 0 && close(instance) == 0);
}

/* As inetd does: the socket moves to another number before it is connected. */
static void move_before_connect(void)
{
    int made = socket(AF_INET, SOCK_STREAM, 0), accepted;
    char text[8];
    CHECK(dup2(made, HIGH) == HIGH && close(made) == 0);
    connect_by(HIGH, &accepted);
    CHECK(send(HIGH, "moved", 5, 0) == 5);
    expect_text(accepted, "moved");
    CHECK(close(HIGH) == 0 && recv(accepted, text, sizeof text, 0) == 0);
    CHECK(close(accepted) == 0);
}

/* The duplicate's number belongs to another file when the socket is connected. */
static void replace_duplicate(void)
{
    int made = socket(AF_INET, SOCK_STREAM, 0), accepted, ends[2];
    char text[8];
    CHECK(pipe(ends) == 0 && dup2(made, HIGH) == HIGH);
    CHECK(dup2(ends[1], HIGH) == HIGH);
    connect_by(made, &accepted);
    CHECK(write(HIGH, "pipe", 4) == 4 && read(ends[0], text, sizeof text) == 4);
    CHECK(close(HIGH) == 0 && close(made) == 0 && close(accepted) == 0);
    CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count == 2 && inet_pton(AF_INET, arguments[1], &address.sin_addr) == 1);
    socklen_t length = sizeof address;
    int made = socket(AF_INET, SOCK_STREAM, 0);
    /* The listener, too, is used by a duplicate. */
    listener = dup(made);
    CHECK(bind(made, (void *)&address, sizeof address) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (void *)&address, &length) == 0 && close(made) == 0);
    for (int way = 0; way < WAYS; way++) {
        use_duplicate(way, 0);
        use_duplicate(way, 1);
    }
    move_before_connect();
    replace_duplicate();
    puts("done");
    return 0;
}
