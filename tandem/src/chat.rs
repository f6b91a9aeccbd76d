//! `tandem chat`: a conversation; the history is kept here and sent whole each time.
use std::io::{BufRead, IsTerminal};

use tandem_client::terminal::{OutputClosed, say, write_error};
use tandem_proto::v1::generate_request::Input;
use tandem_proto::v1::{ChatMessage, ChatMessages};

use crate::config::Chat;
use crate::generate::{Client, summary};

/// Answers one message, or every line of standard input until its end or `/exit`.
///
/// # Errors
/// No router; with one message, also the error that the router answers with.
pub async fn run(config: Chat) -> anyhow::Result<()> {
    let mut client = Client::connect(config.options).await?;
    let mut history: Vec<ChatMessage> = config.system.map(|text| said("system", text)).into_iter().collect();
    if let Some(message) = config.message {
        return turn(&mut client, &mut history, message).await;
    }
    if std::io::stdin().is_terminal() {
        say!("Empty line or /exit ends, /new forgets the conversation, Ctrl-C ends an answer.");
    }
    let first = history.len();
    while let Some(line) = next_line().await? {
        if line == "/new" {
            history.truncate(first);
            continue;
        }
        let asked = history.len();
        tokio::select! {
            outcome = turn(&mut client, &mut history, line) => {
                if let Err(error) = outcome {
                    if error.is::<OutputClosed>() {
                        return Err(error);
                    }
                    // One failed turn does not end a conversation.
                    say!("tandem: {error:#}");
                    history.truncate(asked);
                }
            }
            _ = tokio::signal::ctrl_c() => {
                say!("\n[interrupted]");
                history.truncate(asked);
            }
        }
    }
    Ok(())
}

async fn turn(client: &mut Client, history: &mut Vec<ChatMessage>, message: String) -> anyhow::Result<()> {
    history.push(said("user", message));
    let answer = client.answer(Input::Chat(ChatMessages { messages: history.clone() })).await?;
    say!("{}", summary(&answer.finish));
    history.push(said("assistant", answer.text));
    Ok(())
}

fn said(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content }
}

/// `None`: the user is done.
async fn next_line() -> anyhow::Result<Option<String>> {
    let read = tokio::task::spawn_blocking(|| -> std::io::Result<Option<String>> {
        if std::io::stdin().is_terminal() {
            write_error(format_args!("> "));
        }
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line)?;
        let line = line.trim();
        Ok((read > 0 && !line.is_empty() && line != "/exit").then(|| line.to_owned()))
    });
    Ok(read.await??)
}
