//! Drives a connection through the function table of the built library, as packetdrill does.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_void};
use std::mem::MaybeUninit;
use std::sync::mpsc;

use siw_packetdrill::Interface;
use siw_tcp::checksum::OnesComplementSum;

type Init = unsafe extern "C" fn(*const c_char, *mut Interface);

const LOCAL: [u8; 4] = [192, 168, 0, 77];
const REMOTE: [u8; 4] = [192, 0, 2, 1];
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// A table filled by the loaded library.
struct LoadedTable(Interface);

impl LoadedTable {
    fn load(flags: &CStr) -> LoadedTable {
        let mut path = std::env::current_exe().unwrap();
        path.pop();
        if !path.join("libsiw_packetdrill.so").exists() {
            path.pop();
        }
        let path = path.join("libsiw_packetdrill.so");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the path is a string; the symbol has the type of the interface; the library stays
        // loaded.
        unsafe {
            let lib = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(
                !lib.is_null(),
                "{path:?}: {:?}",
                CStr::from_ptr(libc::dlerror())
            );
            let init = libc::dlsym(lib, c"packetdrill_interface_init".as_ptr());
            assert!(!init.is_null());
            let init: Init = std::mem::transmute(init);
            let mut table = MaybeUninit::uninit();
            init(flags.as_ptr(), table.as_mut_ptr());
            LoadedTable(table.assume_init())
        }
    }

    fn inject(&self, flags: u8, seq: u32, ack: u32, payload: &[u8]) {
        let p = segment(flags, seq, ack, payload);
        // SAFETY: the packet is valid during the call.
        let r = unsafe { (self.0.netdev_send)(self.0.userdata, p.as_ptr().cast(), p.len()) };
        assert_eq!(r, 0);
    }

    /// Returns flags, sequence number, acknowledgment number and payload of the next packet.
    fn next(&self) -> (u8, u32, u32, Vec<u8>) {
        let mut buf = [0u8; 2000];
        let mut len = buf.len();
        let mut at: c_longlong = -1;
        // SAFETY: the buffer, its length and the time are valid during the call.
        let r = unsafe {
            (self.0.netdev_receive)(self.0.userdata, buf.as_mut_ptr().cast(), &mut len, &mut at)
        };
        assert_eq!(r, 0);
        assert!(len >= 40, "a packet");
        assert!(at >= 0);
        let p = &buf[..len];
        assert_eq!((&p[12..16], &p[16..20]), (&LOCAL[..], &REMOTE[..]));
        let b32 = |i: usize| u32::from_be_bytes([p[i], p[i + 1], p[i + 2], p[i + 3]]);
        let header = 20 + usize::from(p[32] >> 4) * 4;
        (p[33], b32(24), b32(28), p[header..].to_vec())
    }
}

fn segment(flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Vec<u8> {
    let mut t = vec![0; 20];
    t[0..2].copy_from_slice(&40000u16.to_be_bytes());
    t[2..4].copy_from_slice(&8080u16.to_be_bytes());
    t[4..8].copy_from_slice(&seq.to_be_bytes());
    t[8..12].copy_from_slice(&ack.to_be_bytes());
    t[12] = 0x50;
    t[13] = flags;
    t[14..16].copy_from_slice(&60000u16.to_be_bytes());
    t.extend(payload);
    let mut sum = OnesComplementSum::new();
    sum.add(&REMOTE);
    sum.add(&LOCAL);
    sum.add_word(6 + t.len() as u16);
    sum.add(&t);
    t[16..18].copy_from_slice(&(!sum.value()).to_be_bytes());
    let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0];
    ip.extend(REMOTE);
    ip.extend(LOCAL);
    ip[2..4].copy_from_slice(&(20 + t.len() as u16).to_be_bytes());
    let mut sum = OnesComplementSum::new();
    sum.add(&ip);
    ip[10..12].copy_from_slice(&(!sum.value()).to_be_bytes());
    [ip, t].concat()
}

