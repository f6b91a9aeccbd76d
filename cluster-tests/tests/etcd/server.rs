//! A real etcd with one member, in a directory of its own: killed, frozen, started again with its data or without.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use etcd_client::{Client, ConnectOptions, DeleteOptions, GetOptions};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tandem_cluster_tests::cluster::free_port;
use tandem_cluster_tests::routers::until;
use tempfile::TempDir;

/// From a start to the first answer, while others compile.
const STARTED: Duration = Duration::from_secs(60);
/// Where routers stand.
pub const PREFIX: &str = "/tandem/routers/";

/// One of them; killed and removed on drop.
pub struct EtcdServer {
    child: Option<Child>,
    client_port: u16,
    peer_port: u16,
    metrics_port: u16,
    tls_port: u16,
    /// Certificates, if it has TLS as well: `server.pem`, `server.key` and the clients' authority.
    tls: bool,
    /// Flags that a test adds.
    flags: Vec<(&'static str, String)>,
    dir: TempDir,
}

impl EtcdServer {
    /// Not started yet. `None`: there is no etcd here, which is said.
    ///
    /// # Errors
    /// It is required (`TANDEM_REQUIRE_ETCD=1`) and not there.
    pub fn new() -> anyhow::Result<Option<Self>> {
        if let Err(error) = Command::new("etcd").arg("--version").output() {
            let required = std::env::var_os("TANDEM_REQUIRE_ETCD").is_some_and(|value| value == "1");
            ensure!(!required, "TANDEM_REQUIRE_ETCD=1, and there is no etcd: {error}");
            eprintln!("SKIPPED: there is no etcd here (Debian: etcd-server): {error}");
            return Ok(None);
        }
        let [client_port, peer_port] = [free_port()?, free_port()?];
        let [metrics_port, tls_port] = [free_port()?, free_port()?];
        let dir = tempfile::tempdir()?;
        let flags = Vec::new();
        Ok(Some(Self { child: None, client_port, peer_port, metrics_port, tls_port, tls: false, flags, dir }))
    }

    /// With TLS at a port of its own, where clients show certificates. The files are in [`Self::dir`].
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// With this flag, too.
    #[must_use]
    pub fn with_flag(mut self, flag: &'static str, value: &str) -> Self {
        self.flags.push((flag, value.to_owned()));
        self
    }

    /// For files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// What routers and nodes are given.
    pub fn address(&self) -> String {
        format!("etcd://127.0.0.1:{}{}", self.client_port, PREFIX.trim_end_matches('/'))
    }

    /// The same within TLS, by a name of this host.
    pub fn tls_address(&self) -> String {
        format!("etcds://localhost:{}{}", self.tls_port, PREFIX.trim_end_matches('/'))
    }

    /// Waits until it answers.
    ///
    /// # Errors
    /// It ends, or is not there in time; with its log.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        let path = |name: &str| self.dir().join(name).display().to_string();
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir().join("etcd.log"))?;
        let plain = |port: u16| format!("http://127.0.0.1:{port}");
        let (mut clients, peers) = (plain(self.client_port), plain(self.peer_port));
        let mut flags = vec![
            ("--data-dir", path("data")),
            ("--listen-peer-urls", peers.clone()),
            ("--initial-advertise-peer-urls", peers.clone()),
            ("--initial-cluster", format!("default={peers}")),
            ("--listen-metrics-urls", plain(self.metrics_port)),
            ("--advertise-client-urls", clients.clone()),
        ];
        if self.tls {
            clients = format!("{clients},https://127.0.0.1:{}", self.tls_port);
            flags.extend([("--cert-file", path("server.pem")), ("--key-file", path("server.key"))]);
            flags.extend([("--trusted-ca-file", path("ca.pem")), ("--client-cert-auth", "true".to_owned())]);
        }
        flags.push(("--listen-client-urls", clients));
        flags.extend(self.flags.iter().cloned());
        // A test run that is killed leaves nothing behind where util-linux is there.
        let mut command = match Path::new("/usr/bin/setpriv").is_file() {
            true => Command::new("/usr/bin/setpriv"),
            false => Command::new("etcd"),
        };
        if command.get_program() != "etcd" {
            command.args(["--pdeathsig", "KILL", "etcd"]);
        }
        command.args(flags.iter().map(|(flag, value)| format!("{flag}={value}")));
        // Debian has it for more machines than its authors test it on.
        command.env("ETCD_UNSUPPORTED_ARCH", "arm64").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(command.spawn().context("cannot start etcd")?);
        let healthy = async || {
            let url = format!("{}/health", plain(self.metrics_port));
            let Ok(answer) = reqwest::get(url).await else { return Ok(false) };
            Ok(answer.text().await?.contains("true"))
        };
        until(STARTED, "etcd is healthy", healthy).await.with_context(|| self.log()).map(drop)
    }

    /// kill -9.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Without its data, as a new one.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_empty(&mut self) -> anyhow::Result<()> {
        fs::remove_dir_all(self.dir().join("data"))?;
        self.start().await
    }

    /// Stops it in the middle of whatever it does.
    ///
    /// # Errors
    /// It does not run.
    pub fn freeze(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// It does not run.
    pub fn wake(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Somebody else's client.
    ///
    /// # Errors
    /// It cannot be made.
    pub async fn client(&self) -> anyhow::Result<Client> {
        self.client_as(None).await
    }

    /// The same, as a user.
    ///
    /// # Errors
    /// As [`Self::client`].
    pub async fn client_as(&self, user: Option<ConnectOptions>) -> anyhow::Result<Client> {
        Ok(Client::connect([format!("127.0.0.1:{}", self.client_port)], user).await?)
    }

    /// Calls of this method that were begun so far.
    ///
    /// # Errors
    /// It does not answer, or counts no such calls.
    pub async fn calls(&self, method: &str) -> anyhow::Result<u64> {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.metrics_port)).await?.text().await?;
        let label = format!("grpc_method=\"{method}\"");
        let counts = |line: &&str| line.starts_with("grpc_server_started_total{") && line.contains(&label);
        let count = text.lines().find(counts).and_then(|line| line.rsplit(' ').next());
        Ok(count.with_context(|| format!("no count of {method}"))?.parse()?)
    }

    /// What stands under the prefix: values by keys.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn entries(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let found = self.client().await?.get(PREFIX, Some(GetOptions::new().with_prefix())).await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(found.kvs().iter().map(|pair| (text(pair.key()), text(pair.value()))).collect())
    }

    /// Removes everything under the prefix, and says at which revision.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn clear(&self) -> anyhow::Result<i64> {
        let deleted = self.client().await?.delete(PREFIX, Some(DeleteOptions::new().with_prefix())).await?;
        Ok(deleted.header().context("an answer has a header")?.revision())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let child = self.child.as_ref().context("etcd does not run")?;
        Ok(kill(Pid::from_raw(i32::try_from(child.id())?), signal)?)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir().join("etcd.log")).unwrap_or_default()
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}
