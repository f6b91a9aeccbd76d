//! How lines of the log look: for people as `tracing-subscriber` writes them, or as JSON.
use std::error::Error;
use std::fmt::{self, Debug, Write};

use serde_json::{Map, Value, json};
use tandem_proto::TraceContext;
use tandem_proto::trace::hex;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::fields::Fields;
use crate::traced;

/// `2026-11-28T03:40:00.123456Z  INFO request{trace_id="…" span_id="…"}: message key=value`. With the library's own
/// formatter the line that every request leaves took 24 thousand instructions, of 610 that the request took.
pub(crate) struct Text;

impl<S, N> FormatEvent<S, N> for Text
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = Line { ansi: out.has_ansi_escapes(), out, separator: "", failed: false };
        line.time();
        line.level(*event.metadata().level());
        if let Some(context) = traced::request() {
            line.request(context);
        }
        event.record(&mut line);
        line.put("\n");
        if line.failed { Err(fmt::Error) } else { Ok(()) }
    }
}

/// A line that is being written.
struct Line<'a> {
    out: Writer<'a>,
    ansi: bool,
    /// Before the next field.
    separator: &'static str,
    failed: bool,
}

const BOLD: &str = "1";
const DIM: &str = "2";
const ITALIC: &str = "3";

impl Line<'_> {
    fn put(&mut self, text: &str) {
        self.failed |= self.out.write_str(text).is_err();
    }

    fn put_all<const N: usize>(&mut self, texts: [&str; N]) {
        texts.into_iter().for_each(|text| self.put(text));
    }

    /// In a style of ANSI terminals, where there is one.
    fn styled(&mut self, style: &str, text: &str) {
        if self.ansi {
            self.put_all(["\x1b[", style, "m", text, "\x1b[0m"]);
        } else {
            self.put(text);
        }
    }

    fn time(&mut self) {
        if self.ansi {
            self.put("\x1b[2m");
        }
        self.failed |= SystemTime.format_time(&mut self.out).is_err();
        self.put(if self.ansi { "\x1b[0m " } else { " " });
    }

    fn level(&mut self, level: Level) {
        let (color, text) = match level {
            Level::ERROR => ("31", "ERROR"),
            Level::WARN => ("33", " WARN"),
            Level::INFO => ("32", " INFO"),
            Level::DEBUG => ("34", "DEBUG"),
            Level::TRACE => ("35", "TRACE"),
        };
        self.styled(color, text);
        self.put(" ");
    }

    fn request(&mut self, TraceContext { trace_id, span_id, .. }: TraceContext) {
        self.styled(BOLD, "request");
        self.styled(BOLD, "{");
        for (name, id) in [("trace_id", hex(&trace_id)), ("span_id", hex(&span_id))] {
            self.name(name);
            self.put_all(["\"", &id, "\""]);
            self.separator = " ";
        }
        self.separator = "";
        self.styled(BOLD, "}");
        self.styled(DIM, ":");
        self.put(" ");
    }

    /// A field, whose value `write` writes.
    fn field(&mut self, field: &Field, write: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        match field.name() {
            "message" => self.put(self.separator),
            // What the crate `log` says of its own lines.
            name if name.starts_with("log.") => return,
            name => self.name(name),
        }
        self.failed |= write(&mut self.out).is_err();
        self.separator = " ";
    }

    /// Begins a field.
    fn name(&mut self, name: &str) {
        self.put(self.separator);
        self.styled(ITALIC, name.strip_prefix("r#").unwrap_or(name));
        self.styled(DIM, "=");
    }
}

