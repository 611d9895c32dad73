/* Calls with structs at odd addresses, which the kernel takes: Python passes the octets of objects, and packed
 * structs have members at any place.
 *
 * usage: unaligned_structs ADDRESS: sockets of the kernel or of siwd */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("line %d: %s: %s\n", __LINE__, #condition, strerror(errno));          \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

static char room[16][4096 + 1];
static int used;

/* A copy of a struct at an odd address. */
static void *odd(const void *from, size_t size)
{
    char *to = room[used++ % 16];
    to += !((size_t)to & 1);
    return memcpy(to, from, size);
}
#define ODD(value) odd(&(value), sizeof(value))
#define READ(type, from) (*(type *)memcpy(&(type){0}, from, sizeof(type)))

static int listener, ours, peer;
static struct sockaddr_in bound;

static void try_interfaces(void)
{
    int any = socket(AF_INET, SOCK_DGRAM, 0);
    const char *names[] = {"lo", "siw0"};
    for (int at = 0; at < 2; at++) {
        struct ifreq asked = {0};
        strcpy(asked.ifr_name, names[at]);
        void *request = ODD(asked);
        CHECK(!ioctl(any, SIOCGIFFLAGS, request));
        CHECK(READ(struct ifreq, request).ifr_flags & IFF_UP);
        request = ODD(asked);
        CHECK(!ioctl(any, SIOCGIFINDEX, request));
        int number = READ(struct ifreq, request).ifr_ifindex;
        CHECK(number == (int)if_nametoindex(names[at]));
        struct ifreq by_number = {.ifr_ifindex = number};
        request = ODD(by_number);
        CHECK(!ioctl(any, SIOCGIFNAME, request));
        CHECK(!strcmp(READ(struct ifreq, request).ifr_name, names[at]));
        request = ODD(asked);
        CHECK(!ioctl(any, SIOCGIFMTU, request) && READ(struct ifreq, request).ifr_mtu > 0);
        request = ODD(asked);
        CHECK(!ioctl(any, SIOCGIFADDR, request) && !ioctl(any, SIOCGIFNETMASK, request));
    }
    static char all[4096 + 1];
    struct ifconf list = {.ifc_len = 4096, .ifc_buf = all + 1};
    void *config = ODD(list);
    CHECK(!ioctl(any, SIOCGIFCONF, config));
    int length = READ(struct ifconf, config).ifc_len, found = 0;
    for (int at = 0; at < length; at += sizeof(struct ifreq))
        found += !strcmp(READ(struct ifreq, all + 1 + at).ifr_name, "siw0");
    CHECK(found == 1);
    struct ifaddrs *none = NULL, *head;
    void *place = ODD(none);
    CHECK(!getifaddrs(place));
    memcpy(&head, place, sizeof head);
    CHECK(head);
    freeifaddrs(head);
    /* The address of a datagram. */
    void *to = ODD(bound);
    struct iovec part = {room[0], 1};
    struct msghdr message = {.msg_name = to, .msg_namelen = sizeof bound, .msg_iov = ODD(part), .msg_iovlen = 1};
    CHECK(sendto(any, room[0], 1, 0, to, sizeof bound) == 1);
    CHECK(sendmsg(any, ODD(message), 0) == 1);
    close(any);
}

static void *connect_ours(void *argument)
{
    (void)argument;
    ours = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!connect(ours, ODD(bound), sizeof bound));
    return NULL;
}

static void open_pair(const char *address)
{
    pthread_t thread;
    socklen_t length = sizeof bound;
    bound = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!bind(listener, ODD(bound), sizeof bound) && !listen(listener, 4));
    void *name = ODD(bound), *room_of_name = ODD(length);
    CHECK(!getsockname(listener, name, room_of_name));
    CHECK(READ(socklen_t, room_of_name) == sizeof bound);
    bound = READ(struct sockaddr_in, name);
    CHECK(bound.sin_port);
    CHECK(!pthread_create(&thread, NULL, connect_ours, NULL));
    room_of_name = ODD(length);
    CHECK((peer = accept(listener, ODD(bound), room_of_name)) >= 0);
    CHECK(READ(socklen_t, room_of_name) == sizeof bound);
    CHECK(!pthread_join(thread, NULL));
    room_of_name = ODD(length);
    CHECK(!getpeername(ours, name, room_of_name) && READ(socklen_t, room_of_name) == sizeof bound);
}

static void send_bytes(size_t count) { CHECK(send(peer, "abcdefgh", count, 0) == (ssize_t)count); }

