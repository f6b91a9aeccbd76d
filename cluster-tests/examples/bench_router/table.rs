//! Medians over the turns, as markdown.
use crate::Subject;
use crate::load::{Latencies, Streamed};

/// Time to the first token, and what each router adds to it: differences of neighbouring turns.
pub fn latency(subjects: &[Subject], turns: &[Vec<Latencies>]) {
    println!(
        "| way | first token p50 ms | p99 ms | added p50 µs | added p99 µs | the router's processor time for a request, µs |"
    );
    println!("|---|---|---|---|---|---|");
    for (subject, own) in subjects.iter().zip(turns) {
        let of = |share: f64| median(own.iter().map(|turn| turn.percentile(share)));
        let added = |share: f64| match subject.without {
            Some(without) => {
                let pairs = own.iter().zip(&turns[without]);
                let micros = median(pairs.map(|(with, bare)| with.percentile(share) - bare.percentile(share))) * 1e3;
                format!("{micros:.0}")
            }
            None => "–".to_owned(),
        };
        let processor = match subject.router {
            Some(_) => format!("{:.0}", median(own.iter().filter_map(|turn| turn.processor_us))),
            None => "–".to_owned(),
        };
        let (p50, p99) = (of(0.5), of(0.99));
        println!("| {} | {p50:.3} | {p99:.3} | {} | {} | {processor} |", subject.name, added(0.5), added(0.99));
    }
}

/// Tokens through each router.
pub fn streaming(subjects: &[Subject], turns: &[Vec<Streamed>]) {
    println!("| way | tokens/s | tokens per second of the router's processor time |");
    println!("|---|---|---|");
    for (subject, own) in subjects.iter().zip(turns).filter(|(subject, _)| subject.router.is_some()) {
        let of = |figure: fn(&Streamed) -> f64| median(own.iter().map(figure));
        println!(
            "| {} | {:.0} | {:.0} |",
            subject.name,
            of(|turn| turn.tokens_per_second),
            of(|turn| turn.tokens_per_cpu_second)
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
