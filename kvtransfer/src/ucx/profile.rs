//! Which of UCX's transports a node uses. Resolved settings only; `owners.rs` hands them to UCX.
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::address::AddressKeys;
use crate::mutation::Mutation;
use crate::session::DEFAULT_GRACE;
use crate::terms::Faults;

/// Shared memory without CMA is a ring: the sender copies in, the receiver copies out. UCX's own 64 fragments of 8 KiB
/// take half of a core's second-level cache, so that the copies miss it; a quarter of that is half as fast again
/// (docs/benchmarks/transfer.md).
const RING_FRAGMENTS: usize = 8;
/// 16 KiB and UCX's headers.
const RING_FRAGMENT_BYTES: usize = (16 << 10) + 64;

/// From device to device of one host the receiver reads, and nobody else writes (`device.rs`).
pub(super) const READS: [(&str, &str); 2] = [("CUDA_IPC_ENABLE_GET_ZCOPY", "on"), ("RNDV_SCHEME", "get_zcopy")];

/// Where the peers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UcxProfile {
    /// On this host: System V and POSIX shared memory.
    Shm,
    /// Anywhere, over sockets. UCX over TCP lets any peer write any memory of the process: a trusted network only.
    Tcp,
    /// On the InfiniBand or RoCE fabric.
    Rdma,
}

impl fmt::Display for UcxProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

impl UcxProfile {
    /// Devices where nobody names any. UCX over sockets lets peers write any memory, so it stays on this host then.
    pub fn usual_devices(self) -> &'static str {
        match self {
            Self::Tcp => "lo",
            Self::Shm | Self::Rdma => "all",
        }
    }
}

/// Settings of a [`super::UcxTransport`].
#[derive(Clone)]
pub struct UcxConfig {
    /// Where the peers are.
    pub profile: UcxProfile,
    /// Directory of the UCX libraries; `None`: where the dynamic linker finds them.
    pub lib_dir: Option<PathBuf>,
    /// Network devices as UCX names them (`eth0`, `mlx5_0:1`), separated by commas; `all` for every one.
    pub net_devices: String,
    /// UCX's own transports instead of those of the profile, as `UCX_TLS` has them.
    pub tls: Option<String>,
    /// The operator's variables, without `UCX_`: UCX reads them itself, and none of them is set here.
    pub operators: Vec<String>,
    /// How long the driver looks for work before it sleeps. Waking costs some 45 µs; spinning costs a core.
    pub spin: Duration,
    /// UCX asks each peer so often whether it lives, and finds a dead one within this time.
    pub keep_alive: Duration,
    /// Longest range of one message.
    pub max_range_bytes: usize,
    /// Bytes in flight to one peer.
    pub credit_bytes: usize,
    /// An operation that takes longer means that its peer is lost: UCX itself would wait for ever for a frozen one.
    pub stall_timeout: Duration,
    /// Writes of a peer into the blocks of an aborted hand-off end within this time, or its endpoint is closed by
    /// force; and if that does not end them, the whole worker is replaced, which does.
    pub grace: Duration,
    /// The cluster's secrets: a node connects only to addresses that were tagged with one of them. All zeros, which is
    /// the default, is known to everybody: then the tag is a checksum, which keeps out accidents, and not a proof.
    pub address_keys: AddressKeys,
    /// Shared memory only: the receiver copies out of the sender's memory, where it can map that (`one_copy/`).
    pub one_copy: bool,
    /// Announced payloads wait at their senders while so many whole frames are under way to this node. Few,
    /// so that waiting senders sleep instead of fighting for the receiver's queue.
    pub landing_frames: usize,
    /// Peers connected at once, in both directions together.
    pub max_peers: usize,
    /// Made on purpose, for tests and demonstrations.
    pub faults: Faults,
    /// A bug on purpose.
    #[doc(hidden)]
    pub mutation: Mutation,
}

/// Without the secret.
impl fmt::Debug for UcxConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyed = self.address_keys.are_secret();
        f.debug_struct("UcxConfig").field("profile", &self.profile).field("keyed", &keyed).finish_non_exhaustive()
    }
}

