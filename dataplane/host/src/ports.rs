//! Division of TCP ports at addresses that siwd shares with the kernel: each port belongs to one of
//! the two. siwd claims a port with a kernel socket that is bound to it and otherwise unused. The
//! kernel then refuses the port to its own programs with EADDRINUSE, and does not assign it to a
//! program that asks for any port. A port that the kernel has assigned already cannot be claimed, and
//! siwd's client gets an error.
//!
//! For links on which the kernel's stack works alongside siwd's, regardless of how frames are divided:
//! ```text
//! start of a device      HostPorts::claim_range()   ports for connects, claimed once: RDMA connections
//!                                                   come and go, their ports stay siwd's
//!   StackConfig::host  <- HostPorts::stack_share()  the TCP stack draws ports of connects from these
//!   DeviceView::host_ports                          the control thread claims the rest one by one:
//! listen, bound connect  HostPorts::claim_port()    -> PortClaim, kept with the listener or queue pair
//! frame to a shared address and TCP port            siwd's if a listener, a connection or
//!                                                   HostPorts::connect_ports() has it, else the kernel's
//! ```
//! Where an XDP program divides the frames (`af_xdp` with `xdp_share`), [`PortSteering`] passes each
//! claim to it. A connection that a listener accepted shares the listener's claim, so that its frames
//! still come here after the end of the listener.
//!
//! The sockets are in the network namespace of the thread that makes the claim, which has to be that
//! of the kernel's interface. The address need not exist there yet. Each socket is one descriptor of
//! the process: a claim holds one for each shared address that it covers. Claims are made by the
//! control thread and at the start, never by workers.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, getsockname, setsockopt, socket,
    sockopt,
};
use siw_net::{HostShare, PortSet};

/// A port could not be claimed against the kernel.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ClaimError {
    /// The XDP program did not accept the claim.
    #[error("TCP port {port} at {address} cannot be steered to siwd: {reason}")]
    Steering {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// Why.
        reason: String,
    },
    /// A program of this machine has the port.
    #[error(
        "TCP port {port} at {address} is used by a program of this machine (ss -tanp): choose another"
    )]
    Taken {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// The process may not bind ports below the kernel's limit.
    #[error(
        "TCP port {port} needs CAP_NET_BIND_SERVICE: run siwd as root, add the capability to its unit (AmbientCapabilities=), or choose a port from 1024 on"
    )]
    NotPermitted {
        /// The port.
        port: u16,
    },
    /// The process has no descriptors left.
    #[error(
        "no descriptor is left to claim TCP port {port} against the kernel: raise the limit (ulimit -n, LimitNOFILE= of the unit), or narrow host_ports"
    )]
    NoDescriptors {
        /// The port.
        port: u16,
    },
    /// The kernel has assigned all of the ports already.
    #[error(
        "no TCP port from {first} to {last} at {address} is free: choose another range in host_ports"
    )]
    NoneFree {
        /// The address.
        address: IpAddr,
        /// The lowest port.
        first: u16,
        /// The highest port.
        last: u16,
    },
    /// Another error of the operating system.
    #[error("TCP port {port} at {address} cannot be claimed against the kernel: {errno}")]
    Os {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// Why.
        errno: Errno,
    },
}

impl ClaimError {
    /// The errno that a client gets for the error.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            ClaimError::Taken { .. } | ClaimError::NoneFree { .. } => Errno::EADDRINUSE,
            ClaimError::NotPermitted { .. } => Errno::EACCES,
            ClaimError::NoDescriptors { .. } => Errno::EMFILE,
            ClaimError::Steering { .. } => Errno::ENOSPC,
            ClaimError::Os { errno, .. } => *errno,
        };
        errno as i32
    }
}

/// Divider of frames that has to know siwd's ports, in addition to the kernel's sockets.
pub trait PortSteering: std::fmt::Debug + Send + Sync {
    /// Directs frames to this address and port to siwd from now on.
    ///
    /// # Errors
    /// The reason, as text.
    fn add_port(&self, address: IpAddr, port: u16) -> Result<(), String>;

    /// Directs these frames to the kernel again.
    fn remove_port(&self, address: IpAddr, port: u16);
}

/// A claimed port at one address: the socket that holds it, and the steering that was informed.
#[derive(Debug)]
struct PortHolder {
    address: IpAddr,
    port: u16,
    steering: Option<Arc<dyn PortSteering>>,
    _socket: OwnedFd,
}

