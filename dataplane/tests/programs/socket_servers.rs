//! Unmodified servers of the distribution and their clients, over rsockets (`siwrun --rsockets`).

use crate::common::programs::{Program, free_port, is_installed, received_bytes, start_listening};
use crate::common::python::python_programs;
use crate::common::{Daemon, PATIENCE};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Instant;

/// Asks a server to end; it has to succeed.
fn end_server(server: Program) {
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    server.succeed();
}

struct Redis {
    daemon: Daemon,
    port: u16,
}

impl Redis {
    /// Output of a command of redis-cli.
    fn call(&self, command: &str) -> String {
        let port = self.port;
        let line = format!("--rsockets redis-cli -h 10.77.0.2 -p {port} {command}");
        Program::start(&self.daemon, &line).succeed()
    }

    fn benchmark(&self, options: &str) -> String {
        let port = self.port;
        let line = format!("--rsockets redis-benchmark -h 10.77.0.2 -p {port} -q {options}");
        Program::start(&self.daemon, &line).succeed()
    }
}

#[test]
fn redis_serves_its_benchmark_and_saves() {
    if !is_installed("redis-server", "redis-server") || !is_installed("redis-cli", "redis-tools") {
        return;
    }
    let redis = Redis {
        daemon: Daemon::loopback(),
        port: free_port(),
    };
    let folder = redis.daemon.dir.path().display();
    let line = format!(
        "--rsockets redis-server --port {} --bind 10.77.0.2 --protected-mode no --dir {folder}",
        redis.port
    );
    let server = start_listening(&redis.daemon, &line);
    assert!(redis.call("ping").contains("PONG"));
    let before = received_bytes(&redis.daemon, "siw1");
    let said = redis.benchmark("-t set,get -d 1048576 -n 200 -c 10");
    assert_eq!(said.matches("requests per second").count(), 2, "{said}");
    // The SETs alone.
    assert!(received_bytes(&redis.daemon, "siw1") - before >= 200 << 20);
    assert!(redis.call("strlen key:__rand_int__").contains("1048576"));
    let said = redis.benchmark("-t ping,incr,lpush,lrange_100,mset -n 2000 -c 20 -P 4");
    assert!(said.contains("MSET"), "{said}");
    // A child of fork(2) writes the file, while the connections go on.
    redis.call("bgsave");
    let start = Instant::now();
    while redis
        .call("info persistence")
        .contains("rdb_bgsave_in_progress:1")
    {
        assert!(start.elapsed() < PATIENCE);
    }
    let said = redis.call("info persistence");
    assert!(said.contains("rdb_last_bgsave_status:ok"), "{said}");
    assert!(redis.daemon.dir.path().join("dump.rdb").is_file());
    redis.call("shutdown nosave");
    server.succeed();
}

/// Values of many sizes, by several clients at once.
const MEMCACHED_CLIENT: &str = r#"
import sys, threading
from pymemcache.client.base import Client
failures = []
def use(number):
    try:
        client = Client((sys.argv[1], int(sys.argv[2])), timeout=60)
        for size in (0, 1, 100, 4096, 65536, 1000000):
            value = bytes((n * 7 + size + number) % 251 for n in range(size))
            key = f"{number}-{size}"
            assert client.set(key, value, noreply=False)
            assert client.get(key) == value
            many = {f"{key}-{n}": value[:2000] for n in range(20)}
            assert client.set_many(many, noreply=False) == []
            assert client.get_many(many) == many
        assert client.delete(key, noreply=False) and client.get(key) is None
        client.close()
    except BaseException as failure:
        failures.append(repr(failure))
threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
print("all values are right")
"#;

#[test]
fn memcached_keeps_values_of_several_clients() {
    if !is_installed("memcached", "memcached") {
        return;
    }
    let Some(programs) = python_programs(&["pymemcache==4.0.0"]) else {
        return;
    };
    let daemon = Daemon::loopback();
    let port = free_port();
    let line = format!("--rsockets memcached -u root -l 10.77.0.2 -p {port} -U 0 -t 2");
    let server = start_listening(&daemon, &line);
    let script = daemon.dir.path().join("client.py");
    std::fs::write(&script, MEMCACHED_CLIENT).unwrap();
    let line = format!(
        "--rsockets {}/python {} 10.77.0.2 {port}",
        programs.display(),
        script.display()
    );
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all values are right"), "{said}");
    assert!(received_bytes(&daemon, "siw1") >= 4 << 20);
    end_server(server);
}

/// nginx without worker processes, which would be children with their parent's listeners.
const NGINX: &str = r"
daemon off;
master_process off;
user root;
pid FOLDER/nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    sendfile on;
    client_max_body_size 64m;
    client_body_temp_path FOLDER/body;
    proxy_temp_path FOLDER/proxy;
    fastcgi_temp_path FOLDER/fastcgi;
    uwsgi_temp_path FOLDER/uwsgi;
    scgi_temp_path FOLDER/scgi;
    server {
        listen 10.77.0.2:PORT;
        root FOLDER/www;
        location /put/ {
            dav_methods PUT DELETE;
            create_full_put_path on;
        }
        location /proxy/ {
            proxy_pass http://10.77.0.2:PORT/;
        }
    }
}
";

#[test]
fn nginx_serves_curl() {
    if !is_installed("nginx", "nginx") || !is_installed("curl", "curl") {
        return;
    }
    let daemon = Daemon::loopback();
    let port = free_port();
    let folder = daemon.dir.path();
    let config = NGINX
        .replace("FOLDER", &folder.display().to_string())
        .replace("PORT", &port.to_string());
    std::fs::write(folder.join("nginx.conf"), config).unwrap();
    std::fs::create_dir(folder.join("www")).unwrap();
    let content: Vec<u8> = (0..20_000_000u32)
        .map(|n| (n * 7 + (n >> 9)) as u8)
        .collect();
    std::fs::write(folder.join("www/file"), &content).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    let line = format!(
        "--rsockets nginx -e stderr -p {} -c {}",
        folder.display(),
        path("nginx.conf")
    );
    let server = start_listening(&daemon, &line);
    let url = format!("http://10.77.0.2:{port}");
    let curl = |options: &str| {
        Program::start(&daemon, &format!("--rsockets curl -sS -f {options}")).succeed()
    };
    let received = || std::fs::read(folder.join("got")).unwrap();
    let got = path("got");

    curl(&format!("-o {got} {url}/file"));
    assert!(received() == content);
    curl(&format!("-o {got} -r 5000-1999999 {url}/file"));
    assert!(received() == content[5000..2_000_000]);
    // Several transfers over one connection.
    let again = path("again");
    let said = curl(&format!("-v -o {got} {url}/file -o {again} {url}/file"));
    // "Re-using", with "http:" after it in curl 8.14, and "Reusing" in 8.23.
    let is_reused = ["Re-using existing", "Reusing existing"].map(|words| said.contains(words));
    assert!(is_reused.contains(&true), "{said}");
    assert!(received() == content && std::fs::read(folder.join("again")).unwrap() == content);
    curl(&format!("-T {} {url}/put/copy", path("www/file")));
    assert!(std::fs::read(folder.join("www/put/copy")).unwrap() == content);
    // nginx connects to itself.
    curl(&format!("-o {got} {url}/proxy/file"));
    assert!(received() == content);
    let (status, said) =
        Program::start(&daemon, &format!("--rsockets curl -sS -f {url}/none")).finish();
    assert!(!status.success() && said.contains("404"), "{said}");
    assert!(received_bytes(&daemon, "siw1") >= 100 << 20);
    end_server(server);
}
