//! Names of a cluster's processes, as their certificates have them: a SPIFFE ID
//! `spiffe://TRUST-DOMAIN/tandem/ROLE[/NODE-ID]`, the only URI among the subject's alternative names. A name binds its
//! holder to a role and, where it has a node id, to that node. Pure: who asks is [`crate::node_tls`].
use std::fmt;

/// What a SPIFFE ID begins with.
const SCHEME: &str = "spiffe://";
/// Bytes of a SPIFFE ID, and of a trust domain in it, at most (SPIFFE ID, 2.3).
const MAX_ID_BYTES: usize = 2048;
const MAX_DOMAIN_BYTES: usize = 255;
/// Bytes of a node id at most, as in a registration.
const MAX_NODE_ID_BYTES: usize = 128;
/// What a name looks like, for messages.
pub(crate) const FORM: &str = "spiffe://TRUST-DOMAIN/tandem/router, /tandem/prefill[/NODE-ID] or \
     /tandem/decode[/NODE-ID]";

/// What a process of a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRole {
    /// Calls nodes, and is joined by them.
    Router,
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl PeerRole {
    /// As it stands in names.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    fn named(word: &str) -> Option<Self> {
        [Self::Router, Self::Prefill, Self::Decode].into_iter().find(|role| role.as_str() == word)
    }
}

/// The name of one process, or of all processes of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerName {
    /// Whose authority gave it.
    pub trust_domain: String,
    /// What its holder is.
    pub role: PeerRole,
    /// The only node that it is for; `None`: any of the role.
    pub node_id: Option<String>,
}

impl PeerName {
    /// The name among a certificate's URIs. `None`: they name nobody of Tandem.
    ///
    /// # Errors
    /// It begins as such a name and is none, or does not stand alone.
    pub fn among<'a>(uris: impl Iterator<Item = &'a str>) -> Result<Option<Self>, String> {
        let Some(uri) = spiffe_id(uris)? else { return Ok(None) };
        let whole = || format!("`{}` is not of the form {FORM}", uri.escape_debug());
        let (trust_domain, path) = uri[SCHEME.len()..].split_once('/').ok_or_else(whole)?;
        match path.split_once('/') {
            Some(("tandem", rest)) => Self::of(trust_domain, rest).map(Some).ok_or_else(whole),
            None if path == "tandem" => Err(whole()),
            _ => Ok(None),
        }
    }

    fn of(trust_domain: &str, path: &str) -> Option<Self> {
        let (role, node_id) = match path.split_once('/') {
            Some((role, node_id)) => (PeerRole::named(role)?, Some(node_id)),
            None => (PeerRole::named(path)?, None),
        };
        let node_id = match node_id {
            Some(id) if role != PeerRole::Router && is_segment(id) => Some(id.to_owned()),
            Some(_) => return None,
            None => None,
        };
        is_domain(trust_domain).then(|| Self { trust_domain: trust_domain.to_owned(), role, node_id })
    }
}

/// The SPIFFE ID among a certificate's URIs, if there is one.
///
/// # Errors
/// It does not stand alone, or is too long.
pub(crate) fn spiffe_id<'a>(uris: impl Iterator<Item = &'a str>) -> Result<Option<&'a str>, String> {
    let (mut found, mut others) = (None, 0_usize);
    for uri in uris {
        match uri.starts_with(SCHEME) {
            true if found.is_none() => found = Some(uri),
            _ => others += 1,
        }
    }
    match found {
        Some(_) if others > 0 => Err("a certificate with a SPIFFE ID has no other URI".to_owned()),
        Some(uri) if uri.len() > MAX_ID_BYTES => Err(format!("a SPIFFE ID has {MAX_ID_BYTES} bytes at most")),
        found => Ok(found),
    }
}

/// Letters, digits, dots, hyphens and underscores, of which letters are small ones.
fn is_domain(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-_".contains(&byte);
    (1..=MAX_DOMAIN_BYTES).contains(&text.len()) && text.bytes().all(allowed)
}

