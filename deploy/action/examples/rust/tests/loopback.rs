//! A SEND of a queue pair to itself on the first device, by the crate `ibverbs`.

/// Completions of the SEND and of its receive.
const BOTH: [u64; 2] = [1, 2];

#[test]
fn a_message_arrives() {
    let devices = ibverbs::devices().unwrap();
    let device = devices.iter().next().expect("no RDMA device");
    let context = device.open().unwrap();
    let queue = context.create_cq(16, 0).unwrap();
    let domain = context.alloc_pd().unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, ibverbs::ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(0)
        .build()
        .unwrap();
    let own_end = prepared.endpoint();
    let mut pair = prepared.handshake(own_end).unwrap();

    let mut memory = domain.allocate::<u64>(2).unwrap();
    memory[1] = 0x42;
    // SAFETY: the region is neither read nor written until both requests have completed.
    unsafe {
        pair.post_receive(&mut memory, ..1, BOTH[1]).unwrap();
        pair.post_send(&mut memory, 1.., BOTH[0]).unwrap();
    }
    let mut done = Vec::new();
    let mut completions = [ibverbs::ibv_wc::default(); 16];
    while done.len() < BOTH.len() {
        for completion in queue.poll(&mut completions).unwrap() {
            assert!(completion.is_valid(), "{:?}", completion.error());
            done.push(completion.wr_id());
        }
    }
    done.sort_unstable();
    assert_eq!(done, BOTH);
    assert_eq!(memory[0], 0x42);
}