static void try_transfers(void)
{
    char got[8];
    struct iovec parts[2] = {{got, 1}, {got + 1, 1}};
    send_bytes(2);
    CHECK(readv(ours, ODD(parts), 2) == 2 && !memcmp(got, "ab", 2));
    CHECK(writev(ours, ODD(parts), 2) == 2 && recv(peer, got + 2, 2, MSG_WAITALL) == 2);
    struct msghdr message = {.msg_iov = ODD(parts), .msg_iovlen = 2, .msg_flags = 77};
    void *given = ODD(message);
    send_bytes(2);
    CHECK(recvmsg(ours, given, 0) == 2 && READ(struct msghdr, given).msg_flags != 77);
    CHECK(sendmsg(ours, given, 0) == 2 && recv(peer, got + 2, 2, MSG_WAITALL) == 2);
    struct mmsghdr several = {.msg_hdr = message};
    struct timespec second = {1, 0};
    given = ODD(several);
    send_bytes(2);
    CHECK(recvmmsg(ours, given, 1, 0, ODD(second)) == 1 && READ(struct mmsghdr, given).msg_len == 2);
    given = ODD(several);
    CHECK(sendmmsg(ours, given, 1, 0) == 1 && READ(struct mmsghdr, given).msg_len == 2);
    CHECK(recv(peer, got + 2, 2, MSG_WAITALL) == 2);
    int file = memfd_create("sent", 0);
    off_t start = 1;
    void *offset = ODD(start);
    CHECK(file >= 0 && write(file, "xyz", 3) == 3);
    CHECK(sendfile(ours, file, offset, 2) == 2 && READ(off_t, offset) == 3);
    CHECK(recv(peer, got, 2, MSG_WAITALL) == 2 && !memcmp(got, "yz", 2));
    close(file);
}

static void try_waits(void)
{
    struct pollfd fds[2] = {{.fd = ours, .events = POLLIN}, {.fd = peer, .events = POLLIN}};
    struct timespec second = {1, 0};
    struct timeval moment = {1, 0};
    char byte;
    void *list = ODD(fds);
    CHECK(poll(list, 2, 0) == 0 && ppoll(ODD(fds), 2, ODD((struct timespec){0}), NULL) == 0);
    send_bytes(1);
    CHECK(poll(list, 2, 1000) == 1);
    memcpy(fds, list, sizeof fds);
    CHECK(fds[0].revents == POLLIN && !fds[1].revents);
    CHECK(ppoll(ODD(fds), 2, ODD(second), NULL) == 1);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(ours, &set);
    FD_SET(peer, &set);
    int count = (ours > peer ? ours : peer) + 1;
    void *read_set = ODD(set);
    CHECK(select(count, read_set, NULL, NULL, ODD(moment)) == 1);
    CHECK(FD_ISSET(ours, &READ(fd_set, read_set)) && !FD_ISSET(peer, &READ(fd_set, read_set)));
    CHECK(pselect(count, ODD(set), NULL, NULL, ODD(second), NULL) == 1);
    int instance = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = 9}, none = {0};
    CHECK(!epoll_ctl(instance, EPOLL_CTL_ADD, ours, ODD(event)));
    void *found = ODD(none);
    CHECK(epoll_wait(instance, found, 1, 1000) == 1 && READ(struct epoll_event, found).data.fd == 9);
    close(instance);
    CHECK(recv(ours, &byte, 1, 0) == 1);
}

static void try_options(void)
{
    int number = 1, got = 0;
    socklen_t length = sizeof number;
    struct timeval moment = {2, 0};
    CHECK(!setsockopt(ours, SOL_SOCKET, SO_KEEPALIVE, ODD(number), sizeof number));
    CHECK(!setsockopt(ours, SOL_SOCKET, SO_RCVTIMEO, ODD(moment), sizeof moment));
    void *value = ODD(got), *size = ODD(length);
    CHECK(!getsockopt(ours, SOL_SOCKET, SO_KEEPALIVE, value, size));
    CHECK(READ(int, value) == 1 && READ(socklen_t, size) == sizeof number);
    send_bytes(3);
    struct pollfd fd = {.fd = ours, .events = POLLIN};
    CHECK(poll(&fd, 1, 1000) == 1);
    value = ODD(got);
    CHECK(!ioctl(ours, FIONREAD, value) && READ(int, value) == 3);
    CHECK(!ioctl(ours, FIONBIO, ODD(number)));
    char bytes[4];
    CHECK(recv(ours, bytes, 4, 0) == 3 && recv(ours, bytes, 4, 0) < 0 && errno == EAGAIN);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    alarm(60);
    open_pair(arguments[1]);
    try_interfaces();
    try_transfers();
    try_waits();
    try_options();
    puts("done");
    return 0;
}