impl PortHolder {
    fn claim_at(
        address: IpAddr,
        port: u16,
        steering: Option<&Arc<dyn PortSteering>>,
    ) -> Result<PortHolder, ClaimError> {
        let socket = claim_at(address, port)?;
        let port = match port {
            0 => port_of(&socket).map_err(|errno| ClaimError::Os {
                address,
                port,
                errno,
            })?,
            port => port,
        };
        if let Some(steering) = steering {
            steer_port(&**steering, address, port)?;
        }
        Ok(PortHolder {
            address,
            port,
            steering: steering.cloned(),
            _socket: socket,
        })
    }
}

impl Drop for PortHolder {
    fn drop(&mut self) {
        // Before the socket is closed: a program that gets the port afterwards has to get its frames.
        if let Some(steering) = &self.steering {
            steering.remove_port(self.address, self.port);
        }
    }
}

fn steer_port(steering: &dyn PortSteering, address: IpAddr, port: u16) -> Result<(), ClaimError> {
    steering
        .add_port(address, port)
        .map_err(|reason| ClaimError::Steering {
            address,
            port,
            reason,
        })
}

/// A port that is claimed against the kernel until this claim and all that share it are dropped. Empty
/// if nothing had to be claimed.
#[derive(Debug, Default)]
pub struct PortClaim {
    sockets: Vec<Arc<PortHolder>>,
    /// The descriptors are accounted to another claim.
    is_shared: bool,
}

impl PortClaim {
    /// Number of descriptors that are accounted to this claim.
    pub fn descriptors(&self) -> u64 {
        match self.is_shared {
            true => 0,
            false => self.sockets.len() as u64,
        }
    }

    /// Shares the claims of a listener with a connection that it accepted: they last until both are
    /// dropped.
    pub fn share_all<'a>(claims: impl IntoIterator<Item = &'a PortClaim>) -> PortClaim {
        let claims = claims.into_iter();
        PortClaim {
            sockets: claims
                .flat_map(|claim| claim.sockets.iter().cloned())
                .collect(),
            is_shared: true,
        }
    }
}

/// The division of TCP ports between siwd and the kernel, for one device.
#[derive(Debug)]
pub struct HostPorts {
    /// Addresses that both stacks have.
    addresses: Vec<IpAddr>,
    /// Ports claimed for connects, at all of the addresses.
    connect_ports: PortSet,
    #[allow(dead_code, reason = "held for their ports")]
    sockets: Vec<OwnedFd>,
    /// Live claims of single ports, so that several connects may share a port as they may without a
    /// kernel.
    single_claims: Mutex<SingleClaims>,
    /// Divider of the frames, if it is not siwd.
    steering: Option<Arc<dyn PortSteering>>,
}

/// The sockets of single ports by address and port.
#[derive(Debug, Default)]
struct SingleClaims {
    sockets: HashMap<(IpAddr, u16), Weak<PortHolder>>,
    /// Number of entries at which expired ones are removed.
    prune_at: usize,
}

impl SingleClaims {
    fn claim(
        &mut self,
        address: IpAddr,
        port: u16,
        steering: Option<&Arc<dyn PortSteering>>,
    ) -> Result<Arc<PortHolder>, ClaimError> {
        if let Some(shared) = self.sockets.get(&(address, port)).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        if self.sockets.len() >= self.prune_at {
            self.sockets.retain(|_, socket| socket.strong_count() > 0);
            self.prune_at = (self.sockets.len() * 2).max(64);
        }
        let holder = Arc::new(PortHolder::claim_at(address, port, steering)?);
        self.sockets
            .insert((address, holder.port), Arc::downgrade(&holder));
        Ok(holder)
    }
}

impl HostPorts {
    /// Claims the ports of `range` at each of `addresses`, for connects. Ports that the kernel has
    /// assigned already are left out, with a warning.
    ///
    /// # Errors
    /// No port is free, or a claim fails for another reason than use.
    pub fn claim_range(
        addresses: Vec<IpAddr>,
        range: RangeInclusive<u16>,
    ) -> Result<HostPorts, ClaimError> {
        let mut sockets = Vec::new();
        let mut taken = Vec::new();
        for port in range.clone() {
            let claims: Result<Vec<OwnedFd>, _> = addresses
                .iter()
                .map(|address| claim_at(*address, port))
                .collect();
            match claims {
                Ok(claims) => sockets.extend(claims),
                Err(ClaimError::Taken { .. }) => taken.push(port),
                Err(error) => return Err(error),
            }
        }
        if let Some(address) = addresses.first()
            && sockets.is_empty()
        {
            return Err(ClaimError::NoneFree {
                address: *address,
                first: *range.start(),
                last: *range.end(),
            });
        }
        if !taken.is_empty() {
            tracing::warn!(
                "{} of the TCP ports {}-{} are used by programs of this machine and left to them: {}",
                taken.len(),
                range.start(),
                range.end(),
                first_ports(&taken)
            );
        }
        let connect_ports = PortSet::new(range, |port| taken.binary_search(&port).is_err());
        Ok(HostPorts {
            addresses,
            connect_ports,
            sockets,
            single_claims: Mutex::default(),
            steering: None,
        })
    }

