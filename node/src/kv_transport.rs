//! How KV travels from and to this node: the flags, what they resolve to, and the transports that are started from it.
//! Where these reach is [`crate::reach`]'s matter.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure};
use clap::{Args, ValueEnum};
use tandem_kvtransfer::select::{Need, TransportConfig, TransportKind, Wanted, select};
use tandem_kvtransfer::tcp::{Protection, TcpConfig};
use tandem_kvtransfer::ucx::{AddressKeys, SETTINGS, UcxConfig, UcxProfile};
use tandem_kvtransfer::{Arena, Faults, TransferError, TransferErrorKind, Transports};
use tandem_memory::Place;
use tandem_ports::JoinTokens;

use crate::reach::{self, Fabric};

/// Flags of the KV transports.
#[derive(Args, Debug)]
pub struct KvTransportArgs {
    /// How KV travels between nodes: one transport, or several, the preferred one first. Each pair of nodes takes the
    /// first that both have and by which they reach each other. auto: all that this node has, ucx/rdma before ucx/shm
    /// before tcp. KV of a GPU needs a UCX with CUDA (--ucx-lib-dir), and is else staged through main memory over tcp.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WAY,…", default_value = "auto")]
    pub transport: Vec<TransportArg>,
    /// What `ucx` means in --transport [default: shm]. With --transport auto: this one alone beside tcp.
    #[arg(long, value_enum)]
    pub ucx_profile: Option<UcxProfileArg>,
    /// Network devices for ucx/rdma and ucx/tcp, as UCX names them: mlx5_0:1,mlx5_1:1 or eth0; UCX_NET_DEVICES.
    /// Without it ucx/rdma takes all, and ucx/tcp those that lead to the router: lo, or all of them.
    #[arg(long, value_name = "DEVICE,…")]
    pub kv_device: Option<String>,
    /// UCX's own transports instead of those that a profile takes, such as rc,ud,self; UCX_TLS. For one profile.
    #[arg(long, value_name = "TLS,…")]
    pub ucx_tls: Option<String>,
    /// Folder of libucp.so.0, instead of the system's.
    #[arg(long, value_name = "DIR")]
    pub ucx_lib_dir: Option<PathBuf>,
    /// A peer that neither takes nor sends anything for so long in the middle of a KV transfer is lost.
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(100..=600_000))]
    pub kv_stall_ms: u32,
    /// After an aborted hand-off, wait so long for the peer's writes to end before its connection is closed by force.
    /// Until then its blocks are in quarantine.
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(10..=600_000))]
    pub kv_grace_ms: u32,
    /// Where the tcp transport listens [default: a free port of the address from which the router is reached]
    #[arg(long, value_name = "ADDR")]
    pub kv_listen: Option<SocketAddr>,
    /// Address under which other nodes reach --kv-listen, when that listens on all interfaces or behind another port.
    #[arg(long, value_name = "HOST:PORT")]
    pub kv_advertise: Option<String>,
    /// Encrypt KV on the network: AES-256-GCM over tcp, on all nodes or on none. UCX does not encrypt, and then moves
    /// KV within a host only.
    #[arg(long)]
    pub kv_encrypt: bool,
    /// Whether decode copies KV out of prefill's memory, where both are processes of one host and user: one copy, and
    /// no process writes into another's memory. off: through UCX's queue, two copies. One of the two nodes suffices.
    #[arg(long, value_enum, default_value = "auto")]
    pub kv_one_copy: OneCopyArg,
}

/// `--kv-one-copy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OneCopyArg {
    /// Where the receiver can map the sender's memory.
    Auto,
    /// Never.
    Off,
}

/// One of `--transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// All that work here; tcp alone is a warning.
    Auto,
    /// UCX as --ucx-profile says, or fail.
    Ucx,
    /// UCX over shared memory of one host.
    #[value(name = "ucx/shm")]
    UcxShm,
    /// UCX over RDMA network cards.
    #[value(name = "ucx/rdma")]
    UcxRdma,
    /// UCX over sockets, for development only: every peer that reaches the port can write into memory.
    #[value(name = "ucx/tcp")]
    UcxTcp,
    /// Plain sockets.
    Tcp,
}

/// `--ucx-profile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UcxProfileArg {
    /// Shared memory of one host.
    Shm,
    /// For development only: every peer that reaches the port can write into memory.
    Tcp,
    /// RDMA network cards.
    Rdma,
}

