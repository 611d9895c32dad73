//! RDMA verbs for applications of `siwd`, over shared memory.
//!
//! The daemon owns the network; an application talks to it through work queues and completion
//! queues in shared memory. The objects are those of verbs and rdma_cm:
//!
//! | object | what it is | made by |
//! |---|---|---|
//! | [`Context`] | the connection to the daemon | [`Context::open`] |
//! | [`Pd`] | protection domain: which memory works with which queue pairs | [`Context::alloc_pd`] |
//! | [`Mr`] | registered memory | [`Pd::alloc_mr`], or [`Pd::reg_mr`] for part of an [`Arena`] |
//! | [`OwnedMr`] | a buffer of the application | [`Pd::register`] |
//! | [`AppMr`] | memory of any kind, by address | [`Pd::reg_memory`] |
//! | [`Cq`] | completion queue | [`Cq::new`] |
//! | [`CompletionChannel`] | file descriptor that becomes readable with completions | [`CompletionChannel::new`] |
//! | [`Qp`] | queue pair: one connection, or datagrams ([`Qp::start_datagrams`]) | [`Pd::create_qp`] |
//! | [`Ah`] | address handle, the destination of datagrams | [`Context::create_ah`] |
//! | [`Srq`] | receive requests that several queue pairs share | [`Pd::create_srq`] |
//! | [`CmChannel`], [`CmListener`] | connection events, and connections that come in | [`CmChannel::new`], [`CmListener::new`] |
//! | [`StreamingConnection`] | TCP bytes first, RDMA from an agreed octet on | [`StreamingConnection::open`], [`CmChannel::accept_stream`] |
//! | [`Mw`], [`FastMr`] | memory windows, registration by work request | [`Pd::alloc_mw`], [`Pd::alloc_fast_mr`] |
//!
//! # Connect and send
//!
//! ```no_run
//! use siw::{Access, ConnectOptions, Context, Cq, QpInit, SendData, SendWr, Wc};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::open(None)?;
//! let pd = context.alloc_pd()?;
//! let memory = pd.alloc_mr(4096, Access::LOCAL_WRITE)?;
//! let cq = Cq::new(&context, 64, None)?;
//! let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
//! // The channel delivers the end of the connection later.
//! let (_channel, _info) =
//!     qp.connect_blocking("10.0.0.2:7174".parse()?, &ConnectOptions::default())?;
//!
//! memory.write(0, b"hello")?;
//! let sges = [memory.slice(0..5)?];
//! qp.post_send(&[SendWr::send(1, SendData::Sges(&sges))])?;
//! let mut completions = [Wc::default(); 8];
//! let count = cq.wait(&mut completions, None)?;
//! println!("{} completions: {}", count, completions[0].status.as_str());
//! # Ok(()) }
//! ```
//!
//! # Accept connections
//!
//! ```no_run
//! use siw::{CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, QpInit};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::open(None)?;
//! let channel = CmChannel::new(&context)?;
//! let _listener = CmListener::new(&channel, None, "0.0.0.0:7174".parse()?, 16, 0)?;
//! let pd = context.alloc_pd()?;
//! let cq = Cq::new(&context, 64, None)?;
//! let mut queue_pairs = Vec::new();
//! loop {
//!     match channel.get_event(None)? {
//!         CmEvent::ConnectRequest(request) => {
//!             // Post receive requests before accepting: the peer may send at once.
//!             let qp = pd.create_qp(&cq, &cq, &QpInit::default())?;
//!             request.accept(&qp, None, &ConnectOptions::default())?;
//!             queue_pairs.push(qp);
//!         }
//!         CmEvent::Disconnected(info) => queue_pairs.retain(|qp| qp.qp_num() != info.qp_num),
//!         _ => {}
//!     }
//! }
//! # }
//! ```
//!
//! # Serve many clients from one pool of receives
//!
//! A SEND needs a posted receive request at the other end, or the connection ends
//! ([`ConnectOptions::wait_for_receives`] lets it wait instead). With a shared receive queue, as many
//! requests as messages arrive at once are enough, whatever the number of clients.
//!
//! ```no_run
//! use siw::{Access, Context, Cq, QpInit, RecvWr, SrqInit, Wc, WcStatus};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const LEN: usize = 4096;
//! let context = Context::open(None)?;
//! let pd = context.alloc_pd()?;
//! let cq = Cq::new(&context, 1024, None)?;
//! let memory = pd.alloc_mr(64 * LEN, Access::LOCAL_WRITE)?;
//! let srq = pd.create_srq(&SrqInit { max_wr: 64, max_sge: 1, ..SrqInit::default() })?;
//! let post = |buffer: usize| {
//!     let sges = [memory.slice(buffer * LEN..(buffer + 1) * LEN)?];
//!     Ok::<_, siw::Error>(srq.post_recv(&[RecvWr { wr_id: buffer as u64, sges: &sges }])?)
//! };
//! (0..64).try_for_each(post)?;
//! // One for each connection request, to be accepted with.
//! let qp = pd.create_qp_with_srq(&cq, &cq, &srq, &QpInit::default())?;
//! let mut completions = [Wc::default(); 16];
//! loop {
//!     let count = cq.wait(&mut completions, None)?;
//!     for received in completions[..count].iter().filter(|wc| wc.status == WcStatus::SUCCESS) {
//!         let buffer = received.wr_id as usize;
//!         let mut message = vec![0; received.byte_len as usize];
//!         memory.read(buffer * LEN, &mut message)?;
//!         println!("{} bytes from queue pair {}", message.len(), received.qp_num);
//!         post(buffer)?;
//!     }
//! }
//! # }
//! ```
//!
//! # Access the peer's memory
//!
//! The owner of memory describes it in a message or in private data of the connection; whoever has the
//! description reads and writes the memory without work of the owner's CPU.
//!
//! ```no_run
//! use siw::{Access, Mr, Pd, Qp, RemoteSlice, SendData};
//! # fn main() {}
//! /// The owner: returns the region and its description for the peer.
//! fn offer(pd: &Pd) -> Result<(Mr, [u8; RemoteSlice::BYTES]), siw::Error> {
//!     let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
//!     let region = pd.alloc_mr(1 << 20, access)?;
//!     let description = region.remote().to_bytes();
//!     Ok((region, description))
//! }
//!
//! /// The peer: writes 64 bytes there, then reads 4096.
//! fn access(qp: &Qp, own: &Mr, description: &[u8]) -> Result<(), siw::Error> {
//!     let remote = RemoteSlice::from_bytes(description)?;
//!     let (source, sink) = ([own.slice(0..64)?], [own.slice(64..4160)?]);
//!     qp.post_send(&[
//!         remote.slice(0..64)?.write(1, SendData::Sges(&source))?,
//!         remote.slice(0..4096)?.read(2, &sink)?,
//!     ])?;
//!     Ok(())
//! }
//! ```
//!
//! The completion of a WRITE says that its bytes were acknowledged. The owner learns that they are in
//! memory from a later SEND, or from [`RemoteSlice::write_with_imm`]. A memory window ([`Mw`]) gives
//! a part of a region to one peer, for a time.
//!
//! # Send datagrams
//!
//! A queue pair of datagrams (UD over RoCEv2) has no connection. Each request names its destination, and each
//! receive buffer begins with [`GRH_LEN`] bytes, whose end is the IP header. A datagram holds up to 1024
//! bytes at an MTU of 1500, and is lost without notice if the network or the receiver has no room. An error
//! of a request ends the queue pair.
//!
//! ```no_run
//! use siw::{Ah, AhAttr, Context, Qp, SendData, SendWr};
//! use std::net::IpAddr;
//! # fn main() {}
//! const QKEY: u32 = 0x1111_1111;
//!
//! /// Greets a queue pair of another host. Returns the handle, to be kept until the completion.
//! fn greet(context: &Context, qp: &Qp, host: IpAddr, qp_num: u32) -> Result<Ah, siw::Error> {
//!     qp.start_datagrams(0, QKEY)?;
//!     let ah = context.create_ah(&AhAttr::new(0, host))?;
//!     let hello = SendWr::send(1, SendData::Inline(b"hello"));
//!     qp.post_send(&[hello.with_destination(ah.number(), qp_num, QKEY)])?;
//!     Ok(ah)
//! }
//! ```
//!
//! # Wait for events
//!
//! [`CompletionChannel`] and [`CmChannel`] are descriptors for epoll(7) and the like: when one is
//! readable, [`CompletionChannel::try_get_event`] and [`CmChannel::try_get_event`] take events without
//! waiting. With the feature `tokio`, the module `tokio` awaits completions, connections and their end;
//! `examples/tokio_echo.rs` and `examples/tokio_key_value.rs` are servers. `examples/tokio_round_trip.rs`
//! has the same exchange on tokio and in an epoll loop.
//!
//! # Errors
//!
//! Every call returns an [`Error`], whose text says what is wrong and what to do. Work requests fail
//! later: the status of their completion ([`WcStatus`]) is not SUCCESS, the queue pair ends, and all
//! requests behind it complete with WR_FLUSH_ERR. [`Context::get_async_event`] has the reason. Calls
//! that take an object by value give it back when they fail ([`Failed`]): a [`ConnectionRequest`] can
//! be accepted with other options. Those whose name begins with `close` end the object also when they
//! fail, and so does `tokio::AsyncCmChannel::new`.
//!
//! # Shut down
//!
//! [`Qp::disconnect`] sends what was posted, and both sides get [`CmEvent::Disconnected`]; its `errno`
//! is 0 after a graceful close. [`Qp::drain_sq`] and [`Qp::drain_rq`] end a queue pair at once and
//! return when none of its requests is left, after which their buffers may be used for other data.
//! Dropping the last clone of a [`Qp`] ends the connection.
//!
//! # Memory
//!
//! [`Pd::alloc_mr`] is the fastest: memory of the daemon, read and written by copies. [`Pd::register`]
//! registers a buffer that the program has, and returns it from [`OwnedMr::dereg`]. [`Pd::reg_memory`]
//! takes any address, and is unsafe. Registering costs microseconds: register once, and use parts.
//!
//! Complete programs are in the folder `examples`: `ping`, `read`, `write_with_completion_channel`,
//! `srq_server`, `atomics`, `tokio_echo`, `tokio_key_value`.
//!
//! # Beside other crates
//!
//! The same program with this crate and with two crates over libibverbs: two queue pairs, 1 MiB from
//! one to the other, verified. Lines of code without comments; the programs, and the script that
//! counts, are in `client-lib/compared` of the repository.
//!
//! | crate | lines | `unsafe` blocks | transfer |
//! |---|---|---|---|
//! | `siw` | 47 | 0 | WRITE with immediate data |
//! | [`sideway`](https://crates.io/crates/sideway) 0.4.3 | 92 | 3 | WRITE with immediate data |
//! | [`ibverbs`](https://crates.io/crates/ibverbs) 0.9.2 | 36 | 2 | SEND: this version has no WRITE and no rdma_cm |
//!
//! All three run on siwd: the others through its drop-in libibverbs. `sideway` and `ibverbs` also run
//! on hardware.
//!
//! # Behaviour at the edges
//!
//! - **ESTABLISHED after accept** arrives on the channel that was passed to
//!   [`ConnectionRequest::accept`], or without one on the listener's channel.
//! - **A bad lkey** completes its request with LOC_PROT_ERR, and the queue pair ends.
//! - **A bad rkey**, or a range or right that the key does not have: the requester's request completes
//!   with REM_ACCESS_ERR if it waits for an answer (READ, atomics). A WRITE may complete with SUCCESS
//!   before: its bytes were acknowledged, not placed. Both queue pairs end; the owner of the memory gets
//!   the asynchronous event QP_ACCESS_ERR, and both get [`CmEvent::Disconnected`].
//! - **A shared receive queue** keeps its requests when a queue pair ends. The asynchronous event
//!   QP_LAST_WQE_REACHED comes once for each of its queue pairs, with the number of that queue pair:
//!   from then on it takes no further request, and what it had taken is completed or flushed.
//! - **When the daemon has gone**, [`Qp::post_send`] still succeeds until the queue is full: it writes to
//!   memory. [`Cq::poll`] returns the last completions, then [`Error::DaemonGone`];
//!   [`Cq::flush_lost_requests`] completes the unfinished requests with WR_FLUSH_ERR. Registered buffers
//!   of [`OwnedMr`] are leaked.
//!
//! # Rules
//!
//! - Objects free themselves when dropped and keep alive what they need. Destructors do not wait: the
//!   daemon frees objects before it serves the next call, and [`Context::await_releases`] waits for
//!   that. The exception is [`AppMr`], whose memory is the caller's again afterwards.
//! - Every call may be made from any thread. Posting and polling allocate nothing, take a spin lock
//!   that is free in practice, and make a system call only to wake a sleeping worker.
//! - Memory that a peer may access changes at any time: it is read and written by copies
//!   ([`Mr::read`], [`Mr::write`]), never borrowed.
//! - A daemon that does not answer a call within [`CALL_TIMEOUT`] is given up
//!   ([`Context::set_call_timeout`]): no call blocks longer.
//! - Dropping a queue pair discards its completions, polled or not (ibv_destroy_qp(3)).
//! - When the daemon ends, every blocked call returns [`Error::DaemonGone`], and so does polling after
//!   the last completion was taken.
//! - The C API of `include/siw.h` is a thin layer over this crate.
//! - Later versions add fields to the structs of options ([`QpInit`], [`ConnectOptions`] and so on): end
//!   their literals with `..Default::default()`. [`Error`] gets further variants.
//!
//! # What is unsafe, and why
//!
//! No program without `unsafe` has undefined behaviour by calls of this crate, as long as the daemon
//! at the socket is siwd, with one exception: [`Pd::register`] in a process that uses AIO, io_uring,
//! O_DIRECT or device files (below). Every public function was reviewed against this:
//!
//! | functions | why they are safe, or not |
//! |---|---|
//! | [`Pd::alloc_mr`], [`Pd::reg_mr`], [`Pd::alloc_fast_mr`], [`Arena`], [`Mr`] | the memory is a file of the daemon that nothing else uses. It is read and written by copies that allow concurrent changes, and stays mapped while an object refers to it |
//! | [`Pd::register`], [`OwnedMr`] | the region owns the buffer and lends no references; only a confirmed deregistration returns or frees it. A program that forgets the region leaks the buffer |
//! | [`Pd::reg_memory`], [`Pd::reg_memory_iova`] | unsafe: the daemon and peers change memory at an address, which the compiler does not know |
//! | [`StableBuffer`] | unsafe to implement: the region relies on the address |
//! | work requests ([`Qp::post_send`] and so on) | keys and ranges are plain numbers that the daemon checks: a wrong one fails, or names other registered memory of the same protection domain |
//! | calls with two objects | objects of another [`Context`] are refused ([`Error::OtherContext`]) |
//! | [`Mr::as_ptr`], [`AppMr::as_ptr`], [`Arena::as_ptr`] | return raw pointers; using one is unsafe, and no reference may be made of it while peers may write |
//! | polling, events | numbers from shared memory are checked before use |
//! | `capi` | unsafe: the contract is in `include/siw.h` |
//!
//! A daemon is trusted as the kernel is: one that lies about its memory files can make this process
//! fault. In a process that uses AIO, io_uring, O_DIRECT or device files, memory that was registered
//! may stay shared with the daemon (see [`Pd::reg_memory`]). Peers cannot access it, but an allocator
//! that relies on MADV_DONTNEED for zeroes gets old content from it, and one that grows a block by
//! mremap(2), as realloc(3) of glibc does from 128 KiB on, gets pages of other memory. In such a process
//! use [`Pd::alloc_mr`], or neither shrink nor grow a buffer that was registered.
#![warn(missing_docs, missing_debug_implementations)]
#![deny(unsafe_code)]

