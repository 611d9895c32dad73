//! `Debug` of the objects: what identifies each.

use crate::*;
use std::fmt::{Debug, Formatter, Result};

macro_rules! debug_objects {
    ($($object:ty: $name:literal { $($field:ident),* })*) => {$(
        impl Debug for $object {
            fn fmt(&self, f: &mut Formatter<'_>) -> Result {
                f.debug_struct($name)
                    $(.field(stringify!($field), &self.$field()))*
                    .finish_non_exhaustive()
            }
        }
    )*};
}

debug_objects! {
    Context: "Context" { daemon_version, is_known_alive }
    Pd: "Pd" { id }
    Arena: "Arena" { id, as_ptr, len }
    Mr: "Mr" { addr, len, access, lkey, rkey }
    AppMr: "AppMr" { addr, len, access, lkey, rkey }
    FastMr: "FastMr" { key, len }
    Mw: "Mw" { window_type, rkey }
    CompletionChannel: "CompletionChannel" { id }
    Cq: "Cq" { cq_id, capacity }
    Qp: "Qp" { qp_num, state }
    Srq: "Srq" { srq_id }
    Ah: "Ah" { number }
    CmChannel: "CmChannel" { id }
    CmListener: "CmListener" { local_addr }
    CmBinding: "CmBinding" { local_addr }
    AddressResolution: "AddressResolution" {}
    ServiceSearch: "ServiceSearch" {}
    SendPosting<'_>: "SendPosting" { qp_num }
    ReceivePosting<'_>: "ReceivePosting" { qp_num }
    SharedReceivePosting<'_>: "SharedReceivePosting" {}
}

impl<O: StableBuffer> Debug for OwnedMr<O> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        Debug::fmt(self.region(), f)
    }
}

impl Debug for crate::context::ClientInner {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("ClientInner").finish_non_exhaustive()
    }
}
