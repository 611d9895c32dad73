/* Random programs of two processes with TCP connections, threads, signals, cancellations, forks and exits.
 * The same program runs over the sockets of the kernel and over those of siwd, and has to say the same.
 *
 * usage: random_programs ADDRESS FIRST COUNT
 *        prints "SEED: LOG" for each program
 *
 * No program does what the two are known to do differently (client-lib/verbs/README.md,
 * "Signals, threads, fork and exit"):
 *  - use a connection in a child of fork(2), or after execve(2);
 *  - close, or exit, with received data unread;
 *  - send to a peer that has closed, or shut down twice: the kernel's loopback has told of the peer's end
 *    when close(2) returns, which a network has not. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONNECTIONS 3
#define MOST_PENDING 30000

static uint64_t random_state;
static unsigned pick(unsigned count)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 20) % count;
}

static char log_text[1 << 15];
static size_t log_length;
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (log_length < sizeof log_text - 200)
        log_length += vsnprintf(log_text + log_length, 200, format, arguments);
    va_end(arguments);
}

/* A connection as both processes know it: what is open, and the bytes that are on their way to each. */
struct connection {
    int is_open[2], writes[2];
    unsigned pending[2], sent[2], received[2];
};

static struct connection connections[CONNECTIONS];
static int sockets[CONNECTIONS];
static int listener;
static int me;
static int to_other, from_other;

static void tell(void)
{
    if (write(to_other, "t", 1) != 1)
        _exit(9);
}

static void await_other(void)
{
    char byte;
    if (read(from_other, &byte, 1) != 1)
        _exit(8);
}

/* The other process goes on when this one has done its step. */
static void pass_turn(int actor)
{
    if (actor == me)
        tell();
    else
        await_other();
}

static const char *name_of(int error) { return error ? strerrorname_np(error) : "0"; }

static _Atomic int restarted, ended;
static void on_restarting(int number) { (void)number; restarted++; }
static void on_ending(int number) { (void)number; ended++; }

struct waiter {
    pthread_t thread;
    int number, kind;
    _Atomic pid_t id;
    _Atomic int returned;
    int result, error;
};

enum { WAIT_RECV, WAIT_READ, WAIT_POLL, WAIT_ACCEPT, WAIT_KINDS };

static void *run_waiter(void *argument)
{
    struct waiter *waiter = argument;
    char byte;
    struct pollfd fd = {.fd = sockets[waiter->number], .events = POLLIN};
    waiter->id = syscall(SYS_gettid);
    errno = 0;
    switch (waiter->kind) {
    case WAIT_RECV:
        waiter->result = recv(sockets[waiter->number], &byte, 1, 0);
        break;
    case WAIT_READ:
        waiter->result = read(sockets[waiter->number], &byte, 1);
        break;
    case WAIT_POLL:
        waiter->result = poll(&fd, 1, -1);
        break;
    default:
        waiter->result = accept(listener, NULL, NULL);
    }
    waiter->error = waiter->result < 0 ? errno : 0;
    waiter->returned = 1;
    return NULL;
}

static void await_sleep(struct waiter *waiter)
{
    char path[64], text[512];
    for (int seen = 0; seen < 4 && !waiter->returned;) {
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", waiter->id);
        FILE *file = waiter->id ? fopen(path, "r") : NULL;
        size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
        if (file)
            fclose(file);
        text[length] = 0;
        char *end = strrchr(text, ')');
        seen = end && end[2] == 'S' ? seen + 1 : 0;
        usleep(100);
    }
}

static void send_signal(struct waiter *waiter, int number, _Atomic int *handlers)
{
    int before = *handlers;
    pthread_kill(waiter->thread, number);
    while (*handlers == before)
        sched_yield();
    await_sleep(waiter);
}

static void begin(struct waiter *waiter, int number, int kind)
{
    *waiter = (struct waiter){.number = number, .kind = kind};
    if (pthread_create(&waiter->thread, NULL, run_waiter, waiter))
        _exit(7);
    await_sleep(waiter);
}

static void report(struct waiter *waiter)
{
    void *result;
    pthread_join(waiter->thread, &result);
    if (result == PTHREAD_CANCELED)
        say(" cancelled");
    else
        say(" %d/%s", waiter->result, name_of(waiter->error));
}

static unsigned char byte_at(int side, int number, unsigned at)
{
    return (unsigned char)(at * 7 + number * 31 + side * 101 + at / 251);
}

static void send_bytes(int side, int number, unsigned count)
{
    static unsigned char bytes[MOST_PENDING];
    struct connection *connection = &connections[number];
    for (unsigned at = 0; at < count; at++)
        bytes[at] = byte_at(side, number, connection->sent[side] + at);
    int sent = send(sockets[number], bytes, count, MSG_NOSIGNAL);
    say(" %d/%s", sent, sent < 0 ? name_of(errno) : "0");
}

