//! Unmodified TCP programs whose sockets `siwrun --rsockets` turns into rsockets.

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{Program, await_listeners, free_port, is_installed};
use std::path::Path;

/// Echo server with epoll (Python's selector on Linux) that ends after `count` clients.
const ECHO_SERVER: &str = r#"
import selectors, socket, sys
selector = selectors.EpollSelector()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen(16)
listener.setblocking(False)
selector.register(listener, selectors.EVENT_READ, b"")
left = int(sys.argv[3])
while left > 0:
    for key, events in selector.select():
        if key.fileobj is listener:
            client, peer = listener.accept()
            client.setblocking(False)
            selector.register(client, selectors.EVENT_READ, b"")
            continue
        client, pending = key.fileobj, key.data
        if events & selectors.EVENT_READ:
            data = client.recv(65536)
            if not data:
                selector.unregister(client)
                client.close()
                left -= 1
                continue
            pending += data
        try:
            pending = pending[client.send(pending):]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
        selector.modify(client, wanted, pending)
print("served")
"#;

/// Several clients at once, each with its own data.
const ECHO_CLIENT: &str = r#"
import hashlib, socket, sys, threading
def talk(number):
    data = hashlib.sha256(b"%d" % number).digest() * 40000
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
        sender = threading.Thread(target=peer.sendall, args=(data,))
        sender.start()
        back = b""
        while len(back) < len(data):
            piece = peer.recv(1 << 20)
            assert piece, "closed"
            back += piece
        sender.join()
        assert back == data, "data differs"
        # One write, since several threads print.
        sys.stdout.write("peer %s\n" % peer.getpeername()[0])
