//! The side that connects.

use super::{
    DEPTH_UNNEGOTIATED, EnhancedData, MarkerPolicy, MpaConfig, MpaCrcPolicy, MpaError, MpaFrame,
    MpaFrameKind, NegotiatedParameters, RtrKinds,
};
use crate::rdmap::terminate;
use crate::stream::RxStream;

/// What a look at the stream brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InitiatorStep {
    /// The reply is not complete; the reply timer goes on.
    NeedMore,
    /// Connected: enter FPDU mode.
    Accepted {
        /// What was agreed.
        negotiated: NegotiatedParameters,
        /// The responder's private data.
        private_data: Vec<u8>,
    },
    /// The responder's consumer said no; close.
    Rejected {
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// No connection; send `send` if it is there, then close.
    Failed {
        /// Why.
        error: MpaError,
        /// A Terminate FPDU.
        send: Option<Box<[u8]>>,
    },
}

/// One connection attempt.
#[derive(Debug, Clone)]
pub struct MpaInitiator {
    cfg: MpaConfig,
    ird: u16,
    ord: u16,
    request: Box<[u8]>,
}

impl MpaInitiator {
    /// Prepares the request. `ird`, `ord`: what the consumer asks for; they are cut to what the
    /// device has. Fails when the private data does not fit (508 bytes with revision 2, else 512).
    pub fn new(cfg: &MpaConfig, ird: u16, ord: u16, private_data: &[u8]) -> Result<Self, MpaError> {
        let ird = super::announced_ird(cfg, ird);
        let ord = ord.min(cfg.max_ord);
        if !(1..=2).contains(&cfg.revision) {
            return Err(MpaError::BadRevision(cfg.revision));
        }
        // Read is offered with ORD 0 too: it is the only kind that Chelsio knows, and the responder
        // keeps IRD >= 1 for it (conformance 24).
        let p2p = cfg.peer_to_peer && !cfg.rtr_kinds.is_empty();
        let enhanced = (cfg.revision == 2).then_some(EnhancedData {
            peer_to_peer: p2p,
            rtr: if p2p { cfg.rtr_kinds } else { RtrKinds::NONE },
            ird,
            ord,
        });
        let request = MpaFrame {
            kind: MpaFrameKind::Request,
            markers: cfg.markers == MarkerPolicy::Request,
            crc: cfg.crc.asks(),
            reject: false,
            revision: cfg.revision,
            enhanced,
            private_data: private_data.to_vec(),
        }
        .encode()?;
        Ok(Self {
            cfg: cfg.clone(),
            ird,
            ord,
            request,
        })
    }

    /// The request frame, to be sent in one segment.
    pub fn request_frame(&self) -> Box<[u8]> {
        self.request.clone()
    }

    /// The configuration of a second attempt, after the peer reset the first: revision 1, when
    /// revision 2 was asked for and the fallback is on.
    pub fn fallback_config(&self) -> Option<MpaConfig> {
        (self.cfg.revision == 2 && self.cfg.fallback_to_rev1).then(|| MpaConfig {
            revision: 1,
            ..self.cfg.clone()
        })
    }

    /// Looks for the reply.
    pub fn on_stream(&mut self, rx: &mut impl RxStream) -> InitiatorStep {
        let frame = match MpaFrame::read_from(rx, self.cfg.max_private_data) {
            Ok(None) => return InitiatorStep::NeedMore,
            Ok(Some(f)) => f,
            Err(error) => return InitiatorStep::Failed { error, send: None },
        };
        match self.negotiate(&frame, rx.available()) {
            Ok(negotiated) => InitiatorStep::Accepted {
                negotiated,
                private_data: frame.private_data,
            },
            Err(None) => InitiatorStep::Rejected {
                private_data: frame.private_data,
            },
            Err(Some(error)) => InitiatorStep::Failed {
                error,
                send: error.terminate_code().map(|c| {
                    let order = self.cfg.terminate_bit_order;
                    terminate::encode_standalone_fpdu(c, order, self.crc_on(&frame), frame.markers)
                }),
            },
        }
    }

    /// On when either side asked (RFC 5044 section 7.1.1, conformance 18).
    fn crc_on(&self, reply: &MpaFrame) -> bool {
        reply.crc || self.cfg.crc.asks()
    }

    /// `Err(None)`: rejected by the peer's consumer.
    fn negotiate(
        &self,
        f: &MpaFrame,
        trailing: usize,
    ) -> Result<NegotiatedParameters, Option<MpaError>> {
        if f.kind == MpaFrameKind::Request {
            return Err(Some(MpaError::BothInitiators));
        }
        if f.reject {
            return Err(None);
        }
        if f.revision > self.cfg.revision {
            return Err(Some(MpaError::BadRevision(f.revision)));
        }
        if trailing > 0 {
            // The responder sends no FPDU before it has received one (RFC 5044 section 7.1.2).
            return Err(Some(MpaError::TrailingBytes));
        }
        if f.markers && self.cfg.markers == MarkerPolicy::Never {
            return Err(Some(MpaError::MarkersUnsupported));
        }
        if !f.crc && self.cfg.crc == MpaCrcPolicy::Required {
            return Err(Some(MpaError::CrcRefused));
        }
        let mut n = NegotiatedParameters {
            initiator: true,
            crc: self.crc_on(f),
            markers_in: self.cfg.markers == MarkerPolicy::Request,
            markers_out: f.markers,
            ird: self.ird,
            ord: self.ord,
            rtr: None,
            revision: f.revision.max(1),
        };
        let asked = self.cfg.revision == 2;
        let Some(e) = f.enhanced else {
            // Conformance 5, 6: enhanced data is answered with enhanced data.
            // Revision 1 negotiates no depth: hold as many reads as the device can.
            n.ird = self.cfg.max_ird.max(1);
            return if asked {
                Err(Some(MpaError::EnhancedMismatch))
            } else {
                Ok(n)
            };
        };
        if !asked {
            return Err(Some(MpaError::EnhancedMismatch));
        }
        if e.ird != DEPTH_UNNEGOTIATED {
            n.ord = n.ord.min(e.ird);
        }
        if e.ord != DEPTH_UNNEGOTIATED && e.ord > n.ird {
            if e.ord > self.cfg.max_ird {
                return Err(Some(MpaError::InsufficientIrd {
                    peer_ord: e.ord,
                    ird: self.cfg.max_ird,
                }));
            }
            n.ird = e.ord;
        }
        let offered = if self.cfg.peer_to_peer {
            self.cfg.rtr_kinds
        } else {
            RtrKinds::NONE
        };
        if !offered.is_empty() && e.peer_to_peer {
            n.rtr = e.rtr.intersection(offered).choose();
            if n.rtr.is_none() {
                return Err(Some(MpaError::NoRtr));
            }
        }
        Ok(n)
    }
}
