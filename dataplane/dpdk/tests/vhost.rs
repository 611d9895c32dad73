//! vhost-user with virtio_user at its other end, in a process of its own without a test harness:
//! the vhost driver's threads outlive its ports, and must not run while exit handlers tear down the
//! libraries that they use.

mod common;

use common::{bytes, eal, filled, pool, start, unique};
use dpdk::{ChainBuilder, MbufCache, Port, RxBatch, TxBatch};

fn main() {
    println!("\nrunning 1 test");
    let passed = std::panic::catch_unwind(virtio_and_vhost_ports_carry_chains).is_ok();
    let word = if passed { "ok" } else { "FAILED" };
    println!("test virtio_and_vhost_ports_carry_chains ... {word}\n");
    println!(
        "test result: {word}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
        u8::from(passed),
        u8::from(!passed)
    );
    dpdk::exit_process(if passed { 0 } else { 101 });
}

/// A virtio port and its vhost backend, joined by a socket as for a guest or a container. Offloads
/// are negotiated, and chains keep their bytes.
fn virtio_and_vhost_ports_carry_chains() {
    let pool = pool(2047);
    let mut cache = MbufCache::new(&pool);
    let dir = std::env::temp_dir().join(format!("{}-{}", unique("siwd-vhost"), std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let socket = dir.join("sock");
    let socket = socket.display();
    let attach = |devargs: String| match Port::attach_vdev(eal(), &devargs) {
        Ok(port) => Some(port),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    };
    let Some(mut vhost) = attach(format!("net_vhost6,iface={socket},queues=1,tso=1")) else {
        return;
    };
    let (mut vhost_rx, mut vhost_tx) = start(&mut vhost, &pool, 1).remove(0);
    let Some(mut virtio) = attach(format!(
        "net_virtio_user6,path={socket},queues=1,mrg_rxbuf=1"
    )) else {
        return;
    };
    let (mut rx, mut tx) = start(&mut virtio, &pool, 1).remove(0);
    assert!(virtio.granted_caps().unwrap().offloads.multi_segs);

    for back in [false, true] {
        let (from, to) = if back {
            (&mut tx, &mut vhost_rx)
        } else {
            (&mut vhost_tx, &mut rx)
        };
        let (mut out, mut inn) = (TxBatch::new(), RxBatch::new());
        let mut chain = ChainBuilder::new(filled(&mut cache, &[1; 66]));
        chain.push(filled(&mut cache, &[2; 1448])).unwrap();
        let sent = chain.finish();
        let expected = bytes(&sent);
        out.push(sent).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let arrived = loop {
            from.tx_burst(&mut out);
            to.rx_burst(&mut inn);
            match inn.pop() {
                Some(m) => break m,
                None => std::thread::yield_now(),
            }
            assert!(
                std::time::Instant::now() < deadline,
                "no frame, back: {back}"
            );
        };
        assert_eq!(bytes(&arrived), expected);
    }
    drop((rx, tx, virtio, vhost_rx, vhost_tx, vhost));
    std::fs::remove_dir_all(&dir).unwrap();
    drop(cache);
    assert_eq!(pool.available_buffers(), 2047);
}
