//! Which rates to measure to find the knee of goodput (pure): the highest rate at which enough requests are good.
//!
//! The rate doubles until the share of good requests falls below the threshold (or halves, when the first rate is too
//! high already), then the bracket is bisected. A rate counts by the majority of its repeats, which end as soon as the
//! majority stands. The runner measures; this only says what.

/// Share of requests within both objectives that goodput asks for.
pub const GOOD_SHARE: f64 = 0.9;
/// The first rate is halved this often at most …
const MOST_HALVINGS: i32 = 20;
/// … and not to a rate that offers fewer requests than this in an interval.
const FEWEST_REQUESTS: f64 = 10.0;

/// What to look for. Rates in requests a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Measured first.
    pub start_rate: f64,
    /// Never beyond it.
    pub max_rate: f64,
    /// Share of good requests that a rate must keep, 0 ..= 1.
    pub good_share: f64,
    /// The bracket is fine enough when (high − low) / low is at most this.
    pub relative_width: f64,
    /// At most so many intervals a rate; an odd number has no ties.
    pub repeats: u32,
    /// Intervals in all.
    pub max_probes: u32,
    /// How long an interval offers its rate, seconds: a rate at which so few requests come that they say nothing is not
    /// asked for. Infinite where an interval is as long as its requests take.
    pub seconds: f64,
}

impl Default for Settings {
    fn default() -> Self {
        let (start_rate, max_rate) = (1.0, 1e5);
        let (relative_width, repeats, max_probes, seconds) = (0.1, 3, 40, f64::INFINITY);
        Self { start_rate, max_rate, good_share: GOOD_SHARE, relative_width, repeats, max_probes, seconds }
    }
}

/// One interval to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// Requests a second.
    pub rate: f64,
    /// Counts from 0 for each rate.
    pub repeat: u32,
}

/// What an interval gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The probe's.
    pub rate: f64,
    /// Good requests of all that were asked.
    pub good_share: f64,
}

/// Where goodput breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Knee {
    /// The highest rate that holds below the lowest that does not; None: none held.
    pub holds: Option<f64>,
    /// The lowest rate that does not hold; None: all did.
    pub breaks: Option<f64>,
}

/// The planner of one sweep.
#[derive(Clone, Debug)]
pub struct Search {
    settings: Settings,
    given: u32,
}

impl Search {
    /// Settings that make no sense are brought into bounds: rates above 0, at least one repeat, a width of at least a
    /// thousandth.
    pub fn new(settings: Settings) -> Self {
        let sane = |rate: f64, or: f64| if rate.is_finite() && rate > 0.0 { rate } else { or };
        let max_rate = sane(settings.max_rate, Settings::default().max_rate);
        let settings = Settings {
            start_rate: sane(settings.start_rate, Settings::default().start_rate).min(max_rate),
            max_rate,
            good_share: sane(settings.good_share, GOOD_SHARE).min(1.0),
            relative_width: sane(settings.relative_width, Settings::default().relative_width).max(1e-3),
            repeats: settings.repeats.max(1),
            max_probes: settings.max_probes,
            seconds: sane(settings.seconds, f64::INFINITY),
        };
        Self { settings, given: 0 }
    }

    /// The next interval, given all measured so far. None: the knee is found, or as many probes were given as may be. A
    /// probe that was not measured is given again, and counts again.
    pub fn next(&mut self, measured: &[Measured]) -> Option<Probe> {
        if self.given.max(u32::try_from(measured.len()).unwrap_or(u32::MAX)) >= self.settings.max_probes {
            return None;
        }
        let rates = Rate::of(measured, &self.settings);
        let open = rates.iter().find(|rate| rate.verdict == Verdict::Open);
        let probe = match open {
            Some(rate) => Probe { rate: rate.rate, repeat: rate.measured },
            None => Probe { rate: self.next_rate(&knee_of(&rates))?, repeat: 0 },
        };
        self.given += 1;
        Some(probe)
    }

    /// Whether an interval at `rate` has too few requests to say anything.
    fn is_too_few(&self, rate: f64) -> bool {
        rate * self.settings.seconds < FEWEST_REQUESTS
    }

    /// Why a search that has ended found no rate that holds, where a longer interval would have helped.
    pub fn regret(&self, measured: &[Measured]) -> Option<String> {
        let Knee { holds: None, breaks: Some(breaks) } = knee_of(&Rate::of(measured, &self.settings)) else {
            return None;
        };
        self.is_too_few(breaks / 2.0).then(|| {
            format!(
                "no rate held, down to {breaks:.3}/s; lower ones have fewer than {FEWEST_REQUESTS} requests in {} s: give more --seconds",
                self.settings.seconds
            )
        })
    }

    fn next_rate(&self, knee: &Knee) -> Option<f64> {
        let Settings { start_rate, max_rate, relative_width, .. } = self.settings;
        match (knee.holds, knee.breaks) {
            (None, None) => Some(start_rate),
            (Some(holds), None) => (holds < max_rate).then(|| (holds * 2.0).min(max_rate)),
            (None, Some(breaks)) => {
                let half = breaks / 2.0;
                (half > start_rate * 0.5_f64.powi(MOST_HALVINGS) && !self.is_too_few(half)).then_some(half)
            }
            (Some(holds), Some(breaks)) => {
                ((breaks - holds) / holds > relative_width).then(|| between(holds, breaks)).flatten()
            }
        }
    }
}

