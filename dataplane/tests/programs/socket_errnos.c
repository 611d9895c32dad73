/* The errors of socket calls, as a table: each case runs with sockets of the kernel and with rsockets,
 * and both have to fail as the manual pages say. Run by siwrun --rsockets. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { KERNEL, RSOCKETS, KINDS, MOST_BUFFERS = 1024 };

static const char *const kinds[KINDS] = { "kernel", "rsockets" };
static const char *const hosts[KINDS] = { "127.0.0.1", "10.77.0.2" };
static struct sockaddr_in address;
static int listener, made, accepted;
static char text[64];

static void *accept_one(void *unused)
{
    (void)unused;
    accepted = accept(listener, NULL, NULL);
    return NULL;
}

static int new_socket(void)
{
    int number = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(number >= 0);
    return number;
}

/* A socket of the kind under test that is neither connected nor listening: bound. */
static int bound_socket(void)
{
    int number = new_socket();
    struct sockaddr_in any_port = address;
    any_port.sin_port = 0;
    CHECK(bind(number, (void *)&any_port, sizeof any_port) == 0);
    return number;
}

static void open_all(int kind)
{
    pthread_t thread;
    socklen_t length = sizeof address;
    address = (struct sockaddr_in){ .sin_family = AF_INET };
    inet_pton(AF_INET, hosts[kind], &address.sin_addr);
    listener = new_socket();
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    CHECK(getsockname(listener, (void *)&address, &length) == 0);
    CHECK(pthread_create(&thread, NULL, accept_one, NULL) == 0);
    made = new_socket();
    CHECK(connect(made, (void *)&address, sizeof address) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && accepted >= 0);
}

static void close_all(void)
{
    close(made);
    close(accepted);
    close(listener);
}

/* Closes a descriptor; returns the result of the call before it. */
static long then_close(int number, long result)
{
    int before = errno;
    close(number);
    errno = before;
    return result;
}

static void set_nonblocking(int number)
{
    CHECK(fcntl(number, F_SETFL, fcntl(number, F_GETFL) | O_NONBLOCK) == 0);
}

static void wait_for(int number, short events)
{
    struct pollfd pending = { number, events, 0 };
    CHECK(poll(&pending, 1, 10000) == 1);
}

static long accept_without_connection(void)
{
    set_nonblocking(listener);
    return accept(listener, NULL, NULL);
}

static long accept_at_a_connection(void) { return accept(made, NULL, NULL); }

static long accept_at_a_bound_socket(void)
{
    int bound = bound_socket();
    return then_close(bound, accept(bound, NULL, NULL));
}

static long accept_with_unknown_flags(void) { return accept4(listener, NULL, NULL, 1); }

static int connect_without_waiting(void)
{
    int number = new_socket();
    set_nonblocking(number);
    int result = connect(number, (void *)&address, sizeof address);
    CHECK(result == 0 || errno == EINPROGRESS);
    return number;
}

static int accept_pending(void)
{
    wait_for(listener, POLLIN);
    return accept(listener, NULL, NULL);
}

/* The connection is pending still, and is accepted when there are descriptors. */
static long accept_without_descriptors(void)
{
    struct rlimit before, none;
    int waiting = connect_without_waiting();
    wait_for(listener, POLLIN);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    long result = accept(listener, NULL, NULL);
    int failure = errno;
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    int number = accept_pending();
    CHECK(number >= 0 && close(number) == 0 && close(waiting) == 0);
    errno = failure;
    return result;
}

/* The peer has left before its connection was accepted. */
static long read_of_a_peer_that_left(void)
{
    int waiting = connect_without_waiting();
    wait_for(listener, POLLIN);
    CHECK(close(waiting) == 0);
    int number = accept(listener, NULL, NULL);
    CHECK(number >= 0);
    wait_for(number, POLLIN);
    return then_close(number, recv(number, text, sizeof text, 0));
}

static long bind_twice(void)
{
    int bound = bound_socket();
    return then_close(bound, bind(bound, (void *)&address, sizeof address));
}

static long bind_a_connection(void) { return bind(made, (void *)&address, sizeof address); }

static long bind_to_a_used_port(void)
{
    int number = new_socket();
    return then_close(number, bind(number, (void *)&address, sizeof address));
}

static long bind_half_an_address(void)
{
    int number = new_socket();
    return then_close(number, bind(number, (void *)&address, 4));
}

static long listen_at_a_connection(void) { return listen(made, 1); }

static long connect_a_connection(void)
{
    return connect(made, (void *)&address, sizeof address);
}

static long connect_a_listener(void)
{
    return connect(listener, (void *)&address, sizeof address);
}

static long connect_to_no_listener(void)
{
    struct sockaddr_in nobody = address;
    nobody.sin_port = htons(1);
    int number = new_socket();
    return then_close(number, connect(number, (void *)&nobody, sizeof nobody));
}

static long connect_with_half_an_address(void)
{
    int bound = bound_socket();
    return then_close(bound, connect(bound, (void *)&address, 4));
}

static long connect_to_another_family(void)
{
    struct sockaddr_in unknown = address;
    unknown.sin_family = AF_APPLETALK;
    int bound = bound_socket();
    return then_close(bound, connect(bound, (void *)&unknown, sizeof unknown));
}

