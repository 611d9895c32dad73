//! What a worker has to know of the link below a device: one value, made from what the driver is
//! known for, what the port granted and what the configuration allows.

use dpdk::{DriverTraits, PortCaps};

use crate::config::{ChecksumPolicy, TsoPolicy, TxPayloadPolicy};

/// Payload of at most this many bytes is always copied: below it a copy costs less than a second buffer
/// and its reference.
pub const COPY_MAX: u32 = 512;

/// How the payload of WRITE and SEND gets into frames, and when they complete therefore. READ
/// responses, whose memory may change at any time, and short payload are always copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadPolicy {
    /// Copied into the frame, in one pass with the CRC. The message completes when it is
    /// acknowledged.
    Copy,
    /// By reference to registered memory. The link sends the frames of a queue in order and reads
    /// each while it sends it, so the acknowledgement of the last byte proves that the memory was
    /// read. Retransmissions are copied: an acknowledgement need not be theirs. The message completes
    /// when it is acknowledged, whenever the driver frees its buffers. A peer that acknowledges what it
    /// has not received can be sent what the application writes into the buffer after the completion,
    /// with a wrong CRC: where that matters, payload is to be copied.
    ReferenceUntilAck,
    /// By reference, and the far end receives the very frame: it may read the memory after it
    /// acknowledged it. The message completes when no frame refers to it any more, which is polled.
    ReferenceUntilRelease,
}

/// What a device's link can do, as it is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkTraits {
    /// The far end is in this daemon: memory, no wire. Nothing announces its frames, and each ring
    /// joins the same worker's ends.
    pub in_process: bool,
    /// Nobody computes checksums: nothing can damage frames in memory.
    pub no_checksums: bool,
    /// The port verifies the checksums of received frames.
    pub rx_checksum: bool,
    /// The port can wake a sleeping worker.
    pub rx_interrupt: bool,
    /// Whether its interrupts arrive shows only once one did: drivers report success where the device
    /// has none, or delivers none (e1000 and e1000e).
    pub rx_interrupt_unproven: bool,
    /// The port computes TCP checksums.
    pub tx_checksum: bool,
    /// The port fills in the IPv4 header checksums of what it cuts.
    pub tx_ip_checksum: bool,
    /// The port cuts super-segments into TCP segments (TSO), and computes their checksums; a pair
    /// carries them as they are.
    pub tso: bool,
    /// The port sends chains of segments; without, frames are copied into one buffer.
    pub multi_segs: bool,
    /// How payload gets into frames, if not every stream copies it: see
    /// [`copied_up_to`](Self::copied_up_to).
    pub payload: PayloadPolicy,
    /// What is sent by reference; none: nothing.
    references: Option<ReferenceRule>,
    /// Every segment but the last must have an even length, or the port's checksums are wrong.
    pub even_segments: bool,
    /// Segments that the port takes in a frame that it sends as it is. Frames with more are copied
    /// into one.
    pub max_segments: u16,
    /// Segments that the port takes in a packet that it cuts.
    pub max_tso_segments: u16,
}

/// Which messages of a link are sent by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReferenceRule {
    /// Those that are not short.
    All,
    /// Long ones, on streams without CRC.
    LongWithoutCrc,
}

/// From this MTU on, long messages without CRC cross a pair faster by reference (`siw-perf bw`).
const LONG_FRAME: u16 = 9000;
/// Such messages are longer than this, in bytes.
const LONG_MESSAGE: u32 = 4096;

/// Segments in a frame for a driver that names no limit: a header, a reference, and what follows
/// it. Any driver that sends chains takes as many.
const UNSTATED_MAX_SEGMENTS: u16 = 3;

impl LinkTraits {
    /// `driver` knows the kind of link, `granted` is the outcome of the port's configuration.
    pub fn new(
        driver: &DriverTraits,
        granted: &PortCaps,
        checksum: ChecksumPolicy,
        tso: TsoPolicy,
        tx_payload: TxPayloadPolicy,
        mtu: u16,
    ) -> LinkTraits {
        let offloads = granted.offloads;
        let multi_segs = offloads.multi_segs || driver.in_process;
        let takes_references = driver.external_buffers && multi_segs;
        let references = match tx_payload {
            TxPayloadPolicy::Reference => Some(ReferenceRule::All),
            // With long frames a pair is faster by reference. Not every application leaves its memory
            // alone until the completion: QEMU migrates a guest that runs. The receiver would read it
            // for its CRC after the sender did, and the connection would end.
            TxPayloadPolicy::Auto if driver.in_process && mtu >= LONG_FRAME => {
                Some(ReferenceRule::LongWithoutCrc)
            }
            // One pass that copies and computes the CRC measured faster than the CRC and a second
            // buffer, at every length of messages at MTU 1500 and also where the far end takes the
            // frame by pointer (`./benches/figures iwarp`). A driver has one segment to send instead
            // of three.
            TxPayloadPolicy::Auto | TxPayloadPolicy::Copy => None,
        };
        let references = references.filter(|_| takes_references);
        let port_may_checksum = checksum != ChecksumPolicy::Software && !driver.in_process;
        let tx_checksum = offloads.tx_checksum && port_may_checksum;
        let no_checksums = driver.in_process && checksum != ChecksumPolicy::Software;
        LinkTraits {
            in_process: driver.in_process,
            no_checksums,
            rx_checksum: offloads.rx_checksum && port_may_checksum,
            rx_interrupt: offloads.rx_interrupt && !driver.in_process,
            rx_interrupt_unproven: driver.has_device_interrupts(),
            tx_checksum,
            tx_ip_checksum: offloads.tx_ip_checksum,
            tso: if driver.in_process {
                no_checksums && tso != TsoPolicy::Off
            } else {
                offloads.tso && tx_checksum
            },
            multi_segs,
            payload: match references {
                None => PayloadPolicy::Copy,
                Some(_) if driver.in_process => PayloadPolicy::ReferenceUntilRelease,
                Some(_) => PayloadPolicy::ReferenceUntilAck,
            },
            references,
            even_segments: driver.even_segments && tx_checksum,
            max_segments: match granted.tx_mtu_seg_max {
                _ if !multi_segs => 1,
                u16::MAX if !driver.in_process => UNSTATED_MAX_SEGMENTS,
                limit => limit,
            },
            max_tso_segments: granted.tx_seg_max,
        }
    }

