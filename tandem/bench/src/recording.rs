//! The raw form of a run: JSON lines, written as intervals end and read back by `tandem bench report`.
//!
//! `{"info": …}`, then for each interval `{"interval": …}` without records and a `{"record": …}` for each of them. Of
//! several `info` lines the last one counts: it is written again at the end, when more is known.
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file_error::FileError;
use super::record::{Interval, Record, Run, RunInfo};

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum LineOut<'a> {
    Info(&'a RunInfo),
    Interval(&'a Interval),
    Record(&'a Record),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LineIn {
    Info(RunInfo),
    Interval(Interval),
    Record(Box<Record>),
}

/// A file that grows with the run.
pub struct Recorder {
    file: BufWriter<File>,
}

impl Recorder {
    /// Makes the file anew.
    ///
    /// # Errors
    /// The system's.
    pub fn create(path: &Path, info: &RunInfo) -> std::io::Result<Self> {
        let mut recorder = Self { file: BufWriter::new(File::create(path)?) };
        recorder.info(info)?;
        Ok(recorder)
    }

    /// What is now known of the run.
    ///
    /// # Errors
    /// The system's.
    pub fn info(&mut self, info: &RunInfo) -> std::io::Result<()> {
        self.line(&LineOut::Info(info))?;
        self.file.flush()
    }

    /// One interval more, on disk when this returns.
    ///
    /// # Errors
    /// The system's.
    pub fn interval(&mut self, interval: &Interval) -> std::io::Result<()> {
        let (row, notes) = (interval.row.clone(), interval.notes.clone());
        let head = Interval { records: Vec::new(), row, notes, ..*interval };
        self.line(&LineOut::Interval(&head))?;
        for record in &interval.records {
            self.line(&LineOut::Record(record))?;
        }
        self.file.flush()
    }

    fn line(&mut self, line: &LineOut<'_>) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.file, line)?;
        self.file.write_all(b"\n")
    }
}

/// Reads what a [`Recorder`] wrote.
///
/// # Errors
/// The first line that does not belong.
pub fn read(path: &Path) -> Result<Run, FileError> {
    let io = |source| FileError::Io { path: path.to_owned(), source };
    let mut run = Run::default();
    for (index, line) in BufReader::new(File::open(path).map_err(io)?).lines().enumerate() {
        let wrong = |what: String| FileError::Line { path: path.to_owned(), line: index + 1, what };
        let line = line.map_err(io)?;
        match serde_json::from_str(&line).map_err(|error| wrong(error.to_string()))? {
            LineIn::Info(info) => run.info = info,
            LineIn::Interval(interval) => run.intervals.push(interval),
            LineIn::Record(record) => match run.intervals.last_mut() {
                Some(interval) => interval.records.push(*record),
                None => return Err(wrong("a record before the first interval".to_owned())),
            },
        }
    }
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::super::record::{Nodes, Outcome};
    use super::*;

    fn record(index: u32, outcome: Outcome) -> Record {
        Record {
            index,
            row: "A".into(),
            endpoint: 1,
            intended: 0.125,
            sent: 0.25,
            prompt_tokens: 10,
            cached_tokens: 2,
            max_tokens: 3,
            chunks: vec![(0.5, 1), (0.75, 2)],
            ended: 1.0,
            outcome,
            phases: Some(Default::default()),
            nodes: Nodes { prefill: Some("prefill-0".into()), decode: Some("decode-0".into()) },
            trace_id: Some("ab".into()),
        }
    }

    #[test]
    fn a_run_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("records.jsonl");
        let outcomes = [Outcome::Ok, Outcome::Refused { retry_after_s: Some(1.5) }, Outcome::Unfinished];
        let records = (0..).zip(outcomes).map(|(index, outcome)| record(index, outcome)).collect();
        let one = Interval { row: "A".into(), rate: Some(2.5), seconds: 3.0, records, ..Interval::default() };
        let (window_from, notes) = (Some(7.5), vec!["too short".to_owned()]);
        let two = Interval { warm: true, concurrency: Some(4), window_from, notes, ..Interval::default() };
        let mut info = RunInfo { seed: 7, ..RunInfo::default() };
        let mut recorder = Recorder::create(&path, &info).unwrap();
        recorder.interval(&one).unwrap();
        recorder.interval(&two).unwrap();
        info.own_lag_max_ms = 2.0;
        recorder.info(&info).unwrap();
        assert_eq!(read(&path).unwrap(), Run { info, intervals: vec![one, two] });
    }

    #[test]
    fn a_wrong_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("records.jsonl");
        std::fs::write(&path, "{\"info\":{}}\n").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains(":1: missing field"));
        let record = serde_json::to_string(&LineOut::Record(&record(0, Outcome::Ok))).unwrap();
        std::fs::write(&path, record).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("before the first interval"));
        assert!(matches!(read(Path::new("/nowhere")), Err(FileError::Io { .. })));
    }
}
