//! Where API keys come from: a JSON file, a directory with a file for each tenant (a secret that Kubernetes mounts), or
//! a variable. What is read here are entries as somebody wrote them; whether they make sense is `keys.rs`'s matter.
use std::convert::Infallible;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use tandem_proto::MAX_PRIORITY;

use super::{KEY_CHARACTERS, MAX_KEYS};
use crate::admission::tenant::DEFAULT_TENANT;

/// Bytes of a JSON file at most.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Bytes of a key's own file at most, with what stands around the key.
const MAX_KEY_BYTES: u64 = 1024;
/// Bytes of a name in a certificate at most, as of a SPIFFE ID (2.3).
const MAX_CERTIFICATE_BYTES: usize = 2048;
/// What a SPIFFE ID begins with.
pub(super) const SPIFFE: &str = "spiffe://";
/// What the value of `--api-keys` begins with, if it names a variable.
const VARIABLE: &str = "env:";

/// The value of `--api-keys`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A JSON file, or a directory whose files are keys and have tenants' names.
    Path(PathBuf),
    /// A variable of this name. It holds what a JSON file would, or the only key.
    Variable(String),
}

impl FromStr for KeySource {
    type Err = Infallible;

    fn from_str(value: &str) -> Result<Self, Infallible> {
        Ok(match value.strip_prefix(VARIABLE) {
            Some(name) => Self::Variable(name.to_owned()),
            None => Self::Path(value.into()),
        })
    }
}

impl Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Variable(name) => write!(f, "{VARIABLE}{name}"),
        }
    }
}

impl KeySource {
    /// All entries.
    pub(super) fn read(&self) -> Result<Vec<KeyEntry>, String> {
        match self {
            Self::Path(path) if path.is_dir() => directory(path),
            Self::Path(path) => json(&text(path, MAX_FILE_BYTES)?),
            Self::Variable(name) => {
                let value = std::env::var_os(name).filter(|value| !value.is_empty()).ok_or("no such variable")?;
                variable(value.to_str().ok_or("not UTF-8")?)
            }
        }
    }
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    keys: Vec<KeyEntry>,
}

/// One tenant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeyEntry {
    pub name: String,
    pub key: Option<String>,
    pub sha256: Option<String>,
    /// In a client's certificate: a SPIFFE ID or a common name.
    pub certificate: Option<String>,
    #[serde(default = "one")]
    pub weight: u32,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    pub max_concurrent_requests: Option<u32>,
    #[serde(default = "most_urgent")]
    pub min_priority: i32,
    #[serde(default)]
    pub share_prefix_cache: bool,
}

impl KeyEntry {
    /// A tenant of whom nothing is said but the key.
    fn of(name: &str, key: &str) -> Self {
        Self {
            name: name.to_owned(),
            key: Some(key.to_owned()),
            sha256: None,
            certificate: None,
            weight: one(),
            requests_per_minute: None,
            tokens_per_minute: None,
            max_concurrent_requests: None,
            min_priority: most_urgent(),
            share_prefix_cache: false,
        }
    }
}

fn one() -> u32 {
    1
}

fn most_urgent() -> i32 {
    -MAX_PRIORITY
}

pub(super) fn json(text: &str) -> Result<Vec<KeyEntry>, String> {
    let Entries { keys } = serde_json::from_str(text)
        .map_err(|error| format!(r#"{error}; what is wanted is {{"keys": [{{"name": "NAME", "key": "KEY"}}, …]}}"#))?;
    Ok(keys)
}

/// A JSON file's text, or one key, which is no JSON.
fn variable(value: &str) -> Result<Vec<KeyEntry>, String> {
    match value.trim() {
        text if text.starts_with('{') => json(text),
        key => Ok(vec![KeyEntry::of(DEFAULT_TENANT, key)]),
    }
}

/// Kubernetes keeps the versions of a secret below names that begin with a dot, and its keys are links to them.
fn directory(path: &Path) -> Result<Vec<KeyEntry>, String> {
    let mut names = Vec::new();
    for file in std::fs::read_dir(path).map_err(|error| error.to_string())? {
        let name = file.map_err(|error| error.to_string())?.file_name();
        let name = name.into_string().map_err(|name| format!("{}: not UTF-8", name.display()))?;
        if !name.starts_with('.') {
            names.push(name);
        }
        if names.len() > MAX_KEYS {
            return Err(format!("more than {MAX_KEYS} keys"));
        }
    }
    names.sort();
    let entry = |name: &String| {
        let key = text(&path.join(name), MAX_KEY_BYTES).map_err(|why| format!("{name}: {why}"))?;
        Ok(KeyEntry::of(name, key.trim()))
    };
    names.iter().map(entry).collect()
}

fn text(path: &Path, most: u64) -> Result<String, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text));
    let bytes = read.map_err(|error| error.to_string())?;
    if bytes as u64 > most { Err(format!("more than {most} bytes")) } else { Ok(text) }
}

/// What a key looks like.
pub(super) fn check_key(key: &str) -> Result<(), String> {
    if KEY_CHARACTERS.contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    let (fewest, most) = (KEY_CHARACTERS.start(), KEY_CHARACTERS.end());
    Err(format!(
        "a key has {fewest} to {most} visible ASCII characters, {fewest} for 128 bits; `openssl rand -base64 24` makes one"
    ))
}

