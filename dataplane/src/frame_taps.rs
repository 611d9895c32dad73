//! The observers of a worker's frames: captures, and a trace.

use std::sync::Arc;

use dpdk::Mbuf;

use crate::capture::{CaptureTap, FrameRecord};
use crate::trace::TraceTap;

/// The captures and the trace that are running, as a worker sees them.
#[derive(Clone)]
pub struct FrameTaps {
    captures: Arc<[CaptureTap]>,
    trace: Option<TraceTap>,
}

impl FrameTaps {
    /// `None` without a capture and a trace, so that workers test one pointer.
    pub fn new(
        captures: impl IntoIterator<Item = CaptureTap>,
        trace: Option<TraceTap>,
    ) -> Option<FrameTaps> {
        let captures: Arc<[CaptureTap]> = captures.into_iter().collect();
        let is_used = !captures.is_empty() || trace.is_some();
        is_used.then_some(FrameTaps { captures, trace })
    }

    /// The same for the worker with this index.
    pub fn for_worker(mut self, worker: usize) -> FrameTaps {
        if let Some(trace) = &mut self.trace {
            trace.worker = worker;
        }
        self
    }

    /// The trace, if one is running and takes more records.
    #[inline]
    pub fn trace(&self) -> Option<&TraceTap> {
        self.trace.as_ref().filter(|trace| trace.is_wanted())
    }

    /// Hands a frame to each capture that selects it.
    pub fn record_frame(&self, frame: &FrameRecord<'_>, mbuf: &Mbuf) {
        let headers = mbuf.segments().next().unwrap_or_default();
        for tap in &*self.captures {
            tap.record_frame(frame, headers, |bytes| {
                for segment in mbuf.segments() {
                    bytes.extend_from_slice(segment);
                }
            });
        }
    }
}
