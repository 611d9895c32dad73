//! Fault plans of operators (`siwctl fault`): loading, aims, the times of siwd's own faults, and the marks of
//! injected faults in recordings and the log. Workers let the faults of the wire happen
//! (`datapath/wire_faults.rs`).
//!
//! Plans are not kept for the next start: what ends siwd ends them.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::libc;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use siw_faults::{Aim, DaemonEnd, Direction, Fault, Kind, Place, Plan, Scope, Timetable};
use siw_shm::control::messages as m;

use super::viewer::Viewer;
use crate::capture::{CaptureFilter, Flow};
use crate::control::context::Context;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, send_reply};
use crate::control::threads::workers::WorkerSet;
use crate::datapath::wire_faults::{ActiveFault, FaultMark, LoadedFault};
use crate::ids::{ClientId, Qpn};
use crate::worker::messages::Command;

/// Plans at a time.
const MOST_PLANS: usize = 8;
/// Faults of a plan.
const MOST_FAULTS: usize = 64;
/// Connections that one fault can select by queue pair, client or user.
const MOST_FLOWS: usize = 4096;
/// Other ends whose faults are kept although there is no connection.
const MOST_STRANGE: usize = 256;
/// Reports of a fault that are logged one by one; later ones are logged together.
const MOST_LOGGED: u64 = 3;
/// Time between two messages about a fault after that.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Queue pairs whose connections a fault concerns.
#[derive(Debug, Clone, Copy)]
struct Owners {
    qp: Option<Qpn>,
    client: Option<ClientId>,
    user: Option<u32>,
}

impl Owners {
    /// `None`: the aim names none of them.
    fn of(aim: &Aim) -> Option<Owners> {
        let owners = Owners {
            qp: aim.qp.map(Qpn),
            client: aim.client.map(ClientId),
            user: aim.user,
        };
        let is_any = owners.qp.is_none() && owners.client.is_none() && owners.user.is_none();
        (!is_any).then_some(owners)
    }

    fn include(self, qpn: Qpn, client: ClientId, user: u32) -> bool {
        self.qp.is_none_or(|only| only == qpn)
            && self.client.is_none_or(|only| only == client)
            && self.user.is_none_or(|only| only == user)
    }
}

/// Messages about a fault so far.
#[derive(Debug, Default)]
struct Logged {
    reports: u64,
    last: Option<Instant>,
    /// Faults since the last message.
    unlogged: u64,
}

/// A fault of a plan.
struct PlannedFault {
    loaded: Arc<LoadedFault>,
    /// `None`: not only connections of some queue pairs.
    owners: Option<Owners>,
    filter: CaptureFilter,
    logged: Logged,
}

impl PlannedFault {
    fn is_of_wire(&self) -> bool {
        self.loaded.fault().kind.has_scope(Scope::Port)
    }

    /// Adds a connection if its queue pair is among the selected ones. Returns true if the fault has changed.
    fn add_flow(&mut self, (qpn, client, user): (Qpn, ClientId, u32), flow: Flow) -> bool {
        let is_meant = self
            .owners
            .is_some_and(|owners| owners.include(qpn, client, user));
        if !is_meant {
            return false;
        }
        let flows = self.filter.flows.get_or_insert_default();
        if flows.len() >= MOST_FLOWS {
            tracing::warn!(
                "more than {MOST_FLOWS} connections: {} does not concern further ones",
                self.loaded.text
            );
            return false;
        }
        flows.insert(flow)
    }

    /// Counts a fault, and writes a message unless there were many.
    fn log(&mut self, count: u64, qpns: &[Qpn]) {
        let logged = &mut self.logged;
        logged.reports += 1;
        logged.unlogged += count;
        let is_due = logged.reports <= MOST_LOGGED
            || logged
                .last
                .is_none_or(|last| last.elapsed() >= LOG_INTERVAL);
        if is_due {
            let qpns: Vec<u32> = qpns.iter().map(|qpn| qpn.0).collect();
            tracing::warn!(
                times = logged.unlogged,
                queue_pairs = ?qpns,
                "{}",
                self.loaded.text
            );
            logged.last = Some(Instant::now());
            logged.unlogged = 0;
        }
    }
}

