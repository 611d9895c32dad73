//! Unreliable datagrams (UD) over RoCEv2: queue pairs without a connection, and address handles.
//!
//! ```text
//! turn of a queue pair -> compose() -> Stack::roce_headers, ICRC -> Stack::send_roce -> port
//! Stack::next_roce_datagram -> on_datagram() -+-> deliver(): checks, placement, completion
//!                                             '-> the worker that has the queue pair
//! ```
//! A queue pair of datagrams is in the worker that its number selects ([`Steering::owner_of_datagrams`]),
//! so that each worker knows where a datagram belongs. A datagram is copied twice at its sender: the ICRC
//! must be that of the bytes that leave, which the client may change meanwhile.
//!
//! A datagram to a multicast group is for its members in all workers: the worker that receives it copies it to
//! the others. Queue pair 1 of a device has no rings: the control thread gets and sends its datagrams (`mads.rs`).
//!
//! [`Steering::owner_of_datagrams`]: siw_net::Steering::owner_of_datagrams

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use dpdk::{Mbuf, MbufCache};
use siw_iwarp::{QpEnv, QpEvent, RingFault, RxStream, TxRecord};
use siw_memory::{KeyError, KeyReader, Stag};
use siw_net::{
    DatagramError, DatagramHeaders, DatagramPath, Instant, QuotaOwner, RecvBuf, RoceDatagram,
    RxChecksum,
};
use siw_roce::{
    DEFAULT_PKEY, HEADERS_MAX, ICRC_LEN, Icrc, MAD_QPN, MAX_QPN, MULTICAST_QPN, PKEY_MASK, UdError,
    UdHeader, destination_qpn, is_of_reliable_connection, pad_of, path_mtu,
};
use siw_shm::control::{CONTROLLED_QKEY, GRH_LEN};
use siw_shm::{Access, Opcode, SendWqe, Sge, Wc, WcFlags, WcOpcode, WcStatus, WrFlags};

use super::Worker;
use super::connections::Connections;
use super::drop_reasons::DropReason;
use super::lifecycle_state::LifecycleState;
use super::mads::{Budget, addresses};
use super::messages::{AhRequest, Event, Membership, QpSetup, ResolutionReport, ResolutionRequest};
use super::owned_objects::OwnedObjects;
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use crate::datapath::output::{PortSink, RecordWriter, TxFrame};
use crate::datapath::port::WorkerPort;
use crate::datapath::rx_frame::{FrameBytes, RxFrame};
use crate::ids::{AhId, ClientId, Qpn};

pub(super) const UDP_LEN: usize = 8;
/// Bytes of the longest datagram behind UDP.
const DATAGRAM_MAX: usize = HEADERS_MAX + PAYLOAD_MAX + 3 + ICRC_LEN;
/// Largest path MTU.
const PAYLOAD_MAX: usize = 4096;
/// Reports of peers that send RC over RoCE, in a second.
const REPORTS_PER_SECOND: u32 = 16;
/// First of the UDP source ports, which tell the flows apart for routers with several paths.
const FIRST_SOURCE_PORT: u16 = 0xc000;

/// State of a queue pair of datagrams.
#[derive(Debug, Clone, Copy)]
pub(super) struct DatagramState {
    /// Protection domain of its memory.
    pub(super) pd: u32,
    pub(super) qkey: u32,
    /// Packet sequence number of the next datagram.
    psn: u32,
}

impl DatagramState {
    fn next_psn(&mut self) -> u32 {
        let psn = self.psn;
        self.psn = psn.wrapping_add(1) & MAX_QPN;
        psn
    }
}

/// Destination of datagrams in a worker.
struct AddressHandle {
    client: ClientId,
    /// Its device's place in the configuration.
    device: usize,
    /// Without a source port, which is the queue pair's.
    path: DatagramPath,
}

/// Address handles by number.
#[derive(Default)]
struct AddressHandles {
    handles: Vec<Option<AddressHandle>>,
    of_clients: OwnedObjects<ClientId>,
}

impl AddressHandles {
    fn insert(&mut self, number: AhId, handle: AddressHandle) {
        self.remove(number);
        if self.handles.len() <= number.index() {
            self.handles.resize_with(number.index() + 1, || None);
        }
        self.of_clients.insert(handle.client, number.0);
        self.handles[number.index()] = Some(handle);
    }