threads = [threading.Thread(target=talk, args=(n,)) for n in range(int(sys.argv[3]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"#;

fn write_script(daemon: &Daemon, name: &str, text: &str) -> String {
    let path = daemon.dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn echo_between(bound: &str, connected: &[&str]) {
    if !is_installed("python3", "python3") {
        return;
    }
    let daemon = Daemon::loopback();
    let (server, client) = (
        write_script(&daemon, "server.py", ECHO_SERVER),
        write_script(&daemon, "client.py", ECHO_CLIENT),
    );
    let (port, count) = (free_port(), 4 * connected.len());
    let line = format!("--rsockets python3 {server} {bound} {port} {count}");
    let server = Program::start(&daemon, &line);
    await_listeners(&daemon, 1);
    for addr in connected {
        let line = format!("--rsockets python3 {client} {addr} {port} 4");
        let said = Program::start(&daemon, &line).succeed();
        assert_eq!(said.matches("peer ").count(), 4, "{said}");
    }
    assert!(server.succeed().contains("served"));
}

#[test]
fn an_echo_server_with_epoll_serves_rsockets() {
    echo_between("10.77.0.2", &["10.77.0.2"]);
}

#[test]
fn a_server_at_all_addresses_serves_both_kinds() {
    echo_between("0.0.0.0", &["10.77.0.2", "127.0.0.1"]);
}

/// A listener while the daemon is killed: a thread waits in accept(2), and three kinds of selectors watch
/// it. The kernel's part of a listener at all addresses remains.
const LISTENER_OF_AN_ENDED_DAEMON: &str = r#"
import errno, os, selectors, socket, sys, threading, time
address, port, daemon = sys.argv[1], int(sys.argv[2]), sys.argv[3]
listener = socket.socket()
listener.bind((address, port))
listener.listen(4)
outcomes = []
def accept():
    try:
        outcomes.append(listener.accept()[1][0])
    except OSError as error:
        outcomes.append(errno.errorcode[error.errno])
def take():
    accept()
    return outcomes.pop()
thread = threading.Thread(target=accept)
thread.start()
kinds = [selectors.SelectSelector, selectors.PollSelector, selectors.EpollSelector]
watches = [kind() for kind in kinds]
for watch in watches:
    watch.register(listener, selectors.EVENT_READ)
while os.path.exists("/proc/" + daemon):
    time.sleep(0.01)
def rests(wait):
    used = time.process_time()
    wait()
    assert time.process_time() - used < 0.1, "waiting uses the processor"
if address == "0.0.0.0":
    rests(lambda: time.sleep(0.3))
    with socket.create_connection(("127.0.0.1", port)):
        thread.join()
    assert outcomes.pop() == "127.0.0.1"
    for watch in watches:
        rests(lambda: watch.select(0.3) and sys.exit("readable without a connection"))
        with socket.create_connection(("127.0.0.1", port)):
            assert watch.select(20), watch
            assert take() == "127.0.0.1"
else:
    thread.join()
    assert outcomes.pop() == "ENODEV"
    for watch in watches:
        assert watch.select(20), watch
        assert take() == "ENODEV"
print("ended")
"#;

#[test]
fn a_listener_fails_or_goes_on_with_the_kernel_when_the_daemon_is_gone() {
    if !is_installed("python3", "python3") {
        return;
    }
    for address in ["10.77.0.1", "0.0.0.0"] {
        let mut daemon = Daemon::loopback();
        let server = write_script(&daemon, "server.py", LISTENER_OF_AN_ENDED_DAEMON);
        let (port, pid) = (free_port(), daemon.child.id());
        let line = format!("--rsockets python3 {server} {address} {port} {pid}");
        let server = Program::start(&daemon, &line);
        await_listeners(&daemon, 1);
        daemon.kill();
        assert!(server.succeed().contains("ended"), "{address}");
    }
}

#[test]
fn iperf3_runs_over_rsockets() {
    if !is_installed("iperf3", "iperf3") {
        return;
    }
    let daemon = Daemon::loopback();
    let port = free_port();
    let line = format!("--rsockets iperf3 -s -1 -B 10.77.0.2 -p {port}");
    let server = Program::start(&daemon, &line);
    await_listeners(&daemon, 1);
    let line = format!("--rsockets iperf3 -c 10.77.0.2 -p {port} -t 1 -P 2");
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("receiver"), "{said}");
    server.succeed();
}

/// A connection to a listener of the same program, whose other end a thread reads to its end.
const CONNECTION: &str = r#"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#define CHECK(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: %s, errno %d\n", __LINE__, #what, errno); exit(1); } } while (0)

static struct sockaddr_in address = { .sin_family = AF_INET };
static int listener;

static void start_listening(void)
{
    socklen_t length = sizeof address;
    inet_pton(AF_INET, "10.77.0.2", &address.sin_addr);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (void *)&address, length) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (void *)&address, &length) == 0);
}

static void *accept_one(void *accepted)
{
    *(int *)accepted = accept(listener, NULL, NULL);
    return NULL;
}

static int connect_to_listener(int *accepted)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, accept_one, accepted) == 0);
    int made = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(made, (void *)&address, sizeof address) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && *accepted >= 0);
    return made;
}
"#;

fn run_preloaded(source: &str) -> String {
    if !can_compile() {
        return String::new();
    }
    let daemon = Daemon::loopback();
    let file = daemon.dir.path().join("program.c");
    std::fs::write(&file, format!("{CONNECTION}{source}")).unwrap();
    let (program, _) = compile(&daemon, &file);
    let line = format!("--rsockets {} {}", program.display(), file.display());
    Program::start(&daemon, &line).succeed()
}

#[test]
fn children_do_not_wait_for_threads_of_their_parent() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/forked_sockets.c");
    let (program, _) = compile(&daemon, &source);
    let said = Program::start(&daemon, &format!("--rsockets {}", program.display())).succeed();
    assert!(said.contains("done"), "{said}");
}