/// A plan in force.
struct LoadedPlan {
    number: u32,
    name: String,
    plan: Arc<Plan>,
    loaded: Instant,
    /// Seconds since 1970.
    time: f64,
    pid: u32,
    faults: Vec<PlannedFault>,
    timetable: Timetable,
}

impl LoadedPlan {
    fn injected(&self) -> u64 {
        let faults = self.faults.iter();
        faults
            .map(|fault| fault.loaded.injected.load(Relaxed))
            .sum()
    }
}

/// The text of a plan that a client is sending.
struct Upload {
    total: usize,
    text: Vec<u8>,
}

/// Addresses of the connections of queue pairs, while there is a plan.
#[derive(Default)]
struct Endpoints {
    /// By the end of this daemon and the other one.
    qpns: HashMap<(SocketAddr, SocketAddr), Qpn>,
    ends: HashMap<Qpn, (SocketAddr, SocketAddr)>,
}

impl Endpoints {
    fn insert(&mut self, qpn: Qpn, ends: (SocketAddr, SocketAddr)) {
        self.remove(qpn);
        self.qpns.insert(ends, qpn);
        self.ends.insert(qpn, ends);
    }

    /// Removes a queue pair; returns the addresses of its connection.
    fn remove(&mut self, qpn: Qpn) -> Option<(SocketAddr, SocketAddr)> {
        let ends = self.ends.remove(&qpn)?;
        if self.qpns.get(&ends) == Some(&qpn) {
            self.qpns.remove(&ends);
        }
        Some(ends)
    }

    /// Queue pairs at the ends of a connection: one, or two of devices of this daemon.
    fn find(&self, (local, remote): (SocketAddr, SocketAddr)) -> Vec<Qpn> {
        let ends = [(local, remote), (remote, local)];
        let found = ends.iter().filter_map(|ends| self.qpns.get(ends));
        found.copied().collect()
    }
}

/// Addresses without the scopes of IPv6, which frames do not have.
fn plain((local, remote): (SocketAddr, SocketAddr)) -> (SocketAddr, SocketAddr) {
    let plain = |end: SocketAddr| SocketAddr::new(end.ip(), end.port());
    (plain(local), plain(remote))
}

/// All plans of the daemon.
#[derive(Default)]
pub(in crate::control) struct FaultPlans {
    plans: Vec<LoadedPlan>,
    uploads: HashMap<ClientId, Upload>,
    endpoints: Endpoints,
    /// Faults of frames of no connection, by their other end; `None`: without TCP or UDP, such as ARP. They may keep
    /// a connection from being made.
    strange: HashMap<Option<SocketAddr>, (Arc<str>, u64)>,
    last_number: u32,
}