/// What a name in a certificate looks like.
pub(super) fn check_certificate(name: &str) -> Result<(), String> {
    let is_one = (1..=MAX_CERTIFICATE_BYTES).contains(&name.len()) && !name.contains(char::is_control);
    let is_other = name.contains("://") && !name.starts_with(SPIFFE);
    if is_one && !is_other {
        return Ok(());
    }
    Err(format!(
        "`certificate` is a SPIFFE ID ({SPIFFE}…) or a common name, of 1 to {MAX_CERTIFICATE_BYTES} bytes on one line"
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries(source: &KeySource) -> Vec<(String, String)> {
        let entries = source.read().expect("entries").into_iter();
        entries.map(|entry| (entry.name, entry.key.unwrap_or_default())).collect()
    }

    #[test]
    fn a_value_names_a_path_or_a_variable() {
        for (value, source) in [
            ("keys.json", KeySource::Path("keys.json".into())),
            ("/run/keys", KeySource::Path("/run/keys".into())),
            ("env:KEYS", KeySource::Variable("KEYS".to_owned())),
        ] {
            assert_eq!(value.parse::<KeySource>(), Ok(source.clone()));
            assert_eq!(source.to_string(), value);
        }
    }

    #[test]
    fn a_mounted_secret_has_a_file_for_each_tenant() {
        // As Kubernetes lays it out.
        let dir = tempfile::tempdir().unwrap();
        let version = dir.path().join("..2026_01_01");
        std::fs::create_dir(&version).unwrap();
        std::fs::write(version.join("bob"), "sk-bob-0123456789abcdef\n").unwrap();
        std::fs::write(version.join("alice"), "sk-alice-0123456789abcdef").unwrap();
        std::os::unix::fs::symlink("..2026_01_01", dir.path().join("..data")).unwrap();
        for name in ["alice", "bob"] {
            std::os::unix::fs::symlink(format!("..data/{name}"), dir.path().join(name)).unwrap();
        }
        let source = KeySource::Path(dir.path().to_owned());
        let expected = [("alice", "sk-alice-0123456789abcdef"), ("bob", "sk-bob-0123456789abcdef")];
        assert_eq!(entries(&source), expected.map(|(name, key)| (name.to_owned(), key.to_owned())));
        std::fs::write(version.join("bob"), "x".repeat(1025)).unwrap();
        assert_eq!(source.read().err().unwrap(), "bob: more than 1024 bytes");
        std::fs::remove_file(version.join("bob")).unwrap();
        assert!(source.read().err().unwrap().starts_with("bob: "), "a link to nothing");
    }

    #[test]
    fn a_variable_holds_one_key_or_what_a_file_would() {
        let one = variable(" sk-0123456789abcdef0123\n").unwrap();
        assert_eq!((&*one[0].name, one[0].key.as_deref()), (DEFAULT_TENANT, Some("sk-0123456789abcdef0123")));
        let two = variable(r#" {"keys": [{"name": "a", "key": "k"}, {"name": "b", "sha256": "0"}]}"#).unwrap();
        assert_eq!(two.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["a", "b"]);
        assert!(variable("{").err().unwrap().contains("what is wanted"));
        assert_eq!(KeySource::Variable("TANDEM_NO_SUCH".to_owned()).read().err().unwrap(), "no such variable");
        // Some variable that every test process has, and that is no key.
        assert_eq!(entries(&KeySource::Variable("PATH".to_owned()))[0].0, DEFAULT_TENANT);
    }

    proptest! {
        /// A fuzzer cannot set a variable without unsafe code. `PROPTEST_CASES` runs it for longer.
        #[test]
        fn a_variable_of_any_text_is_read_or_refused(pieces in prop::collection::vec(
            prop_oneof![
                prop::sample::select(vec![
                    "{", "}", "[", "]", ":", ",", "\"", "\\", " ", "\n", "\"keys\"", "\"name\"", "\"key\"", "\"sha256\"",
                    "\"weight\"", "\"certificate\"", "{\"keys\": [", "{\"name\": \"a\", \"key\": \"", "null", "-1", "1e99",
                    "sk-0123456789abcdef0123", "\u{0}", "\u{a0}",
                ]).prop_map(str::to_owned),
                ".{0,8}",
            ],
            0..24,
        )) {
            let text = pieces.concat();
            match variable(&text) {
                // What is no JSON is one key, whatever it looks like: that is looked at next.
                Ok(entries) if !text.trim().starts_with('{') => {
                    prop_assert_eq!(entries.len(), 1);
                    prop_assert_eq!(entries[0].key.as_deref(), Some(text.trim()));
                }
                Ok(entries) => prop_assert!(entries.iter().all(|entry| text.contains(&entry.name) || text.contains('\\'))),
                Err(why) => prop_assert!(why.contains("what is wanted"), "{}", why),
            }
        }
    }

    #[test]
    fn a_certificate_is_named_by_its_id_or_its_common_name() {
        for name in ["spiffe://example.org/team/a", "bob's laptop", "Zoë"] {
            assert_eq!(check_certificate(name), Ok(()), "{name}");
        }
        for name in ["", "https://example.org/a", "two\nlines", &"x".repeat(2049)] {
            assert!(check_certificate(name).unwrap_err().contains("SPIFFE ID"), "{name}");
        }
    }

    #[test]
    fn a_key_has_128_bits() {
        for key in ["0123456789abcdef012345", "sk-alice-0123456789abcdef", &"x".repeat(256)] {
            assert_eq!(check_key(key), Ok(()), "{key}");
        }
        for key in ["", "0123456789abcdef01234", "0123456789abcdef 12345", "0123456789abcdef01234é", &"x".repeat(257)]
        {
            let error = check_key(key).unwrap_err();
            assert!(error.contains("22 to 256") && error.contains("openssl rand -base64 24"), "{key}: {error}");
        }
    }
}
