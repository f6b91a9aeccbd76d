//! API keys: which tenant a request's key makes it, or the certificate of its connection. They are read ([`KeySource`])
//! at the start and again at every SIGHUP; what is wrong then changes nothing. Keys are kept and compared as digests,
//! each comparison over all keys and all bytes, so that time says nothing about them.
mod source;

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use sha2::{Digest, Sha256};
use tandem_ports::ClientName;
use tandem_proto::{Error, ErrorKind, MAX_PRIORITY};

pub use self::source::KeySource;
use self::source::{KeyEntry, SPIFFE, check_certificate, check_key};
use super::limiter::Rates;
use super::tenant::{MAX_WEIGHT, Tenant, Terms, check_name};
use crate::caller::Credentials;

/// Keys at most: each request is compared with all of them.
pub const MAX_KEYS: usize = 1024;
/// Characters of a key. Of base64, the fewest have 128 bits.
const KEY_CHARACTERS: std::ops::RangeInclusive<usize> = 22..=256;

/// Handle to the keys.
#[derive(Clone, Debug, Default)]
pub struct Keys(Option<Arc<Ring>>);

#[derive(Debug)]
struct Ring {
    source: KeySource,
    rules: Rules,
    keys: RwLock<Arc<Vec<Key>>>,
}

/// What a router makes of its keys.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Routers among which requests are spread: each allows that part of a key's limits.
    pub replicas: NonZeroU32,
    /// Clients show certificates, so that tenants may be known by them.
    pub client_certificates: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { replicas: NonZeroU32::MIN, client_certificates: false }
    }
}

/// By what a tenant is known: one of them at least.
#[derive(Clone, Debug)]
struct Key {
    digest: Option<[u8; 32]>,
    certificate: Option<String>,
    tenant: Tenant,
}

/// They could not be used; says whence they are, and what is wrong where.
#[derive(Debug, thiserror::Error)]
#[error("API keys in {source_name}: {why}")]
pub struct KeysError {
    source_name: String,
    why: String,
}

impl KeyEntry {
    /// Its limits at one of so many routers; a part of a request or token is a whole one.
    fn share(self, replicas: NonZeroU32) -> Self {
        let share = |limit: Option<u32>| limit.map(|limit| limit.div_ceil(replicas.get()));
        let (requests_per_minute, tokens_per_minute) = (share(self.requests_per_minute), share(self.tokens_per_minute));
        let max_concurrent_requests = share(self.max_concurrent_requests);
        Self { requests_per_minute, tokens_per_minute, max_concurrent_requests, ..self }
    }
}

impl Keys {
    /// Reads the file or directory, for the only router. Each tenant's buckets are full at `now`.
    ///
    /// # Errors
    /// It cannot be read, is not the JSON that it should be, or holds no keys or ones that make no sense.
    pub fn load(path: &Path, now: Instant) -> Result<Self, KeysError> {
        Self::load_by(&KeySource::Path(path.to_owned()), Rules::default(), now)
    }

    /// As [`Self::load`], from anywhere and by these rules.
    ///
    /// # Errors
    /// As there, or a certificate is named that no client shows.
    pub fn load_by(source: &KeySource, rules: Rules, now: Instant) -> Result<Self, KeysError> {
        let keys = RwLock::new(Arc::new(read(source, rules, now)?));
        Ok(Self(Some(Arc::new(Ring { source: source.clone(), rules, keys }))))
    }

    /// Reads them again. Tenants whose terms have not changed keep what is left of their rates. Says how many keys
    /// there are.
    ///
    /// # Errors
    /// As [`Self::load`]; the old keys stay.
    pub fn reload(&self, now: Instant) -> Result<usize, KeysError> {
        let Some(ring) = &self.0 else { return Ok(0) };
        let mut keys = read(&ring.source, ring.rules, now)?;
        let mut current = ring.keys.write().unwrap_or_else(PoisonError::into_inner);
        for key in &mut keys {
            let same = |old: &&Key| old.tenant.name() == key.tenant.name() && old.tenant.terms() == key.tenant.terms();
            if let Some(old) = current.iter().find(same) {
                key.tenant = old.tenant.clone();
            }
        }
        *current = Arc::new(keys);
        Ok(current.len())
    }

