//! A prefill and a decode node in one process, simulated model, driven by gRPC as the router does.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is the failure message of a test")]

mod handoff;
mod local;
mod nodes;
mod serving;