/// Mistake of a plan: the fault and key at which it is, and the message.
type Mistake = (usize, &'static str, String);

impl FaultPlans {
    /// Takes a part of a plan's text; after the last one, loads the plan. The reply to the last part has the
    /// outcome as JSON, with an `error` if nothing was loaded.
    pub fn load_part(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::LoadFaults,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        Viewer::of(client).require_operator("load fault plans")?;
        let pid = client.peer.pid;
        let invalid = |why: String| Refusal::new(libc::EINVAL, why);
        let (total, offset) = (request.total as usize, request.offset as usize);
        if total > m::MAX_PLAN_TEXT {
            let why = format!("the plan has {total} bytes: at most {}", m::MAX_PLAN_TEXT);
            return Err(invalid(why));
        }
        let part = request.text.get(..request.len as usize);
        let part = part.ok_or_else(|| invalid(format!("a part of {} bytes", request.len)))?;
        if offset == 0 {
            let text = Vec::with_capacity(total);
            self.uploads.insert(id, Upload { total, text });
        }
        let upload = self.uploads.get_mut(&id);
        let upload = upload.filter(|upload| {
            upload.total == total
                && upload.text.len() == offset
                && offset + part.len() <= total
                && (!part.is_empty() || total == 0)
        });
        let Some(upload) = upload else {
            self.uploads.remove(&id);
            return Err(invalid("the parts of the plan do not fit together".into()));
        };
        upload.text.extend_from_slice(part);
        let mut outcome = String::new();
        if upload.text.len() == total {
            let text = self.uploads.remove(&id).map(|upload| upload.text);
            let text = text.unwrap_or_default();
            let loaded = self.load(context, pid, request, &text);
            outcome = loaded
                .unwrap_or_else(|error| json!({ "error": error }))
                .to_string();
        }
        let why = "the outcome is too long for a reply";
        let reply =
            m::OperateReply::new(&outcome).ok_or_else(|| Refusal::new(libc::EMSGSIZE, why))?;
        send_reply::<m::LoadFaults>(context.resources.client_mut(id)?, seq, &reply)
    }

    /// Loads a plan. Returns its description, or the reason why nothing has changed.
    fn load(
        &mut self,
        context: &mut Context,
        pid: u32,
        request: &m::LoadFaults,
        text: &[u8],
    ) -> Result<Value, String> {
        let (name, path) = (request.name.to_text(), request.path.to_text());
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err("the plan has no name: give it one with --name".into());
        }
        if self.plans.iter().any(|plan| plan.name == name) {
            return Err(format!(
                "a plan {name} is loaded: clear it (siwctl fault clear {name}), or load this one with --name"
            ));
        }
        if self.plans.len() >= MOST_PLANS {
            return Err(format!(
                "{MOST_PLANS} plans are loaded: clear one of them first"
            ));
        }
        let text = std::str::from_utf8(text);
        let text = text.map_err(|error| format!("{path}: the plan is no UTF-8: {error}"))?;
        let path = Path::new(&path);
        let plan = Plan::parse(path, text, Place::Daemon);
        let mut plan = plan.map_err(|error| error.to_string())?;
        if request.has_seed != 0 {
            plan.seed = request.seed;
        }
        if plan.faults.len() > MOST_FAULTS {
            let count = plan.faults.len();
            return Err(format!(
                "{}: the plan has {count} faults: at most {MOST_FAULTS} are possible in siwd",
                path.display()
            ));
        }
        let connections = current_connections(context);
        if self.plans.is_empty() {
            for connection in &connections {
                self.endpoints.insert(connection.qpn, connection.ends);
            }
        }
        let plan = Arc::new(plan);
        let number = self.last_number.wrapping_add(1).max(1);
        let now = Instant::now();
        let all = (0..plan.faults.len()).map(|index| {
            let (owners, filter) =
                self.resolve(context, &connections, index, &plan.faults[index])?;
            let fault = &plan.faults[index];
            let words = format!(
                "injected {} of plan {name}: {}",
                plan.name_of(index),
                fault.kind
            );
            Ok(PlannedFault {
                loaded: Arc::new(LoadedFault {
                    number,
                    plan: plan.clone(),
                    index,
                    loaded: now,
                    text: words.into(),
                    injected: AtomicU64::new(0),
                }),
                owners,
                filter,
                logged: Logged::default(),
            })
        });
        let faults: Result<Vec<_>, Mistake> = all.collect();
        let faults = faults.map_err(|(fault, key, why)| {
            Plan::error_at(path, text, (fault, key), why).to_string()
        })?;
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let notes = notes_on(&plan);
        tracing::warn!(
            pid,
            seed = plan.seed,
            "fault plan {name} is loaded: {} faults will be injected on purpose",
            faults.len()
        );
        let outcome = json!({
            "plan": name,
            "number": number,
            "seed": plan.seed,
            "faults": faults.len(),
            "notes": notes,
        });
        self.last_number = number;
        self.plans.push(LoadedPlan {
            number,
            name,
            timetable: Timetable::of_daemon(&plan),
            plan,
            loaded: now,
            time: since_epoch.map_or(0.0, |time| time.as_secs_f64()),
            pid,
            faults,
        });
        self.post_to_workers(&mut context.workers);
        Ok(outcome)
    }

    /// Finds the objects that a fault is aimed at.
    fn resolve(
        &self,
        context: &Context,
        connections: &[Connection],
        index: usize,
        fault: &Fault,
    ) -> Result<(Option<Owners>, CaptureFilter), Mistake> {
        let wrong = |key: &'static str, why: String| Err((index, key, why));
        if let Kind::WorkerStall {
            worker: Some(worker),
            ..
        } = fault.kind
            && worker as usize >= context.workers.worker_count()
        {
            let count = context.workers.worker_count();
            let why = format!("no worker {worker}: siwd has {count}, numbered from 0");
            return wrong("worker", why);
        }
        let aim = &fault.aim;
        let views = &context.devices.views;
        let live = views.iter().filter(|view| !view.is_deleted);
        let mut interfaces = None;
        if let Some(name) = &aim.device {
            let found = views
                .iter()
                .position(|view| !view.is_deleted && view.name.as_str() == name);
            let Some(found) = found else {
                let names: Vec<_> = live.map(|view| view.name.as_str()).collect();
                return wrong(
                    "device",
                    format!("no device {name}: siwd has {}", names.join(", ")),
                );
            };
            interfaces = Some(vec![found as u32]);
        }
        let resources = &context.resources;
        if let Some(qp) = aim.qp
            && resources.owner_of_qp(Qpn(qp)).is_none()
        {
            let why = format!("no queue pair {qp} (siwctl show qp lists them)");
            return wrong("qp", why);
        }
        if let Some(client) = aim.client
            && !resources.clients.contains_key(&ClientId(client))
        {
            let why = format!("no client {client} (siwctl show clients lists them)");
            return wrong("client", why);
        }
        let owners = Owners::of(aim);
        let mut filter = CaptureFilter {
            interfaces,
            host: aim.host,
            port: aim.port,
            flows: owners.map(|owners| flows_of(connections, owners)),
            snap_len: 0,
        };
        if let Some((first, second)) = aim.connection {
            let ends = plain((first, second));
            if self.endpoints.find(ends).is_empty() {
                let why = format!(
                    "no connection between {first} and {second} (siwctl show conn lists them)"
                );
                return wrong("connection", why);
            }
            filter.flows = Some(HashSet::from([Flow::new(ends.0, ends.1)]));
        }
        let is_wide = fault.kind.has_scope(Scope::Port)
            && aim.direction != Direction::Out
            && filter.flows.is_none()
            && filter.port.is_none()
            && !matches!(fault.kind, Kind::WirePartition { .. });
        let is_aimed = |index: usize| {
            let interfaces = filter.interfaces.as_ref();
            interfaces.is_none_or(|all| all.contains(&(index as u32)))
        };
        let shared = views.iter().enumerate().find(|(index, view)| {
            !view.is_deleted && view.config.host_interface.is_some() && is_aimed(*index)
        });
        if is_wide && let Some((_, view)) = shared {
            let why = format!(
                "{} shares its frames with the kernel, which would lose them too: aim the fault at a user, \
                 client, queue pair, connection or port, or set direction = \"out\"",
                view.name
            );
            return wrong("kind", why);
        }
        Ok((owners, filter))
    }

    /// Ends a plan, or all of them if there is no name. Returns the numbers of their faults, as JSON.
    pub fn clear(&mut self, workers: &mut WorkerSet, name: &str) -> Result<String, Refusal> {
        let is_meant = |plan: &LoadedPlan| name.is_empty() || plan.name == name;
        let (ended, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.plans)
            .into_iter()
            .partition(is_meant);
        self.plans = left;
        if ended.is_empty() {
            let why = match name {
                "" => "no fault plan is loaded".to_owned(),
                name => format!("no fault plan {name} is loaded"),
            };
            return Err(Refusal::new(libc::ENOENT, why));
        }
        self.post_to_workers(workers);
        if self.plans.is_empty() {
            self.endpoints = Endpoints::default();
            self.strange.clear();
        }
        let rows = ended.iter().map(|plan| {
            let injected = plan.injected();
            tracing::warn!(injected, "fault plan {} is cleared", plan.name);
            json!({ "plan": plan.name, "injected": injected })
        });
        Ok(Value::Array(rows.collect()).to_string())
    }

    /// Number of plans in force.
    pub fn count(&self) -> usize {
        self.plans.len()
    }

    /// Rows of the list of faults, by plan.
    pub fn rows(&self) -> impl Iterator<Item = Value> {
        self.plans.iter().flat_map(|plan| {
            plan.faults.iter().map(|planned| {
                let LoadedFault {
                    index, injected, ..
                } = &*planned.loaded;
                let fault = planned.loaded.fault();
                json!({
                    "plan": plan.name,
                    "number": plan.number,
                    "seed": plan.plan.seed,
                    "time": plan.time,
                    "pid": plan.pid,
                    "fault": index + 1,
                    "name": fault.name,
                    "kind": fault.kind.name(),
                    "device": fault.aim.device,
                    "user": fault.aim.user,
                    "client": fault.aim.client,
                    "lqpn": fault.aim.qp,
                    "host": fault.aim.host,
                    "port": fault.aim.port,
                    "connection": fault.aim.connection.map(|(a, b)| [a, b]),
                    "connections": planned.filter.flows.as_ref().map(HashSet::len),
                    "injected": injected.load(Relaxed),
                })
            })
        })
    }

    /// Notes the connection of a queue pair, which may be aimed at.
    pub fn on_established(
        &mut self,
        context: &mut Context,
        qpn: Qpn,
        ends: (SocketAddr, SocketAddr),
    ) {
        if self.plans.is_empty() {
            return;
        }
        let Some(owner) = context.resources.owner_of_qp(qpn) else {
            return;
        };
        let user = context.resources.clients.get(&owner);
        let Some(user) = user.map(|client| client.account.uid()) else {
            return;
        };
        let ends = plain(ends);
        self.endpoints.insert(qpn, ends);
        let mut has_changed = false;
        for fault in self.plans.iter_mut().flat_map(|plan| &mut plan.faults) {
            has_changed |= fault.add_flow((qpn, owner, user), Flow::new(ends.0, ends.1));
        }
        if has_changed {
            self.post_to_workers(&mut context.workers);
        }
    }

    /// Records the faults that may have kept a queue pair from being connected.
    pub fn on_connect_failed(&self, context: &mut Context, qpn: Qpn) {
        if self.strange.is_empty() {
            return;
        }
        let resources = &mut context.resources;
        let owner = resources.owner_of_qp(qpn);
        let qp = owner.and_then(|owner| resources.qp_mut(owner, qpn));
        let peer = qp.and_then(|qp| qp.peer.to_socket_addr());
        let Some(peer) = peer else {
            return;
        };
        let peer = SocketAddr::new(peer.ip(), peer.port());
        for remote in [Some(peer), None] {
            if let Some((text, count)) = self.strange.get(&remote) {
                resources.record_fault(qpn, text, *count);
            }
        }
    }

    /// Forgets a queue pair that is destroyed: its addresses may be used again.
    pub fn on_destroyed(&mut self, workers: &mut WorkerSet, qpn: Qpn) {
        let Some((local, remote)) = self.endpoints.remove(qpn) else {
            return;
        };
        if !self.endpoints.find((local, remote)).is_empty() {
            return;
        }
        let flow = Flow::new(local, remote);
        let mut has_changed = false;
        for fault in self.plans.iter_mut().flat_map(|plan| &mut plan.faults) {
            let flows = fault.filter.flows.as_mut();
            has_changed |= flows.is_some_and(|flows| flows.remove(&flow));
        }
        if has_changed {
            self.post_to_workers(workers);
        }
    }

    /// Forgets a client's text.
    pub fn end_of_client(&mut self, id: ClientId) {
        self.uploads.remove(&id);
    }

    /// Records faults that workers have let happen, at the queue pairs that they concern, and in the log.
    pub fn on_injected(&mut self, context: &mut Context, marks: &[FaultMark]) {
        for mark in marks {
            let qpns = mark.ends.map(|ends| self.endpoints.find(ends));
            let qpns = qpns.unwrap_or_default();
            let remote = mark.ends.map(|(_, remote)| remote);
            let has_room = self.strange.len() < MOST_STRANGE || self.strange.contains_key(&remote);
            if qpns.is_empty() && has_room {
                let text = || (mark.loaded.text.clone(), 0);
                self.strange.entry(remote).or_insert_with(text).1 += mark.count;
            }
            for qpn in &qpns {
                let resources = &mut context.resources;
                resources.record_fault(*qpn, &mark.loaded.text, mark.count);
            }
            let is_same = |fault: &&mut PlannedFault| Arc::ptr_eq(&fault.loaded, &mark.loaded);
            let mut all = self.plans.iter_mut().flat_map(|plan| &mut plan.faults);
            if let Some(fault) = all.find(is_same) {
                fault.log(mark.count, &qpns);
            }
        }
    }

    /// Time until the next fault of siwd itself.
    pub fn time_until_due(&self) -> Option<Duration> {
        let times = self.plans.iter().filter_map(|plan| {
            let next = plan.timetable.next()?;
            Some(next.saturating_sub(plan.loaded.elapsed()))
        });
        times.min()
    }

    /// Lets the faults of siwd itself happen whose time has come. Returns true if siwd has to end in order.
    pub fn run(&mut self, workers: &mut WorkerSet) -> bool {
        let mut ends = false;
        for plan in &mut self.plans {
            let due = plan.timetable.take_due(&plan.plan, plan.loaded.elapsed());
            // A stall that was due several times meanwhile happens once.
            let mut done: Vec<usize> = Vec::new();
            for hit in due {
                if done.contains(&hit.fault) {
                    continue;
                }
                done.push(hit.fault);
                let fault = &mut plan.faults[hit.fault];
                fault.loaded.injected.fetch_add(1, Relaxed);
                fault.log(1, &[]);
                match &hit.kind {
                    Kind::WorkerStall { stall, worker } => match worker {
                        Some(worker) => {
                            workers.post_command(*worker as usize, Command::Stall(*stall));
                        }
                        None => workers.post_to_all(|| Command::Stall(*stall)),
                    },
                    Kind::ControlStall { stall } => std::thread::sleep(*stall),
                    Kind::DaemonEnd(DaemonEnd::Stop) => ends = true,
                    Kind::DaemonEnd(DaemonEnd::Abort) => {
                        // As a crash: nothing is cleaned up.
                        let _ = nix::sys::signal::raise(Signal::SIGKILL);
                    }
                    _ => {}
                }
            }
        }
        ends
    }

    /// Gives the workers the faults of the wire; also after a device was added.
    pub fn post_to_workers(&self, workers: &mut WorkerSet) {
        let all = self.plans.iter().flat_map(|plan| &plan.faults);
        let active = all
            .filter(|fault| fault.is_of_wire())
            .map(|fault| ActiveFault {
                loaded: fault.loaded.clone(),
                filter: Arc::new(fault.filter.clone()),
            });
        let active: Arc<[ActiveFault]> = active.collect();
        workers.post_to_all(|| Command::SetFaults(active.clone()));
    }

    /// As [`Self::post_to_workers`], if there are plans.
    pub fn on_device_added(&self, workers: &mut WorkerSet) {
        if !self.plans.is_empty() {
            self.post_to_workers(workers);
        }
    }
}

