//! Medians over the turns, as markdown.
use tandem_cluster_tests::open_loop::median;

use crate::load::Streamed;
use crate::{Subject, Turn};

/// Time to the first token, and what each router adds to it: differences within each round.
pub fn latency(subjects: &[Subject], rounds: &[Vec<Turn>]) {
    println!(
        "| way | first token p50 ms | p99 ms | added p50 µs | added p99 µs | the router's processor time for a request, µs |"
    );
    println!("|---|---|---|---|---|---|");
    for (index, subject) in subjects.iter().enumerate() {
        let percentile = |turns: &[Turn], of: usize, share| turns[of].latencies.percentile(share);
        let of = |share: f64| median(rounds.iter().map(|turns| percentile(turns, index, share)));
        let added = |share: f64| match subject.without {
            Some(without) => {
                let more = |turns: &Vec<Turn>| percentile(turns, index, share) - percentile(turns, without, share);
                format!("{:.0}", median(rounds.iter().map(more)) * 1e3)
            }
            None => "–".to_owned(),
        };
        let processor = match subject.router {
            Some(_) => format!("{:.0}", median(rounds.iter().filter_map(|turns| turns[index].latencies.processor_us))),
            None => "–".to_owned(),
        };
        let (p50, p99) = (of(0.5), of(0.99));
        println!("| {} | {p50:.3} | {p99:.3} | {} | {} | {processor} |", subject.name, added(0.5), added(0.99));
    }
}

/// Tokens through each router.
pub fn streaming(subjects: &[Subject], rounds: &[Vec<Turn>]) {
    println!("| way | tokens/s | tokens per second of the router's processor time |");
    println!("|---|---|---|");
    for (index, subject) in subjects.iter().enumerate().filter(|(_, subject)| subject.router.is_some()) {
        let streamed = rounds.iter().filter_map(|turns| turns[index].streamed.as_ref());
        let of = |figure: fn(&Streamed) -> f64| median(streamed.clone().map(figure));
        println!(
            "| {} | {:.0} | {:.0} |",
            subject.name,
            of(|turn| turn.tokens_per_second),
            of(|turn| turn.tokens_per_cpu_second)
        );
    }
}

/// What the second of each pair of ways costs beside the first, within each round.
pub fn cost(subjects: &[Subject], rounds: &[Vec<Turn>], [without, with]: [[&str; 2]; 2]) {
    println!(
        "| with traces and logs, beside without | tokens per core, % | first token p50, µs | p99, µs | processor time for a request, µs |"
    );
    println!("|---|---|---|---|---|");
    for (without, with) in without.into_iter().zip(with) {
        let at = |name: &str| subjects.iter().position(|subject| subject.name == name);
        let (Some(without), Some(with)) = (at(without), at(with)) else { continue };
        let of = |figure: &dyn Fn(&Turn, &Turn) -> Option<f64>, digits: usize| {
            let mut values: Vec<f64> =
                rounds.iter().filter_map(|turns| figure(&turns[without], &turns[with])).collect();
            values.sort_by(f64::total_cmp);
            match (values.first(), values.last()) {
                (Some(least), Some(most)) => {
                    let middle = median(values.iter().copied());
                    format!("{middle:+.digits$} ({least:+.digits$} to {most:+.digits$})")
                }
                _ => "–".to_owned(),
            }
        };
        let more = |share: f64| {
            of(&|off, on| Some((on.latencies.percentile(share) - off.latencies.percentile(share)) * 1e3), 0)
        };
        let per_core = |turn: &Turn| turn.streamed.as_ref().map(|streamed| streamed.tokens_per_cpu_second);
        println!(
            "| {} | {} | {} | {} | {} |",
            subjects[with].name,
            of(&|off, on| Some((per_core(on)? / per_core(off)? - 1.0) * 1e2), 1),
            more(0.5),
            more(0.99),
            of(&|off, on| Some(on.latencies.processor_us? - off.latencies.processor_us?), 0),
        );
    }
}
