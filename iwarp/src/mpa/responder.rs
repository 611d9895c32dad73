//! Responder of a connection: validates the request and answers with the consumer's decision
//! (PROTOCOL.md section 3).

use super::{
    DEPTH_UNNEGOTIATED, EnhancedData, MarkerPolicy, MpaConfig, MpaError, MpaFrame, MpaFrameKind,
    NegotiatedParameters, PrivateDepths, RtrKind, RtrKinds,
};
use crate::stream::RxStream;
use serde::{Deserialize, Serialize};

/// Result of reading the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResponderStep {
    /// The request is incomplete; the request timer keeps running. After [`Request`](Self::Request):
    /// nothing new arrived.
    NeedMore,
    /// The consumer must decide on this request; returned once.
    Request(ConnectRequest),
    /// The set-up failed; send `send` (a reject) if present, then close.
    Failed {
        /// Reason of the failure.
        error: MpaError,
        /// A reply frame with R set.
        send: Option<Box<[u8]>>,
    },
}

/// A connection request that the consumer accepts or rejects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// The initiator's private data.
    pub private_data: Vec<u8>,
    /// Revision of the request.
    pub revision: u8,
    /// Inbound Reads that the initiator can hold: the upper limit of our ORD. `None`: not negotiated.
    pub peer_ird: Option<u16>,
    /// Reads that the initiator wants to issue: the desired value of our IRD. `None`: not negotiated.
    pub peer_ord: Option<u16>,
}

/// One incoming connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MpaResponder {
    config: MpaConfig,
    request: Option<MpaFrame>,
    /// Depths in the private data of the request.
    private_depths: Option<PrivateDepths>,
}

impl MpaResponder {
    /// Creates a responder that waits for a request.
    pub fn new(config: &MpaConfig) -> Self {
        Self {
            config: config.clone(),
            request: None,
            private_depths: None,
        }
    }

    /// The device's configuration of connection set-up.
    pub fn config(&self) -> &MpaConfig {
        &self.config
    }

    /// Reads the request. After the request, checks that the initiator sends nothing until it is
    /// answered (RFC 5044 section 7.1.2, conformance 10).
    pub fn on_stream(&mut self, rx: &mut impl RxStream) -> ResponderStep {
        let failed = |error| ResponderStep::Failed { error, send: None };
        if self.request.is_some() {
            return if rx.available() > 0 {
                failed(MpaError::TrailingBytes)
            } else {
                ResponderStep::NeedMore
            };
        }
        let mut frame = match MpaFrame::read_from(rx, self.config.max_private_data) {
            Ok(None) => return ResponderStep::NeedMore,
            Ok(Some(frame)) => frame,
            Err(error) => return failed(error),
        };
        if frame.kind == MpaFrameKind::Reply {
            return failed(MpaError::UnexpectedReply);
        }
        if frame.revision > self.config.revision {
            return failed(MpaError::BadRevision(frame.revision));
        }
        if rx.available() > 0 {
            return failed(MpaError::TrailingBytes);
        }
        if let Err(error) = self.check_demands(&mut frame) {
            let enhanced = self.refusal_data(&frame, error);
            let send = self.encode_reply(&frame, true, enhanced, &[]).ok();
            return ResponderStep::Failed { error, send };
        }
        let known_depth = |depth: u16| (depth != DEPTH_UNNEGOTIATED).then_some(depth);
        let private = self.private_depths;
        let (ird, ord) = match frame.enhanced {
            Some(peer) => (known_depth(peer.ird), known_depth(peer.ord)),
            None => (private.map(|peer| peer.ird), private.map(|peer| peer.ord)),
        };
        let request = ConnectRequest {
            private_data: frame.private_data.clone(),
            revision: frame.revision,
            peer_ird: ird,
            peer_ord: ord,
        };
        self.request = Some(frame);
        ResponderStep::Request(request)
    }

    /// Takes the depths from the private data of a well-formed request of revision 1, if the device is
    /// configured so.
    ///
    /// # Errors
    /// The request demands what this device does not support, or lacks the depths.
    fn check_demands(&mut self, request: &mut MpaFrame) -> Result<(), MpaError> {
        if request.markers && self.config.markers == MarkerPolicy::Never {
            return Err(MpaError::MarkersUnsupported);
        }
        if let Some(peer) = request.enhanced
            && peer.peer_to_peer
            && self.acceptable_rtr(peer).is_empty()
        {
            return Err(MpaError::NoRtr);
        }
        if self.config.depths_in_private_data && request.revision == 1 {
            self.private_depths = Some(PrivateDepths::take_from(&mut request.private_data)?);
        }
        Ok(())
    }

