//! One `--router`, as people write it: a URL, or a name whose addresses are routers. Plain data; [`crate::routers`]
//! dials.
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use tonic::transport::Endpoint;

/// Flags, and addresses of one name: routers are few.
pub const MAX_ROUTERS: usize = 16;
/// The router's keep-alive: a router that vanished without a word is noticed after at most the sum of the two.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

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
}

impl RouterAddress {
    /// Name and port.
    pub fn host(&self) -> Option<(&str, u16)> {
        match self {
            Self::Url(endpoint) => endpoint.uri().host().map(|host| (host, endpoint.uri().port_u16().unwrap_or(80))),
            Self::Dns { host, port } => Some((host, *port)),
        }
    }
}

impl FromStr for RouterAddress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let wrong =
            || format!("--router {text:?} is not of the form http://host:port, https://host:port or dns:///host:port");
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
    fn an_address_is_a_url_or_a_name() {
        let parse = |text: &str| text.parse::<RouterAddress>();
        let host = |text: &str| parse(text).unwrap().host().map(|(host, port)| (host.to_owned(), port));
        assert_eq!(host("http://10.1.2.3:8001"), Some(("10.1.2.3".into(), 8001)));
        assert_eq!(host("https://name:8001"), Some(("name".into(), 8001)));
        assert_eq!(host("dns:///tandem-nodes:8002"), Some(("tandem-nodes".into(), 8002)));
        assert!(matches!(parse("dns:///[::1]:8002").unwrap(), RouterAddress::Dns { port: 8002, .. }));
        for wrong in ["dns:///name", "dns://name:1", "dns:///:1", "dns:///name:0", "name:1", "ftp://name:1"] {
            assert!(parse(wrong).unwrap_err().to_string().contains("dns:///host:port"), "{wrong}");
        }
    }
}