/// The ways in which a program gives up a number; the last ones do not pass through the library.
const CLOSED_NUMBERS: &str = r#"
static int release(int way, int number)
{
    FILE *stream;
    switch (way) {
    case 0: return close(number);
    case 1: stream = fdopen(number, "w"); return fclose(stream);
    case 2: return close_range(number, number, 0);
    case 3: return dup2(open("/dev/null", O_RDWR), number) == number ? close(number) : -1;
    case 4: stream = fopen("/dev/null", "r");
            CHECK(dup2(number, fileno(stream)) == fileno(stream) && close(number) == 0);
            return fclose(freopen("/dev/null", "r", stream));
    case 5: return syscall(SYS_close, number);
    case 6: return syscall(SYS_dup3, open("/dev/null", O_RDWR), number, 0) == number
                   ? syscall(SYS_close, number) : -1;
    default: return syscall(SYS_close_range, number, number, 0);
    }
}

static void write_line(const char *path, int number)
{
    struct stat status;
    int made = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(made >= 0 && dup2(made, number) == number);
    CHECK(write(number, "private line of a log file\n", 27) == 27);
    CHECK(fstat(made, &status) == 0 && status.st_size == 27);
    CHECK(close(number) == 0 && (made == number || close(made) == 0));
}

int main(int count, char **arguments)
{
    char path[4096], text[64];
    CHECK(count == 2);
    snprintf(path, sizeof path, "%s.log", arguments[1]);
    start_listening();
    for (int way = 0; way < 8; way++) {
        int accepted, made = connect_to_listener(&accepted);
        fprintf(stderr, "way %d\n", way);
        CHECK(send(made, "hello", 5, 0) == 5 && recv(accepted, text, 64, 0) == 5);
        CHECK(release(way, made) == 0);
        /* The raw system call keeps the number for the first file. */
        int file = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_TRUNC | O_RDWR, 0600);
        CHECK(file >= 0);
        if (file != made)
            CHECK(syscall(SYS_dup3, file, made, 0) == made);
        struct stat status;
        CHECK(write(made, "private line of a log file\n", 27) == 27);
        CHECK(fstat(made, &status) == 0 && status.st_size == 27);
        CHECK(recv(accepted, text, 64, 0) == 0);
        CHECK(close(made) == 0 && close(accepted) == 0);
        if (file != made)
            close(file);
        write_line(path, made);
    }
    /* An epoll instance whose number belongs to another one. */
    int accepted, made = connect_to_listener(&accepted), old = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLOUT, .data.u64 = 7 };
    CHECK(epoll_ctl(old, EPOLL_CTL_ADD, made, &event) == 0);
    CHECK(epoll_wait(old, &event, 1, 1000) == 1 && event.data.u64 == 7);
    CHECK(syscall(SYS_dup3, epoll_create1(0), old, 0) == old);
    CHECK(epoll_wait(old, &event, 1, 0) == 0);
    /* A number that was a socket of streams, and is one of datagrams. */
    int stream = socket(AF_INET, SOCK_STREAM, 0), type = 0;
    CHECK(syscall(SYS_close, stream) == 0);
    CHECK(socket(AF_INET, SOCK_DGRAM, 0) == stream);
    connect(stream, (void *)&address, sizeof address);
    socklen_t length = sizeof type;
    CHECK(getsockopt(stream, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_DGRAM);
    /* All descriptors. */
    closefrom(3);
    CHECK(open(path, O_RDONLY) == 3);
    write_line(path, made);
    _exit(0);
}
"#;

#[test]
fn a_number_closed_without_the_library_is_no_rsocket() {
    run_preloaded(CLOSED_NUMBERS);
}

