//! Starts one process of the cluster and waits for its `ready …` line. Knows nothing of roles.
//!
//! `setpriv --pdeathsig KILL` and `taskset -c` (both util-linux) stand before the program, so that a child ends with
//! this process even when this process is killed, without any unsafe code here.
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::oneshot;

use crate::cores;

/// What to start.
#[derive(Clone)]
pub struct Recipe {
    /// For people and for the log file.
    pub name: String,
    /// Executable.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// CPUs it may use; empty: all.
    pub cpus: Vec<usize>,
}

/// Which command prefixes this machine has.
#[derive(Clone, Copy)]
pub struct Wrappers {
    /// `setpriv --pdeathsig`.
    pub death_signal: bool,
    /// `taskset -c`.
    pub affinity: bool,
}

/// A running process that said it is ready.
pub struct Member {
    /// How it was started.
    pub recipe: Recipe,
    /// The pairs of its ready line.
    pub ready: Ready,
    /// Standard output and standard error.
    pub log: Log,
    child: Child,
}

/// What one process writes. Its file may begin with what earlier ones of the same name wrote.
#[derive(Clone)]
pub struct Log {
    path: PathBuf,
    /// Bytes of the earlier ones.
    from: u64,
}

impl Wrappers {
    /// Tries both programs.
    pub fn find() -> Self {
        let help = |program: &str| std::process::Command::new(program).arg("--help").stdin(Stdio::null()).output();
        let death_signal =
            help("setpriv").is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("--pdeathsig"));
        Self { death_signal, affinity: help("taskset").is_ok_and(|output| output.status.success()) }
    }

    fn words(self, cpus: &[usize]) -> Vec<String> {
        let mut words = Vec::new();
        if self.death_signal {
            words.extend(["setpriv", "--pdeathsig", "KILL"].map(str::to_owned));
        }
        if self.affinity && !cpus.is_empty() {
            words.extend(["taskset".to_owned(), "-c".to_owned(), cores::list(cpus)]);
        }
        words
    }
}

impl Recipe {
    /// Starts the process and waits for its ready line.
    ///
    /// # Errors
    /// It cannot be started, ends before it is ready, or is not ready in time; with the tail of its log.
    pub async fn launch(&self, wrappers: Wrappers, logs: &Path, timeout: Duration) -> anyhow::Result<Member> {
        let (log, file) = Log::open(logs.join(format!("{}.log", self.name)))?;
        let mut words = wrappers.words(&self.cpus);
        words.push(self.program.display().to_string());
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file.try_clone()?)
            // Ctrl-C in the terminal is for this process alone, which then drains the children in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", words.join(" ")))?;
        let stdout = child.stdout.take().context("standard output is piped")?;
        let (tell, told) = oneshot::channel();
        tokio::spawn(copy_output(stdout, tokio::fs::File::from_std(file), tell));
        match tokio::time::timeout(timeout, told).await {
            Ok(Ok(ready)) => Ok(Member { recipe: self.clone(), ready, log, child }),
            Ok(Err(_)) => {
                let status = child.wait().await?;
                bail!("{} ended before it was ready ({status})\n{}", self.name, log.tail());
            }
            Err(_) => bail!("{} was not ready within {} s\n{}", self.name, timeout.as_secs(), log.tail()),
        }
    }
}

impl Member {
    /// Process id, until the process has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the end of the process; may be dropped and called again.
    pub async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Asks the process to drain and end.
    pub fn terminate(&self) {
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) {
            // Fails only when the process is gone, which is what it is asked for.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
    }

    /// Ends the process now.
    pub async fn kill(&mut self) {
        let _ = self.child.kill().await;
    }
}

/// The `key=value` pairs of a ready line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready(BTreeMap<String, String>);

impl Ready {
    /// `None`: not a ready line.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        if words.next() != Some("ready") {
            return None;
        }
        let pairs = words.filter_map(|word| word.split_once('='));
        Some(Self(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()))
    }

    /// The value of `key`; a process that does not say it is not one of ours.
    pub fn get(&self, key: &str) -> anyhow::Result<&str> {
        self.0.get(key).map(String::as_str).with_context(|| format!("the ready line has no {key}="))
    }
}

impl Log {
    /// The log of a process that is about to start, and its file to append to.
    fn open(path: PathBuf) -> anyhow::Result<(Self, File)> {
        let open = || -> std::io::Result<(File, u64)> {
            let file = fs::OpenOptions::new().create(true).append(true).open(&path)?;
            let from = file.metadata()?.len();
            Ok((file, from))
        };
        let (file, from) = open().with_context(|| format!("cannot write {}", path.display()))?;
        Ok((Self { path, from }, file))
    }

    /// The last lines of this process, for people.
    pub fn tail(&self) -> String {
        let bytes = self.last_bytes().unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.trim_end().lines().rev().take(20).collect();
        let shown: String = lines.iter().rev().map(|line| format!("  | {line}\n")).collect();
        match self.check_writable() {
            Ok(()) => format!("{shown}  ({})", self.path.display()),
            Err(error) => format!("{shown}  the log in {} could not be written: {error}", self.path.display()),
        }
    }

