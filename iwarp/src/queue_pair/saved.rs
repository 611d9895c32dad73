//! The queue pair as data, for a live upgrade of the daemon (`siw_shm::saved`): a derived form of all its
//! state, which is checked when it is restored.
//!
//! Not part of it: references of frames to payload (`ext_buf_ref`), since no frame outlives its port, and
//! grace periods, which have elapsed when no worker runs. A restored queue pair therefore needs a call of
//! [`QueuePair::poll_quiescence`], and, if [`QueuePair::awaits_receive`], the calls that
//! [`QpEnv::await_receive`] announces.
//!
//! Records of the stream are saved by TCP; [`QueuePair::knows_record`] tells whether they belong to it.
//!
//! [`QpEnv::await_receive`]: crate::QpEnv::await_receive

use super::QueuePair;
use super::state::RdmapState;
use crate::ddp::{TAGGED_HDR_LEN, UNTAGGED_HDR_LEN};
use crate::mpa::RtrKind;
use crate::rdmap::{IMMEDIATE_LEN, READ_REQUEST_LEN};
use crate::record::{FpduKind, FpduRecord, FpduRun};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

impl Serialize for QueuePair {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        QueuePair::serialize(self, serializer)
    }
}

/// Refuses a state that no stream has and that a calculation relies on.
impl<'de> Deserialize<'de> for QueuePair {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let queue_pair = QueuePair::deserialize(deserializer)?;
        if queue_pair.is_consistent() {
            Ok(queue_pair)
        } else {
            Err(de::Error::custom(
                "the state of a queue pair contradicts itself",
            ))
        }
    }
}

impl QueuePair {
    /// Returns whether the FPDUs of a restored record can be records of this queue pair, in kind and length.
    /// Those of completed messages can: building them fails with an error.
    pub fn knows_record(&self, run: &FpduRun) -> bool {
        (0..run.count()).all(|unit| self.knows_fpdu(&run.get(unit)))
    }

    fn knows_fpdu(&self, record: &FpduRecord) -> bool {
        let terminate = self.terminate.as_ref();
        let len = match record.kind {
            FpduKind::Request => return self.requester.knows_fpdu(record),
            FpduKind::Response => return self.responder.knows_fpdu(record),
            FpduKind::Immediate => Some(UNTAGGED_HDR_LEN + IMMEDIATE_LEN),
            FpduKind::Rtr => self.rtr.map(|kind| match kind {
                RtrKind::Write => TAGGED_HDR_LEN,
                RtrKind::Send => UNTAGGED_HDR_LEN,
                RtrKind::Read => UNTAGGED_HDR_LEN + READ_REQUEST_LEN,
            }),
            FpduKind::Terminate => {
                terminate.map(|terminate| UNTAGGED_HDR_LEN + terminate.payload.as_bytes().len())
            }
        };
        len.is_none_or(|len| usize::from(record.ulpdu_len) == len)
    }

    fn is_consistent(&self) -> bool {
        let is_sending = matches!(self.state, RdmapState::Rts | RdmapState::Closing);
        let copies_all = self.requester.copied_up_to == u32::MAX;
        self.transmitter.is_consistent(is_sending)
            && self.requester.is_consistent()
            && self.responder.is_consistent()
            && self.receive.is_consistent()
            && (copies_all || !self.transmitter.has_markers())
    }
}
