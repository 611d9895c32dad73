//! IP reassembly (RFC 791, RFC 1122 section 3.3.2; RFC 8200 section 4.5). Off the fast path, and
//! strictly bounded: a limited number of datagrams and buffers, of which the oldest are dropped in
//! favour of new ones; no overlaps (RFC 5722), no first fragment without its headers (RFC 1858,
//! 3128, 7112), no datagram beyond 65535 bytes. Fragments are kept in the buffers in which they
//! arrived.
//!
//! ```text
//! none ─► pieces ─┬─ all received ─► complete: processed like any datagram
//!                 ├─ timeout ──────► ICMP time exceeded, if the first fragment was received
//!                 └─ overlap ──────► invalid: further fragments are dropped until the timeout
//! ```

use core::net::IpAddr;

use crate::buffer::RecvBuf;
use crate::config::ReassemblyConfig;
use crate::time::Instant;

/// Maximum number of fragments of one datagram: 65535 bytes over links of 576 (RFC 1122 section
/// 3.3.3).
const MAX_PIECES: usize = 120;

/// The header fields that all fragments of a datagram share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DatagramKey {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub id: u32,
    /// The protocol of an IPv4 datagram. 0 for IPv6, where only the first fragment contains it.
    pub protocol: u8,
}

/// The parsed headers of a fragment; its buffer begins with the IP header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fragment {
    pub key: DatagramKey,
    /// The beginning of its data: the offset in the buffer (`at`) and in the datagram (`start`).
    pub at: usize,
    pub start: u32,
    pub more: bool,
    /// The next-header number of the datagram, and the offset of the byte that contains it.
    pub next: u8,
    pub named: usize,
    /// The ECN field of the IP header.
    pub ecn: u8,
}

/// A fragment held for reassembly: bytes `[start, end)` of the datagram, from `at` on in the
/// buffer.
struct FragmentPiece<B> {
    start: u32,
    end: u32,
    at: usize,
    buf: B,
}

/// An incomplete datagram.
struct Datagram<B> {
    key: DatagramKey,
    /// Sorted by `start`, without overlaps.
    pieces: Vec<FragmentPiece<B>>,
    /// Length of the datagram, known once the last fragment arrived.
    end: Option<u32>,
    /// Bytes received.
    have: u32,
    until: Instant,
    /// One bit for each value of the ECN field seen in a fragment.
    ecn: u8,
    invalid: bool,
    first: FirstFragment,
}

impl<B> Datagram<B> {
    /// Returns whether `fragment`, which ends at `end`, may become the piece at index `place`: it
    /// overlaps no piece, agrees with the known length of the datagram, and does not exceed the
    /// number of pieces.
    fn has_gap_for(&self, fragment: &Fragment, place: usize, end: u32) -> bool {
        let before = place
            .checked_sub(1)
            .map_or(0, |index| self.pieces[index].end);
        let after = self.pieces.get(place).map_or(u32::MAX, |piece| piece.start);
        let last = self.pieces.last().map_or(0, |piece| piece.end);
        before <= fragment.start
            && end <= after
            && self
                .end
                .is_none_or(|known_end| end <= known_end && (fragment.more || end == known_end))
            && (fragment.more || last <= end)
            && self.pieces.len() < MAX_PIECES
    }
}

/// The fields that only the first fragment contains.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FirstFragment {
    pub next: u8,
    pub named: usize,
    pub src_mac: [u8; 6],
    /// Received by this worker, which sends the ICMP error for the datagram if there is one.
    pub ours: bool,
}

/// A complete datagram.
pub(crate) struct ReassembledDatagram<B> {
    pub key: DatagramKey,
    pub first: FirstFragment,
    /// A fragment was marked with congestion experienced, and all were ECN-capable (RFC 3168 section 5.3).
    pub ce: bool,
    /// The first fragment, with its headers.
    pub head: B,
    /// The length of the headers.
    pub at: usize,
    rest: Vec<FragmentPiece<B>>,
}

impl<B: RecvBuf> ReassembledDatagram<B> {
    /// Returns the number of bytes of the datagram after the headers.
    pub(crate) fn len(&self) -> usize {
        let rest = self
            .rest
            .iter()
            .map(|piece| (piece.end - piece.start) as usize);
        self.head.remaining() - self.at + rest.sum::<usize>()
    }

    /// Joins the datagram, without the first `at` bytes of the first fragment, into one buffer.
    /// `None`: buffers of this kind cannot be joined.
    pub(crate) fn join_buffers(self, at: usize) -> Option<B> {
        let mut all = self.head;
        all.advance(at);
        for mut piece in self.rest {
            piece.buf.advance(piece.at);
            all.try_append(piece.buf).ok()?;
        }
        Some(all)
    }
}

