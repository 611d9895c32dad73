//! The control thread's end of the workers: commands go out through it, each worker's in order.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use siw_shm::SharedMemory;

use crate::ids::CommandToken;
use crate::worker::Mailbox;
use crate::worker::messages::{Command, Event, WorkerStats};

/// How long to wait before a full queue of commands is tried again.
const FULL_QUEUE_PAUSE: Duration = Duration::from_micros(50);

/// All workers, by index.
pub(super) struct WorkerSet {
    mailboxes: Arc<[Arc<Mailbox>]>,
    /// Workers that have not stopped yet.
    running: usize,
    last_token: u64,
    /// Counters as each worker reported them last.
    pub stats: Vec<WorkerStats>,
}

impl WorkerSet {
    /// The workers of these mailboxes, all running.
    pub fn new(mailboxes: Arc<[Arc<Mailbox>]>) -> WorkerSet {
        let count = mailboxes.len();
        WorkerSet {
            mailboxes,
            running: count,
            last_token: 0,
            stats: vec![WorkerStats::default(); count],
        }
    }

    /// How many workers there are.
    pub fn worker_count(&self) -> usize {
        self.mailboxes.len()
    }

    /// Whether any worker still runs.
    pub fn is_running(&self) -> bool {
        self.running > 0
    }

    /// Notes that a worker has stopped.
    pub fn on_stopped(&mut self) {
        self.running -= 1;
    }

    /// Whether a worker has reported something.
    pub fn has_events(&self) -> bool {
        self.mailboxes
            .iter()
            .any(|mailbox| !mailbox.events.is_empty())
    }

    /// Takes what a worker reported next.
    pub fn next_event(&self, worker: usize) -> Option<Event> {
        self.mailboxes.get(worker)?.events.pop()
    }

    /// Hands a command to a worker and wakes it. A full queue is waited for: workers empty it
    /// in microseconds.
    pub fn post_command(&self, worker: usize, mut command: Command) {
        let Some(mailbox) = self.mailboxes.get(worker) else {
            return;
        };
        while let Err(back) = mailbox.commands.push(command) {
            command = back;
            mailbox.inbox.wake_always();
            std::thread::sleep(FULL_QUEUE_PAUSE);
        }
        mailbox.wake_worker();
    }

    /// Hands a command to each worker.
    pub fn post_to_all(&self, command: impl Fn() -> Command) {
        for worker in 0..self.worker_count() {
            self.post_command(worker, command());
        }
    }

    /// A token that no command under way has.
    pub fn next_token(&mut self) -> CommandToken {
        self.last_token += 1;
        CommandToken(self.last_token)
    }

    /// Has every worker report when it has done all earlier commands: the token of these reports,
    /// and how many will come.
    pub fn post_barrier(&mut self) -> (CommandToken, usize) {
        let token = self.next_token();
        self.post_to_all(|| Command::Barrier { token });
        (token, self.worker_count())
    }

    /// Has every worker report when no port holds a frame any more that refers to these regions as
    /// of now: as [`Self::post_barrier`].
    pub fn await_frames(&mut self, regions: Arc<[Arc<SharedMemory>]>) -> (CommandToken, usize) {
        let token = self.next_token();
        let unanswered = Arc::new(AtomicUsize::new(self.worker_count()));
        self.post_to_all(|| Command::AwaitFrames {
            token,
            regions: regions.clone(),
            unanswered: unanswered.clone(),
        });
        (token, self.worker_count())
    }
}
