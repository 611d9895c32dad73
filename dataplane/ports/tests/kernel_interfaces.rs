//! Ports on interfaces of the kernel, on normal pages.

use dpdk::{Eal, EalConfig, Mbuf, Mempool, PortConfig, RxBatch, TxBatch};
use siw_ports::{Port, ReceiveQueue, RxQueue, TransmitQueue, TxQueue};

fn environment() -> (Eal, Mempool) {
    let eal = Eal::init(EalConfig {
        file_prefix: format!("siwd-ports-test-{}", std::process::id()),
        hugepages: false,
        memory_mb: 192,
        log_level: "warning".into(),
        ..EalConfig::default()
    });
    let eal = eal.expect("DPDK starts on normal pages");
    let pool = Mempool::new(&eal, "frames", 2047, 0, 2048, None).unwrap();
    (eal, pool)
}

/// Configures a port with a queue in each direction, starts it and takes the queues.
fn start(port: &mut Port, pool: &Mempool) -> (RxQueue, TxQueue) {
    port.configure(&PortConfig::default(), std::slice::from_ref(pool))
        .unwrap();
    let (rx, tx) = port.start().unwrap().remove(0);
    (rx.unwrap(), tx.unwrap())
}

/// A tap port and an af_packet port on its interface: the kernel carries frames from each to the
/// other.
#[test]
fn tap_and_af_packet_ports_carry_frames_through_the_kernel() {
    let (eal, pool) = environment();
    let iface = format!("siwt{}", std::process::id() % 1_000_000);
    let (tap, tap_queues, mut packet) = loop {
        let mut tap = match Port::attach_vdev(&eal, &format!("net_tap5,iface={iface}")) {
            Ok(port) => port,
            Err(e) => return println!("skipped: {e}"),
        };
        // Started first, since that brings the interface up.
        let tap_queues = start(&mut tap, &pool);
        match Port::attach_vdev(&eal, &format!("net_af_packet5,iface={iface}")) {
            Ok(packet) => break (tap, tap_queues, packet),
            // The driver derives its fanout group from the process and interface numbers, and
            // another process may use the same group: a new interface gets another one.
            Err(e) if e.to_string().contains("PACKET_FANOUT") => {}
            Err(e) => panic!("{e}"),
        }
    };
    let (mut tap_rx, mut tap_tx) = tap_queues;
    let caps = tap.granted_caps().unwrap().offloads;
    assert!(caps.tx_checksum && caps.rx_checksum && caps.tso && caps.multi_segs);
    assert!(caps.rx_interrupt, "a tap has a descriptor to wait on");
    tap.set_mac_address([2, 0, 0, 0, 0, 9]).unwrap();
    assert_eq!(tap.mac_address().unwrap(), [2, 0, 0, 0, 0, 9]);
    let (mut rx, mut tx) = start(&mut packet, &pool);
    // An EtherType for local experiments (IEEE 802, 88b5), to distinguish the frame from the
    // kernel's own traffic on the interface.
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 0, 0, 9, 0x88, 0xb5]);
    frame.extend([7; 86]);

    for back in [false, true] {
        let (from, to) = if back {
            (&mut tx, &mut tap_rx)
        } else {
            (&mut tap_tx, &mut rx)
        };
        let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
        let mut filled = Mbuf::alloc(&pool).unwrap();
        assert!(filled.append_slice(&frame));
        out.push(filled).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let arrived = loop {
            from.tx_burst(&mut out);
            to.rx_burst(&mut inn);
            match inn.drain().find(|m| m.data()[12..14] == [0x88, 0xb5]) {
                Some(m) => break m,
                None => std::thread::yield_now(),
            }
            assert!(
                std::time::Instant::now() < deadline,
                "no frame, back: {back}"
            );
        };
        assert_eq!(arrived.data(), frame);
    }
    drop((tap_rx, tap_tx, rx, tx, packet, tap));
    let left = std::path::Path::new("/sys/class/net").join(&iface).exists();
    assert!(!left, "the interface goes with its port");
}