    /// Whether clients need a key.
    pub fn required(&self) -> bool {
        self.0.is_some()
    }

    /// The tenants that have one.
    pub fn names(&self) -> Vec<Arc<str>> {
        let keys = self.0.as_ref().map(|ring| Arc::clone(&ring.keys.read().unwrap_or_else(PoisonError::into_inner)));
        keys.iter().flat_map(|keys| keys.iter()).map(|key| Arc::clone(key.tenant.name())).collect()
    }

    /// Whose request it is, by its `authorization` header or metadata; without one, by its connection's certificate;
    /// or, where no keys are asked for, by the name that it gives itself.
    ///
    /// # Errors
    /// `Unauthenticated` for a key that is missing or unknown, `InvalidArgument` for a name that is none.
    pub fn tenant<'a>(&self, shown: impl Into<Credentials<'a>>, name: Option<&str>) -> Result<Tenant, Error> {
        let Some(ring) = &self.0 else {
            return name.map_or_else(|| Ok(Tenant::default()), Tenant::named);
        };
        let keys = Arc::clone(&ring.keys.read().unwrap_or_else(PoisonError::into_inner));
        let Credentials { authorization, certificate } = shown.into();
        let found = match (authorization, certificate) {
            (None, Some(certificate)) => of_certificate(&keys, certificate),
            (authorization, _) => of_header(&keys, authorization),
        };
        let found = found.map_err(|why| Error::new(ErrorKind::Unauthenticated, why))?;
        Ok(found.tenant.clone())
    }
}

fn of_header<'a>(keys: &'a [Key], authorization: Option<&str>) -> Result<&'a Key, &'static str> {
    let bearer = authorization.and_then(|value| value.split_once(' '));
    let key = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
    let key = key.filter(|key| !key.is_empty()).ok_or("an API key is needed: send `Authorization: Bearer KEY`")?;
    let digest: [u8; 32] = Sha256::digest(key).into();
    let is_it = |key: &Key| key.digest.is_some_and(|of_key| same(&of_key, &digest));
    let found = keys.iter().fold(None, |found, key| if is_it(key) { Some(key) } else { found });
    found.ok_or("this API key is not known here")
}

/// A certificate is no secret. Its SPIFFE ID goes before its common name, and neither is taken for the other.
fn of_certificate<'a>(keys: &'a [Key], names: &ClientName) -> Result<&'a Key, &'static str> {
    let common_name = names.common_name.as_deref().filter(|name| !name.starts_with(SPIFFE));
    let of = |name: &str| keys.iter().find(|key| key.certificate.as_deref() == Some(name));
    let found = names.spiffe_id.as_deref().into_iter().chain(common_name).find_map(of);
    found.ok_or("an API key is needed: this certificate is no tenant's; send `Authorization: Bearer KEY`")
}

/// In a time that does not depend on the bytes.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |differing, (a, b)| differing | (a ^ b))) == 0
}

fn read(source: &KeySource, rules: Rules, now: Instant) -> Result<Vec<Key>, KeysError> {
    let keys = source.read().and_then(|entries| checked(entries, rules, now));
    keys.map_err(|why| KeysError { source_name: source.to_string(), why })
}

fn checked(keys: Vec<KeyEntry>, rules: Rules, now: Instant) -> Result<Vec<Key>, String> {
    if keys.is_empty() || keys.len() > MAX_KEYS {
        return Err(format!("{} keys; 1 to {MAX_KEYS} are possible", keys.len()));
    }
    let (mut names, mut digests, mut certificates) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let key = |entry: KeyEntry| {
        let name = entry.name.clone();
        let key = key(entry.share(rules.replicas), now).map_err(|why| format!("key {name:?}: {why}"))?;
        if key.certificate.is_some() && !rules.client_certificates {
            return Err(format!("key {name:?}: `certificate` takes --tls-client-ca: clients show none without"));
        }
        if !names.insert(name.clone()) {
            return Err(format!("there are two keys of the name {name:?}"));
        }
        if key.digest.is_some_and(|digest| !digests.insert(digest)) {
            return Err(format!("key {name:?} is another one's, too"));
        }
        if key.certificate.clone().is_some_and(|certificate| !certificates.insert(certificate)) {
            return Err(format!("the certificate of key {name:?} is another one's, too"));
        }
        Ok(key)
    };
    keys.into_iter().map(key).collect()
}

