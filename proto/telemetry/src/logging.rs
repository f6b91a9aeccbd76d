//! The log: lines on stderr, chosen by [`LogFilter`], for people or as JSON. What is logged while a request is worked
//! on ([`request_span`]) carries its trace and span id, becomes an event of that span ([`notes`](crate::notes)), and
//! goes to the collector where there is one. Nobody who logs waits for whoever reads stderr (`stderr`).
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{self, Display};
use std::io::{IsTerminal, Write};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tandem_proto::TraceContext;
use tracing::{Event, Span, Subscriber};
use tracing_subscriber::fmt as lines;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

use crate::fields::Fields;
use crate::log_filter::LogFilter;
use crate::stderr::Lines;
use crate::traced::{Traced, ids_of};

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

/// How long the end of a process waits for whoever reads its log.
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
        let _ = self.lines.write_all(format!("error: {error}\n").as_bytes());
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // There is nobody to tell.
        let _ = self.lines.flush_within(LAST_LINES);
    }
}

/// Starts logging for this process. What cannot be written (a full disk) is lost, and the process goes on. A second
/// call keeps the first set-up, which is what tests want.
pub fn init_logging(service: &'static str, filter: &LogFilter, format: LogFormat) -> Log {
    let writer = LINES.get_or_init(|| Lines::to_stderr(lost_notice(format), service)).clone();
    let lines = lines::layer()
        .with_writer(writer.clone())
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // It would say on standard error that nothing can be written there, and panic because that fails.
        .log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
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
        let _ = lines.clone().write_all(format!("thread {thread}: {panic}{trace}\n").as_bytes());
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

/// The span within which a request's lines are logged: `context` is the span that they belong to. It is there whatever
/// the filter says of lines.
pub fn request_span(context: TraceContext) -> Span {
    let (trace_id, span_id) = (context.trace_id_hex(), tandem_proto::trace::hex(&context.span_id));
    tracing::error_span!(target: "tandem", "request", trace_id, span_id)
}

/// Writes lines as JSON.
struct Json {
    service: &'static str,
}

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Fields { message, rest } = fields;
        let mut line = Map::new();
        line.insert("timestamp".to_owned(), Value::String(timestamp));
        line.insert("level".to_owned(), json!(event.metadata().level().as_str()));
        line.insert("target".to_owned(), json!(event.metadata().target()));
        line.insert("service".to_owned(), json!(self.service));
        line.insert("message".to_owned(), Value::String(message));
        if let Some(TraceContext { trace_id, span_id, .. }) = context.lookup_current().and_then(|span| ids_of(&span)) {
            line.insert("trace_id".to_owned(), json!(tandem_proto::trace::hex(&trace_id)));
            line.insert("span_id".to_owned(), json!(tandem_proto::trace::hex(&span_id)));
        }
        for (key, value) in rest {
            // What stands above is not for a field to say.
            line.entry(key).or_insert(value);
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;
    use crate::fields::ACCESS;
    use crate::notes;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn a_line_of_a_request_names_its_trace_and_is_an_event_of_it() {
        let lines = Lines::default();
        let json = lines::layer().with_writer(lines.clone()).event_format(Json { service: "tandem-test" });
        let subscriber = tracing_subscriber::registry().with(Traced).with(json);
        let context = TraceContext { trace_id: [0xab; 16], span_id: [0xcd; 8], sampled: true };
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("nobody's");
            let notes = notes::Notes::of(context);
            request_span(context).in_scope(|| {
                let error = "no room";
                tracing::warn!(error, attempts = 2, target_ms = 1.5, "attempt failed");
                tracing::info!(target: ACCESS, "answered");
            });
            let told = notes.take();
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!((told[0].message.as_str(), told[0].level), ("attempt failed", "WARN"));
            assert_eq!(told[0].fields[0], ("error", "no room".into()));
            assert!(notes.take().is_empty());
        });
        let written = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let told: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((told.len(), &told[0]["message"], told[0].get("trace_id")), (3, &json!("nobody's"), None));
        let of_request = &told[1];
        assert_eq!(of_request["trace_id"], "ab".repeat(16));
        assert_eq!(of_request["span_id"], "cd".repeat(8));
        assert_eq!((&of_request["error"], &of_request["attempts"]), (&json!("no room"), &json!(2)));
        assert_eq!((&of_request["level"], &of_request["service"]), (&json!("WARN"), &json!("tandem-test")));
        assert_eq!(told[2]["target"], ACCESS);
    }

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