const STREAMS: &str = r#"
int main(void)
{
    char line[64];
    start_listening();
    int accepted, made = connect_to_listener(&accepted);
    FILE *out = fdopen(made, "w"), *in = fdopen(accepted, "r");
    CHECK(out && in && fileno(out) == made);
    CHECK(fprintf(out, "%d lines\nend\n", 2) > 0 && fflush(out) == 0);
    CHECK(fgets(line, sizeof line, in) && strcmp(line, "2 lines\n") == 0);
    CHECK(fputs("buffered", out) >= 0 && fclose(out) == 0);
    CHECK(fgets(line, sizeof line, in) && strcmp(line, "end\n") == 0);
    CHECK(fgets(line, sizeof line, in) && strcmp(line, "buffered") == 0);
    CHECK(fgetc(in) == EOF && feof(in) && fclose(in) == 0);
    /* A stream made before the socket is connected. */
    int late = socket(AF_INET, SOCK_STREAM, 0);
    FILE *both = fdopen(late, "r+");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, accept_one, &accepted) == 0);
    CHECK(connect(late, (void *)&address, sizeof address) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(fputs("question\n", both) >= 0 && fflush(both) == 0);
    CHECK(recv(accepted, line, sizeof line, 0) == 9 && send(accepted, "answer\n", 7, 0) == 7);
    CHECK(fgets(line, sizeof line, both) && strcmp(line, "answer\n") == 0);
    CHECK(fclose(both) == 0 && recv(accepted, line, sizeof line, 0) == 0);
    return 0;
}
"#;

#[test]
fn streams_of_the_c_library_use_rsockets() {
    run_preloaded(STREAMS);
}

const FURTHER_CALLS: &str = r#"
static void await_readable(int fd)
{
    struct pollfd readable = { .fd = fd, .events = POLLIN };
    CHECK(poll(&readable, 1, 20000) == 1);
}

int main(void)
{
    char text[2][8];
    int count = -1;
    start_listening();
    int accepted, made = connect_to_listener(&accepted);
    struct iovec parts[2] = { { "abc", 3 }, { "defg", 4 } };
    struct mmsghdr list[2] = { { .msg_hdr = { .msg_iov = &parts[0], .msg_iovlen = 1 } },
                               { .msg_hdr = { .msg_iov = &parts[1], .msg_iovlen = 1 } } };
    CHECK(sendmmsg(made, list, 2, 0) == 2 && list[0].msg_len == 3 && list[1].msg_len == 4);
    do {
        await_readable(accepted);
        CHECK(ioctl(accepted, FIONREAD, &count) == 0 && count <= 7);
    } while (count < 7);
    struct iovec rooms[2] = { { text[0], 3 }, { text[1], 8 } };
    struct sockaddr_in name;
    for (int i = 0; i < 2; i++) {
        list[i].msg_hdr.msg_iov = &rooms[i];
        list[i].msg_hdr.msg_name = &name;
        list[i].msg_hdr.msg_namelen = sizeof name;
    }
    CHECK(recvmmsg(accepted, list, 2, MSG_WAITFORONE, NULL) == 2);
    CHECK(list[0].msg_len == 3 && list[1].msg_len == 4 && memcmp(text[1], "defg", 4) == 0);
    CHECK(list[0].msg_hdr.msg_namelen == 0);
    CHECK(recvmmsg(accepted, list, 2, MSG_DONTWAIT, NULL) == -1 && errno == EAGAIN);

    CHECK(pwritev2(made, parts, 2, -1, 0) == 7);
    await_readable(accepted);
    CHECK(preadv2(accepted, rooms, 1, -1, 0) == 3 && memcmp(text[0], "abc", 3) == 0);
    char *volatile none = NULL;
    CHECK(recv(accepted, none, 4, MSG_TRUNC | MSG_WAITALL) == 4);
    CHECK(preadv2(accepted, rooms, 1, -1, RWF_NOWAIT) == -1 && errno == EAGAIN);
    CHECK(preadv2(accepted, rooms, 1, 0, 0) == -1 && errno == ESPIPE);
    volatile int negative = -1;
    CHECK(writev(made, parts, negative) == -1 && errno == EINVAL);

    do
        CHECK(ioctl(made, SIOCOUTQ, &count) == 0);
    while (count > 0);
    static char much[4 << 20];
    CHECK(fcntl(made, F_SETFL, O_NONBLOCK) == 0);
    CHECK(send(made, much, sizeof much, 0) > 0);
    CHECK(ioctl(made, SIOCOUTQ, &count) == 0 && count >= 0);
    int on = 0;
    CHECK(ioctl(made, FIONBIO, &on) == 0 && (fcntl(made, F_GETFL) & O_NONBLOCK) == 0);
    CHECK(ioctl(made, TIOCGWINSZ, text) == -1 && errno == ENOTTY);
    return 0;
}
"#;