    fn remove(&mut self, number: AhId) {
        let handle = self.handles.get_mut(number.index());
        if let Some(handle) = handle.and_then(Option::take) {
            self.of_clients.remove(handle.client, number.0);
        }
    }

    /// The handle with this number, if it is of this client.
    #[inline]
    fn find(&self, number: AhId, client: ClientId) -> Option<&AddressHandle> {
        let handle = self.handles.get(number.index())?.as_ref();
        handle.filter(|handle| handle.client == client)
    }
}

/// Members of multicast groups among a worker's queue pairs, by device and group.
#[derive(Default)]
struct GroupMembers(BTreeMap<(usize, IpAddr), Vec<(ClientId, Qpn)>>);

impl GroupMembers {
    fn attach(&mut self, group: (usize, IpAddr), member: (ClientId, Qpn)) {
        let members = self.0.entry(group).or_default();
        if !members.contains(&member) {
            members.push(member);
        }
    }

    /// Removes the members for which `is_meant` returns true.
    fn remove(&mut self, is_meant: impl Fn(&(usize, IpAddr), &(ClientId, Qpn)) -> bool) {
        self.0.retain(|group, members| {
            members.retain(|member| !is_meant(group, member));
            !members.is_empty()
        });
    }
}

/// What is left to do with a received datagram.
enum Arrived {
    /// Nothing.
    Done,
    /// It is for another worker.
    Forward(usize, Mbuf),
    /// Queue pairs of other workers may be members of its group.
    CopyToAll(Mbuf),
}

/// The datagrams of a worker.
pub(super) struct Datagrams {
    handles: AddressHandles,
    members: GroupMembers,
    /// A datagram under construction, from the BTH on.
    buffer: Box<[u8; DATAGRAM_MAX]>,
    /// Reports of peers that send RC over RoCE.
    reports: Budget,
}

impl Default for Datagrams {
    fn default() -> Datagrams {
        Datagrams {
            handles: AddressHandles::default(),
            members: GroupMembers::default(),
            buffer: Box::new([0; DATAGRAM_MAX]),
            reports: Budget {
                since: Instant::ZERO,
                left: REPORTS_PER_SECOND,
            },
        }
    }
}

impl Datagrams {
    /// Removes an address handle of a departed client. Returns false if it has none. Its memberships of
    /// groups, which are few, go at once.
    pub(super) fn remove_next(&mut self, client: ClientId) -> bool {
        self.members.remove(|_, (owner, _)| *owner == client);
        let next = self.handles.of_clients.next(client, 0);
        if let Some(number) = next {
            self.handles.remove(AhId(number));
        }
        next.is_some()
    }
}

/// The frames of datagrams have no records.
pub(super) struct NoRecords;

impl RecordWriter<TxRecord> for NoRecords {
    fn write_record(
        &mut self,
        frame: &mut TxFrame<'_>,
        _: &mut MbufCache,
        _: u64,
        _: &TxRecord,
        _: u32,
        _: u32,
    ) {
        frame.is_broken = true;
    }
}

/// Outcome of an attempt to send one datagram.
enum SendOutcome {
    /// The datagram left, or is lost.
    Done,
    /// There is no request.
    Drained,
    /// The port has no room.
    NoRoom,
    /// The request failed, and ends the queue pair.
    Failed,
}

/// A queue pair that sends.
struct Sender<'a> {
    qpn: Qpn,
    client: ClientId,
    owner: QuotaOwner,
    state: &'a mut DatagramState,
}

impl Connections {
    /// Adds an address handle, and resolves its neighbour; the report follows.
    pub(super) fn add_ah(&mut self, now: Instant, request: AhRequest) {
        let AhRequest {
            ah,
            client,
            user,
            device,
            path,
            resolution,
            timeout,
            token,
        } = request;
        let handle = AddressHandle {
            client,
            device,
            path,
        };
        self.datagrams.handles.insert(ah, handle);
        // A port of 0 would be drawn.
        let [local, remote] =
            [path.from, path.to].map(|ip| SocketAddr::new(ip, siw_roce::UDP_PORT));
        let request = ResolutionRequest {
            client,
            user,
            resolution,
            device,
            local,
            remote,
            timeout,
            report: ResolutionReport::ToRequest(token),
        };
        let (resolutions, mut worker) = self.resolving();
        resolutions.start(now, request, &mut worker);
    }

    /// Forgets an address handle.
    pub(super) fn remove_ah(&mut self, ah: AhId) {
        self.datagrams.handles.remove(ah);
    }