    /// Up to which length, in bytes, messages of a stream are copied into frames; longer ones are sent
    /// by reference.
    pub fn copied_up_to(&self, has_crc: bool) -> u32 {
        match self.references {
            Some(ReferenceRule::All) => COPY_MAX,
            Some(ReferenceRule::LongWithoutCrc) if !has_crc => LONG_MESSAGE,
            Some(ReferenceRule::LongWithoutCrc) | None => u32::MAX,
        }
    }

    /// How payload is sent, as the settings in the statistics name it.
    pub fn payload_name(&self) -> &'static str {
        match self.references {
            None => "copy",
            Some(ReferenceRule::All) => "reference",
            Some(ReferenceRule::LongWithoutCrc) => "reference without CRC",
        }
    }

    /// Whether TCP has to compute checksums itself.
    pub fn needs_software_checksum(&self) -> bool {
        !(self.tx_checksum || self.no_checksums)
    }

    /// Whether received frames may belong to another worker.
    pub fn needs_steering(&self) -> bool {
        !self.in_process
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dpdk::Offloads;

    fn traits_of(devargs: &str, tx_payload: TxPayloadPolicy, caps: PortCaps) -> LinkTraits {
        let driver = DriverTraits::for_device(devargs);
        LinkTraits::new(
            driver,
            &caps,
            ChecksumPolicy::Auto,
            TsoPolicy::Auto,
            tx_payload,
            1500,
        )
    }

    fn granted(multi_segs: bool, max_segments: u16) -> PortCaps {
        PortCaps {
            offloads: Offloads {
                multi_segs,
                ..Offloads::NONE
            },
            mtu: 1500,
            max_mtu: 9000,
            rx_desc: 256,
            tx_desc: 256,
            tx_seg_max: max_segments,
            tx_mtu_seg_max: max_segments,
            reta_size: 0,
            rss_key_set: false,
        }
    }

    #[test]
    fn interrupts_of_devices_have_to_prove_themselves() {
        for (devargs, unproven) in [
            ("0000:03:00.0", true),
            ("net_tap0,iface=t", false),
            ("net_vhost0,iface=/s", false),
        ] {
            let traits = traits_of(devargs, TxPayloadPolicy::Auto, granted(true, 8));
            assert_eq!(traits.rx_interrupt_unproven, unproven, "{devargs}");
        }
    }

    #[test]
    fn payload_is_copied_unless_references_are_asked_for() {
        use PayloadPolicy::{Copy, ReferenceUntilAck};
        use TxPayloadPolicy::{Auto, Reference};
        for (devargs, asked, multi_segs, payload) in [
            ("0000:03:00.0", Auto, true, Copy),
            ("0000:03:00.0", TxPayloadPolicy::Copy, true, Copy),
            ("0000:03:00.0", Reference, true, ReferenceUntilAck),
            ("net_af_packet0,iface=x", Reference, true, ReferenceUntilAck),
            // Neither chains, nor memory that it cannot reach, nor a driver that nobody knows.
            ("0000:03:00.0", Reference, false, Copy),
            ("net_virtio_user0,path=/s", Reference, true, Copy),
            ("net_memif0", Reference, true, Copy),
        ] {
            let link = traits_of(devargs, asked, granted(multi_segs, 8));
            assert_eq!(link.payload, payload, "{devargs} {asked:?}");
        }
    }

    #[test]
    fn a_pair_with_long_frames_refers_to_long_messages_without_crc() {
        use TxPayloadPolicy::{Auto, Copy, Reference};
        for (asked, mtu, with_crc, without_crc) in [
            (Auto, 1500, u32::MAX, u32::MAX),
            (Auto, LONG_FRAME, u32::MAX, LONG_MESSAGE),
            (Copy, LONG_FRAME, u32::MAX, u32::MAX),
            (Reference, 1500, COPY_MAX, COPY_MAX),
        ] {
            let link = LinkTraits::new(
                DriverTraits::of_ring_pair(),
                &granted(true, u16::MAX),
                ChecksumPolicy::Auto,
                TsoPolicy::Auto,
                asked,
                mtu,
            );
            let limits = [true, false].map(|has_crc| link.copied_up_to(has_crc));
            assert_eq!(limits, [with_crc, without_crc], "{asked:?} {mtu}");
        }
        let wire = DriverTraits::for_device("net_af_packet0,iface=x");
        let caps = granted(true, 8);
        let (checksum, tso) = (ChecksumPolicy::Auto, TsoPolicy::Auto);
        let link = LinkTraits::new(wire, &caps, checksum, tso, Auto, LONG_FRAME);
        assert_eq!(link.payload, PayloadPolicy::Copy);
    }

    #[test]
    fn a_driver_that_names_no_limit_gets_short_chains() {
        let segments = |multi_segs, limit| {
            let caps = granted(multi_segs, limit);
            traits_of("0000:03:00.0", TxPayloadPolicy::Auto, caps).max_segments
        };
        assert_eq!(segments(true, 8), 8);
        assert_eq!(segments(true, u16::MAX), UNSTATED_MAX_SEGMENTS);
        assert_eq!(segments(false, 8), 1);
    }
}