#[test]
fn less_common_calls_serve_rsockets() {
    run_preloaded(FURTHER_CALLS);
}

const CHILD: &str = r#"
#include <sys/wait.h>
int main(void)
{
    char text[8];
    start_listening();
    int accepted, made = connect_to_listener(&accepted), status;
    CHECK(send(made, "a", 1, 0) == 1 && recv(accepted, text, 8, 0) == 1);
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        /* Closing what the parent has is no use of it. */
        CHECK(close(accepted) == 0);
        int own = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(own, (void *)&address, sizeof address) == 0);
        CHECK(send(own, "child", 5, 0) == 5 && recv(own, text, 8, 0) == 2);
        exit(0);
    }
    int of_child;
    accept_one(&of_child);
    CHECK(recv(of_child, text, 8, 0) == 5 && send(of_child, "ok", 2, 0) == 2);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(send(made, "b", 1, 0) == 1 && recv(accepted, text, 8, 0) == 1);
    return 0;
}
"#;

#[test]
fn a_child_of_fork_makes_connections_of_its_own() {
    let said = run_preloaded(CHILD);
    assert!(!said.contains("of the parent process"), "{said}");
}

const CONNECT_BESIDE_ACCEPT: &str = r#"
/* A connecting thread looks after its listener from time to time; the thread that accepts starts
 * shortly before, meanwhile, or after. */
static useconds_t delay;

static void *accept_later(void *accepted)
{
    usleep(delay);
    return accept_one(accepted);
}

static void *poll_later(void *accepted)
{
    struct pollfd ready = { .fd = listener, .events = POLLIN };
    usleep(delay);
    CHECK(poll(&ready, 1, 20000) == 1);
    return accept_one(accepted);
}

int main(void)
{
    start_listening();
    alarm(50);
    for (int round = 0; round < 100; round++) {
        int accepted = -1;
        pthread_t thread;
        delay = (useconds_t)round * 100;
        CHECK(pthread_create(&thread, NULL, round % 2 ? accept_later : poll_later, &accepted) == 0);
        int made = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(made, (void *)&address, sizeof address) == 0);
        CHECK(pthread_join(thread, NULL) == 0 && accepted >= 0);
        CHECK(close(made) == 0 && close(accepted) == 0);
    }
    CHECK(close(connect_to_listener(&(int){ 0 })) == 0);
    return 0;
}
"#;

/// A thread that starts to accept while another connects to the same listener is woken.
#[test]
fn a_process_connects_to_itself_while_a_thread_starts_to_accept() {
    run_preloaded(CONNECT_BESIDE_ACCEPT);
}

/// Random programs of socket calls have the same results over rsockets as over the kernel's TCP:
/// `SIWD_SOCKET_PROGRAMS` programs, from the seed `SIWD_SOCKET_SEED`.
#[test]
fn random_programs_of_calls_have_the_same_results_over_both_kinds_of_sockets() {
    if !can_compile() {
        return;
    }
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().unwrap())
    };
    let (seed, count) = (
        number("SIWD_SOCKET_SEED", 1),
        number("SIWD_SOCKET_PROGRAMS", 40),
    );
    println!("seeds {seed} to {}", seed + count - 1);
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/socket_programs.c");
    let (program, _) = compile(&daemon, &source);
    // Programs of many seeds take longer than a test's patience: a run for each part.
    for first in (seed..seed + count).step_by(PROGRAMS_OF_RUN as usize) {
        let part = PROGRAMS_OF_RUN.min(seed + count - first);
        let line = format!("--rsockets {} {first} {part}", program.display());
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains(", 0 differ"), "{said}");
    }
}

/// Random programs that run in one process.
const PROGRAMS_OF_RUN: u64 = 20;

