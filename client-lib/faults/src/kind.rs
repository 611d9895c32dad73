//! Kinds of faults: effect, call at which each happens, and the object whose calls are counted.

use std::ffi::c_int;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// Words of plans.
pub(crate) trait Word: Copy + 'static {
    /// All words, with their names in plans.
    const WORDS: &'static [(Self, &'static str)];
}

/// Finds a word by its name.
pub(crate) fn find_word<W: Word>(name: &str) -> Result<W, String> {
    let found = W::WORDS.iter().find(|(_, known)| *known == name);
    found.map(|(word, _)| *word).ok_or_else(|| {
        let names: Vec<_> = W::WORDS.iter().map(|(_, known)| *known).collect();
        format!("unknown {name:?}: it can be {}", names.join(", "))
    })
}

/// Implements [`Word`], and the function `name`.
macro_rules! words {
    ($($type:ident { $($word:ident = $name:literal),* $(,)? })*) => {
        $(
            impl Word for $type {
                const WORDS: &'static [(Self, &'static str)] = &[$(($type::$word, $name)),*];
            }

            impl $type {
                /// Name in plans.
                pub fn name(self) -> &'static str {
                    match self {
                        $($type::$word => $name),*
                    }
                }
            }
        )*
    };
}

words! {
    Object {
        Pd = "pd", Mr = "mr", Mw = "mw", Cq = "cq", Qp = "qp", Srq = "srq", Ah = "ah",
    }
    Operation { Send = "send", Receive = "receive" }
    Side { Active = "active", Passive = "passive" }
    AsyncEvent {
        QpFatal = "QP_FATAL", DeviceFatal = "DEVICE_FATAL", PortActive = "PORT_ACTIVE",
        PortErr = "PORT_ERR", SrqLimitReached = "SRQ_LIMIT_REACHED", GidChange = "GID_CHANGE",
    }
    CmEvent { AddrChange = "ADDR_CHANGE", TimewaitExit = "TIMEWAIT_EXIT" }
    Direction { Both = "both", Out = "out", In = "in" }
    DaemonEnd { Abort = "abort", Stop = "stop" }
}

/// Reader of a plan: each kind of fault happens in one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The verbs and rdma_cm of a program (`siwrun --faults`).
    Program,
    /// siwd (`siwctl fault load`): frames of its devices, and its threads.
    Daemon,
}

/// Frames that a fault of the wire concerns, as seen from a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Direction {
    /// Sent and received ones.
    #[default]
    Both,
    /// Sent ones.
    Out,
    /// Received ones.
    In,
}

/// Manner in which siwd ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonEnd {
    /// At once, as after a crash.
    Abort,
    /// In order, as by SIGTERM.
    Stop,
}

/// Kinds of objects whose creation can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Object {
    /// ibv_alloc_pd(3)
    Pd,
    /// ibv_reg_mr(3) and its variants
    Mr,
    /// ibv_alloc_mw(3)
    Mw,
    /// ibv_create_cq(3), ibv_create_cq_ex(3)
    Cq,
    /// ibv_create_qp(3), ibv_create_qp_ex(3), rdma_create_qp(3)
    Qp,
    /// ibv_create_srq(3), ibv_create_srq_ex(3)
    Srq,
    /// ibv_create_ah(3)
    Ah,
}

/// Work requests whose completions fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Those of the send queue.
    Send,
    /// Those of the receive queue.
    Receive,
}

/// End of a connection at which a reject happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// rdma_connect(3) of the program is rejected, without a connection.
    Active,
    /// A request to a listener of the program is rejected before the program gets it.
    Passive,
}

/// Asynchronous events (ibv_get_async_event(3)) that a plan can raise, without IBV_EVENT_.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A queue pair fails, and goes to the error state.
    QpFatal,
    /// The device fails: all its queue pairs go to the error state.
    DeviceFatal,
    /// The port comes up.
    PortActive,
    /// The port goes down.
    PortErr,
    /// A shared receive queue has fewer requests than its limit.
    SrqLimitReached,
    /// The GID table changes.
    GidChange,
}

