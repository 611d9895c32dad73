//! An Ethernet port: attach (`probe.rs`, `ring_pair.rs`), configure, start, then take the queues
//! and hand each worker its own.

use crate::pci::is_pci_address;
use crate::port_config::NegotiatedOffloads;
use crate::port_inner::{PairRings, PortInner, PortState};
use crate::tap_interface::TapInterface;
use crate::{
    DriverTraits, Eal, Error, Mempool, PortCaps, PortConfig, PortInfo, Result, RxQueue, TxQueue,
    driver_traits, eal, error, log,
};
use dpdk_sys as sys;
use parking_lot::Mutex;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// A receive and a transmit queue; `None` where the port has fewer queues in that direction.
pub type PortQueues = (Option<RxQueue>, Option<TxQueue>);

/// A port. It is stopped and closed, and its device removed, when all its handles and queues are
/// dropped.
pub struct Port {
    inner: Arc<PortInner>,
}

/// Length of an RSS key if the driver does not report one.
const RSS_KEY_LEN: usize = 40;

impl Port {
    pub(crate) fn from_port_id(
        eal: &Eal,
        id: u16,
        name: &str,
        rings: Option<Arc<PairRings>>,
        tap: Option<TapInterface>,
    ) -> Result<Self> {
        let raw = raw_info(id, name)?;
        let traits = if rings.is_some() {
            &driver_traits::RING_PAIR
        } else if is_pci_address(name) && !eal.iova_is_va() {
            &driver_traits::PCI_NIC_PHYSICAL
        } else if is_pci_address(name) {
            DriverTraits::for_device(name)
        } else {
            // The name of a virtual device may begin with an alias of its driver's name.
            DriverTraits::for_device(&driver_name(&raw))
        };
        let port = Self {
            inner: Arc::new(PortInner {
                id,
                name: name.to_owned(),
                traits,
                rte_device: raw.device,
                dma: is_pci_address(name) && eal.iova_is_va(),
                detached: AtomicBool::new(false),
                refused: AtomicU64::new(0),
                queues_out: AtomicUsize::new(0),
                rings,
                tap,
                state: Mutex::default(),
                _eal: eal.clone(),
            }),
        };
        port.watch()?;
        Ok(port)
    }

    /// Creates another handle to the same port.
    pub fn share(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }

    /// Returns true if the device reads memory by DMA, so that external memory has to be mapped for
    /// it.
    pub fn needs_dma_map(&self) -> bool {
        self.inner.dma
    }

