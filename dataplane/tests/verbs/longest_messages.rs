//! Messages of 2^32-1 bytes, RDMAP's maximum, through a running siwd. The memory is far smaller: a
//! fast registration may list the same page many times.

use std::ops::Range;
use std::sync::Arc;

use crate::common::*;
use siw::{Arena, FastMr, QpInit, RecvWr, SendData, SendWr, Sge, Wc, WcOpcode, WcStatus, inc_rkey};

/// 512 pages of 2^23 bytes are 2^32 bytes; the last page lacks one byte.
const PAGE: usize = 1 << 23;
const PAGES: usize = 512;
const LONGEST: u32 = u32::MAX;
/// Pages with memory of their own, by their index in the message: the one that begins at 2^31, and
/// the last. All other indices share one page.
const MARKED: [(usize, usize); 2] = [(PAGES / 2, 1), (PAGES - 1, 2)];

/// 2^32-1 bytes under one key, starting at address 0.
struct Long {
    arena: Arc<Arena>,
    fast: FastMr,
}

impl Long {
    fn new(e: &End) -> Long {
        let arena = Arena::alloc(&e.ctx, 3 * PAGE, false).unwrap();
        let mut fast = e.pd.alloc_fast_mr(&arena, PAGES as u32).unwrap();
        let mut pages: Vec<Range<usize>> = vec![0..PAGE; PAGES];
        for (place, page) in MARKED {
            pages[place] = page * PAGE..(page + 1) * PAGE;
        }
        pages[PAGES - 1].end -= 1;
        assert_eq!(fast.map_ranges(&pages, 23).unwrap(), PAGES);
        assert_eq!(fast.len(), LONGEST as usize);
        let key = inc_rkey(fast.key());
        e.qp.post_send(&[fast.register_request(0, key, 0, ALL).unwrap()])
            .unwrap();
        done(e, WcOpcode::LOCAL_INV);
        Long { arena, fast }
    }

    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge {
            addr: at,
            length,
            lkey: self.fast.key(),
        }
    }

    fn fill(&self, seed: u64) {
        self.arena.write(0, &pattern(seed, 3 * PAGE)).unwrap();
    }

    /// The whole memory except the byte beyond the message.
    fn contents(&self) -> Vec<u8> {
        let mut v = vec![0; 3 * PAGE - 1];
        self.arena.read(0, &mut v).unwrap();
        v
    }
}

fn done(e: &End, what: WcOpcode) -> Wc {
    let wc = e.wc();
    assert_eq!((wc.status, wc.opcode), (WcStatus::SUCCESS, what));
    wc
}

#[test]
fn a_write_a_read_and_a_send_of_the_longest_message_arrive_whole() {
    let daemon = Daemon::loopback();
    let three = QpInit {
        max_recv_sge: 3,
        ..Default::default()
    };
    let a = End::new(&daemon.context(), 64);
    let b = End::with(&daemon.context(), 64, &three);
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    assert_eq!(a.ctx.limits().max_msg, u64::from(LONGEST));
    let (from, to) = (Long::new(&a), Long::new(&b));
    let all = [from.sge(0, LONGEST)];
    let key = to.fast.key();

    from.fill(1);
    a.qp.post_send(&[SendWr::write(1, SendData::Sges(&all), 0, key)])
        .unwrap();
    done(&a, WcOpcode::RDMA_WRITE);
    // The answer to a READ shows that everything was placed.
    a.qp.post_send(&[SendWr::read(2, &[], 0, key)]).unwrap();
    done(&a, WcOpcode::RDMA_READ);
    assert!(from.contents() == to.contents(), "the bytes of the WRITE");

    to.fill(2);
    a.qp.post_send(&[SendWr::read(3, &all, 0, key)]).unwrap();
    let wc = done(&a, WcOpcode::RDMA_READ);
    assert_eq!(wc.byte_len, LONGEST);
    assert!(from.contents() == to.contents(), "the bytes of the READ");

    // Three elements whose boundaries are far from page boundaries.
    from.fill(3);
    let sink = [
        to.sge(0, 1),
        to.sge(1, (1 << 31) + 4),
        to.sge((1 << 31) + 5, (1 << 31) - 6),
    ];
    b.qp.post_recv(&[RecvWr {
        wr_id: 4,
        sges: &sink,
    }])
    .unwrap();
    a.qp.post_send(&[SendWr::send(5, SendData::Sges(&all))])
        .unwrap();
    assert_eq!(done(&b, WcOpcode::RECV).byte_len, LONGEST);
    done(&a, WcOpcode::SEND);
    assert!(from.contents() == to.contents(), "the bytes of the SEND");
}

#[test]
fn a_message_of_one_byte_more_is_refused_where_it_is_posted() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 64);
    let from = Long::new(&a);
    let more = [from.sge(0, LONGEST), a.mr.sge(0, 1)];
    let wr = SendWr::send(1, SendData::Sges(&more));
    assert!(a.qp.post_send(&[wr]).is_err());
    let wr = RecvWr {
        wr_id: 1,
        sges: &more,
    };
    assert!(a.qp.post_recv(&[wr]).is_err());
    // Nothing of it is left in the queues.
    b.qp.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &[],
    }])
    .unwrap();
    a.qp.post_send(&[SendWr::send(3, SendData::Sges(&[]))])
        .unwrap();
    assert_eq!(done(&b, WcOpcode::RECV).wr_id, 2);
    assert_eq!(done(&a, WcOpcode::SEND).wr_id, 3);
}
