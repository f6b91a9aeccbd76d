//! How nodes find this router in etcd (`--register`): the address of its nodes' port stands there under a lease, from
//! the first request that it can serve to its drain. The router itself waits for etcd nowhere.
use std::net::SocketAddr;

use anyhow::{Context, bail};
use tandem_etcd::register::{Registered, Standing};
use tandem_etcd::{Etcd, EtcdArgs, HostPort};

use crate::config::Config;

/// What is to stand where.
#[derive(Debug)]
pub struct Registration {
    etcd: Etcd,
    advertise_host: Option<String>,
    standing: Standing,
}

impl Registration {
    /// Of a router with this configuration; `None`: it stands nowhere.
    ///
    /// # Errors
    /// A file cannot be used, or there is no address under which nodes could reach the router.
    pub fn read(config: &Config) -> anyhow::Result<Option<Self>> {
        let Some(address) = &config.register else {
            if config.etcd != EtcdArgs::default() {
                bail!("--etcd-… without --register etcd://host:port/prefix");
            }
            return Ok(None);
        };
        let etcd = Etcd::new(address.clone(), config.etcd.clone())?;
        let (advertise_host, standing) = (config.advertise_host.clone(), Standing::new(&etcd.address));
        let registration = Self { etcd, advertise_host, standing };
        // The real port may be known only once it is bound, and any will do to see whether the host does.
        let (flag, listen) = match config.nodes {
            Some(nodes) => ("--nodes", nodes),
            None => ("--grpc", config.grpc),
        };
        registration.address(SocketAddr::new(listen.ip(), 1)).with_context(|| format!("{flag} {listen}"))?;
        Ok(Some(registration))
    }

    /// Whether it stands there, before it begins and after.
    pub fn standing(&self) -> Standing {
        self.standing.clone()
    }

    /// Begins, for a port at this address. Nodes may come from then on.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn start(self, bound: SocketAddr) -> anyhow::Result<Registered> {
        let address = self.address(bound)?;
        if address.is_loopback() && !self.etcd.address.members.iter().any(HostPort::is_loopback) {
            tracing::warn!(%address, "nodes on other hosts do not reach what stands in etcd: --grpc or --nodes, or --advertise-host");
        }
        Ok(Registered::start(self.etcd, &address, self.standing))
    }

    /// Under which nodes reach a port that is bound there. One that `--advertise-host` names wins: it may be a proxy's.
    fn address(&self, bound: SocketAddr) -> anyhow::Result<HostPort> {
        match &self.advertise_host {
            Some(host) => HostPort::with_default(host, Some(bound.port()))
                .with_context(|| format!("--advertise-host {host:?} is not of the form host or host:port")),
            None if bound.ip().is_unspecified() => {
                bail!("--register: this is on all interfaces: say by --advertise-host under which name nodes reach it")
            }
            None => Ok(bound.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use tandem_config::{ROUTER, Resolved};

    use super::*;
    use crate::config;

    fn read(flags: &str) -> anyhow::Result<Option<Registration>> {
        let words = ["tandem-router", "--model", "m.gguf"].into_iter().chain(flags.split_whitespace());
        let words = words.map(OsString::from).collect();
        let resolved = Resolved::of(ROUTER, config::command(), words, std::collections::BTreeMap::new()).unwrap();
        Registration::read(&Config::of(&resolved)?)
    }

    fn address(flags: &str) -> String {
        let registration = read(&format!("--register etcd://h/p {flags}")).unwrap().unwrap();
        registration.address("10.0.0.1:8002".parse().unwrap()).unwrap().to_string()
    }

    #[test]
    fn the_address_is_that_of_the_nodes_port_or_what_is_advertised() {
        assert!(read("").unwrap().is_none());
        assert_eq!(address(""), "10.0.0.1:8002");
        assert_eq!(address("--advertise-host router-1"), "router-1:8002");
        assert_eq!(address("--nodes 0.0.0.0:0 --advertise-host router-1:9"), "router-1:9");
        assert_eq!(address("--advertise-host [fd00::1]"), "[fd00::1]:8002");
    }

    #[test]
    fn nobody_can_be_told_to_call_all_interfaces() {
        for (flags, words) in [
            ("--register etcd://h/p --grpc 0.0.0.0:0", ["--grpc 0.0.0.0:0", "--advertise-host"]),
            ("--register etcd://h/p --nodes [::]:8002", ["--nodes [::]:8002", "--advertise-host"]),
            ("--register etcd://h/p --advertise-host http://h", ["--advertise-host", "host:port"]),
            ("--etcd-ca ca.pem", ["--etcd-", "--register"]),
            ("--register etcds://h/p --etcd-ca no-such-file", ["--etcd-ca", "no-such-file"]),
        ] {
            let error = format!("{:#}", read(flags).unwrap_err());
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
        let refused = |flags: &str| {
            let words = ["r", "--model", "m.gguf"].into_iter().chain(flags.split_whitespace());
            config::command().try_get_matches_from(words).unwrap_err().to_string()
        };
        assert!(refused("--register etcd://h").contains("no prefix"));
        let secret = refused("--register etcd://root:geheim@h:1/p");
        assert!(secret.contains("--etcd-password") && !secret.contains("geheim"), "{secret}");
        assert!(refused("--advertise-host h").contains("--register"));
    }
}
