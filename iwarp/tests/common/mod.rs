//! Two queue pairs, or one and a scripted peer, over plain memory.
#![allow(dead_code)]

pub mod fuzz;
pub mod model;
pub mod tested_responder;

use serde::{Serialize, de::DeserializeOwned};
use siw_iwarp::ddp::{MAX_HDR_LEN, T_BIT, TaggedHeader, UntaggedHeader};
use siw_iwarp::rdmap::ReadRequestHeader;
use siw_iwarp::rdmap::terminate::ReceivedTerminate;
use siw_iwarp::*;
use siw_memory::{KeyReader, KeyTable, RegisteredMemory, Stag};
use siw_shm::wqe::{RecvWr, SendData, SendWr};
use siw_shm::{
    Access, AtomicArgs, Opcode, PlainSend, RecvWqe, SendWqe, Sge, SharedMemory, Wc, WcStatus,
    WrFlags,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

pub const PD: u32 = 7;
pub const EMSS: u32 = 1448;
pub const REMOTE: Access = Access(1 | 2 | 4);

/// Each end is saved, dropped and restored before each of its steps: all tests of the binary `saved`, which
/// are those of `queue_pair`.
pub const RESTARTS: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"saved");

/// The value that a successor gets.
pub fn restored<T: Serialize + DeserializeOwned>(value: &T) -> T {
    let state = postcard::to_stdvec(value).expect("it can be saved");
    postcard::from_bytes(&state).expect("it can be restored")
}

/// Frames as bytes; also records the reference counts used.
#[derive(Default)]
pub struct Frame {
    pub bytes: Vec<u8>,
    pub owners: Vec<ExtBufRef>,
    /// Maximum octets of room in one piece; zero: no limit.
    pub piece: usize,
}

impl Frame {
    fn piece_len(&self, want: usize) -> usize {
        match self.piece {
            0 => want,
            piece => want.min(piece),
        }
    }

    fn extend(&mut self, len: usize) -> &mut [u8] {
        let at = self.bytes.len();
        self.bytes.resize(at + len, 0);
        &mut self.bytes[at..]
    }
}

impl FrameBuilder for Frame {
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        owner: ExtBufRef,
    ) -> bool {
        let at = self.bytes.len();
        self.bytes.resize(at + len, 0);
        region.read(offset, &mut self.bytes[at..]).expect("checked");
        self.owners.push(owner);
        true
    }
    fn reserve_fpdus(&mut self, len: usize, most: usize) -> Option<&mut [u8]> {
        let fit = self.piece_len(len * most) / len;
        (fit > 0).then(|| self.extend(fit * len))
    }
    fn reserve(&mut self, want: usize) -> Option<&mut [u8]> {
        Some(self.extend(self.piece_len(want)))
    }
    fn withdraw(&mut self, len: usize) {
        self.bytes.truncate(self.bytes.len() - len);
    }
}

/// The environment of one queue pair.
pub struct Env {
    pub table: Arc<KeyTable>,
    pub keys: KeyReader,
    pub sq: VecDeque<SendWqe>,
    pub rq: VecDeque<RecvWqe>,
    /// Returned once by the send queue, after the requests in `sq`.
    pub ring_fault: Option<RingFault>,
    pub sent: Vec<Option<Wc>>,
    pub received: Vec<Wc>,
    pub events: Vec<QpEvent>,
    pub live: Vec<u32>,
    pub held: bool,
    /// A completion waits for a release: `poll_releases` must be called.
    pub awaits_release: bool,
    next_owner: u32,
    send: SendWqe,
    recv: RecvWqe,
}

impl Env {
    pub fn new() -> Self {
        let table = KeyTable::new(64, 2);
        let keys = table.register_reader().expect("a reader is free");
        Self {
            table,
            keys,
            sq: VecDeque::new(),
            rq: VecDeque::new(),
            ring_fault: None,
            sent: Vec::new(),
            received: Vec::new(),
            events: Vec::new(),
            live: Vec::new(),
            held: false,
            awaits_release: false,
            next_owner: 0,
            send: SendWqe::new(),
            recv: RecvWqe::new(),
        }
    }

