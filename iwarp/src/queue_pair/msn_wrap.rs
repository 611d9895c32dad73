//! Conformance 57: a stream of 2^32 messages is too long for a test, so this one starts at its end.

use crate::ddp::Msn;
use crate::*;
use siw_memory::{KeyReader, KeyTable, RegisteredMemory};
use siw_shm::wqe::{RecvWr, SendData, SendWr};
use siw_shm::{RecvWqe, SendWqe, Wc};

struct Env {
    keys: KeyReader,
    sq: Vec<SendWqe>,
    recv: RecvWqe,
    done: Vec<u64>,
    send: SendWqe,
}

impl QpEnv for Env {
    fn keys(&self) -> &KeyReader {
        &self.keys
    }
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault> {
        Ok(self.sq.pop().map(|w| {
            self.send = w;
            &self.send
        }))
    }
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        Ok(Some(&self.recv))
    }
    fn complete_send(&mut self, _: Option<&Wc>) {}
    fn complete_recv(&mut self, cqe: &Wc) {
        self.done.push(cqe.wr_id);
    }
    fn is_released(&self, _: ExtBufRef) -> bool {
        true
    }
    fn post_event(&mut self, _: QpEvent) {}
}

struct Bytes(Vec<u8>);

impl FrameBuilder for Bytes {
    fn append_bytes(&mut self, b: &[u8]) {
        self.0.extend_from_slice(b);
    }
    fn append_memory(&mut self, _: &RegisteredMemory, _: u64, _: u32, _: ExtBufRef) {}
    fn contiguous_room(&mut self, want: usize) -> usize {
        want
    }
    fn reserve(&mut self, _: usize) -> Option<&mut [u8]> {
        None
    }
}

fn end(initiator: bool) -> (QueuePair, Env) {
    let mut qp = QueuePair::new(QpInitAttr {
        qpn: 1,
        pd: 1,
        max_send_wr: 8,
        max_recv_wr: 8,
        sq_sig_all: false,
    });
    let n = NegotiatedParameters {
        initiator,
        crc: true,
        markers_in: false,
        markers_out: false,
        ird: 8,
        ord: 8,
        rtr: None,
        revision: 2,
    };
    qp.set_first_msn(Msn(u32::MAX));
    qp.set_rts(n, 1448);
    let keys = KeyTable::new(8, 1)
        .register_reader()
        .expect("a reader is free");
    let recv = RecvWqe::from_wr(&RecvWr {
        wr_id: 5,
        sges: &[],
    })
    .expect("valid");
    let env = Env {
        keys,
        sq: Vec::new(),
        recv,
        done: Vec::new(),
        send: SendWqe::new(),
    };
    (qp, env)
}

/// RFC 5041 section 4.3: the number after 0xFFFFFFFF is 0, in every queue.
#[test]
fn c57_msns_wrap_to_zero_on_both_sides() {
    let ((mut a, mut ea), (mut b, mut eb)) = (end(true), end(false));
    let send = SendWr::send(1, SendData::Sges(&[]));
    let read = SendWr::read(2, &[], 0, 1);
    for d in [
        send,
        read,
        SendWr::send_with_imm(3, SendData::Sges(&[]), 1),
        read,
    ] {
        ea.sq.push(SendWqe::from_wr(&d).expect("valid"));
    }
    let mut msns = Vec::new();
    while let Some(OutgoingFpdu { record: rec, .. }) = a.next_record(&mut ea, 1 << 16) {
        let mut f = Bytes(Vec::new());
        a.build_fpdu(&ea.keys, &rec, &mut f)
            .expect("no memory needed");
        msns.push((f.0[3] & 0x0f, f.0[12..16].to_vec()));
        b.receive_in_order(&mut eb, &mut ByteStream::from(&f.0[..]));
    }
    let (max, zero, one) = (vec![0xff; 4], vec![0; 4], vec![0, 0, 0, 1]);
    let want = [
        (1, max.clone()),
        (8, max),
        (3, zero.clone()),
        (1, zero),
        (3, one),
    ];
    assert_eq!(msns, want);
    assert_eq!(b.state(), RdmapState::Rts);
    assert_eq!(eb.done, [5, 5]);
}