    /// Receives datagrams to a group, or does not any more. The first worker of the device tells routers and
    /// switches.
    pub(super) fn change_group(&mut self, now: Instant, device: usize, group: IpAddr, joins: bool) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            let reports = port.stack.is_first_worker();
            match joins {
                true => port.stack.join_group(now, group, reports),
                false => port.stack.leave_group(group, reports),
            }
        }
    }

    /// Makes a queue pair a member of a group, or ends that.
    pub(super) fn change_membership(&mut self, membership: &Membership, attaches: bool) {
        let Membership {
            client,
            qpn,
            device,
            group,
        } = *membership;
        let members = &mut self.datagrams.members;
        match attaches {
            true => members.attach((device, group), (client, qpn)),
            false => {
                members.remove(|of, member| *of == (device, group) && *member == (client, qpn))
            }
        }
    }

    /// Delivers a datagram to the members of its group.
    fn deliver_to_group(
        &mut self,
        now: Instant,
        port: usize,
        group: IpAddr,
        datagram: &RoceDatagram<RxFrame>,
    ) {
        let key = (self.ports[port].device, group);
        let count = self.datagrams.members.0.get(&key).map_or(0, Vec::len);
        for index in 0..count {
            let members = self.datagrams.members.0.get(&key);
            let member = members.and_then(|members| members.get(index)).copied();
            let slot = member.and_then(|(_, qpn)| self.queue_pairs.find(qpn));
            let Some(slot) = slot else {
                continue;
            };
            match self.deliver(slot, datagram) {
                Ok(true) => {}
                Ok(false) => self.fail_datagrams(now, slot),
                Err(reason) => self.drops.count(reason),
            }
        }
    }

    /// Takes datagrams to addresses of a device that the kernel has too.
    pub(super) fn take_shared_datagrams(&mut self, device: usize) {
        let ports = self.ports.iter_mut();
        for port in ports.filter(|port| port.device == device) {
            port.stack.take_roce_from_host();
        }
    }

    /// Installs a queue pair of datagrams.
    pub(super) fn start_datagrams(
        &mut self,
        now: Instant,
        setup: QpSetup,
        device: usize,
        qkey: u32,
    ) {
        let mut ports = self.ports.iter();
        let port = ports.position(|port| port.device == device && !port.is_removed());
        let pd = setup.attr.pd;
        let slot = self.add_queue_pair(setup, port.unwrap_or(0));
        if port.is_none() {
            return self.enter_disconnected(now, slot);
        }
        let psn = 0;
        self.enter_state(
            slot,
            LifecycleState::Datagrams(DatagramState { pd, qkey, psn }),
        );
        self.publish_state(now, slot);
    }

    /// Changes the Q_Key of a queue pair of datagrams.
    pub(super) fn set_qkey(&mut self, qpn: Qpn, qkey: u32) {
        let slot = self.queue_pairs.find(qpn);
        let queue_pair = slot.and_then(|slot| self.queue_pairs.get_mut(slot));
        if let Some(queue_pair) = queue_pair
            && let LifecycleState::Datagrams(state) = &mut queue_pair.state
        {
            state.qkey = qkey;
        }
    }

    /// Sends datagrams of a queue pair. Returns true if more can follow at once.
    #[inline(never)]
    pub(super) fn send_datagrams(&mut self, now: Instant, slot: QpSlot) -> bool {
        for _ in 0..THRESHOLDS.fpdus_per_turn {
            match self.send_next_datagram(now, slot) {
                SendOutcome::Done => {}
                SendOutcome::Drained => return false,
                SendOutcome::NoRoom => return true,
                SendOutcome::Failed => {
                    self.fail_datagrams(now, slot);
                    return false;
                }
            }
        }
        true
    }

    /// Ends a queue pair of datagrams with an error, and tells its client.
    #[cold]
    pub(super) fn fail_datagrams(&mut self, now: Instant, slot: QpSlot) {
        self.end_in_error(now, slot);
        if let Some(queue_pair) = self.queue_pairs.get(slot) {
            let (client, qpn) = (queue_pair.client, queue_pair.rings.qpn);
            let event = QpEvent::QpFatal;
            self.post_event(Event::Async { client, qpn, event });
        }
    }

    fn send_next_datagram(&mut self, now: Instant, slot: QpSlot) -> SendOutcome {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return SendOutcome::Drained;
        };
        let LifecycleState::Datagrams(state) = &mut queue_pair.state else {
            return SendOutcome::Drained;
        };
        let port = &mut self.ports[queue_pair.port];
        if !port.output.has_room_for_frame(&mut self.cache) {
            return SendOutcome::NoRoom;
        }
        let qpn = queue_pair.rings.qpn;
        let mut view = self.context.for_rings(&mut queue_pair.rings);
        let completion = |request: &SendWqe, status| Wc {
            wr_id: request.wr_id,
            qp_num: qpn.0,
            status,
            opcode: WcOpcode::from(request.opcode),
            byte_len: request.length,
            ..Wc::default()
        };
        let request = match view.next_send() {
            Ok(Some(request)) => *request,
            Ok(None) => return SendOutcome::Drained,
            Err(RingFault::InvalidIndex) => return SendOutcome::Failed,
            Err(RingFault::InvalidRequest { wr_id }) => {
                let mut request = SendWqe::new();
                request.wr_id = wr_id;
                view.complete_send(Some(&completion(&request, WcStatus::LOC_QP_OP_ERR)));
                return SendOutcome::Failed;
            }
        };
        let sender = Sender {
            qpn,
            client: queue_pair.client,
            owner: queue_pair.quota_owner,
            state,
        };
        let composed = self
            .datagrams
            .compose(now, sender, &request, port, view.keys());
        let sent = composed.map(|frame| {
            let Some((headers, len)) = frame else {
                return false;
            };
            let wall_time = self.clock.wall_time(now);
            let mut sink = PortSink::new(&mut port.output, &mut self.cache, NoRecords, wall_time);
            let datagram = &self.datagrams.buffer[..len];
            let sent = port.stack.send_roce(&headers, datagram, &mut sink);
            // Members on this device get a copy, which the link does not return.
            if headers
                .group()
                .is_some_and(|group| port.stack.is_in_group(group))
            {
                let local = headers.into_local_copy();
                port.stack.send_roce(&local, datagram, &mut sink);
            }
            sent
        });
        match sent {
            Ok(is_sent) => {
                if !is_sent {
                    self.drops.count(DropReason::UdNotSent);
                }
                let success = completion(&request, WcStatus::SUCCESS);
                view.complete_send(request.is_signaled().then_some(&success));
                SendOutcome::Done
            }
            Err(status) => {
                view.complete_send(Some(&completion(&request, status)));
                SendOutcome::Failed
            }
        }
    }

    /// Another worker that has the queue pair with this number.
    fn owner_elsewhere(&self, port: usize, qpn: u32) -> Option<usize> {
        let owner = self.ports[port].stack.owner_of_datagrams(qpn);
        owner.filter(|owner| *owner != self.index)
    }

    /// Processes a received datagram.
    fn on_datagram(
        &mut self,
        now: Instant,
        port: usize,
        datagram: RoceDatagram<RxFrame>,
    ) -> Arrived {
        let into_mbuf = |datagram: RoceDatagram<RxFrame>| datagram.into_frame()?.into_mbuf();
        let head = datagram.packet.chunk();
        let transport = head.get(datagram.ip_len + UDP_LEN..).unwrap_or(&[]);
        let Some(qpn) = destination_qpn(transport) else {
            self.drops.count(DropReason::UdMalformed);
            return Arrived::Done;
        };
        if let Some(group) = datagram.group {
            if qpn != MULTICAST_QPN {
                self.drops.count(DropReason::UdUnknownQueuePair);
                return Arrived::Done;
            }
            self.deliver_to_group(now, port, group, &datagram);
            let is_shared = self.ports[port].stack.worker_count() > 1;
            return match is_shared && !datagram.is_copy {
                true => into_mbuf(datagram).map_or(Arrived::Done, Arrived::CopyToAll),
                false => Arrived::Done,
            };
        }
        if qpn == MAD_QPN && self.owner_elsewhere(port, qpn).is_none() {
            if let Err(reason) = self.on_mad(now, port, &datagram) {
                self.drops.count(reason);
            }
            return Arrived::Done;
        }
        let slot = self.queue_pairs.find(Qpn(qpn)).filter(|slot| {
            let queue_pair = self.queue_pairs.get(*slot);
            queue_pair.is_some_and(|found| found.port == port && found.is_of_datagrams())
        });
        let Some(slot) = slot else {
            if let Some(owner) = self.owner_elsewhere(port, qpn) {
                let mbuf = into_mbuf(datagram);
                return mbuf.map_or(Arrived::Done, |mbuf| Arrived::Forward(owner, mbuf));
            }
            let parsed = UdHeader::parse(transport, DATAGRAM_MAX);
            if let Err(UdError::Opcode(opcode)) = parsed
                && is_of_reliable_connection(opcode)
            {
                self.report_reliable_peer(now, Qpn(qpn), &datagram);
            }
            self.drops.count(match parsed {
                Err(error) => reason_of(error),
                Ok(_) => DropReason::UdUnknownQueuePair,
            });
            return Arrived::Done;
        };
        match self.deliver(slot, &datagram) {
            Ok(true) => {}
            Ok(false) => self.fail_datagrams(now, slot),
            Err(reason) => self.drops.count(reason),
        }
        Arrived::Done
    }

    /// Reports a packet of RC over RoCE: its queue pair may be waiting for a peer that is no siwd.
    #[cold]
    fn report_reliable_peer(&mut self, now: Instant, qpn: Qpn, datagram: &RoceDatagram<RxFrame>) {
        let RoceDatagram { packet, ip_len, .. } = datagram;
        let ends = addresses(packet.chunk().get(..*ip_len).unwrap_or(&[]));
        let Some((remote, _)) = ends else {
            return;
        };
        if self.datagrams.reports.take(now, REPORTS_PER_SECOND) && has_right_icrc(packet, *ip_len) {
            self.post_event(Event::ReliableRocePeer { qpn, remote });
        }
    }

    /// Places a datagram into the memory of the next receive work request. Returns false if the request
    /// failed, which ends the queue pair.
    fn deliver(
        &mut self,
        slot: QpSlot,
        datagram: &RoceDatagram<RxFrame>,
    ) -> Result<bool, DropReason> {
        let RoceDatagram { packet, ip_len, .. } = datagram;
        let before = ip_len + UDP_LEN;
        let transport = packet.chunk().get(before..).unwrap_or(&[]);
        let transport_len = packet.remaining() - before;
        let (header, at, len) = UdHeader::parse(transport, transport_len).map_err(reason_of)?;
        if !has_right_icrc(packet, *ip_len) {
            return Err(DropReason::UdIcrc);
        }
        if header.pkey & PKEY_MASK != DEFAULT_PKEY & PKEY_MASK {
            return Err(DropReason::UdPkey);
        }
        let queue_pair = self.queue_pairs.get_mut(slot);
        let queue_pair = queue_pair.ok_or(DropReason::UdUnknownQueuePair)?;
        let LifecycleState::Datagrams(state) = queue_pair.state else {
            return Err(DropReason::UdUnknownQueuePair);
        };
        if header.qkey != state.qkey {
            return Err(DropReason::UdQkey);
        }
        let qpn = queue_pair.rings.qpn;
        let mut view = self.context.for_rings(&mut queue_pair.rings);
        let request = match view.next_recv() {
            Ok(Some(request)) => *request,
            Ok(None) => return Err(DropReason::UdNoReceive),
            // The request has completed.
            Err(_) => return Ok(false),
        };
        let total = GRH_LEN + len;
        let status = if total > request.length as usize {
            WcStatus::LOC_LEN_ERR
        } else {
            let mut grh = [0; GRH_LEN];
            let ip = &packet.chunk()[..*ip_len];
            grh[GRH_LEN - ip.len()..].copy_from_slice(ip);
            let key_owner = (state.pd, qpn.0);
            let payload = (before + at, len);
            match place(
                view.keys(),
                key_owner,
                request.sges(),
                &grh,
                packet,
                payload,
            ) {
                Ok(()) => WcStatus::SUCCESS,
                Err(_) => WcStatus::LOC_PROT_ERR,
            }
        };
        let mut flags = WcFlags::GRH;
        if *ip_len < GRH_LEN {
            flags = flags | WcFlags::IPV4;
        }
        if header.solicited {
            flags = flags | WcFlags::SOLICITED;
        }
        if header.immediate.is_some() {
            flags = flags | WcFlags::WITH_IMM;
        }
        view.complete_recv(&Wc {
            wr_id: request.wr_id,
            qp_num: qpn.0,
            status,
            opcode: WcOpcode::RECV,
            flags,
            byte_len: total as u32,
            imm: header.immediate.unwrap_or(0),
            src_qp: header.src_qpn,
            ..Wc::default()
        });
        Ok(status == WcStatus::SUCCESS)
    }
}

