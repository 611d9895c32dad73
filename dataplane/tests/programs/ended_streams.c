/* Ways in which a program leaves a connection, and how its peer reads the end. The program is the
 * server, and starts itself as the client for each way. Run by siwrun --rsockets; with 127.0.0.1 the
 * sockets are those of the kernel. Usage: program ADDRESS. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { LENGTH = 3 << 20, PIECE = 1 << 16, UNREAD = 1000 };

struct way {
    const char *name;
    void (*leave)(int made);
    /* The server shuts its direction down before it reads. */
    int half_closed;
    /* The server sends what the client does not read. */
    int unread;
    /* The server reads a reset, maybe without all data. */
    int is_reset;
};

static char data[PIECE];

static void by_return(int made) { (void)made; exit(0); }
static void by_exit(int made) { (void)made; _exit(0); }
static void by_exec(int made) { (void)made; execl("/bin/true", "true", NULL); _exit(1); }
static void by_signal(int made) { (void)made; raise(SIGKILL); }
static void by_close(int made) { CHECK(close(made) == 0); _exit(0); }
static void by_shutdown(int made) { CHECK(shutdown(made, SHUT_WR) == 0); _exit(0); }

static void by_both_shutdowns(int made)
{
    CHECK(shutdown(made, SHUT_RDWR) == 0);
    CHECK(close(made) == 0);
    _exit(0);
}

static void exec_without_flag(int made)
{
    CHECK(fcntl(made, F_SETFD, 0) == 0);
    by_exec(made);
}

static void ignore(int number) { (void)number; }

/* Signals arrive during close(2). */
static void close_among_signals(int made)
{
    struct itimerval often = { { 0, 50 }, { 0, 50 } };
    struct sigaction action = { .sa_handler = ignore };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    CHECK(close(made) == 0);
    _exit(0);
}

/* As libuv does. The process lives on without any other call of the library. */
static void close_by_number(int made)
{
    CHECK(syscall(SYS_close, made) == 0);
    pause();
}

static void close_nonblocking(int made)
{
    CHECK(fcntl(made, F_SETFL, O_NONBLOCK) == 0 && close(made) == 0);
    pause();
}

static void set_linger(int made, int seconds)
{
    struct linger linger = { .l_onoff = 1, .l_linger = seconds };
    CHECK(setsockopt(made, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
}

static void close_with_linger(int made) { set_linger(made, 5); by_close(made); }
static void reset_by_linger(int made) { set_linger(made, 0); CHECK(close(made) == 0); pause(); }

static void close_unread(int made)
{
    struct pollfd pending = { made, POLLIN, 0 };
    CHECK(poll(&pending, 1, -1) == 1);
    CHECK(close(made) == 0);
    pause();
}

static const struct way ways[] = {
    { "return from main", by_return, 0, 0, 0 },
    { "_exit", by_exit, 0, 0, 0 },
    { "exec", by_exec, 0, 0, 0 },
    { "exec without FD_CLOEXEC", exec_without_flag, 0, 0, 0 },
    { "SIGKILL", by_signal, 0, 0, 0 },
    { "close", by_close, 0, 0, 0 },
    { "shutdown, then exit", by_shutdown, 0, 0, 0 },
    { "shutdown of both directions", by_both_shutdowns, 0, 0, 0 },
    { "signals during close", close_among_signals, 0, 0, 0 },
    { "the system call close", close_by_number, 0, 0, 0 },
    { "close without O_NONBLOCK's wait", close_nonblocking, 0, 0, 0 },
    { "close with SO_LINGER", close_with_linger, 0, 0, 0 },
    { "exit towards a half-closed peer", by_exit, 1, 0, 0 },
    { "SIGKILL towards a half-closed peer", by_signal, 1, 0, 0 },
    { "SO_LINGER of zero", reset_by_linger, 0, 0, 1 },
    { "close with unread data", close_unread, 0, 1, 1 },
};

static struct sockaddr_in address = { .sin_family = AF_INET };

static int run_client(const char *number, const char *port)
{
    const struct way *way = &ways[atoi(number)];
    address.sin_port = htons(atoi(port));
    int made = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(made, (void *)&address, sizeof address) == 0);
    for (int sent = 0; sent < LENGTH; ) {
        ssize_t count = send(made, data, PIECE, 0);
        CHECK(count > 0);
        sent += count;
    }
    way->leave(made);
    return 1;
}

static void serve(int listener, const struct way *way)
{
    int accepted = accept(listener, NULL, NULL), received = 0;
    CHECK(accepted >= 0);
    if (way->half_closed)
        CHECK(shutdown(accepted, SHUT_WR) == 0);
    if (way->unread)
        CHECK(send(accepted, data, UNREAD, 0) == UNREAD);
    ssize_t count;
    while ((count = recv(accepted, data, PIECE, 0)) > 0)
        received += count;
    fprintf(stderr, "%s: %d bytes, end %zd, errno %d\n", way->name, received, count, errno);
    if (way->is_reset)
        CHECK(count == -1 && errno == ECONNRESET);
    else
        CHECK(count == 0 && received == LENGTH);
    CHECK(recv(accepted, data, PIECE, 0) == 0);
    CHECK(close(accepted) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count >= 2 && inet_pton(AF_INET, arguments[1], &address.sin_addr) == 1);
    if (count == 4)
        return run_client(arguments[2], arguments[3]);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t length = sizeof address;
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (void *)&address, &length) == 0);
    char port[16], number[16];
    snprintf(port, sizeof port, "%d", ntohs(address.sin_port));
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        snprintf(number, sizeof number, "%zu", way);
        pid_t client = vfork();
        CHECK(client >= 0);
        if (client == 0) {
            execl("/proc/self/exe", arguments[0], arguments[1], number, port, NULL);
            _exit(1);
        }
        serve(listener, &ways[way]);
        kill(client, SIGKILL);
        CHECK(waitpid(client, NULL, 0) == client);
    }
    puts("done");
    return 0;
}
