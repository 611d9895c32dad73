//! QEMU migrates a running guest over RDMA (`migrate rdma:HOST:PORT`) between two processes on one
//! daemon.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use crate::common::programs::{Program, await_listeners, is_installed};
use crate::common::{Daemon, PATIENCE};
use serde_json::{Value, json};

/// Address of the guest's counter, in real mode.
const COUNTER: u32 = 0x500;
/// Address of the number of reads from the disk with wrong data.
const ERRORS: u32 = 0x504;
/// Octet that the disk consists of.
const DATA: u8 = 0x5A;

/// Start of a firmware: cli; xor ax, ax; mov ds, ax.
const START: [u8; 5] = [0xFA, 0x31, 0xC0, 0x8E, 0xD8];
/// invlpg [COUNTER]; inc dword [COUNTER].
///
/// Before version 9.0 QEMU's TCG loses writes of a migrating guest, over any transport: after the log
/// of dirty pages has been read, writes to pages in its TLB are not logged ("physmem: Fix migration
/// dirty bitmap coherency with TCG memory access"). Without the entry in the TLB they are.
const COUNT: [u8; 10] = [0x0F, 0x01, 0x3E, 0x00, 0x05, 0x66, 0xFF, 0x06, 0x00, 0x05];

/// Firmware that only increments the counter.
fn counting_firmware() -> Vec<u8> {
    // jmp to COUNT
    [&START[..], &COUNT, &[0xEB, 0xF4]].concat()
}

/// Firmware that reads 64 KiB from the disk to 0x10000 by DMA, again and again; counts the reads, and
/// those after which not all octets are right.
fn reading_firmware() -> Vec<u8> {
    fn out_8(code: &mut Vec<u8>, port: u16, value: u8) {
        let [low, high] = port.to_le_bytes();
        code.extend([0xBA, low, high, 0xB0, value, 0xEE]);
    }
    fn out_32(code: &mut Vec<u8>, port: u16, value: u32) {
        let [low, high] = port.to_le_bytes();
        code.extend([0xBA, low, high, 0x66, 0xB8]);
        code.extend(value.to_le_bytes());
        code.extend([0x66, 0xEF]);
    }
    fn store_32(code: &mut Vec<u8>, address: u16, value: u32) {
        code.extend([0x66, 0xC7, 0x06]);
        code.extend(address.to_le_bytes());
        code.extend(value.to_le_bytes());
    }
    const CONFIG_ADDRESS: u16 = 0xCF8;
    const CONFIG_DATA: u16 = 0xCFC;
    /// The IDE function of the PIIX3.
    const IDE: u32 = 0x8000_0900;
    /// Ports of its bus master: command, status, table of areas.
    const BUS_MASTER: u16 = 0xC000;
    const AREAS: u16 = 0x600;
    let mut code = START.to_vec();
    out_32(&mut code, CONFIG_ADDRESS, IDE + 0x20);
    out_32(&mut code, CONFIG_DATA, u32::from(BUS_MASTER) + 1);
    out_32(&mut code, CONFIG_ADDRESS, IDE + 4);
    // Ports and bus mastering.
    out_32(&mut code, CONFIG_DATA, 5);
    // One area of 64 KiB.
    store_32(&mut code, AREAS, 0x10000);
    store_32(&mut code, AREAS + 4, 0x8000_0000);
    out_32(&mut code, BUS_MASTER + 4, AREAS.into());
    // mov ax, 0x1000; mov es, ax; cld
    code.extend([0xB8, 0x00, 0x10, 0x8E, 0xC0, 0xFC]);
    let again = code.len();
    // xor di, di; mov cx, 0x4000; xor eax, eax; rep stosd
    code.extend([
        0x31, 0xFF, 0xB9, 0x00, 0x40, 0x66, 0x31, 0xC0, 0xF3, 0x66, 0xAB,
    ]);
    out_8(&mut code, BUS_MASTER, 8);
    out_8(&mut code, BUS_MASTER + 2, 6);
    // READ DMA of 128 sectors.
    for (port, value) in [
        (0x1F6, 0xE0),
        (0x1F2, 0x80),
        (0x1F3, 0),
        (0x1F4, 0),
        (0x1F5, 0),
        (0x1F7, 0xC8),
    ] {
        out_8(&mut code, port, value);
    }
    out_8(&mut code, BUS_MASTER, 9);
    // mov dx, BUS_MASTER + 2; wait: in al, dx; test al, 1; jnz wait
    code.extend([0xBA, 0x02, 0xC0, 0xEC, 0xA8, 0x01, 0x75, 0xFB]);
    // xor di, di; mov cx, 0x4000; mov eax, DATA; repe scasd; je right; inc dword [ERRORS]; right:
    code.extend([
        0x31, 0xFF, 0xB9, 0x00, 0x40, 0x66, 0xB8, DATA, DATA, DATA, DATA, 0xF3, 0x66, 0xAF, 0x74,
        0x05, 0x66, 0xFF, 0x06, 0x04, 0x05,
    ]);
    code.extend(COUNT);
    // jmp again
    let back = again as i16 - (code.len() as i16 + 3);
    code.push(0xE9);
    code.extend(back.to_le_bytes());
    code
}