/// Events of rdma_cm (rdma_get_cm_event(3)) in a storm, without RDMA_CM_EVENT_. They change nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmEvent {
    /// The address of the identifier has changed.
    AddrChange,
    /// The connection has left the state TIME-WAIT.
    TimewaitExit,
}

/// Effect of a fault.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// A post to a send queue fails, and nothing is posted.
    PostSend {
        /// Result of the call.
        errno: c_int,
    },
    /// A post to a receive queue fails, and nothing is posted.
    PostReceive {
        /// Result of the call.
        errno: c_int,
    },
    /// A completion fails, and the queue pair goes to the error state.
    Completion {
        /// `enum ibv_wc_status`
        status: u8,
        /// Work requests that are meant; None: all.
        operation: Option<Operation>,
    },
    /// A completion comes late; the later ones of its queue pair wait for it.
    Delay {
        /// Shortest delay.
        delay: Duration,
        /// Greatest addition to it.
        jitter: Duration,
    },
    /// A completion comes after the next one of another queue pair, or after a time.
    Reorder {
        /// Longest time.
        delay: Duration,
    },
    /// A posted receive work request does not reach the device for a time; the later ones of its queue wait.
    Withhold {
        /// The time; None: until the queue pair goes to the error state or is destroyed.
        delay: Option<Duration>,
    },
    /// The completion queue overruns: CQ_ERR, failing polls, and its queue pairs go to the error state.
    CqOverrun,
    /// The connection of the queue pair ends.
    Disconnect,
    /// The creation of an object fails.
    Create {
        /// Kind of object.
        object: Object,
        /// Reason.
        errno: c_int,
    },
    /// An asynchronous event.
    Event(AsyncEvent),
    /// RDMA_CM_EVENT_ADDR_ERROR in place of ADDR_RESOLVED.
    AddrError {
        /// Reason.
        errno: c_int,
    },
    /// RDMA_CM_EVENT_ROUTE_ERROR in place of ROUTE_RESOLVED.
    RouteError {
        /// Reason.
        errno: c_int,
    },
    /// RDMA_CM_EVENT_REJECTED.
    Reject {
        /// End of the connection.
        side: Side,
        /// Private data of the peer.
        private_data: Vec<u8>,
    },
    /// RDMA_CM_EVENT_UNREACHABLE after a time.
    Unreachable {
        /// Reason.
        errno: c_int,
        /// The time.
        delay: Duration,
    },
    /// RDMA_CM_EVENT_UNREACHABLE with ETIMEDOUT after a time.
    ConnectTimeout {
        /// The time.
        delay: Duration,
    },
    /// RDMA_CM_EVENT_CONNECT_ERROR.
    ConnectError {
        /// Reason.
        errno: c_int,
    },
    /// Many events of an identifier that was connected.
    Storm {
        /// Kind of event.
        event: CmEvent,
        /// Number of events.
        burst: u32,
    },
    /// RDMA_CM_EVENT_DEVICE_REMOVAL for an identifier; its queue pair goes to the error state.
    DeviceRemoval {
        /// Time from the moment at which the identifier has a device.
        delay: Duration,
    },
    /// A frame is lost.
    WireDrop {
        /// Frames in a row that a loss takes, at least 1.
        burst: u32,
    },
    /// A frame comes late; jitter may change the order.
    WireDelay {
        /// Shortest delay.
        delay: Duration,
        /// Greatest addition to it.
        jitter: Duration,
    },
    /// A frame comes a second time.
    WireDuplicate {
        /// Time between the two.
        late: Duration,
        /// The second one has another content, and a right TCP checksum.
        altered: bool,
    },
    /// A frame comes later than those that follow it.
    WireReorder {
        /// Its delay.
        late: Duration,
    },
    /// One octet of a TCP segment's payload changes, and the TCP checksum with it: only the CRC of MPA finds it.
    WireCorrupt,
    /// All frames are lost.
    WireBlackHole,
    /// All frames between two addresses are lost.
    WirePartition {
        /// The addresses.
        between: (IpAddr, IpAddr),
    },
    /// Frames pass a bottleneck, and are lost when too many wait.
    WireRate {
        /// Its rate in kbit/s.
        rate_kbit: u64,
        /// Frames of 1500 octets that wait at most.
        queue: u32,
    },
    /// A worker does nothing for a time.
    WorkerStall {
        /// The time.
        stall: Duration,
        /// Number of the worker; None: all.
        worker: Option<u32>,
    },
    /// The control thread does nothing for a time.
    ControlStall {
        /// The time.
        stall: Duration,
    },
    /// siwd ends.
    DaemonEnd(DaemonEnd),
}

