//! By which way KV gets from one node to another. Pure: what two nodes registered in, the ways that they have in common
//! out, the fastest first. The router plans by it, and tests ask it what the router should have planned.
//!
//! A *domain* is a set of nodes of which each sender reaches each receiver by one way: nodes of one host that share
//! memory, ports of one RDMA subnet, everything behind sockets. Two nodes have a way in common where they have a domain
//! in common. Equality of values is all that is asked, so a table may give domains numbers and never compare two nodes.
//!
//! Whether KV really gets there shows when it is sent. What is said here is only where it is worth trying.
use std::fmt;

use crate::v1::transport_info::Reach;
use crate::v1::{HostReach, NetworkReach, TransportInfo};

/// Transports of one node at most.
pub const MAX_TRANSPORTS: usize = 8;
/// Subnets of one transport at most.
pub const MAX_SUBNETS: usize = 64;

/// Nodes of which each sender reaches each receiver, by transports of one backend and build.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Domain {
    /// As in [`TransportInfo`].
    pub backend: String,
    /// As in [`TransportInfo`].
    pub build_id: String,
    place: Place,
}

/// Where a domain's nodes are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Place {
    /// They reach each other wherever they are.
    Anywhere,
    /// Processes that may map each other's memory: of one kernel, IPC namespace and user. Of one PID namespace too: by
    /// its pid a peer's memory is opened and its death is noticed, and elsewhere that is another process. And of one
    /// network namespace: UCX wakes a sleeping peer by an abstract Unix socket.
    Host { boot_id: String, ipc: u64, pid: u64, net: u64, uid: u32 },
    /// Ports of one RDMA subnet.
    Subnet(String),
    /// Senders of one network namespace, and receivers that listen on its loopback address.
    Loopback { boot_id: String, net: u64 },
    /// Receivers that listen on an address of a network, and all senders.
    Network,
}

/// A way from one node to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// What both ends have in common.
    pub domain: Domain,
    /// The receiver's name of it, without details: see [`short_name`].
    pub name: String,
}

/// The best way from `sender` to `receiver`, both as they registered; `None`: KV does not get there.
pub fn common_way(sender: &[TransportInfo], receiver: &[TransportInfo]) -> Option<Way> {
    common_ways(sender, receiver).into_iter().next()
}

/// All ways from `sender` to `receiver`, one for each transport, in the sender's order.
pub fn common_ways(sender: &[TransportInfo], receiver: &[TransportInfo]) -> Vec<Way> {
    let common = |ours: &TransportInfo| {
        let theirs = receiver.iter().find(|theirs| same_build(ours, theirs))?;
        let there = receives_in(theirs);
        let domain = sends_in(ours).into_iter().find(|domain| there.contains(domain))?;
        Some(Way { domain, name: short_name(&theirs.name).to_owned() })
    };
    sender.iter().filter_map(common).collect()
}

/// The domains whose receivers a node with this transport may send to.
pub fn sends_in(transport: &TransportInfo) -> Vec<Domain> {
    let places = match &transport.reach {
        Some(Reach::Network(from)) => vec![loopback(from), Place::Network],
        _ => anywhere_or_there(transport),
    };
    domains(transport, places)
}

/// The domains whose senders may send to a node with this transport.
pub fn receives_in(transport: &TransportInfo) -> Vec<Domain> {
    let places = match &transport.reach {
        Some(Reach::Network(at)) if at.loopback => vec![loopback(at)],
        Some(Reach::Network(_)) => vec![Place::Network],
        _ => anywhere_or_there(transport),
    };
    domains(transport, places)
}

/// Why `sender` has no way to `receiver`, for people who know the two by these names.
pub fn no_way(sender: (&str, &[TransportInfo]), receiver: (&str, &[TransportInfo])) -> String {
    format!("no common way: {}; {}", offers(sender, "offers"), offers(receiver, "takes"))
}

/// "ucx/shm" of "ucx/shm(sysv+posix)": the name of a way wherever nodes may differ in the details.
pub fn short_name(name: &str) -> &str {
    name.split('(').next().unwrap_or(name)
}

fn offers((node, transports): (&str, &[TransportInfo]), verb: &str) -> String {
    let each: Vec<String> = transports.iter().map(|transport| Offer(transport).to_string()).collect();
    format!("{node} {verb} {}", if each.is_empty() { "nothing".to_owned() } else { each.join(", ") })
}

/// A transport and where it reaches, as people read it.
pub struct Offer<'a>(pub &'a TransportInfo);

