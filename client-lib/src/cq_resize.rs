//! Changes of a completion queue in use: its size (ibv_resize_cq(3)) and its event moderation
//! (ibv_modify_cq(3)).

use crate::cq::map_consumer;
use crate::{Cq, Error};
use siw_shm::control::{FreeCqRing, ModerateCq, ResizeCq};
use std::time::Duration;

impl Cq {
    /// Makes the queue longer or shorter; pending completions stay, in order. EINVAL when there are
    /// more of them than the new size. Polling goes on meanwhile.
    pub fn resize(&self, cqe: u32) -> Result<(), Error> {
        let ctx = self.client();
        let _one_at_a_time = self.start_resizing()?;
        let new_size = cqe.max(1).checked_next_power_of_two().unwrap_or(u32::MAX) as usize;
        let polling = self.polling_state().lock()?;
        let waiting = polling.left.len() + polling.ring.count_waiting(new_size + 1);
        drop(polling);
        if waiting > new_size {
            return Err(Error::Invalid(
                "the queue has more unpolled completions than the new size",
            ));
        }
        let resize = ResizeCq {
            cq: self.cq_id(),
            cqe,
        };
        let (reply, new) = ctx.replace_queue(&resize, |reply| reply.mem, map_consumer)?;
        let mut polling = self.polling_state().lock()?;
        // No worker writes to the old rings any more.
        let found = polling.drain_rings();
        let old = std::mem::replace(&mut polling.ring, new);
        self.set_capacity(reply.entries);
        // The queue was armed after the workers had left the old rings.
        if old.disarm_event() {
            polling.ring.arm_event(false);
        }
        // One worker may have moved the arming to the new ring while another completed into its old
        // ring, or into its new one just before the arming was moved.
        let notify = (found || polling.ring.count_waiting(1) > 0) && polling.ring.disarm_event();
        drop(polling);
        ctx.call_daemon(&FreeCqRing {
            cq: self.cq_id(),
            notify: notify.into(),
        })?;
        Ok(())
    }

    /// Lets an armed queue raise its event only after `count` completions, or `period` (up to 65
    /// ms) after the first of them. One completion or no period ends the moderation. Each worker
    /// counts its own completions.
    pub fn moderate(&self, count: u16, period: Duration) -> Result<(), Error> {
        let period = u16::try_from(period.as_micros())
            .map_err(|_| Error::Invalid("the period must be at most 65535 microseconds"))?;
        self.client().call_daemon(&ModerateCq {
            cq: self.cq_id(),
            count,
            period,
        })?;
        Ok(())
    }
}