fn is_segment(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=MAX_NODE_ID_BYTES).contains(&text.len()) && ![".", ".."].contains(&text) && text.bytes().all(allowed)
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/tandem/{}", self.trust_domain, self.role.as_str())?;
        self.node_id.as_ref().map_or(Ok(()), |id| write!(f, "/{id}"))
    }
}

/// Whom a process takes its peer for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A router.
    Router,
    /// A node of whichever role.
    AnyNode,
    /// This node.
    Node {
        /// Its role; not a router's.
        role: PeerRole,
        /// Its id.
        node_id: String,
    },
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Router => f.write_str("a router"),
            Self::AnyNode => f.write_str("a node"),
            Self::Node { role, node_id } => write!(f, "the {} node `{node_id}`", role.as_str()),
        }
    }
}

/// Which names a process takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Policy {
    /// Certificates without a name pass as anybody. Those with one are held to it all the same.
    pub any_name: bool,
    /// Its own; `None`: it has no name.
    pub trust_domain: Option<String>,
}

impl Policy {
    /// Whether a certificate with this name is that of whom is wanted.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, name: Result<Option<&PeerName>, &str>, wanted: &Wanted) -> Result<(), String> {
        let name = match name {
            Err(why) => return Err(format!("its certificate names nobody: {why}")),
            Ok(None) if self.any_name => return Ok(()),
            Ok(None) => {
                return Err(format!(
                    "its certificate has no name of the form {FORM}; --node-tls-any-name takes it without"
                ));
            }
            Ok(Some(name)) => name,
        };
        if let Some(own) = self.trust_domain.as_ref().filter(|own| **own != name.trust_domain) {
            return Err(format!("its certificate is that of {name}, and this process is of the trust domain {own}"));
        }
        let fits = match wanted {
            Wanted::Router => name.role == PeerRole::Router,
            Wanted::AnyNode => name.role != PeerRole::Router,
            Wanted::Node { role, node_id } => {
                name.role == *role && name.node_id.as_ref().is_none_or(|id| id == node_id)
            }
        };
        if fits { Ok(()) } else { Err(format!("its certificate is that of {name}, not of {wanted}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(uri: &str) -> Result<Option<PeerName>, String> {
        PeerName::among([uri].into_iter())
    }

    fn named(uri: &str) -> PeerName {
        name(uri).expect("well formed").expect("a name")
    }

    #[test]
    fn a_name_has_a_trust_domain_a_role_and_perhaps_a_node() {
        for (uri, role, node_id) in [
            ("spiffe://example.org/tandem/router", PeerRole::Router, None),
            ("spiffe://example.org/tandem/prefill", PeerRole::Prefill, None),
            ("spiffe://example.org/tandem/decode/d-0.Z_9", PeerRole::Decode, Some("d-0.Z_9")),
        ] {
            let name = named(uri);
            assert_eq!((name.role, name.node_id.as_deref()), (role, node_id), "{uri}");
            assert_eq!((name.trust_domain.as_str(), name.to_string().as_str()), ("example.org", uri));
        }
        let longest = format!("spiffe://{}/tandem/decode/{}", "d".repeat(MAX_DOMAIN_BYTES), "n".repeat(128));
        assert_eq!(named(&longest).to_string(), longest);
    }

    #[test]
    fn names_of_others_are_none_and_wrong_ones_are_errors() {
        for other in ["https://example.org/tandem/router", "spiffe://example.org/ns/a/sa/b", "spiffe://example.org/"] {
            assert_eq!(name(other), Ok(None), "{other}");
        }
        assert_eq!(PeerName::among(std::iter::empty()), Ok(None));
        let (long_domain, long_id) = ("d".repeat(MAX_DOMAIN_BYTES + 1), "n".repeat(129));
        for wrong in [
            "spiffe://example.org".to_owned(),
            "spiffe://example.org/tandem".to_owned(),
            "spiffe://example.org/tandem/".to_owned(),
            "spiffe://example.org/tandem/Router".to_owned(),
            "spiffe://example.org/tandem/router/r0".to_owned(),
            "spiffe://example.org/tandem/router/".to_owned(),
            "spiffe://example.org/tandem/decode/".to_owned(),
            "spiffe://example.org/tandem/decode/a/b".to_owned(),
            "spiffe://example.org/tandem/decode/..".to_owned(),
            "spiffe://example.org/tandem/decode/a%20b".to_owned(),
            "spiffe://example.org/tandem/decode/a?b".to_owned(),
            "spiffe://Example.org/tandem/decode".to_owned(),
            "spiffe://user@example.org/tandem/decode".to_owned(),
            "spiffe://example.org:1/tandem/decode".to_owned(),
            "spiffe:///tandem/decode".to_owned(),
            format!("spiffe://{long_domain}/tandem/decode"),
            format!("spiffe://example.org/tandem/decode/{long_id}"),
            format!("spiffe://example.org/{}", "x".repeat(MAX_ID_BYTES)),
        ] {
            assert!(name(&wrong).is_err(), "{wrong}");
        }
        let (router, node) = ("spiffe://example.org/tandem/router", "spiffe://example.org/tandem/decode");
        for two in [[router, node], [router, router], ["https://example.org", node]] {
            assert!(PeerName::among(two.into_iter()).is_err(), "{two:?}");
        }
    }

    #[test]
    fn a_name_is_for_its_role_and_its_node() {
        let ours = Policy { any_name: false, trust_domain: Some("a".to_owned()) };
        let node = |role, id: &str| Wanted::Node { role, node_id: id.to_owned() };
        let fits = |uri: &str, wanted: &Wanted| ours.check(Ok(Some(&named(uri))), wanted);
        for (uri, wanted) in [
            ("spiffe://a/tandem/router", Wanted::Router),
            ("spiffe://a/tandem/prefill", Wanted::AnyNode),
            ("spiffe://a/tandem/decode/d0", Wanted::AnyNode),
            ("spiffe://a/tandem/prefill", node(PeerRole::Prefill, "p0")),
            ("spiffe://a/tandem/decode/d0", node(PeerRole::Decode, "d0")),
        ] {
            assert_eq!(fits(uri, &wanted), Ok(()), "{uri} as {wanted}");
        }
        for (uri, wanted, said) in [
            ("spiffe://a/tandem/prefill", Wanted::Router, "not of a router"),
            ("spiffe://a/tandem/router", Wanted::AnyNode, "not of a node"),
            ("spiffe://a/tandem/prefill", node(PeerRole::Decode, "d0"), "not of the decode node `d0`"),
            ("spiffe://a/tandem/decode/d0", node(PeerRole::Decode, "d1"), "not of the decode node `d1`"),
            ("spiffe://a/tandem/router", node(PeerRole::Decode, "d0"), "not of the decode node"),
            ("spiffe://b/tandem/router", Wanted::Router, "trust domain a"),
        ] {
            let error = fits(uri, &wanted).expect_err(uri);
            assert!(error.contains(said) && error.contains(uri), "{error}");
        }
    }

    #[test]
    fn who_has_no_name_passes_only_where_that_was_asked_for() {
        let strict = Policy { any_name: false, trust_domain: Some("a".to_owned()) };
        let open = Policy { any_name: true, trust_domain: None };
        assert!(strict.check(Ok(None), &Wanted::Router).expect_err("no name").contains("--node-tls-any-name"));
        assert_eq!(open.check(Ok(None), &Wanted::Router), Ok(()));
        let prefill = named("spiffe://b/tandem/prefill");
        assert_eq!(open.check(Ok(Some(&prefill)), &Wanted::AnyNode), Ok(()), "of any trust domain");
        assert!(open.check(Ok(Some(&prefill)), &Wanted::Router).is_err(), "a name binds all the same");
        assert!(open.check(Err("two URIs"), &Wanted::Router).is_err());
    }
}
