//! Lists of objects, and actions of operators.

use super::{Addr, Text};
use bytemuck::{Pod, Zeroable};

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $($(#[$entry:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum $name { $($(#[$entry])* $variant = $number,)* }

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// The value with this number.
            pub fn from_u32(number: u32) -> Option<$name> {
                $name::ALL.iter().copied().find(|value| *value as u32 == number)
            }
        }
    };
}

numbered! {
    /// A list of objects that [`ListObjects`] reads, one JSON object for each.
    ObjectList {
        Clients = 1,
        QueuePairs = 2,
        CompletionQueues = 3,
        SharedReceiveQueues = 4,
        MemoryRegions = 5,
        ProtectionDomains = 6,
        /// Listeners, bindings and connected queue pairs.
        CmIds = 7,
        /// State of the connections of queue pairs in their workers: TCP, MPA and RDMAP.
        Connections = 8,
        /// Connections that have ended or were never made, the oldest first, with the reason.
        Ends = 9,
        /// Captures that are running, for operators.
        Captures = 10,
        /// The latest events of the queue pair whose number is the `minor` of the position, also after its
        /// end: first the queue pair with the state of its last connection, then its events, the oldest first.
        Recording = 11,
        /// The running configuration in TOML, line by line (`text`), for operators.
        Configuration = 12,
        /// The faults of loaded plans, with the numbers of times that they happened, for operators.
        Faults = 13,
    }
}

/// Position in a list: the object after which it continues. Zero is its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListPosition {
    pub major: u64,
    pub minor: u64,
}

/// Reads a part of a list. Operators get the objects of all clients, others those of their own user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListObjects {
    /// [`ObjectList`].
    pub list: u32,
    pub reserved: u32,
    /// Zero, or the position in the last reply.
    pub after: ListPosition,
}

/// Bytes of [`ListReply::text`].
pub const LIST_TEXT: usize = 7168;

/// A part of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListReply {
    /// Position for the next request.
    pub next: ListPosition,
    /// 1 if nothing follows.
    pub is_last: u32,
    /// Bytes used in `text`.
    pub len: u32,
    /// JSON objects, each followed by a line feed.
    pub text: [u8; LIST_TEXT],
}

numbered! {
    /// An action of an operator on a running daemon.
    OperatorAction {
        /// Moves a queue pair to ERROR and resets its connection; its owner may do that too.
        EndQueuePair = 1,
        /// Closes a client with all its objects; its user may do that too.
        EndClient = 2,
        /// Replaces the filter of the log by `text`.
        SetLogFilter = 3,
        /// Reads the configuration again. The reply has the outcome as JSON: the settings `applied` and
        /// those that need a `restart`, or an `error`.
        Reload = 4,
        /// Ends the capture with the number `target` of [`StartCapture`], or with 0 all of them.
        StopCapture = 5,
        /// Sets a limit until the next reload: `text` is its key in `[limits]`, a space, and the value, or
        /// `default`. The reply is that of `Reload`.
        SetLimit = 6,
        /// Changes the routes of the device with the index `target`: `text` is `add NETWORK via ROUTER`,
        /// `del NETWORK`, `flush` or `show`. The reply has all routes that were added, as JSON.
        ChangeRoutes = 7,
        /// Changes the neighbours of the device with the index `target`: `text` is `add ADDRESS lladdr MAC`,
        /// `del ADDRESS` or `flush`.
        ChangeNeighbours = 8,
        /// Changes the addresses of the device with the index `target`: `text` is `add ADDRESS/PREFIX`,
        /// `del ADDRESS`, `flush` or `show`. The reply has the addresses, as JSON.
        ChangeAddresses = 9,
        /// Opens the device `text` of the daemon's configuration, which is read again.
        AddDevice = 10,
        /// Removes the device with the index `target`. If programs use it, `text` has to be [`FORCE`].
        RemoveDevice = 11,
        /// Ends the fault plan with the name `text`, or without a text all of them. The reply has the number of
        /// faults that each has injected, as JSON.
        ClearFaults = 12,
    }
}