impl UcxProfileArg {
    fn profile(self) -> UcxProfile {
        match self {
            Self::Shm => UcxProfile::Shm,
            Self::Tcp => UcxProfile::Tcp,
            Self::Rdma => UcxProfile::Rdma,
        }
    }
}

/// Resolved.
#[derive(Clone, Debug)]
pub struct KvTransportConfig {
    choice: Choice,
    devices: Option<String>,
    ucx_tls: Option<String>,
    /// Where libucp is.
    pub ucx_lib_dir: Option<PathBuf>,
    /// The operator's variables of UCX, with their names as they are.
    operators: Vec<(String, String)>,
    stall: Duration,
    grace: Duration,
    listen: SocketAddr,
    advertise: Option<String>,
    /// What leaves the host.
    protection: Protection,
    one_copy: OneCopyArg,
}

/// `--transport` and `--ucx-profile`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    /// All that work here, of UCX only this profile if one was named.
    Auto(Option<UcxProfile>),
    /// These, in this order.
    These(Vec<TransportKind>),
}

impl KvTransportArgs {
    /// `toward_router`: the address from which the router is reached; `variables`: the environment.
    ///
    /// # Errors
    /// Flags that do not go together.
    pub fn resolve(
        self,
        toward_router: IpAddr,
        variables: impl Iterator<Item = (String, String)>,
    ) -> anyhow::Result<KvTransportConfig> {
        let choice = choice(&self.transport, self.ucx_profile.map(UcxProfileArg::profile))?;
        let mut operators: Vec<_> = variables.filter(|(name, value)| is_operators(name, value)).collect();
        operators.sort_unstable();
        let set = |name: &str| operators.iter().any(|(of, _)| of == name);
        for (flag, given, name) in [
            ("--kv-device", self.kv_device.is_some(), "UCX_NET_DEVICES"),
            ("--ucx-tls", self.ucx_tls.is_some(), "UCX_TLS"),
        ] {
            ensure!(!(given && set(name)), "{name} in the environment and {flag} say the same thing: leave one out");
        }
        if self.ucx_tls.is_some() && choice.profiles().len() != 1 {
            bail!("--ucx-tls is for one profile of UCX: name it, as in --transport ucx/shm,tcp");
        }
        let named = |profile| choice != Choice::Auto(None) && choice.profiles().contains(&profile);
        if self.kv_encrypt && (named(UcxProfile::Rdma) || named(UcxProfile::Tcp)) {
            bail!("--kv-encrypt: UCX does not encrypt what leaves the host; name ucx/shm and tcp alone in --transport");
        }
        Ok(KvTransportConfig {
            choice,
            devices: self.kv_device,
            ucx_tls: self.ucx_tls,
            ucx_lib_dir: self.ucx_lib_dir,
            operators,
            stall: Duration::from_millis(self.kv_stall_ms.into()),
            grace: Duration::from_millis(self.kv_grace_ms.into()),
            listen: self.kv_listen.unwrap_or(SocketAddr::new(toward_router, 0)),
            advertise: self.kv_advertise,
            protection: if self.kv_encrypt { Protection::Encrypted } else { Protection::Bound },
            one_copy: self.kv_one_copy,
        })
    }
}

impl Choice {
    /// The profiles of UCX that it may start.
    fn profiles(&self) -> Vec<UcxProfile> {
        let of = |kind: &TransportKind| match kind {
            TransportKind::Ucx(profile) => Some(*profile),
            TransportKind::Tcp => None,
        };
        match self {
            Self::Auto(Some(profile)) => vec![*profile],
            Self::Auto(None) => vec![UcxProfile::Rdma, UcxProfile::Shm],
            Self::These(kinds) => kinds.iter().filter_map(of).collect(),
        }
    }
}

fn choice(transports: &[TransportArg], profile: Option<UcxProfile>) -> anyhow::Result<Choice> {
    if transports == [TransportArg::Auto] {
        return Ok(Choice::Auto(profile));
    }
    let mut kinds = Vec::new();
    for transport in transports {
        let kind = match transport {
            TransportArg::Auto => bail!("--transport auto is all that this node has: name no other beside it"),
            TransportArg::Ucx => TransportKind::Ucx(profile.unwrap_or(UcxProfile::Shm)),
            TransportArg::UcxShm => TransportKind::Ucx(UcxProfile::Shm),
            TransportArg::UcxRdma => TransportKind::Ucx(UcxProfile::Rdma),
            TransportArg::UcxTcp => TransportKind::Ucx(UcxProfile::Tcp),
            TransportArg::Tcp => TransportKind::Tcp,
        };
        ensure!(!kinds.contains(&kind), "--transport names {kind} twice");
        kinds.push(kind);
    }
    Ok(Choice::These(kinds))
}

