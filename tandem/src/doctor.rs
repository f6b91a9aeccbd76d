//! `tandem doctor`: what this machine has for Tandem, and what it lacks.
//!
//! [`gather`] looks, and is the one file that does; [`facts`] is what it saw; [`findings`] judges (pure).
pub mod facts;
mod findings;
pub mod gather;

use anyhow::bail;
use tandem_client::terminal::print;

use crate::config::doctor::{Doctor, Form};
use findings::{Finding, Level};

/// Looks, judges and prints.
///
/// # Errors
/// Something that nodes need is not there: the process ends with 1.
pub async fn run(config: Doctor) -> anyhow::Result<()> {
    let facts = gather::machine(&config).await;
    let findings = findings::judge(&facts, config.device);
    match config.form {
        Form::Text => print(&text(&findings))?,
        Form::Json => {
            let report = serde_json::json!({ "facts": facts, "findings": findings });
            print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?;
        }
    }
    match findings.iter().filter(|finding| finding.level == Level::Lacking).count() {
        0 => Ok(()),
        1 => bail!("one thing is lacking"),
        several => bail!("{several} things are lacking"),
    }
}

/// A line for each finding, and what to do below it.
fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.about.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { level, about, what, cure } in findings {
        let mark = match level {
            Level::Fine => "ok",
            Level::Note => "note",
            Level::Lacking => "LACKING",
        };
        text += &format!("{mark:<7}  {about:<width$}  {what}\n");
        if let Some(cure) = cure {
            text += &format!("{:<7}  {:<width$}  -> {cure}\n", "", "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_a_line_for_each_finding_and_its_cure_below() {
        let fine = Finding { level: Level::Fine, about: "CPU", what: "2 cores".into(), cure: None };
        let cure = Some("make setup".to_owned());
        let lacking = Finding { level: Level::Lacking, about: "model", what: "none".into(), cure };
        let printed = text(&[fine, lacking]);
        let lines: Vec<&str> = printed.lines().collect();
        assert_eq!(lines[0], "ok       CPU    2 cores");
        assert_eq!(lines[1], "LACKING  model  none");
        assert_eq!(lines[2].trim(), "-> make setup");
        assert_eq!(lines.len(), 3);
    }
}
