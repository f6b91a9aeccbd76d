//! The log: lines on stderr, chosen by [`LogFilter`], for people or as JSON. What is logged while a request is worked
//! on ([`within_request`](crate::within_request)) carries its trace and span id, becomes an event of that span
//! ([`notes`](crate::notes)), and goes to the collector where there is one. Nobody who logs waits for whoever reads
//! stderr (`stderr`).
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::json;
use tracing_subscriber::fmt as lines;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::lines::{Json, Text};
use crate::log_filter::LogFilter;
use crate::stderr::Lines;
use crate::traced::Traced;

/// How lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line: `timestamp`, `level`, `target`, `service`, `message`, `trace_id` and `span_id` of a
    /// request, and the line's own fields.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("text or json".to_owned()),
        }
    }
}

impl Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Json { "json" } else { "text" })
    }
}

/// How long a process waits for whoever reads its log, at its end and before it says that it is ready.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The log of this process.
static LINES: OnceLock<Lines> = OnceLock::new();

/// Lines of the log that nobody could read: standard error was not read in time.
pub fn lost_lines() -> u64 {
    LINES.get().map_or(0, Lines::lost)
}

/// The log. Dropped at the end of the process, it waits, within bounds, until all lines are written.
#[derive(Debug)]
#[must_use = "dropped, it waits for the last lines"]
pub struct Log {
    lines: Lines,
}

impl Log {
    /// The last word of a process that fails, after all that it logged.
    pub fn fatal(&mut self, error: impl Display) {
        let _ = self.lines.urgent().write_all(format!("error: {error}\n").as_bytes());
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // There is nobody to tell.
        let _ = self.lines.flush_within(LAST_LINES);
    }
}

/// Writes, to stdout, the line that whoever started this process waits for. What was logged before stands before it.
///
/// # Errors
/// Standard output takes nothing.
pub fn say_ready(line: &str) -> io::Result<()> {
    if let Some(lines) = LINES.get() {
        // A reader of the log that does not read holds up no start.
        let _ = lines.flush_within(LAST_LINES);
    }
    writeln!(io::stdout(), "{line}")
}

/// Starts logging for this process. What cannot be written (a full disk) is lost, and the process goes on. A second
/// call keeps the first set-up, which is what tests want.
pub fn init_logging(service: &'static str, filter: &LogFilter, format: LogFormat) -> Log {
    let writer = LINES.get_or_init(|| Lines::to_stderr(lost_notice(format), service)).clone();
    let lines = lines::layer()
        .with_writer(writer.clone())
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        // It would say on standard error that nothing can be written there, and panic because that fails.
        .log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => lines.event_format(Text).boxed(),
        LogFormat::Json => lines.event_format(Json { service }).boxed(),
    };
    let started = tracing_subscriber::registry().with(filter.install()).with(Traced).with(lines).try_init();
    if started.is_ok() {
        panic_into(writer.clone());
        tracing::debug!(service, "logging started");
    }
    Log { lines: writer }
}

/// What a panic says goes the way of the log: a task that panics must not wait for whoever reads.
fn panic_into(lines: Lines) {
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let (thread, trace) = (thread.name().unwrap_or("without a name"), Backtrace::capture());
        let trace = if trace.status() == BacktraceStatus::Captured { format!("\n{trace}") } else { String::new() };
        let _ = lines.urgent().write_all(format!("thread {thread}: {panic}{trace}\n").as_bytes());
    }));
}

/// The line that stands for those that are missing. It cannot be logged as others are: there was no room.
fn lost_notice(format: LogFormat) -> fn(u64, &'static str) -> String {
    fn timestamp() -> String {
        let mut text = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut text));
        text
    }
    const WHY: &str = "lines of the log were lost: standard error was not read in time";
    match format {
        LogFormat::Text => |lost, _| format!("{}  WARN {WHY} lost={lost}\n", timestamp()),
        LogFormat::Json => |lost, service| {
            let line = json!({
                "timestamp": timestamp(), "level": "WARN", "target": "tandem_telemetry", "service": service,
                "message": WHY, "lost": lost,
            });
            format!("{line}\n")
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn missing_lines_are_told_in_the_form_of_the_others() {
        let json: Value = serde_json::from_str(&lost_notice(LogFormat::Json)(7, "tandem-test")).unwrap();
        assert_eq!(
            (&json["lost"], &json["level"], &json["service"]),
            (&json!(7), &json!("WARN"), &json!("tandem-test"))
        );
        let text = lost_notice(LogFormat::Text)(7, "tandem-test");
        assert!(text.contains(" WARN lines of the log were lost") && text.ends_with(" lost=7\n"), "{text}");
    }

    #[test]
    fn formats_have_names() {
        for format in [LogFormat::Text, LogFormat::Json] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("xml".parse::<LogFormat>().is_err());
    }
}
