//! Medians over the turns, as markdown.
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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
