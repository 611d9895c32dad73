//! Refused and lost connections have a named reason, with its count, and words in the log.

use std::collections::BTreeMap;

use siw::{CmChannel, CmEvent, CmListener, ConnectOptions};

use super::siwctl::{shown, shown_json};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair};

/// Counts of the reasons that have occurred.
pub fn drops(daemon: &Daemon) -> BTreeMap<String, u64> {
    let rows = shown_json(daemon, &["show", "drops"]);
    let counts = rows.iter().map(|row| {
        assert!(!row["meaning"].as_str().unwrap().is_empty(), "{row}");
        let reason = row["reason"].as_str().unwrap().to_owned();
        (reason, row["count"].as_u64().unwrap())
    });
    let mut sums = BTreeMap::new();
    for (reason, count) in counts.filter(|(_, count)| *count > 0) {
        *sums.entry(reason).or_default() += count;
    }
    sums
}

fn next(channel: &CmChannel) -> CmEvent {
    channel.get_event(Some(PATIENCE)).unwrap()
}

#[test]
fn refused_and_lost_connections_are_counted_by_reason() {
    let daemon = Daemon::loopback();
    assert_eq!(
        shown(&daemon, &["show", "drops"]),
        "nothing was dropped or refused\n"
    );
    // Nothing listens.
    let end = End::new(&daemon.context(), 64);
    let nobody = "10.77.0.2:9".parse().unwrap();
    let options = ConnectOptions::default();
    end.qp.connect(&end.cm, nobody, &options).unwrap();
    assert!(matches!(next(&end.cm), CmEvent::Rejected(_)));
    let counts = drops(&daemon);
    assert_eq!(
        (counts["CONNECT_REFUSED"], counts["SiwNoPorts"]),
        (1, 1),
        "{counts:?}"
    );
    // The application rejects.
    let server = CmChannel::new(&end.ctx).unwrap();
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&server, None, any, 8, 0).unwrap();
    let address = listener.local_addr();
    end.qp.connect(&end.cm, address, &options).unwrap();
    let CmEvent::ConnectRequest(request) = next(&server) else {
        panic!("no request");
    };
    request.reject(&[]).unwrap();
    assert!(matches!(next(&end.cm), CmEvent::Rejected(_)));
    // A connection is lost.
    let (a, b) = pair(&daemon, 64);
    shown(&daemon, &["qp", "kill", &a.qp.qp_num().to_string()]);
    assert!(matches!(next(&b.cm), CmEvent::Disconnected(_)));
    let counts = drops(&daemon);
    for (reason, count) in [
        ("CONNECT_REJECTED", 1),
        ("APPLICATION_REJECT", 1),
        ("PEER_RESET", 1),
    ] {
        assert_eq!(counts.get(reason), Some(&count), "{reason}: {counts:?}");
    }
    let text = shown(&daemon, &["show", "drops"]);
    assert!(text.contains("APPLICATION_REJECT"), "{text}");
    let metrics = shown(&daemon, &["metrics"]);
    assert!(
        metrics.contains("siwd_drops_total{reason=\"CONNECT_REFUSED\"} 1"),
        "{metrics}"
    );
}

/// A request that siwd refuses by itself: the log names the addresses and the reason.
#[test]
fn a_request_that_the_device_refuses_is_logged_in_words() {
    let config = LOOPBACK
        .replacen(
            "name = \"siw0\"",
            "name = \"siw0\"\nmpa = { markers = \"request\" }",
            1,
        )
        .replacen(
            "name = \"siw1\"",
            "name = \"siw1\"\nmpa = { markers = \"never\" }",
            1,
        );
    let daemon = Daemon::start(&config, &[]);
    let end = End::new(&daemon.context(), 64);
    let server = CmChannel::new(&end.ctx).unwrap();
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&server, None, any, 8, 0).unwrap();
    let address = listener.local_addr();
    let options = ConnectOptions {
        src: Some("10.77.0.1:0".parse().unwrap()),
        ..Default::default()
    };
    end.qp.connect(&end.cm, address, &options).unwrap();
    let refused = next(&end.cm);
    assert!(matches!(refused, CmEvent::Rejected(_)), "{refused:?}");
    let counts = drops(&daemon);
    assert_eq!(counts.get("MPA_MARKERS"), Some(&1), "{counts:?}");
    drop((listener, server, end));
    let log = daemon.stop_and_read_log();
    let line = log
        .lines()
        .find(|line| line.contains("connection request refused"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    assert!(
        line.contains("markers") && line.contains(&address.to_string()),
        "{line}"
    );
}
