/* Runs random programs of socket calls over the kernel's TCP and over rsockets, and compares returns,
 * errnos and bytes. Run by siwrun --rsockets. Usage: program SEED COUNT.
 *
 * Not compared, because they differ by design: calls that send after the peer has closed (the kernel
 * learns of it by a reset), SHUT_RD, buffer sizes, and the moment at which data arrives. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { KERNEL, RSOCKETS, KINDS, MOST = 700 };

static const char *const hosts[KINDS] = { "127.0.0.1", "10.77.0.2" };
static int listeners[KINDS];
static struct sockaddr_in addresses[KINDS];
static uint64_t state;

static unsigned draw(unsigned below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % below;
}

/* Both ends of a connection of each kind, and what is known of them. */
struct pair {
    int ends[KINDS][2];
    int unread[2];
    int has_sent_end[2], is_closed[2];
};

static void *accept_one(void *kind)
{
    return (void *)(intptr_t)accept(listeners[(intptr_t)kind], NULL, NULL);
}

static void connect_pair(struct pair *pair)
{
    memset(pair, 0, sizeof *pair);
    for (intptr_t kind = 0; kind < KINDS; kind++) {
        pthread_t thread;
        void *accepted;
        CHECK(pthread_create(&thread, NULL, accept_one, (void *)kind) == 0);
        int made = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(made, (void *)&addresses[kind], sizeof addresses[kind]) == 0);
        CHECK(pthread_join(thread, &accepted) == 0 && (intptr_t)accepted >= 0);
        pair->ends[kind][0] = made;
        pair->ends[kind][1] = (int)(intptr_t)accepted;
    }
}

/* Waits until all bytes, and the end of the stream, have arrived. */
static void await_arrival(struct pair *pair, int end)
{
    int is_ended = pair->has_sent_end[!end] || pair->is_closed[!end];
    for (int kind = 0; kind < KINDS; kind++) {
        int fd = pair->ends[kind][end], there = -1;
        struct pollfd ended = { .fd = fd, .events = POLLRDHUP };
        /* No event says that this many bytes are there. The pause leaves the processor to those who
         * bring them. */
        for (;; usleep(200)) {
            CHECK(ioctl(fd, FIONREAD, &there) == 0 && there <= pair->unread[end]);
            if (there == pair->unread[end])
                break;
        }
        if (is_ended)
            CHECK(poll(&ended, 1, 20000) == 1);
    }
}

/* The outcome of a call: value, errno, flags, and bytes. */
struct outcome {
    long value;
    int error;
    long extra;
    unsigned char bytes[MOST + 8];
};

static const char *names[] = { "send", "sendmsg", "writev", "recv", "recv MSG_PEEK", "recv MSG_TRUNC",
    "readv", "recvmsg", "recv MSG_WAITALL", "shutdown", "close", "poll", "getsockopt", "getpeername",
    "connect", "accept", "lseek", "fcntl", "writev of -1", "listen", "bind", "recv MSG_OOB", "send of 0",
    "recv of 0", "shutdown of 9" };
enum { CALLS = sizeof names / sizeof *names };

static void run_call(unsigned call, int fd, unsigned size, unsigned choice, int kind, int is_closed,
                     struct outcome *out)
{
    static unsigned char data[MOST];
    struct iovec parts[2] = { { out->bytes, size / 3 }, { out->bytes + size / 3, size - size / 3 } };
    struct iovec sources[2] = { { data, size / 3 }, { data + size / 3, size - size / 3 } };
    struct sockaddr_in name;
    struct msghdr in = { .msg_iov = parts, .msg_iovlen = 2, .msg_name = &name,
                         .msg_namelen = sizeof name };
    struct msghdr message = { .msg_iov = sources, .msg_iovlen = 2 };
    struct pollfd ready = { .fd = fd, .events = POLLIN | POLLOUT | POLLRDHUP };
    static const int options[][2] = { { SOL_SOCKET, SO_ERROR }, { SOL_SOCKET, SO_TYPE },
        { SOL_SOCKET, SO_ACCEPTCONN }, { SOL_SOCKET, SO_DOMAIN }, { SOL_SOCKET, SO_PROTOCOL } };
    socklen_t length = sizeof name;
    int number = -1;
    volatile int minus_one = -1;
    (void)is_closed;
    for (unsigned i = 0; i < size; i++)
        data[i] = (unsigned char)(i * 7 + choice);
    memset(out, 0, sizeof *out);
    errno = 0;
    switch (call) {
    case 0: out->value = send(fd, data, size, MSG_NOSIGNAL); break;
    case 1: out->value = sendmsg(fd, &message, MSG_NOSIGNAL); break;
    case 2: out->value = size ? writev(fd, sources, 2) : 0; break;
    case 3: out->value = recv(fd, out->bytes, size, MSG_DONTWAIT); break;
    case 4: out->value = recv(fd, out->bytes, size, MSG_DONTWAIT | MSG_PEEK); break;
    case 5: out->value = recv(fd, NULL, size, MSG_DONTWAIT | MSG_TRUNC); break;
    case 6: out->value = recvmsg(fd, &in, MSG_DONTWAIT); out->extra = in.msg_namelen; break;
    case 7: in.msg_name = NULL; out->value = recvmsg(fd, &in, MSG_DONTWAIT | MSG_PEEK); break;
    case 8: out->value = recv(fd, out->bytes, size, MSG_DONTWAIT | MSG_WAITALL); break;
    case 9: out->value = shutdown(fd, SHUT_WR); break;
    case 10: out->value = close(fd); break;
    case 11: out->value = poll(&ready, 1, 0); out->extra = ready.revents; break;
    case 12: length = sizeof number;
             out->value = getsockopt(fd, options[choice % 5][0], options[choice % 5][1], &number,
                                     &length);
             out->extra = number; break;
    case 13: out->value = getpeername(fd, (void *)&name, &length); out->extra = length; break;
    case 14: out->value = connect(fd, (void *)&addresses[kind], sizeof name); break;
    case 15: out->value = accept(fd, NULL, NULL); break;
    case 16: out->value = lseek(fd, 0, SEEK_CUR); break;
    case 17: out->value = fcntl(fd, F_GETFL) & (O_ACCMODE | O_NONBLOCK); break;
    case 18: out->value = writev(fd, sources, minus_one); break;
    case 19: out->value = listen(fd, 1); break;
    case 20: out->value = bind(fd, (void *)&addresses[kind], sizeof name); break;
    case 21: out->value = recv(fd, out->bytes, 1, MSG_OOB | MSG_DONTWAIT); break;
    case 22: out->value = send(fd, data, 0, MSG_NOSIGNAL); break;
    case 23: out->value = recv(fd, out->bytes, 0, MSG_DONTWAIT); break;
    default: out->value = shutdown(fd, 9); break;
    }
    out->error = out->value < 0 ? errno : 0;
}

