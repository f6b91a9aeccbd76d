//! Where a node may say that it is reached: at the host that it calls from. A router that dialled whatever address it
//! is told would be a way into networks that it alone can reach, for whoever may join. What is dialled then is the
//! address that was compared, so that a name that means another one later changes nothing.
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use http::uri::Authority;
use tandem_proto::{Error, ErrorKind, v1};
use tokio::net::lookup_host;

/// Which endpoints of nodes are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum NodeEndpoints {
    /// At the host that the node calls from
    #[default]
    Own,
    /// Wherever the node says: for networks that change addresses on the way
    Any,
}

/// The address at which a node is to be dialled that says of itself `info`, whose endpoint is `told`, and whose call
/// comes from `peer`.
///
/// # Errors
/// `Incompatible`: it is another host's.
pub(super) async fn address(info: &v1::Register, told: &Authority, peer: IpAddr) -> Result<Authority, Error> {
    let refuse = |why: String| Error::new(ErrorKind::Incompatible, format!("node `{}`: {why}", info.node_id));
    let host = told.host().trim_start_matches('[').trim_end_matches(']');
    let port = told.port_u16().unwrap_or_default();
    let found = lookup_host((host, port)).await;
    let found: Vec<IpAddr> =
        found.map_err(|error| refuse(format!("endpoint `{told}`: {error}")))?.map(|at| at.ip()).collect();
    let of_peer = |at: IpAddr| SocketAddr::new(at, port).to_string().parse().ok();
    choose(peer, &found, is_of_this_host).and_then(of_peer).ok_or_else(|| {
        refuse(format!(
            "its endpoint {told} is not at {peer}, where it calls from: give it another --advertise-host, or the router \
             --node-endpoints any"
        ))
    })
}

/// The one of these that is the peer's. Who calls over the loopback device is on this host, and so are its addresses.
fn choose(peer: IpAddr, told: &[IpAddr], is_of_this_host: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
    let peer = peer.to_canonical();
    let mut told = told.iter().map(|at| at.to_canonical());
    told.find(|at| *at == peer || peer.is_loopback() && is_of_this_host(*at))
}

/// Whether this host has the address.
fn is_of_this_host(at: IpAddr) -> bool {
    at != IpAddr::V4(Ipv4Addr::BROADCAST) && !at.is_multicast() && UdpSocket::bind((at, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_the_peers_own_address_is_taken() {
        let this_host = |at: IpAddr| [ip("127.0.0.1"), ip("::1"), ip("10.0.0.1")].contains(&at);
        let chosen = |peer: &str, told: &[&str]| {
            let told: Vec<IpAddr> = told.iter().map(|at| ip(at)).collect();
            choose(ip(peer), &told, this_host).map(|at| at.to_string())
        };
        assert_eq!(chosen("10.0.0.2", &["10.0.0.2"]).as_deref(), Some("10.0.0.2"));
        assert_eq!(chosen("::ffff:10.0.0.2", &["10.0.0.9", "10.0.0.2"]).as_deref(), Some("10.0.0.2"));
        assert_eq!(chosen("127.0.0.1", &["10.0.0.1"]).as_deref(), Some("10.0.0.1"), "of the router's own host");
        assert_eq!(chosen("::1", &["127.0.0.1"]).as_deref(), Some("127.0.0.1"));
        for (peer, told) in [("10.0.0.2", "10.0.0.3"), ("10.0.0.2", "127.0.0.1"), ("10.0.0.2", "169.254.169.254")] {
            assert_eq!(chosen(peer, &[told]), None, "{peer} says {told}");
        }
        assert_eq!((chosen("127.0.0.1", &["10.0.0.2"]), chosen("10.0.0.2", &[])), (None, None));
        assert!(is_of_this_host(ip("127.0.0.1")) && !is_of_this_host(ip("192.0.2.1")));
    }

    #[tokio::test]
    async fn what_is_dialled_is_what_was_compared() {
        let info = v1::Register { node_id: "d0".into(), ..v1::Register::default() };
        let address = async |told: &'static str, peer| address(&info, &Authority::from_static(told), ip(peer)).await;
        assert_eq!(address("127.0.0.1:80", "127.0.0.1").await.unwrap(), "127.0.0.1:80");
        assert_eq!(address("[::1]:80", "::1").await.unwrap(), "[::1]:80");
        let by_name = address("localhost:80", "127.0.0.1").await.unwrap();
        assert!(["127.0.0.1:80", "[::1]:80"].contains(&by_name.as_str()), "{by_name}");
        let error = address("192.0.2.1:80", "127.0.0.1").await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Incompatible);
        assert!(error.message.contains("d0") && error.message.contains("--node-endpoints any"), "{}", error.message);
    }
}