impl Datagrams {
    /// Writes the datagram of a work request into the buffer, from the BTH to the ICRC. Returns the
    /// headers before it and its length; `None` if it is lost, because its neighbour does not answer.
    ///
    /// # Errors
    /// The status of the failed request.
    fn compose(
        &mut self,
        now: Instant,
        sender: Sender<'_>,
        request: &SendWqe,
        port: &mut WorkerPort<TxRecord>,
        keys: &KeyReader,
    ) -> Result<Option<(DatagramHeaders, usize)>, WcStatus> {
        let immediate = match request.opcode {
            Opcode::Send => None,
            Opcode::SendWithImm => Some(request.imm),
            _ => return Err(WcStatus::LOC_QP_OP_ERR),
        };
        let (ah, dest_qpn, qkey) = request.destination();
        let handle = self.handles.find(AhId(ah), sender.client);
        let handle = handle
            .filter(|handle| handle.device == port.device && dest_qpn <= MAX_QPN)
            .ok_or(WcStatus::LOC_QP_OP_ERR)?;
        let len = request.length as usize;
        if len > path_mtu(port.stack.mtu()) {
            return Err(WcStatus::LOC_LEN_ERR);
        }
        let header = UdHeader {
            solicited: request.flags.contains(WrFlags::SOLICITED),
            pkey: DEFAULT_PKEY,
            dest_qpn,
            psn: sender.state.next_psn(),
            qkey: match qkey & CONTROLLED_QKEY {
                0 => qkey,
                _ => sender.state.qkey,
            },
            src_qpn: sender.qpn.0,
            immediate,
        };
        let mut headers = [0; HEADERS_MAX];
        let at = header.write(len, &mut headers);
        let end = at + len + pad_of(len);
        let total = end + ICRC_LEN;
        let buffer = &mut self.buffer[..total];
        buffer[..at].copy_from_slice(&headers[..at]);
        let payload = &mut buffer[at..at + len];
        gather(keys, (sender.state.pd, sender.qpn.0), request, payload)
            .map_err(|_| WcStatus::LOC_PROT_ERR)?;
        buffer[at + len..end].fill(0);
        let path = DatagramPath {
            source_port: source_port(sender.qpn),
            ..handle.path
        };
        let network = match port.stack.roce_headers(now, sender.owner, &path, total) {
            Ok(network) => network,
            Err(DatagramError::NoRoute | DatagramError::Unresolved) => return Ok(None),
            Err(DatagramError::TooLong) => return Err(WcStatus::LOC_LEN_ERR),
        };
        seal(&network, buffer).ok_or(WcStatus::GENERAL_ERR)?;
        Ok(Some((network, total)))
    }

