//! What every node process does whatever its role. The roles' own work (prefill, decode) is in their binaries; the
//! `main.rs` there is the life of a process and names these parts in order:
//!
//! - [`config`]: flags to [`NodeConfig`](config::NodeConfig), once; [`check`](mod@check): what `--check` reads;
//!   [`kv_memory`]: the size of the KV arena; [`kv_transport`]: how KV travels; [`reach`]: to whom.
//! - [`node`]: [`Node`](node::Node), the parts that services share: identity, engine, transport, exporter, work;
//!   [`device`]: on what it computes; [`processor`]: the cores that it shares with other nodes; [`warm_turn`]: nodes
//!   for which there are too few cores warm up in turns.
//! - [`serve`]: listeners, gRPC with health, the admin port, membership, and the drain that ends them.
//! - [`credentials`]: what a node shows to the others of its cluster, and asks of them. [`reload`]: what it reads again
//!   at SIGHUP.
//! - [`routers`]: which routers there are, by [`router_address`] and [`router_source`]; [`membership`]: the stream to
//!   one of them; [`lives`]: what each of them has here, which ends with its session; [`life_secrets`]: how the next
//!   session proves that; [`lease`]: how long a session lives without a word; [`kv_feed`]: what a router is told of the
//!   prefix cache; [`clock_offset`]: how far this host's clock is from a router's.
//! - [`admin`]: `/health` and `/metrics`.
//! - [`facts`]: what this machine has, as a node finds it, for the tool that asks.
//! - [`work`]: calls in flight, their limit, and the wait for them at drain; [`tasks`]: where they run; [`handoffs`]:
//!   counts of KV hand-offs; [`figures`]: those of caches, of times between tokens, and of answers.
//! - [`call`]: one streaming call as a task that dies with its client.
//! - [`request`]: a `RequestSpec` checked against the engine; [`trace`]: the spans of one request, which reach the
//!   router even if it fails.
#![forbid(unsafe_code)]

pub mod admin;
pub mod aside;
pub mod call;
pub mod check;
pub mod clock_offset;
pub mod config;
pub mod credentials;
pub mod device;
pub mod facts;
pub mod figures;
pub mod handoffs;
pub mod kv_feed;
pub mod kv_memory;
pub mod kv_transport;
pub mod lease;
pub mod life_secrets;
pub mod lives;
pub mod membership;
pub mod node;
pub mod processor;
pub mod reach;
pub mod reload;
pub mod request;
pub mod router_address;
pub mod router_source;
pub mod routers;
pub mod serve;
pub mod tasks;
pub mod trace;
pub mod warm_turn;
pub mod work;

pub use check::check;
pub use config::{NodeArgs, NodeConfig};
pub use node::Node;
pub use request::CheckedRequest;
pub use serve::{Listeners, Running, prepare_environment, run_process};
pub use trace::Trace;

/// Who may call a node: one of [`node::Parts`].
pub use tandem_ports::JoinGuard;
