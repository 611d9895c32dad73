//! Next hops and source addresses of packets.

use siw_net::{Instant, Route, VecBuf};
use siw_tcp::{Stack, StackConfig, StackError};
use siw_tcp_sim::{Pattern, SimNet, VecSink, host_config};

fn route(to: &str, via: &str) -> Route {
    Route {
        to: to.parse().unwrap(),
        via: via.parse().unwrap(),
    }
}

/// Returns the neighbour that a connect to `to` solicits, and the source address of the solicitation.
fn asked(config: &StackConfig, to: &str) -> Option<(String, String)> {
    let now = Instant::from_millis(1);
    let mut stack = Stack::<VecBuf, Pattern>::new(config.clone(), now).unwrap();
    let to = to.parse().unwrap();
    match stack.connect(now, None, None, to, 0) {
        Err(StackError::NoRoute(_)) => return None,
        result => result.unwrap(),
    };
    let mut sink = VecSink::default();
    stack.poll(now, &mut sink);
    stack.poll(now, &mut sink);
    let (frame, _) = sink.frames.pop_front().expect("a solicitation");
    Some(if frame[12..14] == [8, 6] {
        let ip = |at: usize| {
            format!(
                "{}.{}.{}.{}",
                frame[at],
                frame[at + 1],
                frame[at + 2],
                frame[at + 3]
            )
        };
        (ip(38), ip(28))
    } else {
        let ip = |at: usize| {
            let octets: [u8; 16] = frame[at..at + 16].try_into().unwrap();
            std::net::Ipv6Addr::from(octets).to_string()
        };
        (ip(62), ip(22))
    })
}

fn pair(source: &str, next_hop: &str) -> Option<(String, String)> {
    Some((source.into(), next_hop.into()))
}

/// RFC 1812 section 5.2.4.3.
#[test]
fn the_longest_prefix_decides_the_route_and_source() {
    let mut config = host_config(0);
    config.net.addresses.push("172.16.0.1/16".parse().unwrap());
    config.net.gateway_v4 = Some("10.0.0.254".parse().unwrap());
    config.net.routes = vec![
        route("192.0.2.0/24", "10.0.0.253"),
        route("192.0.2.128/25", "172.16.0.9"),
        route("192.0.2.200/32", "10.0.0.7"),
        route("172.16.5.0/24", "172.16.0.8"),
        route("10.0.0.0/24", "172.16.0.8"),
        route("2001:db8::/32", "fd00::9"),
        route("2001:db8:1::/48", "fe80::1"),
    ];
    for (to, via, from) in [
        ("198.51.100.1:1", "10.0.0.254", "10.0.0.1"),
        ("192.0.2.1:1", "10.0.0.253", "10.0.0.1"),
        ("192.0.2.129:1", "172.16.0.9", "172.16.0.1"),
        ("192.0.2.200:1", "10.0.0.7", "10.0.0.1"),
        ("172.16.9.9:1", "172.16.9.9", "172.16.0.1"),
        ("172.16.5.5:1", "172.16.0.8", "172.16.0.1"),
        // The link takes precedence over a route of the same length.
        ("10.0.0.77:1", "10.0.0.77", "10.0.0.1"),
        ("[2001:db8::1]:1", "fd00::9", "fd00::1"),
        ("[2001:db8:1::1]:1", "fe80::1", "fd00::1"),
    ] {
        assert_eq!(asked(&config, to), pair(via, from), "{to}");
    }
    assert_eq!(asked(&config, "[2001:db9::1]:1"), None);
}

#[test]
fn a_route_that_cannot_work_is_refused() {
    for (to, via, why) in [
        (
            "192.0.2.0/24",
            "203.0.113.1",
            "no address of this device is on its link",
        ),
        ("192.0.2.0/24", "fd00::9", "family"),
    ] {
        let mut config = host_config(0);
        config.net.routes = vec![route(to, via)];
        let stack = Stack::<VecBuf, Pattern>::new(config, Instant(1))
            .err()
            .unwrap();
        assert!(stack.to_string().contains(why), "{stack}");
    }
}

#[test]
fn two_routed_networks_talk_through_each_other() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1]
        .net
        .addresses
        .push("192.0.2.7/32".parse().unwrap());
    configs[0].net.routes = vec![route("192.0.2.0/24", "10.0.0.2")];
    let link = siw_tcp_sim::Impairment::perfect(std::time::Duration::from_micros(50));
    let mut net = SimNet::<Pattern>::new(1, configs, [link; 2]);
    let now = net.now;
    net.hosts[1]
        .listen(Some("192.0.2.7".parse().unwrap()), 80, 4, 0)
        .unwrap();
    let client = net.hosts[0]
        .connect(now, None, None, "192.0.2.7:80".parse().unwrap(), 0)
        .unwrap();
    let up = |net: &mut SimNet<Pattern>| {
        net.hosts[0]
            .tcp_info(client)
            .is_some_and(|info| info.state == siw_tcp::TcpState::Established)
    };
    assert!(net.run(std::time::Duration::from_millis(10), up));
}

