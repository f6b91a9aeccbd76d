//! Addresses as people write them: of an etcd cluster with a prefix, and of one host and port. Pure.
use std::fmt::{self, Display};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// etcd's own.
const DEFAULT_PORT: u16 = 2379;
/// A cluster of etcd has 7 members at most in practice.
const MAX_MEMBERS: usize = 16;
/// Of a name in DNS (RFC 1035).
const MAX_HOST: usize = 253;
const MAX_PREFIX: usize = 512;
/// What the errors name.
const FORM: &str = "etcd://host:port[,host:port…]/prefix, or etcds://… for TLS";

/// An address is not of the form that it should have; says which form that is.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WrongAddress(String);

/// `etcd://host:port,host:port/prefix`: the members of a cluster, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdAddress {
    /// `etcds://`.
    pub tls: bool,
    /// One at least.
    pub members: Vec<HostPort>,
    prefix: String,
}

impl EtcdAddress {
    /// Whether a text is meant to be one.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with("etcd://") || text.starts_with("etcds://")
    }

    /// Of all keys that count: it begins and ends with a slash.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }
}

impl FromStr for EtcdAddress {
    type Err = WrongAddress;

    fn from_str(text: &str) -> Result<Self, WrongAddress> {
        let wrong = |why: &str| WrongAddress(format!("{why}: it has the form {FORM}"));
        let (tls, rest) = match (text.strip_prefix("etcd://"), text.strip_prefix("etcds://")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return Err(wrong("not an address of etcd")),
        };
        let (members, path) = rest.split_once('/').ok_or_else(|| wrong("no prefix"))?;
        if members.contains('@') {
            // The text may hold a password: it is not repeated.
            return Err(WrongAddress("user and password are not part of it: --etcd-user, --etcd-password".to_owned()));
        }
        let member = |text| HostPort::with_default(text, Some(DEFAULT_PORT)).ok_or_else(|| wrong("not host:port"));
        let members: Vec<_> = members.split(',').map(member).collect::<Result<_, _>>()?;
        if members.len() > MAX_MEMBERS {
            return Err(WrongAddress(format!("{} members, {MAX_MEMBERS} at most", members.len())));
        }
        let path = path.trim_matches('/');
        let plain = path.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#%".contains(&byte));
        if path.is_empty() || path.len() > MAX_PREFIX || !plain || path.contains("//") {
            return Err(wrong("its prefix is not one of visible ASCII characters without ?, # and %"));
        }
        Ok(Self { tls, members, prefix: format!("/{path}/") })
    }
}

impl Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<_> = self.members.iter().map(HostPort::to_string).collect();
        let scheme = if self.tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}{}", members.join(","), self.prefix.trim_end_matches('/'))
    }
}

/// A host, by name or address, and a port of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// The host, an IPv6 address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, not 0.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether only processes of the same host reach it.
    pub fn is_loopback(&self) -> bool {
        self.host.parse::<IpAddr>().map_or(self.host == "localhost", |address| address.is_loopback())
    }

    /// `host:port`, and with a default port `host` as well.
    pub fn with_default(text: &str, default: Option<u16>) -> Option<Self> {
        // Colons of an IPv6 address stand in brackets, or the address stands alone.
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port.parse().ok()?)),
            _ => (text, default),
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bare {
            Some(bare) => bare.parse::<IpAddr>().ok().filter(IpAddr::is_ipv6).map(|address| address.to_string())?,
            None => Some(host).filter(|host| is_name(host))?.to_owned(),
        };
        Some(Self { host, port: port.filter(|port| *port != 0)? })
    }
}

/// A name of DNS, or an IPv4 address.
fn is_name(host: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !host.is_empty() && host.len() <= MAX_HOST && host.bytes().all(plain)
}

impl FromStr for HostPort {
    type Err = WrongAddress;

    fn from_str(text: &str) -> Result<Self, WrongAddress> {
        Self::with_default(text, None).ok_or_else(|| WrongAddress("not of the form host:port".to_owned()))
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self { host: address.ip().to_string(), port: address.port() }
    }
}

