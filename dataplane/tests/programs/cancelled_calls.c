/* Threads that are cancelled in calls: pthread_cancel(3) ends the thread, and nothing else.
 *
 * usage: cancelled_calls ADDRESS   sockets of the kernel or of siwd
 *
 * Calls that block are cancelled while they do; every call is entered with a cancellation that is pending. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
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
static _Atomic pid_t waiting;
static _Atomic int returned, goes, cleaned_up;

static void on_cancelled(void *argument)
{
    (void)argument;
    cleaned_up++;
}

static void *run(void *call)
{
    waiting = syscall(SYS_gettid);
    pthread_cleanup_push(on_cancelled, NULL);
    ((void (*)(void))call)();
    returned = 1;
    pthread_cleanup_pop(0);
    return NULL;
}

static void *run_late(void *call)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    while (!goes)
        sched_yield();
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    return run(call);
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

/* A thread may sleep shortly for another reason: it has to be seen asleep several times. */
static void await_sleep(void)
{
    for (int seen = 0; seen < 20 && !returned;) {
        seen = waiting && state_of(waiting) == 'S' ? seen + 1 : 0;
        usleep(500);
    }
}

static void try_pending(const char *name, void (*call)(void))
{
    pthread_t thread;
    void *result;
    now_tried = name;
    int before = cleaned_up;
    goes = returned = 0;
    CHECK(!pthread_create(&thread, NULL, run_late, (void *)call));
    CHECK(!pthread_cancel(thread));
    goes = 1;
    CHECK(!pthread_join(thread, &result));
    CHECK(returned ? !result : result == PTHREAD_CANCELED && cleaned_up == before + 1);
}

static void try_blocked(const char *name, void (*call)(void))
{
    pthread_t thread;
    void *result;
    now_tried = name;
    int before = cleaned_up;
    waiting = returned = 0;
    CHECK(!pthread_create(&thread, NULL, run, (void *)call));
    await_sleep();
    CHECK(!returned);
    CHECK(!pthread_cancel(thread));
    CHECK(!pthread_join(thread, &result));
    CHECK(result == PTHREAD_CANCELED && cleaned_up == before + 1);
    try_pending(name, call);
}

#define BLOCKED(call) try_blocked(#call, call)
#define PENDING(call) try_pending(#call, call)

static int listener, ours, peer, instance, file;
static struct sockaddr_in bound;
static char block[1 << 20];
static char fifo[64], folder[] = "/tmp/cancelled_calls.XXXXXX";

static struct iovec list = {block, sizeof block}, byte = {block, 1};
static struct msghdr to_send = {.msg_iov = &list, .msg_iovlen = 1};
static struct msghdr to_receive = {.msg_iov = &byte, .msg_iovlen = 1};
static struct mmsghdr several[1];

static void call_accept(void) { accept(listener, NULL, NULL); }
static void call_accept4(void) { accept4(listener, NULL, NULL, SOCK_CLOEXEC); }
static void call_read(void) { CHECK(read(ours, block, 1) < 0); }
static void call_readv(void) { CHECK(readv(ours, &byte, 1) < 0); }
static void call_preadv2(void) { CHECK(preadv2(ours, &byte, 1, -1, 0) < 0); }
static void call_recv(void) { CHECK(recv(ours, block, 1, 0) < 0); }
static void call_recvfrom(void) { CHECK(recvfrom(ours, block, 1, 0, NULL, NULL) < 0); }
static void call_recvmsg(void) { CHECK(recvmsg(ours, &to_receive, 0) < 0); }
static void call_recvmmsg(void)
{
    several[0].msg_hdr = to_receive;
    CHECK(recvmmsg(ours, several, 1, 0, NULL) < 0);
}
static void call_write(void) { CHECK(write(ours, block, sizeof block) < 0); }
static void call_writev(void) { CHECK(writev(ours, &list, 1) < 0); }
static void call_pwritev2(void) { CHECK(pwritev2(ours, &list, 1, -1, 0) < 0); }
static void call_send(void) { CHECK(send(ours, block, sizeof block, 0) < 0); }
static void call_sendto(void) { CHECK(sendto(ours, block, sizeof block, 0, NULL, 0) < 0); }
static void call_sendmsg(void) { CHECK(sendmsg(ours, &to_send, 0) < 0); }
static void call_sendmmsg(void)
{
    several[0].msg_hdr = to_send;
    CHECK(sendmmsg(ours, several, 1, 0) < 0);
}
static void call_sendfile(void)
{
    off_t start = 0;
    sendfile(ours, file, &start, 1);
}