/// Advice about a plan that was loaded.
fn notes_on(plan: &Plan) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let has = |wanted: DaemonEnd| {
        let mut faults = plan.faults.iter();
        faults.any(|fault| matches!(fault.kind, Kind::DaemonEnd(how) if how == wanted))
    };
    let is_supervised = std::env::var_os("NOTIFY_SOCKET").is_some();
    if has(DaemonEnd::Abort) || has(DaemonEnd::Stop) {
        notes.push(match is_supervised {
            false => "siwd has no service manager: after it has ended it does not come back by itself",
            true if has(DaemonEnd::Stop) => {
                "a service manager starts siwd again after \"abort\"; after \"stop\" only with Restart=always"
            }
            true => "its service manager starts siwd again; the plan is not loaded then",
        });
    }
    notes
}

/// A connection of a queue pair.
struct Connection {
    qpn: Qpn,
    client: ClientId,
    user: u32,
    ends: (SocketAddr, SocketAddr),
}

/// Connections that queue pairs have now.
fn current_connections(context: &Context) -> Vec<Connection> {
    let clients = context.resources.clients.iter();
    let connections = clients.flat_map(|(id, client)| {
        client.qps.iter().filter_map(|(qpn, qp)| {
            let ends = qp.local.to_socket_addr().zip(qp.peer.to_socket_addr())?;
            Some(Connection {
                qpn: *qpn,
                client: *id,
                user: client.account.uid(),
                ends: plain(ends),
            })
        })
    });
    connections.collect()
}

fn flows_of(connections: &[Connection], owners: Owners) -> HashSet<Flow> {
    let meant = connections
        .iter()
        .filter(|connection| owners.include(connection.qpn, connection.client, connection.user));
    let flows = meant.map(|connection| Flow::new(connection.ends.0, connection.ends.1));
    flows.take(MOST_FLOWS).collect()
}
