//! Recorded traffic: who asked when, how long, and what prompts had in common. Reads files by path; owns none.
//!
//! - [`mooncake`] and [`azure`]: one public format each, lines to [`Recorded`] requests; pure.
//! - [`synthetic`]: the same from a seed, where no file is at hand.
//!
//! [`prepare`] (pure) makes the sendable [`Trace`]: a slice, at another speed, with lengths scaled down.
pub mod azure;
pub mod mooncake;
pub mod synthetic;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use rand::Rng;

use super::file_error::FileError;
use super::piece::Piece;
use super::seed;

/// Tokens of a block in Mooncake's traces.
pub const BLOCK_TOKENS: u32 = 512;
/// Requests of a trace at most.
pub const MAX_REQUESTS: usize = 5_000_000;
/// Distinct time stamps that are further apart than this are ticks of a coarse clock, seconds.
const COARSE_S: f64 = 0.5;

/// One request of a file, as recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Since some moment that all requests of the file share, seconds.
    pub at_s: f64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// One id for each begun block of [`BLOCK_TOKENS`] prompt tokens; none where the trace does not say.
    pub blocks: Vec<u64>,
}

/// A trace that can be sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In the order of their times, the first at 0 or soon after.
    pub requests: Vec<TraceRequest>,
}

/// One request of it.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// When it is to be sent, seconds after the first tick.
    pub at_s: f64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// The prompt's blocks, adding up to `input_tokens`; none: it shares nothing.
    pub blocks: Vec<Piece>,
}

/// Which part of a trace is sent, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    /// Lengths and blocks are divided by this, 1 or more.
    pub scale: u32,
    /// Times are divided by this, above 0.
    pub speed: f64,
    /// Seconds of the recording that are left out at its beginning.
    pub from_s: f64,
    /// At most so many requests.
    pub requests: usize,
    /// Prompt and output together at most, tokens, after scaling: longer prompts are cut at their end.
    pub most_tokens: u32,
    /// Decides where in a coarse tick a request falls.
    pub seed: u64,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It cannot be read, or a line is not what its format wants.
    #[error(transparent)]
    File(#[from] FileError),
    /// Neither format.
    #[error("{} begins like no known trace: wanted JSON lines with `timestamp`, or a CSV head `TIMESTAMP,…`", .0.display())]
    Unknown(PathBuf),
    /// Nothing is left.
    #[error("no request of the trace is in the chosen slice")]
    Empty,
    /// Scaling that does not fit.
    #[error("--trace-scale {0} does not divide the trace's blocks of {BLOCK_TOKENS} tokens")]
    Scale(u32),
}

/// One line of a format, or what is wrong with it.
type Parse = Box<dyn Fn(&str) -> Result<Recorded, String>>;

/// Reads a file in either format; its beginning says which.
///
/// # Errors
/// A file that cannot be read, or its first bad line.
pub fn read(path: &Path) -> Result<Vec<Recorded>, TraceError> {
    let io = |source| FileError::Io { path: path.to_owned(), source };
    let mut lines = BufReader::new(File::open(path).map_err(io)?).lines();
    let head = lines.next().transpose().map_err(io)?.unwrap_or_default();
    let head = head.trim_start_matches('\u{feff}').trim().to_owned();
    let wrong = |line: usize, what| FileError::Line { path: path.to_owned(), line, what };
    let mut requests = Vec::new();
    let parse: Parse = if head.starts_with('{') {
        requests.push(mooncake::parse(&head).map_err(|what| wrong(1, what))?);
        Box::new(mooncake::parse)
    } else {
        let columns = azure::Columns::from_head(&head).ok_or_else(|| TraceError::Unknown(path.to_owned()))?;
        Box::new(move |line| columns.parse(line))
    };
    for (index, line) in lines.enumerate() {
        let line = line.map_err(io)?;
        if line.trim().is_empty() {
            continue;
        }
        if requests.len() == MAX_REQUESTS {
            return Err(wrong(index + 2, format!("more than {MAX_REQUESTS} requests")).into());
        }
        requests.push(parse(&line).map_err(|what| wrong(index + 2, what))?);
    }
    Ok(requests)
}

