//! `rping` over siwd, with the same protocol on the wire: the other end may be librdmacm's rping.
//!
//! ```text
//! client                                   server
//! SEND  {source addr, rkey, size}  ----->
//!                                  <-----  RDMA READ of the ping data
//!                                  <-----  SEND "go ahead"
//! SEND  {sink addr, rkey, size}    ----->
//!                                  <-----  RDMA WRITE of what was read
//!                                  <-----  SEND "go ahead"
//! compare, repeat; disconnect
//! ```
//! `protocol` has the messages, `session` the steps on one connection; this file has the command
//! line and the two roles.
#![forbid(unsafe_code)]

mod protocol;
mod session;

use clap::Parser;
use protocol::{MAX_SIZE, MIN_SIZE};
use session::{Session, Stop};
use siw::{
    Access, CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionRequest, Context, Error,
    QpState,
};
use std::fmt;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// RDMA ping-pong that speaks the protocol of rping.
#[derive(Debug, Parser)]
#[command(name = "siw-ping", version, disable_version_flag = true)]
struct PingArgs {
    /// Run as server
    #[arg(short, conflicts_with = "client")]
    server: bool,
    /// Run as client
    #[arg(short, required_unless_present = "server")]
    client: bool,
    /// Address to connect to, or to listen on
    #[arg(short, value_name = "ADDR", required_unless_present = "server")]
    addr: Option<IpAddr>,
    /// Port
    #[arg(short, default_value_t = 7174)]
    port: u16,
    /// Number of pings; 0 for no limit
    #[arg(short = 'C', default_value_t = 0, value_name = "COUNT")]
    count: u64,
    /// Bytes of ping data
    #[arg(short = 'S', default_value_t = 64, value_name = "SIZE",
          value_parser = clap::value_parser!(u32).range(MIN_SIZE as i64..=MAX_SIZE as i64))]
    size: u32,
    /// Print the ping data
    #[arg(short)]
    verbose: bool,
    /// Compare the data that comes back
    #[arg(short = 'V')]
    validate: bool,
    /// Print every step
    #[arg(short)]
    debug: bool,
    /// Server: continue after the first client, and serve several at once
    #[arg(short = 'P')]
    persistent: bool,
    /// Source address of the client
    #[arg(short = 'I', value_name = "ADDR")]
    source: Option<IpAddr>,
    /// Device; routed by address without it
    #[arg(long)]
    device: Option<String>,
    /// Control socket of siwd
    #[arg(long)]
    socket: Option<PathBuf>,
    /// MPA CRC, instead of the device's setting
    #[arg(long, value_parser = ["on", "off"])]
    crc: Option<String>,
    /// Seconds to wait for the peer in each step
    #[arg(long, default_value_t = 30, value_name = "SECS")]
    timeout: u64,
    /// Print one JSON line with the result
    #[arg(long)]
    json: bool,
    // -V is rping's "validate".
    /// Print the version
    #[arg(long, action = clap::ArgAction::Version)]
    version: Option<bool>,
}

fn connect_options(args: &PingArgs, ctx: &Context) -> Result<ConnectOptions<'static>, Error> {
    let device = args
        .device
        .as_deref()
        .map(|name| ctx.device_by_name(name))
        .transpose()?;
    Ok(ConnectOptions {
        device: device.map(|device| device.index),
        src: args.source.map(|ip| SocketAddr::new(ip, 0)),
        ord: 1,
        ird: 1,
        crc: args.crc.as_deref().map(|crc| crc == "on"),
        timeout: Some(Duration::from_secs(args.timeout)),
        ..ConnectOptions::default()
    })
}

fn run_client(args: &PingArgs, ctx: &Context) -> Result<u64, Stop> {
    let ip = args.addr.ok_or(Stop::Failed("-a is missing".into()))?;
    let mut session = Session::new(ctx, args, args.size as usize)?;
    let source = session.qp.pd().alloc_mr(
        args.size as usize,
        Access::REMOTE_READ | Access::LOCAL_WRITE,
    )?;
    let options = connect_options(args, ctx)?;
    session
        .qp
        .connect(&session.cm, SocketAddr::new(ip, args.port), &options)?;
    match session
        .cm
        .get_event(Some(session.timeout + Duration::from_secs(2)))?
    {
        CmEvent::Established(info) => session.print_established(&info),
        CmEvent::Rejected(info)
        | CmEvent::Unreachable(info)
        | CmEvent::ConnectError(info)
        | CmEvent::Disconnected(info) => {
            return Err(Stop::Failed(format!(
                "cannot connect to {ip}: {}",
                info.reason
            )));
        }
        other => return Err(Stop::Failed(format!("unexpected event {other:?}"))),
    }
    let mut done = 0;
    while args.count == 0 || done < args.count {
        session.run_ping(&source, done, args)?;
        done += 1;
    }
    session.close_connection()?;
    Ok(done)
}

