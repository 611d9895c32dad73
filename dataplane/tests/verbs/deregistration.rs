//! Time at which a deregistration is answered: frames that refer to the memory have left the ports
//! by then.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::*;
use siw::{Access, Opcode, SendData, SendWr, WcStatus, WrFlags};

/// Starts a ring pair whose frames refer to registered memory or contain copies.
fn start_with(payload: &str) -> Daemon {
    let line = format!("pair = \"lo\"\ntx_payload = \"{payload}\"");
    let config = LOOPBACK.replace("pair = \"lo\"", &line);
    let one_worker = "[workers]\ncores = [0]";
    Daemon::start(&config.replace("[workers]", one_worker), &[])
}

/// Waits until the daemon's worker sleeps and thus holds no memory key.
fn await_sleep(d: &Daemon) {
    let pid = d.child.id();
    let end = Instant::now() + PATIENCE;
    loop {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let sleeps = threads.flatten().any(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.contains("(siwd-worker-0) S")
        });
        if sleeps {
            return;
        }
        assert!(Instant::now() < end, "the worker does not sleep");
        std::thread::yield_now();
    }
}

#[test]
fn a_deregistration_waits_for_frames_that_a_worker_may_hold() {
    for payload in ["copy", "reference"] {
        let d = start_with(payload);
        let ctx = d.context();
        let device = ctx.query_devices().unwrap();
        assert!(!device.is_empty());
        let pd = ctx.alloc_pd().unwrap();
        let mr = pd.alloc_mr(1 << 16, Access::LOCAL_WRITE).unwrap();
        await_sleep(&d);
        let Some(worker) = StoppedThread::stop(d.child.id(), "siwd-worker-0") else {
            return;
        };
        let (tell, told) = mpsc::channel();
        let caller = std::thread::spawn(move || {
            mr.dereg().unwrap();
            tell.send(()).unwrap();
        });
        if payload == "copy" {
            // A sleeping worker holds nothing.
            told.recv_timeout(PATIENCE).unwrap();
            drop(worker);
        } else {
            let early = told.recv_timeout(Duration::from_millis(200));
            assert!(
                early.is_err(),
                "answered before the worker checked its ports"
            );
            drop(worker);
            told.recv_timeout(PATIENCE).unwrap();
        }
        caller.join().unwrap();
        assert!(d.stop().success());
    }
}

/// Registers and deregisters memory while a connection continuously sends other memory by
/// reference.
#[test]
fn a_deregistration_ends_beside_a_stream_of_frames() {
    const LEN: usize = 64 << 10;
    const ROUNDS: u64 = 200;
    let d = start_with("reference");
    let (a, b) = pair(&d, LEN);
    let write = |memory: &siw::Mr, wr_id| {
        a.qp.post_send(&[SendWr {
            opcode: Opcode::Write,
            flags: WrFlags::SIGNALED,
            wr_id,
            imm: 0,
            remote_addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            data: SendData::Sges(&[memory.sge(0, LEN)]),
        }])
        .unwrap();
    };
    let pd = a.mr.pd();
    for round in 0..ROUNDS {
        let fleeting = pd.alloc_mr(LEN, Access::LOCAL_WRITE).unwrap();
        fleeting.write(0, &pattern(round, LEN)).unwrap();
        // The requests behind it are in progress while the memory is deregistered.
        for (memory, wr_id) in [(&a.mr, 1), (&fleeting, 2), (&a.mr, 3), (&a.mr, 4)] {
            write(memory, wr_id);
        }
        for wr_id in 1..=2 {
            let wc = a.wc();
            assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::SUCCESS));
        }
        fleeting.dereg().unwrap();
        for wr_id in 3..=4 {
            let wc = a.wc();
            assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::SUCCESS));
        }
    }
    ping(&a, &b);
    assert!(d.stop().success());
}