    /// Writes a datagram without immediate data into the buffer, up to the place of the ICRC. Returns its
    /// length with the ICRC.
    pub(super) fn write(&mut self, header: &UdHeader, payload: &[u8]) -> usize {
        let mut headers = [0; HEADERS_MAX];
        let at = header.write(payload.len(), &mut headers);
        let (len, end) = (payload.len(), at + payload.len() + pad_of(payload.len()));
        self.buffer[..at].copy_from_slice(&headers[..at]);
        self.buffer[at..at + len].copy_from_slice(payload);
        self.buffer[at + len..end].fill(0);
        end + ICRC_LEN
    }

    /// The first bytes of the buffer.
    pub(super) fn written(&mut self, len: usize) -> &mut [u8] {
        &mut self.buffer[..len]
    }
}

/// Writes the ICRC into the last bytes of a datagram, which begins with the BTH. `None`: it is too short.
pub(super) fn seal(network: &DatagramHeaders, datagram: &mut [u8]) -> Option<()> {
    let end = datagram.len().checked_sub(ICRC_LEN)?;
    let (covered, icrc) = datagram.split_at_mut(end);
    let mut sum = Icrc::new(network.ip(), network.udp(), covered)?;
    sum.update(covered.get(siw_roce::BTH_LEN..)?);
    icrc.copy_from_slice(&sum.finish());
    Some(())
}

