//! tshark, an independent implementation, dissects siwd's captures.

use crate::common::net::{judge, missing_program, tshark_fields};
use crate::common::*;
use siw::{CmEvent, Opcode, RecvWr, SendData, SendWr, WcStatus, WrFlags};

#[test]
fn tshark_dissects_every_kind_of_message_and_finds_only_good_crcs() {
    skip_if!(missing_program("tshark"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("loopback.pcapng");
    let daemon = Daemon::start(LOOPBACK, &["--capture", file.to_str().unwrap()]);
    let (a, b) = pair(&daemon, 65_536);
    a.fill(21);
    let recv = |i| {
        b.qp.post_recv(&[RecvWr {
            wr_id: i,
            sges: &[b.mr.sge(0, 8192)],
        }])
        .unwrap()
    };
    (0..3).for_each(recv);
    let post = |opcode, flags, imm, len, rkey| {
        let wr = SendWr {
            opcode,
            flags: WrFlags::SIGNALED | flags,
            wr_id: 1,
            imm,
            remote_addr: b.mr.addr() + 32_768,
            rkey,
            data: SendData::Sges(&[a.mr.sge(0, len)]),
        };
        a.qp.post_send(&[wr]).unwrap();
        a.wc().status
    };
    let (none, rkey) = (WrFlags::NONE, b.mr.rkey());
    let victim = b.pd.alloc_mr(4096, ALL).unwrap();
    assert_eq!(
        post(Opcode::Write, none, 0, 20_001, rkey),
        WcStatus::SUCCESS
    );
    assert_eq!(post(Opcode::Read, none, 0, 9_999, rkey), WcStatus::SUCCESS);
    assert_eq!(post(Opcode::Send, none, 0, 4_001, 0), WcStatus::SUCCESS);
    assert_eq!(
        post(Opcode::Send, WrFlags::SOLICITED, 0, 65, 0),
        WcStatus::SUCCESS
    );
    assert_eq!(
        post(Opcode::SendWithInv, none, victim.rkey(), 0, 0),
        WcStatus::SUCCESS
    );
    for _ in 0..3 {
        assert_eq!(b.wc().status, WcStatus::SUCCESS);
    }
    // It may be acknowledged, and so complete, before the peer's Terminate arrives.
    post(Opcode::Write, none, 0, 8, rkey ^ 0x77);
    for end in [&a, &b] {
        assert!(matches!(
            end.cm.get_event(Some(PATIENCE)).unwrap(),
            CmEvent::Disconnected(_)
        ));
    }
    drop((a, b));
    assert!(daemon.stop().success());

    let verdict = judge(&file);
    let opcodes: Vec<u8> = tshark_fields(&file, "iwarp_ddp_rdmap", &["iwarp_rdma.opcode"])
        .iter()
        .flat_map(|row| row[0].split(','))
        .map(|n| u8::from_str_radix(n.trim_start_matches("0x"), 16).unwrap())
        .collect();
    let count = |op| opcodes.iter().filter(|o| **o == op).count();
    // At MTU 1500 with timestamps a ULPDU has 1442 bytes: 1428 bytes of tagged payload, 1424
    // untagged.
    assert_eq!(
        count(0),
        15 + 1 + 1,
        "WRITE: the data, the refused one, the ready-to-receive"
    );
    assert_eq!(count(1), 1, "READ request");
    assert_eq!(count(2), 8, "READ response");
    assert_eq!(count(3), 3, "SEND");
    assert_eq!(count(5), 1, "SEND with solicited event");
    assert_eq!(count(4), 1, "SEND with invalidate");
    assert_eq!(count(7), 1, "Terminate");
    assert_eq!(verdict.good_crcs, opcodes.len(), "each FPDU has a good CRC");
    let frames = tshark_fields(&file, "iwarp_mpa.req || iwarp_mpa.rep", &["iwarp_mpa.rev"]);
    assert_eq!(frames.len(), 2, "MPA request and reply: {frames:?}");
}
