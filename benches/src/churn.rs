//! Rate at which queue pairs are created, connected, disconnected and destroyed, and the daemon's
//! memory growth. Called by `siw-figures`.

use anyhow::{anyhow, bail};
use siw::{CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, Error, Pd, Qp, QpInit};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of one step; a longer one has failed.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);

/// One end: the objects needed to create its queue pairs, and the existing queue pairs.
struct ChurnEnd {
    pd: Pd,
    cq: Cq,
    cm: CmChannel,
    qps: HashMap<u32, Qp>,
}

impl ChurnEnd {
    fn new(ctx: &Context) -> anyhow::Result<ChurnEnd> {
        Ok(ChurnEnd {
            pd: ctx.alloc_pd().map_err(failed_call("protection domain"))?,
            cq: Cq::new(ctx, 64, None).map_err(failed_call("completion queue"))?,
            cm: CmChannel::new(ctx).map_err(failed_call("event channel"))?,
            qps: HashMap::new(),
        })
    }

    fn create_qp(&mut self) -> anyhow::Result<Qp> {
        let init = QpInit {
            max_send_wr: 4,
            max_recv_wr: 4,
            ..QpInit::default()
        };
        let qp = self
            .pd
            .create_qp(&self.cq, &self.cq, &init)
            .map_err(failed_call("queue pair"))?;
        self.qps.insert(qp.qp_num(), qp.clone());
        Ok(qp)
    }
}

fn failed_call<E: Into<Error>>(what: &'static str) -> impl Fn(E) -> anyhow::Error {
    move |error| anyhow!("{what}: {}", error.into())
}

/// Measures queue pairs created, connected, closed and destroyed per second: two for each
/// connection, one at each end.
///
/// `in_flight` connections exist at a time. The initiator uses `initiator` on the device with index
/// `from`, the target `target_context` at the address `to`; each has its own thread.
pub fn queue_pairs_per_second(
    initiator: &Context,
    from: u32,
    target_context: &Context,
    to: SocketAddr,
    in_flight: u32,
    time: Duration,
) -> anyhow::Result<f64> {
    let stop = AtomicBool::new(false);
    let mut target = ChurnEnd::new(target_context)?;
    let listener = CmListener::new(&target.cm, None, to, in_flight.max(16), 0)
        .map_err(failed_call("listener"))?;
    let to = listener.local_addr();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let result = accept_connections(&mut target, &stop);
            stop.store(true, Ordering::Relaxed);
            result
        });
        let rate = initiate_connections(initiator, from, to, in_flight, time, &stop);
        stop.store(true, Ordering::Relaxed);
        accepting
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the target panicked")))
            .and(rate)
    })
}

/// Target thread: accepts every request with a new queue pair until `stop` is set.
fn accept_connections(side: &mut ChurnEnd, stop: &AtomicBool) -> anyhow::Result<()> {
    loop {
        let event = match side.cm.get_event(Some(Duration::from_millis(100))) {
            Err(Error::Timeout) if stop.load(Ordering::Relaxed) => return Ok(()),
            Err(Error::Timeout) => continue,
            event => event.map_err(failed_call("target"))?,
        };
        match event {
            CmEvent::ConnectRequest(request) => {
                let qp = side.create_qp()?;
                request
                    .accept(&qp, None, &ConnectOptions::default())
                    .map_err(failed_call("accept"))?;
            }
            CmEvent::Disconnected(info) | CmEvent::ConnectError(info) => {
                side.qps.remove(&info.qp_num);
            }
            _ => {}
        }
    }
}

/// Initiator thread: keeps `in_flight` connections in progress, closes each as soon as it is
/// established, and returns queue pairs per second at both ends.
fn initiate_connections(
    ctx: &Context,
    from: u32,
    to: SocketAddr,
    in_flight: u32,
    time: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<f64> {
    let mut side = ChurnEnd::new(ctx)?;
    let options = ConnectOptions {
        device: Some(from),
        ..ConnectOptions::default()
    };
    let begin = |side: &mut ChurnEnd| {
        let qp = side.create_qp()?;
        qp.connect(&side.cm, to, &options)
            .map_err(failed_call("connect"))
    };
    for _ in 0..in_flight {
        begin(&mut side)?;
    }
    let warm = Instant::now() + time / 10;
    let end = warm + time;
    let mut done = 0u64;
    while !side.qps.is_empty() {
        match side
            .cm
            .get_event(Some(STEP_TIMEOUT))
            .map_err(failed_call("initiator"))?
        {
            CmEvent::Established(info) => {
                if let Some(qp) = side.qps.get(&info.qp_num) {
                    qp.disconnect().map_err(failed_call("disconnect"))?;
                }
            }
            CmEvent::Disconnected(info) => {
                side.qps.remove(&info.qp_num);
                let now = Instant::now();
                if (warm..end).contains(&now) {
                    done += 1;
                }
                if now < end && !stop.load(Ordering::Relaxed) {
                    begin(&mut side)?;
                }
            }
            event => bail!("a connection failed: {event:?}"),
        }
    }
    Ok(2.0 * done as f64 / time.as_secs_f64())
}

/// Creates and destroys `count` queue pairs, with `alive` of them existing at a time.
pub fn create_and_destroy(ctx: &Context, count: u32, alive: u32) -> anyhow::Result<()> {
    let mut side = ChurnEnd::new(ctx)?;
    let mut order = std::collections::VecDeque::new();
    for _ in 0..count {
        order.push_back(side.create_qp()?.qp_num());
        if order.len() > alive as usize
            && let Some(first) = order.pop_front()
        {
            side.qps.remove(&first);
        }
    }
    Ok(())
}