    /// Where it cannot grow, the process may have said more than is there.
    fn check_writable(&self) -> std::io::Result<()> {
        // The empty line stands between this process and the next one.
        fs::OpenOptions::new().append(true).open(&self.path)?.write_all(b"\n")?;
        check_writable(self.path.parent().unwrap_or(Path::new(".")))
    }

    fn last_bytes(&self) -> std::io::Result<Vec<u8>> {
        const MOST: u64 = 4096;
        let mut file = File::open(&self.path)?;
        let length = file.metadata()?.len();
        // Shorter than it was: somebody has emptied it, and all of it is this process's.
        let own = if length < self.from { 0 } else { self.from };
        let start = length.saturating_sub(MOST).max(own);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(length - start).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// Whether logs can grow in this directory. A process goes on without its log, but nobody learns why it ended.
///
/// # Errors
/// The system's reason, on a full disk `StorageFull`.
pub fn check_writable(logs: &Path) -> std::io::Result<()> {
    /// What a start may write. The last bytes of a full disk are enough for a few lines.
    const BYTES: usize = 64 << 10;
    let probe = logs.join(format!(".probe-{}", std::process::id()));
    // Some file systems find out late.
    let written =
        File::create(&probe).and_then(|mut file| file.write_all(&[b'\n'; BYTES]).and_then(|()| file.sync_all()));
    let _ = fs::remove_file(&probe);
    written
}

/// Copies the output to the log for as long as the process lives, and tells the ready line.
async fn copy_output(stdout: ChildStdout, mut log: tokio::fs::File, tell: oneshot::Sender<Ready>) {
    let mut tell = Some(tell);
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A full disk must not stop the cluster. Flushed, so that the log of a process that is ready says so.
        let _ = log.write_all(format!("{line}\n").as_bytes()).await;
        let _ = log.flush().await;
        if let Some(ready) = Ready::parse(&line)
            && let Some(tell) = tell.take()
        {
            let _ = tell.send(ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Recipe {
        let args = ["-c", script].map(str::to_owned).to_vec();
        Recipe { name: "child".into(), program: "sh".into(), args, cpus: Vec::new() }
    }

    const NO_WRAPPERS: Wrappers = Wrappers { death_signal: false, affinity: false };
    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn ready_lines() {
        let ready = Ready::parse("ready role=decode grpc=127.0.0.1:5 transport=ucx/sysv+posix").unwrap();
        assert_eq!(ready.get("transport").unwrap(), "ucx/sysv+posix");
        assert!(ready.get("http").is_err());
        assert_eq!(Ready::parse("getting ready"), None);
    }

    #[tokio::test]
    async fn a_child_says_it_is_ready_and_ends_when_asked() {
        let logs = tempfile::tempdir().unwrap();
        let recipe = shell("echo hello; echo ready grpc=1; trap 'exit 7' TERM; while :; do read x || sleep 0.05; done");
        let mut member = recipe.launch(NO_WRAPPERS, logs.path(), SOON).await.unwrap();
        assert_eq!(member.ready.get("grpc").unwrap(), "1");
        assert!(member.pid().is_some());
        member.kill().await;
        assert_eq!(member.pid(), None);
        assert!(member.log.tail().contains("hello"));
    }

    #[tokio::test]
    async fn an_excerpt_is_of_this_process_alone() {
        let logs = tempfile::tempdir().unwrap();
        let fail = async |text: &str| {
            let error = shell(&format!("echo {text} >&2; exit 3")).launch(NO_WRAPPERS, logs.path(), SOON).await;
            error.err().unwrap().to_string()
        };
        assert!(fail("wrong flag").await.contains("| wrong flag"));
        let second = fail("no such port").await;
        assert!(second.contains("| no such port") && !second.contains("wrong flag"), "{second}");
        let path = logs.path().join("child.log");
        let (log, _file) = Log::open(path.clone()).unwrap();
        assert_eq!(log.tail(), format!("  ({})", path.display()), "it has said nothing yet");
        fs::write(&path, "emptied meanwhile").unwrap();
        assert!(log.tail().contains("emptied"));
    }

    #[tokio::test]
    async fn a_child_that_ends_early_is_an_error_with_its_log() {
        let logs = tempfile::tempdir().unwrap();
        let error = shell("echo no such port >&2; exit 3").launch(NO_WRAPPERS, logs.path(), SOON).await.err().unwrap();
        let text = error.to_string();
        assert!(text.contains("no such port") && text.contains("exit status: 3"), "{text}");
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_written_is_named() {
        let logs = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", logs.path().join("child.log")).unwrap();
        let error = shell("echo lost >&2; exit 3").launch(NO_WRAPPERS, logs.path(), SOON).await.err().unwrap();
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.contains("child.log could not be written: No space"), "{text}");
        check_writable(logs.path()).unwrap();
        assert_eq!(fs::read_dir(logs.path()).unwrap().count(), 1, "the probe is left behind");
        assert!(check_writable(&logs.path().join("nowhere")).is_err());
    }

    #[test]
    fn prefixes_are_combined() {
        let both = Wrappers { death_signal: true, affinity: true };
        assert_eq!(both.words(&[1, 2]).join(" "), "setpriv --pdeathsig KILL taskset -c 1,2");
        assert_eq!(both.words(&[]).join(" "), "setpriv --pdeathsig KILL");
        assert!(NO_WRAPPERS.words(&[1]).is_empty());
    }
}