/// The chosen slice, spread inside its ticks, scaled and at its speed.
///
/// # Errors
/// An empty slice; a scale that does not divide blocks.
pub fn prepare(mut recorded: Vec<Recorded>, selection: &Selection) -> Result<Trace, TraceError> {
    let has_blocks = recorded.iter().any(|request| !request.blocks.is_empty());
    if selection.scale == 0 || (has_blocks && !BLOCK_TOKENS.is_multiple_of(selection.scale)) {
        return Err(TraceError::Scale(selection.scale));
    }
    recorded.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    let start = recorded.first().map_or(0.0, |request| request.at_s);
    recorded.iter_mut().for_each(|request| request.at_s -= start);
    spread(&mut recorded, selection.seed);
    let slice = recorded.iter().filter(|request| request.at_s >= selection.from_s).take(selection.requests);
    let requests: Vec<TraceRequest> = slice.map(|request| scaled(request, selection)).collect();
    if requests.is_empty() { Err(TraceError::Empty) } else { Ok(Trace { requests }) }
}

/// Requests that share the tick of a coarse clock are given times inside it, in the order of the file.
fn spread(recorded: &mut [Recorded], seed: u64) {
    let gaps = recorded.windows(2).map(|pair| pair[1].at_s - pair[0].at_s).filter(|gap| *gap > 0.0);
    let tick = gaps.fold(f64::INFINITY, f64::min);
    if !(COARSE_S..f64::INFINITY).contains(&tick) {
        return;
    }
    let mut rng = seed::stream(&[seed, u64::from_be_bytes(*b"in ticks")]);
    for group in recorded.chunk_by_mut(|a, b| a.at_s == b.at_s) {
        let mut offsets: Vec<f64> = group.iter().map(|_| rng.random_range(0.0..tick)).collect();
        offsets.sort_by(f64::total_cmp);
        group.iter_mut().zip(offsets).for_each(|(request, offset)| request.at_s += offset);
    }
}

fn scaled(request: &Recorded, selection: &Selection) -> TraceRequest {
    let divide = |tokens: u32| tokens.div_ceil(selection.scale).max(1);
    let output_tokens = divide(request.output_tokens).min(selection.most_tokens.saturating_sub(1).max(1));
    let room = selection.most_tokens.saturating_sub(output_tokens).max(1);
    let input_tokens = divide(request.input_tokens).min(room);
    let block = BLOCK_TOKENS / selection.scale.min(BLOCK_TOKENS);
    let blocks = request.blocks.iter().zip(0u32..).map_while(|(key, index)| {
        let left = input_tokens.checked_sub(index.checked_mul(block)?).filter(|left| *left > 0)?;
        Some(Piece { key: *key, tokens: left.min(block) })
    });
    TraceRequest {
        at_s: (request.at_s - selection.from_s) / selection.speed,
        input_tokens,
        output_tokens,
        blocks: blocks.collect(),
    }
}

