//! Listeners of a port, and the settings of those that differ from their device's.

use std::collections::HashMap;
use std::time::Duration;

use siw_iwarp::mpa::{MarkerPolicy, MpaConfig, MpaCrcPolicy, RtrKinds};
use siw_iwarp::{OutOfOrderPolicy, QueuePair, TerminateBitOrder};
use siw_shm::control::{BY_DEVICE, MpaOptions};
use siw_tcp::ListenerId;

use crate::datapath::port::WorkerPortConfig;
use crate::ids::CmListenerId;

// Kinds of ready-to-receive messages in `MpaOptions::rtr`.
const RTR_SEND: u8 = 1;
const RTR_WRITE: u8 = 2;
const RTR_READ: u8 = 4;

/// The settings of one listener.
pub(super) struct ListenerSettings {
    pub(super) mpa: MpaConfig,
    /// Time for the application to answer a connection request.
    pub(super) accept_timeout: Duration,
}

impl ListenerSettings {
    /// Applies `options` to the device's `mpa` and `accept_timeout`; unknown values change nothing.
    pub(super) fn new(
        mpa: &MpaConfig,
        accept_timeout: Duration,
        options: &MpaOptions,
    ) -> ListenerSettings {
        let mut mpa = mpa.clone();
        match options.crc {
            0 if mpa.crc == MpaCrcPolicy::Asked => mpa.crc = MpaCrcPolicy::IfAsked,
            1 if mpa.crc == MpaCrcPolicy::IfAsked => mpa.crc = MpaCrcPolicy::Asked,
            _ => {}
        }
        if options.mpa_rev != BY_DEVICE {
            mpa.revision = options.mpa_rev;
        }
        match options.markers {
            0 => mpa.markers = MarkerPolicy::Never,
            1 => mpa.markers = MarkerPolicy::Accept,
            2 => mpa.markers = MarkerPolicy::Request,
            _ => {}
        }
        if options.rtr != BY_DEVICE {
            mpa.rtr_kinds = RtrKinds {
                send: options.rtr & RTR_SEND != 0,
                write: options.rtr & RTR_WRITE != 0,
                read: options.rtr & RTR_READ != 0,
            };
            mpa.peer_to_peer = options.rtr != 0;
        }
        if options.max_ird != u16::MAX {
            mpa.max_ird = options.max_ird;
        }
        if options.max_ord != u16::MAX {
            mpa.max_ord = options.max_ord;
        }
        if options.request_timeout_ms != 0 {
            mpa.request_timeout_ms = options.request_timeout_ms;
        }
        if options.private_data != u16::MAX {
            mpa.max_private_data = options.private_data;
        }
        match options.terminate {
            0 => mpa.terminate_bit_order = TerminateBitOrder::Rfc,
            1 => mpa.terminate_bit_order = TerminateBitOrder::Siw,
            _ => {}
        }
        match options.out_of_order {
            0 => mpa.out_of_order = OutOfOrderPolicy::Off,
            1 => mpa.out_of_order = OutOfOrderPolicy::Markers,
            2 => mpa.out_of_order = OutOfOrderPolicy::Aligned,
            _ => {}
        }
        let accept_timeout = match options.accept_timeout_ms {
            0 => accept_timeout,
            milliseconds => Duration::from_millis(milliseconds.into()),
        };
        ListenerSettings {
            mpa,
            accept_timeout,
        }
    }
}

/// MPA settings and listeners of one device's port.
pub(super) struct PortListeners {
    /// The device's settings.
    pub(super) mpa: MpaConfig,
    pub(super) accept_timeout: Duration,
    pub(super) listeners: HashMap<CmListenerId, PortListener>,
}

/// A listener on a port.
pub(super) struct PortListener {
    /// TCP listeners: one, or one for each address if it is bound to the addresses of one family.
    pub(super) tcp: Vec<ListenerId>,
    /// User (uid) whose limit of pending connections applies.
    pub(super) user: u32,
    /// Settings that differ from the device's.
    pub(super) own_settings: Option<ListenerSettings>,
    /// Its connections begin in streaming mode.
    pub(super) is_streaming: bool,
}

impl PortListeners {
    pub(super) fn new(config: &WorkerPortConfig) -> PortListeners {
        PortListeners {
            mpa: config.mpa.clone(),
            accept_timeout: config.accept_timeout,
            listeners: HashMap::new(),
        }
    }

    /// The settings for connections to a listener.
    pub(super) fn settings(&self, listener: CmListenerId) -> (&MpaConfig, Duration) {
        let listener = self.listeners.get(&listener);
        match listener.and_then(|listener| listener.own_settings.as_ref()) {
            Some(own) => (&own.mpa, own.accept_timeout),
            None => (&self.mpa, self.accept_timeout),
        }
    }
}

/// Applies the stream settings of a device or listener to a queue pair.
pub(super) fn apply_mpa_config(protocol: &mut QueuePair, config: &MpaConfig) {
    protocol.set_out_of_order(config.out_of_order);
    protocol.set_terminate_bit_order(config.terminate_bit_order);
    protocol.set_first_msn(config.first_msn);
    if config.receive_wait_ms > 0 {
        protocol.set_receive_wait(config.receive_wait_ms);
    }
}
