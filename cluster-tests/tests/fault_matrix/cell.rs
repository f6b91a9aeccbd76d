//! One cell: bring a request to its moment, strike, and look at everybody afterwards.
use std::fmt;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tandem_cluster_tests::client::{ask, token_ids};
use tandem_cluster_tests::fleet::{Counts, Role};
use tandem_cluster_tests::process::program;
use tandem_cluster_tests::reference::Reference;
use tandem_cluster_tests::{Fleet, FleetOptions};
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::fault::{Expected, Fault, Victim};
use crate::moment::{Moment, Size};

/// From the fault to the client's end: detection (a lease of one second), the silence that the fault lasts, the prompt
/// again, the rest of the answer, on cores that all fleets share.
const ENDS: Duration = Duration::from_secs(30);
/// To see one at its moment.
const MOST_REQUESTS: u32 = 4;
/// To make two nodes busy.
const MAX_FILLERS: usize = 8;
/// From there until every block is back.
const BACK: Duration = Duration::from_secs(10);

/// A fleet's transport, and what its nodes are set up for.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub transport: &'static str,
    pub moment: Moment,
}

impl Setting {
    pub fn fleet(self) -> FleetOptions {
        self.moment.fleet(self.transport)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub setting: Setting,
    pub victim: Victim,
    pub fault: Fault,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting: Setting { transport, moment }, victim, fault } = self;
        write!(f, "{transport}: {}/{}/{}", fault.as_str(), victim.as_str(), moment.as_str())
    }
}

/// What came of a cell.
#[derive(Clone, Debug)]
pub struct Report {
    pub cell: Cell,
    seen: &'static str,
    /// The longest time without a token, the first one excluded.
    pause: Duration,
    /// From the fault to the client's end, and from there to the last block.
    ended: Duration,
    back: Duration,
    /// What the fault did to KV, as those count it who live through it.
    pub lost_peers: f64,
    pub fenced_peers: f64,
    pub problem: Option<String>,
}

impl Report {
    pub fn failed(cell: Cell, problem: String) -> Self {
        let (pause, ended, back) = Default::default();
        let (lost_peers, fenced_peers) = (0.0, 0.0);
        Self { cell, seen: "FAILED", pause, ended, back, lost_peers, fenced_peers, problem: Some(problem) }
    }

    /// For the table.
    pub fn short(&self) -> String {
        format!("{} {:.1}", self.seen, self.pause.as_secs_f64())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cell, seen, pause, ended, back, lost_peers, fenced_peers, problem } = self;
        write!(f, "{cell}: {seen}, longest pause {pause:.2?}, ended after {ended:.2?}, blocks back after {back:.2?}")?;
        write!(f, ", {lost_peers} KV peers lost, {fenced_peers} cut off")?;
        problem.as_ref().map_or(Ok(()), |problem| write!(f, ": {problem}"))
    }
}

impl Cell {
    pub async fn run(self, fleet: &mut Fleet, reference: &Reference) -> Report {
        self.strike(fleet, reference).await.unwrap_or_else(|error| Report::failed(self, format!("{error:#}")))
    }

    async fn strike(self, fleet: &mut Fleet, reference: &Reference) -> anyhow::Result<Report> {
        let moment = self.setting.moment;
        fleet.repair().await.context("before the fault")?;
        // Before the request: its moment does not last while every node is asked.
        let before = fleet.counts().await;
        let (mut client, seed, fillers) = self.bring(fleet, reference).await?;

        let struck = Instant::now();
        self.victim.suffers(self.fault, fleet, &client).await?;
        let ended = timeout(ENDS, client.end()).await.with_context(|| format!("no end within {ENDS:?}"))??;
        let ended_after = struck.elapsed();
        let expected = self.victim.expects(self.fault);
        ended.check(expected)?;
        let expected_of_others = if self.victim == Victim::Client { Expected::Whole } else { expected };
        for filler in fillers {
            filler.check(expected_of_others, reference).await.context("another request")?;
        }
        let back = fleet.settled(BACK).await?;
        let after = fleet.counts().await;
        let grown = |of: fn(&Counts) -> f64| {
            // One that was started anew meanwhile begins at zero.
            let both = after.iter().filter_map(|(pid, after)| Some(of(after) - of(before.get(pid)?)));
            both.sum::<f64>()
        };
        let (lost_peers, fenced_peers) = (grown(|counts| counts.lost_peers), grown(|counts| counts.fenced_peers));
        if expected == Expected::Whole {
            let undisturbed = match client {
                Client::Stream(_) => undisturbed(reference, moment.request(), seed).await?,
                Client::Program(_) => {
                    fleet.repair().await.context("after the fault")?;
                    timeout(ENDS, self.client(fleet, seed)?.end()).await??.output
                }
            };
            ended.compare(&undisturbed)?;
        }
        let (seen, pause, problem) = (expected.as_str(), ended.pause, None);
        Ok(Report { cell: self, seen, pause, ended: ended_after, back, lost_peers, fenced_peers, problem })
    }

