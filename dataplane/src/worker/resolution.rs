//! Resolution of addresses before a connect (rdma_resolve_addr(3)): the neighbour of a destination is
//! solicited until it answers or the consumer's time-out has passed, and a source port is drawn, which
//! the connect then uses.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use siw_iwarp::TxRecord;
use siw_net::{Instant, QuotaOwner};
use siw_tcp::StackError;

use super::deadlines::{DeadlineOwner, Deadlines};
use super::messages::{Event, ResolutionFailure, ResolutionReport, ResolutionRequest};
use crate::datapath::port::WorkerPort;
use crate::ids::{ClientId, ResolutionId};

/// Shortest and longest pause until the next look at a neighbour that has not answered. Between them, it
/// is a quarter of the time that has passed.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// A resolution whose neighbour has not answered yet.
struct Resolution {
    request: ResolutionRequest,
    /// Index of its device's port in the worker.
    port: usize,
    begin: Instant,
}

/// What resolutions use of their worker.
pub(super) struct ResolvingWorker<'a> {
    pub ports: &'a mut [WorkerPort<TxRecord>],
    pub deadlines: &'a mut Deadlines,
    pub events: &'a mut VecDeque<Event>,
}

/// Resolutions in progress in one worker.
#[derive(Default)]
pub(super) struct Resolutions(BTreeMap<(ClientId, ResolutionId), Resolution>);

impl Resolutions {
    /// Ends a resolution without a report.
    pub(super) fn remove(&mut self, client: ClientId, resolution: ResolutionId) {
        self.0.remove(&(client, resolution));
    }

    /// Ends a resolution of a client without a report. Returns false if the client has none.
    pub(super) fn remove_next(&mut self, client: ClientId) -> bool {
        let mut of_client = self
            .0
            .range((client, ResolutionId(0))..=(client, ResolutionId(u32::MAX)));
        let next = of_client.next().map(|(&(_, resolution), _)| resolution);
        if let Some(resolution) = next {
            self.remove(client, resolution);
        }
        next.is_some()
    }

    /// Starts a resolution; it ends at once if the neighbour is known.
    pub(super) fn start(
        &mut self,
        now: Instant,
        request: ResolutionRequest,
        worker: &mut ResolvingWorker<'_>,
    ) {
        let mut ports = worker.ports.iter();
        let (client, number, report) = (request.client, request.resolution, request.report);
        match ports.position(|port| port.device == request.device) {
            Some(port) => {
                let begin = now;
                let started = Resolution {
                    request,
                    port,
                    begin,
                };
                self.0.insert((client, number), started);
                self.look_up(now, client, number, worker);
            }
            None => {
                let outcome = Err(ResolutionFailure::NoDevice);
                self.end((client, number, report), outcome, worker);
            }
        }
    }

    /// Looks up the neighbour of a resolution, and ends it or waits longer.
    pub(super) fn look_up(
        &mut self,
        now: Instant,
        client: ClientId,
        number: ResolutionId,
        worker: &mut ResolvingWorker<'_>,
    ) {
        let Some(resolution) = self.0.get(&(client, number)) else {
            return;
        };
        let request = &resolution.request;
        let owner = QuotaOwner {
            // As for queue pairs.
            client: client.0 as u32,
            user: request.user,
        };
        let stack = &mut worker.ports[resolution.port].stack;
        let (local, remote, report) = (request.local, request.remote, request.report);
        let outcome = match stack.resolve_neighbour(now, owner, remote.ip()) {
            Ok(true) if local.port() != 0 => Ok(local),
            Ok(true) => stack
                .draw_source(now, local.ip(), remote)
                .ok_or(ResolutionFailure::Local(StackError::NoPorts)),
            Ok(false) => {
                let end = resolution.begin + request.timeout;
                if now < end {
                    let passed = now - resolution.begin;
                    let next = now + (passed / 4).clamp(PAUSE_MIN, PAUSE_MAX);
                    let owner = DeadlineOwner::Resolution(client, number);
                    return worker.deadlines.insert(next.min(end), owner);
                }
                Err(ResolutionFailure::TimedOut)
            }
            Err(error) => Err(ResolutionFailure::Local(error)),
        };
        self.end((client, number, report), outcome, worker);
    }

    fn end(
        &mut self,
        (client, resolution, report): (ClientId, ResolutionId, ResolutionReport),
        outcome: Result<SocketAddr, ResolutionFailure>,
        worker: &mut ResolvingWorker<'_>,
    ) {
        self.remove(client, resolution);
        worker.events.push_back(match report {
            ResolutionReport::ToClient => Event::Resolved {
                client,
                resolution,
                outcome,
            },
            ResolutionReport::ToRequest(token) => Event::AhResolved {
                token,
                failure: outcome.err(),
            },
        });
    }

    /// Ends the resolutions on a port that is removed.
    pub(super) fn fail_all_on(&mut self, port: usize, worker: &mut ResolvingWorker<'_>) {
        let all = self.0.iter();
        let on_port: Vec<_> = all
            .filter(|(_, resolution)| resolution.port == port)
            .map(|(&(client, number), resolution)| (client, number, resolution.request.report))
            .collect();
        for ended in on_port {
            self.end(ended, Err(ResolutionFailure::NoDevice), worker);
        }
    }
}
