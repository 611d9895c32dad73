//! Mutants: small faults that a test build can switch on, one at a time, while siwd runs. `siw-lab
//! mutants` requires that each turns its conformance case red (benches/lab/mutants).
//!
//! They exist with the feature `mutants` only, which nothing but the program `siwd-mutants` asks for.

/// Returns whether the fault is switched on; the constant `false` without the feature `mutants`.
#[cfg(feature = "mutants")]
macro_rules! mutant {
    ($name:ident) => {
        $crate::mutant::is_selected($crate::mutant::Mutant::$name)
    };
}

/// Returns whether the fault is switched on; the constant `false` without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
macro_rules! mutant {
    ($name:ident) => {
        $crate::mutant::is_selected()
    };
}

/// Without the feature, no mutant is switched on.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) const fn is_selected() -> bool {
    false
}

#[cfg(feature = "mutants")]
pub use selection::{Mutant, NAMES, is_selected, select};

#[cfg(feature = "mutants")]
mod selection {
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Index of the mutant that is switched on; beyond the last: none.
    static SELECTED: AtomicUsize = AtomicUsize::new(usize::MAX);

    macro_rules! mutants {
        ($($name:ident)*) => {
            /// A fault; benches/lab/mutants describes each.
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[allow(missing_docs)]
            pub enum Mutant { $($name,)* }

            /// Names of all mutants, by index.
            pub const NAMES: &[&str] = &[$(stringify!($name),)*];
        };
    }

    mutants! {
        AbortWithoutTerminate AnyReplyKey AnyRequestKey BadCrcSkipped CrcCode CrcNegotiatedOff
        CrcOfFirstPiece CrcUnchecked EmptyReadChecked EmptyReadUnanswered EmptyWriteChecked
        EnhancedRevisionOne HeaderOverPieces InitiatorWithoutMarkers InsufficientIrdCode
        InvalidateCode InvalidateFieldChecked InvalidateUnchecked IrdBelowOrd LateLengthCheck
        LayerTypeSwapped LongPrivateData MapperCut MapperHandle MapperKind MapperLength
        MapperVersion MarkerNotSummed MarkerPointerOff MarkersMisplaced MoUnchecked MsnCode
        OneFpduPerSegment OpcodeAsSend OpcodeCode OpcodeOnAnyQueue OrdAboveIrd OwnCrcByteOrder
        OwnInvalidateField OwnPadDirty OwnRdmapVersion OwnReadMsn OwnReadQueue OwnReservedBit
        PadChecked PadNotSummed PeerFinIgnored PeerToPeerNotEchoed PeerToPeerRequired
        PeerToPeerUnasked QueueCode QueueUnchecked QuotedHeaderLong QuotedLengthOff
        RdmapVersionUnchecked ReadBoundsIgnored ReadMsnUnchecked
        ReadQuoteMissing ReadStagCode ReadStagIgnored ReadStaleKey ReadWrapCode RejectionIgnored
        ReplyEnhancedUnasked ReplyKeyWrong ReplyLengthOff ReplyReservedFlag ReplyRevisionTwo
        ReplyUnenhanced ReplyWithoutCrc RequestAsReply RequestKeyWrong RequestRejectBit
        RequestUnenhanced RequestWithoutCrc ReservedDdpBits ReservedRdmapBits ReservedReplyFlags
        ReservedRequestFlags ResetAfterTerminate ResponderWithoutMarkers ResponseCrcZero
        ResponseLengthOff ResponseNotLast ResponseShifted ResponseShort ResponseSourceStag
        ResponseToCut RevisionThree RevisionZero RtrKindMissing RtrKindWrong SendMsnGap
        SendMsnReplayed SendMsnUnchecked SendOnQueueThree ShortEnhanced ShortUlpduIgnored
        SolicitedRefused TaggedBoundsCode TaggedQuoteMissing TaggedStagCode TaggedVersionUnchecked
        TaggedWrapCode TerminateAnswered TerminateCrcZero TerminateIgnored TerminateMo
        TerminateMsn TerminateNotLast TerminateQueue TerminateReservedBits TooLongAccepted
        TooLongCode UnaskedResponseIgnored UnclosedAfterTerminate UnnegotiatedAnswered
        UnnegotiatedOrdTaken UntaggedQuoteMissing UntaggedVersionUnchecked UntaggedWriteIgnored
        WholeFrameOnly WriteBoundsIgnored WriteCutAtEnd WriteLost WriteNotLastLost WriteShifted
        WriteStagIgnored WriteStaleKey
    }

    /// Returns whether a mutant is switched on.
    #[inline]
    pub fn is_selected(mutant: Mutant) -> bool {
        SELECTED.load(Ordering::Relaxed) == mutant as usize
    }

    /// Switches a mutant on and all others off; `None` switches all off. Returns whether the name is
    /// known.
    pub fn select(name: Option<&str>) -> bool {
        let index = match name {
            None => usize::MAX,
            Some(name) => match NAMES.iter().position(|known| *known == name) {
                Some(index) => index,
                None => return false,
            },
        };
        SELECTED.store(index, Ordering::Relaxed);
        true
    }
}
