//! QEMU migrates a running guest over RDMA (`migrate rdma:HOST:PORT`) between two processes on one
//! daemon.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use crate::common::programs::{Program, await_listeners, is_installed};
use crate::common::{Daemon, PATIENCE};
use serde_json::{Value, json};

/// Address of the guest's counter, in real mode.
const COUNTER: u32 = 0x500;

/// Writes a firmware that only increments the counter.
fn write_firmware(path: &Path) {
    let mut rom = vec![0u8; 0x10000];
    // cli; xor ax, ax; mov ds, ax; again: inc dword [COUNTER]; jmp again
    let code = [
        0xFA, 0x31, 0xC0, 0x8E, 0xD8, 0x66, 0xFF, 0x06, 0x00, 0x05, 0xEB, 0xF9,
    ];
    rom[..code.len()].copy_from_slice(&code);
    // Reset vector: jmp F000:0000
    rom[0xFFF0..0xFFF5].copy_from_slice(&[0xEA, 0x00, 0x00, 0x00, 0xF0]);
    std::fs::write(path, rom).unwrap();
}

/// The QMP connection to one QEMU.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(path: &Path) -> Monitor {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) => assert!(start.elapsed() < PATIENCE, "no monitor: {error}"),
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.read();
        monitor.ask("qmp_capabilities", &json!({}));
        monitor
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// Executes a command and returns its result; events before it are skipped.
    fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        self.0
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .unwrap();
        loop {
            let mut answer = self.read();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(result) = answer.get_mut("return") {
                return result.take();
            }
        }
    }

    fn counter(&mut self) -> u32 {
        let line = json!({ "command-line": format!("xp /1wx {COUNTER:#x}") });
        let said = self.ask("human-monitor-command", &line);
        let said = said.as_str().unwrap();
        let value = said.split("0x").last().unwrap().trim();
        u32::from_str_radix(value, 16).unwrap()
    }

    /// Waits until the guest's counter increases.
    fn await_progress(&mut self) {
        let (first, start) = (self.counter(), Instant::now());
        while self.counter() == first {
            assert!(start.elapsed() < PATIENCE, "the guest stands still");
        }
    }
}

#[test]
fn a_running_guest_moves_to_another_qemu() {
    if !is_installed("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    let daemon = Daemon::loopback();
    let folder = daemon.dir.path();
    let rom = folder.join("counter.rom");
    write_firmware(&rom);
    let line = |name: &str| {
        format!(
            "qemu-system-x86_64 -M pc,accel=tcg -m 64 -nodefaults -display none -bios {} \
             -qmp unix:{},server=on,wait=off",
            rom.display(),
            folder.join(name).display()
        )
    };
    let incoming = format!("{} -incoming rdma:10.77.0.2:4444", line("to"));
    let _to = Program::start(&daemon, &incoming);
    let _from = Program::start(&daemon, &line("from"));
    await_listeners(&daemon, 1);
    let mut from = Monitor::connect(&folder.join("from"));
    let mut to = Monitor::connect(&folder.join("to"));
    from.await_progress();
    from.ask("migrate", &json!({ "uri": "rdma:10.77.0.2:4444" }));
    let start = Instant::now();
    let migration = loop {
        let state = from.ask("query-migrate", &json!({}));
        match state["status"].as_str().unwrap() {
            "completed" => break state,
            "failed" | "cancelled" => panic!("{state}"),
            _ => assert!(start.elapsed() < PATIENCE, "{state}"),
        }
    };
    assert!(
        migration["ram"]["transferred"].as_u64().unwrap() > 0,
        "{migration}"
    );
    let moved = from.counter();
    to.await_progress();
    assert!(to.counter().wrapping_sub(moved) < 1 << 31);
    assert_eq!(to.ask("query-status", &json!({}))["status"], "running");
}
