//! Requests that wait for their moment: made ahead, on a thread of their own, so that making them delays none.
use tokio::sync::mpsc;

use super::{Form, Part, Target};
use crate::client::Call;
use crate::prompt::Prompt;
use crate::workload::Item;

/// Requests that are made ahead.
const AHEAD: usize = 64;

/// A request that waits for its moment.
pub(super) struct Ready {
    pub index: u64,
    pub call: Call,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
}

/// Makes requests ahead of their time until nobody takes them.
pub(super) fn prepare(target: Target, part: Part) -> mpsc::Receiver<anyhow::Result<Ready>> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let items = (0u64..).map_while(|index| Some((index, part.workload.item(part.draw, index)?)));
        for (index, item) in items {
            if sender.blocking_send(target.ready(index, &item)).is_err() {
                return;
            }
        }
    });
    receiver
}

impl Target {
    /// Request number `index`, in words.
    pub(super) fn ready(&self, index: u64, item: &Item) -> anyhow::Result<Ready> {
        let prompt = match self.form {
            Form::Text => Prompt::Text(self.vocabulary.text(&item.pieces)),
            Form::Ids => Prompt::Ids(self.vocabulary.ids(&item.pieces)),
        };
        let call = self.client.call(prompt, item.max_tokens)?;
        Ok(Ready { index, call, prompt_tokens: item.prompt_tokens(), max_tokens: item.max_tokens })
    }
}
