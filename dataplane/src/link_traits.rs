//! Properties of the link below a device, as its workers need them: one value, derived from the
//! driver's traits, the capabilities that the port granted, and the configuration.

use dpdk::{DriverTraits, PortCaps};

use crate::config::{ChecksumPolicy, TsoPolicy, TxPayloadPolicy};

/// Payload of at most this many bytes is always copied: below it a copy costs less than a second buffer
/// and its reference.
pub const COPY_MAX: u32 = 512;

/// How payload of WRITE and SEND gets into frames, which determines when they complete. READ
/// responses, whose memory may change at any time, and short payload are always copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadPolicy {
    /// Copied into the frame, in one pass with the CRC. The message completes when it is
    /// acknowledged.
    Copy,
    /// By reference to registered memory. The link sends the frames of a queue in order and reads each
    /// while it sends it, so the acknowledgement of the last byte proves that the memory was read.
    /// Retransmissions are copied, because an acknowledgement may be for an earlier transmission. The
    /// message completes when it is acknowledged, regardless of when the driver frees its buffers. A
    /// peer that acknowledges data before it has received them can be sent data that the application
    /// writes into the buffer after the completion, with a wrong CRC: where that matters, payload has
    /// to be copied.
    ReferenceUntilAck,
    /// By reference, and the peer gets the same mbuf: it may read the memory after it acknowledged it.
    /// The message completes when the last frame that refers to its memory is freed.
    ReferenceUntilRelease,
}

/// Capabilities of a device's link, as it is configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkTraits {
    /// The peer is in this daemon, and the link is memory without a wire. No interrupt announces
    /// frames, and each ring joins two ends in the same worker.
    pub in_process: bool,
    /// No checksums are computed: nothing can damage frames in memory.
    pub no_checksums: bool,
    /// The port verifies the checksums of received frames.
    pub rx_checksum: bool,
    /// The port can wake a sleeping worker.
    pub rx_interrupt: bool,
    /// No interrupt has arrived yet, so that they cannot be relied on: drivers report success even if
    /// the device has none, or delivers none (e1000 and e1000e).
    pub rx_interrupt_unproven: bool,
    /// The port computes TCP checksums.
    pub tx_checksum: bool,
    /// The port fills in the IPv4 header checksums of the segments that it cuts.
    pub tx_ip_checksum: bool,
    /// The port cuts super-segments into TCP segments (TSO), and computes their checksums; a ring pair
    /// carries them uncut.
    pub tso: bool,
    /// The port sends chains of segments; otherwise frames are copied into one buffer.
    pub multi_segs: bool,
    /// How payload gets into frames. A stream may still copy all of it: see
    /// [`stream_payload`](Self::stream_payload).
    pub payload: PayloadPolicy,
    /// Selection of messages that are sent by reference; `None` if all are copied.
    references: Option<ReferenceRule>,
    /// Every segment but the last must have an even length; otherwise the port's checksums are wrong.
    pub even_segments: bool,
    /// Maximum segments of a frame that the port sends uncut. Frames with more are copied into one.
    pub max_segments: u16,
    /// Maximum segments of a packet that the port cuts.
    pub max_tso_segments: u16,
}

/// How the messages of one stream get into frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamPayload {
    /// Length in bytes up to which messages are copied; longer ones are sent by reference.
    pub copied_up_to: u32,
    /// A message sent by reference completes only when no frame refers to its memory any more.
    pub awaits_releases: bool,
}

/// Selection of a link's messages that are sent by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReferenceRule {
    /// All messages that are not short.
    All,
    /// Long messages, on streams without CRC.
    LongWithoutCrc,
}

/// MTU from which long messages without CRC cross a pair faster by reference (`siw-perf bw`).
const LONG_FRAME: u16 = 9000;
/// Long messages have more bytes than this.
const LONG_MESSAGE: u32 = 4096;

/// Maximum segments of a frame if the driver states no limit: a header, a reference, and a trailer.
/// Any driver that sends chains supports these three.
const UNSTATED_MAX_SEGMENTS: u16 = 3;

impl LinkTraits {
    /// `driver` describes the kind of link, `granted` is the result of the port's configuration.
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
            // With long frames a pair is faster by reference. With CRC, payload is copied: not every
            // application leaves its memory alone until the completion (QEMU migrates a guest that
            // runs). The receiver would read it for its CRC after the sender did, and the connection
            // would end.
            TxPayloadPolicy::Auto if driver.in_process && mtu >= LONG_FRAME => {
                Some(ReferenceRule::LongWithoutCrc)
            }
            // One pass that copies and computes the CRC measured faster than the CRC and a second
            // buffer, at every message length at MTU 1500, even if the peer takes the frame by pointer
            // (`./benches/figures iwarp`). The driver has one segment to send instead of three.
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

    /// Decides how the messages of a stream get into frames. `is_self_addressed`: both its ends are
    /// addresses of the device.
    pub fn stream_payload(&self, has_crc: bool, is_self_addressed: bool) -> StreamPayload {
        let awaits_releases = self.payload == PayloadPolicy::ReferenceUntilRelease;
        let copied_up_to = match self.references {
            // The receiver reads a loopback frame itself, also after it acknowledged it.
            _ if is_self_addressed && !awaits_releases => u32::MAX,
            Some(ReferenceRule::All) => COPY_MAX,
            Some(ReferenceRule::LongWithoutCrc) if !has_crc => LONG_MESSAGE,
            Some(ReferenceRule::LongWithoutCrc) | None => u32::MAX,
        };
        StreamPayload {
            copied_up_to,
            awaits_releases,
        }
    }

    /// Name of the payload policy in the settings of the statistics.
    pub fn payload_name(&self) -> &'static str {
        match self.references {
            None => "copy",
            Some(ReferenceRule::All) => "reference",
            Some(ReferenceRule::LongWithoutCrc) => "reference without CRC",
        }
    }

    /// Returns whether TCP has to compute checksums itself.
    pub fn needs_software_checksum(&self) -> bool {
        !(self.tx_checksum || self.no_checksums)
    }

    /// Returns whether received frames may belong to another worker.
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
            // No chains, memory that the driver cannot reach, and an unknown driver.
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
            for is_self_addressed in [false, true] {
                let limits = [true, false].map(|has_crc| {
                    let payload = link.stream_payload(has_crc, is_self_addressed);
                    assert_eq!(payload.awaits_releases, without_crc != u32::MAX);
                    payload.copied_up_to
                });
                assert_eq!(limits, [with_crc, without_crc], "{asked:?} {mtu}");
            }
        }
        let wire = DriverTraits::for_device("net_af_packet0,iface=x");
        let caps = granted(true, 8);
        let (checksum, tso) = (ChecksumPolicy::Auto, TsoPolicy::Auto);
        let link = LinkTraits::new(wire, &caps, checksum, tso, Auto, LONG_FRAME);
        assert_eq!(link.payload, PayloadPolicy::Copy);
    }

    #[test]
    fn a_wire_copies_what_the_device_sends_to_itself() {
        let link = traits_of("0000:03:00.0", TxPayloadPolicy::Reference, granted(true, 8));
        let limits =
            [false, true].map(|is_self_addressed| link.stream_payload(true, is_self_addressed));
        assert_eq!(
            limits.map(|payload| payload.copied_up_to),
            [COPY_MAX, u32::MAX]
        );
        assert!(limits.iter().all(|payload| !payload.awaits_releases));
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