/* Whether the call is one whose outcome is compared. */
static int may_call(const struct pair *pair, unsigned call, int end)
{
    int sends = call <= 2 || call == 22;
    if (pair->is_closed[end])
        return 0;
    if (sends && (pair->is_closed[!end] || pair->unread[!end] > 4096))
        return 0;
    /* After the peer has closed, what the state is depends on when the reset arrives. */
    if (pair->is_closed[!end] && call != 3 && call != 4 && call != 10 && call != 16 && call != 17)
        return 0;
    if (call == 9 && pair->has_sent_end[end])
        return 0;
    /* With both ends shut down, one kind of socket still waits for the last acknowledgement. */
    if (pair->has_sent_end[0] && pair->has_sent_end[1])
        return call <= 5 || call == 10 || call == 16 || call == 17;
    return 1;
}

static int run_program(void)
{
    struct pair pair;
    int differences = 0;
    connect_pair(&pair);
    for (unsigned step = 0; step < 40; step++) {
        unsigned call = draw(CALLS), size = 1 + draw(MOST), choice = draw(256);
        int end = (int)draw(2);
        if (!may_call(&pair, call, end) || (call == 10 && draw(4)))
            continue;
        struct outcome outcomes[KINDS];
        await_arrival(&pair, end);
        for (int kind = 0; kind < KINDS; kind++)
            run_call(call, pair.ends[kind][end], size, choice, kind, 0, &outcomes[kind]);
        if (memcmp(&outcomes[0], &outcomes[1], sizeof outcomes[0]) != 0) {
            fprintf(stderr, "step %u, end %d, %s of %u (%u): kernel %ld errno %d extra %ld, "
                    "rsockets %ld errno %d extra %ld\n", step, end, names[call], size, choice,
                    outcomes[0].value, outcomes[0].error, outcomes[0].extra, outcomes[1].value,
                    outcomes[1].error, outcomes[1].extra);
            differences++;
            break;
        }
        long value = outcomes[0].value;
        if (call <= 2 && value > 0)
            pair.unread[!end] += (int)value;
        if ((call == 3 || call == 5 || call == 6 || call == 8) && value > 0)
            pair.unread[end] -= (int)value;
        pair.has_sent_end[end] |= call == 9;
        if (call == 10) {
            /* Unread data makes the kernel reset the connection. */
            pair.is_closed[end] = 1;
            if (pair.unread[end] > 0)
                break;
        }
    }
    for (int kind = 0; kind < KINDS; kind++)
        for (int end = 0; end < 2; end++)
            if (!pair.is_closed[end])
                close(pair.ends[kind][end]);
    return differences;
}

int main(int count, char **arguments)
{
    CHECK(count == 3 && signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    uint64_t seed = strtoull(arguments[1], NULL, 10);
    unsigned long programs = strtoul(arguments[2], NULL, 10), differing = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        socklen_t length = sizeof addresses[kind];
        addresses[kind].sin_family = AF_INET;
        inet_pton(AF_INET, hosts[kind], &addresses[kind].sin_addr);
        listeners[kind] = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(bind(listeners[kind], (void *)&addresses[kind], length) == 0);
        CHECK(listen(listeners[kind], 16) == 0);
        CHECK(getsockname(listeners[kind], (void *)&addresses[kind], &length) == 0);
    }
    for (unsigned long i = 0; i < programs; i++) {
        state = (seed + i) * 0x9e3779b97f4a7c15ull + 1;
        if (run_program()) {
            fprintf(stderr, "above: seed %llu\n", (unsigned long long)(seed + i));
            differing++;
        }
    }
    printf("%lu programs, %lu differ\n", programs, differing);
    if (differing == 0)
        puts("done");
    return differing != 0;
}
