//! Initiator of a connection: sends the request and validates the reply (PROTOCOL.md section 3).

use super::{
    DEPTH_UNNEGOTIATED, EnhancedData, MarkerPolicy, MpaConfig, MpaCrcPolicy, MpaError, MpaFrame,
    MpaFrameKind, NegotiatedParameters, PrivateDepths, RtrKind, RtrKinds,
};
use crate::rdmap::terminate;
use crate::stream::RxStream;
use serde::{Deserialize, Serialize};

/// Result of reading the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InitiatorStep {
    /// The reply is incomplete; the reply timer keeps running.
    NeedMore,
    /// Connected: enter FPDU mode.
    Accepted {
        /// Negotiated parameters.
        negotiated: NegotiatedParameters,
        /// The responder's private data.
        private_data: Vec<u8>,
    },
    /// The responder's consumer rejected the connection; close.
    Rejected {
        /// The responder's private data.
        private_data: Vec<u8>,
    },
    /// The set-up failed; send `send` if present, then close.
    Failed {
        /// Reason of the failure.
        error: MpaError,
        /// A Terminate FPDU.
        send: Option<Box<[u8]>>,
    },
}

/// One connection attempt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MpaInitiator {
    config: MpaConfig,
    ird: u16,
    ord: u16,
    request: Box<[u8]>,
}

/// True if the frames of this revision have depths in their private data.
fn has_private_depths(config: &MpaConfig) -> bool {
    config.depths_in_private_data && config.revision == 1
}

impl MpaInitiator {
    /// Prepares the request. `ird` and `ord` are the consumer's values; they are limited to the
    /// device's maxima. Fails when the private data does not fit (508 bytes with revision 2, 504 with
    /// depths in the private data, else 512).
    pub fn new(
        config: &MpaConfig,
        ird: u16,
        ord: u16,
        private_data: &[u8],
    ) -> Result<Self, MpaError> {
        let ird = super::announced_ird(config, ird);
        let ord = ord.min(config.max_ord);
        if !(1..=2).contains(&config.revision) {
            return Err(MpaError::BadRevision(config.revision));
        }
        // Read is offered even with ORD 0: it is the only kind that Chelsio supports, and the
        // responder keeps IRD >= 1 for it (conformance 24).
        let peer_to_peer = config.peer_to_peer && !config.rtr_kinds.is_empty();
        let enhanced = (config.revision == 2).then_some(EnhancedData {
            peer_to_peer,
            rtr: if peer_to_peer {
                config.rtr_kinds
            } else {
                RtrKinds::NONE
            },
            ird,
            ord,
        });
        let depths = has_private_depths(config).then_some(PrivateDepths { ird, ord });
        let request = MpaFrame {
            kind: MpaFrameKind::Request,
            markers: config.markers == MarkerPolicy::Request,
            crc: config.crc.requests_crc(),
            reject: false,
            joins_immediate: config.immediate_with_send && config.revision == 2,
            revision: config.revision,
            enhanced,
            private_data: match depths {
                Some(depths) => depths.prepend_to(private_data),
                None => private_data.to_vec(),
            },
        }
        .encode()?;
        Ok(Self {
            config: config.clone(),
            ird,
            ord,
            request,
        })
    }

    /// The request frame, to be sent in one segment.
    pub fn request_frame(&self) -> Box<[u8]> {
        self.request.clone()
    }

    /// Parameters of a stream whose peer is this queue pair itself: nothing is exchanged.
    pub fn negotiate_with_itself(&self) -> NegotiatedParameters {
        NegotiatedParameters {
            initiator: true,
            crc: self.config.crc.requests_crc(),
            markers_in: false,
            markers_out: false,
            ird: self.ird,
            ord: self.ord.min(self.ird),
            joins_immediate: self.config.immediate_with_send,
            rtr: None,
            revision: self.config.revision,
        }
    }

    /// Configuration of a second attempt after the peer reset the first one: revision 1, if revision
    /// 2 was requested and the fallback is enabled.
    pub fn fallback_config(&self) -> Option<MpaConfig> {
        (self.config.revision == 2 && self.config.fallback_to_rev1).then(|| MpaConfig {
            revision: 1,
            ..self.config.clone()
        })
    }