    /// Accepts the connection with the consumer's IRD and ORD. Returns the reply frame and the
    /// negotiated parameters.
    pub fn accept(
        &self,
        ird: u16,
        ord: u16,
        private_data: &[u8],
    ) -> Result<(Box<[u8]>, NegotiatedParameters), MpaError> {
        let request = self.request.as_ref().ok_or(MpaError::WrongState)?;
        let mut negotiated = NegotiatedParameters {
            initiator: false,
            crc: request.crc || self.config.crc.requests_crc(),
            markers_in: self.config.markers == MarkerPolicy::Request,
            markers_out: request.markers,
            ird: ird.min(self.config.max_ird),
            ord: ord.min(self.config.max_ord),
            joins_immediate: self.joins_immediate(request),
            rtr: None,
            revision: request.revision,
        };
        let enhanced = match request.enhanced {
            Some(peer) => Some(self.negotiate_enhanced(&mut negotiated, peer)),
            None => {
                match self.private_depths {
                    Some(peer) => self.agree_on_depths(&mut negotiated, peer.ird, peer.ord),
                    // Revision 1 negotiates no depth: hold as many Reads as the device can.
                    None => negotiated.ird = self.config.max_ird,
                }
                None
            }
        };
        // A revision 1 peer in peer-to-peer mode starts with a zero-length Read (PROTOCOL.md section
        // 7.2).
        negotiated.ird = negotiated.ird.max(1);
        let private_data = match self.private_depths {
            Some(_) => PrivateDepths {
                ird: negotiated.ird,
                ord: negotiated.ord,
            }
            .prepend_to(private_data),
            None => private_data.to_vec(),
        };
        let reply = self.encode_reply(request, false, enhanced, &private_data)?;
        Ok((reply, negotiated))
    }

    /// Adapts the depths to those that the initiator announced.
    fn agree_on_depths(&self, negotiated: &mut NegotiatedParameters, peer_ird: u16, peer_ord: u16) {
        if peer_ord != DEPTH_UNNEGOTIATED {
            // As much as the initiator wants, within the device's limit, and never less than the
            // consumer asked for.
            negotiated.ird = negotiated.ird.max(peer_ord.min(self.config.max_ird));
        }
        if peer_ird != DEPTH_UNNEGOTIATED {
            negotiated.ord = negotiated.ord.min(peer_ird);
        }
    }

    /// Negotiates depths and the ready-to-receive message. Returns the enhanced data for the reply.
    fn negotiate_enhanced(
        &self,
        negotiated: &mut NegotiatedParameters,
        peer: EnhancedData,
    ) -> EnhancedData {
        if peer.peer_to_peer {
            negotiated.rtr = self.acceptable_rtr(peer).choose();
        }
        self.agree_on_depths(negotiated, peer.ird, peer.ord);
        if negotiated.rtr == Some(RtrKind::Read) {
            negotiated.ird = negotiated.ird.max(1);
        }
        negotiated.ird = super::announced_ird(&self.config, negotiated.ird);
        // Conformance 25: the reply to a depth that is not negotiated says "not negotiated" too.
        let reply_depth = |asked, own| {
            if asked == DEPTH_UNNEGOTIATED {
                DEPTH_UNNEGOTIATED
            } else {
                own
            }
        };
        EnhancedData {
            peer_to_peer: negotiated.rtr.is_some(),
            rtr: negotiated.rtr.map_or(RtrKinds::NONE, RtrKinds::from_kind),
            ird: reply_depth(peer.ord, negotiated.ird),
            ord: reply_depth(peer.ird, negotiated.ord),
        }
    }

    /// Rejects the connection. Returns the reply frame; the caller sends it, then closes.
    pub fn reject(&self, private_data: &[u8]) -> Result<Box<[u8]>, MpaError> {
        let request = self.request.as_ref().ok_or(MpaError::WrongState)?;
        self.encode_reply(request, true, Self::reject_data(request), private_data)
    }

    /// Ready-to-receive kinds that both sides support; Read needs an IRD of at least 1.
    fn acceptable_rtr(&self, peer: EnhancedData) -> RtrKinds {
        let mut kinds = peer.rtr.intersection(self.config.rtr_kinds);
        kinds.read &= self.config.max_ird > 0;
        kinds
    }

    fn joins_immediate(&self, request: &MpaFrame) -> bool {
        self.config.immediate_with_send && request.joins_immediate
    }

    /// Enhanced data of a refusing reply. Without a common ready-to-receive kind, it names one that
    /// this device supports (PROTOCOL.md section 8.6).
    fn refusal_data(&self, request: &MpaFrame, error: MpaError) -> Option<EnhancedData> {
        let mut data = Self::reject_data(request)?;
        let kind = match error {
            MpaError::NoRtr => self.config.rtr_kinds.choose(),
            _ => None,
        };
        if let Some(kind) = kind {
            data.peer_to_peer = true;
            data.rtr = RtrKinds::from_kind(kind);
        }
        Some(data)
    }

    fn reject_data(request: &MpaFrame) -> Option<EnhancedData> {
        request.enhanced.map(|peer| EnhancedData {
            peer_to_peer: false,
            rtr: RtrKinds::NONE,
            ird: peer.ord,
            ord: peer.ird,
        })
    }

    fn encode_reply(
        &self,
        request: &MpaFrame,
        reject: bool,
        enhanced: Option<EnhancedData>,
        private_data: &[u8],
    ) -> Result<Box<[u8]>, MpaError> {
        MpaFrame {
            kind: MpaFrameKind::Reply,
            markers: !reject && self.config.markers == MarkerPolicy::Request,
            crc: request.crc || self.config.crc.requests_crc(),
            reject,
            joins_immediate: !reject && self.joins_immediate(request),
            revision: request.revision,
            enhanced,
            private_data: private_data.to_vec(),
        }
        .encode()
    }
}
