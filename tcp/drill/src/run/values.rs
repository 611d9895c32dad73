//! The names available to assertions of scripts.

use std::time::Duration;

use siw_tcp::TcpState;

use crate::run::Runner;

impl Runner {
    /// Returns the value of a name in an assertion: a TCP state, `isn_N`, `connections`, a counter of
    /// [`siw_tcp::StackStats`], or a property of the newest connection. `None`: the name is unknown.
    pub(super) fn named_value(&self, name: &str) -> Option<i64> {
        const STATES: [(&str, TcpState); 10] = [
            ("SYN_SENT", TcpState::SynSent),
            ("SYN_RECEIVED", TcpState::SynReceived),
            ("ESTABLISHED", TcpState::Established),
            ("FIN_WAIT_1", TcpState::FinWait1),
            ("FIN_WAIT_2", TcpState::FinWait2),
            ("CLOSE_WAIT", TcpState::CloseWait),
            ("CLOSING", TcpState::Closing),
            ("LAST_ACK", TcpState::LastAck),
            ("TIME_WAIT", TcpState::TimeWait),
            ("CLOSED", TcpState::Closed),
        ];
        if let Some((_, state)) = STATES.iter().find(|(index, _)| *index == name) {
            return Some(*state as i64);
        }
        if let Some(index) = name.strip_prefix("isn_") {
            let index: usize = index.parse().ok()?;
            return self
                .isns
                .get(index.checked_sub(1)?)
                .map(|value| i64::from(*value));
        }
        if name == "connections" {
            return Some(self.host.connection_count() as i64);
        }
        let stats = self.host.stats();
        if let Some((_, value)) = stats.iter().find(|(index, _)| *index == name) {
            return Some(value as i64);
        }
        let conn = self.host.newest_connection()?;
        let mss = (conn.effective_mss as i64).max(1);
        let micros = |duration: Duration| duration.as_micros() as i64;
        Some(match name {
            "state" => conn.state as i64,
            "mss" | "tcpi_snd_mss" => conn.effective_mss as i64,
            "cwnd" => conn.cwnd.into(),
            "ssthresh" => conn.ssthresh.into(),
            "send_window" => conn.send_window.into(),
            "in_flight" => conn.in_flight.into(),
            "unsent" => conn.unsent.into(),
            "readable" => conn.readable as i64,
            "srtt_us" | "tcpi_rtt" => conn.srtt.map_or(0, micros),
            "rto_us" | "tcpi_rto" => micros(conn.rto),
            "retransmits" | "tcpi_total_retrans" => conn.retransmissions.total().into(),
            "timeouts_of_connection" => conn.timeouts.into(),
            "peer_fin" => conn.peer_fin.into(),
            "tcpi_snd_cwnd" => i64::from(conn.cwnd) / mss,
            "tcpi_snd_ssthresh" => i64::from(conn.ssthresh) / mss,
            "tcpi_unacked" => (i64::from(conn.in_flight) + mss - 1) / mss,
            _ => return None,
        })
    }
}
