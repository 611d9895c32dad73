//! The agent on the target (`agent/siw-lab-agent.c`): a JSON object a line, each answered by one.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Version of the agent that this lab speaks with.
const VERSION: u64 = 2;

/// Port of the target on which the agent accepts streams of the lab.
pub const STREAM_PORT: u16 = 7175;

/// The target refuses a call of the agent with EOPNOTSUPP.
#[derive(Debug, thiserror::Error)]
#[error("agent: {0}")]
pub struct Unsupported(String);

pub struct Agent {
    connection: BufReader<TcpStream>,
    address: SocketAddr,
    /// Byte order of the target.
    pub is_little_endian: bool,
    patience: Duration,
    /// Beginning of an answer whose end has not come yet.
    partial: Vec<u8>,
    /// Commands whose answers have not come. Each answer but that to the latest command is discarded: the
    /// case that wanted it has ended.
    unanswered: usize,
}

impl Agent {
    /// Connects to an agent, which may be starting.
    pub fn connect(address: SocketAddr, patience: Duration) -> Result<Agent> {
        let deadline = Instant::now() + patience;
        let stream = loop {
            match TcpStream::connect_timeout(&address, patience) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!("no agent at {address}: is siw-lab-agent running there?")
                    });
                }
            }
        };
        stream.set_nodelay(true)?;
        let mut agent = Agent {
            connection: BufReader::new(stream),
            address,
            is_little_endian: false,
            // An agent that hangs is an error, not the end of the run.
            patience: patience.max(Duration::from_secs(20)),
            partial: Vec::new(),
            unanswered: 0,
        };
        let caps = agent.ask(&serde_json::json!({ "do": "caps" }))?;
        if caps["version"].as_u64() != Some(VERSION) {
            bail!(
                "the agent at {address} has version {}, this lab speaks with version {VERSION}: copy siw-lab-agent.c again",
                caps["version"]
            );
        }
        if caps["devices"].as_u64() == Some(0) {
            bail!("the agent at {address} finds no RDMA device");
        }
        agent.is_little_endian = caps["little"].as_u64() == Some(1);
        Ok(agent)
    }

    /// Sends a command; returns the fields of the answer.
    pub fn ask(&mut self, command: &Value) -> Result<Value> {
        self.tell(command)?;
        let answer = self.answer_within(self.patience)?;
        answer.with_context(|| format!("the agent at {} does not answer", self.address))
    }

    /// Ends the program that holds the device; its parent starts it again.
    pub fn kill(&mut self) -> Result<()> {
        self.tell(&serde_json::json!({ "do": "kill" }))?;
        if let Ok(answer) = self.answer_within(self.patience) {
            bail!("the agent at {} does not end: {answer:?}", self.address);
        }
        self.reconnect()
    }

    /// Connects again, after the agent or its machine has been started again.
    pub fn reconnect(&mut self) -> Result<()> {
        *self = Agent::connect(self.address, self.patience)?;
        Ok(())
    }

    fn tell(&mut self, command: &Value) -> Result<()> {
        let mut line = command.to_string();
        line.push('\n');
        let context = || format!("the agent at {} is gone", self.address);
        self.connection
            .get_mut()
            .write_all(line.as_bytes())
            .with_context(context)?;
        self.unanswered += 1;
        Ok(())
    }

    /// The latest command gets a second answer when it has ended.
    pub fn expect_another(&mut self) {
        self.unanswered += 1;
    }

    /// The answer to the latest command; `None` if it does not come in time.
    pub fn answer_within(&mut self, patience: Duration) -> Result<Option<Value>> {
        let line = loop {
            let Some(line) = self.read_line(patience)? else {
                return Ok(None);
            };
            self.unanswered = self.unanswered.saturating_sub(1);
            if self.unanswered == 0 {
                break line;
            }
        };
        let answer: Value = serde_json::from_slice(&line).with_context(|| {
            let line = String::from_utf8_lossy(&line);
            format!("the agent's answer is no JSON: {line}")
        })?;
        match answer["error"].as_str() {
            Some(error) if answer["unsupported"] == true => {
                Err(Unsupported(error.to_owned()).into())
            }
            Some(error) => bail!("agent: {error}"),
            None => Ok(Some(answer)),
        }
    }

    /// The next line of the agent; `None` if it does not come in time.
    fn read_line(&mut self, patience: Duration) -> Result<Option<Vec<u8>>> {
        let timeout = patience.max(Duration::from_millis(1));
        self.connection.get_mut().set_read_timeout(Some(timeout))?;
        match self.connection.read_until(b'\n', &mut self.partial) {
            Ok(_) if self.partial.ends_with(b"\n") => Ok(Some(std::mem::take(&mut self.partial))),
            Ok(_) => bail!("the agent at {} is gone", self.address),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => {
                Err(error).with_context(|| format!("the agent at {} is gone", self.address))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn answers_belong_to_their_commands_and_tell_what_is_unsupported() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (release, released) = mpsc::channel::<()>();
        let target = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut answers = stream;
            lines.next();
            writeln!(answers, "{{\"version\":{VERSION},\"devices\":1}}").unwrap();
            lines.next();
            released.recv().unwrap();
            // Late, and an error that nobody waits for any more.
            writeln!(answers, "{{\"error\":\"late\"}}").unwrap();
            lines.next();
            writeln!(answers, "{{\"ok\":true,\"number\":2}}").unwrap();
            lines.next();
            writeln!(
                answers,
                "{{\"error\":\"ibv_alloc_mw\",\"unsupported\":true}}"
            )
            .unwrap();
        });
        let mut agent = Agent::connect(address, Duration::from_secs(10)).unwrap();
        agent.tell(&serde_json::json!({ "do": "serve" })).unwrap();
        assert!(
            agent
                .answer_within(Duration::from_millis(1))
                .unwrap()
                .is_none()
        );
        release.send(()).unwrap();
        let answer = agent.ask(&serde_json::json!({ "do": "forget" })).unwrap();
        assert_eq!(answer["number"], 2);
        let refusal = agent.ask(&serde_json::json!({ "do": "bind" })).unwrap_err();
        assert!(refusal.context("a step").is::<Unsupported>());
        target.join().unwrap();
    }
}
