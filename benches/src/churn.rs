//! How fast queue pairs come and go: create, connect, disconnect, destroy; and whether the daemon
//! grows by it. Called by `siw-figures`.

use siw::{CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, Error, Pd, Qp, QpInit};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// No step takes longer; only a defect does.
const PATIENCE: Duration = Duration::from_secs(20);

/// One end: what queue pairs are made of.
struct Side {
    pd: Pd,
    cq: Cq,
    cm: CmChannel,
    qps: HashMap<u32, Qp>,
}

impl Side {
    fn new(ctx: &Context) -> Result<Side, String> {
        Ok(Side {
            pd: ctx.alloc_pd().map_err(told("protection domain"))?,
            cq: Cq::new(ctx, 64, None).map_err(told("completion queue"))?,
            cm: CmChannel::new(ctx).map_err(told("event channel"))?,
            qps: HashMap::new(),
        })
    }

    fn create(&mut self) -> Result<Qp, String> {
        let init = QpInit {
            max_send_wr: 4,
            max_recv_wr: 4,
            ..QpInit::default()
        };
        let qp = self
            .pd
            .create_qp(&self.cq, &self.cq, &init)
            .map_err(told("queue pair"))?;
        self.qps.insert(qp.qp_num(), qp.clone());
        Ok(qp)
    }
}

fn told(what: &'static str) -> impl Fn(Error) -> String {
    move |e| format!("{what}: {e}")
}

/// Queue pairs that were created, connected, closed and destroyed per second: two for each
/// connection, one at each end.
///
/// `in_flight` connections are on their way at a time. A context at each device, a thread for each.
pub fn queue_pairs_per_second(
    a: &Context,
    from: u32,
    b: &Context,
    to: SocketAddr,
    in_flight: u32,
    time: Duration,
) -> Result<f64, String> {
    let stop = AtomicBool::new(false);
    let mut target = Side::new(b)?;
    let listener =
        CmListener::new(&target.cm, None, to, in_flight.max(16), 0).map_err(told("listener"))?;
    let to = listener.local_addr();
    thread::scope(|s| {
        let answers = s.spawn(|| {
            let result = answer(&mut target, &stop);
            stop.store(true, Ordering::Relaxed);
            result
        });
        let rate = initiate(a, from, to, in_flight, time, &stop);
        stop.store(true, Ordering::Relaxed);
        answers
            .join()
            .unwrap_or_else(|_| Err("the target panicked".into()))
            .and(rate)
    })
}

/// The target: a queue pair for every request.
fn answer(side: &mut Side, stop: &AtomicBool) -> Result<(), String> {
    loop {
        let event = match side.cm.get_event(Some(Duration::from_millis(100))) {
            Err(Error::Timeout) if stop.load(Ordering::Relaxed) => return Ok(()),
            Err(Error::Timeout) => continue,
            e => e.map_err(told("target"))?,
        };
        match event {
            CmEvent::ConnectRequest(r) => {
                let qp = side.create()?;
                r.accept(&qp, None, &ConnectOptions::default())
                    .map_err(told("accept"))?;
            }
            CmEvent::Disconnected(i) | CmEvent::ConnectError(i) => {
                side.qps.remove(&i.qp_num);
            }
            _ => {}
        }
    }
}

fn initiate(
    ctx: &Context,
    from: u32,
    to: SocketAddr,
    in_flight: u32,
    time: Duration,
    stop: &AtomicBool,
) -> Result<f64, String> {
    let mut side = Side::new(ctx)?;
    let opt = ConnectOptions {
        device: Some(from),
        ..ConnectOptions::default()
    };
    let begin = |side: &mut Side| {
        let qp = side.create()?;
        qp.connect(&side.cm, to, &opt).map_err(told("connect"))
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
            .get_event(Some(PATIENCE))
            .map_err(told("initiator"))?
        {
            CmEvent::Established(i) => {
                if let Some(qp) = side.qps.get(&i.qp_num) {
                    qp.disconnect().map_err(told("disconnect"))?;
                }
            }
            CmEvent::Disconnected(i) => {
                side.qps.remove(&i.qp_num);
                let now = Instant::now();
                if (warm..end).contains(&now) {
                    done += 1;
                }
                if now < end && !stop.load(Ordering::Relaxed) {
                    begin(&mut side)?;
                }
            }
            e => return Err(format!("a connection failed: {e:?}")),
        }
    }
    Ok(2.0 * done as f64 / time.as_secs_f64())
}

/// Creates and destroys `count` queue pairs, `alive` of them at a time.
pub fn create_and_destroy(ctx: &Context, count: u32, alive: u32) -> Result<(), String> {
    let mut side = Side::new(ctx)?;
    let mut order = std::collections::VecDeque::new();
    for _ in 0..count {
        order.push_back(side.create()?.qp_num());
        if order.len() > alive as usize
            && let Some(first) = order.pop_front()
        {
            side.qps.remove(&first);
        }
    }
    Ok(())
}
