//! Shares of a batch by user. Each user (uid) whose clients ring doorbells, or whose queue pairs may
//! have data to send, gets the same share of each batch, regardless of its number of clients and queue
//! pairs. Within a user, the queue pairs of a port take turns, and so do clients. If a port has no
//! room for all users, they take turns at coming first.

use std::collections::VecDeque;

use super::slots::{QpSlot, UserSlot};
use super::thresholds::THRESHOLDS;

/// Users in one word of the bits of [`UserShares::with_ready`].
const USERS_PER_WORD: u32 = u64::BITS;

/// One user's share of the current batch.
struct UserShare {
    /// `None` if the slot is vacant.
    uid: Option<u32>,
    clients: u32,
    /// Ready queue pairs on all ports.
    ready: usize,
    doorbells_left: usize,
    /// Batch to which `doorbells_left` applies.
    batch: u64,
}

/// Progress of the turns of one batch.
pub(super) struct Round {
    /// Users before this one come last; zero if no turns are left behind `end`.
    first: u32,
    next: u32,
    end: u32,
}

/// The users of one worker.
pub(super) struct UserShares {
    users: Vec<UserShare>,
    /// Queue pairs that may have data to send: one list per user and port.
    ready: Vec<VecDeque<QpSlot>>,
    /// Total length of the lists in `ready`.
    ready_count: usize,
    /// One bit for each user, set if it has ready queue pairs.
    with_ready: Vec<u64>,
    /// Number of the worker's ports.
    ports: usize,
    /// User whose turns come first.
    first: u32,
    batch: u64,
}

impl UserShares {
    /// Shares of a worker with `ports` ports and no users.
    pub(super) fn new(ports: usize) -> UserShares {
        UserShares {
            users: Vec::new(),
            ready: Vec::new(),
            ready_count: 0,
            with_ready: Vec::new(),
            ports,
            first: 0,
            batch: 0,
        }
    }

    /// Adds a client of this user.
    pub(super) fn add_client(&mut self, uid: u32) -> UserSlot {
        let place = self.users.iter().position(|user| user.uid == Some(uid));
        let place = place.or_else(|| self.users.iter().position(|user| user.uid.is_none()));
        let place = place.unwrap_or_else(|| {
            self.users.push(UserShare {
                uid: None,
                clients: 0,
                ready: 0,
                doorbells_left: 0,
                batch: 0,
            });
            self.ready
                .resize_with(self.users.len() * self.ports, VecDeque::new);
            self.with_ready
                .resize(self.users.len().div_ceil(USERS_PER_WORD as usize), 0);
            self.users.len() - 1
        });
        let user = &mut self.users[place];
        user.uid = Some(uid);
        user.clients += 1;
        UserSlot(place as u32)
    }

    /// Removes a client of this user, whose queue pairs were removed before.
    pub(super) fn remove_client(&mut self, slot: UserSlot) {
        let Some(user) = self.users.get_mut(slot.0 as usize) else {
            return;
        };
        user.clients = user.clients.saturating_sub(1);
        if user.clients == 0 {
            user.uid = None;
            self.ready_count -= std::mem::take(&mut user.ready);
            self.set_with_ready(slot, false);
            for port in 0..self.ports {
                if let Some(list) = self.ready_mut(slot, port) {
                    list.clear();
                }
            }
        }
    }

    /// Adds a port, behind the others, for all users.
    pub(super) fn add_port(&mut self) {
        let before = std::mem::take(&mut self.ready);
        let mut lists = before.into_iter();
        for _ in 0..self.users.len() {
            self.ready.extend(lists.by_ref().take(self.ports));
            self.ready.push(VecDeque::new());
        }
        self.ports += 1;
    }

    /// Starts a round of turns for the users with ready queue pairs.
    #[inline]
    pub(super) fn start_round(&self) -> Round {
        Round {
            first: self.first,
            next: self.first,
            end: self.users.len() as u32,
        }
    }

    /// The next user of a round that has ready queue pairs. Each has one turn. Users without any, and
    /// vacant slots, cost one step for each [`USERS_PER_WORD`] of them.
    #[inline]
    pub(super) fn next_in_round(&self, round: &mut Round) -> Option<UserSlot> {
        loop {
            if let Some(found) = self.next_with_ready(round.next, round.end) {
                round.next = found + 1;
                return Some(UserSlot(found));
            }
            if round.first == 0 {
                return None;
            }
            // From the last user to those before the first.
            (round.next, round.end) = (0, std::mem::take(&mut round.first));
        }
    }

