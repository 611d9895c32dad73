/* Signals and cancellation of threads that wait: what the manual pages signal(7) and pthreads(7) say.
 *
 * usage: waiting_calls ADDRESS: sockets of the kernel or of siwd
 *        waiting_calls verbs:   events of libibverbs and librdmacm
 *
 * Each wait is tried with handlers that restart it, with one that does not while others do, with
 * cancellation, and with what it waits for. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            printf("%s: line %d: %s: %s\n", now_tried, __LINE__, #condition,       \
                   strerror(errno));                                               \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static const char *now_tried = "set-up";
static const char *address;

/* The thread that waits. */
struct waiter {
    pthread_t thread;
    int (*call)(void);
    _Atomic pid_t id;
    _Atomic int returned;
    int result, error;
};

static _Atomic int restarting_handlers, ending_handlers, cleaned_up;
static void on_restarting(int number) { (void)number; restarting_handlers++; }
static void on_ending(int number) { (void)number; ending_handlers++; }

static void on_cancelled(void *waiter)
{
    (void)waiter;
    cleaned_up++;
}

static void *run(void *argument)
{
    struct waiter *waiter = argument;
    waiter->id = syscall(SYS_gettid);
    pthread_cleanup_push(on_cancelled, waiter);
    waiter->result = waiter->call();
    waiter->error = errno;
    waiter->returned = 1;
    pthread_cleanup_pop(0);
    return NULL;
}

static char state_of(pid_t id)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", id);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    fclose(file);
    char *end = strrchr(text, ')');
    return end ? end[2] : 0;
}

/* Waits until the thread sleeps, or has returned. A thread may sleep shortly for another reason: it has to
 * be seen asleep several times. */
static void await_sleep(struct waiter *waiter)
{
    for (int seen = 0; seen < 20 && !waiter->returned;) {
        seen = waiter->id && state_of(waiter->id) == 'S' ? seen + 1 : 0;
        usleep(500);
    }
}

static void begin(struct waiter *waiter, int (*call)(void))
{
    memset(waiter, 0, sizeof *waiter);
    waiter->call = call;
    CHECK(!pthread_create(&waiter->thread, NULL, run, waiter));
    await_sleep(waiter);
    CHECK(!waiter->returned);
}

static void send_signal(struct waiter *waiter, int number, _Atomic int *handlers)
{
    int before = *handlers;
    CHECK(!pthread_kill(waiter->thread, number));
    while (*handlers == before)
        sched_yield();
    await_sleep(waiter);
}

static void install(int number, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    CHECK(!sigaction(number, &action, NULL));
}

static void cancel(struct waiter *waiter)
{
    void *result;
    int before = cleaned_up;
    CHECK(!pthread_cancel(waiter->thread));
    CHECK(!pthread_join(waiter->thread, &result));
    CHECK(result == PTHREAD_CANCELED && cleaned_up == before + 1);
}

static void finish(struct waiter *waiter) { CHECK(!pthread_join(waiter->thread, NULL)); }

enum { ALWAYS_ENDS = 1, RETURNS_ONCE = 2 };

/* Tries a call that waits. `wake` brings what it waits for. */
static void try_wait(const char *name, int (*call)(void), void (*wake)(void), int flags)
{
    struct waiter waiter;
    now_tried = name;
    /* All handlers restart. */
    install(SIGUSR1, on_restarting, SA_RESTART);
    install(SIGUSR2, SIG_IGN, 0);
    begin(&waiter, call);
    send_signal(&waiter, SIGUSR1, &restarting_handlers);
    if (flags & ALWAYS_ENDS) {
        CHECK(waiter.returned && waiter.result == -1 && waiter.error == EINTR);
        finish(&waiter);
        begin(&waiter, call);
    }
    CHECK(!waiter.returned);
    /* An ignored signal ends nothing. */
    CHECK(!pthread_kill(waiter.thread, SIGUSR2));
    await_sleep(&waiter);
    CHECK(!waiter.returned);
    cancel(&waiter);
    /* Some restart. */
    install(SIGUSR2, on_ending, 0);
    begin(&waiter, call);
    if (!(flags & ALWAYS_ENDS)) {
        for (int count = 0; count < 3; count++) {
            send_signal(&waiter, SIGUSR1, &restarting_handlers);
            CHECK(!waiter.returned);
        }
    }
    send_signal(&waiter, SIGUSR2, &ending_handlers);
    CHECK(waiter.returned && waiter.result == -1 && waiter.error == EINTR);
    finish(&waiter);
    /* None does. */
    install(SIGUSR1, on_restarting, 0);
    begin(&waiter, call);
    send_signal(&waiter, SIGUSR1, &restarting_handlers);
    CHECK(waiter.returned && waiter.result == -1 && waiter.error == EINTR);
    finish(&waiter);
    /* Of several threads that wait, each is interrupted and cancelled by itself. */
    install(SIGUSR1, on_restarting, SA_RESTART);
    struct waiter others[3];
    for (int at = 0; at < 3; at++)
        begin(&others[at], call);
    for (int at = 2; at >= 0; at--) {
        if (flags & ALWAYS_ENDS)
            break;
        send_signal(&others[at], SIGUSR1, &restarting_handlers);
        CHECK(!others[at].returned);
    }
    send_signal(&others[1], SIGUSR2, &ending_handlers);
    CHECK(others[1].returned && others[1].result == -1 && others[1].error == EINTR);
    finish(&others[1]);
    CHECK(!others[0].returned && !others[2].returned);
    /* The first one goes; the last one gets what it waits for. */
    cancel(&others[0]);
    await_sleep(&others[2]);
    CHECK(!others[2].returned);
    if (!wake) {
        cancel(&others[2]);
        return;
    }
    wake();
    finish(&others[2]);
    CHECK(others[2].result >= 0);
    if (flags & RETURNS_ONCE)
        return;
    begin(&waiter, call);
    wake();
    finish(&waiter);
    CHECK(waiter.result >= 0);
}