static void receive_bytes(int side, int number, unsigned count, int flags)
{
    static unsigned char bytes[MOST_PENDING];
    struct connection *connection = &connections[number];
    int got = recv(sockets[number], bytes, count, flags);
    int wrong = 0;
    for (int at = 0; at < got; at++)
        wrong += bytes[at] != byte_at(!side, number, connection->received[side] + at);
    say(" %d/%s", got, got < 0 ? name_of(errno) : "0");
    if (wrong)
        say(" WRONG");
}

static void fork_child(unsigned way)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        if (way == 1)
            for (int number = 0; number < CONNECTIONS; number++)
                close(sockets[number]);
        if (way == 2)
            execl("/bin/true", "true", NULL);
        if (way == 3)
            raise(SIGKILL);
        _exit(3);
    }
    if (waitpid(child, &status, 0) != child)
        say(" wait failed");
    say(" %d", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

/* A thread of `side` waits, is disturbed, and gets a byte, is cancelled, or the end of the connection. */
static void wait_and_disturb(int side, int number)
{
    struct connection *connection = &connections[number];
    struct waiter waiter;
    int kind = pick(WAIT_KINDS - 1), disturbances = pick(4), how = pick(4);
    int forks = pick(4) == 0;
    if (side == me)
        begin(&waiter, number, kind);
    int over = 0;
    for (int at = 0; at < disturbances && !over; at++) {
        int ends = pick(4) == 0 || kind == WAIT_POLL;
        if (side == me) {
            send_signal(&waiter, ends ? SIGUSR2 : SIGUSR1, ends ? &ended : &restarted);
            say(waiter.returned ? " returned" : " waits");
        }
        over = ends;
    }
    if (forks && side == me)
        fork_child(0);
    if (over) {
        if (side == me)
            report(&waiter);
        return;
    }
    /* The other process may only send now. */
    pass_turn(side);
    if (how == 0 || !connection->writes[!side]) {
        if (side == me) {
            pthread_cancel(waiter.thread);
            report(&waiter);
        }
        return;
    }
    if (how == 1) {
        connection->writes[!side] = 0;
        if (side != me)
            say(" shutdown %d", shutdown(sockets[number], SHUT_WR));
    } else {
        if (side != me)
            send_bytes(!side, number, 1);
        connection->sent[!side]++;
        if (kind == WAIT_POLL)
            connection->pending[side]++;
        else
            connection->received[side]++;
    }
    if (side == me)
        report(&waiter);
}

static void wait_for_accept(void)
{
    struct waiter waiter;
    int ends = pick(2);
    if (me != 0)
        return;
    begin(&waiter, 0, WAIT_ACCEPT);
    send_signal(&waiter, SIGUSR1, &restarted);
    say(waiter.returned ? " returned" : " waits");
    if (ends)
        send_signal(&waiter, SIGUSR2, &ended);
    else
        pthread_cancel(waiter.thread);
    report(&waiter);
}

static void step(void)
{
    int number = pick(CONNECTIONS), side = pick(2), action = pick(12);
    unsigned amount = 1 + pick(pick(2) ? 64 : 9000);
    struct connection *connection = &connections[number];
    int is_mine = side == me;
    if (!connection->is_open[side])
        return;
    if (is_mine)
        say("; %d.%d", number, action);
    switch (action) {
    case 0:
    case 1:
    case 2: /* send */
        if (!connection->is_open[!side] || connection->pending[!side] + amount > MOST_PENDING)
            break;
        if (is_mine)
            send_bytes(side, number, amount);
        if (connection->writes[side]) {
            connection->pending[!side] += amount;
            connection->sent[side] += amount;
        }
        break;
    case 3:
    case 4:
    case 5: /* receive */
        if (connection->pending[side] > 0) {
            unsigned count = 1 + pick(connection->pending[side]);
            if (is_mine)
                receive_bytes(side, number, count, MSG_WAITALL);
            connection->pending[side] -= count;
            connection->received[side] += count;
        } else if (connection->writes[!side]) {
            if (is_mine)
                receive_bytes(side, number, 1, MSG_DONTWAIT);
        } else if (is_mine) {
            receive_bytes(side, number, 1, 0);
        }
        break;
    case 6: /* poll */
        if (is_mine) {
            int is_due = connection->pending[side] > 0 || !connection->writes[!side];
            struct pollfd fd = {.fd = sockets[number], .events = POLLIN};
            say(" %d", poll(&fd, 1, is_due ? -1 : 0));
            say("/%d", fd.revents & POLLIN);
        }
        break;
    case 7: /* shutdown */
        if (pick(3) || !connection->writes[side])
            break;
        if (is_mine)
            say(" %d", shutdown(sockets[number], SHUT_WR));
        connection->writes[side] = 0;
        break;
    case 8: /* close */
        if (pick(2) || connection->pending[side] > 0)
            break;
        if (is_mine)
            say(" %d", close(sockets[number]));
        connection->is_open[side] = connection->writes[side] = 0;
        break;
    case 9: { /* fork */
        unsigned way = pick(4);
        if (is_mine)
            fork_child(way);
        break;
    }
    case 10:
        if (pick(2))
            wait_for_accept();
        break;
    default:
        if (connection->pending[side] == 0 && connection->writes[!side])
            wait_and_disturb(side, number);
    }
    pass_turn(side);
}

static int make_listener(const char *address, struct sockaddr_in *bound)
{
    socklen_t length = sizeof *bound;
    int made = socket(AF_INET, SOCK_STREAM, 0);
    *bound = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
    if (bind(made, (struct sockaddr *)bound, length) || listen(made, 8) ||
        getsockname(made, (struct sockaddr *)bound, &length))
        _exit(6);
    return made;
}

static void install(void)
{
    struct sigaction restart = {.sa_handler = on_restarting, .sa_flags = SA_RESTART};
    struct sigaction end = {.sa_handler = on_ending};
    sigaction(SIGUSR1, &restart, NULL);
    sigaction(SIGUSR2, &end, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* The second process ends, and the first one reads what is left, and the end. */
static void end_second(int log_pipe)
{
    unsigned way = pick(4);
    for (int number = 0; number < CONNECTIONS; number++) {
        struct connection *connection = &connections[number];
        if (connection->is_open[1] && connection->pending[1] > 0)
            receive_bytes(1, number, connection->pending[1], MSG_WAITALL);
    }
    if (write(log_pipe, log_text, log_length) != (ssize_t)log_length)
        _exit(5);
    close(log_pipe);
    switch (way) {
    case 0:
        exit(0);
    case 1:
        _exit(0);
    case 2:
        execl("/bin/true", "true", NULL);
        _exit(4);
    default:
        raise(SIGKILL);
    }
}

static void read_rest(void)
{
    pick(4);
    for (int number = 0; number < CONNECTIONS; number++) {
        struct connection *connection = &connections[number];
        if (!connection->is_open[0])
            continue;
        say("; %d.rest", number);
        unsigned left = connection->pending[0];
        if (left > 0)
            receive_bytes(0, number, left, MSG_WAITALL);
        connection->received[0] += left;
        receive_bytes(0, number, 1, 0);
    }
}

static void run_program(const char *address, unsigned seed)
{
    int down[2], up[2], logs[2];
    struct sockaddr_in bound;
    random_state = seed * 0x9E3779B97F4A7C15ull + 1;
    for (int count = 0; count < 8; count++)
        pick(2);
    alarm(60);
    install();
    if (pipe(down) || pipe(up) || pipe(logs))
        _exit(2);
    me = fork() == 0;
    close(logs[!me]);
    close(down[me]);
    close(up[!me]);
    if (me) {
        alarm(60);
        to_other = up[1], from_other = down[0];
        if (read(from_other, &bound, sizeof bound) != sizeof bound)
            _exit(2);
    } else {
        to_other = down[1], from_other = up[0];
        listener = make_listener(address, &bound);
        if (write(to_other, &bound, sizeof bound) != sizeof bound)
            _exit(2);
    }
    for (int number = 0; number < CONNECTIONS; number++) {
        struct connection *connection = &connections[number];
        if (me) {
            sockets[number] = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(sockets[number], (struct sockaddr *)&bound, sizeof bound))
                say("connect %s", name_of(errno));
        } else {
            sockets[number] = accept(listener, NULL, NULL);
            if (sockets[number] < 0)
                say("accept %s", name_of(errno));
        }
        for (int side = 0; side < 2; side++)
            connection->is_open[side] = connection->writes[side] = 1;
        pass_turn(0);
        pass_turn(1);
    }
    unsigned steps = 5 + pick(30);
    for (unsigned at = 0; at < steps; at++)
        step();
    if (me)
        end_second(logs[1]);
    read_rest();
    char other[sizeof log_text];
    size_t length = 0;
    for (ssize_t got; (got = read(logs[0], other + length, sizeof other - length)) > 0;)
        length += got;
    int status;
    wait(&status);
    printf("%u: %.*s | %.*s | %d\n", seed, (int)log_length, log_text, (int)length, other,
           WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    fflush(stdout);
    _exit(0);
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 1;
    unsigned first = strtoul(arguments[2], NULL, 10), most = strtoul(arguments[3], NULL, 10);
    for (unsigned seed = first; seed < first + most; seed++) {
        int status;
        pid_t program = fork();
        if (!program)
            run_program(arguments[1], seed);
        if (waitpid(program, &status, 0) != program || status) {
            printf("%u: ended with status %#x\n", seed, status);
            fflush(stdout);
        }
    }
    printf("done\n");
    return 0;
}