/// Writes a firmware.
fn write_firmware(path: &Path, code: &[u8]) {
    let mut rom = vec![0u8; 0x10000];
    rom[..code.len()].copy_from_slice(code);
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
        self.word(COUNTER)
    }

    /// Reads a word of the guest's memory.
    fn word(&mut self, address: u32) -> u32 {
        let line = json!({ "command-line": format!("xp /1wx {address:#x}") });
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
    move_guest(&counting_firmware(), "");
}

/// QEMU reads from a disk into the guest's memory with O_DIRECT and io_submit(2), while it registers
/// that memory.
#[test]
fn a_guest_that_reads_from_a_disk_moves_to_another_qemu() {
    let mut disk = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    disk.write_all(&[DATA; 1 << 20]).unwrap();
    disk.as_file().sync_all().unwrap();
    let mut options = std::fs::File::options();
    options.read(true).custom_flags(nix::libc::O_DIRECT);
    if let Err(error) = options.open(disk.path()) {
        println!("skipped: O_DIRECT: {error}");
        return;
    }
    let drive = format!(
        "-drive file={},file.locking=off,format=raw,if=ide,cache=none,aio=native",
        disk.path().display()
    );
    move_guest(&reading_firmware(), &drive);
}

/// Migrates a guest with a firmware and a drive while it runs.
fn move_guest(firmware: &[u8], drive: &str) {
    if !is_installed("qemu-system-x86_64", "qemu-system-x86") {
        return;
    }
    let daemon = Daemon::loopback();
    let folder = daemon.dir.path();
    let rom = folder.join("guest.rom");
    write_firmware(&rom, firmware);
    let line = |name: &str| {
        format!(
            "qemu-system-x86_64 -M pc,accel=tcg -m 64 -nodefaults -display none -bios {} \
             -qmp unix:{},server=on,wait=off {drive}",
            rom.display(),
            folder.join(name).display()
        )
    };
    // Without running until it is told to.
    let incoming = format!("{} -S -incoming rdma:10.77.0.2:4444", line("to"));
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
    let start = Instant::now();
    while to.ask("query-status", &json!({}))["status"] == "inmigrate" {
        assert!(start.elapsed() < PATIENCE, "the guest does not arrive");
    }
    assert_eq!(
        to.counter(),
        from.counter(),
        "memory is not that of the source"
    );
    to.ask("cont", &json!({}));
    to.await_progress();
    assert_eq!(to.ask("query-status", &json!({}))["status"], "running");
    assert_eq!((from.word(ERRORS), to.word(ERRORS)), (0, 0), "wrong data");
}
