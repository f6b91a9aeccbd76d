//! Flags, read once. The rest of the router sees only [`Config`].
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use tandem_ports::TlsFiles;

use crate::flow::Limits;
use crate::flow::replan::MOST_ATTEMPTS;
use crate::http::Origin;
use crate::membership::breaker;

/// The router of a Tandem cluster: gRPC and OpenAI HTTP in front, prefill and decode nodes behind.
#[derive(Debug, Parser)]
#[command(name = "tandem-router", version)]
struct Flags {
    /// Address of the OpenAI HTTP API; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8000")]
    http: SocketAddr,
    /// Address of the gRPC API, on which nodes join too; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:50051")]
    grpc: SocketAddr,
    /// Address on which nodes join, instead of the gRPC API's: then clients cannot call themselves nodes. Never within TLS
    #[arg(long, value_name = "ADDR")]
    nodes: Option<SocketAddr>,
    /// Certificate of both client ports, PEM: from then on they speak TLS only; nodes need a port of their own, --nodes
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "nodes"])]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Clients must show a certificate that one of these authorities signed (mTLS), PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Web pages of this origin (https://host[:port]) may read answers of the HTTP API; repeatable, `*` is all [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<Origin>,
    /// GGUF file or safetensors directory of the model (its tokenizer and chat template; the weights stay on the nodes)
    #[arg(long)]
    model: PathBuf,
    /// Name under which the model is served [default: the file's own]
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    served_model_name: Option<String>,
    /// OTLP/gRPC collector for spans, as http://host:port
    #[arg(long)]
    otlp_endpoint: Option<String>,
    /// Requests that may wait for admission
    #[arg(long, default_value_t = 256)]
    max_queue: u16,
    /// Requests that may run at the same time
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    max_inflight: u16,
    /// A node that is silent for so long is dead
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(50..=600_000))]
    lease_ms: u32,
    /// Deadline of requests that bring none
    #[arg(long, default_value_t = 600_000, value_parser = clap::value_parser!(u32).range(1..))]
    max_request_ms: u32,
    /// Attempts of a request: a node that fails costs one, and another pair goes on with the answer
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ATTEMPTS)))]
    max_attempts: u32,
    /// Time that a request may spend without progress after failures, waiting for nodes included
    #[arg(long, default_value_t = 30_000)]
    replan_ms: u32,
    /// A node that fails so many requests in a row is tried last, for --breaker-open-ms
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    breaker_failures: u32,
    /// How long such a node is tried last; doubles, up to 30 s, each time that it fails again
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    breaker_open_ms: u32,
    /// How long running requests may take to end after SIGTERM
    #[arg(long, default_value_t = 30_000)]
    drain_ms: u32,
}

/// What the process is to do.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address of the HTTP API.
    pub http: SocketAddr,
    /// Address of the gRPC API.
    pub grpc: SocketAddr,
    /// Where nodes join, if not there.
    pub nodes: Option<SocketAddr>,
    /// Of the ports for clients.
    pub tls: Option<TlsFiles>,
    /// Whose web pages may read answers.
    pub cors_origins: Vec<Origin>,
    /// GGUF file or safetensors directory.
    pub model: PathBuf,
    /// Replaces the model's own name.
    pub served_model_name: Option<String>,
    /// Collector.
    pub otlp_endpoint: Option<String>,
    /// Bounds of requests.
    pub limits: Limits,
    /// Silence after which a node is dead.
    pub lease: Duration,
    /// When a node is tried last.
    pub breakers: breaker::Settings,
    /// Bound of the drain.
    pub drain: Duration,
}

impl Config {
    /// From the command line; a wrong one ends the process with a message.
    pub fn from_args() -> Self {
        Flags::parse().into()
    }
}

impl From<Flags> for Config {
    fn from(flags: Flags) -> Self {
        let millis = |value: u32| Duration::from_millis(value.into());
        Self {
            http: flags.http,
            grpc: flags.grpc,
            nodes: flags.nodes,
            tls: flags.tls_cert.zip(flags.tls_key).map(|(cert, key)| TlsFiles {
                cert,
                key,
                client_ca: flags.tls_client_ca,
            }),
            cors_origins: flags.cors_origin,
            model: flags.model,
            served_model_name: flags.served_model_name,
            otlp_endpoint: flags.otlp_endpoint,
            limits: Limits {
                max_inflight: flags.max_inflight.into(),
                max_queue: flags.max_queue.into(),
                max_request: millis(flags.max_request_ms),
                max_attempts: flags.max_attempts,
                replan: millis(flags.replan_ms),
                ..Limits::default()
            },
            lease: millis(flags.lease_ms),
            breakers: breaker::Settings { failures: flags.breaker_failures, open: millis(flags.breaker_open_ms) },
            drain: millis(flags.drain_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_limits() {
        let config: Config = Flags::try_parse_from(["r", "--model", "m.gguf"]).unwrap().into();
        assert_eq!((config.limits.max_queue, config.limits.max_inflight), (256, 512));
        assert_eq!(config.lease, Duration::from_secs(3));
        assert_eq!((config.limits.max_attempts, config.limits.replan), (4, Duration::from_secs(30)));
        assert_eq!((config.breakers.failures, config.breakers.open), (3, Duration::from_secs(2)));
        assert!(config.tls.is_none() && config.nodes.is_none() && config.cors_origins.is_empty());
        for wrong in [["--tls-cert", "c.pem"], ["--tls-key", "k.pem"], ["--cors-origin", "example.org"]] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
        let tls = ["--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem"];
        let unjoined = Flags::try_parse_from(["r", "--model", "m.gguf"].into_iter().chain(tls)).unwrap_err();
        assert!(unjoined.to_string().contains("--nodes"), "{unjoined}");
        let args = ["r", "--model", "m.gguf", "--nodes", "127.0.0.1:0"].into_iter().chain(tls);
        let config: Config = Flags::try_parse_from(args).unwrap().into();
        assert_eq!(config.tls.unwrap().client_ca.unwrap().to_str(), Some("ca.pem"));
        for wrong in [["--max-attempts", "0"], ["--max-attempts", "17"], ["--breaker-failures", "0"]] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
        for wrong in [["--lease-ms", "0"], ["--max-inflight", "0"], ["--http", "nowhere"], ["--unknown", "1"]] {
            let args = ["r", "--model", "m.gguf"].into_iter().chain(wrong);
            assert!(Flags::try_parse_from(args).is_err(), "{wrong:?}");
        }
    }
}