    /// Has `steering` divide the frames: passes the claimed ports to it, and each later claim.
    ///
    /// # Errors
    /// It does not accept a port.
    pub fn steer_by(mut self, steering: Arc<dyn PortSteering>) -> Result<HostPorts, ClaimError> {
        for address in &self.addresses {
            for port in (1..=u16::MAX).filter(|port| self.connect_ports.contains(*port)) {
                steer_port(&*steering, *address, port)?;
            }
        }
        self.steering = Some(steering);
        Ok(self)
    }

    /// Claims a port for a binding, a listener, or a connect from it, at the shared addresses for
    /// which `includes` is true. A port that is claimed already is not claimed again; those for
    /// connects need no claim of their own.
    ///
    /// # Errors
    /// The kernel has assigned the port, or no socket can be created.
    pub fn claim_port(
        &self,
        port: u16,
        includes: impl Fn(IpAddr) -> bool,
    ) -> Result<PortClaim, ClaimError> {
        if self.connect_ports.contains(port) {
            return Ok(PortClaim::default());
        }
        let mut claims = self.single_claims.lock();
        let addresses = self.addresses.iter();
        let sockets = addresses
            .filter(|address| includes(**address))
            .map(|address| claims.claim(*address, port, self.steering.as_ref()))
            .collect::<Result<_, _>>()?;
        Ok(PortClaim {
            sockets,
            is_shared: false,
        })
    }

    /// Claims a port that the kernel selects, at the first shared address for which `includes` is true.
    /// `None` without such an address.
    ///
    /// # Errors
    /// No port is free, or no socket can be created.
    pub fn claim_any_port(
        &self,
        includes: impl Fn(IpAddr) -> bool,
    ) -> Result<Option<(u16, PortClaim)>, ClaimError> {
        let mut addresses = self.addresses.iter().copied();
        let Some(address) = addresses.find(|address| includes(*address)) else {
            return Ok(None);
        };
        let mut claims = self.single_claims.lock();
        let holder = claims.claim(address, 0, self.steering.as_ref())?;
        Ok(Some((
            holder.port,
            PortClaim {
                sockets: vec![holder],
                is_shared: false,
            },
        )))
    }

    /// The addresses that both stacks have.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// The ports that are claimed for connects, at these addresses.
    pub fn connect_ports(&self) -> &PortSet {
        &self.connect_ports
    }

    /// The division of ports as a TCP stack of the device needs it.
    pub fn stack_share(&self) -> HostShare {
        HostShare {
            addresses: self.addresses.clone(),
            ports: self.connect_ports.clone(),
        }
    }

    /// Number of descriptors held.
    pub fn descriptors(&self) -> u64 {
        self.sockets.len() as u64
    }
}

/// The first few ports of a list, as text.
fn first_ports(ports: &[u16]) -> String {
    let shown: Vec<String> = ports.iter().take(8).map(u16::to_string).collect();
    let more = if ports.len() > 8 { ", ..." } else { "" };
    shown.join(", ") + more
}

fn claim_at(address: IpAddr, port: u16) -> Result<OwnedFd, ClaimError> {
    bind_socket(SocketAddr::new(address, port)).map_err(|errno| match errno {
        Errno::EADDRINUSE => ClaimError::Taken { address, port },
        Errno::EACCES => ClaimError::NotPermitted { port },
        Errno::EMFILE | Errno::ENFILE => ClaimError::NoDescriptors { port },
        errno => ClaimError::Os {
            address,
            port,
            errno,
        },
    })
}

/// A TCP socket that only holds a port. It lacks SO_REUSEADDR, so that no other socket can get the
/// port, whatever its own options are.
fn bind_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let holder = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // The kernel may get the address later, or still check it for duplicates. IPv6 sockets accept this
    // option, too.
    setsockopt(&holder, sockopt::IpFreebind, &true)?;
    bind(holder.as_raw_fd(), &SockaddrStorage::from(address))?;
    Ok(holder)
}

