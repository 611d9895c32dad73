//! Protection domains, completion channels and completion queues of the self-test.

use super::abi::*;
use super::verbs::*;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::rc::Rc;
use std::time::Instant;

/// A protection domain.
pub struct LibraryPd {
    pub raw: *mut ibv_pd,
    pub context: Rc<LibraryContext>,
}

impl LibraryPd {
    /// Allocates a protection domain.
    pub fn new(context: &Rc<LibraryContext>) -> Result<Rc<LibraryPd>, String> {
        // SAFETY: an open context.
        let raw = unsafe { (verbs().ibv_alloc_pd)(context.raw) };
        let context = context.clone();
        check_pointer("ibv_alloc_pd", raw).map(|raw| Rc::new(LibraryPd { raw, context }))
    }
}

impl Drop for LibraryPd {
    fn drop(&mut self) {
        // SAFETY: its objects are destroyed.
        note_destroyed("PD", unsafe { (verbs().ibv_dealloc_pd)(self.raw) });
    }
}

/// A completion channel.
pub struct LibraryChannel {
    pub raw: *mut ibv_comp_channel,
    _context: Rc<LibraryContext>,
}

impl LibraryChannel {
    /// Creates a channel.
    pub fn new(context: &Rc<LibraryContext>) -> Result<Rc<LibraryChannel>, String> {
        // SAFETY: an open context.
        let raw = unsafe { (verbs().ibv_create_comp_channel)(context.raw) };
        check_pointer("ibv_create_comp_channel", raw).map(|raw| {
            Rc::new(LibraryChannel {
                raw,
                _context: context.clone(),
            })
        })
    }

    /// Takes and acknowledges an event.
    pub fn take_event(&self) -> Result<(), String> {
        // SAFETY: a channel; two pointers to write.
        unsafe {
            await_readable((*self.raw).fd, "completion event")?;
            let (mut cq, mut cookie) = (null_mut(), null_mut());
            let status = (verbs().ibv_get_cq_event)(self.raw, &raw mut cq, &raw mut cookie);
            check_status("ibv_get_cq_event", status)?;
            (verbs().ibv_ack_cq_events)(cq, 1);
        }
        Ok(())
    }

    /// Checks for a pending event.
    pub fn has_event(&self) -> bool {
        let mut fds = libc::pollfd {
            // SAFETY: a channel.
            fd: unsafe { (*self.raw).fd },
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor.
        unsafe { libc::poll(&raw mut fds, 1, 0) == 1 }
    }
}

impl Drop for LibraryChannel {
    fn drop(&mut self) {
        // SAFETY: its queues are destroyed.
        let status = unsafe { (verbs().ibv_destroy_comp_channel)(self.raw) };
        note_destroyed("completion channel", status);
    }
}

/// A completion queue.
pub struct LibraryCq {
    pub raw: *mut ibv_cq,
    pub context: Rc<LibraryContext>,
    _channel: Option<Rc<LibraryChannel>>,
}

impl LibraryCq {
    /// Creates a queue.
    pub fn new(
        context: &Rc<LibraryContext>,
        entries: c_int,
        channel: Option<&Rc<LibraryChannel>>,
    ) -> Result<Rc<LibraryCq>, String> {
        let raw_channel = channel.map_or(null_mut(), |channel| channel.raw);
        // SAFETY: an open context, NULL or a channel.
        let raw =
            unsafe { (verbs().ibv_create_cq)(context.raw, entries, null_mut(), raw_channel, 0) };
        check_pointer("ibv_create_cq", raw).map(|raw| {
            Rc::new(LibraryCq {
                raw,
                context: context.clone(),
                _channel: channel.cloned(),
            })
        })
    }

    /// Polls once for a completion of any status.
    pub fn poll_once(&self) -> Result<Option<ibv_wc>, String> {
        // SAFETY: a completion queue, and room for a completion.
        unsafe {
            let poll = table_slot((*self.context.raw).ops.poll_cq)?;
            let mut completion = zeroed();
            match poll(self.raw, 1, &raw mut completion) {
                0 => Ok(None),
                1 => Ok(Some(completion)),
                _ => Err(last_error("ibv_poll_cq")),
            }
        }
    }

    /// Waits for the next completion, of any status.
    pub fn next_completion(&self) -> Result<ibv_wc, String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(completion) = self.poll_once()? {
                return Ok(completion);
            }
            if Instant::now() > deadline {
                return Err(format!("no completion in {PATIENCE:?}"));
            }
            std::thread::yield_now();
        }
    }

    /// Waits for the next completion, which has to be a success.
    pub fn await_success(&self) -> Result<ibv_wc, String> {
        let completion = self.next_completion()?;
        match completion.status {
            IBV_WC_SUCCESS => Ok(completion),
            status => Err(format!(
                "a completion has the status: {}",
                status_text(status)
            )),
        }
    }

    /// Waits for the next completion, which has to have this status.
    pub fn fail_with(&self, wanted: ibv_wc_status) -> Result<(), String> {
        let found = self.next_completion()?.status;
        (found == wanted).then_some(()).ok_or_else(|| {
            let (found, wanted) = (status_text(found), status_text(wanted));
            format!("a completion has the status {found}, expected was {wanted}")
        })
    }

    /// Arms the queue.
    pub fn request_event(&self, solicited_only: bool) -> Result<(), String> {
        // SAFETY: a completion queue.
        unsafe {
            let arm = table_slot((*self.context.raw).ops.req_notify_cq)?;
            check_status("ibv_req_notify_cq", arm(self.raw, solicited_only.into()))
        }
    }
}

fn status_text(status: ibv_wc_status) -> String {
    // SAFETY: a constant text.
    unsafe { CStr::from_ptr((verbs().ibv_wc_status_str)(status)) }
        .to_string_lossy()
        .into_owned()
}

impl Drop for LibraryCq {
    fn drop(&mut self) {
        // SAFETY: its queue pairs are destroyed.
        note_destroyed("CQ", unsafe { (verbs().ibv_destroy_cq)(self.raw) });
    }
}
