//! The control thread's interface to the workers. Each worker's commands are executed in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use siw_shm::SharedMemory;

use crate::ids::{ClientId, CommandToken};
use crate::worker::Mailbox;
use crate::worker::messages::{Command, Event, WorkerStats};

/// Pause before a push to a full command queue is retried.
const FULL_QUEUE_PAUSE: Duration = Duration::from_micros(50);

/// All workers, by index.
pub(super) struct WorkerSet {
    mailboxes: Arc<[Arc<Mailbox>]>,
    /// Workers that have not stopped yet.
    running: usize,
    last_token: u64,
    /// Latest counters of each worker.
    pub stats: Vec<WorkerStats>,
}

impl WorkerSet {
    /// Creates the set of these workers, all running.
    pub fn new(mailboxes: Arc<[Arc<Mailbox>]>) -> WorkerSet {
        let count = mailboxes.len();
        WorkerSet {
            mailboxes,
            running: count,
            last_token: 0,
            stats: vec![WorkerStats::default(); count],
        }
    }

    /// Number of workers.
    pub fn worker_count(&self) -> usize {
        self.mailboxes.len()
    }

    /// Returns true if any worker still runs.
    pub fn is_running(&self) -> bool {
        self.running > 0
    }

    /// Records that a worker has stopped.
    pub fn on_stopped(&mut self) {
        self.running -= 1;
    }

    /// Returns true if a worker has queued an event.
    pub fn has_events(&self) -> bool {
        self.mailboxes
            .iter()
            .any(|mailbox| !mailbox.events.is_empty())
    }

    /// Takes the next event of a worker.
    pub fn next_event(&self, worker: usize) -> Option<Event> {
        self.mailboxes.get(worker)?.events.pop()
    }

    /// Sends a command to a worker and wakes it. Blocks while the queue is full; workers empty it
    /// in microseconds. After the worker's end the command is dropped.
    pub fn post_command(&self, worker: usize, mut command: Command) {
        let Some(mailbox) = self.mailboxes.get(worker) else {
            return;
        };
        while let Err(back) = mailbox.commands.push(command) {
            // Pairs with the Release in `Worker::check_stopped`.
            if mailbox.has_ended.load(Ordering::Acquire) {
                return;
            }
            command = back;
            mailbox.inbox.wake_always();
            std::thread::sleep(FULL_QUEUE_PAUSE);
        }
        mailbox.wake_worker();
    }

    /// Sends a command to each worker.
    pub fn post_to_all(&self, command: impl Fn() -> Command) {
        for worker in 0..self.worker_count() {
            self.post_command(worker, command());
        }
    }

    /// Allocates a token for a command whose answer this client waits for.
    pub fn next_token(&mut self, client: Option<ClientId>) -> CommandToken {
        self.last_token += 1;
        let number = self.last_token;
        CommandToken { client, number }
    }

    /// Posts a barrier to every worker, which reports when it has executed all earlier commands.
    /// Returns the token and the number of these reports.
    pub fn post_barrier(&mut self, client: Option<ClientId>) -> (CommandToken, usize) {
        let token = self.next_token(client);
        self.post_to_all(|| Command::Barrier { token });
        (token, self.worker_count())
    }

    /// Requests a report from every worker when no port holds a frame that refers to these regions
    /// at the time of the call. Returns the same as [`Self::post_barrier`].
    pub fn await_frames(
        &mut self,
        client: ClientId,
        regions: Arc<[Arc<SharedMemory>]>,
    ) -> (CommandToken, usize) {
        let token = self.next_token(Some(client));
        let unanswered = Arc::new(AtomicUsize::new(self.worker_count()));
        self.post_to_all(|| Command::AwaitFrames {
            token,
            regions: regions.clone(),
            unanswered: unanswered.clone(),
        });
        (token, self.worker_count())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::atomic::AtomicBool;

    use crossbeam::queue::ArrayQueue;
    use nix::sys::eventfd::EventFd;
    use siw_shm::WorkerPage;

    use super::*;
    use crate::datapath::inbox::WorkerInbox;

    #[test]
    fn commands_to_a_worker_that_has_ended_do_not_block() {
        let event_descriptor = || -> OwnedFd { EventFd::new().unwrap().into() };
        let page = WorkerPage::create_sealed(2).unwrap();
        let flag = |number| page.sleep_flag(number).unwrap();
        let mailbox = Mailbox {
            commands: ArrayQueue::new(2),
            events: ArrayQueue::new(2),
            has_ended: AtomicBool::new(false),
            inbox: Arc::new(WorkerInbox::new(event_descriptor(), flag(0))),
            control_wake: Arc::new(event_descriptor()),
            control_asleep: Arc::new(flag(1)),
        };
        let mailbox = Arc::new(mailbox);
        let mut workers = WorkerSet::new(Arc::new([mailbox.clone()]));
        workers.post_barrier(None);
        workers.post_barrier(None);
        // The worker ends while the control thread waits for room.
        std::thread::scope(|scope| {
            scope.spawn(|| mailbox.has_ended.store(true, Ordering::Release));
            workers.post_barrier(None);
        });
        workers.post_to_all(|| Command::Stop);
        assert_eq!(mailbox.commands.len(), 2);
    }
}
