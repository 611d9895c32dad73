//! Values of command line options: bytes and seconds.

use anyhow::{anyhow, bail};
use std::time::Duration;

/// Parses a number of bytes: `64`, `4K`, `1M`, `1MiB`.
pub fn parse_size(text: &str) -> anyhow::Result<u32> {
    let digits = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let shift = match &text[digits.len()..].to_ascii_lowercase()[..] {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => bail!("write bytes as 64, 4K, 1M or 1G"),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| anyhow!("write bytes as 64, 4K, 1M or 1G"))?;
    number
        .checked_shl(shift)
        .filter(|bytes| bytes >> shift == number)
        .and_then(|bytes| u32::try_from(bytes).ok())
        .ok_or_else(|| anyhow!("a message has less than 4 GiB"))
}

/// Parses a number of seconds.
pub fn parse_seconds(text: &str) -> anyhow::Result<Duration> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(anyhow!("write seconds from 0.01 to 86400")),
    }
}
