//! The side that listens.

use super::{
    DEPTH_UNNEGOTIATED, EnhancedData, MarkerPolicy, MpaConfig, MpaError, MpaFrame, MpaFrameKind,
    NegotiatedParameters, RtrKind, RtrKinds,
};
use crate::stream::RxStream;

/// What a look at the stream brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponderStep {
    /// The request is not complete; the request timer goes on. After [`Request`](Self::Request):
    /// nothing new.
    NeedMore,
    /// A consumer must decide; told once.
    Request(ConnectRequest),
    /// No connection; send `send` if it is there (a reject), then close.
    Failed {
        /// Why.
        error: MpaError,
        /// A reply frame with R set.
        send: Option<Box<[u8]>>,
    },
}

/// What the consumer decides about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The initiator's private data.
    pub private_data: Vec<u8>,
    /// Revision of the request.
    pub revision: u8,
    /// Reads that the initiator can hold: the most that our ORD can be. `None`: not negotiated.
    pub peer_ird: Option<u16>,
    /// Reads that the initiator wants to issue: what our IRD should be. `None`: not negotiated.
    pub peer_ord: Option<u16>,
}

/// One incoming connection.
#[derive(Debug, Clone)]
pub struct MpaResponder {
    cfg: MpaConfig,
    request: Option<MpaFrame>,
}

impl MpaResponder {
    /// Waits for a request.
    pub fn new(cfg: &MpaConfig) -> Self {
        Self {
            cfg: cfg.clone(),
            request: None,
        }
    }

    /// What it works by.
    pub fn config(&self) -> &MpaConfig {
        &self.cfg
    }

    /// Looks for the request; after it, watches that the initiator keeps quiet until it is answered
    /// (RFC 5044 section 7.1.2, conformance 10).
    pub fn on_stream(&mut self, rx: &mut impl RxStream) -> ResponderStep {
        let failed = |error| ResponderStep::Failed { error, send: None };
        if self.request.is_some() {
            return if rx.available() > 0 {
                failed(MpaError::TrailingBytes)
            } else {
                ResponderStep::NeedMore
            };
        }
        let f = match MpaFrame::read_from(rx, self.cfg.max_private_data) {
            Ok(None) => return ResponderStep::NeedMore,
            Ok(Some(f)) => f,
            Err(error) => return failed(error),
        };
        if f.kind == MpaFrameKind::Reply {
            return failed(MpaError::UnexpectedReply);
        }
        if f.revision > self.cfg.revision {
            return failed(MpaError::BadRevision(f.revision));
        }
        if rx.available() > 0 {
            return failed(MpaError::TrailingBytes);
        }
        if f.markers && self.cfg.markers == MarkerPolicy::Never {
            let send = self.reply(&f, true, Self::reject_data(&f), &[]).ok();
            return ResponderStep::Failed {
                error: MpaError::MarkersUnsupported,
                send,
            };
        }
        if let Some(e) = f.enhanced
            && e.peer_to_peer
            && self.acceptable(e).is_empty()
        {
            let send = self.reply(&f, true, Self::reject_data(&f), &[]).ok();
            return ResponderStep::Failed {
                error: MpaError::NoRtr,
                send,
            };
        }
        let depth = |d: u16| (d != DEPTH_UNNEGOTIATED).then_some(d);
        let request = ConnectRequest {
            private_data: f.private_data.clone(),
            revision: f.revision,
            peer_ird: f.enhanced.and_then(|e| depth(e.ird)),
            peer_ord: f.enhanced.and_then(|e| depth(e.ord)),
        };
        self.request = Some(f);
        ResponderStep::Request(request)
    }

    /// The consumer accepts with its IRD and ORD: the reply frame, and what was agreed.
    pub fn accept(
        &self,
        ird: u16,
        ord: u16,
        private_data: &[u8],
    ) -> Result<(Box<[u8]>, NegotiatedParameters), MpaError> {
        let f = self.request.as_ref().ok_or(MpaError::WrongState)?;
        let mut n = NegotiatedParameters {
            initiator: false,
            crc: f.crc || self.cfg.crc.asks(),
            markers_in: self.cfg.markers == MarkerPolicy::Request,
            markers_out: f.markers,
            ird: ird.min(self.cfg.max_ird),
            ord: ord.min(self.cfg.max_ord),
            rtr: None,
            revision: f.revision.max(1),
        };
        let mut enhanced = None;
        if let Some(e) = f.enhanced {
            if e.peer_to_peer {
                n.rtr = self.acceptable(e).choose();
            }
            if e.ord != DEPTH_UNNEGOTIATED {
                // As much as the initiator wants, as far as the device has it, never less than the
                // consumer asked for.
                n.ird = n.ird.max(e.ord.min(self.cfg.max_ird));
            }
            if e.ird != DEPTH_UNNEGOTIATED {
                n.ord = n.ord.min(e.ird);
            }
            if n.rtr == Some(RtrKind::Read) {
                n.ird = n.ird.max(1);
            }
            n.ird = super::announced_ird(&self.cfg, n.ird);
            enhanced = Some(EnhancedData {
                peer_to_peer: n.rtr.is_some(),
                rtr: n.rtr.map_or(RtrKinds::NONE, RtrKinds::only),
                // Conformance 25: what is not negotiated is answered in kind.
                ird: if e.ord == DEPTH_UNNEGOTIATED {
                    DEPTH_UNNEGOTIATED
                } else {
                    n.ird
                },
                ord: if e.ird == DEPTH_UNNEGOTIATED {
                    DEPTH_UNNEGOTIATED
                } else {
                    n.ord
                },
            });
        }
        if f.enhanced.is_none() {
            // Revision 1 negotiates no depth: hold as many reads as the device can.
            n.ird = self.cfg.max_ird;
        }
        // A revision 1 peer in peer-to-peer mode starts with a zero-length Read (Chelsio).
        n.ird = n.ird.max(1);
        Ok((self.reply(f, false, enhanced, private_data)?, n))
    }

    /// The consumer refuses: the reply frame; send it, then close.
    pub fn reject(&self, private_data: &[u8]) -> Result<Box<[u8]>, MpaError> {
        let f = self.request.as_ref().ok_or(MpaError::WrongState)?;
        self.reply(f, true, Self::reject_data(f), private_data)
    }

    fn acceptable(&self, e: EnhancedData) -> RtrKinds {
        let mut k = e.rtr.intersection(self.cfg.rtr_kinds);
        k.read &= self.cfg.max_ird > 0;
        k
    }

    fn reject_data(f: &MpaFrame) -> Option<EnhancedData> {
        f.enhanced.map(|e| EnhancedData {
            peer_to_peer: false,
            rtr: RtrKinds::NONE,
            ird: e.ord,
            ord: e.ird,
        })
    }

    fn reply(
        &self,
        request: &MpaFrame,
        reject: bool,
        enhanced: Option<EnhancedData>,
        private_data: &[u8],
    ) -> Result<Box<[u8]>, MpaError> {
        MpaFrame {
            kind: MpaFrameKind::Reply,
            markers: !reject && self.cfg.markers == MarkerPolicy::Request,
            crc: request.crc || self.cfg.crc.asks(),
            reject,
            revision: request.revision,
            enhanced,
            private_data: private_data.to_vec(),
        }
        .encode()
    }
}
