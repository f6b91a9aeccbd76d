//! What `--check` reads: every file that the flags name, and no more of the model than its header and its texts. Starts
//! nothing, and opens no port.
use anyhow::Context;
use tandem_ports::{JoinTokens, NodeTls, PeerRole, Tls};
use tandem_telemetry::clock;

use crate::admission::keys::{Keys, Rules};
use crate::config::Config;
use crate::registration::Registration;
use crate::text::ModelText;

/// The API keys.
///
/// # Errors
/// They cannot be used.
pub fn keys(config: &Config) -> anyhow::Result<Keys> {
    let client_certificates = config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    let rules = Rules { replicas: config.replicas, client_certificates };
    match &config.api_keys {
        Some(source) => Ok(Keys::load_by(source, rules, clock::now())?),
        None => Ok(Keys::default()),
    }
}

/// Whether a router could start with this.
///
/// # Errors
/// The first file that it could not use, and why.
pub fn check(config: &Config) -> anyhow::Result<()> {
    keys(config)?;
    if let Some(path) = &config.join_token_file {
        JoinTokens::load(path)?;
    }
    if let Some(files) = &config.tls {
        Tls::read(files)?;
    }
    if let Some(files) = &config.node_tls {
        NodeTls::read(files, PeerRole::Router)?;
    }
    Registration::read(config)?;
    config.collector.check()?;
    // The error's own text names its cause: a chain would say it twice.
    ModelText::check(&config.model).map_err(|error| anyhow::anyhow!("{error}")).context("--model")
}
