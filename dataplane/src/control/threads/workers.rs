//! The control thread's interface to the workers. Each worker's commands are executed in order.
//!
//! The control thread never waits for a worker: commands that its queue has no room for stay here until
//! the worker has taken others. How many of them one client can cause is limited where its requests are
//! read ([`COMMANDS_IN_FLIGHT`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use siw_shm::SharedMemory;

use crate::control::request::deferred::{Deferred, Then};
use crate::ids::{ClientId, CommandToken};
use crate::worker::messages::{Command, Event, WorkerStats};
use crate::worker::{Mailbox, region_address};

/// Commands that the requests of a client may cause before workers have executed all earlier ones. Its
/// next request then stays in its socket. A batch of a worker executes 16.
pub(in crate::control) const COMMANDS_IN_FLIGHT: u64 = 64;

/// All workers, by index.
pub(in crate::control) struct WorkerSet {
    mailboxes: Arc<[Arc<Mailbox>]>,
    /// Commands of each worker that its queue had no room for.
    backlogs: Vec<VecDeque<Command>>,
    /// Commands posted so far.
    posted: u64,
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
            backlogs: std::iter::repeat_with(VecDeque::new).take(count).collect(),
            posted: 0,
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

    /// Commands posted so far.
    pub fn posted_commands(&self) -> u64 {
        self.posted
    }

    /// Sends a command to a worker and wakes it. After the worker's end the command is dropped.
    pub fn post_command(&mut self, worker: usize, command: Command) {
        let (Some(mailbox), Some(backlog)) =
            (self.mailboxes.get(worker), self.backlogs.get_mut(worker))
        else {
            return;
        };
        self.posted += 1;
        if !backlog.is_empty() {
            backlog.push_back(command);
            return;
        }
        if let Err(command) = mailbox.commands.push(command)
            // Pairs with the Release in `Worker::check_stopped`.
            && !mailbox.has_ended.load(Ordering::Acquire)
        {
            backlog.push_back(command);
        }
        mailbox.wake_worker();
    }

    /// Returns true if a worker's queue has no room for all of its commands.
    pub fn has_backlog(&self) -> bool {
        self.backlogs.iter().any(|backlog| !backlog.is_empty())
    }

    /// Sends the commands that had no room, as far as there is room now.
    pub fn send_backlogs(&mut self) {
        for (mailbox, backlog) in self.mailboxes.iter().zip(&mut self.backlogs) {
            if backlog.is_empty() {
                continue;
            }
            if mailbox.has_ended.load(Ordering::Acquire) {
                backlog.clear();
            }
            while let Some(command) = backlog.pop_front() {
                if let Err(command) = mailbox.commands.push(command) {
                    backlog.push_front(command);
                    break;
                }
            }
            mailbox.wake_worker();
        }
    }

    /// Sends a command to each worker.
    pub fn post_to_all(&mut self, command: impl Fn() -> Command) {
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

    /// Posts a barrier for a client's request; `then` follows it.
    pub fn await_barrier(&mut self, client: ClientId, then: Then) -> Deferred {
        let (token, left) = self.post_barrier(Some(client));
        Deferred { token, left, then }
    }

    /// Requests a report from every worker when no port holds a frame that refers to these regions
    /// at the time of the call. Returns the same as [`Self::post_barrier`].
    pub fn await_frames(
        &mut self,
        client: ClientId,
        mut regions: Vec<Arc<SharedMemory>>,
    ) -> (CommandToken, usize) {
        regions.sort_unstable_by_key(region_address);
        let regions: Arc<[_]> = regions.into();
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

    /// A set of one worker, whose queue has room for two commands.
    fn narrow_set() -> (Arc<Mailbox>, WorkerSet) {
        let event_descriptor = || -> OwnedFd { EventFd::new().unwrap().into() };
        let page = WorkerPage::create_sealed(2).unwrap();
        let flag = |number| page.sleep_flag(number).unwrap();
        let mailbox = Arc::new(Mailbox {
            commands: ArrayQueue::new(2),
            events: ArrayQueue::new(2),
            has_ended: AtomicBool::new(false),
            inbox: Arc::new(WorkerInbox::new(event_descriptor(), flag(0))),
            control_wake: Arc::new(event_descriptor()),
            control_asleep: Arc::new(flag(1)),
        });
        let workers = WorkerSet::new(Arc::new([mailbox.clone()]));
        (mailbox, workers)
    }

    fn next_token(mailbox: &Mailbox) -> Option<CommandToken> {
        match mailbox.commands.pop()? {
            Command::Barrier { token } => Some(token),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn commands_without_room_wait_and_stay_in_order() {
        let (mailbox, mut workers) = narrow_set();
        let tokens: Vec<_> = (0..5).map(|_| workers.post_barrier(None).0).collect();
        assert!(workers.has_backlog());
        let mut executed = vec![next_token(&mailbox)];
        // The queue has room again, but earlier commands wait.
        let last = workers.post_barrier(None).0;
        while workers.has_backlog() {
            workers.send_backlogs();
            executed.push(next_token(&mailbox));
        }
        executed.extend([next_token(&mailbox)]);
        let expected: Vec<_> = tokens.into_iter().chain([last]).map(Some).collect();
        assert_eq!(executed, expected);
        assert_eq!(workers.posted_commands(), 6);
    }

    #[test]
    fn commands_to_a_worker_that_has_ended_are_dropped() {
        let (mailbox, mut workers) = narrow_set();
        for _ in 0..3 {
            workers.post_barrier(None);
        }
        assert!(workers.has_backlog());
        mailbox.has_ended.store(true, Ordering::Release);
        workers.send_backlogs();
        workers.post_to_all(|| Command::Stop);
        assert!(!workers.has_backlog());
        assert_eq!(mailbox.commands.len(), 2);
    }
}
