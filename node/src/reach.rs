//! Where this node's KV transports reach, as the router is told (`tandem_proto::ways` says what it means). Reads /proc
//! and /sys, once at the start. What cannot be read is left empty, and equals only what others could not read either.
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tandem_kvtransfer::select::TransportKind;
use tandem_kvtransfer::ucx::UcxProfile;
use tandem_proto::v1::transport_info::Reach;
use tandem_proto::v1::{FabricReach, HostReach, NetworkReach};
use tandem_proto::ways::MAX_SUBNETS;

/// Where the kernel lists RDMA devices.
const INFINIBAND: &str = "/sys/class/infiniband";

/// What a transport of this `kind` reaches: the tcp backend listens at `address`, UCX uses `devices`.
pub fn of(kind: TransportKind, address: &str, devices: &str) -> Reach {
    match kind {
        TransportKind::Ucx(UcxProfile::Shm) => Reach::Host(HostReach {
            boot_id: boot_id(),
            ipc_namespace: namespace("ipc"),
            pid_namespace: namespace("pid"),
            net_namespace: namespace("net"),
            uid: fs::metadata("/proc/self").map_or(0, |process| process.uid()),
        }),
        TransportKind::Ucx(UcxProfile::Rdma) => {
            let mut subnets = Fabric::default().subnets(devices);
            subnets.truncate(MAX_SUBNETS);
            Reach::Fabric(FabricReach { subnets })
        }
        TransportKind::Ucx(UcxProfile::Tcp) => network(devices == "lo", format!("devices {devices}")),
        TransportKind::Tcp => network(is_loopback(address), address.to_owned()),
    }
}

fn network(loopback: bool, address: String) -> Reach {
    Reach::Network(NetworkReach { loopback, boot_id: boot_id(), net_namespace: namespace("net"), address })
}

/// Whether peers elsewhere find nobody at this host:port. Names are somewhere on the network.
fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    address.parse::<SocketAddr>().map_or(host == "localhost", |address| address.ip().is_loopback())
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Inode of one of this process's namespaces.
fn namespace(kind: &str) -> u64 {
    fs::metadata(format!("/proc/self/ns/{kind}")).map_or(0, |namespace| namespace.ino())
}

/// The RDMA ports of this machine, as the kernel lists them.
pub struct Fabric(PathBuf);

impl Default for Fabric {
    fn default() -> Self {
        Self(INFINIBAND.into())
    }
}

impl Fabric {
    /// The subnets of all active ports among `devices`, as UCX names these: `all`, or `mlx5_0:1,mlx5_1:1`. Each once,
    /// sorted: "ib:" and "roce:" with the first half of the port's GID, as in the InfiniBand specification, 4.1.1.
    pub fn subnets(&self, devices: &str) -> Vec<String> {
        let mut subnets = Vec::new();
        for device in entries(&self.0) {
            for port in entries(&self.0.join(&device).join("ports")) {
                let wanted = |named: &str| named == "all" || named == device || named == format!("{device}:{port}");
                if devices.split(',').map(str::trim).any(wanted) {
                    subnets.extend(subnet(&self.0.join(&device).join("ports").join(&port)));
                }
            }
        }
        subnets.sort_unstable();
        subnets.dedup();
        subnets
    }
}

/// Of a port that is up; RoCE has its first GID that is set.
fn subnet(port: &Path) -> Option<String> {
    let read = |name: &str| fs::read_to_string(port.join(name)).unwrap_or_default();
    if !read("state").contains("ACTIVE") {
        return None;
    }
    let link = match read("link_layer").trim() {
        "InfiniBand" => "ib",
        "Ethernet" => "roce",
        _ => return None,
    };
    let gids = entries(&port.join("gids")).into_iter().map(|index| read(&format!("gids/{index}")));
    let prefix = |gid: String| gid.trim().split(':').take(4).collect::<String>();
    let set = |gid: &String| gid.chars().any(|digit| !matches!(digit, '0' | ':' | '\n'));
    gids.into_iter().find(set).map(|gid| format!("{link}:{}", prefix(gid)))
}

