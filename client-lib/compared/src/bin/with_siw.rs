//! Transfers 1 MiB from one queue pair to another one by a WRITE with immediate data, and verifies it.

use siw::{Access, Context, Cq, PairOptions, QpInit, RecvWr, SendData, Wc, WcStatus};
use std::error::Error;

const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::open(None)?;
    let address = context.query_device(0)?.ips[0];
    let pd = context.alloc_pd()?;
    let source = pd.alloc_mr(LEN, Access::LOCAL_WRITE)?;
    let target = pd.alloc_mr(LEN, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let pattern: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    source.write(0, &pattern)?;

    let cq = Cq::new(&context, 16, None)?;
    let sender = pd.create_qp(&cq, &cq, &QpInit::default())?;
    let receiver = pd.create_qp(&cq, &cq, &QpInit::default())?;
    receiver.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &[],
    }])?;
    for (qp, peer) in [(&sender, &receiver), (&receiver, &sender)] {
        qp.connect_pair(&PairOptions {
            device: 0,
            local: address,
            peer: address,
            peer_qp_num: peer.qp_num(),
            ord: 1,
            ird: 1,
            denied_access: Access::NONE,
        })?;
    }

    let data = [source.slice(0..LEN)?];
    let request = target
        .remote()
        .write_with_imm(1, SendData::Sges(&data), 7)?;
    sender.post_send(&[request])?;
    let mut completions = [Wc::default()];
    for _ in 0..2 {
        cq.wait(&mut completions, None)?;
        if completions[0].status != WcStatus::SUCCESS {
            return Err(completions[0].status.as_str().into());
        }
    }

    let mut received = vec![0; LEN];
    target.read(0, &mut received)?;
    assert_eq!(received, pattern);
    println!("ok");
    Ok(())
}