    /// Properties of links of this driver.
    pub fn driver_traits(&self) -> &'static DriverTraits {
        self.inner.traits
    }

    /// Calls `call` with the device unless it was removed; the device is not removed during the
    /// call.
    pub(crate) fn with_device<T>(&self, call: impl FnOnce(*mut sys::rte_device) -> T) -> Option<T> {
        let _devices = eal::device_lock();
        self.check_attached().ok()?;
        Some(call(self.inner.rte_device))
    }

    pub(crate) fn inner(&self) -> &PortInner {
        &self.inner
    }

    /// DPDK's number of the port.
    pub fn id(&self) -> u16 {
        self.inner.id
    }

    /// DPDK's name of the device.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The driver's description of the device (`rte_eth_dev_info`).
    ///
    /// # Errors
    /// The device was removed.
    pub fn device_info(&self) -> Result<PortInfo> {
        self.check_attached()?;
        let info = raw_info(self.inner.id, &self.inner.name)?;
        let unlimited = |limit: u16| if limit == 0 { u16::MAX } else { limit };
        Ok(PortInfo {
            driver: driver_name(&info),
            min_mtu: info.min_mtu,
            max_mtu: info.max_mtu,
            max_rx_queues: info.max_rx_queues,
            max_tx_queues: info.max_tx_queues,
            reta_size: info.reta_size,
            tx_seg_max: unlimited(info.tx_seg_max),
            tx_mtu_seg_max: unlimited(info.tx_mtu_seg_max),
            rx_capa: info.rx_offload_capa,
            tx_capa: info.tx_offload_capa,
            rss_types: info.rss_types,
            hash_key_size: info.hash_key_size,
            max_lro_pkt_size: info.max_lro_pkt_size,
            min_rx_bufsize: info.min_rx_bufsize,
        })
    }

    /// Configures the port and leaves it stopped. Queue `i` receives into `pools[i]`; the last pool
    /// serves all further queues. Offloads that the port lacks are not granted; an unsupported MTU
    /// or number of queues is an error.
    pub fn configure(&mut self, config: &PortConfig, pools: &[Mempool]) -> Result<PortCaps> {
        let mut state = self.lock_unused()?;
        let info = self.device_info()?;
        let negotiated = info.check_config(self.name(), config, pools)?;
        let mtu = u32::from(config.mtu);
        // Valid for any length: the 40-byte key is repeated for longer ones.
        let key_len = match info.hash_key_size {
            0 => RSS_KEY_LEN,
            len => len.into(),
        };
        let mut key: Option<Vec<u8>> = config
            .rss_key
            .map(|key| key.iter().copied().cycle().take(key_len).collect());
        let mut conf = sys::siw_port_conf {
            rx_offloads: negotiated.rx,
            tx_offloads: negotiated.tx,
            rss_types: negotiated.rss_types,
            mtu: mtu.min(self.inner.traits.announced_mtu),
            max_lro_pkt_size: if negotiated.granted.lro {
                info.max_lro_pkt_size
            } else {
                0
            },
            rx_queues: config.rx_queues,
            tx_queues: config.tx_queues,
            rx_interrupt: negotiated.granted.rx_interrupt,
            rss_key: ptr::null_mut(),
            rss_key_len: 0,
        };
        if let Some(key) = key.as_mut() {
            conf.rss_key = key.as_mut_ptr();
            conf.rss_key_len = key.len() as u8;
        }

        if state.started {
            self.check_call("stop", |id| {
                // SAFETY: a port number of ours; no queue is in use.
                unsafe { sys::rte_eth_dev_stop(id) }
            })?;
            state.started = false;
        }
        let configure = |conf: &sys::siw_port_conf| {
            self.check_call("configuration", |id| {
                // SAFETY: `conf` and the key it points to live through the call.
                unsafe { sys::siw_port_configure(id, conf) }
            })
        };
        let mut granted = negotiated.granted;
        match configure(&conf) {
            // Some drivers refuse interrupts only at this point.
            Err(_) if granted.rx_interrupt => {
                granted.rx_interrupt = false;
                conf.rx_interrupt = false;
                configure(&conf)?;
            }
            outcome => outcome?,
        }
        let (rx_desc, tx_desc) = self.set_up_queues(config, pools, &negotiated)?;
        let caps = PortCaps {
            offloads: granted,
            mtu: config.mtu,
            max_mtu: info.max_mtu.min(u16::MAX.into()) as u16,
            rx_desc,
            tx_desc,
            tx_seg_max: info.tx_seg_max,
            tx_mtu_seg_max: info.tx_mtu_seg_max,
            reta_size: if granted.rss { info.reta_size } else { 0 },
            rss_key_set: false,
        };
        state.rss_key = key.filter(|_| granted.rss);
        state.granted_caps = Some(caps);
        state.rx_queues = config.rx_queues;
        state.tx_queues = config.tx_queues;
        // Pools of an earlier configuration stay: a driver may still hold some of their buffers.
        state.pools.extend_from_slice(pools);
        if let Some(rings) = &self.inner.rings {
            rings.keep_alive(pools);
        }
        Ok(caps)
    }

    /// Sets up the queues of a configured port; returns the descriptors of each receive and
    /// transmit queue.
    fn set_up_queues(
        &self,
        config: &PortConfig,
        pools: &[Mempool],
        negotiated: &NegotiatedOffloads,
    ) -> Result<(u16, u16)> {
        let (mut rx_desc, mut tx_desc) = (config.rx_desc, config.tx_desc);
        self.check_call("choice of ring sizes", |id| {
            // SAFETY: the counts are written within the call.
            unsafe { sys::siw_port_adjust_desc(id, &mut rx_desc, &mut tx_desc) }
        })?;
        // Transmit queues first: from DPDK 24.11 on net_tap prepares segmentation in the queue of a pair
        // that opens its descriptor, and a transmit queue without it refuses long messages for ever.
        for queue in 0..config.tx_queues {
            self.check_call("transmit queue set-up", |id| {
                // SAFETY: a port number of ours.
                unsafe {
                    let threshold = config.tx_free_threshold;
                    sys::siw_port_tx_queue(id, queue, tx_desc, negotiated.tx, threshold)
                }
            })?;
        }
        for queue in 0..config.rx_queues {
            let Some(pool) = pools.get(usize::from(queue)).or(pools.last()) else {
                break;
            };
            self.check_call("receive queue set-up", |id| {
                // SAFETY: `configure` keeps the pool alive in the port's state.
                unsafe {
                    let threshold = config.rx_free_threshold;
                    sys::siw_port_rx_queue(
                        id,
                        queue,
                        rx_desc,
                        negotiated.rx,
                        threshold,
                        pool.as_ptr(),
                    )
                }
            })?;
        }
        Ok((rx_desc, tx_desc))
    }

    /// Capabilities granted by the last [`Self::configure`] and [`Self::start`].
    pub fn granted_caps(&self) -> Option<PortCaps> {
        self.lock_state().granted_caps
    }

    /// Starts the port and returns its queues: as many pairs as the larger number of queues in a
    /// direction (a missing partner is `None`). Workers own them; the port cannot be stopped before
    /// they are dropped.
    pub fn start(&mut self) -> Result<Vec<PortQueues>> {
        // Held until the queues are counted as handed out, so that no other handle hands them out
        // again.
        let mut state = self.lock_unused()?;
        let Some(mut caps) = state.granted_caps else {
            return Err(Error::Invalid {
                what: "port",
                value: self.inner.name.clone(),
                why: "it has to be configured before it is started".into(),
            });
        };
        if !state.started {
            self.check_call("start", |id| {
                // SAFETY: a configured port of ours.
                unsafe { sys::rte_eth_dev_start(id) }
            })?;
            state.started = true;
        }
        if caps.offloads.rx_interrupt {
            caps.offloads.rx_interrupt = self.interrupts_work();
            state.granted_caps = Some(caps);
        }
        let prepare = caps.offloads.tso || caps.offloads.tx_checksum;
        if let Some(key) = &state.rss_key {
            caps.rss_key_set = self.has_rss_key(key);
            state.granted_caps = Some(caps);
        }
        let queues = (0..state.rx_queues.max(state.tx_queues))
            .map(|queue| {
                let rx = (queue < state.rx_queues).then(|| RxQueue::new(&self.inner, queue));
                let tx =
                    (queue < state.tx_queues).then(|| TxQueue::new(&self.inner, queue, prepare));
                (rx, tx)
            })
            .collect();
        Ok(queues)
    }

    /// Closes the port and releases its device although other handles exist; their calls then fail
    /// with [`Error::Removed`]. For a device that is being removed. Fails while queues are in use.
    pub fn detach(&self) -> Result<()> {
        let mut state = self.lock_unused()?;
        self.inner.close_device();
        state.started = false;
        Ok(())
    }

    /// Stops the port; fails while queues are in use.
    pub fn stop(&mut self) -> Result<()> {
        let mut state = self.lock_unused()?;
        if state.started {
            self.check_call("stop", |id| {
                // SAFETY: a port number of ours; no queue is in use.
                unsafe { sys::rte_eth_dev_stop(id) }
            })?;
            state.started = false;
        }
        Ok(())
    }

    /// Packets dropped on transmission because the driver or its interface refused them, on all queues.
    pub fn refused_packets(&self) -> u64 {
        self.inner.refused.load(Ordering::Relaxed)
    }

    /// Drops this handle. The device closes when the last handle and queue are dropped.
    pub fn close(self) {}

    /// Returns true until [`Self::detach`] has closed the device.
    pub fn is_attached(&self) -> bool {
        self.check_attached().is_ok()
    }

    pub(crate) fn check_attached(&self) -> Result<()> {
        match self.inner.detached.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::Removed {
                port: self.inner.name.clone(),
            }),
        }
    }

    fn lock_state(&self) -> parking_lot::MutexGuard<'_, PortState> {
        self.inner.state.lock()
    }

    /// Locks the state for a change of the port that requires all queues to be dropped. Queues are
    /// handed out under the same lock, so none appears between this check and the change.
    fn lock_unused(&self) -> Result<parking_lot::MutexGuard<'_, PortState>> {
        let state = self.lock_state();
        match self.inner.queues_out.load(Ordering::Acquire) {
            0 => Ok(state),
            queues => Err(Error::QueuesInUse {
                port: self.inner.name.clone(),
                queues,
            }),
        }
    }

    pub(crate) fn check_call(
        &self,
        what: &'static str,
        call: impl FnOnce(u16) -> i32,
    ) -> Result<()> {
        self.check_attached()?;
        let _quote = log::quote_lines();
        match call(self.inner.id) {
            rc if rc >= 0 => Ok(()),
            rc => Err(Error::Port {
                port: self.inner.name.clone(),
                what,
                errno: error::errno_of(rc),
                reason: error::failure_reason(rc),
                log: log::kept_lines(),
            }),
        }
    }
}

fn raw_info(id: u16, name: &str) -> Result<sys::siw_port_info> {
    let mut info = MaybeUninit::uninit();
    // SAFETY: the structure is written within the call when it returns 0.
    let rc = unsafe { sys::siw_port_info_get(id, info.as_mut_ptr()) };
    if rc != 0 {
        return Err(Error::Port {
            port: name.to_owned(),
            what: "reading its properties",
            errno: error::errno_of(rc),
            reason: error::failure_reason(rc),
            log: log::kept_lines(),
        });
    }
    // SAFETY: initialised, because the call succeeded.
    Ok(unsafe { info.assume_init() })
}

fn driver_name(info: &sys::siw_port_info) -> String {
    if info.driver.is_null() {
        return String::new();
    }
    // SAFETY: not null, so it is the driver's name, a C string that lives as long as the driver.
    let name = unsafe { CStr::from_ptr(info.driver) };
    name.to_string_lossy().into_owned()
}
