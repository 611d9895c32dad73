//! Measurement plan: the sizes of a transfer and of its working set, checked against limits. Comes
//! from the command line or from the other process.

use anyhow::bail;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Measured quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Bandwidth and message rate with `depth` messages in flight on each QP.
    Bw,
    /// Round trips, one at a time.
    Lat,
}

/// Operation that moves the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// RDMA WRITE into the target's memory.
    Write,
    /// RDMA READ of the target's memory.
    Read,
    /// RDMA WRITE with immediate data, which completes a receive of the target (RFC 7306).
    WriteImm,
    /// SEND into receives that the target posted.
    Send,
    /// Atomic addition of 1 to 8 bytes of the target's memory (RFC 7306 FetchAdd).
    #[value(alias = "atomic")]
    FetchAdd,
    /// Atomic exchange of 8 bytes of the target's memory with a known old value (RFC 7306 CmpSwap).
    CompareSwap,
}

impl Operation {
    /// The name in JSON and in messages.
    pub fn json_name(self) -> &'static str {
        match self {
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::WriteImm => "write-imm",
            Operation::Send => "send",
            Operation::FetchAdd => "fetch-add",
            Operation::CompareSwap => "compare-swap",
        }
    }

    /// Returns true if the operation changes 8 bytes of the target's memory and returns their old
    /// value.
    pub fn is_atomic(self) -> bool {
        matches!(self, Operation::FetchAdd | Operation::CompareSwap)
    }

    /// Returns true if each message takes a receive that the target posted.
    pub fn takes_receive(self) -> bool {
        matches!(self, Operation::Send | Operation::WriteImm)
    }

    /// Returns true if the target's device responds, so that a message is a round trip by itself.
    pub fn has_response(self) -> bool {
        self == Operation::Read || self.is_atomic()
    }
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasurementPlan {
    /// Bandwidth or latency.
    pub mode: Mode,
    /// Operation that moves the data.
    pub op: Operation,
    /// Bytes of a message.
    pub size: u32,
    /// Messages in flight on each QP.
    pub depth: u32,
    /// Queue pairs, each with a connection of its own.
    pub qps: u32,
    /// Verify received data.
    pub verify: bool,
    /// Payload travels in the work request.
    pub inline: bool,
    /// Sleep until a completion event instead of polling.
    #[serde(default)]
    pub events: bool,
    /// Request a completion for every `cq_mod`-th message.
    #[serde(default = "each_message")]
    pub cq_mod: u32,
    /// CRC requested for the connections; `None`: the device's configuration.
    #[serde(default)]
    pub crc: Option<bool>,
    /// Markers requested by the target; `None`: the device's configuration.
    #[serde(default)]
    pub markers: Option<bool>,
}

/// Default of `cq_mod`: every message completes.
pub(crate) fn each_message() -> u32 {
    1
}

/// Operand size of an atomic operation in bytes.
pub const ATOMIC_SIZE: u32 = 8;
/// Initial value of each byte of the message slots.
pub const INITIAL_BYTE: u8 = 0xa5;
/// Maximum message size.
const MAX_SIZE: u32 = 1 << 30;
/// Maximum queue pairs of a measurement.
const MAX_QPS: u32 = 131_072;
/// Maximum working set of one end.
const MAX_SET: u64 = 4 << 30;
/// Round trips use two slots: one for sending, one for receiving.
const LAT_SLOTS: u32 = 2;

impl MeasurementPlan {
    /// A bulk transfer with default options.
    pub fn for_bandwidth(op: Operation, size: u32, depth: u32, qps: u32) -> MeasurementPlan {
        MeasurementPlan {
            mode: Mode::Bw,
            op,
            size,
            depth,
            qps,
            verify: false,
            inline: false,
            events: false,
            cq_mod: each_message(),
            crc: None,
            markers: None,
        }
    }

