//! The system calls of a script: immediate and blocking ones.

use crate::calls::{self, CallResult};
use crate::errno::Errno;
use crate::run::{BlockedCall, Runner, format_seconds};
use crate::script::{EventTime, LineError, SystemCall};

impl Runner {
    /// Makes a call at the time `from`, or registers one that must block until its second time.
    pub(super) fn make_call(
        &mut self,
        call: &SystemCall,
        line: usize,
        from: u64,
    ) -> Result<(), LineError> {
        if let Some(until) = call.until {
            let until = match until {
                EventTime::Absolute(time) => time,
                EventTime::Relative(time) => from + time,
                _ => {
                    return Err(LineError::new(
                        line,
                        "a call ends at one time, not in a range",
                    ));
                }
            };
            if until < from {
                return Err(LineError::new(line, "the call ends before it begins"));
            }
            self.blocked.push(BlockedCall {
                line,
                call: call.clone(),
                until,
            });
            return Ok(());
        }
        match calls::make_call(&mut self.host, &mut self.streams, call)
            .map_err(|message| LineError::new(line, message))?
        {
            result if result_matches(call, &result) => Ok(()),
            result => Err(LineError::new(line, describe_result(call, &result))),
        }
    }

    /// Retries the blocked calls. A call that returns must do so at its second time and with the result of
    /// the script; one that blocks beyond that time is an error.
    pub(super) fn retry_blocked_calls(&mut self) -> Result<(), LineError> {
        let now = self.now();
        let mut index = 0;
        while index < self.blocked.len() {
            let blocked = &self.blocked[index];
            let (line, until) = (blocked.line, blocked.until);
            let result = calls::make_call(&mut self.host, &mut self.streams, &blocked.call)
                .map_err(|message| LineError::new(line, message))?;
            let still_blocks = matches!(
                result,
                CallResult::Error(Errno::EAGAIN | Errno::EINPROGRESS | Errno::EALREADY)
            );
            if still_blocks {
                if now > until + self.tolerance {
                    return Err(LineError::new(
                        line,
                        format!(
                            "{} still blocks at {}; it was to end at {}",
                            blocked.call.name,
                            format_seconds(now),
                            format_seconds(until)
                        ),
                    ));
                }
                index += 1;
                continue;
            }
            let blocked = self.blocked.remove(index);
            if !result_matches(&blocked.call, &result) {
                return Err(LineError::new(
                    line,
                    describe_result(&blocked.call, &result),
                ));
            }
            if now.abs_diff(until) > self.tolerance {
                return Err(LineError::new(
                    line,
                    format!(
                        "{} ended at {}; expected at {}",
                        blocked.call.name,
                        format_seconds(now),
                        format_seconds(until)
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Returns whether a call returned the result in the script.
fn result_matches(call: &SystemCall, result: &CallResult) -> bool {
    match (call.result, result) {
        (None, _) => true,
        (Some(-1), CallResult::Error(errno)) => call.errno.as_deref().is_none_or(|name| {
            let is_alias = name == "EWOULDBLOCK" && *errno == Errno::EAGAIN;
            name == errno.name() || is_alias
        }),
        (Some(value), CallResult::Value(result)) => value == *result,
        _ => false,
    }
}

/// Formats the message about a call with an unexpected result.
fn describe_result(call: &SystemCall, result: &CallResult) -> String {
    let expected = match (call.result, &call.errno) {
        (Some(value), Some(errno)) => format!("{value} {errno}"),
        (Some(value), None) => value.to_string(),
        (None, _) => "anything".into(),
    };
    let actual = match result {
        CallResult::Value(value) => value.to_string(),
        CallResult::Error(errno) => format!("-1 {errno}"),
    };
    format!("{} returned {actual}, not {expected}", call.name)
}
