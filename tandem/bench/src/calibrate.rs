//! Finds out how long prompts are to the server: by its tokenizer where it has one to ask, and else by what it counts.
use std::time::Duration;

use anyhow::{Context, bail};
use tokio_util::sync::CancellationToken;

use super::client::{Client, Usage};
use super::metronome::Clock;
use super::prompt::{HEAD, Prompt, Vocabulary, Word, candidates};
use super::record::Outcome;
use super::server::Server;

/// Fewer words than this make prompts too much alike.
const FEWEST_WORDS: usize = 128;
/// Questions to a tokenizer that knows few of our words whole.
const MOST_QUESTIONS: usize = 400;
/// Words of the two prompts that a server without a tokenizer counts for us.
const FEW_WORDS: u32 = 32;
const MANY_WORDS: u32 = 160;

/// What is asked, and how.
pub struct Question<'a> {
    /// Where there is an HTTP side.
    pub server: Option<&'a Server>,
    /// What will be measured.
    pub client: &'a Client,
    /// Name of the model.
    pub model: &'a str,
    /// Prompts are chat messages, with a template around them.
    pub in_chat: bool,
    /// Bound of one answer.
    pub timeout: Duration,
}

/// A vocabulary, and what there is to say about it.
pub struct Calibrated {
    /// To make prompts of.
    pub vocabulary: Vocabulary,
    /// For the user, where lengths are not exact.
    pub note: Option<String>,
}

impl Question<'_> {
    /// # Errors
    /// The server answers no request.
    pub async fn vocabulary(&self) -> anyhow::Result<Calibrated> {
        if let Some(server) = self.server
            && let Ok(vocabulary) = self.by_tokenizer(server).await
        {
            return Ok(Calibrated { vocabulary, note: None });
        }
        self.by_usage().await
    }

    async fn by_tokenizer(&self, server: &Server) -> anyhow::Result<Vocabulary> {
        let bare = server.tokenize(self.model, HEAD).await?;
        let words = whole_words(server, self.model, &bare).await?;
        if words.len() < FEWEST_WORDS {
            bail!("only {} words are one token each", words.len());
        }
        let head = if self.in_chat { server.tokenize_chat(self.model, HEAD).await? } else { bare };
        let head_tokens = head.len();
        let vocabulary = Vocabulary::exact(words, head);
        let text = vocabulary.sample(MANY_WORDS);
        let found = match self.in_chat {
            true => server.tokenize_chat(self.model, &text).await?.len(),
            false => server.tokenize(self.model, &text).await?.len(),
        };
        if found != head_tokens + MANY_WORDS as usize {
            bail!("{MANY_WORDS} words are {found} tokens and not {}", head_tokens + MANY_WORDS as usize);
        }
        Ok(vocabulary)
    }

    /// Two prompts of known numbers of words are a line.
    async fn by_usage(&self) -> anyhow::Result<Calibrated> {
        let words = Vocabulary::measured(0.0, 1.0);
        let few = self.count(words.sample(FEW_WORDS)).await?;
        let many = self.count(words.sample(MANY_WORDS)).await?;
        let slope = many
            .zip(few)
            .map(|(many, few)| (f64::from(many.prompt) - f64::from(few.prompt)) / f64::from(MANY_WORDS - FEW_WORDS));
        let (slope, few) = match slope.zip(few) {
            Some((slope, few)) if slope > 0.1 => (slope, few),
            _ => {
                let note = "the server does not count prompt tokens: lengths are words".to_owned();
                return Ok(Calibrated { vocabulary: words, note: Some(note) });
            }
        };
        let head = (f64::from(few.prompt) - slope * f64::from(FEW_WORDS)).max(0.0);
        let note = format!(
            "no tokenizer to ask: by the server's counts a word is {slope:.2} tokens, lengths are right in the mean"
        );
        Ok(Calibrated { vocabulary: Vocabulary::measured(head, slope), note: Some(note) })
    }

    async fn count(&self, text: String) -> anyhow::Result<Option<Usage>> {
        let call = self.client.call(Prompt::Text(text), 1)?;
        let (heard, outcome) = call.ask(Clock::start(), self.timeout, &CancellationToken::new()).await;
        match outcome {
            Outcome::Failed { kind, .. } if kind == "empty" => Ok(heard.usage),
            Outcome::Failed { kind, message } => bail!("the server answers no request: {kind}: {message}"),
            Outcome::Refused { .. } => bail!("the server refuses its first request for load"),
            Outcome::Ok | Outcome::Unfinished => Ok(heard.usage),
        }
    }
}

/// The words that are one token behind others. Asks for all at once, and for halves where that does not come out.
async fn whole_words(server: &Server, model: &str, bare: &[u32]) -> anyhow::Result<Vec<Word>> {
    let all: Vec<&str> = candidates().collect();
    let mut open: Vec<&[&str]> = vec![&all];
    let (mut words, mut questions) = (Vec::new(), 0);
    while let Some(part) = open.pop() {
        questions += 1;
        if questions > MOST_QUESTIONS {
            break;
        }
        let tokens = server.tokenize(model, &format!("{HEAD} {}", part.join(" "))).await.context("no tokenizer")?;
        match tokens.strip_prefix(bare) {
            Some(ids) if ids.len() == part.len() => {
                let whole = part.iter().zip(ids).map(|(word, id)| Word { text: (*word).to_owned(), id: Some(*id) });
                words.extend(whole);
            }
            _ if part.len() > 1 => {
                let (left, right) = part.split_at(part.len() / 2);
                open.extend([right, left]);
            }
            _ => {}
        }
    }
    Ok(words)
}