mod addresses;
#[allow(unsafe_code)]
mod app_memory;
mod arena_pool;
mod cm;
mod context;
mod cq;
mod cq_resize;
mod credit;
mod datagram;
mod deadline;
mod debug;
mod drain;
mod error;
mod fast_mr;
mod finished;
mod high_descriptors;
mod locking;
mod memory;
mod pairing;
mod panics;
mod pausable;
mod posting;
mod qp;
mod releaser;
mod service;
mod slices;
mod srq;
mod streaming;
mod window;

#[cfg(feature = "tokio")]
pub mod tokio;

#[allow(unsafe_code)]
#[doc(hidden)]
pub mod capi;

pub use addresses::{AddressResolution, BindOptions, CmBinding, ResolvedAddress};
pub use app_memory::{AppMr, OwnedMr, StableBuffer};
#[doc(hidden)]
pub use app_memory::{CancelGuard, calls as memory_calls, process_generation, watch_forks};
pub use cm::{
    CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo, ConnectionRequest,
    ListenOptions, Markers, OutOfOrder, PeerPreset, RdmaCmEvent, ReadyToReceive, TerminateOrder,
};
pub use context::{AsyncEvent, CALL_TIMEOUT, Context, DeviceInfo};
pub use cq::{CompletionChannel, Cq};
pub use datagram::{Ah, AhAttr, CONTROLLED_QKEY, GRH_LEN, MULTICAST_QPN};
pub use drain::DRAIN_WR_ID;
pub use error::{Error, Failed, PostError};
pub use fast_mr::FastMr;
pub use finished::{Finished, Outcomes};
#[doc(hidden)]
pub use high_descriptors::{KeptDescriptor, to_high};
#[doc(hidden)]
pub use locking::{BracketLock, ProcessMutex};
pub use memory::{Arena, Mr, Pd, ReregChange};
pub use pairing::PairOptions;
#[doc(hidden)]
pub use panics::{contain_panic, print_line};
#[doc(hidden)]
pub use posting::{ReceivePosting, SendPosting, SharedReceivePosting};
pub use qp::{Qp, QpAttr, QpInit, VerbsQpState};
pub use service::{SERVICE_QKEY, ServiceReply, ServiceRequest, ServiceSearch};
pub use siw_shm::control::{
    AsyncEventKind, ExtentMethod, Limits, ListPosition, ObjectList, QpState,
};
pub use siw_shm::persona::Persona;
pub use siw_shm::{
    Access, AtomicArgs, Opcode, RecvWr, SendData, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus,
    WrFlags,
};
pub use slices::{MwBind, RemoteSlice};
pub use srq::{Srq, SrqAttr, SrqInit};
pub use streaming::{OpeningStream, StreamOptions, StreamingConnection};
pub use window::{Mw, WindowType, inc_rkey};