    /// First user from `from` on and before `end` that has ready queue pairs.
    #[inline]
    fn next_with_ready(&self, from: u32, end: u32) -> Option<u32> {
        let mut start = from - from % USERS_PER_WORD;
        let mut skipped = u64::MAX << (from % USERS_PER_WORD);
        while start < end {
            let word = self.with_ready.get((start / USERS_PER_WORD) as usize)? & skipped;
            if word != 0 {
                let found = start + word.trailing_zeros();
                return (found < end).then_some(found);
            }
            (start, skipped) = (start + USERS_PER_WORD, u64::MAX);
        }
        None
    }

    #[inline]
    fn set_with_ready(&mut self, slot: UserSlot, has_ready: bool) {
        if let Some(word) = self.with_ready.get_mut((slot.0 / USERS_PER_WORD) as usize) {
            let bit = 1 << (slot.0 % USERS_PER_WORD);
            *word = if has_ready { *word | bit } else { *word & !bit };
        }
    }

    /// Records that a port had no room for all turns of this user; with `had_room`, it had room for
    /// some. The user comes first in the next batch, unless it came first in this one and had room:
    /// then the next user does.
    #[inline]
    pub(super) fn note_lack_of_room(&mut self, slot: UserSlot, had_room: bool) {
        self.first = match slot.0 + 1 {
            _ if slot.0 != self.first || !had_room => slot.0,
            next if next < self.users.len() as u32 => next,
            _ => 0,
        };
    }