/// `text` of [`OperatorAction::RemoveDevice`]: end the connections of the device.
pub const FORCE: &str = "force";

/// Performs an [`OperatorAction`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Operate {
    /// [`OperatorAction`].
    pub action: u32,
    pub reserved: u32,
    /// Number of the queue pair or client.
    pub target: u64,
    pub text: Text<256>,
}

/// Bytes of [`OperateReply::text`].
pub const OPERATE_TEXT: usize = 7168;

/// Outcome of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OperateReply {
    /// Bytes used in `text`.
    pub len: u32,
    pub reserved: u32,
    /// Empty, or the outcome of the action.
    pub text: [u8; OPERATE_TEXT],
}

impl OperateReply {
    /// A reply with this text; `None` if it is too long.
    pub fn new(text: &str) -> Option<OperateReply> {
        let mut reply = OperateReply {
            len: text.len() as u32,
            reserved: 0,
            text: [0; OPERATE_TEXT],
        };
        let room = reply.text.get_mut(..text.len())?;
        room.copy_from_slice(text.as_bytes());
        Some(reply)
    }

    /// The text.
    pub fn read_text(&self) -> String {
        let len = (self.len as usize).min(OPERATE_TEXT);
        String::from_utf8_lossy(&self.text[..len]).into_owned()
    }
}

/// Captures the frames that meet all conditions. The reply has the number of the capture, and the read end
/// of a stream of pcapng, which ends with the capture. For operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StartCapture {
    /// Index of the device, or [`EVERY_DEVICE`](super::EVERY_DEVICE).
    pub device: u32,
    /// Maximum bytes of a frame; 0: all.
    pub snap_len: u32,
    /// Connections of this queue pair; 0: all.
    pub qp_num: u32,
    /// Source or destination port; 0: all.
    pub port: u16,
    pub reserved: u16,
    /// Connections of this client; 0: all.
    pub client: u64,
    /// Source or destination address, or [`Addr::NONE`].
    pub host: Addr,
    /// Bytes at which the capture ends; 0: no limit.
    pub limit: u64,
}

impl StartCapture {
    /// All frames, without an end.
    pub const ALL_FRAMES: StartCapture = StartCapture {
        device: super::EVERY_DEVICE,
        snap_len: 0,
        qp_num: 0,
        port: 0,
        reserved: 0,
        client: 0,
        host: Addr::NONE,
        limit: 0,
    };
}

/// Traces the next frames and turns of queue pairs that meet the conditions. The reply has the number of the
/// trace, and the read end of a stream of lines of JSON, which ends with the trace. One at a time, for
/// operators; it is listed and ended like a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StartTrace {
    /// Conditions; `snap_len` and `limit` are not used.
    pub selection: StartCapture,
    /// Number of records after which the trace ends.
    pub records: u32,
    pub reserved: u32,
}

/// Longest text of a fault plan in bytes.
pub const MAX_PLAN_TEXT: usize = 32 << 10;

/// Bytes of a fault plan in one [`LoadFaults`].
pub const PLAN_PART: usize = 2560;

/// A part of a fault plan, from its beginning on; the last part loads the plan. The reply to that has the outcome as
/// JSON: the `plan`, or an `error` if nothing was loaded. For operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LoadFaults {
    /// Bytes of the whole text, at most [`MAX_PLAN_TEXT`].
    pub total: u32,
    /// Place of this part in the text.
    pub offset: u32,
    /// Bytes used in `text`.
    pub len: u32,
    /// 1: `seed` takes precedence over that of the plan.
    pub has_seed: u32,
    pub seed: u64,
    /// Name of the plan.
    pub name: Text<64>,
    /// Its file, for messages.
    pub path: Text<256>,
    pub text: [u8; PLAN_PART],
}
