//! The agent on the target (`agent/siw-lab-agent.c`): a JSON object a line, each answered by one.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Version of the agent that this lab speaks with.
const VERSION: u64 = 2;

/// Port of the target on which the agent accepts streams of the lab.
pub const STREAM_PORT: u16 = 7175;

pub struct Agent {
    connection: BufReader<TcpStream>,
    address: SocketAddr,
    /// Byte order of the target.
    pub is_little_endian: bool,
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
        // An agent that hangs is an error, not the end of the run.
        stream.set_read_timeout(Some(patience.max(Duration::from_secs(20))))?;
        stream.set_nodelay(true)?;
        let mut agent = Agent {
            connection: BufReader::new(stream),
            address,
            is_little_endian: false,
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
        let mut line = command.to_string();
        line.push('\n');
        let context = || format!("the agent at {} is gone", self.address);
        self.connection
            .get_mut()
            .write_all(line.as_bytes())
            .with_context(context)?;
        let mut answer = String::new();
        let length = self.connection.read_line(&mut answer);
        if length.with_context(|| format!("the agent at {} does not answer", self.address))? == 0 {
            bail!("the agent at {} is gone", self.address);
        }
        let answer: Value = serde_json::from_str(&answer)
            .with_context(|| format!("the agent's answer is no JSON: {answer}"))?;
        match answer["error"].as_str() {
            Some(error) => bail!("agent: {error}"),
            None => Ok(answer),
        }
    }
}