    /// Registers fresh memory at virtual address `base`.
    pub fn mr(&self, base: u64, len: usize, access: Access) -> (Stag, Arc<SharedMemory>) {
        self.mr_in(base, len, access, PD, None)
    }

    pub fn mr_in(
        &self,
        base: u64,
        len: usize,
        access: Access,
        pd: u32,
        qp: Option<u32>,
    ) -> (Stag, Arc<SharedMemory>) {
        let region = Arc::new(SharedMemory::new_anonymous(len.max(4096)).expect("memory"));
        let mr = RegisteredMemory::new(region.clone(), 0, len as u64, base, pd, qp, access)
            .expect("in range");
        (self.table.insert(mr).expect("room"), region)
    }

    pub fn post_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        self.rq
            .push_back(RecvWqe::from_wr(&RecvWr { wr_id, sges }).expect("valid"));
    }

    pub fn post(&mut self, request: &SendWr<'_>) {
        self.sq.push_back(SendWqe::from_wr(request).expect("valid"));
    }

    pub fn statuses(&self) -> Vec<(u64, WcStatus)> {
        self.sent
            .iter()
            .flatten()
            .map(|wc| (wc.wr_id, wc.status))
            .collect()
    }

    pub fn recv_statuses(&self) -> Vec<(u64, WcStatus)> {
        self.received
            .iter()
            .map(|wc| (wc.wr_id, wc.status))
            .collect()
    }
}

impl QpEnv for Env {
    fn keys(&self) -> &KeyReader {
        &self.keys
    }
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault> {
        match self.sq.pop_front() {
            Some(wqe) => {
                self.send = wqe;
                Ok(Some(&self.send))
            }
            None => self.ring_fault.take().map_or(Ok(None), Err),
        }
    }
    fn peek_plain_send(&mut self) -> Option<PlainSend> {
        self.sq.front()?.as_plain()
    }
    fn take_peeked_send(&mut self) {
        self.sq.pop_front();
    }
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        match self.rq.pop_front() {
            Some(wqe) => {
                self.recv = wqe;
                Ok(Some(&self.recv))
            }
            None => Ok(None),
        }
    }
    fn complete_send(&mut self, cqe: Option<&Wc>) {
        self.sent.push(cqe.copied());
    }
    fn complete_recv(&mut self, cqe: &Wc) {
        self.received.push(*cqe);
    }
    fn is_released(&mut self, owner: ExtBufRef) -> bool {
        assert_ne!(owner, ExtBufRef::NONE);
        self.awaits_release |= self.held;
        !self.held
    }
    fn alloc_ext_buf_ref(&mut self) -> ExtBufRef {
        self.next_owner += 1;
        self.live.push(self.next_owner);
        ExtBufRef(self.next_owner)
    }
    fn free_ext_buf_ref(&mut self, owner: ExtBufRef) {
        let index = self.live.iter().position(|&live| live == owner.0);
        self.live.remove(index.expect("freed once"));
    }
    fn post_event(&mut self, event: QpEvent) {
        self.events.push(event);
    }
}

pub fn init_attr() -> QpInitAttr {
    QpInitAttr {
        qpn: 3,
        pd: PD,
        max_send_wr: 64,
        max_recv_wr: 64,
        sq_sig_all: false,
        denied_access: Access::NONE,
    }
}

pub fn negotiated(initiator: bool) -> NegotiatedParameters {
    NegotiatedParameters {
        initiator,
        crc: true,
        markers_in: false,
        markers_out: false,
        ird: 4,
        ord: 4,
        joins_immediate: true,
        rtr: None,
        revision: 2,
    }
}

/// One end: queue pair, environment, received bytes, unacknowledged records.
pub struct End {
    pub qp: QueuePair,
    pub env: Env,
    pub rx: ByteStream,
    pub unacked: VecDeque<FpduRecord>,
}

impl End {
    pub fn new(parameters: NegotiatedParameters) -> Self {
        let mut qp = QueuePair::new(init_attr());
        qp.set_rts(parameters, EMSS);
        Self {
            qp,
            env: Env::new(),
            rx: ByteStream::new(),
            unacked: VecDeque::new(),
        }
    }

    /// An end whose consumer is not aware of connections.
    pub fn paired(parameters: NegotiatedParameters) -> Self {
        let mut qp = QueuePair::new(init_attr());
        qp.set_paired(true);
        qp.set_rts(parameters, EMSS);
        Self {
            qp,
            ..Self::new(parameters)
        }
    }