/// Port of a bound socket.
fn port_of(socket: &OwnedFd) -> Result<u16, Errno> {
    let bound: SockaddrStorage = getsockname(socket.as_raw_fd())?;
    let v4 = bound.as_sockaddr_in().map(|bound| bound.port());
    let port = v4.or_else(|| bound.as_sockaddr_in6().map(|bound| bound.port()));
    port.ok_or(Errno::EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::net::TcpListener;

    /// An address of this test process: others may use the same ports elsewhere.
    fn address(last: u8) -> IpAddr {
        let process = std::process::id();
        IpAddr::from([127, (process >> 8) as u8 | 1, process as u8, last])
    }

    #[test]
    fn a_port_has_one_owner_whoever_comes_first() {
        let own = address(1);
        let kernel = TcpListener::bind((own, 0)).unwrap();
        let port = kernel.local_addr().unwrap().port();
        let ports = HostPorts::claim_range(vec![own], 61_000..=61_003).unwrap();
        let error = ports.claim_port(port, |_| true).unwrap_err();
        assert_eq!(error, ClaimError::Taken { address: own, port });
        assert_eq!(error.errno(), Errno::EADDRINUSE as i32);
        let text = error.to_string();
        assert!(
            text.contains(&port.to_string()) && text.contains("ss -tanp"),
            "{text}"
        );
        drop(kernel);
        let first = ports.claim_port(port, |ip| ip == own).unwrap();
        let claim = ports.claim_port(port, |_| true).unwrap();
        assert_eq!((first.descriptors(), claim.descriptors()), (1, 1));
        drop(first);
        for taken in [port, 61_000, 61_003] {
            let refused = TcpListener::bind((own, taken)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::AddrInUse);
            let everywhere = TcpListener::bind(("0.0.0.0", taken)).unwrap_err();
            assert_eq!(everywhere.kind(), ErrorKind::AddrInUse);
        }
        drop(claim);
        drop(TcpListener::bind((own, port)).unwrap());
        drop(ports);
        drop(TcpListener::bind((own, 61_000)).unwrap());
    }

    #[test]
    fn the_kernel_selects_a_port_that_is_free() {
        let (own, second) = (address(5), address(6));
        let ports = HostPorts::claim_range(vec![own, second], 61_000..=61_000).unwrap();
        let (port, claim) = ports.claim_any_port(|_| true).unwrap().unwrap();
        assert_eq!(claim.descriptors(), 1);
        let refused = TcpListener::bind((own, port)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
        // The same claim at this address, and one more at the other.
        let all = ports.claim_port(port, |_| true).unwrap();
        assert_eq!(all.descriptors(), 2);
        drop((claim, all));
        drop(TcpListener::bind((own, port)).unwrap());
        assert!(ports.claim_any_port(|_| false).unwrap().is_none());
    }

    #[test]
    fn used_ports_of_the_range_are_left_to_the_kernel() {
        let own = address(2);
        let kernel = TcpListener::bind((own, 61_001)).unwrap();
        let ports = HostPorts::claim_range(vec![own], 61_000..=61_007).unwrap();
        let set = ports.connect_ports();
        assert!(!set.contains(61_001) && set.contains(61_000) && set.contains(61_007));
        assert_eq!((set.len(), ports.descriptors()), (7, 7));
        assert_eq!(ports.stack_share().ports, *set);
        // Already claimed for connects; a listener of siwd needs no other claim.
        assert_eq!(ports.claim_port(61_002, |_| true).unwrap().descriptors(), 0);
        let error = HostPorts::claim_range(vec![own], 61_001..=61_001).unwrap_err();
        assert!(error.to_string().contains("host_ports"), "{error}");
        drop(kernel);
    }

    #[test]
    fn addresses_are_claimed_one_by_one_and_before_they_exist() {
        let (first, second) = (address(3), address(4));
        // On no interface here (RFC 5737, RFC 3849).
        let later: [IpAddr; 2] = [
            "192.0.2.77".parse().unwrap(),
            "2001:db8::77".parse().unwrap(),
        ];
        let all = vec![first, second, later[0], later[1]];
        let ports = HostPorts::claim_range(all, 61_000..=61_000).unwrap();
        assert_eq!(ports.descriptors(), 4);
        let claim = ports.claim_port(61_010, |ip| ip == first).unwrap();
        assert_eq!(claim.descriptors(), 1);
        drop(TcpListener::bind((second, 61_010)).unwrap());
        // An address that is not shared with the kernel: nothing to claim.
        let foreign = ports.claim_port(61_010, |ip| ip == IpAddr::from([192, 0, 2, 1]));
        assert_eq!(foreign.unwrap().descriptors(), 0);
        assert_eq!(ports.claim_port(61_011, |_| true).unwrap().descriptors(), 4);
    }
}