/// Call or event at which a fault can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// A list is posted to a send queue.
    PostSend,
    /// A list is posted to a receive queue.
    PostReceive,
    /// A successful completion of a queue pair is polled.
    Completion,
    /// A successful completion of a completion queue is polled.
    CqCompletion,
    /// A list is posted to a receive queue that accepts it.
    Receive,
    /// A list is posted to a send queue of a context.
    ContextPost,
    /// An object is created.
    Creation(Object),
    /// rdma_resolve_addr(3)
    ResolveAddress,
    /// rdma_resolve_route(3)
    ResolveRoute,
    /// rdma_connect(3)
    Connect,
    /// A request arrives at a listener.
    Request,
    /// A connection of rdma_cm is established.
    Established,
    /// An identifier gets a device.
    Device,
    /// A device sends or receives a frame.
    Frame,
    /// None: the fault happens at a time.
    Clock,
}

/// Object whose calls are counted, and which has a generator of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Each queue pair.
    QueuePair,
    /// Each shared receive queue.
    SharedReceiveQueue,
    /// Each completion queue.
    CompletionQueue,
    /// Each context (ibv_open_device(3), or a device of rdma_cm).
    Context,
    /// The process.
    Process,
    /// The frames of a device in one direction, each worker by itself.
    Port,
    /// siwd.
    Daemon,
}

impl Kind {
    /// Names of the kinds that happen in programs.
    pub const NAMES: [&'static str; 18] = [
        "post_send",
        "post_receive",
        "completion",
        "delay",
        "reorder",
        "withhold",
        "cq_overrun",
        "disconnect",
        "create",
        "event",
        "addr_error",
        "route_error",
        "reject",
        "unreachable",
        "connect_timeout",
        "connect_error",
        "cm_storm",
        "device_removal",
    ];

    /// Names of the kinds that happen in siwd, those of the wire first ([`Kind::WIRE`]).
    pub const DAEMON_NAMES: [&'static str; 11] = [
        "wire_drop",
        "wire_delay",
        "wire_duplicate",
        "wire_reorder",
        "wire_corrupt",
        "wire_black_hole",
        "wire_partition",
        "wire_rate",
        "worker_stall",
        "control_stall",
        "daemon_end",
    ];

    /// Number of the kinds that happen to frames.
    pub const WIRE: usize = 8;