    /// Saves, drops and restores the queue pair and its unacknowledged records, if the tests are about that. A
    /// port that holds memory ends first.
    pub fn restart(&mut self) {
        if RESTARTS && !self.env.held {
            self.qp = restored(&self.qp);
            self.unacked = restored(&self.unacked);
            let mut records = self.unacked.iter();
            assert!(records.all(|record| self.qp.knows_record(&(*record).into())));
            // No frame refers to memory any more.
            self.env.live.clear();
        }
    }

    /// Sends payload by reference.
    pub fn send_by_reference(&mut self) {
        self.qp.set_copied_up_to(0);
    }

    /// Returns the bytes of the next FPDU.
    pub fn pull(&mut self) -> Option<Vec<u8>> {
        self.pull_room(usize::MAX)
    }

    pub fn pull_room(&mut self, room: usize) -> Option<Vec<u8>> {
        self.restart();
        let OutgoingFpdu { record, wire_len } = self.qp.next_record(&mut self.env, room)?;
        let mut frame = Frame::default();
        self.build_fpdu(&record, &mut frame)
            .expect("the key is there");
        assert_eq!(frame.bytes.len(), wire_len as usize, "announced length");
        assert!(wire_len <= EMSS, "an FPDU fits a segment");
        self.unacked.push_back(record);
        Some(frame.bytes)
    }

    /// Returns the FPDUs that it hands out at once, as runs, and their bytes.
    pub fn pull_runs(&mut self, room: usize, most: u32) -> (Vec<FpduRun>, Vec<u8>) {
        self.restart();
        let mut runs = Vec::new();
        let Self { qp, env, .. } = self;
        qp.next_records(env, room, most, |run, _| runs.push(run));
        if RESTARTS {
            runs = restored(&runs);
        }
        let mut bytes = Vec::new();
        for run in &runs {
            bytes.extend(
                self.build_units(run, 0..run.count())
                    .expect("the key is there"),
            );
        }
        (runs, bytes)
    }

    /// Builds the FPDU of a record at the end of `frame`.
    pub fn build_fpdu(&self, record: &FpduRecord, frame: &mut Frame) -> Result<(), BuildError> {
        let (keys, run) = (&self.env.keys, (*record).into());
        let built = self.qp.build_fpdus(keys, &run, 0..1, frame);
        built.map_err(|(_, error)| error)
    }

    /// Builds the bytes of the FPDUs `units` of a run.
    pub fn build_units(&self, run: &FpduRun, units: Range<u16>) -> Result<Vec<u8>, BuildError> {
        let mut frame = Frame::default();
        let keys = &self.env.keys;
        self.qp
            .build_fpdus(keys, run, units.clone(), &mut frame)
            .map_err(|(_, error)| error)?;
        let count = usize::from(units.end - units.start);
        assert_eq!(
            frame.bytes.len(),
            run.unit_len() as usize * count,
            "announced length"
        );
        Ok(frame.bytes)
    }

    /// Returns everything that it may send now.
    pub fn pull_all(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        while let Some(fpdu) = self.pull() {
            out.extend(fpdu);
        }
        out
    }

    pub fn give(&mut self, bytes: &[u8]) -> ReceiveProgress {
        self.restart();
        self.rx.push(bytes);
        self.qp.receive_in_order(&mut self.env, &mut self.rx)
    }

    pub fn ack_all(&mut self) {
        self.restart();
        while let Some(record) = self.unacked.pop_front() {
            self.qp.on_record_acked(&record);
            self.qp.complete_acked(&mut self.env);
        }
    }

    /// Expects a Terminate with this code as the next and last message.
    pub fn expect_terminate(&mut self, code: &str) -> ReceivedTerminate {
        let fpdu = self.pull().expect("a Terminate leaves");
        let terminate = parse_terminate(&fpdu);
        assert_eq!(terminate.code.to_string(), code);
        assert!(!terminate.is_siw_order);
        assert!(self.pull().is_none(), "nothing after a Terminate");
        assert_eq!(self.qp.state(), RdmapState::Terminate);
        assert_eq!(self.qp.requested_close(), Some(CloseKind::Graceful));
        terminate
    }
}