    /// Reads the reply, once it is complete.
    pub fn on_stream(&mut self, rx: &mut impl RxStream) -> InitiatorStep {
        let mut frame = match MpaFrame::read_from(rx, self.config.max_private_data) {
            Ok(None) => return InitiatorStep::NeedMore,
            Ok(Some(frame)) => frame,
            Err(error) => return InitiatorStep::Failed { error, send: None },
        };
        match self.negotiate(&mut frame, rx.available()) {
            Ok(negotiated) => InitiatorStep::Accepted {
                negotiated,
                private_data: frame.private_data,
            },
            Err(None) => InitiatorStep::Rejected {
                private_data: frame.private_data,
            },
            Err(Some(error)) => InitiatorStep::Failed {
                error,
                send: error.terminate_code().map(|code| {
                    let order = self.config.terminate_bit_order;
                    terminate::encode_standalone_fpdu(
                        code,
                        order,
                        self.is_crc_on(&frame),
                        frame.markers,
                    )
                }),
            },
        }
    }

    /// The CRC is on when either side requested it (RFC 5044 section 7.1.1, conformance 18).
    fn is_crc_on(&self, reply: &MpaFrame) -> bool {
        reply.crc || self.config.crc.requests_crc()
    }

    /// Takes the peer's depths from its reply. `Err(None)`: the peer's consumer rejected the connection.
    fn negotiate(
        &self,
        reply: &mut MpaFrame,
        trailing: usize,
    ) -> Result<NegotiatedParameters, Option<MpaError>> {
        if reply.kind == MpaFrameKind::Request {
            return Err(Some(MpaError::BothInitiators));
        }
        if reply.reject {
            return Err(None);
        }
        self.check_reply(reply, trailing)?;
        let mut negotiated = NegotiatedParameters {
            initiator: true,
            crc: self.is_crc_on(reply),
            markers_in: self.config.markers == MarkerPolicy::Request,
            markers_out: reply.markers,
            ird: self.ird,
            ord: self.ord,
            joins_immediate: self.config.immediate_with_send && reply.joins_immediate,
            rtr: None,
            revision: reply.revision,
        };
        match reply.enhanced {
            Some(enhanced) => self.negotiate_enhanced(&mut negotiated, enhanced)?,
            None if has_private_depths(&self.config) => {
                let peer = PrivateDepths::take_from(&mut reply.private_data)?;
                negotiated.ord = negotiated.ord.min(peer.ird);
                // A peer may announce more than it is going to use.
                negotiated.ird = negotiated.ird.max(peer.ord.min(self.config.max_ird)).max(1);
                let starts_with_read = self.config.peer_to_peer && self.config.rtr_kinds.read;
                negotiated.rtr = starts_with_read.then_some(RtrKind::Read);
            }
            // Revision 1 negotiates no depth: hold as many Reads as the device can.
            None => negotiated.ird = self.config.max_ird.max(1),
        }
        Ok(negotiated)
    }

    /// Finds the defects that make a reply unusable regardless of its enhanced data.
    fn check_reply(&self, reply: &MpaFrame, trailing: usize) -> Result<(), MpaError> {
        if reply.revision > self.config.revision {
            return Err(MpaError::BadRevision(reply.revision));
        }
        if trailing > 0 {
            // The responder sends no FPDU before it has received one (RFC 5044 section 7.1.2).
            return Err(MpaError::TrailingBytes);
        }
        if reply.markers && self.config.markers == MarkerPolicy::Never {
            return Err(MpaError::MarkersUnsupported);
        }
        if !reply.crc && self.config.crc == MpaCrcPolicy::Required {
            return Err(MpaError::CrcRefused);
        }
        // Conformance 5, 6: enhanced data is answered with enhanced data.
        let is_asked = self.config.revision == 2;
        if reply.enhanced.is_some() != is_asked {
            return Err(MpaError::EnhancedMismatch);
        }
        Ok(())
    }

    fn negotiate_enhanced(
        &self,
        negotiated: &mut NegotiatedParameters,
        peer: EnhancedData,
    ) -> Result<(), MpaError> {
        if peer.ird != DEPTH_UNNEGOTIATED {
            negotiated.ord = negotiated.ord.min(peer.ird);
        }
        if peer.ord != DEPTH_UNNEGOTIATED && peer.ord > negotiated.ird {
            if peer.ord > self.config.max_ird {
                return Err(MpaError::InsufficientIrd {
                    peer_ord: peer.ord,
                    ird: self.config.max_ird,
                });
            }
            negotiated.ird = peer.ord;
        }
        let offered = if self.config.peer_to_peer {
            self.config.rtr_kinds
        } else {
            RtrKinds::NONE
        };
        if !offered.is_empty() && peer.peer_to_peer {
            negotiated.rtr = peer.rtr.intersection(offered).choose();
            if negotiated.rtr.is_none() {
                return Err(MpaError::NoRtr);
            }
        }
        Ok(())
    }
}