impl Worker {
    /// Processes the datagrams that a port has received, and forwards those of other workers.
    pub(super) fn receive_datagrams(&mut self, now: Instant, port: usize) {
        while let Some(datagram) = self.connections.ports[port].stack.next_roce_datagram() {
            let arrived = self.connections.on_datagram(now, port, datagram);
            let workers = self.connections.ports[port].stack.worker_count();
            let device = self.connections.ports[port].device;
            let cache = &mut self.connections.cache;
            match arrived {
                Arrived::Done => {}
                Arrived::Forward(worker, mbuf) => {
                    let frame = (mbuf, RxChecksum::Good);
                    self.forwarder
                        .forward_received(worker, device, frame, cache);
                }
                Arrived::CopyToAll(mbuf) => {
                    let checksum = RxChecksum::Good;
                    self.forwarder
                        .copy_to_all(workers, device, &mbuf, checksum, cache);
                    cache.free(mbuf);
                }
            }
        }
        self.forwarder.wake_receivers();
    }
}

/// UDP source port of a queue pair's datagrams: a hash of its number.
pub(super) fn source_port(qpn: Qpn) -> u16 {
    FIRST_SOURCE_PORT | (qpn.0.wrapping_mul(0x9e37_79b1) >> 18) as u16
}

pub(super) fn reason_of(error: UdError) -> DropReason {
    match error {
        UdError::TooShort | UdError::Version(_) => DropReason::UdMalformed,
        UdError::Opcode(_) => DropReason::UdOpcode,
    }
}

