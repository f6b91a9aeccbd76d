//! Measures one interval: sends requests at their moments (open loop) or as soon as there is room (closed loop), and
//! makes a [`Record`] of each.
//!
//! In the open loop a request is sent at its intended moment whatever became of those before it, and its latencies
//! count from that moment. Requests are made ahead ([`ready`]). What the closed loop decides is in [`closed`].
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::arrivals::{Arrivals, Process, Rate};
use super::client::{Client, failed};
use super::metronome::{Clock, Metronome};
use super::progress::Progress;
use super::prompt::Vocabulary;
use super::record::{Interval, Nodes, Outcome, Record};
use super::workload::{Cache, Draw, Mix, Workload};

mod closed;
mod ready;

use self::closed::{Reach, Window, rest_s};
use self::ready::{Ready, prepare};

/// Between the beginning of an interval and its first possible request: time to make it.
const LEAD_S: f64 = 0.02;

/// Where requests go and what they are made of.
#[derive(Clone)]
pub struct Target {
    /// The server.
    pub client: Client,
    /// Words that it counts right.
    pub vocabulary: Arc<Vocabulary>,
    /// How prompts travel.
    pub form: Form,
}

/// How prompts travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// To be tokenized by the server.
    Text,
    /// As token ids.
    Ids,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// Open loop.
    Rate(Process, Rate),
    /// Closed loop: so many at once.
    Concurrency(u32),
    /// Open loop, when the trace says.
    Trace,
}

/// Limits of an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Sent and not measured, at the beginning, seconds.
    pub warmup_s: f64,
    /// Measured, seconds.
    pub seconds: f64,
    /// Measured requests at most; the interval is then as long as they take.
    pub requests: Option<u64>,
    /// How long answers may still come when nothing is sent any more.
    pub drain: Duration,
    /// For one answer.
    pub timeout: Duration,
    /// Requests that wait for answers at most; more are not sent, and count as failed.
    pub max_in_flight: usize,
}

/// One interval to measure.
#[derive(Clone)]
pub struct Part {
    /// What is asked.
    pub workload: Arc<Workload>,
    /// Which of two servers: 0 or 1.
    pub endpoint: u8,
    /// Which time.
    pub repeat: u32,
    /// Lengths, contents, shared prefixes.
    pub draw: Draw,
    /// How much is asked at once.
    pub load: Load,
    /// Limits.
    pub bounds: Bounds,
}

/// What all intervals of a run have in common.
#[derive(Clone)]
pub struct Watch {
    /// The run's time.
    pub clock: Clock,
    /// The user wants the run to end.
    pub stop: CancellationToken,
    /// For the terminal.
    pub progress: Arc<Progress>,
    /// Why the run cannot go on; set by the interval that found out.
    pub lost: Arc<OnceLock<String>>,
}

/// Whether a request is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    Measured,
    WarmUp,
    /// A shared prefix that is sent beforehand.
    Primer,
}

/// Runs `part` to its end: warm-up, measurement, drain.
///
/// # Errors
/// Requests that cannot be made at all; what servers do is in the records.
pub async fn measure(target: &Target, part: &Part, watch: &Watch) -> anyhow::Result<Interval> {
    let mut flight = Flight::new(part, watch);
    flight.prime(target).await?;
    let ready = prepare(target.clone(), part.clone());
    let stretch = match part.load {
        Load::Concurrency(slots) => flight.closed(ready, slots as usize).await?,
        Load::Rate(..) | Load::Trace => flight.open(ready, times(part)?).await?,
    };
    flight.drain().await?;
    Ok(flight.interval(stretch))
}

/// What an interval measures.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stretch {
    /// What was sent, however long that takes.
    Requests,
    /// What was sent in so many seconds.
    Offered(f64),
    /// What came in this window.
    Window(Window),
}

impl Part {
    /// How long it will take, without the drain, as far as that is known.
    pub fn expected_s(&self) -> f64 {
        match (&self.workload.mix, self.load) {
            (Mix::Trace(trace), Load::Trace) => trace.seconds(),
            _ => self.bounds.warmup_s + self.bounds.seconds,
        }
    }
}