/* A cancellation that comes before the call. */
static _Atomic int goes;
static int (*late_call)(void);
static int call_late(void)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    while (!goes)
        sched_yield();
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    return late_call();
}

static void try_pending_cancel(const char *name, int (*call)(void))
{
    struct waiter waiter = {.call = call_late};
    void *result;
    now_tried = name;
    late_call = call;
    goes = 0;
    CHECK(!pthread_create(&waiter.thread, NULL, run, &waiter));
    CHECK(!pthread_cancel(waiter.thread));
    goes = 1;
    CHECK(!pthread_join(waiter.thread, &result));
    CHECK(result == PTHREAD_CANCELED);
}

/* Sockets. */

static int listener, ours, peer, instance;
static struct sockaddr_in bound;

static void open_listener(void)
{
    socklen_t length = sizeof bound;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    bound = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
    CHECK(!bind(listener, (struct sockaddr *)&bound, length));
    CHECK(!listen(listener, 16));
    CHECK(!getsockname(listener, (struct sockaddr *)&bound, &length));
}

static void *connect_ours(void *argument)
{
    (void)argument;
    ours = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(ours, (struct sockaddr *)&bound, sizeof bound));
    return NULL;
}

static void open_pair(void)
{
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, connect_ours, NULL));
    peer = accept(listener, NULL, NULL);
    CHECK(peer >= 0);
    CHECK(!pthread_join(thread, NULL));
}

static void close_pair(void)
{
    close(ours);
    close(peer);
}

static int wait_recv(void)
{
    char byte;
    return recv(ours, &byte, 1, 0);
}

static int wait_read(void)
{
    char byte;
    return read(ours, &byte, 1);
}

static int wait_peek(void)
{
    char byte;
    return recv(ours, &byte, 1, MSG_PEEK) < 0 ? -1 : recv(ours, &byte, 1, 0);
}

static void send_byte(void) { CHECK(send(peer, "x", 1, 0) == 1); }

static int wait_accept(void)
{
    int got = accept(listener, NULL, NULL);
    if (got >= 0)
        close(got);
    return got;
}

static void connect_one(void)
{
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, connect_ours, NULL));
    CHECK(!pthread_join(thread, NULL));
    close(ours);
}

static char block[1 << 20];
static int wait_send(void) { return send(ours, block, sizeof block, 0); }

static void fill(void)
{
    while (send(ours, block, sizeof block, MSG_DONTWAIT) > 0)
        ;
    /* The room that is left is less than a block. */
    while (send(ours, block, 1, MSG_DONTWAIT) > 0)
        ;
}

static _Atomic int drains;
static void *drain(void *argument)
{
    static char room[1 << 16];
    (void)argument;
    while (drains && recv(peer, room, sizeof room, 0) > 0)
        ;
    return NULL;
}

static int wait_poll(void)
{
    struct pollfd fd = {.fd = ours, .events = POLLIN};
    int ready = poll(&fd, 1, -1);
    return ready < 0 ? -1 : wait_recv();
}

static int wait_ppoll(void)
{
    struct pollfd fd = {.fd = ours, .events = POLLIN};
    int ready = ppoll(&fd, 1, NULL, NULL);
    return ready < 0 ? -1 : wait_recv();
}

static int wait_select(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ours, &set);
    int ready = select(ours + 1, &set, NULL, NULL, NULL);
    return ready < 0 ? -1 : wait_recv();
}

static int wait_epoll(void)
{
    struct epoll_event event;
    int ready = epoll_wait(instance, &event, 1, -1);
    return ready < 0 ? -1 : wait_recv();
}

