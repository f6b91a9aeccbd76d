//! The order of a run's intervals: rows, cold before warm, loads, repeats; two servers in turn, so that what changes on
//! the machine meanwhile touches both alike. Sweeps ask [`sweep::Search`] what to measure next.
use std::sync::Arc;

use super::arrivals::{Process, Rate};
use super::record::{Interval, Objectives};
use super::report::endpoint_letter;
use super::runner::{Bounds, Load, Part};
use super::seed;
use super::stats::figures::Figures;
use super::sweep::{Measured, Probe, Search, Settings};
use super::workload::{Cache, Draw, Workload};

/// A row and how it is loaded.
pub struct Row {
    /// What is asked.
    pub workload: Arc<Workload>,
    /// One after the other.
    pub loads: Vec<Loading>,
}

/// How much is asked at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loading {
    /// So much.
    Fixed(Load),
    /// As much as goes well: found by bisection.
    Sweep(Process, Settings),
}

/// What all intervals of a run share.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// 1 or 2.
    pub endpoints: u8,
    /// Of each fixed load.
    pub repeats: u32,
    /// Lengths and arrivals.
    pub seed: u64,
    /// Contents.
    pub salt: u64,
    /// Limits of an interval.
    pub bounds: Bounds,
    /// What a sweep calls good.
    pub objectives: Objectives,
}

/// Plans one interval after the other; pure.
pub struct Session {
    terms: Terms,
    steps: std::vec::IntoIter<Step>,
    sweeping: Option<Sweeping>,
    /// Intervals planned so far: each has contents of its own.
    planned: u64,
    notes: Vec<String>,
}

/// One row under one load, cold or warm.
struct Step {
    workload: Arc<Workload>,
    cache: Cache,
    what: StepKind,
}

enum StepKind {
    Interval { load: Load, repeat: u32, endpoint: u8 },
    Sweep(Process, Settings),
}

/// A sweep that is under way: a search for each endpoint.
struct Sweeping {
    workload: Arc<Workload>,
    cache: Cache,
    process: Process,
    searches: Vec<EndpointSearch>,
    /// Whose turn it is.
    turn: usize,
}

/// The search for one server's knee.
struct EndpointSearch {
    search: Search,
    measured: Vec<Measured>,
    /// At this rate an interval had no request at all: the next one would have none either, its moments come from the
    /// same seed.
    empty_at: Option<f64>,
}

impl Session {
    /// All rows.
    pub fn new(rows: &[Row], terms: Terms) -> Self {
        let steps: Vec<Step> = rows.iter().flat_map(|row| steps(row, &terms)).collect();
        Self { terms, steps: steps.into_iter(), sweeping: None, planned: 0, notes: Vec::new() }
    }

    /// The interval to measure now, given what the last one became.
    pub fn next(&mut self, last: Option<&Interval>) -> Option<Part> {
        if let Some(sweeping) = &mut self.sweeping {
            if let Some(last) = last {
                sweeping.learn(last, self.terms.objectives);
            }
            if let Some((endpoint, probe)) = sweeping.probe() {
                let load = Load::Rate(sweeping.process, Rate::constant(probe.rate));
                let (workload, cache) = (Arc::clone(&sweeping.workload), sweeping.cache);
                return Some(self.part(workload, cache, (load, probe.repeat, endpoint)));
            }
            self.notes.extend(sweeping.notes());
            self.sweeping = None;
        }
        let Step { workload, cache, what } = self.steps.next()?;
        match what {
            StepKind::Interval { load, repeat, endpoint } => Some(self.part(workload, cache, (load, repeat, endpoint))),
            StepKind::Sweep(process, settings) => {
                let seconds =
                    if self.terms.bounds.requests.is_some() { f64::INFINITY } else { self.terms.bounds.seconds };
                let search = Search::new(Settings { seconds, ..settings });
                let search = |_| EndpointSearch { search: search.clone(), measured: Vec::new(), empty_at: None };
                let searches = (0..self.terms.endpoints).map(search).collect();
                self.sweeping = Some(Sweeping { workload, cache, process, searches, turn: 0 });
                self.next(None)
            }
        }
    }

