//! Chooses a node's transport once, at start, and says so. A fall-back that nobody asked for is a warning one cannot
//! miss: the cluster works, several times slower than its hardware.
use std::net::SocketAddr;
use std::sync::Arc;

use crate::arena::Arena;
use crate::error::TransferError;
use crate::tcp::{TcpConfig, TcpTransport};
use crate::transport::Transport;
use crate::ucx::{UcxConfig, UcxTransport};

/// Which backend a node is told to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// UCX where it works, else TCP with a warning.
    #[default]
    Auto,
    /// UCX or an error.
    Ucx,
    /// TCP, asked for.
    Tcp,
}

/// Everything that any choice needs.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// The choice.
    pub kind: TransportKind,
    /// For UCX.
    pub ucx: UcxConfig,
    /// Where the tcp backend listens; peers connect to it as it is.
    pub tcp_listen: SocketAddr,
    /// For TCP.
    pub tcp: TcpConfig,
}

/// Starts the transport that `config` asks for over `arena`.
///
/// # Errors
/// Those of the backend that was asked for; with `Auto`, those of TCP after UCX failed.
pub fn select(config: TransportConfig, arena: Arc<Arena>) -> Result<Arc<dyn Transport>, TransferError> {
    let TransportConfig { kind, ucx, tcp_listen, tcp } = config;
    let transport: Arc<dyn Transport> = match kind {
        TransportKind::Ucx => UcxTransport::start(arena, ucx)?,
        TransportKind::Tcp => TcpTransport::bind(tcp_listen, arena, tcp)?,
        TransportKind::Auto => match UcxTransport::start(arena.clone(), ucx) {
            Ok(transport) => transport,
            Err(error) => {
                tracing::warn!("{}", fallback_warning(&error));
                TcpTransport::bind(tcp_listen, arena, tcp)?
            }
        },
    };
    let info = transport.info();
    tracing::info!(transport = info.name, build = info.build_id, "KV transport chosen");
    Ok(transport)
}

fn fallback_warning(error: &TransferError) -> String {
    let line = "=".repeat(78);
    format!(
        "\n{line}\n  KV TRANSPORT: FALLING BACK TO PLAIN TCP\n\n  UCX does not work here: {error}\n\n  \
         Hand-offs will be several times slower than over shared memory or RDMA.\n  \
         Install UCX (Debian: apt install libucx0) or name its directory with\n  \
         --ucx-lib-dir; ask for --transport tcp to accept TCP silently, or for\n  \
         --transport ucx to make this an error.\n{line}"
    )
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tandem_memory::HostMemory;

    use super::*;
    use crate::ucx::UcxProfile;

    fn without_ucx(kind: TransportKind) -> Result<Arc<dyn Transport>, TransferError> {
        let arena = Arena::new(HostMemory::zeroed(64 * 8).expect("little"), 64, 1);
        let ucx = UcxConfig { lib_dir: Some("/nonexistent".into()), ..UcxConfig::new(UcxProfile::Shm) };
        let tcp_listen = (Ipv4Addr::LOCALHOST, 0).into();
        select(TransportConfig { kind, ucx, tcp_listen, tcp: TcpConfig::default() }, arena)
    }

    #[test]
    fn only_auto_falls_back() {
        assert_eq!(without_ucx(TransportKind::Auto).map(|t| t.info().backend), Ok("tcp".into()));
        assert_eq!(without_ucx(TransportKind::Tcp).map(|t| t.info().backend), Ok("tcp".into()));
        assert!(without_ucx(TransportKind::Ucx).is_err());
    }

    #[test]
    fn the_warning_is_large_and_says_what_to_do() {
        let text = fallback_warning(&TransferError::peer_gone("no libucp.so.0"));
        assert!(text.lines().count() >= 10 && text.contains("no libucp.so.0") && text.contains("--ucx-lib-dir"));
    }
}