fn key(entry: KeyEntry, now: Instant) -> Result<Key, String> {
    check_name(&entry.name)?;
    let digest = match (&entry.key, &entry.sha256) {
        (Some(key), None) => {
            check_key(key)?;
            Some(Sha256::digest(key).into())
        }
        (None, Some(hex)) => Some(from_hex(hex).ok_or("`sha256` must be 64 hexadecimal digits")?),
        (None, None) if entry.certificate.is_some() => None,
        _ => return Err("give either `key` or `sha256`, or `certificate`".to_owned()),
    };
    entry.certificate.as_deref().map_or(Ok(()), check_certificate)?;
    if !(1..=MAX_WEIGHT).contains(&entry.weight) {
        return Err(format!("`weight` must be 1 to {MAX_WEIGHT}"));
    }
    if entry.min_priority.unsigned_abs() > MAX_PRIORITY.unsigned_abs() {
        return Err(format!("`min_priority` must be -{MAX_PRIORITY} to {MAX_PRIORITY}"));
    }
    if entry.requests_per_minute == Some(0) || entry.tokens_per_minute == Some(0) {
        return Err("a rate must be at least 1 a minute; leave it out for no limit".to_owned());
    }
    if entry.max_concurrent_requests == Some(0) {
        return Err("`max_concurrent_requests` must be at least 1; leave it out for no limit".to_owned());
    }
    let rates = Rates { requests_per_minute: entry.requests_per_minute, tokens_per_minute: entry.tokens_per_minute };
    let terms = Terms {
        weight: entry.weight,
        max_priority: -entry.min_priority,
        rates,
        max_concurrent_requests: entry.max_concurrent_requests,
        shares_cache: entry.share_prefix_cache,
    };
    let tenant = Tenant::new(&entry.name, terms, Some(now));
    Ok(Key { digest, certificate: entry.certificate, tenant })
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Vec<u8> =
        digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | *digit as u8)).collect();
    if digits.len() == 64 { bytes.try_into().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const FILE: &str = r#"{"keys": [
        {"name": "alice", "key": "sk-alice-0123456789abcdef", "weight": 4, "requests_per_minute": 2, "min_priority": 0},
        {"name": "bob", "sha256": "2BB80D537B1DA3E38BD30361AA855686BDE0EACD7162FEF6A25FE97BF527A25B"}
    ]}"#;

    fn write(dir: &tempfile::TempDir, text: &str) -> PathBuf {
        let path = dir.path().join("keys.json");
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn keys_and_digests_find_their_tenant() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::load(&write(&dir, FILE), Instant::now()).unwrap();
        let alice = keys.tenant(Some("Bearer sk-alice-0123456789abcdef"), Some("bob")).unwrap();
        assert_eq!((&**alice.name(), alice.terms().weight, alice.terms().max_priority), ("alice", 4, 0));
        assert!(!alice.terms().shares_cache, "a tenant's cache is its own where nobody says otherwise");
        // Bob's key is the word "secret".
        assert_eq!(&**keys.tenant(Some("bearer secret"), None).unwrap().name(), "bob");
        for wrong in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer "),
            Some("Basic sk-alice-0123456789abcdef"),
            Some("Bearer sk-alice-0123456789abcde"),
        ] {
            assert_eq!(keys.tenant(wrong, Some("alice")).unwrap_err().kind, ErrorKind::Unauthenticated, "{wrong:?}");
        }
    }

    #[test]
    fn routers_divide_a_key_s_limits() {
        let (dir, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let file = FILE.replace("\"requests_per_minute\": 2", "\"requests_per_minute\": 7, \"tokens_per_minute\": 1");
        let file = file.replace("\"weight\": 4", "\"max_concurrent_requests\": 4");
        let rules = Rules { replicas: NonZeroU32::new(3).unwrap(), ..Rules::default() };
        let keys = Keys::load_by(&KeySource::Path(write(&dir, &file)), rules, now).unwrap();
        let rates = |keys: &Keys| {
            let alice = keys.tenant(Some("Bearer sk-alice-0123456789abcdef"), None).unwrap();
            let rates = alice.allowances(now).into_iter().map(|left| left.per_minute).collect::<Vec<_>>();
            (rates, alice.terms().max_concurrent_requests)
        };
        assert_eq!(rates(&keys), (vec![3, 1], Some(2)));
        keys.reload(now).unwrap();
        assert_eq!(rates(&keys), (vec![3, 1], Some(2)));
    }

    #[test]
    fn without_keys_clients_name_themselves() {
        let keys = Keys::default();
        assert!(!keys.required());
        assert_eq!(&**keys.tenant(Some("Bearer anything"), None).unwrap().name(), "default");
        let team = keys.tenant(None, Some("team")).unwrap();
        assert_eq!((&**team.name(), team.terms().shares_cache), ("team", true), "a name proves nothing");
        assert_eq!(keys.tenant(None, Some("a b")).unwrap_err().kind, ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_reload_keeps_rates_of_unchanged_tenants_and_a_wrong_file_changes_nothing() {
        let (dir, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let keys = Keys::load(&write(&dir, FILE), now).unwrap();
        let alice = || keys.tenant(Some("Bearer sk-alice-0123456789abcdef"), None);
        assert_eq!((alice().unwrap().take(1, 1, now), alice().unwrap().take(1, 1, now)), (Ok(()), Ok(())));
        write(&dir, "{");
        assert!(keys.reload(now).unwrap_err().to_string().contains("keys.json"));
        assert_eq!(alice().unwrap().take(1, 1, now).unwrap_err().what, "requests");
        write(&dir, FILE);
        assert_eq!(keys.reload(now).unwrap(), 2);
        assert_eq!(alice().unwrap().take(1, 1, now).unwrap_err().what, "requests");
        write(&dir, &FILE.replace("\"requests_per_minute\": 2", "\"requests_per_minute\": 3"));
        keys.reload(now).unwrap();
        assert_eq!(alice().unwrap().take(1, 1, now), Ok(()));
        write(&dir, r#"{"keys": [{"name": "carol", "key": "sk-carol-0123456789abcdef"}]}"#);
        keys.reload(now).unwrap();
        assert_eq!(alice().unwrap_err().kind, ErrorKind::Unauthenticated);
    }

    #[test]
    fn a_directory_is_read_again_as_a_whole() {
        let (dir, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let put = |name: &str, key: &str| std::fs::write(dir.path().join(name), key).unwrap();
        put("alice", "sk-alice-0123456789abcdef\n");
        let keys = Keys::load(dir.path(), now).unwrap();
        assert_eq!(&**keys.tenant(Some("Bearer sk-alice-0123456789abcdef"), None).unwrap().name(), "alice");
        put("bob", "short");
        assert!(keys.reload(now).unwrap_err().to_string().contains("key \"bob\": a key has 22"));
        put("bob", "sk-bob-0123456789abcdef");
        std::fs::remove_file(dir.path().join("alice")).unwrap();
        assert_eq!(keys.reload(now).unwrap(), 1);
        assert_eq!(&*keys.names()[0], "bob");
        assert!(keys.tenant(Some("Bearer sk-alice-0123456789abcdef"), None).is_err());
    }

    #[test]
    fn a_certificate_makes_a_request_its_tenant_s_where_no_header_does() {
        let (dir, now) = (tempfile::tempdir().unwrap(), Instant::now());
        let file = r#"{"keys": [
            {"name": "alice", "certificate": "spiffe://example.org/team/a", "key": "sk-alice-0123456789abcdef"},
            {"name": "bob", "certificate": "bob's laptop"}
        ]}"#;
        let source = KeySource::Path(write(&dir, file));
        let refused = Keys::load_by(&source, Rules::default(), now).unwrap_err().to_string();
        assert!(refused.contains("key \"alice\": `certificate` takes --tls-client-ca"), "{refused}");
        let rules = Rules { client_certificates: true, ..Rules::default() };
        let keys = Keys::load_by(&source, rules, now).unwrap();
        let names = |spiffe_id: &str, common_name: &str| {
            let some = |name: &str| Some(name.to_owned()).filter(|name| !name.is_empty());
            ClientName { spiffe_id: some(spiffe_id), common_name: some(common_name) }
        };
        let whose = |authorization, names: &ClientName| {
            let tenant = keys.tenant(Credentials { authorization, certificate: Some(names) }, Some("carol"));
            tenant.map(|tenant| tenant.name().to_string()).map_err(|error| error.kind)
        };
        let (alice, bob) = (names("spiffe://example.org/team/a", ""), names("", "bob's laptop"));
        assert_eq!(whose(None, &alice), Ok("alice".to_owned()));
        assert_eq!(whose(None, &bob), Ok("bob".to_owned()));
        assert_eq!(whose(None, &names("spiffe://example.org/team/b", "bob's laptop")), Ok("bob".to_owned()));
        assert_eq!(whose(None, &names("spiffe://example.org/team/a", "bob's laptop")), Ok("alice".to_owned()));
        // The header wins, also where it is wrong.
        assert_eq!(whose(Some("Bearer sk-alice-0123456789abcdef"), &bob), Ok("alice".to_owned()));
        for wrong in ["", "Bearer sk-other-0123456789abcdef"] {
            assert_eq!(whose(Some(wrong), &bob), Err(ErrorKind::Unauthenticated), "{wrong:?}");
        }
        // Nobody's names, and one that only looks like an id.
        for nobody in [names("", ""), names("", "carol"), names("", "spiffe://example.org/team/a")] {
            assert_eq!(whose(None, &nobody), Err(ErrorKind::Unauthenticated), "{nobody:?}");
        }
        let twice = file.replace("bob's laptop", "spiffe://example.org/team/a");
        write(&dir, &twice);
        assert!(keys.reload(now).unwrap_err().to_string().contains("the certificate of key \"bob\" is another"));
        assert_eq!(whose(None, &bob), Ok("bob".to_owned()), "the old ones stay");
    }

    #[test]
    fn wrong_files_say_what_is_wrong() {
        for (text, why) in [
            ("", "EOF"),
            ("[]", "keys"),
            (r#"{"keys": []}"#, "0 keys"),
            (r#"{"keys": [{"name": "a"}]}"#, "either `key` or `sha256`"),
            (r#"{"keys": [{"name": "a", "key": "short"}]}"#, "22 to 256"),
            (r#"{"keys": [{"name": "a b", "key": "sk-0123456789abcdef-008"}]}"#, "name"),
            (r#"{"keys": [{"name": "a", "sha256": "12"}]}"#, "64 hexadecimal"),
            (r#"{"keys": [{"name": "a", "certificate": "a"}]}"#, "--tls-client-ca"),
            (r#"{"keys": [{"name": "a", "certificate": ""}]}"#, "SPIFFE"),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "weight": 0}]}"#, "weight"),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "min_priority": 11}]}"#, "min_priority"),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "max_priority": 0}]}"#,
                "expected one of `name`",
            ),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "tokens_per_minute": 0}]}"#, "rate"),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "wieght": 1}]}"#, "wieght"),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008", "share_prefix_cache": 1}]}"#, "boolean"),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008"}, {"name": "a", "key": "sk-0123456789abcdef-009"}]}"#,
                "two keys",
            ),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef-008"}, {"name": "b", "key": "sk-0123456789abcdef-008"}]}"#,
                "another",
            ),
        ] {
            let error = {
                let entries = source::json(text).and_then(|entries| checked(entries, Rules::default(), Instant::now()));
                entries.expect_err(text)
            };
            assert!(error.contains(why), "{text}: {error}");
        }
        let missing = Keys::load(Path::new("/nowhere/keys.json"), Instant::now()).unwrap_err();
        assert!(missing.to_string().starts_with("API keys in /nowhere/keys.json: "), "{missing}");
    }
}
