//! Standard error behind a bounded queue: a thread of its own writes, so that whoever logs never waits for whoever
//! reads. What the queue has no room for is lost, counted, and told in the log once the reader is back.
//!
//! The first line after a pause is written at once. Lines that follow soon are gathered, for a time that a person who
//! reads along does not notice: to wake the thread for each one costs a busy router a tenth of its time. Warnings and
//! errors wait for nothing, so that a process that is killed right after them has said why.
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Of lines that wait for the reader: some thousands.
const MOST_BYTES: usize = 1 << 20;
/// Between two writes, unless much waits already, or a warning, or a flush.
const GATHER: Duration = Duration::from_millis(100);
/// Much is the room divided by this.
const ENOUGH: usize = 4;

/// Handle to the queue. Each `write` is a whole line.
#[derive(Clone, Debug)]
pub(crate) struct Lines {
    queue: Arc<Queue>,
    most_bytes: usize,
    /// What this handle writes waits for no other line.
    urgent: bool,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    came: Condvar,
    written: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    writing: bool,
    /// The thread sleeps until somebody has a line; else it looks by itself.
    asleep: bool,
    /// Something urgent waits.
    urgent: bool,
    /// Who waits until all is written.
    flushing: usize,
    /// Since the last notice.
    untold: u64,
    lost: u64,
}

/// How the log says that so many lines are missing; ends with a line break.
pub(crate) type Notice = fn(u64, &'static str) -> String;

impl Lines {
    /// Starts the thread that writes to standard error. Where there is none, lines go nowhere.
    pub fn to_stderr(notice: Notice, service: &'static str) -> Self {
        // Of its own, so that this thread, when it waits for the reader, has no lock that a panic's message wants.
        let stderr = io::stderr().as_fd().try_clone_to_owned();
        let out: Box<dyn Write + Send> = match stderr {
            Ok(stderr) => Box::new(File::from(stderr)),
            Err(_) => Box::new(io::sink()),
        };
        Self::start(out, MOST_BYTES, GATHER, notice, service)
    }

    fn start(
        out: Box<dyn Write + Send>,
        most_bytes: usize,
        gather: Duration,
        notice: Notice,
        service: &'static str,
    ) -> Self {
        let queue = Arc::new(Queue::default());
        let writer = Arc::clone(&queue);
        let started = thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || writer.serve(out, most_bytes / ENOUGH, gather, |lost| notice(lost, service)));
        // Without the thread nothing is ever taken out: what is logged is lost, and counted.
        Self { queue, most_bytes: if started.is_ok() { most_bytes } else { 0 }, urgent: false }
    }

    /// A handle to the same queue, for lines that are written at once.
    pub fn urgent(&self) -> Self {
        Self { urgent: true, ..self.clone() }
    }

    /// Lines that found no room.
    pub fn lost(&self) -> u64 {
        self.queue.lock().lost
    }

    /// Waits until all that was logged is written, at most so long. `false`: some of it is not.
    pub fn flush_within(&self, patience: Duration) -> bool {
        let mut state = self.queue.lock();
        state.flushing += 1;
        self.queue.came.notify_one();
        let is_busy = |state: &mut State| state.writing || state.has_news();
        let waited = self.queue.written.wait_timeout_while(state, patience, is_busy);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        state.flushing -= 1;
        !waited.timed_out()
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.queue.lock();
        if state.waiting.len() + line.len() > self.most_bytes {
            state.untold += 1;
            state.lost += 1;
        } else {
            state.waiting.extend_from_slice(line);
        }
        let wakes = state.asleep || self.urgent || state.waiting.len() >= self.most_bytes / ENOUGH;
        state.asleep = false;
        state.urgent |= self.urgent;
        drop(state);
        if wakes {
            self.queue.came.notify_one();
        }
    }
}