    /// What a reader must know of the sweeps that are over.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    fn part(&mut self, workload: Arc<Workload>, cache: Cache, (load, repeat, endpoint): (Load, u32, u8)) -> Part {
        self.planned += 1;
        let draw = Draw {
            seed: seed::key(&[self.terms.seed, repeat.into()]),
            content: seed::key(&[self.terms.salt, self.planned]),
            cache,
        };
        Part { workload, endpoint, repeat, draw, load, bounds: self.terms.bounds }
    }
}

fn steps(row: &Row, terms: &Terms) -> Vec<Step> {
    let caches: &[Cache] = if row.workload.shares_prefixes() { &[Cache::Cold, Cache::Warm] } else { &[Cache::Cold] };
    let mut steps = Vec::new();
    for (cache, loading) in caches.iter().flat_map(|cache| row.loads.iter().map(move |loading| (*cache, *loading))) {
        let step = |what| Step { workload: Arc::clone(&row.workload), cache, what };
        match loading {
            Loading::Sweep(process, settings) => steps.push(step(StepKind::Sweep(process, settings))),
            Loading::Fixed(load) => {
                for repeat in 0..terms.repeats {
                    // A B, B A, A B: a drift of the machine falls on both.
                    let turn = |place: u8| if repeat % 2 == 0 { place } else { terms.endpoints - 1 - place };
                    let turns = (0..terms.endpoints).map(turn);
                    steps.extend(turns.map(|endpoint| step(StepKind::Interval { load, repeat, endpoint })));
                }
            }
        }
    }
    steps
}

impl Sweeping {
    fn learn(&mut self, interval: &Interval, objectives: Objectives) {
        let Some(of) = self.searches.get_mut(usize::from(interval.endpoint)) else { return };
        let Some(rate) = interval.rate else { return };
        let figures = Figures::of(&[interval], objectives);
        if figures.requests == 0 {
            of.empty_at = Some(rate);
        } else {
            of.measured.push(Measured { rate, good_share: figures.good_share() });
        }
    }

    /// What a reader must know of it, now that it is over.
    fn notes(&self) -> Vec<String> {
        let of = |(endpoint, of): (u8, &EndpointSearch)| {
            let empty =
                |rate| format!("the sweep ended at {rate}/s: no request came in the interval; give more --seconds");
            let why = of.empty_at.map(empty).or_else(|| of.search.regret(&of.measured))?;
            Some(format!("{} {}: {why}", self.workload.name, endpoint_letter(endpoint)))
        };
        (0..).zip(&self.searches).filter_map(of).collect()
    }