impl UcxConfig {
    /// Settings that suit a profile on this machine. Over sockets only its own processes are reached, unless other
    /// devices are named.
    pub fn new(profile: UcxProfile) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            profile,
            lib_dir: None,
            net_devices: profile.usual_devices().to_owned(),
            tls: None,
            operators: Vec::new(),
            // It yields at every turn; still, on two cores the engine needs both.
            spin: Duration::from_micros(if cores < 4 { 100 } else { 200 }),
            // UCX's own is 20 s.
            keep_alive: Duration::from_secs(1),
            max_range_bytes: 1 << 20,
            credit_bytes: 64 << 20,
            stall_timeout: Duration::from_secs(5),
            grace: DEFAULT_GRACE,
            address_keys: AddressKeys::default(),
            one_copy: profile == UcxProfile::Shm,
            landing_frames: 8,
            max_peers: 256,
            faults: Faults::default(),
            mutation: Mutation::None,
        }
    }

    /// UCX's variables, without `UCX_`, and their values, but for those that the operator has set. `on_device`: the KV
    /// lies on a CUDA device.
    pub fn settings(&self, on_device: bool) -> Vec<(&'static str, String)> {
        let mut settings = self.own_settings(on_device);
        settings.retain(|(name, _)| !self.operators.iter().any(|operators| operators == name));
        settings
    }

    fn own_settings(&self, on_device: bool) -> Vec<(&'static str, String)> {
        let keep_alive = format!("{}us", self.keep_alive.as_micros());
        let mut settings = vec![("TLS", self.transports(on_device)), ("KEEPALIVE_INTERVAL", keep_alive)];
        if on_device && self.profile == UcxProfile::Shm {
            settings.extend(READS.map(|(name, value)| (name, value.to_owned())));
        }
        match self.profile {
            // Without it UCX refuses shared memory for endpoints that survive their peer.
            UcxProfile::Shm => settings.extend([
                ("MM_ERROR_HANDLING", "y".to_owned()),
                ("MM_FIFO_SIZE", RING_FRAGMENTS.to_string()),
                ("MM_SEG_SIZE", RING_FRAGMENT_BYTES.to_string()),
            ]),
            UcxProfile::Tcp | UcxProfile::Rdma => settings.push(("NET_DEVICES", self.net_devices.clone())),
        }
        settings
    }

    fn transports(&self, on_device: bool) -> String {
        if let Some(tls) = &self.tls {
            return tls.clone();
        }
        let (own, of_device) = match self.profile {
            UcxProfile::Shm => ("sysv,posix,self", "cuda_copy,cuda_ipc"),
            UcxProfile::Tcp => ("tcp,self", "cuda_copy"),
            UcxProfile::Rdma => ("rc,ud,self", "cuda_copy,gdr_copy"),
        };
        if on_device { format!("{own},{of_device}") } else { own.to_owned() }
    }

    /// "ucx/shm(sysv+posix)": the profile and what UCX opened for it, read from its own description of the context.
    /// `None`: it opened nothing that reaches another process.
    pub(super) fn name(&self, description: &str) -> Option<String> {
        let profile = self.profile.to_string();
        match opened_transports(description).as_slice() {
            // Those of a device move no message.
            opened if opened.iter().all(|transport| is_of_device(transport)) => None,
            [one] if *one == profile => Some(format!("ucx/{profile}")),
            several => Some(format!("ucx/{profile}({})", several.join("+"))),
        }
    }
}

fn is_of_device(transport: &str) -> bool {
    transport.starts_with("cuda") || transport.starts_with("gdr")
}

/// The transports in UCX's description of a context that reach another process, each once.
pub(super) fn opened_transports(description: &str) -> Vec<&str> {
    let mut opened: Vec<&str> = Vec::new();
    for line in description.lines().filter(|line| line.contains("resource ")) {
        let resource = line.split_whitespace().next_back().unwrap_or_default();
        let transport = resource.split('/').next().unwrap_or_default();
        if transport != "self" && !opened.contains(&transport) {
            opened.push(transport);
        }
    }
    opened
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operators_variables_win_and_flags_replace_the_profiles() {
        let of = |config: &UcxConfig, name: &str| {
            config.settings(false).into_iter().find(|(set, _)| *set == name).map(|(_, value)| value)
        };
        let plain = UcxConfig::new(UcxProfile::Rdma);
        assert_eq!(of(&plain, "TLS").as_deref(), Some("rc,ud,self"));
        let flags = UcxConfig { tls: Some("dc,self".into()), net_devices: "mlx5_0:1".into(), ..plain.clone() };
        assert_eq!(of(&flags, "TLS").as_deref(), Some("dc,self"));
        assert_eq!(of(&flags, "NET_DEVICES").as_deref(), Some("mlx5_0:1"));
        let operators = UcxConfig { operators: vec!["TLS".into(), "KEEPALIVE_INTERVAL".into()], ..plain };
        assert_eq!((of(&operators, "TLS"), of(&operators, "KEEPALIVE_INTERVAL")), (None, None));
        assert_eq!(of(&operators, "NET_DEVICES").as_deref(), Some("all"));
    }

    #[test]
    fn of_a_devices_memory_the_receiver_reads() {
        let of = |profile, name: &str| {
            let set = UcxConfig::new(profile).settings(true);
            set.into_iter().find(|(set, _)| *set == name).map(|(_, value)| value)
        };
        assert_eq!(of(UcxProfile::Shm, "TLS").as_deref(), Some("sysv,posix,self,cuda_copy,cuda_ipc"));
        assert_eq!(of(UcxProfile::Shm, "RNDV_SCHEME").as_deref(), Some("get_zcopy"));
        assert_eq!(of(UcxProfile::Shm, "CUDA_IPC_ENABLE_GET_ZCOPY").as_deref(), Some("on"));
        assert_eq!(of(UcxProfile::Rdma, "TLS").as_deref(), Some("rc,ud,self,cuda_copy,gdr_copy"));
        assert_eq!(of(UcxProfile::Rdma, "RNDV_SCHEME"), None);
    }

    #[test]
    fn the_name_is_what_ucx_opened() {
        let printed = "#\n# UCP context\n#            md 1  :  component 2  sysv \n\
            #      resource 0  :  md 0  dev 0  flags -- self/memory0\n\
            #      resource 1  :  md 1  dev 1  flags -- sysv/memory\n\
            #      resource 2  :  md 2  dev 1  flags -- posix/memory\n";
        let shm = UcxConfig::new(UcxProfile::Shm);
        assert_eq!(shm.name(printed).as_deref(), Some("ucx/shm(sysv+posix)"));
        assert_eq!(shm.name("#      resource 0  :  md 0  dev 0  flags -- self/memory0"), None);
        let device = "#      resource 3  :  md 3  dev 2  flags -- cuda_ipc/cuda\n";
        assert_eq!(shm.name(device), None, "it moves no message");
        let both = format!("{printed}{device}");
        assert_eq!(shm.name(&both).as_deref(), Some("ucx/shm(sysv+posix+cuda_ipc)"));
        let tcp = UcxConfig::new(UcxProfile::Tcp);
        assert_eq!(tcp.name("#  resource 1  :  md 1  dev 1  flags -- tcp/lo").as_deref(), Some("ucx/tcp"));
    }
}
