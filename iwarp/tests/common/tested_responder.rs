//! A responder for scripted peers that break the rules.

use super::*;

pub const VA: u64 = 0x10_0000;
pub const LEN: usize = 4096;

/// A responder with remote memory at VA and one receive work request of 100 bytes.
pub struct TestedResponder {
    pub end: End,
    pub key: u32,
    pub mem: Arc<SharedMemory>,
}

pub fn new_responder() -> TestedResponder {
    let mut end = End::new(negotiated(false));
    let (key, mem) = end.env.mr(VA, LEN, REMOTE);
    end.env.post_recv(1, &[sge(VA, 100, key)]);
    TestedResponder {
        end,
        key: key.0,
        mem,
    }
}

impl TestedResponder {
    /// Gives it the frame, and expects the Terminate and unchanged memory.
    pub fn refuses(mut self, frame: &[u8], code: &str) -> ReceivedTerminate {
        self.end.give(frame);
        let terminate = self.end.expect_terminate(code);
        assert_eq!(contents(&self.mem, LEN), vec![0; LEN], "nothing placed");
        // Conformance 37, 79: a second error is neither reported nor processed.
        self.end.give(&write(self.key, VA, &[1]));
        self.end.give(&write(self.key ^ 1, VA, &[1]));
        assert!(self.end.pull().is_none());
        assert_eq!(contents(&self.mem, LEN), vec![0; LEN]);
        assert_eq!(self.end.rx.available(), 0, "discarded up to the FIN");
        terminate
    }
}

/// A Read of eight bytes of the responder's memory.
pub fn read_of(responder: &TestedResponder) -> ReadRequestHeader {
    ReadRequestHeader {
        sink_stag: 5,
        sink_to: 6,
        size: 8,
        src_stag: responder.key,
        src_to: VA,
    }
}
