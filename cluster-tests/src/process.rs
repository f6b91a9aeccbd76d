//! One program of the cluster as a child process. Knows nothing of roles.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// A model is loaded, dequantized and warmed up in this time even while both cores compile, and on an emulated GPU.
pub const READY_TIMEOUT: Duration = Duration::from_secs(300);

/// A running program; killed on drop.
pub struct Process {
    /// For people and for the log.
    pub name: String,
    child: Child,
    ready: BTreeMap<String, String>,
    log: PathBuf,
}

/// One of a process, over TCP.
#[derive(Clone, Copy, Debug)]
pub struct Socket {
    /// At this end.
    pub port: u16,
    /// At the other end; 0 of one that listens.
    pub remote: u16,
    /// It waits for others to connect.
    pub listens: bool,
}

impl Process {
    /// Starts a program of this build and waits for its ready line.
    ///
    /// # Errors
    /// It ends first or takes too long; with its log.
    pub async fn start(name: &str, program: &str, args: &[String], logs: &Path) -> anyhow::Result<Self> {
        Self::start_as(name, command(program)?, args, logs).await
    }

    /// As [`Process::start`], with these in its environment.
    ///
    /// # Errors
    /// As there.
    pub async fn start_in_environment(
        environment: &[(&str, &str)],
        name: &str,
        program: &str,
        args: &[String],
        logs: &Path,
    ) -> anyhow::Result<Self> {
        let mut command = command(program)?;
        command.envs(environment.iter().copied());
        Self::start_as(name, command, args, logs).await
    }

    /// As [`Process::start`], in a network namespace (`ip netns`), which takes root.
    ///
    /// # Errors
    /// As there.
    pub async fn start_in_namespace(
        namespace: &str,
        name: &str,
        program: &str,
        args: &[String],
        logs: &Path,
    ) -> anyhow::Result<Self> {
        Self::start_through(&["ip", "netns", "exec", namespace], name, program, args, logs).await
    }

    /// As [`Process::start`], by another program, which takes the program and its arguments as its last ones.
    ///
    /// # Errors
    /// As there.
    pub async fn start_through(
        by: &[&str],
        name: &str,
        program: &str,
        args: &[String],
        logs: &Path,
    ) -> anyhow::Result<Self> {
        let inside = command(program)?;
        let [first, others @ ..] = by else { bail!("no program to start {name} by") };
        let mut command = Command::new(first);
        command.args(others).arg(inside.get_program()).args(inside.get_args());
        Self::start_as(name, command, args, logs).await
    }