const BULK: &str = r#"
enum { ROOM = 8 << 20 };
static unsigned char out[ROOM], in[ROOM];

static void await_events(int fd, short events)
{
    struct pollfd ready = { .fd = fd, .events = events };
    CHECK(poll(&ready, 1, 20000) == 1);
}

/* Sends as much as one call takes, reads it, and returns its length. */
static size_t send_once(int from, int to, unsigned round)
{
    for (size_t i = 0; i < ROOM; i++)
        out[i] = (unsigned char)(i * 7 + (i >> 12) + round);
    await_events(from, POLLOUT);
    ssize_t sent = send(from, out, ROOM, MSG_DONTWAIT);
    CHECK(sent > 0);
    for (ssize_t got = 0; got < sent;) {
        await_events(to, POLLIN);
        ssize_t piece = recv(to, in + got, ROOM - got, MSG_DONTWAIT);
        CHECK(piece > 0);
        got += piece;
    }
    CHECK(memcmp(in, out, sent) == 0);
    return sent;
}

static int option(int fd, int name)
{
    int value = -1;
    CHECK(getsockopt(fd, SOL_SOCKET, name, &value, &(socklen_t){ sizeof value }) == 0);
    return value;
}

int main(void)
{
    start_listening();
    int accepted, made = connect_to_listener(&accepted);
    int first = option(accepted, SO_RCVBUF);
    for (int way = 0; way < 2; way++) {
        int from = way ? accepted : made, to = way ? made : accepted;
        size_t most = 0;
        /* The last call takes all that both halves of the largest buffer have room for. */
        for (unsigned round = 0; round < 200 && most < 1 << 20; round++) {
            size_t sent = send_once(from, to, round);
            most = sent > most ? sent : most;
        }
        CHECK(most >= 1 << 20);
        CHECK(option(to, SO_RCVBUF) == 2 << 20 && option(from, SO_SNDBUF) == 2 << 20);
        for (unsigned round = 0; round < 20; round++)
            send_once(from, to, round);
    }
    CHECK(close(made) == 0 && close(accepted) == 0);
    /* Buffers whose size the program has set do not grow. */
    int size = 40000;
    CHECK(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &size, sizeof size) == 0);
    made = connect_to_listener(&accepted);
    for (unsigned round = 0; round < 20; round++)
        CHECK(send_once(made, accepted, round) <= (size_t)first);
    CHECK(option(accepted, SO_RCVBUF) == 2 * size && option(made, SO_SNDBUF) == first);
    return 0;
}
"#;

/// A call that sends much is not cut into pieces of the first buffers, as with the kernel's: programs
/// such as redis-benchmark copy the rest of their data at each call.
#[test]
fn buffers_of_a_stream_grow_with_its_use() {
    run_preloaded(BULK);
}

/// A client that connects without waiting, and waits with edge-triggered events, as nginx does for its
/// upstream servers.
const EDGE_TRIGGERED_CLIENT: &str = r#"
static void await_event(int instance, unsigned wanted)
{
    struct epoll_event event;
    do
        CHECK(epoll_wait(instance, &event, 1, 20000) == 1);
    while (!(event.events & wanted));
}

static void *greet(void *accepted)
{
    accept_one(accepted);
    CHECK(send(*(int *)accepted, "hello", 5, 0) == 5);
    return NULL;
}

static void *answer(void *accepted)
{
    char text[8];
    accept_one(accepted);
    CHECK(recv(*(int *)accepted, text, 8, 0) == 4);
    CHECK(send(*(int *)accepted, "reply", 5, 0) == 5);
    return NULL;
}

