//! Counters of workers and clients as JSON.

use siw_shm::control::messages as m;

use super::requests::*;
use super::{Control, Pending};
use crate::ids::ClientId;
use crate::worker::messages::Command;

impl Control {
    pub(super) fn stats_request(&mut self, id: ClientId, seq: u32, offset: u32) -> Outcome {
        if offset > 0 {
            let c = self.client(id)?;
            let text = c.stats_text.clone();
            return send::<m::ReadStats>(c, seq, &stats_part(&text, offset));
        }
        let token = self.next_token();
        let left = self.config.mailboxes.len();
        for w in 0..left {
            self.command(w, Command::Stats { token });
        }
        Ok(Done::Wait(Pending::Stats { token, left }))
    }

    pub(super) fn finish_stats(&mut self, id: ClientId) {
        let text = self.stats_json();
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(w) = c.waiting.take() {
            let _ = c
                .conn
                .send_reply::<m::ReadStats>(w.seq, &stats_part(&text, 0), &[]);
            c.stats_text = text;
        }
        self.answered(id);
    }

    pub(super) fn stats_json(&self) -> String {
        let workers: Vec<serde_json::Value> = self
            .stats
            .iter()
            .map(|s| {
                let devices: Vec<serde_json::Value> = s
                    .devices
                    .iter()
                    .map(|(d, rx, tx, tcp)| {
                        serde_json::json!({
                            "device": self.config.devices.get(*d).map_or("", |v| v.name.as_str()),
                            "rx_frames": rx,
                            "tx_frames": tx,
                            "tcp": map(tcp.iter()),
                            "mib": map(tcp.mib_counters()),
                        })
                    })
                    .collect();
                serde_json::json!({
                    "queue_pairs": s.queue_pairs,
                    "iterations": s.iterations,
                    "sleeps": s.sleeps,
                    "frames_forwarded": s.forward.forwarded,
                    "frames_taken": s.forward.taken,
                    "frames_copied": s.forward.copied,
                    "frames_sent_for_others": s.forward.sent_for_others,
                    "forward_drops": s.forward.dropped,
                    "placed_out_of_order": s.placed_out_of_order,
                    "buffers": s.buffers,
                    "buffers_free": s.buffers_free,
                    "devices": devices,
                })
            })
            .collect();
        let clients: Vec<serde_json::Value> = self
            .clients
            .values()
            .map(|c| {
                serde_json::json!({
                    "id": c.id.0,
                    "pid": c.pid,
                    "name": c.name,
                    "queue_pairs": c.qps.len(),
                    "completion_queues": c.cqs.len(),
                    "memory_regions": c.mrs.len(),
                    "arena_bytes": c.memory,
                })
            })
            .collect();
        serde_json::json!({
            "workers": workers,
            "total": self.totals(),
            "clients": clients,
            "listeners": self.listeners.len(),
        })
        .to_string()
    }

    /// Each device's counters, all workers together.
    fn totals(&self) -> Vec<serde_json::Value> {
        let mut sums: Vec<(u64, u64, siw_tcp::StackStats)> = Vec::new();
        sums.resize_with(self.config.devices.len(), Default::default);
        for (d, rx, tx, tcp) in self.stats.iter().flat_map(|s| &s.devices) {
            if let Some(sum) = sums.get_mut(*d) {
                sum.0 += rx;
                sum.1 += tx;
                sum.2.merge(tcp);
            }
        }
        let devices = self.config.devices.iter().zip(sums);
        devices
            .map(|(d, (rx, tx, tcp))| {
                serde_json::json!({
                    "device": d.name.as_str(),
                    "rx_frames": rx,
                    "tx_frames": tx,
                    "mib": map(tcp.mib_counters()),
                })
            })
            .collect()
    }
}

fn map<'a>(
    counters: impl Iterator<Item = (&'a str, u64)>,
) -> serde_json::Map<String, serde_json::Value> {
    counters.map(|(k, v)| (k.to_owned(), v.into())).collect()
}

fn stats_part(text: &str, offset: u32) -> m::StatsReply {
    let mut reply = m::StatsReply {
        total: text.len() as u32,
        len: 0,
        text: [0; 4096],
    };
    let rest = text.as_bytes().get(offset as usize..).unwrap_or(&[]);
    let n = rest.len().min(reply.text.len());
    reply.text[..n].copy_from_slice(&rest[..n]);
    reply.len = n as u32;
    reply
}