impl fmt::Display for Offer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TransportInfo { name, build_id, reach, .. } = self.0;
        let name = short_name(name);
        match reach {
            None => write!(f, "{name} ({build_id})"),
            Some(Reach::Host(HostReach {
                boot_id,
                ipc_namespace: ipc,
                pid_namespace: pid,
                net_namespace: net,
                uid,
            })) => {
                let host = host(boot_id);
                write!(f, "{name} on host {host} (ipc {ipc}, pid {pid}, net {net}, uid {uid}; {build_id})")
            }
            Some(Reach::Fabric(fabric)) => write!(f, "{name} on {} ({build_id})", fabric.subnets.join("+")),
            Some(Reach::Network(NetworkReach { loopback: true, boot_id, net_namespace, .. })) => {
                let host = host(boot_id);
                write!(f, "{name} on the loopback of host {host} (net {net_namespace}; {build_id})")
            }
            Some(Reach::Network(network)) => write!(f, "{name} at {} ({build_id})", network.address),
        }
    }
}

/// Enough of a boot id to tell hosts apart.
fn host(boot_id: &str) -> &str {
    boot_id.split('-').next().unwrap_or(boot_id)
}

fn same_build(a: &TransportInfo, b: &TransportInfo) -> bool {
    (&a.backend, &a.build_id) == (&b.backend, &b.build_id)
}

/// Of transports that reach whoever reaches them.
fn anywhere_or_there(transport: &TransportInfo) -> Vec<Place> {
    match &transport.reach {
        None | Some(Reach::Network(_)) => vec![Place::Anywhere],
        Some(Reach::Host(HostReach { boot_id, ipc_namespace: ipc, pid_namespace: pid, net_namespace: net, uid })) => {
            vec![Place::Host { boot_id: boot_id.clone(), ipc: *ipc, pid: *pid, net: *net, uid: *uid }]
        }
        Some(Reach::Fabric(fabric)) => fabric.subnets.iter().cloned().map(Place::Subnet).collect(),
    }
}

fn loopback(of: &NetworkReach) -> Place {
    Place::Loopback { boot_id: of.boot_id.clone(), net: of.net_namespace }
}

