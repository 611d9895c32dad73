//! Measures round trips of 64 bytes between two threads, once with completions that tokio awaits and
//! once with an epoll loop by hand. Prints a JSON line for each, with microseconds per round trip.
//!
//! `cargo run --release --features tokio --example tokio_round_trip [SOCKET]`, with siwd running.

#[path = "common/devices.rs"]
mod devices;

use devices::{Devices, open_context};
use rustix::event::epoll;
use siw::tokio::AsyncCq;
use siw::{
    Access, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions, Context, Cq, Error,
    Mr, Qp, QpInit, RecvWr, SendData, SendWr, Wc, WcOpcode, WcStatus,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEN: usize = 64;
/// Round trips of a measurement.
const ROUND_TRIPS: u32 = 20_000;
/// Measurements of each kind, alternating.
const ROUNDS: usize = 5;

/// A queue pair with a buffer for receiving and one for sending.
struct End {
    qp: Qp,
    memory: Mr,
}

impl End {
    fn new(context: &Context, cq: &Cq) -> Result<End, Error> {
        let pd = context.alloc_pd()?;
        let qp = pd.create_qp(cq, cq, &QpInit::default())?;
        let memory = pd.alloc_mr(2 * LEN, Access::LOCAL_WRITE)?;
        let end = End { qp, memory };
        end.post_receive()?;
        Ok(end)
    }

    fn post_receive(&self) -> Result<(), Error> {
        let sges = [self.memory.slice(0..LEN)?];
        Ok(self.qp.post_recv(&[RecvWr {
            wr_id: 0,
            sges: &sges,
        }])?)
    }
}

/// Waits for completions by hand.
struct EpollLoop {
    cq: Cq,
    channel: Arc<CompletionChannel>,
    epoll: rustix::fd::OwnedFd,
}

impl EpollLoop {
    fn new(context: &Context) -> Result<EpollLoop, Error> {
        let channel = CompletionChannel::new(context)?;
        let cq = Cq::new(context, 16, Some((&channel, 0)))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&epoll, &*channel, data, epoll::EventFlags::IN)?;
        Ok(EpollLoop { cq, channel, epoll })
    }

    fn wait(&self, completions: &mut [Wc]) -> Result<usize, Error> {
        loop {
            self.cq.req_notify(false)?;
            match self.cq.poll(completions)? {
                0 => {}
                count => return Ok(count),
            }
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            epoll::wait(&self.epoll, &mut events, None)?;
            while self.channel.try_get_event()?.is_some() {}
        }
    }
}

/// Side of the connection.
#[derive(Clone, Copy)]
enum Role<'a> {
    /// Connects to the address from the device, sends first, and counts.
    Client(SocketAddr, u32),
    /// Accepts a request of the channel, and sends every message back.
    Server(&'a CmChannel),
}

impl Role<'_> {
    /// Connects the queue pair; keep the result while it is used.
    fn connect(self, qp: &Qp) -> Result<Option<CmChannel>, Error> {
        match self {
            Role::Client(to, device) => {
                let options = ConnectOptions {
                    device: Some(device),
                    ..ConnectOptions::default()
                };
                Ok(Some(qp.connect_blocking(to, &options)?.0))
            }
            Role::Server(channel) => loop {
                match channel.get_event(None)? {
                    CmEvent::ConnectRequest(request) => {
                        request.accept(qp, None, &ConnectOptions::default())?;
                    }
                    CmEvent::Established(_) => return Ok(None),
                    // The end of the connection before.
                    _ => {}
                }
            },
        }
    }
}

/// The round trips of one end.
struct Exchange<'a> {
    end: &'a End,
    is_client: bool,
    /// Messages that are still to come.
    left: u32,
    /// Sends that have not completed.
    sending: u32,
}

impl<'a> Exchange<'a> {
    fn start(end: &'a End, role: Role<'_>) -> Result<Exchange<'a>, Error> {
        let mut exchange = Exchange {
            end,
            is_client: matches!(role, Role::Client(..)),
            left: ROUND_TRIPS,
            sending: 0,
        };
        if exchange.is_client {
            exchange.send()?;
        }
        Ok(exchange)
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.sending == 0
    }

    fn send(&mut self) -> Result<(), Error> {
        let end = self.end;
        let sges = [end.memory.slice(LEN..2 * LEN)?];
        let request = SendWr::send(0, SendData::Sges(&sges));
        end.qp.post_send(&[request])?;
        self.sending += 1;
        Ok(())
    }

    /// Answers the messages among the completions.
    fn answer(&mut self, completions: &[Wc]) -> Result<(), Error> {
        for completion in completions {
            if completion.status != WcStatus::SUCCESS {
                return Err(Error::Connect(completion.status.as_str().into()));
            }
            if completion.opcode != WcOpcode::RECV {
                self.sending -= 1;
                continue;
            }
            self.end.post_receive()?;
            self.left -= 1;
            if !self.is_client || self.left > 0 {
                self.send()?;
            }
        }
        Ok(())
    }
}

/// Runs one end with awaited completions; returns the time of the round trips.
fn run_awaited(context: &Context, role: Role<'_>) -> Result<Duration, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut cq = AsyncCq::new(context, 16).await?;
        let end = End::new(context, cq.cq())?;
        let _channel = role.connect(&end.qp)?;
        let began = Instant::now();
        let mut exchange = Exchange::start(&end, role)?;
        while !exchange.is_done() {
            let mut completions = [Wc::default(); 8];
            let count = cq.wait(&mut completions).await?;
            exchange.answer(&completions[..count])?;
        }
        Ok(began.elapsed())
    })
}

/// As [`run_awaited`], with an epoll loop.
fn run_by_hand(context: &Context, role: Role<'_>) -> Result<Duration, Error> {
    let waiting = EpollLoop::new(context)?;
    let end = End::new(context, &waiting.cq)?;
    let _channel = role.connect(&end.qp)?;
    let began = Instant::now();
    let mut exchange = Exchange::start(&end, role)?;
    while !exchange.is_done() {
        let mut completions = [Wc::default(); 8];
        let count = waiting.wait(&mut completions)?;
        exchange.answer(&completions[..count])?;
    }
    Ok(began.elapsed())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = open_context()?;
    let devices = Devices::find(&context)?;
    let channel = CmChannel::new(&context)?;
    let (device, address) = devices.server;
    let listener = CmListener::new(&channel, Some(device), (address, 0).into(), 1, 0)?;
    let client = Role::Client(listener.local_addr(), devices.client);
    let server = Role::Server(&channel);
    type RunEnd = fn(&Context, Role<'_>) -> Result<Duration, Error>;
    let kinds: [(&str, RunEnd); 2] = [("awaited", run_awaited), ("by_hand", run_by_hand)];
    for _ in 0..ROUNDS {
        for (name, run_end) in kinds {
            let time = std::thread::scope(|threads| {
                let serving = threads.spawn(|| run_end(&context, server));
                let time = run_end(&context, client);
                // The server ends when the connection does, also after an error of the client.
                match serving.join() {
                    Ok(served) => served.and(time),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            })?;
            let micros = time.as_secs_f64() * 1e6 / f64::from(ROUND_TRIPS);
            println!("{{\"{name}\":{micros:.2}}}");
        }
    }
    Ok(())
}
