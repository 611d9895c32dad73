//! Streams beside the standard opening: those that the agent opens, repeated attempts, crowds.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Clients, Found, Script, Target};
use crate::agent::STREAM_PORT;
use crate::case::{Alternative, Start, Value};
use crate::stream::{Role, Stream};
use crate::tcp::{SegmentOptions, SynOptions, Tcp};
use crate::wire::REQUEST_KEY;

/// Wait for a connection of a crowd: a target whose backlog is full may be silent.
const CROWDED: Duration = Duration::from_secs(1);

impl Target {
    /// Accepts a further connection of the client that connected to this port of the lab.
    fn accept_again(&self, port: u16, seed: u64, patience: Duration) -> Result<Tcp> {
        let received = match &self.clients {
            Clients::Operator { syns, .. } => {
                let syns = syns.lock();
                syns.recv_timeout(patience)
            }
            Clients::Started(_) => {
                let syns = self.station.listen(port);
                let received = syns.recv_timeout(patience);
                self.station.unlisten(port);
                received
            }
        };
        let received = received.context("no further connection of the target")?;
        let isn = (seed >> 32) as u32;
        let syn = SynOptions::default();
        Tcp::accept(&self.station, &received, isn, &syn, self.patience)
    }
}

impl Script<'_> {
    /// Lets the agent connect to the lab, with the case's regions and receives, and accepts its TCP.
    pub(super) fn begin_calling(&mut self) -> Result<()> {
        self.take_agent()?;
        let station = self.target.station.clone();
        let port = station.port();
        let syns = station.listen(port);
        let called = self.call_lab(port);
        let received = called.map(|()| syns.recv_timeout(self.target.patience));
        station.unlisten(port);
        let received = received?.context("the agent does not connect")?;
        let syn = self.syn()?;
        let patience = self.target.patience;
        let tcp = Tcp::accept(&station, &received, self.seed as u32, &syn, patience)?;
        let mut stream = Stream::new(tcp, Role::Initiator, self.seed, patience);
        stream.region = self.region;
        self.stream = Some(stream);
        Ok(())
    }

    /// Connects to the agent, which listens for connections in streaming mode; it makes a queue pair, the
    /// case's regions and receives.
    pub(super) fn begin_streaming(&mut self) -> Result<()> {
        self.take_agent()?;
        self.on = 1;
        let listen = serde_json::json!({ "do": "listen", "port": STREAM_PORT, "streaming": 1 });
        self.ask(&listen)?;
        let syn = self.syn()?;
        let (target, seed) = (self.target, self.seed);
        let (tcp, running) = target.tcp(Role::Responder, STREAM_PORT, seed, &syn)?;
        self.running = running;
        let role = self.case.role;
        self.stream = Some(Stream::new(tcp, role, seed, target.patience));
        self.await_request()?;
        let prepare = self.words("prepare", &self.case.preparing)?;
        self.ask(&prepare)?;
        self.register()
    }

    /// Lets the agent open a connection to the lab in streaming mode.
    pub(super) fn begin_opened(&mut self) -> Result<()> {
        self.take_agent()?;
        let station = self.target.station.clone();
        let port = station.port();
        let syns = station.listen(port);
        let opened = self.open_to_lab(port);
        let received = opened.map(|()| syns.recv_timeout(self.target.patience));
        station.unlisten(port);
        let received = received?.context("the agent does not connect")?;
        let syn = self.syn()?;
        let (seed, patience) = (self.seed, self.target.patience);
        let tcp = Tcp::accept(&station, &received, seed as u32, &syn, patience)?;
        self.stream = Some(Stream::new(tcp, self.case.role, seed, patience));
        self.ask(&serde_json::json!({ "do": "open", "ms": 3000 }))?;
        Ok(())
    }

    fn open_to_lab(&mut self, port: u16) -> Result<()> {
        let address = self.target.station.ip.to_string();
        let call = serde_json::json!({
            "do": "call", "address": address, "port": port, "streaming": 1,
        });
        self.ask(&call)?;
        self.register()?;
        self.ask(&serde_json::json!({ "do": "open" }))?;
        Ok(())
    }

    /// The next octets of TCP, which are no MPA: `data=`.
    pub(super) fn want_octets(&mut self, wanted: &Alternative) -> Result<bool> {
        let comparisons = wanted.comparisons.iter();
        let fields: BTreeMap<String, Value> = comparisons
            .map(|comparison| (comparison.field.clone(), comparison.value.clone()))
            .collect();
        let data = self.octets(&fields, "data")?;
        let data = data.context("want octets without data=")?;
        let until = Instant::now() + wanted.within.unwrap_or(self.target.patience);
        let tcp = &mut self.stream()?.tcp;
        while tcp.data.len() < data.len() && tcp.ending.is_none() && tcp.pump(until) {}
        let count = tcp.data.len().min(data.len());
        let found: Vec<u8> = tcp.data.drain(..count).collect();
        tcp.note(false, format!("{count} octets that are no frame"));
        let differs = (0..data.len()).find(|at| found.get(*at) != data.get(*at));
        let actual = match differs {
            None => "octets as wanted".to_owned(),
            Some(at) if at == count => format!("{count} of {} octets", data.len()),
            Some(at) => format!("octet {at} is {:#04x}", found[at]),
        };
        self.decide(wanted, differs.is_none(), &actual)
    }

    fn call_lab(&mut self, port: u16) -> Result<()> {
        let address = self.target.station.ip.to_string();
        self.ask(&serde_json::json!({ "do": "call", "address": address, "port": port }))?;
        self.register()?;
        let case = self.case;
        self.command("connect", &case.call)
    }

    /// Options of the SYN that the case wants.
    pub(super) fn syn(&mut self) -> Result<SynOptions> {
        let fields = self.case.syn.clone();
        self.syn_with(&fields)
    }

    pub(super) fn syn_with(&mut self, fields: &BTreeMap<String, Value>) -> Result<SynOptions> {
        Ok(SynOptions {
            isn: self.get(fields, "isn")?.map(|v| v as u32),
            mss: self.get(fields, "mss")?.map(|v| v as u16),
            with_ack: Vec::new(),
            window: self.get(fields, "window")?.map(|v| v as u16),
            scale: self.get(fields, "scale")?.map(|v| v as u8),
            has_sack: self.get(fields, "sack")? == Some(1),
            has_timestamps: self.get(fields, "ts")? == Some(1),
            port: None,
            path: None,
        })
    }

    /// Accepts a further connection in place of the present one; `want connected` tells whether it came.
    pub(super) fn reaccept(&mut self) -> Result<()> {
        let (seed, patience) = (self.seed, self.target.patience);
        let tcp = &mut self.stream()?.tcp;
        let port = tcp.port();
        let mut ladder = std::mem::take(&mut tcp.ladder);
        self.outcome.ladder.append(&mut ladder);
        // Its end comes first: the target may use its port again.
        self.stream = None;
        match self.target.accept_again(port, seed, patience) {
            Ok(tcp) => {
                self.stream = Some(Stream::new(tcp, Role::Initiator, seed, patience));
                self.connect_error = None;
            }
            Err(error) => self.connect_error = Some(format!("{error:#}")),
        }
        Ok(())
    }

    /// Opens further connections, each with a Request that gets no attention.
    pub(super) fn crowd(&mut self, count: u64) -> Result<()> {
        let target = self.target;
        let port = if self.case.needs_agent() {
            STREAM_PORT
        } else {
            target.port
        };
        let request = self.opening()?.frame(REQUEST_KEY).encode();
        let to = SocketAddr::new(target.ip, port);
        let syn = SynOptions::default();
        for number in 0..count {
            let isn = super::mix(self.seed, &format!("crowd {number}")) as u32;
            let tcp = Tcp::connect(&target.station, to, target.mac, isn, &syn, CROWDED);
            let Ok(mut tcp) = tcp else {
                let note = format!("the target takes {number} connections, and no more");
                self.outcome.notes.push(note);
                break;
            };
            tcp.send(&request, SegmentOptions::default());
            self.crowd.push(tcp);
        }
        Ok(())
    }

    /// Whether every connection of the crowd ends.
    pub(super) fn want_ended(&mut self, wanted: &Alternative) -> Result<bool> {
        let until = Instant::now() + wanted.within.unwrap_or(self.target.patience);
        for tcp in &mut self.crowd {
            while tcp.ending.is_none() && tcp.pump(until) {}
        }
        let soon = Instant::now();
        for tcp in &mut self.crowd {
            while tcp.ending.is_none() && tcp.pump(soon) {}
        }
        let ended = self.crowd.iter().filter(|tcp| tcp.ending.is_some()).count();
        let actual = format!("{ended} of {} connections ended", self.crowd.len());
        let is_good = ended == self.crowd.len();
        self.decide(wanted, is_good, &actual)
    }

    /// The next event of the agent's connection manager: `name=` request, established, rejected, ... or none;
    /// `private=`, `ird=`, `ord=`, `status=`.
    pub(super) fn want_event(&mut self, alternatives: &[Alternative]) -> Result<bool> {
        const PREFIX: &str = "RDMA_CM_EVENT_";
        let first = &alternatives[0];
        let until = Instant::now() + first.within.unwrap_or(self.target.patience);
        let mut told = self.told.take();
        let answer = loop {
            if let Some(told) = told.take() {
                break told;
            }
            let notes = self.outcome.notes.len();
            let answer = self.ask(&serde_json::json!({ "do": "event", "ms": 20 }))?;
            if answer["event"] != "none" || Instant::now() >= until {
                break answer;
            }
            self.outcome.notes.truncate(notes);
            let soon = Instant::now() + Duration::from_millis(5);
            if let Some(stream) = &mut self.stream {
                while stream.tcp.pump(soon) {}
            }
        };
        let name = answer["event"].as_str().unwrap_or_default();
        let name = name.strip_prefix(PREFIX).unwrap_or(name).to_lowercase();
        let digits = answer["private"].as_str().unwrap_or_default();
        let (ird, ord) = (&answer["ird"], &answer["ord"]);
        let actual = format!("event {name}, IRD {ird}, ORD {ord}, private data {digits}");
        for alternative in alternatives {
            let mut is_good = true;
            for comparison in &alternative.comparisons {
                is_good &= match comparison.field.as_str() {
                    "name" => comparison.value == Value::Word(name.clone()),
                    "private" => self.holds(comparison, &Found::Octets(octets(digits)))?,
                    field @ ("ird" | "ord") => {
                        let found = answer[field].as_u64().unwrap_or(0);
                        self.holds(comparison, &Found::Number(found))?
                    }
                    other => bail!("{other} is no property of an event: name, private, ird, ord"),
                };
            }
            if is_good {
                return self.decide(alternative, true, &actual);
            }
        }
        self.decide(first, false, &actual)
    }

    /// Waits for the Request at the agent, unless the case does that by itself.
    pub(super) fn await_request(&mut self) -> Result<()> {
        let until = Instant::now() + self.target.patience;
        let command = serde_json::json!({ "do": "await", "ms": 50, "try": 1 });
        let mut told = loop {
            let notes = self.outcome.notes.len();
            let told = self.ask(&command)?;
            if told["done"] == 1 {
                break told;
            }
            if Instant::now() > until {
                bail!("the agent has no Request: {}", told["reason"]);
            }
            self.outcome.notes.truncate(notes);
            // A lost Request is sent again.
            let soon = Instant::now() + Duration::from_millis(5);
            if let Some(stream) = &mut self.stream {
                while stream.tcp.pump(soon) {}
            }
        };
        told["event"] = "request".into();
        if self.case.start == Start::Asked {
            self.told = Some(told);
        }
        Ok(())
    }
}

/// Octets of pairs of hexadecimal digits.
pub(super) fn octets(digits: &str) -> Vec<u8> {
    (0..digits.len() / 2)
        .filter_map(|at| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok())
        .collect()
}