/// Names in a directory, in order.
fn entries(directory: &Path) -> Vec<String> {
    let listed = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = listed.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

/// Why this process may not register so many bytes with an RDMA device, from its own /proc; `None`: it may.
pub fn memory_lock_refusal(bytes: usize) -> Option<String> {
    let [limits, status] = ["/proc/self/limits", "/proc/self/status"].map(|file| fs::read_to_string(file).ok());
    lock_refusal(bytes, &limits?, &status?)
}

/// Of `CapEff`: who has it may lock any memory (capabilities(7)).
const CAP_IPC_LOCK: u32 = 14;

fn lock_refusal(bytes: usize, limits: &str, status: &str) -> Option<String> {
    let line = |text: &str, name: &str| text.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
    let capabilities = line(status, "CapEff:").and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    if capabilities.is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0) {
        return None;
    }
    let limit = line(limits, "Max locked memory")?;
    let soft: usize = limit.split_whitespace().next()?.parse().ok()?;
    (soft < bytes).then(|| {
        format!(
            "an RDMA device has to lock the KV memory of {bytes} bytes, and this process may lock {soft}: raise \
             RLIMIT_MEMLOCK (ulimit -l unlimited, LimitMEMLOCK=infinity, `ulimits: {{ memlock: -1 }}`) or grant \
             CAP_IPC_LOCK"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let Reach::Host(host) = of(TransportKind::Ucx(UcxProfile::Shm), "", "all") else { panic!("not a host") };
        assert!(host.boot_id.len() >= 32 && host.ipc_namespace != 0 && host.pid_namespace != 0, "{host:?}");
        assert_eq!(of(TransportKind::Ucx(UcxProfile::Shm), "", "all"), Reach::Host(host));
    }

    #[test]
    fn loopback_addresses_are_told_from_others() {
        for (address, loopback) in [
            ("127.0.0.1:8200", true),
            ("[::1]:1", true),
            ("localhost:1", true),
            ("10.1.2.3:8200", false),
            ("[2001:db8::1]:1", false),
            ("decode-0:8200", false),
        ] {
            let Reach::Network(network) = of(TransportKind::Tcp, address, "") else { panic!("not a network") };
            assert_eq!((network.loopback, network.address.as_str()), (loopback, address));
        }
        let ucx = |devices| of(TransportKind::Ucx(UcxProfile::Tcp), "", devices);
        assert!(matches!(ucx("lo"), Reach::Network(network) if network.loopback));
        assert!(matches!(ucx("eth0"), Reach::Network(network) if !network.loopback));
    }

    #[test]
    fn subnets_are_read_from_active_ports_of_the_named_devices() {
        let root = tempfile::tempdir().expect("a directory");
        let port = |device: &str, port: &str, state: &str, layer: &str, gids: &[&str]| {
            let port = root.path().join(device).join("ports").join(port);
            fs::create_dir_all(port.join("gids")).expect("a port");
            fs::write(port.join("state"), state).expect("state");
            fs::write(port.join("link_layer"), layer).expect("layer");
            for (index, gid) in gids.iter().enumerate() {
                fs::write(port.join("gids").join(index.to_string()), format!("{gid}\n")).expect("gid");
            }
        };
        let unset = "0000:0000:0000:0000:0000:0000:0000:0000";
        let gid = "fe80:0000:0000:0001:506b:4b03:00c5:1234";
        port("mlx5_0", "1", "4: ACTIVE\n", "InfiniBand\n", &[gid]);
        port("mlx5_0", "2", "1: DOWN\n", "InfiniBand\n", &["fe80:0000:0000:0009:0:0:0:1"]);
        port("mlx5_1", "1", "4: ACTIVE\n", "Ethernet\n", &[unset, "0000:0000:0000:0000:0000:ffff:0a00:0001"]);
        let fabric = Fabric(root.path().to_owned());
        assert_eq!(fabric.subnets("all"), ["ib:fe80000000000001", "roce:0000000000000000"]);
        assert_eq!(fabric.subnets("mlx5_0:1"), ["ib:fe80000000000001"]);
        assert_eq!(fabric.subnets("mlx5_1, mlx5_9:1"), ["roce:0000000000000000"]);
        assert!(fabric.subnets("mlx5_0:2").is_empty() && Fabric("/nonexistent".into()).subnets("all").is_empty());
    }

    #[test]
    fn memory_that_may_not_be_locked_is_refused_with_words() {
        let limits =
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         8388608              8388608     bytes\n";
        let (none, ipc_lock) = ("CapEff:\t0000000000000000\n", "CapEff:\t0000000000004000\n");
        let why = lock_refusal(8_388_609, limits, none).expect("too much");
        assert!(why.contains("8388609") && why.contains("RLIMIT_MEMLOCK") && why.contains("CAP_IPC_LOCK"), "{why}");
        assert_eq!(lock_refusal(8_388_608, limits, none), None);
        assert_eq!(lock_refusal(1 << 40, limits, ipc_lock), None);
        assert_eq!(lock_refusal(1 << 40, "Max locked memory  unlimited  unlimited  bytes\n", none), None);
    }
}