/// The knee that points of a curve show, each with all its repeats; the same rule as the search's.
pub fn knee(measured: &[Measured], good_share: f64) -> Knee {
    let repeats = u32::try_from(measured.len()).unwrap_or(u32::MAX);
    let settings = Settings { good_share, repeats, ..Settings::default() };
    let mut rates = Rate::of(measured, &settings);
    for rate in &mut rates {
        // All there is was measured: a tie does not hold.
        rate.verdict = if 2 * rate.good > rate.measured { Verdict::Holds } else { Verdict::Breaks };
    }
    knee_of(&rates)
}

/// A rate in the middle of the bracket by ratio, with three digits where there is room for that.
fn between(low: f64, high: f64) -> Option<f64> {
    let middle = (low * high).sqrt();
    let unit = 10_f64.powf(middle.log10().floor() - 2.0);
    let round = (middle / unit).round() * unit;
    [round, middle].into_iter().find(|rate| low < *rate && *rate < high)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Holds,
    Breaks,
    /// Neither has the majority yet.
    Open,
}

/// A rate with what its repeats say.
#[derive(Clone, Copy, Debug)]
struct Rate {
    rate: f64,
    measured: u32,
    good: u32,
    verdict: Verdict,
}

impl Rate {
    /// Ascending. A share that is no number does not hold; a rate that is none is left out.
    fn of(measured: &[Measured], settings: &Settings) -> Vec<Self> {
        let mut sorted: Vec<&Measured> = measured.iter().filter(|one| one.rate.is_finite() && one.rate > 0.0).collect();
        sorted.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        let same = |a: &&Measured, b: &&Measured| a.rate == b.rate;
        sorted.chunk_by(same).map(|repeats| Self::of_repeats(repeats, settings)).collect()
    }

    fn of_repeats(repeats: &[&Measured], settings: &Settings) -> Self {
        let good = repeats.iter().filter(|one| one.good_share >= settings.good_share).count() as u32;
        let measured = repeats.len() as u32;
        let majority = settings.repeats / 2 + 1;
        let verdict = if good >= majority {
            Verdict::Holds
        } else if measured - good >= majority || measured >= settings.repeats {
            Verdict::Breaks
        } else {
            Verdict::Open
        };
        Self { rate: repeats[0].rate, measured, good, verdict }
    }
}