    /// Makes the nodes busy, all at the same time. Two requests may meet on one node, when the other is a little late
    /// with its report and tried last for it: then all come again.
    async fn fill(self, fleet: &Fleet, seed: u32) -> anyhow::Result<Vec<Filler>> {
        let (moment, mut fillers) = (self.setting.moment, Vec::new());
        let Some(size) = moment.fillers() else { return Ok(fillers) };
        loop {
            for _ in 0..fleet.nodes() {
                let seed = seed + 1 + fillers.len() as u32;
                fillers.push(Filler { client: Client::stream(fleet, size, seed), size, seed });
            }
            match moment.prepared(fleet).await {
                Ok(()) => return Ok(fillers),
                Err(error) if fillers.len() >= MAX_FILLERS => {
                    let seen = fleet.router_view().await.unwrap_or_else(|error| error.to_string());
                    return Err(error.context(format!("the router sees {seen}")));
                }
                Err(_) => {}
            }
        }
    }

    /// A client whose request is at its moment, the seed of its prompt, and the others that hold it there. A moment may
    /// pass between two looks when the cores are busy: then another request is brought there.
    async fn bring(self, fleet: &Fleet, reference: &Reference) -> anyhow::Result<(Client, u32, Vec<Filler>)> {
        for attempt in 1.. {
            let seed = self.seed() + 10 * attempt;
            let fillers = self.fill(fleet, seed).await?;
            let before = fleet.sum(Role::Decode).await;
            let mut client = self.client(fleet, seed)?;
            let passed = tokio::select! {
                biased;
                reached = self.setting.moment.reached(fleet, before) => reached.map(|()| client.is_over())?,
                () = client.gone() => true,
            };
            if !passed {
                return Ok((client, seed, fillers));
            }
            ensure!(attempt < MOST_REQUESTS, "the moment passed {attempt} times unseen");
            for filler in fillers {
                filler.check(Expected::Whole, reference).await.context("before the fault")?;
            }
        }
        bail!("no request was brought to its moment")
    }

    fn client(self, fleet: &Fleet, seed: u32) -> anyhow::Result<Client> {
        match self.victim {
            Victim::Client => Client::program(fleet, self.setting.moment.request(), seed),
            _ => Ok(Client::stream(fleet, self.setting.moment.request(), seed)),
        }
    }

    /// Each cell has prompts of its own: nothing of them is cached.
    fn seed(self) -> u32 {
        let place = |position: Option<usize>| position.unwrap_or_default() as u32;
        let victim = place(Victim::ALL.iter().position(|victim| *victim == self.victim));
        let fault = place(Fault::ALL.iter().position(|fault| *fault == self.fault));
        1000 + 100 * (victim * Fault::ALL.len() as u32 + fault)
    }
}

/// Who asked.
pub enum Client {
    /// A task of this program.
    Stream(JoinHandle<anyhow::Result<Ended>>),
    /// `tandem generate`, which can be killed.
    Program(tokio::process::Child),
}

/// A request that makes a node busy.
struct Filler {
    client: Client,
    size: Size,
    seed: u32,
}

impl Filler {
    /// Waits for its end. It may have been over before the fault: then its answer is whole.
    async fn check(mut self, expected: Expected, reference: &Reference) -> anyhow::Result<()> {
        let ended = timeout(ENDS, self.client.end()).await.context("no end")??;
        if ended.error.is_none() {
            return ended.compare(&undisturbed(reference, self.size, self.seed).await?);
        }
        ended.check(expected)
    }
}

/// How a request ended for its client.
pub struct Ended {
    /// Token ids, or text.
    output: Vec<u8>,
    /// The error, or what a program said on its way out.
    error: Option<String>,
    pause: Duration,
}

