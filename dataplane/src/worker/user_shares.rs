//! Turns of a batch by users: each user (uid) whose clients ring doorbells, or whose queue pairs may
//! have something to send, has as much of each batch as any other, however many clients and queue
//! pairs it has. Within a user, the queue pairs of a port take turns, and so do clients. Where a port has
//! no room for all, users come first one after the other.

use std::collections::VecDeque;

use super::worker_qp::QpSlot;

/// Doorbells taken from all clients of one user in one batch; the rest wait.
const DOORBELLS_PER_USER: usize = 512;

/// The place of a user in [`UserShares`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UserSlot(u32);

impl UserSlot {
    /// That of a queue pair whose client is not known.
    pub(super) const FIRST: UserSlot = UserSlot(0);
}

/// What one user has in this batch.
struct UserShare {
    /// `None`: the place is free.
    uid: Option<u32>,
    clients: u32,
    doorbells_left: usize,
    /// The batch that `doorbells_left` belongs to.
    batch: u64,
}

/// The users of one worker.
pub(super) struct UserShares {
    users: Vec<UserShare>,
    /// Queue pairs that may have something to send: a list for each port of each user.
    ready: Vec<VecDeque<QpSlot>>,
    /// All that are in `ready`.
    ready_count: usize,
    /// The worker's ports.
    ports: usize,
    /// The user whose turns come first.
    first: u32,
    batch: u64,
}

impl UserShares {
    /// No users yet, of a worker with so many ports.
    pub(super) fn new(ports: usize) -> UserShares {
        UserShares {
            users: Vec::new(),
            ready: Vec::new(),
            ready_count: 0,
            ports,
            first: 0,
            batch: 0,
        }
    }

    /// A client of this user is there.
    pub(super) fn add_client(&mut self, uid: u32) -> UserSlot {
        let place = self.users.iter().position(|user| user.uid == Some(uid));
        let place = place.or_else(|| self.users.iter().position(|user| user.uid.is_none()));
        let place = place.unwrap_or_else(|| {
            self.users.push(UserShare {
                uid: None,
                clients: 0,
                doorbells_left: 0,
                batch: 0,
            });
            self.ready
                .resize_with(self.users.len() * self.ports, VecDeque::new);
            self.users.len() - 1
        });
        let user = &mut self.users[place];
        user.uid = Some(uid);
        user.clients += 1;
        UserSlot(place as u32)
    }

    /// A client of this user is gone, its queue pairs before it.
    pub(super) fn remove_client(&mut self, slot: UserSlot) {
        let Some(user) = self.users.get_mut(slot.0 as usize) else {
            return;
        };
        user.clients = user.clients.saturating_sub(1);
        if user.clients == 0 {
            user.uid = None;
            self.ready_count -= self.total_ready(slot);
            for port in 0..self.ports {
                if let Some(list) = self.ready_mut(slot, port) {
                    list.clear();
                }
            }
        }
    }

    /// All users in the order of their turns, gone ones whose places are free among them.
    #[inline]
    pub(super) fn slots(&self) -> impl Iterator<Item = UserSlot> + use<> {
        let (first, count) = (self.first, self.users.len() as u32);
        (first..count).chain(0..first).map(UserSlot)
    }

    /// A port had no room for all turns of this user, or `had_room` for some: in the next batch it comes
    /// first or, if it was that in this one and had room, the user behind it.
    #[inline]
    pub(super) fn note_lack_of_room(&mut self, slot: UserSlot, had_room: bool) {
        self.first = match slot.0 + 1 {
            _ if slot.0 != self.first || !had_room => slot.0,
            next if next < self.users.len() as u32 => next,
            _ => 0,
        };
    }

    /// No queue pair of any user is ready.
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

    /// The queue pair has its turn after those of its user and port that wait already.
    #[inline]
    pub(super) fn push_ready(&mut self, slot: UserSlot, port: usize, queue_pair: QpSlot) {
        if let Some(list) = self.ready_mut(slot, port) {
            list.push_back(queue_pair);
            self.ready_count += 1;
        }
    }

    /// Queue pairs of the user that wait, of one port.
    #[inline]
    pub(super) fn ready_len(&self, slot: UserSlot, port: usize) -> usize {
        self.ready(slot, port).map_or(0, VecDeque::len)
    }

    /// Queue pairs of the user that wait, of all ports.
    #[inline]
    pub(super) fn total_ready(&self, slot: UserSlot) -> usize {
        let ports = 0..self.ports;
        ports.map(|port| self.ready_len(slot, port)).sum()
    }

    /// The user's queue pair of this port whose turn it is.
    #[inline]
    pub(super) fn pop_ready(&mut self, slot: UserSlot, port: usize) -> Option<QpSlot> {
        let found = self.ready_mut(slot, port)?.pop_front()?;
        self.ready_count -= 1;
        Some(found)
    }

    /// The queue pair that has its turn `ahead` turns from now.
    #[inline]
    pub(super) fn peek_ready(&self, slot: UserSlot, port: usize, ahead: usize) -> Option<QpSlot> {
        self.ready(slot, port)?.get(ahead).copied()
    }

    /// All users have their doorbells of a batch anew.
    #[inline]
    pub(super) fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// What the user has left of this batch, to be taken from.
    #[inline]
    pub(super) fn doorbells_left(&mut self, slot: UserSlot) -> Option<&mut usize> {
        let user = self.users.get_mut(slot.0 as usize)?;
        if user.batch != self.batch {
            user.batch = self.batch;
            user.doorbells_left = DOORBELLS_PER_USER;
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
            *shares.doorbells_left(greedy[1]).unwrap() -= DOORBELLS_PER_USER;
            assert_eq!(shares.doorbells_left(greedy[2]), Some(&mut 0));
            assert_eq!(
                shares.doorbells_left(honest),
                Some(&mut { DOORBELLS_PER_USER })
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
        // Its place is the next user's, and nothing in it.
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
    fn users_without_room_come_first_one_after_the_other() {
        let mut shares = UserShares::new(1);
        let users: Vec<_> = (0..3).map(|uid| shares.add_client(uid)).collect();
        let order = |shares: &UserShares| shares.slots().collect::<Vec<_>>();
        assert_eq!(order(&shares), users);
        // It was the first, and waits for room.
        shares.note_lack_of_room(users[0], false);
        assert_eq!(order(&shares), users);
        shares.note_lack_of_room(users[0], true);
        assert_eq!(order(&shares), [users[1], users[2], users[0]]);
        // It was not the first.
        shares.note_lack_of_room(users[2], true);
        assert_eq!(order(&shares), [users[2], users[0], users[1]]);
        shares.note_lack_of_room(users[2], true);
        assert_eq!(order(&shares), users);
    }
}
