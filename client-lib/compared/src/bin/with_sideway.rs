//! Transfers 1 MiB from one queue pair to another one by a WRITE with immediate data, and verifies it.

use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::AddressHandleAttribute;
use sideway::ibverbs::completion::{GenericCompletionQueue, WorkCompletionStatus};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::queue_pair::{
    PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState, SetScatterGatherEntry,
    WorkRequestFlags,
};
use std::error::Error;

const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let devices = DeviceList::new()?;
    let context = devices.get(0).ok_or("no device")?.open()?;
    let gid = context.query_gid(1, 0)?;
    let pd = context.alloc_pd()?;
    let source: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    let mut target = vec![0; LEN];
    // SAFETY: the buffers outlive their regions, and nothing accesses them during the transfer.
    let source_mr = unsafe { pd.reg_mr(source.as_ptr() as usize, LEN, AccessFlags::LocalWrite) }?;
    let rights = AccessFlags::LocalWrite | AccessFlags::RemoteWrite;
    // SAFETY: as above.
    let target_mr = unsafe { pd.reg_mr(target.as_mut_ptr() as usize, LEN, rights) }?;

    let cq = context.create_cq_builder().setup_cqe(16).build()?;
    let cq = GenericCompletionQueue::from(cq);
    let mut builder = pd.create_qp_builder();
    builder
        .setup_send_cq(cq.clone())
        .setup_recv_cq(cq.clone())
        .setup_max_send_wr(16)
        .setup_max_recv_wr(16);
    let (mut sender, mut receiver) = (builder.build()?, builder.build()?);
    let numbers = [sender.qp_number(), receiver.qp_number()];
    for (qp, peer) in [(&mut sender, numbers[1]), (&mut receiver, numbers[0])] {
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(1)
            .setup_access_flags(rights);
        qp.modify(&init)?;
        let mut address = AddressHandleAttribute::new();
        address
            .setup_port(1)
            .setup_grh_src_gid_index(0)
            .setup_grh_dest_gid(&gid)
            .setup_grh_hop_limit(1);
        let mut ready_to_receive = QueuePairAttribute::new();
        ready_to_receive
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(Mtu::Mtu1024)
            .setup_dest_qp_num(peer)
            .setup_rq_psn(1)
            .setup_max_dest_read_atomic(1)
            .setup_min_rnr_timer(12)
            .setup_address_vector(&address);
        qp.modify(&ready_to_receive)?;
        let mut ready_to_send = QueuePairAttribute::new();
        ready_to_send
            .setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(1)
            .setup_timeout(12)
            .setup_retry_cnt(7)
            .setup_rnr_retry(7)
            .setup_max_read_atomic(1);
        qp.modify(&ready_to_send)?;
    }

    let mut receives = receiver.start_post_recv();
    receives.construct_wr(2);
    receives.post()?;
    let mut sends = sender.start_post_send();
    let request = sends
        .construct_wr(1, WorkRequestFlags::Signaled)
        .setup_write_imm(target_mr.rkey(), target_mr.get_ptr() as u64, 7);
    // SAFETY: the source stays allocated and unchanged until the request has completed.
    unsafe { request.setup_sge(source_mr.lkey(), source_mr.get_ptr() as u64, LEN as u32) };
    sends.post()?;
    let mut completed = 0;
    while completed < 2 {
        // An error means that the queue is empty.
        let Ok(poller) = cq.start_poll() else {
            continue;
        };
        for completion in poller {
            if completion.status() != WorkCompletionStatus::Success as u32 {
                return Err(
                    format!("{:?}", WorkCompletionStatus::from(completion.status())).into(),
                );
            }
            completed += 1;
        }
    }

    drop(target_mr);
    assert_eq!(target, source);
    println!("ok");
    Ok(())
}
