//! Addresses under a prefix of etcd: one that is kept there under a lease ([`register`]), and all that are there now
//! ([`watch`]). Must not know whose addresses these are.
//!
//! - `address`: `etcd://host:port,host:port/prefix`, and `host:port`. Pure.
//! - `flag`: such an address as a flag's value.
//! - `access`: the flags of TLS and of the user, and the files that they name.
//! - `connection`: a client of whichever member answers, with bounds on all that it waits for.
//! - `retry`: pauses between attempts, and one line in the log for each outage.
//!
//! Both tasks outlive etcd: what was known stays, and they try again until they are dropped.
#![forbid(unsafe_code)]

mod access;
mod address;
mod connection;
mod flag;
pub mod register;
mod retry;
pub mod watch;

pub use access::{Etcd, EtcdArgs};
pub use address::{EtcdAddress, HostPort, WrongAddress};
pub use flag::AddressParser;