#[test]
fn the_table_opens_uses_and_closes_a_connection() {
    // The clock is the machine's, so the timers awaited here are short.
    let d = LoadedTable::load(
        c"local_ip=192.168.0.77 delayed_ack_usecs=1000 rto_min_usecs=5000 congestion=newreno",
    );
    let (t, u) = (&d.0, d.0.userdata);
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 8080u16.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(LOCAL),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: every pointer is valid during its call; the table is the library's, and `free` comes last.
    unsafe {
        // Before the first call every port is CLOSED.
        d.inject(SYN, 50, 0, &[]);
        let (flags, seq, ack, _) = d.next();
        assert_eq!((flags, seq, ack), (RST | ACK, 0, 51));

        let fd = (t.socket)(u, libc::AF_INET, libc::SOCK_STREAM, 0);
        assert_eq!(fd, 3);
        let len = size_of::<libc::sockaddr_in>() as u32;
        assert_eq!((t.bind)(u, fd, (&raw const addr).cast(), len), 0);
        assert_eq!((t.listen)(u, fd, 1), 0);
        assert_eq!((t.fcntl)(u, fd, libc::F_SETFL, libc::O_NONBLOCK as u64), 0);
        let (mut peer, mut peer_len): (libc::sockaddr_in, u32) = (addr, len);
        let none = (t.accept)(u, fd, (&raw mut peer).cast(), &mut peer_len);
        assert_eq!(none, -1);
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(libc::EAGAIN));

        d.inject(SYN, 100, 0, &[]);
        let (flags, isn, ack, _) = d.next();
        assert_eq!((flags, ack), (SYN | ACK, 101));
        d.inject(ACK, 101, isn + 1, &[]);
        let c = (t.accept)(u, fd, (&raw mut peer).cast(), &mut peer_len);
        assert_eq!(c, 4);
        assert_eq!(u16::from_be(peer.sin_port), 40000);
        assert_eq!(peer.sin_addr.s_addr, u32::from_ne_bytes(REMOTE));

        // A blocking read in another thread; the data is sent once that thread waits.
        let question = std::thread::scope(|s| {
            let d = SendTable(&d);
            let (send_id, reader_id) = mpsc::channel();
            let reader = s.spawn(move || {
                let mut buf = [0u8; 100];
                let table = d.get();
                send_id.send(libc::gettid()).unwrap();
                let got = (table.0.read)(table.0.userdata, c, buf.as_mut_ptr().cast(), buf.len());
                buf[..got as usize].to_vec()
            });
            wait_until_blocked(reader_id.recv().unwrap());
            d.get().inject(PSH | ACK, 101, isn + 1, b"question");
            reader.join().unwrap()
        });
        assert_eq!(question, b"question");
        let mut buf = [0u8; 100];
        assert_eq!(d.next().2, 109);

        assert_eq!((t.write)(u, c, b"answer".as_ptr().cast(), 6), 6);
        let (flags, seq, ack, payload) = d.next();
        assert_eq!((flags, seq, ack), (PSH | ACK, isn + 1, 109));
        assert_eq!(payload, b"answer");
        // No acknowledgment arrives: the retransmission timer sends the data again.
        let (_, again, _, payload) = d.next();
        assert_eq!((again, &payload[..]), (isn + 1, &b"answer"[..]));
        d.inject(ACK, 109, isn + 7, &[]);

        // Peeked data stays in the queue.
        d.inject(PSH | ACK, 109, isn + 7, b"more");
        assert_eq!(d.next().2, 113);
        for (flags, len) in [(libc::MSG_PEEK, 2), (libc::MSG_PEEK, 4), (0, 4)] {
            let got = (t.recv)(u, c, buf.as_mut_ptr().cast(), len, flags);
            assert_eq!(&buf[..got as usize], &b"more"[..len], "flags {flags}");
        }
        let none = (t.recv)(u, c, buf.as_mut_ptr().cast(), 4, libc::MSG_DONTWAIT);
        assert_eq!(none, -1);

        d.inject(FIN | ACK, 113, isn + 7, &[]);
        assert_eq!(d.next().2, 114);
        let mut p = libc::pollfd {
            fd: c,
            events: libc::POLLIN | libc::POLLRDHUP,
            revents: 0,
        };
        assert_eq!((t.poll)(u, &mut p, 1, 1000), 1);
        assert_eq!(p.revents, libc::POLLIN | libc::POLLRDHUP);
        assert_eq!((t.read)(u, c, buf.as_mut_ptr().cast(), buf.len()), 0);
        assert_eq!((t.close)(u, c), 0);
        let (flags, seq, _, _) = d.next();
        assert_eq!((flags, seq), (FIN | ACK, isn + 7));
        d.inject(ACK, 114, isn + 8, &[]);
        let bad = (t.read)(u, c, buf.as_mut_ptr().cast::<c_void>(), 1);
        let errno: Option<c_int> = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((bad, errno), (-1, Some(libc::EBADF)));
        (t.free)(u);
    }
}

/// Returns once a thread of this process sleeps repeatedly, as a blocking call does: each sleep is a
/// voluntary context switch.
fn wait_until_blocked(thread: libc::pid_t) {
    let path = format!("/proc/self/task/{thread}/status");
    let switches = || {
        let status = std::fs::read_to_string(&path).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("voluntary_ctxt"));
        let count = line.unwrap().split_whitespace().nth(1).unwrap();
        count.parse::<u64>().unwrap()
    };
    let before = switches();
    while switches() < before + 3 {
        std::thread::yield_now();
    }
}

/// packetdrill also calls the table from two threads.
#[derive(Clone, Copy)]
struct SendTable<'a>(&'a LoadedTable);

// SAFETY: the library guards its state with a lock.
unsafe impl Send for SendTable<'_> {}

impl<'a> SendTable<'a> {
    fn get(self) -> &'a LoadedTable {
        self.0
    }
}