    /// The next probe of the endpoint whose turn it is, or of the other one when that has found its knee.
    fn probe(&mut self) -> Option<(u8, Probe)> {
        for _ in 0..self.searches.len() {
            let endpoint = self.turn;
            self.turn = (self.turn + 1) % self.searches.len();
            let EndpointSearch { search, measured, empty_at } = &mut self.searches[endpoint];
            if empty_at.is_none()
                && let Some(probe) = search.next(measured)
            {
                return Some((endpoint as u8, probe));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::record::{Nodes, Outcome, Record};
    use super::super::workload::{Mix, Prefix, Shape};
    use super::*;

    fn terms(endpoints: u8, repeats: u32) -> Terms {
        let bounds = Bounds {
            warmup_s: 0.0,
            seconds: 1.0,
            requests: None,
            drain: Duration::ZERO,
            timeout: Duration::from_secs(1),
            max_in_flight: 8,
        };
        let objectives = Objectives { ttft_ms: 100.0, tpot_ms: 100.0 };
        Terms { endpoints, repeats, seed: 1, salt: 2, bounds, objectives }
    }

    fn row(prefix: Option<Prefix>, loading: Loading) -> Row {
        let shape = Shape { input: "9".parse().unwrap(), output: "2".parse().unwrap(), prefix };
        let workload = Workload { name: "own".into(), mix: Mix::Shapes(vec![(1.0, shape)]) };
        Row { workload: Arc::new(workload), loads: vec![loading] }
    }

    #[test]
    fn endpoints_take_turns_and_share_lengths_but_no_contents() {
        let rows = [row(Some(Prefix { share: 0.5, groups: 1 }), Loading::Fixed(Load::Concurrency(1)))];
        let mut session = Session::new(&rows, terms(2, 3));
        let parts: Vec<Part> = std::iter::from_fn(|| session.next(None)).collect();
        let order: Vec<(Cache, u32, u8)> =
            parts.iter().map(|part| (part.draw.cache, part.repeat, part.endpoint)).collect();
        let once = [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)];
        let wanted =
            [Cache::Cold, Cache::Warm].into_iter().flat_map(|cache| once.map(|(repeat, end)| (cache, repeat, end)));
        assert_eq!(order, wanted.collect::<Vec<_>>());
        assert_eq!(parts[0].draw.seed, parts[1].draw.seed);
        assert_ne!(parts[0].draw.seed, parts[2].draw.seed);
        let mut contents: Vec<u64> = parts.iter().map(|part| part.draw.content).collect();
        contents.sort_unstable();
        contents.dedup();
        assert_eq!(contents.len(), parts.len());
    }

    /// What a server that can take `most` requests a second does.
    fn measured(part: &Part, most: f64) -> Interval {
        let Load::Rate(_, rate) = part.load else { panic!("not a rate") };
        let ttft_s = if rate.to <= most { 0.05 } else { 0.5 };
        let record = Record {
            index: 0,
            row: "own".into(),
            endpoint: part.endpoint,
            intended: 0.0,
            sent: 0.0,
            prompt_tokens: 9,
            cached_tokens: 0,
            max_tokens: 2,
            chunks: vec![(ttft_s, 1), (ttft_s + 0.01, 1)],
            ended: ttft_s + 0.01,
            outcome: Outcome::Ok,
            phases: None,
            nodes: Nodes::default(),
            trace_id: None,
        };
        Interval {
            endpoint: part.endpoint,
            repeat: part.repeat,
            rate: Some(rate.to),
            seconds: 1.0,
            records: vec![record],
            ..Interval::default()
        }
    }

    #[test]
    fn a_sweep_finds_each_servers_knee_in_turn() {
        let settings = Settings { start_rate: 1.0, repeats: 1, ..Settings::default() };
        let rows = [row(None, Loading::Sweep(Process::Poisson, settings))];
        let mut session = Session::new(&rows, terms(2, 1));
        let (mut last, mut good) = (None, [0.0f64; 2]);
        let mut first_turns = Vec::new();
        while let Some(part) = session.next(last.as_ref()) {
            first_turns.push(part.endpoint);
            let most = [3.0, 40.0][usize::from(part.endpoint)];
            let Load::Rate(_, rate) = part.load else { panic!("not a rate") };
            if rate.to <= most {
                let best = &mut good[usize::from(part.endpoint)];
                *best = best.max(rate.to);
            }
            last = Some(measured(&part, most));
        }
        assert_eq!(first_turns[..4], [0, 1, 0, 1]);
        assert!((2.7..=3.0).contains(&good[0]) && (36.0..=40.0).contains(&good[1]), "{good:?}");
    }

    #[test]
    fn an_interval_without_a_request_says_nothing_and_ends_the_sweep() {
        let settings = Settings { start_rate: 0.01, repeats: 3, ..Settings::default() };
        let rows = [row(None, Loading::Sweep(Process::Poisson, settings))];
        let mut session = Session::new(&rows, terms(1, 1));
        let part = session.next(None).unwrap();
        let empty = Interval { records: Vec::new(), ..measured(&part, 1.0) };
        assert!(session.next(Some(&empty)).is_none());
        assert_eq!(session.notes().len(), 1, "{:?}", session.notes());
        assert!(
            session.notes()[0].starts_with("own A: the sweep ended at 0.01/s: no request"),
            "{:?}",
            session.notes()
        );
    }

    #[test]
    fn a_sweep_says_when_its_intervals_are_too_short() {
        let settings = Settings { start_rate: 16.0, repeats: 1, ..Settings::default() };
        let rows = [row(None, Loading::Sweep(Process::Poisson, settings))];
        let mut session = Session::new(&rows, terms(1, 1));
        let mut last = None;
        while let Some(part) = session.next(last.as_ref()) {
            last = Some(measured(&part, 0.0));
        }
        // Intervals of a second: 8/s would have eight requests.
        assert!(last.is_some_and(|last| last.rate == Some(16.0)) && session.notes()[0].contains("down to 16.000/s"));
    }
}