/// Intended times of an open loop and whether they are measured, in seconds of the interval.
fn times(part: &Part) -> anyhow::Result<Box<dyn Iterator<Item = (f64, Keep)> + Send>> {
    let Bounds { warmup_s, seconds, requests, .. } = part.bounds;
    if let Mix::Trace(trace) = &part.workload.mix
        && part.load == Load::Trace
    {
        let times: Vec<f64> = trace.requests.iter().map(|request| request.at_s).collect();
        return Ok(Box::new(times.into_iter().map(|at| (at, Keep::Measured))));
    }
    let Load::Rate(process, rate) = part.load else { return Ok(Box::new(std::iter::empty())) };
    // A ramp begins with the measurement: before it, its first rate.
    let warmup = Arrivals::new(process, Rate::constant(rate.from), !part.draw.seed)?;
    let warmup = warmup.take_while(move |at| *at < warmup_s).map(|at| (at, Keep::WarmUp));
    let measured = Arrivals::new(process, rate, part.draw.seed)?;
    let measured = measured.take_while(move |at| requests.is_some() || *at < seconds);
    let measured =
        measured.take(requests.map_or(usize::MAX, |requests| usize::try_from(requests).unwrap_or(usize::MAX)));
    Ok(Box::new(warmup.chain(measured.map(move |at| (at + warmup_s, Keep::Measured)))))
}

/// The requests of one interval that are under way, and the records of those that are over.
struct Flight<'a> {
    part: &'a Part,
    watch: &'a Watch,
    /// Ends what is under way; follows the user's wish to stop.
    stop: CancellationToken,
    tasks: JoinSet<(Keep, Record)>,
    records: Vec<Record>,
    /// Of a closed loop, when its window begins; before that is known, never.
    window_from_s: f64,
    /// Sent in the warm-up and ended in the window.
    carried: Vec<Record>,
    /// Requests that ended in the window, well or not.
    answers: usize,
    /// When slots that were refused, or failed, ask again.
    rests_s: Vec<f64>,
    reach: Reach,
    /// What became of shared prefixes that could not be sent.
    unprimed: Vec<Outcome>,
    notes: Vec<String>,
}