/// ULPDU of a single valid FPDU.
pub fn ulpdu(fpdu: &[u8]) -> &[u8] {
    let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
    assert_eq!(fpdu.len(), mpa::fpdu::wire_len(len as u16));
    let sum = crc32c::crc32c(&fpdu[..fpdu.len() - 4]).to_le_bytes();
    assert!(fpdu[fpdu.len() - 4..] == sum, "good CRC");
    &fpdu[2..2 + len]
}

pub fn parse_terminate(fpdu: &[u8]) -> ReceivedTerminate {
    let ulpdu = ulpdu(fpdu);
    assert_eq!(ulpdu[..2], [0x41, 0x47]);
    assert_eq!(ulpdu[6..18], [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0]);
    ReceivedTerminate::parse(&ulpdu[18..]).expect("well formed")
}

/// The DDP header of a ULPDU; a tagged one is padded with zeros.
pub fn hdr18(ulpdu: &[u8]) -> [u8; MAX_HDR_LEN] {
    let mut header = [0; MAX_HDR_LEN];
    let len = if ulpdu[0] & T_BIT != 0 { 14 } else { 18 };
    header[..len].copy_from_slice(&ulpdu[..len]);
    header
}

pub fn tagged_of(fpdu: &[u8]) -> TaggedHeader {
    TaggedHeader::parse(&hdr18(ulpdu(fpdu)))
}

pub fn untagged_of(fpdu: &[u8]) -> UntaggedHeader {
    UntaggedHeader::parse(&hdr18(ulpdu(fpdu)))
}

// Raw frames of a scripted peer.

pub fn raw(parts: &[&[u8]]) -> Vec<u8> {
    mpa::fpdu::encode_fpdu(parts, true).into_vec()
}

pub fn write(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    raw(&[
        &[0xc1, 0x40],
        &stag.to_be_bytes(),
        &to.to_be_bytes(),
        payload,
    ])
}

pub fn read_response(last: bool, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let ddp = if last { 0xc1 } else { 0x81 };
    raw(&[
        &[ddp, 0x42],
        &stag.to_be_bytes(),
        &to.to_be_bytes(),
        payload,
    ])
}

pub fn untagged(ctl: [u8; 2], inv: u32, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    raw(&[
        &ctl,
        &inv.to_be_bytes(),
        &qn.to_be_bytes(),
        &msn.to_be_bytes(),
        &mo.to_be_bytes(),
        payload,
    ])
}

pub fn send(msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    untagged(
        [if last { 0x41 } else { 0x01 }, 0x43],
        0,
        0,
        msn,
        mo,
        payload,
    )
}

pub fn read_request(msn: u32, header: &ReadRequestHeader) -> Vec<u8> {
    untagged([0x41, 0x41], 0, 1, msn, 0, &header.to_bytes())
}

// Work requests.

pub fn sge(addr: u64, length: usize, lkey: Stag) -> Sge {
    Sge {
        addr,
        length: length as u32,
        lkey: lkey.0,
    }
}

pub fn wr(opcode: Opcode, wr_id: u64, data: SendData<'_>) -> SendWr<'_> {
    SendWr {
        opcode,
        flags: WrFlags::SIGNALED,
        wr_id,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        data,
    }
}

pub fn remote<'a>(opcode: Opcode, wr_id: u64, data: &'a [Sge], to: u64, key: Stag) -> SendWr<'a> {
    SendWr {
        remote_addr: to,
        rkey: key.0,
        ..wr(opcode, wr_id, SendData::Sges(data))
    }
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed)
        .collect()
}

pub fn contents(memory: &SharedMemory, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(0, &mut bytes).expect("in range");
    bytes
}

/// Transfers bytes and acknowledgements both ways until nothing is left.
pub fn run(one: &mut End, other: &mut End) {
    loop {
        let (to_other, to_one) = (one.pull_all(), other.pull_all());
        if to_other.is_empty() && to_one.is_empty() {
            break;
        }
        other.give(&to_other);
        one.give(&to_one);
        one.ack_all();
        other.ack_all();
    }
}

pub fn pair() -> (End, End) {
    (End::new(negotiated(true)), End::new(negotiated(false)))
}