fn knee_of(rates: &[Rate]) -> Knee {
    let breaks = rates.iter().find(|rate| rate.verdict == Verdict::Breaks).map(|rate| rate.rate);
    let held = rates.iter().take_while(|rate| rate.verdict != Verdict::Breaks);
    Knee { holds: held.filter(|rate| rate.verdict == Verdict::Holds).last().map(|rate| rate.rate), breaks }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Search {
        /// What it knows of the knee.
        fn knee(&self, measured: &[Measured]) -> Knee {
            knee_of(&Rate::of(measured, &self.settings))
        }
    }

    /// Measures what the search asks for; returns all of it.
    fn sweep(settings: Settings, mut share: impl FnMut(f64) -> f64) -> (Search, Vec<Measured>) {
        let mut search = Search::new(settings);
        let mut measured = Vec::new();
        while let Some(probe) = search.next(&measured) {
            measured.push(Measured { rate: probe.rate, good_share: share(probe.rate) });
            assert!(measured.len() <= settings.max_probes as usize, "more probes than may be");
        }
        (search, measured)
    }

    #[test]
    fn doubles_then_bisects() {
        let settings = Settings { repeats: 1, ..Settings::default() };
        let (search, measured) = sweep(settings, |rate| if rate <= 11.0 { 1.0 } else { 0.5 });
        let rates: Vec<f64> = measured.iter().map(|one| one.rate).collect();
        assert_eq!(rates, [1.0, 2.0, 4.0, 8.0, 16.0, 11.3, 9.51, 10.4]);
        assert_eq!(search.knee(&measured), Knee { holds: Some(10.4), breaks: Some(11.3) });
    }

    #[test]
    fn halves_when_the_first_rate_is_too_high() {
        let settings = Settings { start_rate: 16.0, repeats: 1, relative_width: 0.5, ..Settings::default() };
        let (search, measured) = sweep(settings, |rate| if rate < 3.0 { 0.95 } else { 0.2 });
        let Knee { holds: Some(holds), breaks: Some(breaks) } = search.knee(&measured) else { panic!() };
        assert!(holds < 3.0 && breaks >= 3.0 && (breaks - holds) / holds <= 0.5);
        // A server that never holds is left alone at last.
        let (search, measured) = sweep(Settings { max_probes: 1000, ..settings }, |_| 0.0);
        assert_eq!(search.knee(&measured).holds, None);
        assert!(measured.len() < 25, "{}", measured.len());
    }

    #[test]
    fn rates_with_hardly_a_request_are_not_asked_for() {
        let settings = Settings { start_rate: 8.0, repeats: 1, seconds: 10.0, ..Settings::default() };
        let (search, measured) = sweep(settings, |_| 0.0);
        assert_eq!(measured.iter().map(|one| one.rate).collect::<Vec<_>>(), [8.0, 4.0, 2.0, 1.0]);
        let regret = search.regret(&measured).unwrap();
        assert!(regret.contains("down to 1.000/s") && regret.contains("in 10 s"), "{regret}");
        assert_eq!(search.regret(&[Measured { rate: 1.0, good_share: 1.0 }]), None);
        let (search, measured) = sweep(Settings { seconds: f64::INFINITY, ..settings }, |_| 0.0);
        assert!(measured.len() > 10 && search.regret(&measured).is_none());
    }

    #[test]
    fn repeats_end_with_the_majority() {
        let mut answers = [1.0, 0.0, 1.0, 0.0, 0.0].into_iter();
        let settings = Settings { max_rate: 2.0, relative_width: 2.0, ..Settings::default() };
        let (search, measured) = sweep(settings, |_| answers.next().unwrap());
        // One of three against: 1.0 holds after three; 2.0 breaks after two.
        assert_eq!(measured.iter().map(|one| one.rate).collect::<Vec<_>>(), [1.0, 1.0, 1.0, 2.0, 2.0]);
        assert_eq!(search.knee(&measured), Knee { holds: Some(1.0), breaks: Some(2.0) });
    }

    #[test]
    fn the_largest_rate_ends_it() {
        let (search, measured) = sweep(Settings { max_rate: 5.0, repeats: 1, ..Settings::default() }, |_| 1.0);
        assert_eq!(measured.iter().map(|one| one.rate).collect::<Vec<_>>(), [1.0, 2.0, 4.0, 5.0]);
        assert_eq!(search.knee(&measured), Knee { holds: Some(5.0), breaks: None });
    }

    #[test]
    fn a_probe_that_is_never_measured_ends_too() {
        let mut search = Search::new(Settings { max_probes: 5, ..Settings::default() });
        let given: Vec<Probe> = std::iter::from_fn(|| search.next(&[])).collect();
        assert_eq!(given, [Probe { rate: 1.0, repeat: 0 }; 5]);
    }

    #[test]
    fn the_knee_of_a_curve() {
        let curve = [(1.0, 1.0), (2.0, 0.95), (4.0, 0.5), (8.0, 0.93), (2.0, 0.5), (2.0, 0.9)];
        let measured = curve.map(|(rate, good_share)| Measured { rate, good_share });
        assert_eq!(knee(&measured, 0.9), Knee { holds: Some(2.0), breaks: Some(4.0) });
        assert_eq!(knee(&[], 0.9), Knee::default());
    }

    proptest! {
        /// A system whose share of good requests falls through 90 % at `knee`, steeply or slowly, with noise on every
        /// measurement.
        #[test]
        fn the_knee_is_found(knee in 0.05..900.0_f64, steep in 4.0..30.0_f64, start in 0.1..50.0_f64, seed: u64) {
            let mut noise = seed;
            let share = |rate: f64| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let noise = ((noise >> 40) as f64 / (1_u64 << 24) as f64 - 0.5) * 0.02;
                (1.0 / (1.0 + (rate / knee).powf(steep) / 9.0) + noise).clamp(0.0, 1.0)
            };
            let settings = Settings { start_rate: start, max_probes: 90, relative_width: 0.05, ..Settings::default() };
            let (search, measured) = sweep(settings, share);
            let Knee { holds: Some(holds), breaks: Some(breaks) } = search.knee(&measured) else {
                return Err(TestCaseError::fail("no knee"));
            };
            prop_assert!((breaks - holds) / holds <= 0.05 + 1e-9);
            // A hundredth of noise moves the crossing by up to 0.01 / (0.09 × steep) of itself: a thirtieth at the
            // slowest.
            prop_assert!(holds < knee * 1.1 && breaks > knee * 0.9, "{holds} .. {breaks} for {knee}");
        }

        /// Whatever is measured, the search stays within its bounds and ends.
        #[test]
        fn nonsense_ends(
            shares in prop::collection::vec(prop_oneof![0.0..1.0_f64, Just(f64::NAN), Just(f64::INFINITY)], 1..40),
            (start_rate, max_rate) in (prop::num::f64::ANY, prop::num::f64::ANY),
            (good_share, relative_width) in (prop::num::f64::ANY, prop::num::f64::ANY),
            (repeats, max_probes, seconds) in (0..6_u32, 0..60_u32, prop::num::f64::ANY),
        ) {
            let settings = Settings { start_rate, max_rate, good_share, relative_width, repeats, max_probes, seconds };
            let mut shares = shares.into_iter().cycle();
            let (search, measured) = sweep(settings, |_| shares.next().unwrap());
            prop_assert!(measured.iter().all(|one| one.rate > 0.0 && one.rate <= search.settings.max_rate));
        }
    }
}