static void call_poll(void)
{
    struct pollfd fd = {.fd = ours, .events = POLLIN};
    poll(&fd, 1, -1);
}
static void call_ppoll(void)
{
    struct pollfd fd = {.fd = ours, .events = POLLIN};
    ppoll(&fd, 1, NULL, NULL);
}
static void call_select(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ours, &set);
    select(ours + 1, &set, NULL, NULL, NULL);
}
static void call_pselect(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ours, &set);
    pselect(ours + 1, &set, NULL, NULL, NULL, NULL);
}
static void call_epoll_wait(void)
{
    struct epoll_event event;
    epoll_wait(instance, &event, 1, -1);
}
static void call_epoll_pwait(void)
{
    struct epoll_event event;
    epoll_pwait(instance, &event, 1, -1, NULL);
}

/* Streams: the C library calls the functions of the socket from its own. */
static void use_stream(const char *mode, void (*use)(FILE *))
{
    int number = dup(ours);
    FILE *stream = number < 0 ? NULL : fdopen(number, mode);
    CHECK(stream);
    use(stream);
}
static void read_line(FILE *stream) { fgets(block, 2, stream); }
static void write_block(FILE *stream)
{
    fwrite(block, 1, sizeof block, stream);
    fflush(stream);
}
static void call_fgets(void) { use_stream("r", read_line); }
static void call_fwrite(void) { use_stream("w", write_block); }

static void call_connect(void)
{
    int made = socket(AF_INET, SOCK_STREAM, 0);
    connect(made, (struct sockaddr *)&bound, sizeof bound);
    close(made);
}
static void call_bind(void)
{
    struct sockaddr_in any = bound;
    int made = socket(AF_INET, SOCK_STREAM, 0);
    any.sin_port = 0;
    bind(made, (struct sockaddr *)&any, sizeof any);
    listen(made, 4);
    close(made);
}
static void call_listen(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET};
    int made = socket(AF_INET, SOCK_STREAM, 0);
    bind(made, (struct sockaddr *)&any, sizeof any);
    listen(made, 4);
    close(made);
}
static void call_udp(void)
{
    int made = socket(AF_INET, SOCK_DGRAM, 0);
    struct msghdr message = to_receive;
    message.msg_name = &bound;
    message.msg_namelen = sizeof bound;
    sendto(made, block, 1, 0, (struct sockaddr *)&bound, sizeof bound);
    sendmsg(made, &message, 0);
    close(made);
}
static void call_dup(void) { close(dup(ours)); }
static void call_fcntl(void) { fcntl(ours, F_GETFL); }
static void call_close_range(void) { close_range(4000, 4001, 0); }
static void call_syscall(void) { syscall(SYS_close, -1); }

/* Files, of the kernel and of siwd. */
static const char *tree;
static char path[512];
static const char *in_tree(const char *name)
{
    snprintf(path, sizeof path, "%s%s", tree, name);
    return path;
}
static void call_open(void) { close(open(in_tree("/node_type"), O_RDONLY)); }
static void call_openat(void) { close(openat(AT_FDCWD, in_tree("/node_type"), O_RDONLY)); }
static void call_fopen(void)
{
    FILE *made = fopen(in_tree("/node_type"), "r");
    if (made)
        fclose(made);
}
static void call_opendir(void)
{
    DIR *made = opendir(in_tree(""));
    if (made)
        closedir(made);
}
static void call_scandir(void)
{
    struct dirent **names;
    scandir(in_tree(""), &names, NULL, NULL);
}
static void call_glob(void)
{
    glob_t found;
    glob(in_tree("/*/*"), 0, NULL, &found);
}
static int visit(const char *name, const struct stat *status, int kind, struct FTW *place)
{
    (void)name, (void)status, (void)kind, (void)place;
    pthread_testcancel();
    return 0;
}
static int visit_plain(const char *name, const struct stat *status, int kind)
{
    return visit(name, status, kind, NULL);
}
static void call_nftw(void) { nftw(in_tree(""), visit, 4, FTW_PHYS); }
static void call_ftw(void) { ftw(in_tree(""), visit_plain, 4); }
static void call_fts(void)
{
    char *paths[2] = {(char *)in_tree(""), NULL};
    FTS *made = fts_open(paths, FTS_PHYSICAL, NULL);
    if (made)
        fts_close(made);
}
static void call_status(void)
{
    struct stat status;
    struct statfs system;
    char text[64];
    stat(in_tree("/node_type"), &status);
    access(in_tree("/node_type"), R_OK);
    readlink(in_tree("/device"), text, sizeof text);
    statfs(in_tree(""), &system);
    free(realpath(in_tree(""), NULL));
}
static void call_interfaces(void)
{
    struct ifaddrs *all;
    struct ifreq request = {.ifr_name = "siw0"};
    char name[IF_NAMESIZE];
    if (!getifaddrs(&all))
        freeifaddrs(all);
    if_indextoname(if_nametoindex("siw0"), name);
    int made = socket(AF_INET, SOCK_DGRAM, 0);
    ioctl(made, SIOCGIFFLAGS, &request);
    close(made);
}
static int exit_in_walk(const char *name, const struct stat *status, int kind, struct FTW *place)
{
    (void)name, (void)status, (void)kind, (void)place;
    pthread_exit(PTHREAD_CANCELED);
}
static void call_exit_in_walk(void)
{
    pthread_cancel(pthread_self());
    nftw(in_tree(""), exit_in_walk, 4, FTW_PHYS);
}