impl Client {
    fn stream(fleet: &Fleet, size: Size, seed: u32) -> Self {
        let mut request = ask(token_ids(prompt(size, seed)), size.answer);
        request.ignore_eos = true;
        let url = fleet.entrance_url();
        Self::Stream(tokio::spawn(async move {
            let mut client = InferenceClient::connect(url).await?;
            let mut ended = Ended { output: Vec::new(), error: None, pause: Duration::ZERO };
            let mut stream = match client.generate(request).await {
                Ok(stream) => stream.into_inner(),
                Err(status) => return Ok(Ended { error: Some(status.to_string()), ..ended }),
            };
            let mut last = None;
            loop {
                match stream.message().await {
                    Ok(Some(message)) => match message.event {
                        Some(Event::Token(token)) => {
                            let now = Instant::now();
                            ended.pause = ended.pause.max(now - last.replace(now).unwrap_or(now));
                            ended.output.extend(token.token_id.to_le_bytes());
                        }
                        Some(Event::Finish(_)) => return Ok(ended),
                        None => {}
                    },
                    Ok(None) => bail!("the answer ended without its last message"),
                    Err(status) => return Ok(Ended { error: Some(status.to_string()), ..ended }),
                }
            }
        }))
    }

    fn program(fleet: &Fleet, size: Size, seed: u32) -> anyhow::Result<Self> {
        // A word of one digit and a space is two tokens.
        let prompt: Vec<String> =
            (0..size.prompt / 2).map(|index| ((index * 3 + seed / 100) % 10).to_string()).collect();
        let url = fleet.entrance_url().replace("http://", "grpc://");
        let child = tokio::process::Command::new(program("tandem")?)
            .args(["generate", "--url", &url, "--max-tokens", &size.answer.to_string()])
            .args(["--ignore-eos", &format!("{seed} {}", prompt.join(" "))])
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self::Program(child))
    }

    pub fn signal(&self, signal: Signal) {
        if let Self::Program(child) = self
            && let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok())
        {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Ready when its answer is over; of a program nothing is read here that [`Client::end`] would miss.
    async fn gone(&mut self) {
        match self {
            Self::Stream(task) => drop(task.await),
            Self::Program(child) => drop(child.wait().await),
        }
    }

    /// Whether its answer is over by now. A program that cannot be asked is found out at its end.
    fn is_over(&mut self) -> bool {
        match self {
            Self::Stream(task) => task.is_finished(),
            Self::Program(child) => matches!(child.try_wait(), Ok(Some(_))),
        }
    }

    async fn end(&mut self) -> anyhow::Result<Ended> {
        match self {
            Self::Stream(task) => task.await?,
            Self::Program(child) => {
                use tokio::io::AsyncReadExt;
                let (mut output, mut errors) = (Vec::new(), String::new());
                if let (Some(stdout), Some(stderr)) = (&mut child.stdout, &mut child.stderr) {
                    tokio::try_join!(stdout.read_to_end(&mut output), stderr.read_to_string(&mut errors))?;
                }
                let status = child.wait().await?;
                let error = (!status.success()).then(|| format!("{status}: {errors}"));
                Ok(Ended { output, error, pause: Duration::ZERO })
            }
        }
    }
}

fn prompt(size: Size, seed: u32) -> Vec<u32> {
    (0..size.prompt).map(|index| 1000 + (index * 31 + seed * 7919) % 40_000).collect()
}

/// What one engine alone answers, as bytes.
async fn undisturbed(reference: &Reference, size: Size, seed: u32) -> anyhow::Result<Vec<u8>> {
    let tokens = reference.tokens(&prompt(size, seed), size.answer).await?;
    Ok(tokens.into_iter().flat_map(u32::to_le_bytes).collect())
}

impl Ended {
    fn check(&self, expected: Expected) -> anyhow::Result<()> {
        match (expected, &self.error) {
            (Expected::Whole, Some(error)) => {
                bail!("expected an answer, got: {error} (after {} bytes)", self.output.len())
            }
            (Expected::Error, None) => bail!("an answer, although its router died"),
            (Expected::Gone, None) => bail!("the client was to be gone"),
            (Expected::Whole, None) | (Expected::Error | Expected::Gone, Some(_)) => Ok(()),
        }
    }

    fn compare(&self, undisturbed: &[u8]) -> anyhow::Result<()> {
        let (own, wanted) = (&self.output, undisturbed);
        let equal = own.iter().zip(wanted).take_while(|(own, wanted)| own == wanted).count();
        ensure!(
            own == wanted,
            "output of {} bytes is not the undisturbed {} from byte {equal} on",
            own.len(),
            wanted.len()
        );
        Ok(())
    }
}
