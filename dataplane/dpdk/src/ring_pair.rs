//! Two ports joined by rings in memory: the loopback device pair. Packets cross by pointer, so the
//! peer receives the same mbufs that were sent, including external segments.

use crate::port_inner::PairRings;
use crate::{Eal, Error, Port, Result, eal, error, log};
use dpdk_sys as sys;
use parking_lot::Mutex;
use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::Arc;

impl Port {
    /// Creates a pair of ports; queue `i` of one is joined to queue `i` of the other in both
    /// directions by a ring of `ring_size` packets (rounded up to a power of two). `name` is unique
    /// in the process and at most 16 bytes long.
    pub fn create_ring_pair(
        eal: &Eal,
        name: &str,
        queues: u16,
        ring_size: u32,
    ) -> Result<(Self, Self)> {
        let invalid = |why: &str| Error::Invalid {
            what: "ring pair",
            value: name.to_owned(),
            why: why.to_owned(),
        };
        if name.is_empty() || name.len() > 16 || name.contains([',', '=', '\0']) {
            return Err(invalid("its name must have 1 to 16 bytes, without , and ="));
        }
        // RTE_PMD_RING_MAX_RX_RINGS
        if queues == 0 || queues > 16 {
            return Err(invalid("it has 1 to 16 queues"));
        }
        log::forget_lines();
        let mut rings = PairRings {
            a_to_b: Vec::new(),
            b_to_a: Vec::new(),
            pools: Mutex::default(),
        };
        for queue in 0..queues {
            rings
                .a_to_b
                .push(create_ring(&format!("{name}_ab{queue}"), ring_size)?);
            rings
                .b_to_a
                .push(create_ring(&format!("{name}_ba{queue}"), ring_size)?);
        }
        let rings = Arc::new(rings);
        let first = create_ring_port(
            eal,
            &format!("{name}_a"),
            &rings,
            &rings.b_to_a,
            &rings.a_to_b,
        )?;
        let second = create_ring_port(
            eal,
            &format!("{name}_b"),
            &rings,
            &rings.a_to_b,
            &rings.b_to_a,
        )?;
        Ok((first, second))
    }
}

fn create_ring(name: &str, size: u32) -> Result<NonNull<sys::rte_ring>> {
    let fail = |reason| Error::Device {
        device: name.to_owned(),
        reason,
        hint: String::new(),
        log: log::kept_lines(),
    };
    let Some(size) = size.max(2).checked_next_power_of_two() else {
        return Err(fail(format!("a ring of {size} packets is too large")));
    };
    let cname = CString::new(name).map_err(|error| fail(error.to_string()))?;
    // Each ring has one producer and one consumer, since each queue has one owner.
    let flags = sys::RING_F_SP_ENQ | sys::RING_F_SC_DEQ;
    // SAFETY: the name lives through the call, which copies it.
    let ring = unsafe { sys::rte_ring_create(cname.as_ptr(), size, sys::SOCKET_ID_ANY, flags) };
    NonNull::new(ring).ok_or_else(|| fail(error::errno_text(error::rte_errno())))
}

fn create_ring_port(
    eal: &Eal,
    name: &str,
    rings: &Arc<PairRings>,
    rx: &[NonNull<sys::rte_ring>],
    tx: &[NonNull<sys::rte_ring>],
) -> Result<Port> {
    let cname = CString::new(name).unwrap_or_default();
    let devices = eal::device_lock();
    // SAFETY: both arrays have the given lengths; a NonNull has the layout of a plain pointer; the
    // rings live until both ports are closed.
    let id = unsafe {
        sys::rte_eth_from_rings(
            cname.as_ptr(),
            rx.as_ptr().cast(),
            rx.len() as u32,
            tx.as_ptr().cast(),
            tx.len() as u32,
            0,
        )
    };
    drop(devices);
    let Ok(id) = u16::try_from(id) else {
        return Err(Error::Device {
            device: name.to_owned(),
            reason: error::errno_text(error::rte_errno()),
            hint: String::new(),
            log: log::kept_lines(),
        });
    };
    Port::from_port_id(
        eal,
        id,
        &format!("net_ring_{name}"),
        Some(rings.clone()),
        None,
    )
}