static long outcome_of_a_refused_connect(void)
{
    struct sockaddr_in nobody = address;
    int error = 0;
    socklen_t length = sizeof error;
    nobody.sin_port = htons(1);
    int number = new_socket();
    set_nonblocking(number);
    if (connect(number, (void *)&nobody, sizeof nobody) == 0 || errno != EINPROGRESS)
        return then_close(number, -1);
    wait_for(number, POLLOUT);
    CHECK(getsockopt(number, SOL_SOCKET, SO_ERROR, &error, &length) == 0);
    close(number);
    errno = error;
    return error ? -1 : 0;
}

static long send_without_connection(void)
{
    int bound = bound_socket();
    return then_close(bound, send(bound, text, 1, MSG_NOSIGNAL));
}

static long receive_without_connection(void)
{
    int bound = bound_socket();
    return then_close(bound, recv(bound, text, 1, 0));
}

static long receive_at_a_listener(void) { return recv(listener, text, 1, 0); }
static long send_at_a_listener(void) { return send(listener, text, 1, MSG_NOSIGNAL); }
static long receive_nothing(void) { return recv(made, text, 1, MSG_DONTWAIT); }
static long receive_urgent_data(void) { return recv(made, text, 1, MSG_OOB | MSG_DONTWAIT); }

static long receive_with_timeout(void)
{
    struct timeval soon = { 0, 20000 };
    CHECK(setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0);
    return recv(made, text, 1, 0);
}

static long send_beyond_all_room(void)
{
    static char data[1 << 16];
    long result;
    while ((result = send(made, data, sizeof data, MSG_DONTWAIT)) > 0)
        ;
    return result;
}

static long send_after_shutdown(void)
{
    CHECK(shutdown(made, SHUT_WR) == 0);
    return send(made, text, 1, MSG_NOSIGNAL);
}

static long receive_after_the_peers_close(void)
{
    CHECK(close(accepted) == 0);
    return recv(made, text, 1, 0);
}

static long receive_after_a_reset(void)
{
    struct linger linger = { 1, 0 };
    CHECK(setsockopt(accepted, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    CHECK(close(accepted) == 0);
    return recv(made, text, 1, 0);
}

static long receive_after_a_reported_reset(void)
{
    CHECK(receive_after_a_reset() == -1 && errno == ECONNRESET);
    return recv(made, text, 1, 0);
}

static long send_after_a_reported_reset(void)
{
    CHECK(receive_after_a_reset() == -1 && errno == ECONNRESET);
    return send(made, text, 1, MSG_NOSIGNAL);
}

static long too_many_buffers(void)
{
    static struct iovec list[MOST_BUFFERS + 1];
    return writev(made, list, MOST_BUFFERS + 1);
}

static long shut_down_without_connection(void)
{
    int bound = bound_socket();
    return then_close(bound, shutdown(bound, SHUT_RDWR));
}

static long shut_down_unknown_direction(void) { return shutdown(made, 3); }

static long peer_without_connection(void)
{
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    int bound = bound_socket();
    return then_close(bound, getpeername(bound, (void *)&peer, &length));
}

static long peer_of_a_listener(void)
{
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    return getpeername(listener, (void *)&peer, &length);
}

static long get_unknown_option(void)
{
    int value;
    socklen_t length = sizeof value;
    return getsockopt(made, SOL_SOCKET, 9999, &value, &length);
}

static long set_unknown_option(void)
{
    int value = 1;
    return setsockopt(made, SOL_SOCKET, 9999, &value, sizeof value);
}

static long set_half_an_option(void)
{
    int value = 1;
    return setsockopt(made, SOL_SOCKET, SO_KEEPALIVE, &value, 2);
}

static long set_half_a_linger(void)
{
    int value = 1;
    return setsockopt(made, SOL_SOCKET, SO_LINGER, &value, sizeof value);
}

static long seek_in_a_connection(void) { return lseek(made, 0, SEEK_SET); }
static long unknown_ioctl(void) { int value; return ioctl(made, 0x5499, &value); }

static long available_at_a_listener(void)
{
    int count;
    return ioctl(listener, FIONREAD, &count);
}

static long add_twice(void)
{
    struct epoll_event event = { .events = EPOLLIN };
    int instance = epoll_create1(0);
    CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, made, &event) == 0);
    return then_close(instance, epoll_ctl(instance, EPOLL_CTL_ADD, made, &event));
}

static long modify_what_was_not_added(void)
{
    struct epoll_event event = { .events = EPOLLIN };
    int instance = epoll_create1(0);
    return then_close(instance, epoll_ctl(instance, EPOLL_CTL_MOD, made, &event));
}

static long remove_what_was_not_added(void)
{
    int instance = epoll_create1(0);
    return then_close(instance, epoll_ctl(instance, EPOLL_CTL_DEL, made, NULL));
}

static long unknown_epoll_operation(void)
{
    struct epoll_event event = { .events = EPOLLIN };
    int instance = epoll_create1(0);
    return then_close(instance, epoll_ctl(instance, 9, made, &event));
}