impl Trace {
    /// When the last request is due, seconds.
    pub fn seconds(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.at_s)
    }

    /// Share of prompt tokens in blocks that an earlier request began with too: what an unlimited cache would hold.
    pub fn shared_share(&self) -> f64 {
        let mut seen = std::collections::HashSet::new();
        let (mut shared, mut total) = (0u64, 0u64);
        for request in &self.requests {
            let hit = request.blocks.iter().take_while(|block| seen.contains(&block.key));
            shared += hit.map(|block| u64::from(block.tokens)).sum::<u64>();
            total += u64::from(request.input_tokens);
            seen.extend(request.blocks.iter().map(|block| block.key));
        }
        if total == 0 { 0.0 } else { shared as f64 / total as f64 }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ALL: Selection =
        Selection { scale: 1, speed: 1.0, from_s: 0.0, requests: usize::MAX, most_tokens: u32::MAX, seed: 1 };

    #[test]
    fn a_file_that_cannot_be_read_has_its_reason_once() {
        let error = anyhow::Error::from(read(Path::new("/nonexist")).unwrap_err());
        assert_eq!(format!("{error:#}"), "cannot read /nonexist: No such file or directory (os error 2)");
    }

    fn recorded(at_s: f64, input_tokens: u32, blocks: &[u64]) -> Recorded {
        Recorded { at_s, input_tokens, output_tokens: 100, blocks: blocks.to_vec() }
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn both_formats_are_told_apart() {
        let mooncake = file(
            "{\"timestamp\": 3000, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\n{\"timestamp\":6000,\"input_length\":1,\"output_length\":1,\"hash_ids\":[9]}\n",
        );
        let read_back = read(mooncake.path()).unwrap();
        assert_eq!(read_back.len(), 2);
        assert_eq!(read_back[0], Recorded { at_s: 3.0, input_tokens: 600, output_tokens: 5, blocks: vec![0, 7] });
        let azure = file("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.5,4808,10\r\n");
        assert_eq!(read(azure.path()).unwrap()[0].input_tokens, 4808);
    }

    #[test]
    fn errors_name_the_line() {
        let good = "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\n";
        let error = read(file(&format!("{good}{good}nonsense\n")).path()).unwrap_err().to_string();
        assert!(error.contains(":3: "), "{error}");
        let error = read(file("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,1\n").path());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(":2: ") && error.contains("ContextTokens"), "{error}");
        assert!(matches!(read(file("what,is,this\n").path()), Err(TraceError::Unknown(_))));
        assert!(matches!(read(file("").path()), Err(TraceError::Unknown(_))));
        assert!(matches!(read(Path::new("/nowhere/trace")), Err(TraceError::File(FileError::Io { .. }))));
    }

    #[test]
    fn arrivals_are_spread_inside_their_ticks_in_order() {
        let ticks = [0.0, 0.0, 0.0, 3.0, 5.999, 9.0];
        let trace = prepare(ticks.map(|at| recorded(at, 1, &[1])).to_vec(), &ALL).unwrap();
        let times: Vec<f64> = trace.requests.iter().map(|request| request.at_s).collect();
        assert!(times.windows(2).all(|pair| pair[0] < pair[1]), "{times:?}");
        for (time, tick) in times.iter().zip(ticks) {
            assert!((tick..tick + 3.0).contains(time), "{time} is not in the tick at {tick}");
        }
        let other = prepare(ticks.map(|at| recorded(at, 1, &[1])).to_vec(), &Selection { seed: 2, ..ALL }).unwrap();
        assert_ne!(trace, other);
    }

    #[test]
    fn exact_times_stay_as_they_are() {
        let times = [10.0, 10.25, 10.25, 14.0];
        let trace = prepare(times.map(|at| recorded(at, 1, &[])).to_vec(), &ALL).unwrap();
        let times: Vec<f64> = trace.requests.iter().map(|request| request.at_s).collect();
        assert_eq!(times, [0.0, 0.25, 0.25, 4.0]);
    }

    #[test]
    fn lengths_and_blocks_shrink_together() {
        let selection = Selection { scale: 32, speed: 2.0, ..ALL };
        let two = vec![recorded(0.0, 1_100, &[4, 5, 6]), recorded(0.1, 512, &[4])];
        let trace = prepare(two, &selection).unwrap();
        let first = &trace.requests[0];
        assert_eq!((first.input_tokens, first.output_tokens), (35, 4));
        let pieces: Vec<(u64, u32)> = first.blocks.iter().map(|piece| (piece.key, piece.tokens)).collect();
        assert_eq!(pieces, [(4, 16), (5, 16), (6, 3)]);
        assert_eq!(trace.requests[1].blocks, [Piece { key: 4, tokens: 16 }]);
        assert_eq!(trace.requests[1].at_s, 0.05);
        assert!((trace.shared_share() - 16.0 / 51.0).abs() < 1e-9);
    }

    #[test]
    fn slices_and_bounds() {
        let all: Vec<Recorded> = (0..10).map(|i| recorded(f64::from(i) * 0.1, 1_000, &[])).collect();
        let trace = prepare(all.clone(), &Selection { from_s: 0.25, requests: 3, ..ALL }).unwrap();
        assert_eq!(trace.requests.len(), 3);
        assert!((trace.requests[0].at_s - 0.05).abs() < 1e-9);
        let cut = prepare(all.clone(), &Selection { most_tokens: 300, ..ALL }).unwrap();
        assert_eq!((cut.requests[0].input_tokens, cut.requests[0].output_tokens), (200, 100));
        assert!(matches!(prepare(all.clone(), &Selection { from_s: 99.0, ..ALL }), Err(TraceError::Empty)));
        assert!(prepare(all, &Selection { scale: 3, ..ALL }).is_ok(), "without blocks any scale fits");
        let blocks = vec![recorded(0.0, 5, &[1])];
        assert!(matches!(prepare(blocks, &Selection { scale: 3, ..ALL }), Err(TraceError::Scale(3))));
    }
}