static void call_open_fifo(void) { close(open(fifo, O_RDONLY)); }
static void call_openat_fifo(void) { close(openat(AT_FDCWD, fifo, O_RDONLY)); }
static void call_fopen_fifo(void)
{
    FILE *made = fopen(fifo, "r");
    if (made)
        fclose(made);
}

static void try_files(void)
{
    CHECK(mkdtemp(folder));
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    CHECK(!mkfifo(fifo, 0600));
    BLOCKED(call_open_fifo);
    BLOCKED(call_openat_fifo);
    BLOCKED(call_fopen_fifo);
    unlink(fifo);
    rmdir(folder);
    for (int which = 0; which < 2; which++) {
        tree = which ? "/sys/class/infiniband/siw0" : "/sys/class/net";
        PENDING(call_open);
        PENDING(call_openat);
        PENDING(call_fopen);
        PENDING(call_opendir);
        PENDING(call_scandir);
        PENDING(call_glob);
        PENDING(call_nftw);
        PENDING(call_ftw);
        PENDING(call_fts);
        PENDING(call_status);
        PENDING(call_exit_in_walk);
    }
    PENDING(call_interfaces);
}

static void *connect_ours(void *argument)
{
    (void)argument;
    ours = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(ours, (struct sockaddr *)&bound, sizeof bound));
    return NULL;
}

static void open_pair(const char *address)
{
    pthread_t thread;
    socklen_t length = sizeof bound;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    bound = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
    CHECK(!bind(listener, (struct sockaddr *)&bound, length));
    CHECK(!listen(listener, 16));
    CHECK(!getsockname(listener, (struct sockaddr *)&bound, &length));
    BLOCKED(call_accept);
    BLOCKED(call_accept4);
    now_tried = "set-up";
    CHECK(!pthread_create(&thread, NULL, connect_ours, NULL));
    peer = accept(listener, NULL, NULL);
    CHECK(peer >= 0);
    CHECK(!pthread_join(thread, NULL));
    struct epoll_event event = {.events = EPOLLIN};
    CHECK((instance = epoll_create1(0)) >= 0);
    CHECK(!epoll_ctl(instance, EPOLL_CTL_ADD, ours, &event));
}

static void try_sockets(void)
{
    BLOCKED(call_read);
    BLOCKED(call_readv);
    BLOCKED(call_preadv2);
    BLOCKED(call_recv);
    BLOCKED(call_recvfrom);
    BLOCKED(call_recvmsg);
    BLOCKED(call_recvmmsg);
    BLOCKED(call_poll);
    BLOCKED(call_ppoll);
    BLOCKED(call_select);
    BLOCKED(call_pselect);
    BLOCKED(call_epoll_wait);
    BLOCKED(call_epoll_pwait);
    BLOCKED(call_fgets);
    CHECK(!ftruncate(file, 1));
    /* No cancellation point of the kernel. */
    PENDING(call_sendfile);
    while (send(ours, block, sizeof block, MSG_DONTWAIT) > 0 || send(ours, block, 1, MSG_DONTWAIT) > 0)
        ;
    BLOCKED(call_write);
    BLOCKED(call_writev);
    BLOCKED(call_pwritev2);
    BLOCKED(call_send);
    BLOCKED(call_sendto);
    BLOCKED(call_sendmsg);
    BLOCKED(call_sendmmsg);
    BLOCKED(call_fwrite);
    PENDING(call_connect);
    PENDING(call_bind);
    PENDING(call_listen);
    PENDING(call_udp);
    PENDING(call_dup);
    PENDING(call_fcntl);
    PENDING(call_close_range);
    PENDING(call_syscall);
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(count == 2);
    alarm(120);
    signal(SIGPIPE, SIG_IGN);
    CHECK((file = memfd_create("sent", 0)) >= 0);
    try_files();
    open_pair(arguments[1]);
    try_sockets();
    printf("done\n");
    return 0;
}
