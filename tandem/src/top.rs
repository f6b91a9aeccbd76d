//! `tandem top`: the cluster as it is now, over the whole terminal. It reads the stream that the router's live page
//! reads. This file is the shell: terminal, keys, connection.
//!
//! - [`model`]: what the router said; pure. [`screen`]: draws it; pure.
//! - [`stream`]: the connection, made again when it is lost.
mod model;
mod screen;
mod stream;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::bail;
use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use futures::StreamExt;
use ratatui::DefaultTerminal;
use tokio::sync::mpsc;
use tokio::time::interval;

use crate::config;
use crate::span::Trace;
use model::{Model, Row};
use screen::Screen;
use stream::{Router, Said};

/// What the router says faster than it is drawn waits, and then holds the connection up.
const MAX_WAITING: usize = 64;
/// Ages on the screen grow without anybody saying so.
const REDRAW: Duration = Duration::from_secs(1);

/// Shows the cluster until `q`.
///
/// # Errors
/// No terminal.
pub async fn run(config: config::Top) -> anyhow::Result<()> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("`tandem top` needs a terminal; for programs the router has /debug/cluster and /metrics");
    }
    // Also restores the terminal when this process panics.
    let terminal = ratatui::try_init()?;
    let shown = Top::new(config)?.show(terminal).await;
    ratatui::try_restore()?;
    shown
}

/// The trace of a row, by the row's id.
type Fetched = (String, anyhow::Result<Trace>);

struct Top {
    router: Router,
    model: Model,
    screen: Screen,
}

impl Top {
    fn new(config: config::Top) -> anyhow::Result<Self> {
        let router = Router::new(config.router.http_url()?.to_owned(), config.router.http_client()?);
        Ok(Self { router, model: Model::default(), screen: Screen::default() })
    }

    async fn show(mut self, mut terminal: DefaultTerminal) -> anyhow::Result<()> {
        let (sender, mut words) = mpsc::channel(MAX_WAITING);
        tokio::spawn(self.router.clone().follow(sender));
        let (fetching, mut fetched) = mpsc::channel(MAX_WAITING);
        let (mut keys, mut redraw) = (EventStream::new(), interval(REDRAW));
        loop {
            terminal.draw(|frame| self.screen.draw(frame, &self.model))?;
            tokio::select! {
                said = words.recv() => match said {
                    // What came with it is drawn with it.
                    Some(said) => std::iter::once(said).chain(waiting(&mut words)).for_each(|said| self.take(said)),
                    None => bail!("the connection's task ended"),
                },
                event = keys.next() => match event {
                    Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                        if is_end(key) {
                            return Ok(());
                        }
                        self.press(key, &fetching);
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error.into()),
                    None => return Ok(()),
                },
                Some((id, trace)) = fetched.recv() => self.screen.fetched(&id, trace),
                _ = redraw.tick() => {}
            }
        }
    }

    fn take(&mut self, said: Said) {
        match said {
            Said::Event(event) => self.model.take(*event),
            Said::Lost(why) => self.model.lost(why),
        }
    }

    fn press(&mut self, key: KeyEvent, fetching: &mpsc::Sender<Fetched>) {
        if let KeyCode::Enter = key.code
            && let Some(row) = self.screen.chosen(&self.model)
        {
            self.screen.open(&row);
            tokio::spawn(fetch(self.router.clone(), row, fetching.clone()));
            return;
        }
        self.screen.press(key.code, &self.model);
    }
}

/// Beside the screen, which a router that does not answer must not hold up.
async fn fetch(router: Router, row: Row, fetching: mpsc::Sender<Fetched>) {
    let trace = router.trace(&row.trace).await;
    // Who has left misses nothing.
    let _ = fetching.send((row.id, trace)).await;
}

fn waiting(words: &mut mpsc::Receiver<Said>) -> impl Iterator<Item = Said> {
    std::iter::from_fn(|| words.try_recv().ok())
}

fn is_end(key: KeyEvent) -> bool {
    key.code == KeyCode::Char('q') || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL))
}
