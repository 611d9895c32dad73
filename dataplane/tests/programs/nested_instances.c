/* Epoll instances that are watched themselves, by epoll(7), poll(2) and select(2): one is readable
 * exactly while it has events. Run by siwrun --rsockets; with 127.0.0.1 the sockets are those of the
 * kernel. Usage: program ADDRESS. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { PATIENCE = 10000 };

static struct sockaddr_in address = { .sin_family = AF_INET };
static int listener;

static void *connect_one(void *made)
{
    *(int *)made = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(*(int *)made, (void *)&address, sizeof address) == 0);
    return NULL;
}

static void add(int instance, int number, unsigned events)
{
    struct epoll_event event = { .events = events, .data.fd = number };
    CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, number, &event) == 0);
}

static int is_readable(int number, int timeout)
{
    struct pollfd pending = { number, POLLIN, 0 };
    int ready = poll(&pending, 1, timeout);
    CHECK(ready >= 0 && (ready == 0 || pending.revents == POLLIN));
    return ready;
}

static int is_selected(int number)
{
    fd_set set;
    struct timeval now = { 0, 0 };
    FD_ZERO(&set);
    FD_SET(number, &set);
    return select(number + 1, &set, NULL, NULL, &now);
}

static void send_text(int from, const char *text)
{
    CHECK(send(from, text, strlen(text), 0) == (ssize_t)strlen(text));
}

/* Waits for an instance in another one, then reads a part of the data of its socket. */
static int read_in_turns(int outer, int inner, int length, int piece)
{
    struct epoll_event event;
    char text[64];
    int received = 0;
    while (received < length) {
        CHECK(epoll_wait(outer, &event, 1, PATIENCE) == 1);
        CHECK(event.data.fd == inner && event.events == EPOLLIN);
        CHECK(epoll_wait(inner, &event, 1, 0) == 1);
        ssize_t count = recv(event.data.fd, text, piece, 0);
        CHECK(count > 0);
        received += count;
    }
    return received;
}

static void no_events(int instance)
{
    struct epoll_event event;
    CHECK(is_readable(instance, 0) == 0 && is_selected(instance) == 0);
    CHECK(epoll_wait(instance, &event, 1, 0) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count == 2 && inet_pton(AF_INET, arguments[1], &address.sin_addr) == 1);
    socklen_t length = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (void *)&address, &length) == 0);

    /* The instance of a listener is quiet before and after the connection. */
    int of_listener = epoll_create1(0), made;
    pthread_t thread;
    add(of_listener, listener, EPOLLIN);
    no_events(of_listener);
    CHECK(pthread_create(&thread, NULL, connect_one, &made) == 0);
    CHECK(is_readable(of_listener, PATIENCE) == 1);
    int accepted = accept(listener, NULL, NULL);
    CHECK(accepted >= 0 && pthread_join(thread, NULL) == 0);
    no_events(of_listener);

    /* The outer instance is older than the rsockets of the inner one. */
    int inner = epoll_create1(0), outer = epoll_create1(0), outermost = epoll_create1(0);
    add(outer, inner, EPOLLIN);
    add(outermost, outer, EPOLLIN);
    add(inner, accepted, EPOLLIN);
    no_events(inner);
    no_events(outer);
    no_events(outermost);

    send_text(made, "0123456789");
    CHECK(is_readable(inner, PATIENCE) == 1);
    CHECK(is_readable(inner, 0) == 1 && is_selected(inner) == 1);
    CHECK(is_readable(outer, 0) == 1 && is_readable(outermost, 0) == 1);
    CHECK(read_in_turns(outer, inner, 10, 4) == 10);
    no_events(inner);
    no_events(outer);
    no_events(outermost);

    /* poll(2) waits for an instance. */
    send_text(made, "ab");
    CHECK(is_readable(outermost, PATIENCE) == 1);
    CHECK(read_in_turns(outer, inner, 2, 1) == 2);
    no_events(outer);

    /* A pipe beside them. */
    int ends[2];
    struct epoll_event event;
    CHECK(pipe(ends) == 0);
    add(inner, ends[0], EPOLLIN);
    CHECK(write(ends[1], "x", 1) == 1);
    CHECK(epoll_wait(outer, &event, 1, PATIENCE) == 1 && event.data.fd == inner);
    CHECK(epoll_wait(inner, &event, 1, 0) == 1 && event.data.fd == ends[0]);
    char text[8];
    CHECK(read(ends[0], text, sizeof text) == 1);
    no_events(outer);

    /* One report of each event, and none after EPOLL_CTL_DEL. */
    struct epoll_event edge = { .events = EPOLLIN | EPOLLET, .data.fd = inner };
    CHECK(epoll_ctl(outer, EPOLL_CTL_MOD, inner, &edge) == 0);
    send_text(made, "c");
    CHECK(epoll_wait(outer, &event, 1, PATIENCE) == 1 && event.data.fd == inner);
    CHECK(epoll_wait(outer, &event, 1, 0) == 0);
    struct epoll_event once = { .events = EPOLLIN | EPOLLONESHOT, .data.fd = inner };
    CHECK(epoll_ctl(outer, EPOLL_CTL_MOD, inner, &once) == 0);
    CHECK(epoll_wait(outer, &event, 1, PATIENCE) == 1 && event.data.fd == inner);
    CHECK(epoll_wait(outer, &event, 1, 0) == 0);
    CHECK(epoll_ctl(outer, EPOLL_CTL_DEL, inner, NULL) == 0);
    CHECK(epoll_wait(outer, &event, 1, 0) == 0 && is_readable(inner, 0) == 1);
    CHECK(epoll_ctl(outer, EPOLL_CTL_DEL, inner, NULL) == -1 && errno == ENOENT);
    puts("done");
    return 0;
}