/// The result of adding a fragment.
pub(crate) enum FragmentOutcome<B> {
    Kept,
    /// The fragment was dropped, perhaps with its datagram.
    Failed,
    Complete(ReassembledDatagram<B>),
}

/// The incomplete datagrams of one stack, oldest first.
pub(crate) struct ReassemblyTable<B> {
    waiting: Vec<Datagram<B>>,
    pieces: usize,
    /// The first deadline; [`NEVER`] if there is no incomplete datagram.
    due: Instant,
}

const NEVER: Instant = Instant(u64::MAX);

impl<B: RecvBuf> ReassemblyTable<B> {
    pub(crate) fn new() -> Self {
        ReassemblyTable {
            waiting: Vec::new(),
            pieces: 0,
            due: NEVER,
        }
    }

    /// Returns the number of buffers held.
    pub(crate) fn held_buffers(&self) -> usize {
        self.pieces
    }

    /// Returns whether a deadline has passed.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.due <= now
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.due != NEVER).then_some(self.due)
    }

    fn remove(&mut self, index: usize) -> Datagram<B> {
        let datagram = self.waiting.remove(index);
        self.pieces -= datagram.pieces.len();
        self.due = self
            .waiting
            .first()
            .map_or(NEVER, |datagram| datagram.until);
        datagram
    }

    /// Removes the oldest datagram whose deadline has passed. Returns its first fragment with it if
    /// this worker must send an ICMP error. Invalid datagrams, which were counted earlier, are
    /// removed silently.
    pub(crate) fn take_expired(
        &mut self,
        now: Instant,
    ) -> Option<(DatagramKey, FirstFragment, Option<B>)> {
        while self.is_due(now) {
            let mut datagram = self.remove(0);
            if !datagram.invalid {
                let first = datagram
                    .pieces
                    .first()
                    .is_some_and(|piece| piece.start == 0);
                let head =
                    (first && datagram.first.ours).then(|| datagram.pieces.swap_remove(0).buf);
                return Some((datagram.key, datagram.first, head));
            }
        }
        None
    }

    /// Drops the oldest datagrams until one more fragment fits; returns how many were dropped.
    fn make_room(&mut self, new: bool, limits: &ReassemblyConfig) -> u64 {
        let mut failed = 0;
        while !self.waiting.is_empty()
            && (self.pieces >= limits.max_fragments
                || new && self.waiting.len() >= limits.max_datagrams)
        {
            failed += u64::from(!self.remove(0).invalid);
        }
        failed
    }

    /// Adds a fragment, whose length and offset were validated. Adds the datagrams that were
    /// dropped to make room to `failed`.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        fragment: &Fragment,
        buf: B,
        (src_mac, ours): ([u8; 6], bool),
        limits: &ReassemblyConfig,
        failed: &mut u64,
    ) -> FragmentOutcome<B> {
        if limits.max_datagrams == 0 || limits.max_fragments == 0 {
            return FragmentOutcome::Failed;
        }
        let new = !self
            .waiting
            .iter()
            .any(|datagram| datagram.key == fragment.key);
        *failed += self.make_room(new, limits);
        let index = self.find_or_add(fragment.key, now + limits.timeout);
        let datagram = &mut self.waiting[index];
        if datagram.invalid {
            return FragmentOutcome::Kept;
        }
        let end = fragment.start + (buf.remaining() - fragment.at) as u32;
        let place = datagram
            .pieces
            .partition_point(|piece| piece.start < fragment.start);
        if datagram
            .pieces
            .get(place)
            .is_some_and(|piece| (piece.start, piece.end) == (fragment.start, end))
        {
            // The network may duplicate a fragment (RFC 8200 section 4.5).
            return FragmentOutcome::Kept;
        }
        if !datagram.has_gap_for(fragment, place, end) {
            datagram.invalid = true;
            self.pieces -= datagram.pieces.len();
            datagram.pieces = Vec::new();
            return FragmentOutcome::Failed;
        }
        if !fragment.more {
            datagram.end = Some(end);
        }
        if fragment.start == 0 {
            let (next, named) = (fragment.next, fragment.named);
            datagram.first = FirstFragment {
                next,
                named,
                src_mac,
                ours,
            };
        }
        datagram.ecn |= 1 << fragment.ecn;
        datagram.have += end - fragment.start;
        let (start, at) = (fragment.start, fragment.at);
        datagram.pieces.insert(
            place,
            FragmentPiece {
                start,
                end,
                at,
                buf,
            },
        );
        self.pieces += 1;
        if datagram.end != Some(datagram.have) {
            return FragmentOutcome::Kept;
        }
        self.complete_datagram(index)
    }

    /// Returns the index of the datagram with this `key`, which is created with the deadline
    /// `until` if it does not exist.
    fn find_or_add(&mut self, key: DatagramKey, until: Instant) -> usize {
        let found = self.waiting.iter().position(|datagram| datagram.key == key);
        found.unwrap_or_else(|| {
            self.waiting.push(Datagram {
                key,
                pieces: Vec::new(),
                end: None,
                have: 0,
                until,
                ecn: 0,
                invalid: false,
                first: FirstFragment::default(),
            });
            self.due = self.waiting[0].until;
            self.waiting.len() - 1
        })
    }

    /// Removes a datagram whose fragments have all arrived, and assembles it.
    fn complete_datagram(&mut self, index: usize) -> FragmentOutcome<B> {
        let datagram = self.remove(index);
        // One fragment has a congestion mark although another is not ECN-capable (RFC 3168 section
        // 5.3).
        if datagram.ecn & 0b1001 == 0b1001 {
            return FragmentOutcome::Failed;
        }
        let mut pieces = datagram.pieces.into_iter();
        let Some(head) = pieces.next() else {
            return FragmentOutcome::Failed;
        };
        FragmentOutcome::Complete(ReassembledDatagram {
            key: datagram.key,
            first: datagram.first,
            ce: datagram.ecn & 0b1000 != 0,
            head: head.buf,
            at: head.at,
            rest: pieces.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    use crate::buffer::VecBuf;

    const HEADER: usize = 20;

    struct Lab {
        all: ReassemblyTable<VecBuf>,
        limits: ReassemblyConfig,
        now: Instant,
        failed: u64,
    }

    impl Lab {
        fn new() -> Lab {
            Lab {
                all: ReassemblyTable::new(),
                limits: ReassemblyConfig::default(),
                now: Instant::from_millis(1),
                failed: 0,
            }
        }

        /// Inserts bytes `start..end` of a datagram, byte i of which is i modulo 251.
        fn give(&mut self, id: u32, start: u32, end: u32, more: bool) -> FragmentOutcome<VecBuf> {
            self.give_marked(id, start, end, more, 2)
        }

        fn give_marked(
            &mut self,
            id: u32,
            start: u32,
            end: u32,
            more: bool,
            ecn: u8,
        ) -> FragmentOutcome<VecBuf> {
            let key = DatagramKey {
                src: [10, 0, 0, 1].into(),
                dst: [10, 0, 0, 2].into(),
                id,
                protocol: 6,
            };
            let frame = Fragment {
                key,
                at: HEADER,
                start,
                more,
                next: 6,
                named: 9,
                ecn,
            };
            let mut bytes = vec![0xee; HEADER];
            bytes.extend((start..end).map(|i| (i % 251) as u8));
            let from = ([7; 6], true);
            let taken = self.all.insert(
                self.now,
                &frame,
                bytes.into(),
                from,
                &self.limits,
                &mut self.failed,
            );
            let held: usize = self.all.waiting.iter().map(|due| due.pieces.len()).sum();
            assert_eq!(held, self.all.pieces);
            assert!(held <= self.limits.max_fragments);
            assert!(self.all.waiting.len() <= self.limits.max_datagrams);
            taken
        }
    }

    fn kept(outcome: FragmentOutcome<VecBuf>) -> bool {
        matches!(outcome, FragmentOutcome::Kept)
    }

    fn failed(outcome: FragmentOutcome<VecBuf>) -> bool {
        matches!(outcome, FragmentOutcome::Failed)
    }

    fn whole(outcome: FragmentOutcome<VecBuf>) -> Vec<u8> {
        let FragmentOutcome::Complete(datagram) = outcome else {
            panic!("not whole")
        };
        let (len, at) = (datagram.len(), datagram.at);
        let whole = datagram.join_buffers(at).unwrap();
        assert_eq!(whole.remaining(), len);
        whole.as_slice().to_vec()
    }

    fn expected(count: u32) -> Vec<u8> {
        (0..count).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn reordered_doubled_fragments_make_the_datagram() {
        let parts = [(0, 800), (800, 1600), (1600, 1608), (1608, 2001)];
        // Every order of the four fragments.
        for round in 0..24 {
            let mut lab = Lab::new();
            let mut order: Vec<usize> = (0..4).collect();
            for (i, divisor) in [(3, 6), (2, 2), (1, 1)] {
                order.swap(i, round as usize / divisor % (i + 1));
            }
            for (count, &i) in order.iter().enumerate() {
                let (start, end) = parts[i];
                let taken = lab.give(round, start, end, end != 2001);
                if count == 3 {
                    assert_eq!(whole(taken), expected(2001), "{order:?}");
                    break;
                }
                assert!(kept(taken));
                assert!(kept(lab.give(round, start, end, end != 2001)));
            }
            assert_eq!((lab.all.held_buffers(), lab.all.next_deadline()), (0, None));
        }
    }

    #[test]
    fn an_overlap_invalidates_the_datagram_rfc_5722() {
        // Pieces held, and fragments that conflict with them: an overlap on either side, inside or
        // around; an end before a held piece, a different end, data beyond the end.
        let there = [(800, 1600, true), (2400, 3200, true)];
        let bad = [
            (0, 808, true),
            (1592, 2400, true),
            (1600, 2408, true),
            (800, 1592, true),
            (808, 1600, true),
            (808, 1000, true),
            (0, 4000, true),
            (800, 2400, true),
            (1600, 2400, false),
        ];
        for (start, end, more) in bad {
            let mut lab = Lab::new();
            for (start, events, more) in there {
                assert!(kept(lab.give(1, start, events, more)));
            }
            assert!(failed(lab.give(1, start, end, more)), "{start}..{end}");
            assert_eq!(lab.all.held_buffers(), 0, "nothing is held for it");
            for (start, events, more) in [
                (0, 800, true),
                there[0],
                (1600, 2400, true),
                (2400, 3200, false),
            ] {
                assert!(
                    kept(lab.give(1, start, events, more)),
                    "and nothing comes of it"
                );
            }
            assert_eq!(lab.all.held_buffers(), 0);
            // After its timeout the identification can be used again.
            lab.now = lab.now + lab.limits.timeout;
            assert!(
                lab.all.take_expired(lab.now).is_none(),
                "it had failed already"
            );
            assert!(kept(lab.give(1, 0, 8, true)));
            assert_eq!(whole(lab.give(1, 8, 16, false)).len(), 16);
        }
        for (start, end, more) in [(1600, 1608, true), (800, 1608, false), (800, 1200, false)] {
            let mut lab = Lab::new();
            assert!(kept(lab.give(1, 1200, 1600, false)));
            assert!(failed(lab.give(1, start, end, more)), "{start}..{end}");
        }
    }

    #[test]
    fn the_oldest_datagrams_make_room_for_new_ones() {
        let mut lab = Lab::new();
        for id in 0..1000 {
            assert!(kept(lab.give(id, 0, 8, true)));
        }
        assert_eq!((lab.all.held_buffers(), lab.failed), (64, 1000 - 64));
        assert_eq!(whole(lab.give(999, 8, 9, false)).len(), 9);
        assert!(
            kept(lab.give(935, 8, 9, false)),
            "the rest of one that is gone"
        );

        // A datagram of too many small pieces is refused, and among many the oldest are dropped.
        let mut lab = Lab::new();
        for i in 0..MAX_PIECES as u32 {
            assert!(kept(lab.give(1, i * 8, i * 8 + 8, true)));
        }
        assert!(failed(lab.give(1, 8000, 8008, true)));
        lab.limits.max_fragments = 100;
        for i in 0..500 {
            assert!(kept(lab.give(2 + i % 50, i / 50 * 8, i / 50 * 8 + 8, true)));
        }
        assert!(lab.all.held_buffers() <= 100);
    }

    #[test]
    fn a_timeout_returns_the_first_fragment() {
        let mut lab = Lab::new();
        assert!(kept(lab.give(1, 0, 8, true)));
        lab.now = lab.now + Duration::from_secs(10);
        assert!(kept(lab.give(2, 8, 16, true)));
        let first = lab.all.next_deadline().unwrap();
        assert_eq!(first, Instant::from_millis(60_001));
        assert!(lab.all.take_expired(Instant(first.0 - 1)).is_none());
        let (key, from, head) = lab.all.take_expired(first).unwrap();
        assert_eq!((key.id, from.src_mac), (1, [7; 6]));
        assert_eq!(head.unwrap().remaining(), HEADER + 8);
        assert!(lab.all.take_expired(first).is_none());
        let (key, _, head) = lab
            .all
            .take_expired(first + Duration::from_secs(10))
            .unwrap();
        assert!(key.id == 2 && head.is_none());
        assert_eq!((lab.all.held_buffers(), lab.all.next_deadline()), (0, None));
    }

    #[test]
    fn a_mark_on_a_fragment_marks_the_datagram_rfc_3168() {
        for (a, byte, ce) in [
            (2, 2, Some(false)),
            (2, 3, Some(true)),
            (3, 1, Some(true)),
            (0, 0, Some(false)),
            (0, 3, None),
        ] {
            let mut lab = Lab::new();
            assert!(kept(lab.give_marked(1, 0, 8, true, a)));
            match lab.give_marked(1, 8, 16, false, byte) {
                FragmentOutcome::Complete(outcome) => assert_eq!(Some(outcome.ce), ce),
                taken => assert!(failed(taken) && ce.is_none()),
            }
        }
    }
}
