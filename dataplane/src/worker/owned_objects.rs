//! Objects of one kind by their owner, so that the end of an owner looks at no object of another one:
//! queues by client, connections by listener.

use std::collections::BTreeSet;

/// Indices of objects in a table of the worker, by owner.
pub(super) struct OwnedObjects<O>(BTreeSet<(O, u32)>);

impl<O> Default for OwnedObjects<O> {
    fn default() -> OwnedObjects<O> {
        OwnedObjects(BTreeSet::new())
    }
}

impl<O: Ord + Copy> OwnedObjects<O> {
    pub(super) fn insert(&mut self, owner: O, index: u32) {
        self.0.insert((owner, index));
    }

    pub(super) fn remove(&mut self, owner: O, index: u32) {
        self.0.remove(&(owner, index));
    }

    /// First object of the owner whose index is at least `from`.
    pub(super) fn next(&self, owner: O, from: u32) -> Option<u32> {
        let mut indices = self.0.range((owner, from)..=(owner, u32::MAX));
        indices.next().map(|(_, index)| *index)
    }

    #[cfg(test)]
    pub(super) fn count(&self, owner: O) -> usize {
        self.0.range((owner, 0)..=(owner, u32::MAX)).count()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dpdk::Mempool;
    use nix::time::{ClockId, clock_gettime};
    use siw_net::Instant;

    use crate::datapath::test_environment;
    use crate::ids::{ClientId, CqId, SrqId};
    use crate::worker::test_worker::{Queues, new_worker};

    /// Processor time of this thread.
    fn processor_time() -> Duration {
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
            .unwrap()
            .into()
    }

    /// Processor time of the departures of clients beside `count` objects of each kind of another
    /// client.
    fn time_beside(count: u32, pool: &Mempool) -> Duration {
        const DEPARTURES: u64 = 200;
        let queues = Queues::new();
        let mut worker = new_worker(pool);
        let connections = &mut worker.connections;
        let holder = ClientId(1);
        for number in 1..=count {
            let cq = queues.completion_queue(holder, CqId(number));
            connections.context.cqs.insert(cq);
            let srq = queues.shared_receive_queue(holder, SrqId(number));
            connections.context.srqs.insert(srq);
            connections.add_queue_pair(queues.queue_pair(holder, number), 0);
        }
        let before = processor_time();
        for number in 2..2 + DEPARTURES {
            let (client, id) = (ClientId(number), count + 1);
            let cq = queues.completion_queue(client, CqId(id));
            connections.context.cqs.insert(cq);
            let srq = queues.shared_receive_queue(client, SrqId(id));
            connections.context.srqs.insert(srq);
            connections.add_queue_pair(queues.queue_pair(client, id), 0);
            connections.departing.start(client, false);
            while connections.departing.pop_ended().is_none() {
                connections.remove_departing(Instant::ZERO);
            }
        }
        let time = processor_time() - before;
        assert_eq!(connections.queue_pairs.count(), count as usize);
        time
    }

    #[test]
    fn a_departure_costs_the_same_beside_many_objects_of_others() {
        let pool = Mempool::new(test_environment(), "departures", 63, 0, 2048, None).unwrap();
        let (alone, beside) = (time_beside(0, &pool), time_beside(20_000, &pool));
        assert!(
            beside < 10 * alone,
            "{alone:?} alone, {beside:?} beside 20,000 objects of each kind"
        );
    }
}