fn serve_request(args: &PingArgs, ctx: &Context, request: ConnectionRequest) -> Result<u64, Stop> {
    let mut session = Session::new(ctx, args, MAX_SIZE as usize)?;
    let options = connect_options(args, ctx)?;
    session.print_step(format_args!(
        "request from {:?}",
        request.connection_info().peer
    ));
    request
        .accept(&session.qp, Some(&session.cm), &options)
        .map_err(siw::Error::from)?;
    match session.serve_pings(args.verbose) {
        (pings, Stop::Closed) => {
            // Answer the peer's close, unless the daemon has done so.
            if session.qp.state() == Some(QpState::Rts) {
                let _ = session.qp.disconnect();
            }
            Ok(pings)
        }
        (_, failed) => Err(failed),
    }
}

fn run_server(args: &PingArgs, ctx: &Context) -> Result<u64, Stop> {
    let cm = CmChannel::new(ctx)?;
    let device = connect_options(args, ctx)?.device;
    let ip = args.addr.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let listener = CmListener::new(&cm, device, SocketAddr::new(ip, args.port), 3, 0)?;
    eprintln!("siw-ping: listening on {}", listener.local_addr());
    std::thread::scope(|threads| {
        loop {
            let request = match cm.get_event(None)? {
                CmEvent::ConnectRequest(request) => request,
                CmEvent::RequestCancelled { .. } => continue,
                CmEvent::DeviceRemoval { .. } => {
                    return Err(Stop::Failed("the device was removed".into()));
                }
                _ => continue,
            };
            if !args.persistent {
                return serve_request(args, ctx, request);
            }
            threads.spawn(move || print_result(args, serve_request(args, ctx, request)));
        }
    })
}

/// Prints a line to standard output. If its reader is gone (`siw-ping ... | head -1`), ends the
/// program quietly with exit code 0; with 1 after other errors.
fn print_line(text: fmt::Arguments<'_>) {
    let mut output = std::io::stdout().lock();
    let result = writeln!(output, "{text}").and_then(|()| output.flush());
    if let Err(error) = result {
        std::process::exit((error.kind() != ErrorKind::BrokenPipe).into());
    }
}

/// Prints the outcome of a role; returns whether it succeeded.
fn print_result(args: &PingArgs, result: Result<u64, Stop>) -> bool {
    let (pings, error) = match result {
        Ok(pings) => (pings, None),
        Err(Stop::Closed) => (0, Some("the peer closed the connection early".to_owned())),
        Err(Stop::Failed(reason)) => (0, Some(reason)),
    };
    if let Some(error) = &error {
        eprintln!("siw-ping: {error}");
    }
    if args.json {
        let role = if args.server { "server" } else { "client" };
        let result = serde_json::json!({"role": role, "pings": pings, "size": args.size,
                                        "ok": error.is_none(), "error": error});
        print_line(format_args!("{result}"));
    }
    error.is_none()
}

fn main() -> ExitCode {
    let args = PingArgs::parse();
    let result = Context::open(args.socket.as_deref())
        .map_err(Stop::from)
        .and_then(|ctx| {
            if args.server {
                run_server(&args, &ctx)
            } else {
                run_client(&args, &ctx)
            }
        });
    if print_result(&args, result) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_that_of_rping() {
        let args = PingArgs::try_parse_from([
            "siw-ping", "-c", "-a", "10.0.0.1", "-p", "9", "-C", "3", "-v", "-V", "-S", "1000",
            "-d",
        ])
        .unwrap();
        assert!(args.client && args.verbose && args.validate && args.debug);
        assert_eq!((args.count, args.size, args.port), (3, 1000, 9));
        assert!(PingArgs::try_parse_from(["siw-ping", "-s"]).unwrap().server);
        assert!(PingArgs::try_parse_from(["siw-ping", "-c"]).is_err());
        assert!(PingArgs::try_parse_from(["siw-ping", "-c", "-s", "-a", "::1"]).is_err());
        assert!(PingArgs::try_parse_from(["siw-ping", "-s", "-S", "3"]).is_err());
    }
}