/// Not one that this process has set itself, see `prepare_environment`.
fn is_operators(name: &str, value: &str) -> bool {
    name.starts_with("UCX_") && !SETTINGS.contains(&(name, value))
}

/// The address of this host from which `host`:`port` is reached. Asks the kernel, and sends nothing. Loopback where the
/// host has no address yet.
pub fn address_toward(host: &str, port: u16) -> IpAddr {
    let route = || {
        use std::net::{ToSocketAddrs, UdpSocket};
        let there = (host.trim_start_matches('[').trim_end_matches(']'), port).to_socket_addrs().ok()?.next()?;
        let any: SocketAddr = if there.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(there).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    route().filter(|ip| !ip.is_unspecified()).unwrap_or(Ipv4Addr::LOCALHOST.into())
}

impl KvTransportConfig {
    /// Starts them over `arena`; `join` is the cluster's secret, `faults` are for demonstrations.
    ///
    /// # Errors
    /// A transport that was asked for does not work here.
    pub fn start(
        &self,
        arena: &Arc<Arena>,
        join: Option<&JoinTokens>,
        faults: Faults,
    ) -> Result<Transports, TransferError> {
        if !self.operators.is_empty() {
            let set: Vec<String> = self.operators.iter().map(|(name, value)| format!("{name}={value}")).collect();
            tracing::info!("UCX's variables of the environment win over this program's: {}", set.join(" "));
        }
        let wanted = self.wanted(arena.memory().place(), !Fabric::default().subnets(&self.rdma_devices()).is_empty());
        let wanted = may_lock(wanted, arena.bytes())?;
        let ucx = self.choice.profiles().into_iter().map(|profile| self.ucx(profile, join, faults)).collect();
        let (stall_timeout, grace, advertise) = (self.stall, self.grace, self.advertise.clone());
        let protection = self.protection;
        let tcp = TcpConfig { stall_timeout, grace, faults, protection, advertise, ..TcpConfig::default() };
        let started = select(&TransportConfig { wanted, ucx, tcp_listen: self.listen, tcp }, arena)?;
        let mut offered = started.into_iter().map(|(kind, transport)| {
            let reach = self.reach(kind, &String::from_utf8_lossy(&transport.address()));
            (transport, Some(reach))
        });
        // `select` gives one at least.
        let first = offered.next().ok_or_else(|| TransferError::peer_gone("no KV transport was started"))?;
        Ok(Transports::new(first, offered.collect()))
    }

    /// In order. `kv` is where the KV lies, `fabric` whether an RDMA port is up.
    fn wanted(&self, kv: Place<'_>, fabric: bool) -> Vec<Wanted> {
        let asked = |kind| Wanted { kind, need: Need::Asked };
        let possible = |profile| Wanted { kind: TransportKind::Ucx(profile), need: Need::IfPossible };
        let tcp = asked(TransportKind::Tcp);
        match (&self.choice, kv) {
            (Choice::These(kinds), _) => kinds.iter().copied().map(asked).collect(),
            // Whoever names RDMA does not want to find out by the speed that it is not there.
            (Choice::Auto(Some(UcxProfile::Rdma)), _) => vec![asked(TransportKind::Ucx(UcxProfile::Rdma)), tcp],
            (Choice::Auto(Some(profile)), _) => vec![possible(*profile), tcp],
            // From GPU to GPU over a fabric nothing was ever measured: by name only.
            (Choice::Auto(None), Place::Host(_)) if fabric && self.protection == Protection::Bound => {
                vec![possible(UcxProfile::Rdma), possible(UcxProfile::Shm), tcp]
            }
            (Choice::Auto(None), _) => vec![possible(UcxProfile::Shm), tcp],
        }
    }

    fn ucx(&self, profile: UcxProfile, join: Option<&JoinTokens>, faults: Faults) -> UcxConfig {
        // Addresses that nodes of this cluster made, and nobody else: without a token anybody could have.
        let keys = |join: JoinTokens| AddressKeys::new(move || join.derive_all("tandem kv addresses"));
        let address_keys = join.cloned().map_or_else(AddressKeys::default, keys);
        let operators = self.operators.iter().filter_map(|(name, _)| name.strip_prefix("UCX_").map(str::to_owned));
        let usual = UcxConfig::new(profile);
        UcxConfig {
            lib_dir: self.ucx_lib_dir.clone(),
            net_devices: self.own_devices(profile),
            tls: self.ucx_tls.clone(),
            operators: operators.collect(),
            stall_timeout: self.stall,
            grace: self.grace,
            faults,
            address_keys,
            one_copy: usual.one_copy && self.one_copy == OneCopyArg::Auto,
            ..usual
        }
    }

    fn own_devices(&self, profile: UcxProfile) -> String {
        let leaves = profile == UcxProfile::Tcp && !self.listen.ip().is_loopback();
        let usual = if leaves { "all" } else { profile.usual_devices() };
        self.devices.clone().unwrap_or_else(|| usual.to_owned())
    }

    /// Those that UCX uses then: the operator's variable wins.
    fn devices(&self, profile: UcxProfile) -> String {
        let operators = self.operators.iter().find(|(name, _)| name == "UCX_NET_DEVICES");
        operators.map_or_else(|| self.own_devices(profile), |(_, devices)| devices.clone())
    }

    fn rdma_devices(&self) -> String {
        self.devices(UcxProfile::Rdma)
    }

    fn reach(&self, kind: TransportKind, address: &str) -> tandem_proto::v1::transport_info::Reach {
        let devices = match kind {
            TransportKind::Ucx(profile) => self.devices(profile),
            TransportKind::Tcp => String::new(),
        };
        reach::of(kind, address, &devices)
    }
}

/// An RDMA device locks all KV memory. Where this process may not, that is an error if RDMA was asked for, and else the
/// way is left out with a warning.
fn may_lock(mut wanted: Vec<Wanted>, bytes: usize) -> Result<Vec<Wanted>, TransferError> {
    let rdma = TransportKind::Ucx(UcxProfile::Rdma);
    let Some(place) = wanted.iter().position(|wanted| wanted.kind == rdma) else { return Ok(wanted) };
    let Some(why) = reach::memory_lock_refusal(bytes) else { return Ok(wanted) };
    if wanted[place].need == Need::Asked {
        return Err(TransferError::new(TransferErrorKind::Io, why));
    }
    tracing::warn!("ucx/rdma is left out: {why}");
    wanted.remove(place);
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tandem_memory::{HostMemory, KvMemory};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        kv: KvTransportArgs,
    }

    const LAN: &str = "10.0.0.7";

    fn parse_in(flags: &str, toward: &str, variables: &[(&str, &str)]) -> anyhow::Result<KvTransportConfig> {
        let flags = std::iter::once("node").chain(flags.split_whitespace());
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Cli::try_parse_from(flags)?.kv.resolve(toward.parse()?, variables)
    }

    fn parse(flags: &str) -> anyhow::Result<KvTransportConfig> {
        parse_in(flags, LAN, &[])
    }

    fn wanted(flags: &str, fabric: bool) -> Vec<(String, Need)> {
        wanted_at(HostMemory::zeroed(64).expect("little").place(), flags, fabric)
    }

    fn wanted_at(place: Place<'_>, flags: &str, fabric: bool) -> Vec<(String, Need)> {
        let wanted = parse(flags).expect("flags").wanted(place, fabric);
        wanted.into_iter().map(|Wanted { kind, need }| (kind.to_string(), need)).collect()
    }

    #[test]
    fn auto_is_all_that_there_is_and_a_name_is_a_demand() {
        let possible = |name: &str| (name.to_owned(), Need::IfPossible);
        let asked = |name: &str| (name.to_owned(), Need::Asked);
        assert_eq!(wanted("", false), [possible("ucx/shm"), asked("tcp")]);
        assert_eq!(wanted("", true), [possible("ucx/rdma"), possible("ucx/shm"), asked("tcp")]);
        assert_eq!(wanted("--kv-encrypt", true), [possible("ucx/shm"), asked("tcp")], "RDMA is in the clear");
        assert_eq!(wanted("--ucx-profile tcp", true), [possible("ucx/tcp"), asked("tcp")]);
        assert_eq!(wanted("--ucx-profile rdma", false), [asked("ucx/rdma"), asked("tcp")]);
        assert_eq!(wanted("--transport ucx", true), [asked("ucx/shm")]);
        assert_eq!(wanted("--transport ucx --ucx-profile tcp", true), [asked("ucx/tcp")]);
        let three = "--transport tcp,ucx/rdma,ucx/shm";
        assert_eq!(wanted(three, false), [asked("tcp"), asked("ucx/rdma"), asked("ucx/shm")]);
        let gpu = |flags| wanted_at(Place::Cuda { device: 0, address: 1 << 40 }, flags, true);
        assert_eq!(gpu(""), [possible("ucx/shm"), asked("tcp")], "over a fabric by name only");
        assert_eq!(gpu("--transport ucx"), [asked("ucx/shm")]);
        assert_eq!(gpu("--ucx-profile rdma"), [asked("ucx/rdma"), asked("tcp")]);
    }

    #[test]
    fn ucx_over_sockets_leaves_the_host_where_the_router_is_elsewhere() {
        let devices = |flags: &str, toward: &str| {
            let config = parse_in(flags, toward, &[]).expect("flags");
            config.ucx(UcxProfile::Tcp, None, Faults::default()).net_devices
        };
        assert_eq!(devices("", "127.0.0.1"), "lo");
        assert_eq!(devices("", LAN), "all");
        assert_eq!(devices("--kv-device eth0", "127.0.0.1"), "eth0");
        assert_eq!(devices("--kv-listen 127.0.0.1:0", LAN), "lo");
    }

    #[test]
    fn one_copy_is_for_shared_memory_and_can_be_switched_off() {
        let one_copy =
            |flags: &str, profile| parse(flags).expect("flags").ucx(profile, None, Faults::default()).one_copy;
        assert!(one_copy("", UcxProfile::Shm) && !one_copy("", UcxProfile::Tcp));
        assert!(!one_copy("--kv-one-copy off", UcxProfile::Shm));
    }

    #[test]
    fn the_operators_variables_win() {
        let variables = [("UCX_NET_DEVICES", "mlx5_3:1"), ("UCX_HANDLE_ERRORS", "none"), ("PATH", "/bin")];
        let config = parse_in("", LAN, &variables).expect("flags");
        let ucx = config.ucx(UcxProfile::Rdma, None, Faults::default());
        assert_eq!(ucx.operators, ["NET_DEVICES"]);
        assert!(ucx.settings(false).iter().all(|(name, _)| *name != "NET_DEVICES"));
        assert_eq!(config.devices(UcxProfile::Rdma), "mlx5_3:1", "by which its subnets are told");
        let flags = parse_in("--transport ucx/rdma --ucx-tls dc,self --kv-device mlx5_0:1", LAN, &[]).expect("flags");
        let ucx = flags.ucx(UcxProfile::Rdma, None, Faults::default());
        assert!(ucx.settings(false).contains(&("TLS", "dc,self".to_owned())), "{:?}", ucx.settings(false));
        assert!(ucx.settings(false).contains(&("NET_DEVICES", "mlx5_0:1".to_owned())), "{:?}", ucx.settings(false));
    }

    #[test]
    fn the_address_toward_a_host_is_one_of_this_host() {
        assert_eq!(address_toward("127.0.0.1", 1), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(address_toward("no such host", 1), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }

    #[test]
    fn wrong_flags_are_clear() {
        for (flags, variables, word) in [
            ("--transport auto,tcp", [].as_slice(), "name no other beside it"),
            ("--transport ucx,ucx/shm", &[], "names ucx/shm twice"),
            ("--transport carrier-pigeon", &[], "ucx/rdma"),
            ("--ucx-tls rc,self", &[], "--transport ucx/shm,tcp"),
            ("--transport ucx --ucx-tls rc", &[("UCX_TLS", "sysv")], "UCX_TLS in the environment and --ucx-tls"),
            ("--kv-encrypt --ucx-profile rdma", &[], "UCX does not encrypt"),
            ("--kv-encrypt --transport ucx/tcp,tcp", &[], "UCX does not encrypt"),
            ("--kv-device eth0", &[("UCX_NET_DEVICES", "eth1")], "--kv-device"),
        ] {
            let error = parse_in(flags, LAN, variables).expect_err(flags).to_string();
            assert!(error.contains(word), "{flags}: {error}");
        }
    }
}