    async fn start_as(name: &str, mut command: Command, args: &[String], logs: &Path) -> anyhow::Result<Self> {
        let log = logs.join(format!("{name}.log"));
        let mut file = fs::OpenOptions::new().create(true).append(true).open(&log)?;
        let mut child = command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let (tell, told) = oneshot::channel();
        std::thread::spawn(move || {
            let mut tell = Some(tell);
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if line.starts_with("ready ") {
                    tell.take().map(|tell| tell.send(line.clone()));
                }
                let _ = writeln!(file, "{line}");
            }
        });
        let mut process = Self { name: name.to_owned(), child, ready: BTreeMap::new(), log };
        match tokio::time::timeout(READY_TIMEOUT, told).await {
            Ok(Ok(line)) => process.ready = pairs(&line),
            Ok(Err(_)) => bail!("{name} ended before it was ready: {}\n{}", process.child.wait()?, process.log()),
            Err(_) => bail!("{name} was not ready in time\n{}", process.log()),
        }
        Ok(process)
    }

    /// A value of the ready line.
    ///
    /// # Panics
    /// The line has no such key.
    pub fn ready(&self, key: &str) -> &str {
        match self.ready.get(key) {
            Some(value) => value,
            None => panic!("the ready line of {} has no {key}=: {:?}", self.name, self.ready),
        }
    }

    /// An address of the ready line as a URL.
    pub fn url(&self, key: &str) -> String {
        let address = self.ready(key);
        if address.contains("://") { address.to_owned() } else { format!("http://{address}") }
    }

    /// Where a router shows operators its cluster: a port of their own, or HTTP's.
    pub fn operators_url(&self) -> String {
        self.url(if self.ready.contains_key("admin") { "admin" } else { "http" })
    }

    /// The key of a router's ready line under which nodes join: a port of their own, or gRPC's.
    pub fn join_key(&self) -> &'static str {
        if self.ready.contains_key("nodes") { "nodes" } else { "grpc" }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// kill -9, and waits for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops it in the middle of whatever it does, without a word to anybody.
    pub fn freeze(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets a frozen process go on.
    pub fn wake(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Asks it to drain and end.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Asks it to read its files again.
    pub fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// It still runs when the time is over.
    pub async fn ended(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} still runs after {within:?}\n{}", self.name, self.log());
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// TCP ports on which it listens, from the kernel's tables.
    ///
    /// # Errors
    /// `/proc` is not readable.
    pub fn listening_ports(&self) -> anyhow::Result<BTreeSet<u16>> {
        Ok(self.sockets()?.into_iter().filter(|socket| socket.listens).map(|socket| socket.port).collect())
    }

    /// Its TCP sockets, from the kernel's tables.
    ///
    /// # Errors
    /// `/proc` is not readable.
    pub fn sockets(&self) -> anyhow::Result<Vec<Socket>> {
        const LISTEN: &str = "0A";
        let mut inodes = BTreeSet::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid()))? {
            // A descriptor may be closed between the two looks.
            let Ok(target) = fs::read_link(entry?.path()) else { continue };
            let inode =
                target.to_string_lossy().strip_prefix("socket:[").map(|rest| rest.trim_end_matches(']').to_owned());
            inodes.extend(inode);
        }
        let port = |address: &str| -> anyhow::Result<u16> {
            Ok(u16::from_str_radix(address.rsplit(':').next().context("an address has a port")?, 16)?)
        };
        let mut sockets = Vec::new();
        for table in ["tcp", "tcp6"] {
            for line in fs::read_to_string(format!("/proc/{}/net/{table}", self.pid()))?.lines().skip(1) {
                let columns: Vec<&str> = line.split_whitespace().collect();
                let [_, local, remote, state, _, _, _, _, _, inode, ..] = columns[..] else { continue };
                if inodes.contains(inode) {
                    sockets.push(Socket { port: port(local)?, remote: port(remote)?, listens: state == LISTEN });
                }
            }
        }
        Ok(sockets)
    }

    /// Resident memory in MB; `None` once it has ended.
    pub fn resident_mb(&self) -> Option<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kilobytes: f64 = resident.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kilobytes / 1024.0)
    }

    /// What it wrote so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {} ({})\n{}", self.name, self.log.display(), last_lines(&self.log()));
        }
    }
}

/// Runs a program that is expected to end by itself, such as one with a wrong flag.
///
/// # Errors
/// It cannot be started or still runs after `within`.
pub async fn run_to_end(program: &str, args: &[String], within: Duration) -> anyhow::Result<Output> {
    let mut child = tokio::process::Command::from(command(program)?);
    child.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(within, child.output()).await;
    Ok(output.with_context(|| format!("{program} {args:?} still runs after {within:?}"))??)
}

/// Whether a process ended by its own decision, not by a signal (a panic that aborts is one).
pub fn ended_by_itself(status: ExitStatus) -> bool {
    status.signal().is_none()
}

/// Where cargo put the programs of this build: the directory above that of the tests and examples. An absolute path
/// stays what it is.
///
/// # Errors
/// A program is not built.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let dir = own.parent().and_then(Path::parent).context("a test runs in target/*/deps")?;
    let path = dir.join(name);
    if !path.is_file() {
        bail!("{} is missing: run `cargo build --release` first, or `make test` for tests", path.display());
    }
    Ok(path)
}

fn command(name: &str) -> anyhow::Result<Command> {
    // A test run that is killed leaves nothing behind where util-linux is there.
    if Path::new("/usr/bin/setpriv").is_file() {
        let mut command = Command::new("/usr/bin/setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(program(name)?);
        return Ok(command);
    }
    Ok(Command::new(program(name)?))
}

fn pairs(line: &str) -> BTreeMap<String, String> {
    let pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().rev().take(25).collect();
    lines.into_iter().rev().map(|line| format!("{line}\n")).collect()
}
