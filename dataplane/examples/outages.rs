//! Sends messages between two devices of a running siwd, one after the other, and prints each
//! asynchronous event, the end of the connection, and the result of connecting again. Used by the
//! PCI lab, which pulls cables and NICs during the run.
//!
//! `outages SOCKET FROM-DEVICE TO-ADDRESS`. Prints `moved` after the first message and `moved
//! again` after the first one that follows an outage; exits with 0 after the connection ended.

mod sides;

use std::time::Duration;

use siw::{
    AsyncEventKind, CmChannel, CmEvent, CmListener, Context, RecvWr, SendData, SendWr, Wc, WcStatus,
};

use sides::{Contexts, Outcome, PATIENCE, Side, connect_sides};

/// Interval between polls for completions and events, and between messages.
const PAUSE: Duration = Duration::from_millis(5);

/// Prints all pending events and returns the kind of the last one.
fn print_events(context: &Context) -> Option<AsyncEventKind> {
    let mut last = None;
    while let Ok(event) = context.get_async_event(Some(Duration::ZERO)) {
        let kind = event
            .kind
            .map_or("unknown".into(), |kind| format!("{kind:?}"));
        println!("event {kind} {} {}", event.object, event.reason);
        last = event.kind;
    }
    last
}

/// Moves one message. Returns whether it completed without error, and whether events arrived
/// meanwhile.
fn move_message(context: &Context, from: &Side, to: &Side) -> Outcome<(bool, bool)> {
    let sges = [to.memory.sge(0, 1000)];
    let receive = RecvWr {
        wr_id: 1,
        sges: &sges,
    };
    let sges = [from.memory.sge(0, 1000)];
    let send = SendWr::send(2, SendData::Sges(&sges));
    if to.qp.post_recv(&[receive]).is_err() || from.qp.post_send(&[send]).is_err() {
        return Ok((false, false));
    }
    let mut had_outage = false;
    for side in [from, to] {
        let mut wc = [Wc::default()];
        while side.cq.poll(&mut wc)? == 0 {
            had_outage |= print_events(context).is_some();
            std::thread::sleep(PAUSE);
        }
        if wc[0].status != WcStatus::SUCCESS {
            println!("a message failed: {:?}", wc[0].status);
            return Ok((false, had_outage));
        }
    }
    Ok((true, had_outage))
}

fn run(arguments: &[String]) -> Outcome<()> {
    let [socket, device, target] = arguments else {
        return Err("usage: outages SOCKET FROM-DEVICE TO-ADDRESS".into());
    };
    let contexts = Contexts::open(socket, device, target)?;
    let context = &contexts.from;
    let (from, to) = (Side::new(context, 4096)?, Side::new(&contexts.to, 4096)?);
    // This listener is bound to the device, so it gets an event when the device is removed.
    let watcher = CmChannel::new(context)?;
    let device = Some(contexts.device);
    let _listener = CmListener::new(&watcher, device, "0.0.0.0:0".parse()?, 8, 0)?;
    let address = connect_sides(&from, &to, &contexts)?;
    let (mut is_first, mut had_outage) = (true, false);
    loop {
        had_outage |= print_events(context).is_some();
        let (moved, outage) = move_message(context, &from, &to)?;
        had_outage |= outage;
        if !moved {
            break;
        }
        if is_first || had_outage {
            println!("moved{}", if is_first { "" } else { " again" });
        }
        (is_first, had_outage) = (false, false);
        std::thread::sleep(PAUSE);
    }
    match from.cm.get_event(Some(PATIENCE))? {
        CmEvent::Disconnected(_) => println!("disconnected"),
        other => return Err(format!("instead of the end: {other:?}").into()),
    }
    match watcher.get_event(Some(PATIENCE))? {
        CmEvent::DeviceRemoval { device, .. } => println!("listener: device {device} was removed"),
        other => return Err(format!("instead of the end of a listener: {other:?}").into()),
    }
    print_events(context);
    let fresh = Side::new(context, 4096)?;
    match fresh.qp.connect(&fresh.cm, address, &contexts.options()) {
        Err(error) => println!("refused: {error}"),
        Ok(()) => return Err("a new connection starts on a removed device".into()),
    }
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("outages: {error}");
        std::process::exit(1);
    }
}