int main(void)
{
    start_listening();
    for (int round = 0; round < 40; round++) {
        char text[8];
        int accepted = -1, instance = epoll_create1(0);
        int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET };
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, round % 2 ? greet : answer, &accepted) == 0);
        CHECK(connect(made, (void *)&address, sizeof address) == 0 || errno == EINPROGRESS);
        CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, made, &event) == 0);
        if (round % 2 == 0) {
            await_event(instance, EPOLLOUT);
            CHECK(send(made, "text", 4, 0) == 4);
        }
        ssize_t got;
        while ((got = recv(made, text, 8, 0)) == -1 && (errno == EAGAIN || errno == ENOTCONN))
            await_event(instance, EPOLLIN | EPOLLOUT);
        CHECK(got == 5 && pthread_join(thread, NULL) == 0);
        CHECK(close(made) == 0 && close(accepted) == 0 && close(instance) == 0);
    }
    CHECK(close(connect_to_listener(&(int){ 0 })) == 0);
    return 0;
}
"#;

#[test]
fn an_edge_triggered_client_hears_of_answers() {
    run_preloaded(EDGE_TRIGGERED_CLIENT);
}

const SERVER_THAT_FORKS: &str = r#"
#include <sys/wait.h>
int main(void)
{
    char text[8];
    int status;
    start_listening();
    int accepted, made = connect_to_listener(&accepted);
    pid_t child = fork();
    if (child == 0) {
        socket(AF_INET, SOCK_STREAM, 0);
        CHECK(recv(accepted, text, 8, 0) == -1 && errno == ENOTSOCK);
        CHECK(accept(listener, NULL, NULL) == -1 && errno == ENOTSOCK);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(send(made, "b", 1, 0) == 1 && recv(accepted, text, 8, 0) == 1);
    return 0;
}
"#;

#[test]
fn a_server_that_forks_is_told_that_its_children_have_no_rsockets() {
    let said = run_preloaded(SERVER_THAT_FORKS);
    let told = said
        .matches("run servers that fork without --rsockets")
        .count();
    assert_eq!(told, usize::from(can_compile()), "{said}");
}

const AS_OF_THE_KERNEL: &str = r#"
static int listener_of_thread;

static void *accept_until_shutdown(void *result)
{
    *(int *)result = accept(listener_of_thread, NULL, NULL) == -1 ? errno : 0;
    return NULL;
}

static void await_events(int fd, short events)
{
    struct pollfd ready = { .fd = fd, .events = events };
    CHECK(poll(&ready, 1, 20000) == 1 && (ready.revents & events));
}

/* Of an epoll instance: a descriptor is reported once, also one with the number of another. */
static void report_once(void)
{
    int instance = epoll_create1(0), accepted;
    struct epoll_event event = { .events = EPOLLOUT }, events[4];
    for (int i = 0; i < 5; i++) {
        int made = connect_to_listener(&accepted);
        event.data.u64 = i;
        CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, made, &event) == 0);
        CHECK(epoll_wait(instance, events, 4, 20000) == 1 && events[0].data.u64 == (uint64_t)i);
        CHECK(epoll_ctl(instance, EPOLL_CTL_DEL, made, NULL) == 0);
        CHECK(epoll_wait(instance, events, 4, 0) == 0);
        CHECK(epoll_ctl(instance, EPOLL_CTL_ADD, made, &event) == 0);
        CHECK(epoll_wait(instance, events, 4, 20000) == 1);
        /* Closed without being removed. */
        CHECK(close(made) == 0 && close(accepted) == 0);
    }
    CHECK(close(instance) == 0);
}

static void connect_without_waiting(void)
{
    int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), accepted, error = -1;
    socklen_t length = sizeof error;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, accept_one, &accepted) == 0);
    int begun = connect(made, (void *)&address, sizeof address);
    /* The other thread may have accepted already. */
    CHECK(begun == 0 || errno == EINPROGRESS);
    await_events(made, POLLOUT);
    CHECK(getsockopt(made, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0);
    /* The first call reports the connection, the next one that there is one. */
    CHECK(begun == 0 || connect(made, (void *)&address, sizeof address) == 0);
    CHECK(connect(made, (void *)&address, sizeof address) == -1 && errno == EISCONN);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(send(made, "x", 1, MSG_OOB) == -1 && errno == EOPNOTSUPP);
    CHECK(recv(made, &error, 1, MSG_OOB) == -1 && errno == EINVAL);
    CHECK(lseek(made, 0, SEEK_CUR) == -1 && errno == ESPIPE);
    CHECK(close(made) == 0 && close(accepted) == 0);
}