fn domains(transport: &TransportInfo, places: Vec<Place>) -> Vec<Domain> {
    let TransportInfo { backend, build_id, .. } = transport;
    let of = |place| Domain { backend: backend.clone(), build_id: build_id.clone(), place };
    places.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::v1::FabricReach;

    fn transport(name: &str, reach: Reach) -> TransportInfo {
        let backend = name.split('/').next().unwrap_or_default().to_owned();
        TransportInfo { backend, name: name.to_owned(), build_id: format!("{name}/1"), reach: Some(reach) }
    }

    fn shm(boot_id: &str, ipc: u64, pid: u64, uid: u32) -> TransportInfo {
        let reach =
            HostReach { boot_id: boot_id.into(), ipc_namespace: ipc, pid_namespace: pid, uid, net_namespace: 7 };
        transport("ucx/shm", Reach::Host(reach))
    }

    fn rdma(subnets: &[&str]) -> TransportInfo {
        let subnets = subnets.iter().map(|subnet| (*subnet).to_owned()).collect();
        transport("ucx/rdma", Reach::Fabric(FabricReach { subnets }))
    }

    fn tcp(loopback: bool, boot_id: &str, net_namespace: u64) -> TransportInfo {
        let address = if loopback { "127.0.0.1:1" } else { "10.0.0.1:1" }.to_owned();
        transport("tcp", Reach::Network(NetworkReach { loopback, boot_id: boot_id.into(), net_namespace, address }))
    }

    fn names(sender: &[TransportInfo], receiver: &[TransportInfo]) -> Vec<String> {
        common_ways(sender, receiver).into_iter().map(|way| way.name).collect()
    }

    #[test]
    fn memory_is_shared_by_processes_of_one_kernel_namespace_and_user() {
        let here = shm("a", 1, 2, 3);
        assert_eq!(names(&[here.clone()], &[shm("a", 1, 2, 3)]), ["ucx/shm"]);
        for other in [shm("b", 1, 2, 3), shm("a", 9, 2, 3), shm("a", 1, 9, 3), shm("a", 1, 2, 9)] {
            assert!(names(&[here.clone()], &[other]).is_empty());
        }
        let reach = HostReach { boot_id: "a".into(), ipc_namespace: 1, pid_namespace: 2, uid: 3, net_namespace: 8 };
        let other = transport("ucx/shm", Reach::Host(reach));
        assert!(names(&[here], &[other]).is_empty(), "a sleeping peer is not woken from another network namespace");
    }

    #[test]
    fn a_loopback_address_is_reached_from_its_own_namespace() {
        let (here, there) = (tcp(true, "a", 1), tcp(true, "a", 2));
        assert!(names(&[there.clone()], &[here.clone()]).is_empty(), "another namespace");
        assert!(names(&[tcp(true, "b", 1)], &[here.clone()]).is_empty(), "another host");
        assert_eq!(names(&[tcp(false, "a", 1)], &[here.clone()]), ["tcp"], "where the sender listens is no matter");
        assert_eq!(names(&[here], &[tcp(false, "b", 7)]), ["tcp"], "a network is assumed to reach");
    }

    #[test]
    fn a_fabric_is_shared_by_one_subnet_in_common() {
        assert_eq!(names(&[rdma(&["ib:1", "ib:2"])], &[rdma(&["ib:2"])]), ["ucx/rdma"]);
        assert!(names(&[rdma(&["ib:1"])], &[rdma(&["roce:1"])]).is_empty());
        assert!(names(&[rdma(&[])], &[rdma(&[])]).is_empty(), "no port");
    }

    #[test]
    fn other_builds_do_not_meet_and_those_that_say_nothing_do() {
        let mem = TransportInfo { backend: "mem".into(), name: "mem".into(), build_id: "1".into(), reach: None };
        assert_eq!(names(std::slice::from_ref(&mem), std::slice::from_ref(&mem)), ["mem"]);
        let other = TransportInfo { build_id: "2".into(), ..mem.clone() };
        assert!(names(&[mem], &[other]).is_empty());
    }

    #[test]
    fn the_fastest_comes_first_and_words_say_what_is_missing() {
        let here = [rdma(&["ib:1"]), shm("a", 1, 2, 3), tcp(false, "a", 1)];
        assert_eq!(names(&here, &here), ["ucx/rdma", "ucx/shm", "tcp"]);
        assert_eq!(common_way(&here, &here[1..]).map(|way| way.name).as_deref(), Some("ucx/shm"));
        let why = no_way(("p0", &here[1..2]), ("d0", &[tcp(true, "bb-cc", 4)]));
        let [offered, taken] = [
            "no common way: p0 offers ucx/shm on host a (ipc 1, pid 2, net 7, uid 3; ucx/shm/1)",
            "d0 takes tcp on the loopback of host bb (net 4; tcp/1)",
        ];
        assert_eq!(why, format!("{offered}; {taken}"));
        assert_eq!(short_name("ucx/shm(sysv+posix)"), "ucx/shm");
    }

    fn any_transport() -> impl Strategy<Value = TransportInfo> {
        let boot = prop::sample::select(vec!["a", "b"]);
        prop_oneof![
            (boot.clone(), 0u64..2, 0u64..2, 0u32..2).prop_map(|(boot, ipc, pid, uid)| shm(boot, ipc, pid, uid)),
            prop::collection::vec(prop::sample::select(vec!["ib:1", "ib:2", "roce:1"]), 0..3)
                .prop_map(|subnets| rdma(&subnets)),
            (any::<bool>(), boot, 0u64..2).prop_map(|(loopback, boot, net)| tcp(loopback, boot, net)),
        ]
    }

    /// As a node may register: no build twice.
    fn any_node() -> impl Strategy<Value = Vec<TransportInfo>> {
        prop::collection::vec(any_transport(), 0..4).prop_map(|mut transports| {
            let mut seen = Vec::new();
            transports.retain(|transport| {
                let new = !seen.contains(&transport.build_id);
                seen.push(transport.build_id.clone());
                new
            });
            transports
        })
    }

    /// What two transports need to meet, said once more and in other words.
    fn meet(sender: &TransportInfo, receiver: &TransportInfo) -> bool {
        sender.build_id == receiver.build_id
            && match (&sender.reach, &receiver.reach) {
                (Some(Reach::Host(a)), Some(Reach::Host(b))) => a == b,
                (Some(Reach::Fabric(a)), Some(Reach::Fabric(b))) => a.subnets.iter().any(|s| b.subnets.contains(s)),
                (Some(Reach::Network(a)), Some(Reach::Network(b))) => {
                    !b.loopback || (&a.boot_id, a.net_namespace) == (&b.boot_id, b.net_namespace)
                }
                _ => false,
            }
    }

    proptest! {
        #[test]
        fn the_ways_are_those_by_which_transports_meet(sender in any_node(), receiver in any_node()) {
            let met = sender.iter().filter(|ours| receiver.iter().any(|theirs| meet(ours, theirs)));
            let met: Vec<&str> = met.map(|ours| ours.build_id.as_str()).collect();
            let ways = common_ways(&sender, &receiver);
            let of: Vec<&str> = ways.iter().map(|way| way.domain.build_id.as_str()).collect();
            prop_assert_eq!(of, met);
            prop_assert_eq!(common_way(&sender, &receiver), ways.into_iter().next());
        }

        /// So a table that numbers domains says the same as a comparison of the two nodes.
        #[test]
        fn two_nodes_meet_where_they_have_a_domain_in_common(sender in any_node(), receiver in any_node()) {
            let there: Vec<Domain> = receiver.iter().flat_map(receives_in).collect();
            let common = sender.iter().flat_map(sends_in).filter(|domain| there.contains(domain));
            let mut builds: Vec<String> = common.map(|domain| domain.build_id).collect();
            builds.dedup();
            let ways = common_ways(&sender, &receiver).into_iter().map(|way| way.domain.build_id);
            prop_assert_eq!(builds, ways.collect::<Vec<_>>());
        }
    }
}
