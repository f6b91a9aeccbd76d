//! The program's environment, as shells hand it over.
use std::process::{Command, Output};

fn tandem(words: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.args(words).envs(variables.iter().copied()).output().expect("the program starts")
}

#[test]
fn a_reason_is_said_once() {
    for words in [&["bench", "report", "/nonexist"][..], &["bench", "report", "/dev/null/x"]] {
        let output = tandem(words, &[]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(errors.matches("(os error").count(), 1, "{errors}");
        assert!(errors.contains(words[2]), "{errors}");
    }
}

#[test]
fn an_empty_variable_is_an_unset_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let nowhere = dir.path().join("nowhere.json").display().to_string();
    let variables = [("TANDEM_STATE", ""), ("TANDEM_CACHE", ""), ("TANDEM_API_KEY", ""), ("COLUMNS", "")];
    for words in [&["trace", "last"][..], &["up", "--model", "/nowhere"], &["generate", "hi"], &["bench"]] {
        let words = [&["--state", &nowhere][..], words].concat();
        let output = tandem(&words, &variables);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "the command line is right: {errors}");
        assert!(errors.contains("no running cluster") || errors.contains("no model at /nowhere"), "{errors}");
    }
    // A value is what it was.
    let output = tandem(&["trace"], &[("TANDEM_STATE", &nowhere), ("COLUMNS", "")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains(&nowhere), "{output:?}");
    assert_eq!(tandem(&["trace"], &[("COLUMNS", "wide")]).status.code(), Some(2));
    assert_eq!(tandem(&["trace", "--state", ""], &[]).status.code(), Some(2), "an empty flag is a mistake");
}
