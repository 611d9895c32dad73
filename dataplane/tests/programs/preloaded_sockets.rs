//! Unmodified TCP programs whose sockets `siwrun --rsockets` turns into rsockets.

use crate::common::Daemon;
use crate::common::programs::{Program, await_listeners, free_port, is_installed};

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
