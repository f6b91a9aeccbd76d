//! One `--router`, as people write it: a URL, a name whose addresses are routers, or a prefix of etcd under which their
//! addresses stand. Plain data; [`crate::router_source`] asks, [`crate::routers`] dials.
use std::time::Duration;

use anyhow::{Context, bail};
use tandem_etcd::{Etcd, EtcdAddress, EtcdArgs};
use tonic::transport::Endpoint;

/// Flags, and addresses of one name or prefix: routers are few.
pub const MAX_ROUTERS: usize = 16;
/// The router's keep-alive: a router that vanished without a word is noticed after at most the sum of the two.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// What the errors name.
const FORMS: &str =
    "http://host:port, https://host:port, dns:///host:port, etcd://host:port/prefix or etcds://host:port/prefix";

/// One `--router`.
#[derive(Clone, Debug)]
pub enum RouterAddress {
    /// One router.
    Url(Box<Endpoint>),
    /// As many as the name has addresses.
    Dns {
        /// The name.
        host: String,
        /// Of all of them.
        port: u16,
    },
    /// As many as have registered there.
    Etcd(Box<Etcd>),
}

impl RouterAddress {
    /// One of these, at etcd with these flags.
    ///
    /// # Errors
    /// The text is none, or a file of the flags cannot be used.
    pub fn read(text: &str, etcd: &EtcdArgs) -> anyhow::Result<Self> {
        if EtcdAddress::is_meant(text) {
            // The text may hold a password, which is wrong, and not repeated.
            let address = text.parse().context("--router etcd://…")?;
            return Ok(Self::Etcd(Box::new(Etcd::new(address, etcd.clone())?)));
        }
        if text.contains('@') {
            // Nor here.
            bail!("--router: user and password are not part of a router's address");
        }
        let wrong = || format!("--router {text:?} is not of the form {FORMS}");
        match text.strip_prefix("dns:///") {
            Some(name) => {
                let (host, port) = name.rsplit_once(':').with_context(wrong)?;
                // An IPv6 address has brackets here, and nowhere else.
                let host = host.trim_matches(['[', ']']);
                let port = port.parse().ok().filter(|port| *port != 0 && !host.is_empty()).with_context(wrong)?;
                Ok(Self::Dns { host: host.to_owned(), port })
            }
            None => endpoint(text).map(|endpoint| Self::Url(Box::new(endpoint))).with_context(wrong),
        }
    }

    /// Name and port of whom is asked first: of etcd, one of its members.
    pub fn host(&self) -> Option<(&str, u16)> {
        match self {
            Self::Url(endpoint) => endpoint.uri().host().map(|host| (host, endpoint.uri().port_u16().unwrap_or(80))),
            Self::Dns { host, port } => Some((host, *port)),
            Self::Etcd(etcd) => etcd.address.members.first().map(|member| (member.host(), member.port())),
        }
    }
}

/// The way to a router there; `None`: not of the form http://host:port or https://host:port.
pub fn endpoint(url: &str) -> Option<Endpoint> {
    let endpoint = Endpoint::from_shared(url.to_owned()).ok()?;
    let whole = matches!(endpoint.uri().scheme_str(), Some("http" | "https")) && endpoint.uri().authority().is_some();
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    whole.then_some(endpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_url_a_name_or_a_prefix() {
        let parse = |text: &str| RouterAddress::read(text, &EtcdArgs::default());
        let host = |text: &str| parse(text).unwrap().host().map(|(host, port)| (host.to_owned(), port));
        assert_eq!(host("http://10.1.2.3:8001"), Some(("10.1.2.3".into(), 8001)));
        assert_eq!(host("https://name:8001"), Some(("name".into(), 8001)));
        assert_eq!(host("dns:///tandem-nodes:8002"), Some(("tandem-nodes".into(), 8002)));
        assert!(matches!(parse("dns:///[::1]:8002").unwrap(), RouterAddress::Dns { port: 8002, .. }));
        assert_eq!(host("etcd://10.1.2.3,b/tandem"), Some(("10.1.2.3".into(), 2379)));
        let wrong = format!("{:#}", parse("etcd://10.1.2.3:2379").unwrap_err());
        assert!(wrong.contains("--router") && wrong.contains("no prefix"), "{wrong}");
        for wrong in ["dns:///name", "dns://name:1", "dns:///:1", "dns:///name:0", "name:1", "ftp://name:1"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("dns:///host:port") && error.contains("etcds://"), "{wrong}: {error}");
        }
        for secret in ["http://root:geheim@h:1", "ftp://root:geheim@h", "etcds://root:geheim@h:1/p"] {
            let error = format!("{:#}", parse(secret).unwrap_err());
            assert!(error.contains("password") && !error.contains("geheim"), "{error}");
        }
    }
}
