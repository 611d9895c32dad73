//! Draining a queue pair before its memory is freed: all posted requests have completed when these
//! functions return (the kernel's ib_drain_qp; verbs programs do it by hand).

use crate::deadline::Deadline;
use crate::{Cq, Error, Qp, RecvWr, SendData, SendWr, Wc, WcOpcode};
use siw_shm::control::QpState;
use std::time::Duration;

/// Work request id of the marker that a drain posts behind all other requests; the drain consumes
/// one completion with this id.
pub const DRAIN_WR_ID: u64 = u64::MAX;

impl Qp {
    /// Moves the QP to ERROR, posts a marker behind all posted sends and waits for its completion.
    /// All other completions polled meanwhile, of this and of other queue pairs, go to `seen` in
    /// order.
    pub fn drain_sq(&self, timeout: Duration, mut seen: impl FnMut(&Wc)) -> Result<(), Error> {
        let marker = SendWr::send(DRAIN_WR_ID, SendData::Sges(&[]));
        let post = || self.post_send(&[marker]).map_err(|error| error.error);
        self.drain_queue(self.send_cq(), timeout, &mut seen, post, |opcode| {
            !opcode.is_receive()
        })
    }

    /// As [`Self::drain_sq`], for the receive queue. A QP with a shared receive queue has none:
    /// wait for QP_LAST_WQE_REACHED and poll its completion queue empty instead.
    pub fn drain_rq(&self, timeout: Duration, mut seen: impl FnMut(&Wc)) -> Result<(), Error> {
        let marker = RecvWr {
            wr_id: DRAIN_WR_ID,
            sges: &[],
        };
        let post = || self.post_recv(&[marker]).map_err(|error| error.error);
        self.drain_queue(
            self.recv_cq(),
            timeout,
            &mut seen,
            post,
            WcOpcode::is_receive,
        )
    }

    fn drain_queue(
        &self,
        cq: &Cq,
        timeout: Duration,
        seen: &mut impl FnMut(&Wc),
        post: impl Fn() -> Result<(), Error>,
        ours: impl Fn(WcOpcode) -> bool,
    ) -> Result<(), Error> {
        let deadline = Deadline::after(Some(timeout));
        if self.state() != Some(QpState::Error) {
            self.set_error()?;
        }
        let mut posted = false;
        let mut wc = [Wc::default(); 32];
        loop {
            if !posted {
                // A full queue has room after its flushed requests are polled.
                posted = match post() {
                    Ok(()) => true,
                    Err(Error::QueueFull) => false,
                    Err(error) => return Err(error),
                };
            }
            let taken = cq.poll_spin(&mut wc, Duration::from_micros(50))?;
            let mut done = false;
            for wc in &wc[..taken] {
                let marker = wc.wr_id == DRAIN_WR_ID && wc.qp_num == self.qp_num();
                if marker && ours(wc.opcode) && !done {
                    done = true;
                } else {
                    seen(wc);
                }
            }
            if done {
                return Ok(());
            }
            if taken == 0 {
                if deadline.has_passed() {
                    return Err(Error::Timeout);
                }
                std::thread::yield_now();
            }
        }
    }
}