impl<'a> Flight<'a> {
    fn new(part: &'a Part, watch: &'a Watch) -> Self {
        Self {
            part,
            watch,
            stop: watch.stop.child_token(),
            tasks: JoinSet::new(),
            records: Vec::new(),
            window_from_s: f64::INFINITY,
            carried: Vec::new(),
            answers: 0,
            rests_s: Vec::new(),
            reach: Reach::default(),
            unprimed: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Sends every shared prefix once and waits for the answers.
    async fn prime(&mut self, target: &Target) -> anyhow::Result<()> {
        let primers = self.part.workload.primers(self.part.draw);
        for (index, item) in (0..).zip(&primers) {
            let intended_s = self.watch.clock.now_s();
            self.launch(target.ready(index, item)?, intended_s, Keep::Primer);
            self.land().await?;
        }
        if let Some(first) = self.unprimed.first() {
            let (lost, all) = (self.unprimed.len(), primers.len());
            self.notes.push(format!(
                "{lost} of {all} shared prefixes could not be sent beforehand and are not warm: {first:?}"
            ));
        }
        Ok(())
    }

    /// Sends each request at its time.
    async fn open(
        &mut self,
        mut ready: mpsc::Receiver<anyhow::Result<Ready>>,
        times: impl Iterator<Item = (f64, Keep)>,
    ) -> anyhow::Result<Stretch> {
        let mut metronome = Metronome::new().context("no thread to keep time")?;
        let start_s = self.watch.clock.now_s() + LEAD_S;
        let mut complete = true;
        for (at_s, keep) in times {
            let intended_s = start_s + at_s;
            let due = async {
                let next = ready.recv().await;
                metronome.wait_until(self.watch.clock.at(intended_s)).await;
                next
            };
            let next = tokio::select! {
                biased;
                () = self.stop.cancelled() => None,
                next = due => next,
            };
            // A trace that is sent at another rate than its own may end before the time does.
            let Some(next) = next else {
                complete = false;
                break;
            };
            self.reap()?;
            if self.is_lost() {
                complete = false;
                break;
            }
            if self.tasks.len() < self.part.bounds.max_in_flight {
                self.launch(next?, intended_s, keep);
            } else {
                self.refuse(&next?, intended_s, keep);
            }
        }
        let timed = complete && self.part.load != Load::Trace && self.part.bounds.requests.is_none();
        Ok(if timed { Stretch::Offered(self.part.bounds.seconds) } else { Stretch::Requests })
    }

    /// Keeps `slots` requests under way; one that failed or was refused leaves its slot empty for a while.
    async fn closed(
        &mut self,
        mut ready: mpsc::Receiver<anyhow::Result<Ready>>,
        slots: usize,
    ) -> anyhow::Result<Stretch> {
        let Bounds { warmup_s, seconds, requests, drain, .. } = self.part.bounds;
        let from_s = self.watch.clock.now_s() + warmup_s;
        let end_s = if requests.is_some() { f64::INFINITY } else { from_s + seconds };
        let mut window = Window { from_s, end_s, is_extended: false };
        self.window_from_s = from_s;
        self.rests_s.clear();
        let mut left = requests.unwrap_or(u64::MAX);
        while left > 0 {
            let now_s = self.watch.clock.now_s();
            if window.is_over(now_s, self.answers, slots, drain.as_secs_f64()) {
                break;
            }
            if self.is_lost() {
                return Ok(Stretch::Requests);
            }
            self.rests_s.retain(|until_s| *until_s > now_s);
            if self.tasks.len() + self.rests_s.len() >= slots {
                if self.wait(window.end_s).await? { continue } else { return Ok(Stretch::Requests) }
            }
            let next = tokio::select! {
                biased;
                () = self.stop.cancelled() => None,
                next = ready.recv() => next,
            };
            let Some(next) = next else { return Ok(Stretch::Requests) };
            let intended_s = self.watch.clock.now_s();
            let keep = if intended_s < from_s { Keep::WarmUp } else { Keep::Measured };
            left -= u64::from(keep == Keep::Measured);
            self.launch(next?, intended_s, keep);
        }
        if window.is_extended {
            let took_s = window.end_s - from_s;
            self.notes.push(format!("no answer ended within the {seconds} s; measured for {took_s:.1} s instead"));
        }
        Ok(if requests.is_some() { Stretch::Requests } else { Stretch::Window(window) })
    }

    /// Until a request is over, a slot has rested, or it is `end_s`; false: the user wants to stop.
    async fn wait(&mut self, end_s: f64) -> anyhow::Result<bool> {
        let until_s = self.rests_s.iter().copied().fold(end_s, f64::min);
        let until = tokio::time::sleep_until(self.watch.clock.at(until_s).into());
        let (stop, is_waiting) = (self.stop.clone(), !self.tasks.is_empty());
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(false),
            landed = self.land(), if is_waiting => landed?,
            () = until, if until_s.is_finite() => {}
        }
        Ok(true)
    }

    /// Says so when nobody can be reached.
    fn is_lost(&mut self) -> bool {
        let is_lost = self.reach.is_lost(self.watch.clock.now_s());
        if is_lost {
            let why = "every connection failed, for seconds: is the server still there? The interval was ended early";
            self.notes.push(why.to_owned());
            // An interval before this one may have said so already.
            let _ = self.watch.lost.set(why.to_owned());
        }
        is_lost
    }

    /// Waits for what is under way, for so long; what is not over then stays unfinished.
    async fn drain(&mut self) -> anyhow::Result<()> {
        let stop = self.stop.clone();
        let deadline = tokio::time::sleep(self.part.bounds.drain);
        tokio::pin!(deadline);
        while !self.tasks.is_empty() {
            tokio::select! {
                biased;
                landed = self.land() => landed?,
                () = &mut deadline, if !stop.is_cancelled() => stop.cancel(),
            }
        }
        Ok(())
    }

    fn launch(&mut self, ready: Ready, intended_s: f64, keep: Keep) {
        let Ready { index, call, prompt_tokens, max_tokens } = ready;
        let mut record = self.record(index, (prompt_tokens, max_tokens), intended_s);
        let (clock, timeout, stop) = (self.watch.clock, self.part.bounds.timeout, self.stop.clone());
        let progress = Arc::clone(&self.watch.progress);
        progress.sent();
        self.tasks.spawn(async move {
            let (heard, outcome) = call.ask(clock, timeout, &stop).await;
            record.ended = clock.now_s();
            // What was stopped before its first byte was never sent.
            record.sent = heard.sent_s.max(record.intended);
            if let Some(usage) = heard.usage {
                record.cached_tokens = usage.cached;
                record.prompt_tokens = if usage.prompt > 0 { usage.prompt } else { prompt_tokens };
            }
            record.chunks = heard.chunks;
            record.phases = heard.phases;
            record.nodes = heard.nodes.unwrap_or_default();
            record.trace_id = heard.trace_id;
            record.outcome = outcome;
            progress.ended(&record);
            (keep, record)
        });
    }

    /// A request for which this program has no room: the server is not to blame, but it had the chance to answer
    /// others.
    fn refuse(&mut self, ready: &Ready, intended_s: f64, keep: Keep) {
        let mut record = self.record(ready.index, (ready.prompt_tokens, ready.max_tokens), intended_s);
        let now_s = self.watch.clock.now_s();
        (record.sent, record.ended) = (now_s, now_s);
        let limit = self.part.bounds.max_in_flight;
        record.outcome = failed("not sent", format!("{limit} requests were under way already (--max-in-flight)"));
        self.watch.progress.ended(&record);
        self.keep(keep, record);
    }

    fn record(&self, index: u64, (prompt_tokens, max_tokens): (u32, u32), intended_s: f64) -> Record {
        Record {
            index: u32::try_from(index).unwrap_or(u32::MAX),
            row: self.part.workload.name.clone(),
            endpoint: self.part.endpoint,
            intended: intended_s,
            sent: intended_s,
            prompt_tokens,
            cached_tokens: 0,
            max_tokens,
            chunks: Vec::new(),
            ended: intended_s,
            outcome: Outcome::Unfinished,
            phases: None,
            nodes: Nodes::default(),
            trace_id: None,
        }
    }

    /// Takes in all that is over already.
    fn reap(&mut self) -> anyhow::Result<()> {
        while let Some(joined) = self.tasks.try_join_next() {
            let (keep, record) = joined.context("a request's task died")?;
            self.keep(keep, record);
        }
        Ok(())
    }

    /// Waits for the end of one.
    async fn land(&mut self) -> anyhow::Result<()> {
        if let Some(joined) = self.tasks.join_next().await {
            let (keep, record) = joined.context("a request's task died")?;
            self.keep(keep, record);
        }
        Ok(())
    }

    fn keep(&mut self, keep: Keep, record: Record) {
        self.reach.learn(&record.outcome, record.ended);
        if matches!(self.part.load, Load::Concurrency(_)) {
            self.rests_s.extend(rest_s(&record.outcome).map(|rest_s| record.ended + rest_s));
        }
        let is_inside = record.ended >= self.window_from_s;
        self.answers += usize::from(is_inside && record.outcome != Outcome::Unfinished);
        match keep {
            Keep::Measured => self.records.push(record),
            Keep::WarmUp if is_inside => self.carried.push(record),
            Keep::Primer if record.outcome != Outcome::Ok => self.unprimed.push(record.outcome),
            Keep::WarmUp | Keep::Primer => {}
        }
    }

    fn interval(mut self, stretch: Stretch) -> Interval {
        let first = self.records.iter().map(|record| record.intended).fold(f64::INFINITY, f64::min);
        let last = self.records.iter().map(|record| record.ended).fold(0.0, f64::max);
        let (seconds, window_from) = match stretch {
            Stretch::Requests => ((last - first).max(0.0), None),
            Stretch::Offered(seconds) => (seconds, None),
            Stretch::Window(window) => {
                self.records.append(&mut self.carried);
                let seconds = if window.is_extended { window.end_s - window.from_s } else { self.part.bounds.seconds };
                (seconds, Some(window.from_s))
            }
        };
        self.records.sort_by_key(|record| record.index);
        let rate = match self.part.load {
            Load::Rate(_, rate) => Some(rate.mean_over(self.part.bounds.seconds)),
            Load::Concurrency(_) | Load::Trace => None,
        };
        let concurrency = match self.part.load {
            Load::Concurrency(slots) => Some(slots),
            Load::Rate(..) | Load::Trace => None,
        };
        Interval {
            row: self.part.workload.name.clone(),
            endpoint: self.part.endpoint,
            repeat: self.part.repeat,
            rate,
            concurrency,
            warm: self.part.draw.cache == Cache::Warm,
            seconds,
            window_from,
            notes: self.notes,
            records: self.records,
        }
    }
}
