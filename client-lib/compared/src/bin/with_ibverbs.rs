//! Transfers 1 MiB from one queue pair to another one, and verifies it. By a SEND: this version of the
//! crate has no WRITE.

use ibverbs::{ibv_qp_type, ibv_wc};
use std::error::Error;

const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let devices = ibverbs::devices()?;
    let context = devices.get(0).ok_or("no device")?.open()?;
    let pd = context.alloc_pd()?;
    let mut source = pd.allocate::<u8>(LEN)?;
    let mut target = pd.allocate::<u8>(LEN)?;
    let pattern: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    source.copy_from_slice(&pattern);

    let cq = context.create_cq(16, 0)?;
    let prepare = || {
        pd.create_qp(&cq, &cq, ibv_qp_type::IBV_QPT_RC)
            .set_gid_index(0)
            .build()
    };
    let (sender, receiver) = (prepare()?, prepare()?);
    let ends = (sender.endpoint(), receiver.endpoint());
    let (mut sender, mut receiver) = (sender.handshake(ends.1)?, receiver.handshake(ends.0)?);

    // SAFETY: the target is not accessed until the request has completed.
    unsafe { receiver.post_receive(&mut target, .., 2) }?;
    // SAFETY: the source is not accessed until the request has completed.
    unsafe { sender.post_send(&mut source, .., 1) }?;
    let mut completed = 0;
    let mut completions = [ibv_wc::default(); 2];
    while completed < 2 {
        for completion in cq.poll(&mut completions)? {
            if let Some((status, _)) = completion.error() {
                return Err(format!("work request failed: status {status}").into());
            }
            completed += 1;
        }
    }

    assert_eq!(&target[..], &pattern[..]);
    println!("ok");
    Ok(())
}