static void refused_then_accepted(void)
{
    struct sockaddr_in nobody = address;
    nobody.sin_port = htons(1);
    int made = socket(AF_INET, SOCK_STREAM, 0), accepted;
    CHECK(connect(made, (void *)&nobody, sizeof nobody) == -1 && errno == ECONNREFUSED);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, accept_one, &accepted) == 0);
    CHECK(connect(made, (void *)&address, sizeof address) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && close(made) == 0 && close(accepted) == 0);
}

static void flags_are_not_inherited(void)
{
    int accepted, made;
    CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
    CHECK(accept(listener, NULL, NULL) == -1 && errno == EAGAIN);
    made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(connect(made, (void *)&address, sizeof address) == 0 || errno == EINPROGRESS);
    await_events(listener, POLLIN);
    CHECK((accepted = accept(listener, NULL, NULL)) >= 0);
    CHECK((fcntl(accepted, F_GETFL) & O_NONBLOCK) == 0);
    CHECK(fcntl(listener, F_SETFL, 0) == 0 && close(made) == 0 && close(accepted) == 0);
}

static void mapped_addresses(void)
{
    struct sockaddr_in6 any = { .sin6_family = AF_INET6 }, mapped = any, name;
    struct sockaddr_in plain = address;
    socklen_t length = sizeof any;
    char text[64];
    int both = socket(AF_INET6, SOCK_STREAM, 0);
    CHECK(bind(both, (void *)&any, length) == 0 && listen(both, 4) == 0);
    CHECK(getsockname(both, (void *)&any, &length) == 0 && length == sizeof any);
    CHECK(any.sin6_family == AF_INET6);
    listener_of_thread = listener;
    listener = both;
    mapped.sin6_port = plain.sin_port = any.sin6_port;
    CHECK(inet_pton(AF_INET6, "::ffff:10.77.0.2", &mapped.sin6_addr) == 1);
    for (int way = 0; way < 2; way++) {
        int accepted, made = socket(way ? AF_INET : AF_INET6, SOCK_STREAM, 0);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, accept_one, &accepted) == 0);
        CHECK(way ? connect(made, (void *)&plain, sizeof plain) == 0
                  : connect(made, (void *)&mapped, sizeof mapped) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        length = sizeof name;
        CHECK(getpeername(accepted, (void *)&name, &length) == 0 && length == sizeof name);
        CHECK(inet_ntop(AF_INET6, &name.sin6_addr, text, sizeof text));
        CHECK(strncmp(text, "::ffff:10.77.0.", 15) == 0);
        CHECK(close(made) == 0 && close(accepted) == 0);
    }
    listener = listener_of_thread;
    CHECK(close(both) == 0);
}

static void shut_down_a_listener(void)
{
    int result = -1, ready = 0;
    pthread_t thread;
    listener_of_thread = listener;
    CHECK(shutdown(listener, SHUT_WR) == 0);
    CHECK(pthread_create(&thread, NULL, accept_until_shutdown, &result) == 0);
    /* Whether the thread waits already does not matter. */
    CHECK(shutdown(listener, SHUT_RDWR) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && result == EINVAL);
    CHECK(getsockopt(listener, SOL_SOCKET, SO_ACCEPTCONN, &ready, &(socklen_t){ sizeof ready }) == 0);
    CHECK(ready == 0 && close(listener) == 0);
}

int main(void)
{
    start_listening();
    report_once();
    connect_without_waiting();
    refused_then_accepted();
    flags_are_not_inherited();
    mapped_addresses();
    shut_down_a_listener();
    return 0;
}
"#;

#[test]
fn rsockets_behave_as_sockets_of_the_kernel() {
    run_preloaded(AS_OF_THE_KERNEL);
}