/// Returns whether the last bytes of a packet are its ICRC.
pub(super) fn has_right_icrc(packet: &RxFrame, ip_len: usize) -> bool {
    let head = packet.chunk();
    let Some((headers, transport)) = head.split_at_checked(ip_len + UDP_LEN) else {
        return false;
    };
    let Some(mut icrc) = Icrc::new(&headers[..ip_len], &headers[ip_len..], transport) else {
        return false;
    };
    let begin = ip_len + UDP_LEN + siw_roce::BTH_LEN;
    let Some(end) = packet.remaining().checked_sub(ICRC_LEN) else {
        return false;
    };
    let bytes = FrameBytes(packet);
    bytes.for_each_slice(begin, end.saturating_sub(begin), |slice| icrc.update(slice));
    let mut sent = [0; ICRC_LEN];
    bytes.peek(end, &mut sent);
    icrc.finish() == sent
}

/// Copies the payload of a work request. `owner`: protection domain and queue pair of the keys.
fn gather(
    keys: &KeyReader,
    (pd, qpn): (u32, u32),
    request: &SendWqe,
    payload: &mut [u8],
) -> Result<(), KeyError> {
    if let Some(data) = request.inline_data() {
        payload.copy_from_slice(data);
        return Ok(());
    }
    let mut rest = payload;
    for sge in request.sges().iter().filter(|sge| sge.length > 0) {
        let (memory, offset) =
            keys.check_access(Stag(sge.lkey), sge.addr, sge.length, Access::NONE, pd, qpn)?;
        let part = rest.split_off_mut(..sge.length as usize);
        let part = part.ok_or(KeyError::Access)?;
        memory.read_at(offset, part).map_err(|_| KeyError::Access)?;
    }
    Ok(())
}

/// Copies GRH and payload of a datagram into the memory of a receive work request. `payload`: its offset in
/// the packet, and its length.
fn place(
    keys: &KeyReader,
    (pd, qpn): (u32, u32),
    sges: &[Sge],
    grh: &[u8; GRH_LEN],
    packet: &RxFrame,
    (mut from, mut left): (usize, usize),
) -> Result<(), KeyError> {
    let bytes = FrameBytes(packet);
    let mut grh = &grh[..];
    for sge in sges {
        let (mut to, mut room) = (sge.addr, sge.length as usize);
        while room > 0 && grh.len() + left > 0 {
            let part = match grh.len() {
                0 => left.min(room),
                grh_left => grh_left.min(room),
            };
            let (memory, offset) = keys.check_access(
                Stag(sge.lkey),
                to,
                part as u32,
                Access::LOCAL_WRITE,
                pd,
                qpn,
            )?;
            if grh.is_empty() {
                if !bytes.copy_to_memory(from, part, memory, offset) {
                    return Err(KeyError::Access);
                }
                from += part;
                left -= part;
            } else {
                let written = memory.write_at(offset, &grh[..part]);
                written.map_err(|_| KeyError::Access)?;
                grh = &grh[part..];
            }
            to = to.wrapping_add(part as u64);
            room -= part;
        }
    }
    Ok(())
}
