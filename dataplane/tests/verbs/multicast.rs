//! Multicast groups of queue pairs of datagrams: members on two devices, local copies, the end of memberships.

use std::net::IpAddr;
use std::time::Duration;

use nix::libc;
use siw::{
    Ah, AhAttr, Error, GRH_LEN, MULTICAST_QPN, QpInit, RecvWr, SendData, SendWr, Wc, WcFlags,
    WcStatus,
};

use crate::common::*;

const QKEY: u32 = 0x0123_4567;
const SHORT: Duration = Duration::from_millis(200);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn datagram_end(daemon: &Daemon, device: u32) -> End {
    let end = End::with(&daemon.context(), 4096, &QpInit::default());
    end.qp.start_datagrams(device, QKEY).unwrap();
    end
}

fn post_receive(end: &End) {
    let sges = &[end.mr.sge(0, 1000)];
    end.qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
}

fn group_handle(end: &End, device: u32, group: &str) -> Ah {
    end.ctx.create_ah(&AhAttr::new(device, ip(group))).unwrap()
}

fn send(end: &End, ah: &Ah, text: &[u8]) {
    let request = SendWr::send(1, SendData::Inline(text));
    let request = request.with_destination(ah.number(), MULTICAST_QPN, QKEY);
    end.qp.post_send(&[request]).unwrap();
}

/// Waits for completions, the sends among them.
fn completions(end: &End, count: usize) -> usize {
    let done: Vec<_> = (0..count).map(|_| end.wc()).collect();
    assert!(done.iter().all(|wc| wc.status == WcStatus::SUCCESS));
    done.iter().filter(|wc| wc.wr_id == 2).count()
}

fn is_silent(end: &End) {
    std::thread::sleep(SHORT);
    assert_eq!(end.cq.poll(&mut [Wc::default()]).unwrap(), 0);
}

fn errno(result: Result<(), Error>) -> i32 {
    match result.unwrap_err() {
        Error::Refused { errno, .. } => errno,
        error => panic!("{error}"),
    }
}

#[test]
fn every_member_of_a_group_gets_a_copy() {
    check_copies(&Daemon::loopback());
}

#[test]
fn members_of_all_workers_get_a_copy() {
    skip_if!(two_cores());
    let config = LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]");
    check_copies(&Daemon::start(&config, &[]));
}

fn check_copies(daemon: &Daemon) {
    // Two members on each device, and one queue pair that is none.
    let ends = [0, 0, 1, 1, 1].map(|device| datagram_end(daemon, device));
    for group in ["239.1.2.3", "ff15::1:2"] {
        for end in &ends[..4] {
            end.qp.attach_group(ip(group)).unwrap();
            end.qp.attach_group(ip(group)).unwrap();
        }
        ends.iter().for_each(post_receive);
        let ah = group_handle(&ends[0], 0, group);
        send(&ends[0], &ah, b"to all");
        // The sender is a member.
        assert_eq!(completions(&ends[0], 2), 1);
        for (place, end) in ends.iter().enumerate().take(4).skip(1) {
            println!("{group}: member {place}");
            let got = end.wc();
            assert_eq!((got.wr_id, got.status), (2, WcStatus::SUCCESS));
            assert_eq!(got.byte_len as usize, GRH_LEN + 6);
            assert_eq!(got.src_qp, ends[0].qp.qp_num());
            assert!(got.flags.contains(WcFlags::GRH));
            assert_eq!(end.read(GRH_LEN, 6), b"to all");
            let destination = match ip(group) {
                IpAddr::V4(group) => group.octets().to_vec(),
                IpAddr::V6(group) => group.octets().to_vec(),
            };
            let grh = end.read(0, GRH_LEN);
            assert_eq!(grh[GRH_LEN - destination.len()..], destination);
        }
        // Another group, and another Q_Key.
        let other = group_handle(&ends[0], 0, "239.1.2.4");
        send(&ends[0], &other, b"nobody");
        let request = SendWr::send(1, SendData::Inline(b"wrong"));
        let request = request.with_destination(ah.number(), MULTICAST_QPN, QKEY + 1);
        ends[0].qp.post_send(&[request]).unwrap();
        assert_eq!(completions(&ends[0], 2), 0);
        // A former member, one after a reset, and one that is gone.
        ends[1].qp.detach_group(ip(group)).unwrap();
        ends.iter().take(4).for_each(|end| {
            if end.qp.qp_num() != ends[1].qp.qp_num() {
                post_receive(end);
            }
        });
        let ah = group_handle(&ends[3], 1, group);
        send(&ends[3], &ah, b"again");
        assert_eq!(completions(&ends[3], 2), 1);
        for end in [&ends[0], &ends[2]] {
            assert_eq!(end.wc().wr_id, 2);
            assert_eq!(end.read(GRH_LEN, 5), b"again");
        }
        is_silent(&ends[1]);
        is_silent(&ends[4]);
        for end in [0, 2, 3].map(|place: usize| &ends[place]) {
            end.qp.detach_group(ip(group)).unwrap();
        }
        // The receives of those that got nothing are still there.
        for end in [&ends[1], &ends[4]] {
            end.qp.reset().unwrap();
            let device = if std::ptr::eq(end, &ends[1]) { 0 } else { 1 };
            end.qp.start_datagrams(device, QKEY).unwrap();
        }
    }
}

#[test]
fn memberships_end_with_a_reset_their_queue_pair_and_their_client() {
    let daemon = Daemon::loopback();
    let sender = datagram_end(&daemon, 0);
    let group = "239.5.5.5";
    let ah = group_handle(&sender, 0, group);
    let member = datagram_end(&daemon, 1);
    member.qp.attach_group(ip(group)).unwrap();
    member.qp.reset().unwrap();
    member.qp.start_datagrams(1, QKEY).unwrap();
    post_receive(&member);
    send(&sender, &ah, b"lost");
    assert_eq!(completions(&sender, 1), 0);
    is_silent(&member);
    assert_eq!(errno(member.qp.detach_group(ip(group))), libc::EINVAL);
    for _ in 0..300 {
        let gone = datagram_end(&daemon, 1);
        gone.qp.attach_group(ip(group)).unwrap();
    }
    member.qp.attach_group(ip(group)).unwrap();
    send(&sender, &ah, b"here");
    assert_eq!(member.wc().wr_id, 2);
    assert_eq!(member.read(GRH_LEN, 4), b"here");
    assert!(daemon.stop().success());
}

#[test]
fn wrong_memberships_are_refused_with_their_reason() {
    let daemon = Daemon::loopback();
    let end = datagram_end(&daemon, 0);
    assert_eq!(errno(end.qp.attach_group(ip("10.77.0.2"))), libc::EINVAL);
    assert_eq!(errno(end.qp.detach_group(ip("239.1.1.1"))), libc::EINVAL);
    let connected = End::new(&daemon.context(), 4096);
    let refused = connected.qp.attach_group(ip("239.1.1.1"));
    assert_eq!(errno(refused), libc::EINVAL);
    let full = (0..=64u8).map(|last| end.qp.attach_group([239, 1, 1, last].into()));
    let refused: Vec<_> = full.filter_map(Result::err).collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(daemon.stop().success());
}
