//! What was measured of each request, and its medians as a table.
use tandem_cluster_tests::open_loop::median;
use tandem_proto::v1::Timings;
use tokio::time::Instant;

use crate::machine::Reference;

/// Gaps before this one still belong to the hand-off and its aftermath.
const STEADY_FROM: usize = 4;

/// One request.
pub struct Measured {
    pub bytes: usize,
    prefill_ms: f64,
    transfer_ms: f64,
    exposed_ms: f64,
    gap_ms: f64,
    step_ms: f64,
}

impl Measured {
    /// The router's timings, and the client's arrivals of tokens.
    pub fn new(timings: &Timings, tokens: &[Instant]) -> Self {
        let gaps = tokens.windows(2).skip(STEADY_FROM).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3);
        Self {
            bytes: timings.kv_bytes as usize,
            prefill_ms: timings.prefill_ms,
            transfer_ms: timings.transfer_total_ms,
            exposed_ms: timings.transfer_exposed_ms,
            gap_ms: timings.handoff_gap_ms,
            step_ms: median(gaps),
        }
    }
}

/// All requests of one prompt size over one link.
pub struct Row {
    pub link: String,
    pub prompt: u32,
    pub whole: Vec<Measured>,
    pub overlap: Vec<Measured>,
    /// After each of these requests.
    pub references: Vec<Reference>,
}

/// Markdown, one row for each way to push.
pub fn print(rows: &[Row]) {
    println!(
        "| link | prompt | MB | push | prefill ms | of whole | transfer ms | exposed ms | exposed | hand-off gap ms | decode step ms | gap − step ms | the machine: copy ms | reading what lay, more than again ms |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for row in rows {
        // Pairs ran one right after the other.
        let paired = row.overlap.iter().zip(&row.whole).map(|(overlap, whole)| overlap.prefill_ms / whole.prefill_ms);
        let ratio = median(paired);
        for (push, measured, ratio) in [("whole", &row.whole, 1.0), ("overlap", &row.overlap, ratio)] {
            let machine = |figure: fn(&Reference) -> f64| median(row.references.iter().map(figure));
            let of = |figure: fn(&Measured) -> f64| median(measured.iter().map(figure));
            println!(
                "| {} | {} | {:.1} | {push} | {:.1} | {ratio:.3} | {:.2} | {:.2} | {:.1} % | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
                row.link,
                row.prompt,
                of(|m| m.bytes as f64 / 1e6),
                of(|m| m.prefill_ms),
                of(|m| m.transfer_ms),
                of(|m| m.exposed_ms),
                100.0 * of(|m| m.exposed_ms / m.transfer_ms),
                of(|m| m.gap_ms),
                of(|m| m.step_ms),
                of(|m| m.gap_ms - m.step_ms),
                machine(|m| m.copy_ms),
                machine(|m| m.lain_ms),
            );
        }
    }
}