    /// True if no queue pair of any user is ready.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.ready_count == 0
    }

    #[inline]
    fn ready(&self, slot: UserSlot, port: usize) -> Option<&VecDeque<QpSlot>> {
        self.ready.get(slot.0 as usize * self.ports + port)
    }

    #[inline]
    fn ready_mut(&mut self, slot: UserSlot, port: usize) -> Option<&mut VecDeque<QpSlot>> {
        self.ready.get_mut(slot.0 as usize * self.ports + port)
    }

    /// Queues the queue pair behind the ready ones of its user and port.
    #[inline]
    pub(super) fn push_ready(&mut self, slot: UserSlot, port: usize, queue_pair: QpSlot) {
        if let Some(list) = self.ready_mut(slot, port) {
            list.push_back(queue_pair);
            self.ready_count += 1;
            let user = &mut self.users[slot.0 as usize];
            user.ready += 1;
            if user.ready == 1 {
                self.set_with_ready(slot, true);
            }
        }
    }

    /// Number of the user's ready queue pairs on one port.
    #[inline]
    pub(super) fn ready_len(&self, slot: UserSlot, port: usize) -> usize {
        self.ready(slot, port).map_or(0, VecDeque::len)
    }

    /// Number of the user's ready queue pairs on all ports.
    #[inline]
    pub(super) fn total_ready(&self, slot: UserSlot) -> usize {
        let user = self.users.get(slot.0 as usize);
        user.map_or(0, |user| user.ready)
    }

    /// Takes the user's next ready queue pair of this port.
    #[inline]
    pub(super) fn pop_ready(&mut self, slot: UserSlot, port: usize) -> Option<QpSlot> {
        let found = self.ready_mut(slot, port)?.pop_front()?;
        self.ready_count -= 1;
        let user = &mut self.users[slot.0 as usize];
        user.ready -= 1;
        if user.ready == 0 {
            self.set_with_ready(slot, false);
        }
        Some(found)
    }

    /// Queue pair whose turn comes `ahead` turns from now.
    #[inline]
    pub(super) fn peek_ready(&self, slot: UserSlot, port: usize, ahead: usize) -> Option<QpSlot> {
        self.ready(slot, port)?.get(ahead).copied()
    }

    /// Starts a batch, which renews each user's share of doorbells.
    #[inline]
    pub(super) fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// Rest of the user's share of doorbells in this batch; the caller subtracts from it.
    #[inline]
    pub(super) fn doorbells_left(&mut self, slot: UserSlot) -> Option<&mut usize> {
        let user = self.users.get_mut(slot.0 as usize)?;
        if user.batch != self.batch {
            user.batch = self.batch;
            user.doorbells_left = THRESHOLDS.doorbells_per_user;
        }
        Some(&mut user.doorbells_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_doorbells_once_a_batch_with_all_its_clients() {
        let mut shares = UserShares::new(2);
        let greedy: Vec<_> = (0..3).map(|_| shares.add_client(7)).collect();
        let honest = shares.add_client(8);
        assert!(greedy.iter().all(|slot| *slot == greedy[0]) && honest != greedy[0]);
        for _ in 0..2 {
            shares.begin_batch();
            *shares.doorbells_left(greedy[1]).unwrap() -= THRESHOLDS.doorbells_per_user;
            assert_eq!(shares.doorbells_left(greedy[2]), Some(&mut 0));
            assert_eq!(
                shares.doorbells_left(honest),
                Some(&mut { THRESHOLDS.doorbells_per_user })
            );
        }
    }

    #[test]
    fn queue_pairs_wait_for_those_of_their_user_alone() {
        let mut shares = UserShares::new(2);
        let (greedy, honest) = (shares.add_client(7), shares.add_client(8));
        for number in 0..100 {
            shares.push_ready(greedy, 0, QpSlot(number));
        }
        shares.push_ready(honest, 0, QpSlot(200));
        assert_eq!(shares.pop_ready(honest, 0), Some(QpSlot(200)));
        assert_eq!(shares.pop_ready(greedy, 0), Some(QpSlot(0)));
        assert_eq!(
            (shares.ready_len(greedy, 0), shares.ready_len(honest, 0)),
            (99, 0)
        );
        // The next user gets its slot, which is empty.
        shares.remove_client(greedy);
        assert!(shares.is_idle());
        assert_eq!(shares.add_client(9), greedy);
        assert_eq!(shares.pop_ready(greedy, 0), None);
    }

    #[test]
    fn queue_pairs_wait_for_those_of_their_port_alone() {
        let mut shares = UserShares::new(2);
        let user = shares.add_client(7);
        for number in 0..100 {
            shares.push_ready(user, 1, QpSlot(number));
        }
        shares.push_ready(user, 0, QpSlot(200));
        assert_eq!(shares.peek_ready(user, 1, 6), Some(QpSlot(6)));
        assert_eq!(shares.peek_ready(user, 0, 1), None);
        assert_eq!(shares.total_ready(user), 101);
        assert_eq!(shares.pop_ready(user, 0), Some(QpSlot(200)));
        assert_eq!(shares.pop_ready(user, 2), None);
        shares.remove_client(user);
        assert!(shares.is_idle());
    }

    #[test]
    fn a_new_port_has_ready_queue_pairs_of_its_own() {
        let mut shares = UserShares::new(2);
        let users = [shares.add_client(7), shares.add_client(8)];
        for (user, port) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            shares.push_ready(users[user], port, QpSlot((10 * user + port) as u32));
        }
        shares.add_port();
        shares.push_ready(users[1], 2, QpSlot(12));
        let later = shares.add_client(9);
        shares.push_ready(later, 2, QpSlot(22));
        assert_eq!(shares.pop_ready(users[0], 2), None);
        for (user, port) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)] {
            let expected = QpSlot((10 * user + port) as u32);
            assert_eq!(shares.pop_ready(users[user], port), Some(expected));
        }
        assert_eq!(shares.pop_ready(later, 2), Some(QpSlot(22)));
        assert!(shares.is_idle());
    }

    /// The users of a round in their order.
    fn order(shares: &UserShares) -> Vec<UserSlot> {
        let mut round = shares.start_round();
        std::iter::from_fn(|| shares.next_in_round(&mut round)).collect()
    }

    #[test]
    fn only_users_with_ready_queue_pairs_have_turns() {
        let mut shares = UserShares::new(2);
        let users: Vec<_> = (0..300).map(|uid| shares.add_client(uid)).collect();
        assert_eq!(order(&shares), []);
        for number in [299, 0, 63, 64, 128] {
            shares.push_ready(users[number], number % 2, QpSlot(number as u32));
            shares.push_ready(users[number], 0, QpSlot(number as u32));
        }
        let with_ready =
            |numbers: &[usize]| -> Vec<_> { numbers.iter().map(|number| users[*number]).collect() };
        assert_eq!(order(&shares), with_ready(&[0, 63, 64, 128, 299]));
        shares.note_lack_of_room(users[64], true);
        assert_eq!(order(&shares), with_ready(&[64, 128, 299, 0, 63]));
        shares.note_lack_of_room(users[129], true);
        assert_eq!(order(&shares), with_ready(&[299, 0, 63, 64, 128]));
        shares.remove_client(users[0]);
        assert!(shares.pop_ready(users[63], 1).is_some());
        assert_eq!(order(&shares), with_ready(&[299, 63, 64, 128]));
        assert!(shares.pop_ready(users[63], 0).is_some());
        assert_eq!(order(&shares), with_ready(&[299, 64, 128]));
    }

    #[test]
    fn users_without_room_come_first_one_after_the_other() {
        let mut shares = UserShares::new(1);
        let users: Vec<_> = (0..3).map(|uid| shares.add_client(uid)).collect();
        for user in &users {
            shares.push_ready(*user, 0, QpSlot(user.0));
        }
        assert_eq!(order(&shares), users);
        // It came first and had no room.
        shares.note_lack_of_room(users[0], false);
        assert_eq!(order(&shares), users);
        shares.note_lack_of_room(users[0], true);
        assert_eq!(order(&shares), [users[1], users[2], users[0]]);
        // It did not come first.
        shares.note_lack_of_room(users[2], true);
        assert_eq!(order(&shares), [users[2], users[0], users[1]]);
        shares.note_lack_of_room(users[2], true);
        assert_eq!(order(&shares), users);
    }
}
