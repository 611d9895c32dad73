//! Limits of a worker's batch.

use std::time::Duration;

/// Shares of a batch, and the sizes from which the worker works in another way. Counts are for one
/// batch.
pub(super) struct Thresholds {
    /// Doorbells taken from one client; the rest wait, so that no client delays the others.
    pub(super) doorbells_per_client: usize,
    /// Doorbells taken from all clients of one user.
    pub(super) doorbells_per_user: usize,
    /// Number of a user's ready queue pairs that keeps a batch busy. The state of further ones would
    /// be read now and evicted from the cache before their turn.
    pub(super) enough_ready: usize,
    /// Doorbells taken from one client while its user has `enough_ready` ready queue pairs. Not zero,
    /// because those may have so much to send that they stay ready.
    pub(super) doorbells_when_enough: usize,
    /// Clients whose doorbells are looked at in each batch: those that rang last.
    pub(super) active_clients: usize,
    /// Further clients looked at, in turn. A client that rings after a pause is found within a few
    /// batches, and then joins the active ones.
    pub(super) other_clients: usize,
    /// Send queues polled at a time. Clients of other queues ring doorbells.
    pub(super) polled_queues: usize,
    /// Consecutive empty polls after which a queue is no longer polled.
    pub(super) empty_polls: u32,
    /// FPDUs that one queue pair may queue before the next one has its turn.
    pub(super) fpdus_per_turn: u32,
    /// Queue pairs of one user and port that have their turn; the others wait for the next batch.
    pub(super) turns: usize,
    /// Turns on a port that has no room for everything due. Work requests are better left in their
    /// rings than queued in TCP, whose state for them would be cold in the cache by the time there is
    /// room.
    pub(super) turns_when_full: usize,
    /// Limit of frames if more queue pairs than this of one user and port are ready. They could send
    /// more, but the state that they touch should still be in the cache when the acknowledgements
    /// arrive.
    pub(super) frames_of_many: usize,
    /// Queue pairs of one user and port without a stream whose rings are flushed, each with its own
    /// budget.
    pub(super) flushes: u32,
    /// Number of ready queue pairs from which prefetching pays: then the state of the next one is not
    /// in the cache. With few there is nothing to gain.
    pub(super) prefetch_from: usize,
    /// Turns ahead at which a queue pair is prefetched.
    pub(super) queue_pair_ahead: usize,
    /// Turns ahead at which the data that it points to is prefetched: its request and its connection.
    pub(super) connection_ahead: usize,
    /// Parked queue pairs of each kind that are looked at, which bounds the cost that one client
    /// imposes on others.
    pub(super) parked_looks: usize,
    /// Messages whose memory is taken back from ports, and which complete if they waited for that.
    pub(super) releases: usize,
    /// Messages looked at for buffers of memory that is to be released.
    pub(super) searched_messages: usize,
    /// Queue pairs of overflowed completion queues that end.
    pub(super) ended: usize,
    /// Objects of departed clients that are removed.
    pub(super) removals: usize,
    /// Time after which no further one is removed: the end of a queue pair flushes its requests.
    pub(super) removal_time: Duration,
    /// Expired deadlines that are handled. Each may end a connection.
    pub(super) deadlines: usize,
    /// Commands executed, so that a burst of them does not stall the data path.
    pub(super) commands: usize,
}

pub(super) const THRESHOLDS: Thresholds = Thresholds {
    doorbells_per_client: 64,
    doorbells_per_user: 512,
    enough_ready: 128,
    doorbells_when_enough: 8,
    active_clients: 32,
    other_clients: 32,
    polled_queues: 8,
    empty_polls: 256,
    fpdus_per_turn: 64,
    turns: 256,
    turns_when_full: 4,
    frames_of_many: 48,
    flushes: 8,
    prefetch_from: 16,
    queue_pair_ahead: 6,
    connection_ahead: 3,
    parked_looks: 64,
    releases: 64,
    searched_messages: 256,
    ended: 16,
    removals: 16,
    removal_time: Duration::from_micros(50),
    deadlines: 32,
    commands: 16,
};