impl Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_is_of_members_and_a_prefix() {
        let address: EtcdAddress = "etcd://10.0.0.1:2379,etcd-2,[::1]:1/tandem/routers/".parse().unwrap();
        let members: Vec<_> = address.members.iter().map(HostPort::to_string).collect();
        assert_eq!(members, ["10.0.0.1:2379", "etcd-2:2379", "[::1]:1"]);
        assert_eq!((address.tls, address.prefix()), (false, "/tandem/routers/"));
        assert_eq!(address.to_string(), "etcd://10.0.0.1:2379,etcd-2:2379,[::1]:1/tandem/routers");
        assert_eq!(address.to_string().parse(), Ok(address));
        let address: EtcdAddress = "etcds://e:1/a".parse().unwrap();
        assert_eq!((address.tls, address.prefix(), address.members.len()), (true, "/a/", 1));
        assert!(
            EtcdAddress::is_meant("etcds://") && !EtcdAddress::is_meant("etcd:/x") && !EtcdAddress::is_meant("e:1")
        );
    }

    #[test]
    fn what_is_no_address_says_which_form_it_has() {
        for text in [
            "etcd://h:1",
            "etcd://h:1/",
            "etcd://h:1//",
            "etcd:///p",
            "etcd://,/p",
            "etcd://h:0/p",
            "etcd://h:70000/p",
            "etcd://h:1,/p",
            "etcd://::1:2379/p",
            "etcd://h:1/a b",
            "etcd://h:1/a?b",
            "etcd://h:1/a//b",
            "etcd://h:1/ä",
            "http://h:1/p",
            "etcd://[h]:1/p",
            "etcd://[10.0.0.1]:1/p",
            "h:1/p",
            "",
        ] {
            let error = text.parse::<EtcdAddress>().unwrap_err().to_string();
            assert!(error.contains("etcd://host:port"), "{text}: {error}");
        }
        let many = vec!["h"; 17].join(",");
        assert!(format!("etcd://{many}/p").parse::<EtcdAddress>().unwrap_err().to_string().contains("16 at most"));
        assert!(format!("etcd://h/{}", "p".repeat(513)).parse::<EtcdAddress>().is_err());
        let secret = "etcd://root:geheim@h:1/p".parse::<EtcdAddress>().unwrap_err().to_string();
        assert!(secret.contains("--etcd-password") && !secret.contains("geheim"), "{secret}");
    }

    #[test]
    fn a_value_is_a_host_and_a_port() {
        for (text, host, port) in
            [("10.0.0.1:8002", "10.0.0.1", 8002), ("[fd00::1]:1", "fd00::1", 1), ("a.b-c:9", "a.b-c", 9)]
        {
            let parsed: HostPort = text.parse().unwrap();
            assert_eq!((parsed.host(), parsed.port(), parsed.to_string().as_str()), (host, port, text));
        }
        let is_loopback = |text: &str| text.parse::<HostPort>().unwrap().is_loopback();
        assert!(is_loopback("127.0.0.1:1") && is_loopback("[::1]:1") && is_loopback("localhost:1"));
        assert!(!is_loopback("10.0.0.1:1") && !is_loopback("router-1:1"));
        assert_eq!(HostPort::from(SocketAddr::from(([127, 0, 0, 1], 5))), "127.0.0.1:5".parse().unwrap());
        let long = format!("{}:1", "a".repeat(254));
        for text in ["a", "a:", ":1", "a:b", "http://a:1", "a:1/b", "a b:1", "a:1\n", "[a]:1", "::1", &long] {
            assert!(text.parse::<HostPort>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_parses_comes_back(text in "(etcds?://)?[a-z0-9\\[\\]:,/@.é -]{0,40}") {
            if let Ok(address) = text.parse::<EtcdAddress>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
            if let Ok(address) = text.parse::<HostPort>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
