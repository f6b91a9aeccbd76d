//! The line on the terminal while a run goes on. Counts; knows nothing of what the numbers mean.
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tandem_client::terminal::write_error;
use tokio::task::AbortHandle;

use super::record::{Outcome, Record};

/// How often the line is drawn.
const REDRAW: Duration = Duration::from_millis(200);
/// Of the bar.
const WIDTH: usize = 20;

/// Counts of the interval that runs.
#[derive(Default)]
pub struct Progress {
    sent: AtomicU64,
    ended: AtomicU64,
    troubled: AtomicU64,
    tokens: AtomicU64,
    interval: Mutex<Option<Running>>,
}

struct Running {
    title: String,
    began: Instant,
    seconds: f64,
}

/// Draws until it is dropped.
pub struct Line {
    drawing: Option<AbortHandle>,
}

impl Progress {
    /// A new interval, expected to take so long.
    pub fn begin(&self, title: String, seconds: f64) {
        for count in [&self.sent, &self.ended, &self.troubled, &self.tokens] {
            count.store(0, Ordering::Relaxed);
        }
        let running = Running { title, began: Instant::now(), seconds };
        *self.interval.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }

    /// One more request.
    pub fn sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// One of them is over.
    pub fn ended(&self, record: &Record) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.troubled.fetch_add(u64::from(record.outcome != Outcome::Ok), Ordering::Relaxed);
        let tokens = record.chunks.iter().map(|(_, tokens)| u64::from(*tokens)).sum();
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Draws on standard error where that is a terminal.
    pub fn draw(self: &Arc<Self>) -> Line {
        let progress = Arc::clone(self);
        let drawing = std::io::stderr().is_terminal().then(|| {
            let draw = async move {
                let mut ticks = tokio::time::interval(REDRAW);
                loop {
                    ticks.tick().await;
                    write_error(format_args!("\r\x1b[K{}", progress.text()));
                }
            };
            tokio::spawn(draw).abort_handle()
        });
        Line { drawing }
    }

    fn text(&self) -> String {
        let interval = self.interval.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Running { title, began, seconds }) = &*interval else { return String::new() };
        let passed = began.elapsed().as_secs_f64();
        let full = if *seconds > 0.0 { ((passed / seconds).min(1.0) * WIDTH as f64) as usize } else { WIDTH };
        let bar = format!("{}{}", "#".repeat(full), ".".repeat(WIDTH - full));
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (sent, ended) = (count(&self.sent), count(&self.ended));
        format!(
            "{title} [{bar}] {passed:.0}/{seconds:.0} s · {ended} of {sent} answered · {} not well · {} tokens",
            count(&self.troubled),
            count(&self.tokens),
        )
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(drawing) = &self.drawing {
            drawing.abort();
            write_error(format_args!("\r\x1b[K"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_far_it_is() {
        let progress = Progress::default();
        assert_eq!(progress.text(), "");
        progress.begin("A rate 3".into(), 1e9);
        progress.sent();
        progress.sent();
        let text = progress.text();
        assert!(text.contains("A rate 3 [....................] 0/1000000000 s · 0 of 2 answered"), "{text}");
    }
}