    /// Names of the kinds that happen in a place.
    pub fn names_of(place: Place) -> &'static [&'static str] {
        match place {
            Place::Program => &Kind::NAMES,
            Place::Daemon => &Kind::DAEMON_NAMES,
        }
    }

    /// Index in [`Kind::DAEMON_NAMES`] of a kind that happens to frames.
    pub fn wire_index(&self) -> Option<usize> {
        let mut names = Kind::DAEMON_NAMES[..Kind::WIRE].iter();
        names.position(|name| *name == self.name())
    }

    /// Name in plans.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::PostSend { .. } => "post_send",
            Kind::PostReceive { .. } => "post_receive",
            Kind::Completion { .. } => "completion",
            Kind::Delay { .. } => "delay",
            Kind::Reorder { .. } => "reorder",
            Kind::Withhold { .. } => "withhold",
            Kind::CqOverrun => "cq_overrun",
            Kind::Disconnect => "disconnect",
            Kind::Create { .. } => "create",
            Kind::Event(_) => "event",
            Kind::AddrError { .. } => "addr_error",
            Kind::RouteError { .. } => "route_error",
            Kind::Reject { .. } => "reject",
            Kind::Unreachable { .. } => "unreachable",
            Kind::ConnectTimeout { .. } => "connect_timeout",
            Kind::ConnectError { .. } => "connect_error",
            Kind::Storm { .. } => "cm_storm",
            Kind::DeviceRemoval { .. } => "device_removal",
            Kind::WireDrop { .. } => "wire_drop",
            Kind::WireDelay { .. } => "wire_delay",
            Kind::WireDuplicate { .. } => "wire_duplicate",
            Kind::WireReorder { .. } => "wire_reorder",
            Kind::WireCorrupt => "wire_corrupt",
            Kind::WireBlackHole => "wire_black_hole",
            Kind::WirePartition { .. } => "wire_partition",
            Kind::WireRate { .. } => "wire_rate",
            Kind::WorkerStall { .. } => "worker_stall",
            Kind::ControlStall { .. } => "control_stall",
            Kind::DaemonEnd(_) => "daemon_end",
        }
    }

    /// Call or event at which the fault can happen.
    pub fn site(&self) -> Site {
        match self {
            Kind::PostSend { .. } => Site::PostSend,
            Kind::PostReceive { .. } => Site::PostReceive,
            Kind::Completion { .. }
            | Kind::Delay { .. }
            | Kind::Reorder { .. }
            | Kind::Disconnect => Site::Completion,
            Kind::Withhold { .. } => Site::Receive,
            Kind::CqOverrun => Site::CqCompletion,
            Kind::Create { object, .. } => Site::Creation(*object),
            Kind::Event(_) => Site::ContextPost,
            Kind::AddrError { .. } => Site::ResolveAddress,
            Kind::RouteError { .. } => Site::ResolveRoute,
            Kind::Reject {
                side: Side::Passive,
                ..
            } => Site::Request,
            Kind::Reject { .. }
            | Kind::Unreachable { .. }
            | Kind::ConnectTimeout { .. }
            | Kind::ConnectError { .. } => Site::Connect,
            Kind::Storm { .. } => Site::Established,
            Kind::DeviceRemoval { .. } => Site::Device,
            Kind::WireDrop { .. }
            | Kind::WireDelay { .. }
            | Kind::WireDuplicate { .. }
            | Kind::WireReorder { .. }
            | Kind::WireCorrupt
            | Kind::WireBlackHole
            | Kind::WirePartition { .. }
            | Kind::WireRate { .. } => Site::Frame,
            Kind::WorkerStall { .. } | Kind::ControlStall { .. } | Kind::DaemonEnd(_) => {
                Site::Clock
            }
        }
    }

    /// Whether the calls of objects of that scope are counted for the fault.
    pub fn has_scope(&self, scope: Scope) -> bool {
        match scope {
            Scope::QueuePair => matches!(
                self.site(),
                Site::PostSend | Site::PostReceive | Site::Completion | Site::Receive
            ),
            Scope::SharedReceiveQueue => matches!(self.site(), Site::PostReceive | Site::Receive),
            Scope::CompletionQueue => self.site() == Site::CqCompletion,
            Scope::Context => self.site() == Site::ContextPost,
            Scope::Process => matches!(
                self.site(),
                Site::Creation(_)
                    | Site::ResolveAddress
                    | Site::ResolveRoute
                    | Site::Connect
                    | Site::Request
                    | Site::Established
                    | Site::Device
            ),
            Scope::Port => self.site() == Site::Frame,
            Scope::Daemon => self.site() == Site::Clock,
        }
    }
}

impl fmt::Display for Kind {
    /// The name, and the parameter that distinguishes faults of the kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Kind::PostSend { errno }
            | Kind::PostReceive { errno }
            | Kind::AddrError { errno }
            | Kind::RouteError { errno }
            | Kind::Unreachable { errno, .. }
            | Kind::ConnectError { errno } => write!(f, "{name} {}", crate::errno_name(*errno)),
            Kind::Create { object, errno } => {
                write!(f, "{name} {} {}", object.name(), crate::errno_name(*errno))
            }
            Kind::Completion { status, .. } => write!(f, "{name} {}", crate::status_name(*status)),
            Kind::Event(event) => write!(f, "{name} {}", event.name()),
            Kind::Storm { event, .. } => write!(f, "{name} {}", event.name()),
            _ => f.write_str(name),
        }
    }
}