impl Visit for Line<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            // In quotes: as it is, or with its control characters escaped.
            _ if is_printable(value) && !value.contains(['"', '\\']) => {
                self.field(field, |out| ["\"", value, "\""].into_iter().try_for_each(|text| out.write_str(text)));
            }
            _ => self.record_debug(field, &value),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.field(field, |out| write!(out, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.field(field, |out| write!(out, "{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.field(field, |out| write!(out, "{value:?}"));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.field(field, |out| write!(Escaped(out), "{value:?}"));
    }
}

/// Printable ASCII, nothing else.
fn is_printable(text: &str) -> bool {
    text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// Leaves no character in a text by which it could do more to a terminal than be read.
struct Escaped<'a, 'b>(&'a mut Writer<'b>);

impl Write for Escaped<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if is_printable(text) {
            return self.0.write_str(text);
        }
        text.chars().try_for_each(|character| match character {
            '\n' | '\t' => self.0.write_char(character),
            _ if character.is_control() => write!(self.0, "{}", character.escape_default()),
            _ => self.0.write_char(character),
        })
    }
}

/// One object a line.
pub(crate) struct Json {
    pub(crate) service: &'static str,
}

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
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
        if let Some(TraceContext { trace_id, span_id, .. }) = traced::request() {
            line.insert("trace_id".to_owned(), json!(hex(&trace_id)));
            line.insert("span_id".to_owned(), json!(hex(&span_id)));
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

    use tracing_subscriber::fmt as library;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::fields::ACCESS;
    use crate::notes;
    use crate::traced::{Traced, in_request};

    const CONTEXT: TraceContext = TraceContext { trace_id: [0xab; 16], span_id: [0xcd; 8], sampled: true };

    #[derive(Default)]
    struct Lines(Mutex<Vec<u8>>);

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for &Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_of_a_request_names_its_trace_and_is_an_event_of_it() {
        let lines = Arc::<Lines>::default();
        let json = library::layer().with_writer(lines.clone()).event_format(Json { service: "tandem-test" });
        let subscriber = tracing_subscriber::registry().with(Traced).with(json);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("nobody's");
            let notes = notes::Notes::of(CONTEXT);
            in_request(CONTEXT, || {
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
        let told: Vec<Value> = lines.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((told.len(), &told[0]["message"], told[0].get("trace_id")), (3, &json!("nobody's"), None));
        let of_request = &told[1];
        assert_eq!(of_request["trace_id"], "ab".repeat(16));
        assert_eq!(of_request["span_id"], "cd".repeat(8));
        assert_eq!((&of_request["error"], &of_request["attempts"]), (&json!("no room"), &json!(2)));
        assert_eq!((&of_request["level"], &of_request["service"]), (&json!("WARN"), &json!("tandem-test")));
        assert_eq!(told[2]["target"], ACCESS);
    }

    /// Lines of all kinds; `within` a request where that is wanted.
    fn log_all(within: impl Fn(&dyn Fn())) {
        let (text, none) = ("a \"quoted\" text\n\u{1b}[2J", None::<f64>);
        let error = std::io::Error::other("no room");
        let all = || {
            tracing::info!(target: ACCESS, text, none, tokens = 7u32, below = -7, "request answered");
            tracing::error!(ms = 1.5, whole = 2.0, some = Some(0.25), flag = true, r#type = "x", "failed");
            tracing::warn!(%error, kind = ?error.kind(), "clock {} behind\n\u{7}\u{9b}3", "a minute");
            tracing::warn!(error = &error as &(dyn Error + 'static));
            tracing::debug!(text);
            tracing::trace!("naïve – 中");
        };
        all();
        within(&all);
    }

    #[test]
    fn lines_for_people_are_those_of_the_library() {
        for ansi in [false, true] {
            let (ours, theirs) = (Arc::<Lines>::default(), Arc::<Lines>::default());
            let base = || library::layer().with_ansi(ansi).with_target(false);
            let subscriber = tracing_subscriber::registry().with(base().with_writer(ours.clone()).event_format(Text));
            tracing::subscriber::with_default(subscriber, || log_all(|all| in_request(CONTEXT, all)));
            let subscriber = tracing_subscriber::registry().with(base().with_writer(theirs.clone()));
            tracing::subscriber::with_default(subscriber, || {
                log_all(|all| {
                    let (trace_id, span_id) = ("ab".repeat(16), "cd".repeat(8));
                    tracing::error_span!("request", trace_id, span_id).in_scope(all);
                });
            });
            // But for the time, and the ways to escape a control character.
            let cut = |lines: &Lines| {
                let text = lines.text().replace("\\x07", "\\u{7}").replace("\u{1b}[0m\u{1b}[3m", "\u{1b}[3m");
                let after_time = |line: &str| line.split_once("Z").map_or(line.to_owned(), |(_, rest)| rest.to_owned());
                text.lines().map(after_time).collect::<Vec<_>>()
            };
            assert_eq!(cut(&ours), cut(&theirs), "ansi: {ansi}");
            assert!(cut(&ours).len() >= 12);
        }
    }
}