    /// Checks the plan against the limits; the error is the reason why it cannot be measured.
    pub fn check_limits(&self) -> anyhow::Result<()> {
        let MeasurementPlan {
            size, depth, qps, ..
        } = *self;
        if size == 0 || size > MAX_SIZE {
            bail!("--size {size}: a message has 1 byte to 1 GiB; write 64, 4K or 1M");
        }
        if depth == 0 || depth > 16384 {
            bail!("--depth {depth}: 1 to 16384 messages can be in flight on a QP");
        }
        if qps == 0 || qps > MAX_QPS {
            bail!("--qps {qps}: 1 to {MAX_QPS} queue pairs can be used");
        }
        if self.op.is_atomic() && size != ATOMIC_SIZE {
            bail!("--size {size}: an atomic operation has {ATOMIC_SIZE} bytes; leave it out");
        }
        if self.events && self.mode == Mode::Lat && self.op == Operation::Write {
            bail!(
                "--events: a WRITE raises no event where it arrives; use write-imm, send, read or \
                 atomics"
            );
        }
        if self.mode == Mode::Lat && qps > 1 {
            bail!("--qps {qps}: lat measures one round trip at a time, so one queue pair");
        }
        if self.cq_mod == 0 || self.cq_mod > depth {
            bail!(
                "--cq-mod {}: at least one of the {depth} messages in flight on a QP (--depth) has to \
                 request a completion; use 1 to {depth}",
                self.cq_mod
            );
        }
        if self.mode == Mode::Lat && self.cq_mod > 1 {
            bail!(
                "--cq-mod {}: lat has one message in flight; it is for bw and rate",
                self.cq_mod
            );
        }
        if self.inline && self.op.has_response() {
            bail!("--inline: only write, write-imm and send carry data of this side");
        }
        if self.inline && self.size as usize > siw_shm::wqe::MAX_INLINE {
            bail!(
                "--inline: {size} bytes do not fit in a work request, at most {} do",
                siw_shm::wqe::MAX_INLINE
            );
        }
        let set = self.target_bytes() as u64;
        if set > MAX_SET {
            bail!(
                "size x depth x qps is {} GiB, at most {} GiB are used; lower one of them",
                set >> 30,
                MAX_SET >> 30
            );
        }
        Ok(())
    }

    /// The old value that atomic operation `message` of a queue pair finds: each slot of the target
    /// has its own count.
    pub fn value_before(&self, message: u64) -> u64 {
        let count = match self.mode {
            Mode::Bw => message / u64::from(self.target_slots()),
            Mode::Lat => message,
        };
        u64::from_ne_bytes([INITIAL_BYTE; ATOMIC_SIZE as usize]).wrapping_add(count)
    }

    /// Distance in bytes between two message slots.
    pub fn slot_stride(&self) -> usize {
        (self.size as usize).next_multiple_of(64)
    }

    /// Message slots of each QP at the initiator.
    pub fn initiator_slots(&self) -> u32 {
        match self.mode {
            Mode::Bw => self.depth,
            Mode::Lat => LAT_SLOTS,
        }
    }

    /// Message slots of each QP at the target. Messages that take receives need additional ones while
    /// those that completed are processed.
    pub fn target_slots(&self) -> u32 {
        match self.mode {
            Mode::Bw if self.op.takes_receive() => 2 * self.depth,
            _ => self.initiator_slots(),
        }
    }

    /// Registered bytes at the initiator.
    pub fn initiator_bytes(&self) -> usize {
        self.slot_stride() * self.initiator_slots() as usize * self.qps as usize
    }

    /// Registered bytes at the target.
    pub fn target_bytes(&self) -> usize {
        self.slot_stride() * self.target_slots() as usize * self.qps as usize
    }
}

#[cfg(test)]
pub(crate) fn example() -> MeasurementPlan {
    MeasurementPlan::for_bandwidth(Operation::Write, 1 << 20, 8, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_is_size_times_depth_times_queue_pairs() {
        let p = example();
        assert_eq!(p.initiator_bytes(), 16 << 20);
        assert_eq!(p.target_bytes(), 16 << 20);
        let odd = MeasurementPlan {
            size: 65,
            depth: 4,
            qps: 1,
            ..p
        };
        assert_eq!(odd.initiator_bytes(), 4 * 128);
    }

    #[test]
    fn receives_of_sends_have_memory_while_others_are_looked_at() {
        let p = MeasurementPlan {
            op: Operation::Send,
            ..example()
        };
        assert_eq!(p.target_bytes(), 2 * p.initiator_bytes());
    }

    #[test]
    fn sizes_that_cannot_work_are_refused_in_words() {
        let bad = |p: MeasurementPlan, word: &str| {
            let error = p.check_limits().unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        let p = example();
        bad(MeasurementPlan { size: 0, ..p }, "--size 0");
        bad(MeasurementPlan { depth: 0, ..p }, "--depth 0");
        bad(MeasurementPlan { qps: 0, ..p }, "--qps 0");
        bad(
            MeasurementPlan {
                mode: Mode::Lat,
                ..p
            },
            "one queue pair",
        );
        for cq_mod in [0, p.depth + 1] {
            bad(MeasurementPlan { cq_mod, ..p }, "--cq-mod");
        }
        let latency = MeasurementPlan {
            mode: Mode::Lat,
            qps: 1,
            cq_mod: 2,
            ..p
        };
        bad(latency, "for bw and rate");
        bad(MeasurementPlan { inline: true, ..p }, "do not fit");
        bad(
            MeasurementPlan {
                inline: true,
                op: Operation::Read,
                size: 8,
                ..p
            },
            "carry data of this side",
        );
        let atomic = MeasurementPlan {
            op: Operation::FetchAdd,
            ..p
        };
        bad(atomic, "8 bytes");
        let write = MeasurementPlan {
            mode: Mode::Lat,
            qps: 1,
            events: true,
            ..p
        };
        bad(write, "raises no event");
        bad(MeasurementPlan { size: 1 << 30, ..p }, "16 GiB");
        assert!(p.check_limits().is_ok());
    }
}