/// Routes learned from the kernel rank below the configuration; neighbours known to it are not solicited.
#[test]
fn learned_routes_and_neighbours_are_used() {
    let now = Instant::from_millis(1);
    let mut config = host_config(0);
    config.net.routes = vec![route("192.0.2.0/24", "10.0.0.250")];
    let mut stack = Stack::<VecBuf, Pattern>::new(config, now).unwrap();
    let mut sink = VecSink::default();
    let far: std::net::SocketAddr = "198.51.100.1:80".parse().unwrap();
    let unreachable = stack.connect(now, None, None, far, 0).unwrap_err();
    assert_eq!(unreachable, StackError::NoRoute(far.ip()));
    stack.set_learned_routes(siw_net::LearnedRoutes {
        gateway_v4: Some("10.0.0.254".parse().unwrap()),
        gateway_v6: None,
        routes: vec![
            route("192.0.2.0/24", "10.0.0.251"),
            route("203.0.113.0/24", "10.0.0.252"),
        ],
        on_link: vec!["100.64.0.0/16".parse().unwrap()],
    });
    // By the configuration, by a learned route, by a learned link, by the learned gateway.
    let hops = ["10.0.0.250", "10.0.0.252", "100.64.0.9", "10.0.0.254"];
    let remotes = ["192.0.2.1", "203.0.113.1", "100.64.0.9", "198.51.100.1"];
    for (number, hop) in hops.iter().enumerate() {
        let mac = [2, 0, 0, 0, 7, number as u8];
        stack.learn_neighbour(now, parse_ip(hop), Some(mac), number == 0);
        let remote = std::net::SocketAddr::new(parse_ip(remotes[number]), 80);
        stack.connect(now, None, None, remote, 0).unwrap();
        stack.poll(now, &mut sink);
        let (frame, _) = sink.frames.pop_front().expect("a SYN");
        assert_eq!(
            (&frame[..6], &frame[12..14]),
            (&mac[..], &[8, 0][..]),
            "{hop}"
        );
        assert!(sink.frames.is_empty(), "nobody is asked");
    }
    // A connection waits for this neighbour, and sends as soon as it is learned.
    let waited: std::net::SocketAddr = "10.0.0.77:80".parse().unwrap();
    stack.connect(now, None, None, waited, 0).unwrap();
    stack.poll(now, &mut sink);
    stack.poll(now, &mut sink);
    assert_eq!(sink.frames.pop_front().unwrap().0[12..14], [8, 6]);
    stack.learn_neighbour(now, waited.ip(), Some([2, 9, 9, 9, 9, 9]), false);
    stack.poll(now, &mut sink);
    assert_eq!(sink.frames.pop_front().unwrap().0[..6], [2, 9, 9, 9, 9, 9]);
    // A permanent entry is not confirmed at any age; an entry that the kernel removes is solicited.
    let later = now + std::time::Duration::from_secs(3600);
    let permanent = "192.0.2.9:80".parse().unwrap();
    let asked = |stack: &mut Stack<VecBuf, Pattern>| {
        let mut sink = VecSink::default();
        stack.poll(later, &mut sink);
        stack.connect(later, None, None, permanent, 0).unwrap();
        stack.poll(later, &mut sink);
        stack.poll(later, &mut sink);
        let questions = sink.frames.iter();
        questions
            .filter(|(frame, _)| frame[12..14] == [8, 6] && frame[38..42] == [10, 0, 0, 250])
            .count()
    };
    assert_eq!(asked(&mut stack), 0);
    stack.learn_neighbour(later, parse_ip(hops[0]), None, false);
    assert_eq!(asked(&mut stack), 1);
}

fn parse_ip(text: &str) -> std::net::IpAddr {
    text.parse().unwrap()
}

/// Connections that timed out without a route, or through another router, send as soon as a route is
/// there. The daemon repeats the routes when a link is up again.
#[test]
fn data_that_waits_is_sent_when_a_route_is_back() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1]
        .net
        .addresses
        .push("192.0.2.7/32".parse().unwrap());
    let link = siw_tcp_sim::Impairment::perfect(std::time::Duration::from_micros(50));
    let mut net = SimNet::<Pattern>::new(1, configs, [link; 2]);
    let learned = |via: Option<&str>| siw_net::LearnedRoutes {
        routes: via
            .map(|via| route("192.0.2.0/24", via))
            .into_iter()
            .collect(),
        ..siw_net::LearnedRoutes::default()
    };
    let (now, ms) = (net.now, std::time::Duration::from_millis);
    let shared = Some("192.0.2.7".parse().unwrap());
    net.hosts[1].listen(shared, 80, 4, 0).unwrap();
    net.hosts[0].set_learned_routes(learned(Some("10.0.0.2")));
    let to = "192.0.2.7:80".parse().unwrap();
    let client = net.hosts[0].connect(now, None, None, to, 0).unwrap();
    net.run(ms(10), |_| false);
    let server = net.hosts[1].next_event().unwrap().0;
    // `None`: no route. 10.0.0.9: a router that does not exist.
    for away in [None, Some("10.0.0.9")] {
        net.hosts[0].set_learned_routes(learned(away));
        let record = Pattern { salt: 0, start: 0 };
        net.hosts[0].push_record(client, 3, record, true).unwrap();
        net.flush(0, client);
        net.run(ms(15_000), |_| false);
        assert_eq!(net.hosts[1].receive_queue(server).unwrap().len_bytes(), 0);
        net.hosts[0].set_learned_routes(learned(Some("10.0.0.2")));
        net.run(ms(5), |_| false);
        assert_eq!(
            siw_tcp_sim::read_all(&mut net.hosts[1], server).len(),
            3,
            "{away:?}"
        );
    }
}