static void try_time_limit(void)
{
    struct waiter waiter;
    struct timeval limit = {.tv_sec = 60};
    now_tried = "SO_RCVTIMEO";
    CHECK(!setsockopt(ours, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    install(SIGUSR1, on_restarting, SA_RESTART);
    begin(&waiter, wait_recv);
    send_signal(&waiter, SIGUSR1, &restarting_handlers);
    CHECK(waiter.returned && waiter.result == -1 && waiter.error == EINTR);
    finish(&waiter);
    limit = (struct timeval){.tv_usec = 1000};
    CHECK(!setsockopt(ours, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    CHECK(wait_recv() == -1 && errno == EAGAIN);
}

/* Bytes that were moved before a signal are not lost. */
static int wait_all(void)
{
    char two[2];
    return recv(ours, two, 2, MSG_WAITALL);
}

static void try_partial(void)
{
    struct waiter waiter;
    now_tried = "MSG_WAITALL";
    install(SIGUSR2, on_ending, 0);
    send_byte();
    begin(&waiter, wait_all);
    send_signal(&waiter, SIGUSR2, &ending_handlers);
    CHECK(waiter.returned && waiter.result == 1);
    finish(&waiter);
    now_tried = "send of a part";
    pthread_t thread;
    fill();
    begin(&waiter, wait_send);
    send_signal(&waiter, SIGUSR2, &ending_handlers);
    /* The kernel moves bytes between its buffers meanwhile. */
    CHECK(waiter.returned && (waiter.result > 0 || waiter.error == EINTR));
    finish(&waiter);
    begin(&waiter, wait_send);
    void *result;
    int before = cleaned_up;
    CHECK(!pthread_cancel(waiter.thread));
    CHECK(!pthread_join(waiter.thread, &result));
    /* Neither does a call end by cancellation that has moved bytes. */
    CHECK(result == PTHREAD_CANCELED ? cleaned_up == before + 1 : waiter.result > 0);
    drains = 1;
    CHECK(!pthread_create(&thread, NULL, drain, NULL));
    CHECK(wait_send() == sizeof block);
    CHECK(!shutdown(ours, SHUT_WR));
    CHECK(!pthread_join(thread, NULL));
}

static void try_sockets(void)
{
    open_listener();
    try_wait("accept", wait_accept, connect_one, 0);
    try_pending_cancel("accept after a cancellation", wait_accept);
    open_pair();
    try_wait("recv", wait_recv, send_byte, 0);
    try_pending_cancel("recv after a cancellation", wait_recv);
    try_wait("read", wait_read, send_byte, 0);
    try_wait("recv with MSG_PEEK", wait_peek, send_byte, 0);
    try_wait("poll", wait_poll, send_byte, ALWAYS_ENDS);
    try_wait("ppoll", wait_ppoll, send_byte, ALWAYS_ENDS);
    try_wait("select", wait_select, send_byte, ALWAYS_ENDS);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK((instance = epoll_create1(0)) >= 0);
    CHECK(!epoll_ctl(instance, EPOLL_CTL_ADD, ours, &event));
    try_wait("epoll_wait", wait_epoll, send_byte, ALWAYS_ENDS);
    try_pending_cancel("poll after a cancellation", wait_poll);
    close(instance);
    close_pair();
    open_pair();
    try_time_limit();
    close_pair();
    open_pair();
    try_partial();
    close_pair();
}

/* Verbs. */

static struct ibv_comp_channel *channel;
static struct rdma_event_channel *cm_channel;
static struct rdma_cm_id *cm_id, *sync_listener;
static struct ibv_context *context;

static int wait_cq(void)
{
    struct ibv_cq *cq;
    void *argument;
    return ibv_get_cq_event(channel, &cq, &argument);
}

static int wait_cm(void)
{
    struct rdma_cm_event *event;
    int got = rdma_get_cm_event(cm_channel, &event);
    if (!got)
        rdma_ack_cm_event(event);
    return got;
}

static void resolve(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr("10.77.0.2")};
    CHECK(!rdma_create_id(cm_channel, &cm_id, NULL, RDMA_PS_TCP));
    CHECK(!rdma_resolve_addr(cm_id, NULL, (struct sockaddr *)&to, 5000));
}

static int wait_async(void)
{
    struct ibv_async_event event;
    return ibv_get_async_event(context, &event);
}

static int wait_request(void)
{
    struct rdma_cm_id *child;
    return rdma_get_request(sync_listener, &child);
}

static void try_verbs(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    CHECK((context = ibv_open_device(list[0])));
    CHECK((channel = ibv_create_comp_channel(context)));
    struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, channel, 0);
    CHECK(cq && !ibv_req_notify_cq(cq, 0));
    try_wait("ibv_get_cq_event", wait_cq, NULL, 0);
    try_pending_cancel("ibv_get_cq_event after a cancellation", wait_cq);
    try_wait("ibv_get_async_event", wait_async, NULL, 0);
    CHECK((cm_channel = rdma_create_event_channel()));
    try_wait("rdma_get_cm_event", wait_cm, resolve, 0);
    struct ibv_context **devices = rdma_get_devices(NULL);
    CHECK(devices && devices[0]);
    context = devices[0];
    try_wait("ibv_get_async_event of rdma_cm", wait_async, NULL, 0);
    struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP}, *info;
    CHECK(!rdma_getaddrinfo("10.77.0.2", "0", &hints, &info));
    CHECK(!rdma_create_ep(&sync_listener, info, NULL, NULL));
    CHECK(!rdma_listen(sync_listener, 4));
    try_wait("rdma_get_request", wait_request, NULL, 0);
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(count == 2);
    address = arguments[1];
    alarm(120);
    if (!strcmp(address, "verbs"))
        try_verbs();
    else
        try_sockets();
    printf("done\n");
    return 0;
}