impl State {
    fn has_news(&self) -> bool {
        !self.waiting.is_empty() || self.untold > 0
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forever. What cannot be written (a full disk) is gone, and the next lines are tried.
    fn serve(&self, mut out: Box<dyn Write + Send>, enough: usize, gather: Duration, notice: impl Fn(u64) -> String) {
        let mut taken = Vec::new();
        loop {
            let mut state = self.news();
            state.writing = true;
            std::mem::swap(&mut taken, &mut state.waiting);
            let untold = std::mem::take(&mut state.untold);
            state.urgent = false;
            drop(state);
            let _ = out.write_all(&taken);
            if untold > 0 {
                let _ = out.write_all(notice(untold).as_bytes());
            }
            taken.clear();
            let mut state = self.lock();
            state.writing = false;
            self.written.notify_all();
            let may_wait = |state: &mut State| !state.urgent && state.flushing == 0 && state.waiting.len() < enough;
            drop(self.came.wait_timeout_while(state, gather, may_wait));
        }
    }

    fn news(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !state.has_news() {
            state.asleep = true;
            state = self.came.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.asleep = false;
        state
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
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

    fn make_writer_for(&'a self, line: &Metadata<'_>) -> Self {
        Self { urgent: *line.level() <= Level::WARN, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A reader that takes a write when it is told to.
    struct Reader {
        may_take: mpsc::Receiver<()>,
        taken: mpsc::Sender<String>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.may_take.recv().map_err(io::Error::other)?;
            self.taken.send(String::from_utf8_lossy(bytes).into_owned()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn read_by_hand(most_bytes: usize, gather: Duration) -> (Lines, mpsc::Sender<()>, mpsc::Receiver<String>) {
        let ((take, may_take), (tell, taken)) = (mpsc::channel(), mpsc::channel());
        let reader = Box::new(Reader { may_take, taken: tell });
        (Lines::start(reader, most_bytes, gather, |lost, who| format!("{who}: {lost} lost\n"), "test"), take, taken)
    }

    #[test]
    fn a_stopped_reader_holds_nobody_and_learns_what_it_missed() {
        let (mut lines, take, taken) = read_by_hand(40, GATHER);
        lines.write_all(b"the first line\n").unwrap();
        // The writer has it, and waits for the reader.
        while !(lines.queue.lock().writing && lines.queue.lock().waiting.is_empty()) {
            thread::yield_now();
        }
        for _ in 0..1_000 {
            lines.write_all(b"nine and 1\n").unwrap();
        }
        assert_eq!(lines.lost(), 997, "three of eleven bytes have room");
        assert!(!lines.flush_within(Duration::from_millis(1)), "nobody reads");
        for _ in 0..3 {
            take.send(()).unwrap();
        }
        assert!(lines.flush_within(Duration::from_secs(60)));
        let told: String = taken.try_iter().collect();
        assert_eq!(told, ["the first line\n", &"nine and 1\n".repeat(3), "test: 997 lost\n"].concat());
        lines.write_all(b"room again\n").unwrap();
        take.send(()).unwrap();
        assert_eq!((taken.recv().unwrap().as_str(), lines.lost()), ("room again\n", 997));
    }

    #[test]
    fn lines_that_come_together_are_written_together_and_none_waits_for_a_next_one() {
        let (mut lines, take, taken) = read_by_hand(4_000, GATHER);
        lines.write_all(b"the first line\n").unwrap();
        take.send(()).unwrap();
        assert_eq!(taken.recv().unwrap(), "the first line\n");
        for _ in 0..10 {
            lines.write_all(b"nine and 1\n").unwrap();
        }
        // However busy this machine is: one write for several of them, and one more at most for each time it was late.
        let mut told: Vec<String> = Vec::new();
        while told.concat().len() < 110 {
            take.send(()).unwrap();
            told.push(taken.recv().unwrap());
        }
        assert!(told.len() < 10 && told.concat() == "nine and 1\n".repeat(10), "{told:?}");
        // Enough of them do not wait, nor do those that somebody waits for.
        lines.write_all(&[b'x'; 1_000]).unwrap();
        lines.write_all(b"the last line\n").unwrap();
        (0..3).for_each(|_| take.send(()).unwrap());
        assert!(lines.flush_within(Duration::from_secs(60)));
        assert!(taken.try_iter().collect::<String>().ends_with("xthe last line\n"));
    }

    #[test]
    fn a_warning_waits_for_no_other_line() {
        let (mut lines, take, taken) = read_by_hand(4_000, Duration::from_secs(3_600));
        lines.write_all(b"the first line\n").unwrap();
        take.send(()).unwrap();
        assert_eq!(taken.recv().unwrap(), "the first line\n");
        lines.write_all(b"gathered\n").unwrap();
        lines.urgent().write_all(b"a warning\n").unwrap();
        take.send(()).unwrap();
        take.send(()).unwrap();
        assert!(taken.recv().unwrap().starts_with("gathered\n"), "with what came before it");
    }

    #[test]
    fn what_cannot_be_written_ends_nothing() {
        let (mut lines, take, taken) = read_by_hand(100, GATHER);
        drop((take, taken));
        lines.write_all(b"to nobody\n").unwrap();
        assert!(lines.flush_within(Duration::from_secs(60)));
        assert_eq!(lines.lost(), 0);
    }
}