static long add_to_a_connection(void)
{
    struct epoll_event event = { .events = EPOLLIN };
    return epoll_ctl(made, EPOLL_CTL_ADD, listener, &event);
}

static long close_twice(void)
{
    int number = bound_socket();
    CHECK(close(number) == 0);
    return close(number);
}

static long duplicate_what_was_closed(void)
{
    int number = bound_socket();
    CHECK(close(number) == 0);
    return dup(number);
}

static long send_at_a_closed_number(void)
{
    int number = bound_socket();
    CHECK(close(number) == 0);
    return send(number, text, 1, MSG_NOSIGNAL);
}

struct failure {
    const char *name;
    long (*call)(void);
    /* 0: the call succeeds with 0. */
    int error;
};

static const struct failure failures[] = {
    { "accept: no connection waits", accept_without_connection, EAGAIN },
    { "accept: not a listener", accept_at_a_connection, EINVAL },
    { "accept: bound only", accept_at_a_bound_socket, EINVAL },
    { "accept4: unknown flags", accept_with_unknown_flags, EINVAL },
    { "accept: no descriptor is left", accept_without_descriptors, EMFILE },
    { "accept: the peer has left", read_of_a_peer_that_left, 0 },
    { "bind: bound already", bind_twice, EINVAL },
    { "bind: connected", bind_a_connection, EINVAL },
    { "bind: the port is in use", bind_to_a_used_port, EADDRINUSE },
    { "bind: short address", bind_half_an_address, EINVAL },
    { "listen: connected", listen_at_a_connection, EINVAL },
    { "connect: connected", connect_a_connection, EISCONN },
    { "connect: a listener", connect_a_listener, EISCONN },
    { "connect: refused", connect_to_no_listener, ECONNREFUSED },
    { "connect: short address", connect_with_half_an_address, EINVAL },
    { "connect: another family", connect_to_another_family, EAFNOSUPPORT },
    { "SO_ERROR: refused", outcome_of_a_refused_connect, ECONNREFUSED },
    { "send: not connected", send_without_connection, EPIPE },
    { "send: a listener", send_at_a_listener, EPIPE },
    { "send: after shutdown", send_after_shutdown, EPIPE },
    { "send: no room", send_beyond_all_room, EAGAIN },
    { "send: after a reset", send_after_a_reported_reset, EPIPE },
    { "writev: too many buffers", too_many_buffers, EINVAL },
    { "recv: not connected", receive_without_connection, ENOTCONN },
    { "recv: a listener", receive_at_a_listener, ENOTCONN },
    { "recv: no data", receive_nothing, EAGAIN },
    { "recv: no urgent data", receive_urgent_data, EINVAL },
    { "recv: timeout", receive_with_timeout, EAGAIN },
    { "recv: the peer has closed", receive_after_the_peers_close, 0 },
    { "recv: reset", receive_after_a_reset, ECONNRESET },
    { "recv: the reset was reported", receive_after_a_reported_reset, 0 },
    { "shutdown: not connected", shut_down_without_connection, ENOTCONN },
    { "shutdown: unknown direction", shut_down_unknown_direction, EINVAL },
    { "getpeername: not connected", peer_without_connection, ENOTCONN },
    { "getpeername: a listener", peer_of_a_listener, ENOTCONN },
    { "getsockopt: unknown option", get_unknown_option, ENOPROTOOPT },
    { "setsockopt: unknown option", set_unknown_option, ENOPROTOOPT },
    { "setsockopt: short number", set_half_an_option, EINVAL },
    { "setsockopt: short linger", set_half_a_linger, EINVAL },
    { "lseek", seek_in_a_connection, ESPIPE },
    { "ioctl: unknown request", unknown_ioctl, ENOTTY },
    { "ioctl: FIONREAD of a listener", available_at_a_listener, EINVAL },
    { "epoll_ctl: added twice", add_twice, EEXIST },
    { "epoll_ctl: modified without addition", modify_what_was_not_added, ENOENT },
    { "epoll_ctl: removed without addition", remove_what_was_not_added, ENOENT },
    { "epoll_ctl: unknown operation", unknown_epoll_operation, EINVAL },
    { "epoll_ctl: not an instance", add_to_a_connection, EINVAL },
    { "close: closed already", close_twice, EBADF },
    { "dup: closed", duplicate_what_was_closed, EBADF },
    { "send: closed", send_at_a_closed_number, EBADF },
};

int main(void)
{
    int differences = 0;
    signal(SIGPIPE, SIG_IGN);
    for (size_t at = 0; at < sizeof failures / sizeof *failures; at++) {
        for (int kind = 0; kind < KINDS; kind++) {
            const struct failure *expected = &failures[at];
            open_all(kind);
            errno = 0;
            long result = expected->call();
            int error = result < 0 ? errno : 0;
            close_all();
            if (result > 0 || error != expected->error) {
                differences++;
                printf("%s (%s): result %ld, %s instead of %s\n", expected->name, kinds[kind],
                       result, strerror(error), strerror(expected->error));
            }
        }
    }
    if (differences)
        return 1;
    puts("done");
    return 0;
}
