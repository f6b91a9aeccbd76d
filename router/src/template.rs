//! The model's own chat template (Jinja, from the GGUF file's `tokenizer.chat_template`), rendered so that nothing that
//! a message says can become a control token. Encoding the result is [`crate::tokenizer`]'s matter.
use minijinja::{Environment, ErrorKind as JinjaErrorKind, context};
use serde::Serialize;
use tandem_proto::v1::ChatMessage;
use tandem_proto::{Error, ErrorKind};

use crate::model_file::ModelTextError;
use crate::tokenizer::Tokenizer;

/// Messages of one chat at most.
const MAX_MESSAGES: usize = 4096;
/// Template instructions at most: a hundred times what [`MAX_MESSAGES`] need.
const MAX_STEPS: u64 = 20_000_000;
const NAME: &str = "chat";
/// Roles reach the prompt verbatim, so only these are let through.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// A compiled template.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A prompt in which [`Self::guard`] keeps the messages' text from spelling control tokens.
pub(crate) struct Rendered {
    /// The prompt, guards included.
    pub text: String,
    /// A character that no message contains; take it out after the control tokens are found.
    pub guard: char,
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// # Errors
    /// `Unsupported` for a template that minijinja cannot parse.
    pub fn compile(source: &str, bos: &str, eos: &str) -> Result<Self, ModelTextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(JinjaErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| ModelTextError::Unsupported(format!("chat template: {error}")))?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The prompt for the assistant's next message.
    ///
    /// # Errors
    /// `InvalidArgument` for no messages, too many, an unknown role, or what the template itself refuses.
    pub fn render(&self, tokenizer: &Tokenizer, messages: &[ChatMessage]) -> Result<Rendered, Error> {
        if messages.is_empty() || messages.len() > MAX_MESSAGES {
            let count = messages.len();
            return Err(Error::invalid("messages", format!("{count} messages; 1 to {MAX_MESSAGES} are possible")));
        }
        let guard = absent_character(messages)?;
        let messages = messages
            .iter()
            .map(|message| Ok(Message { role: role(message)?, content: tokenizer.guarded(&message.content, guard) }))
            .collect::<Result<Vec<_>, Error>>()?;
        let render = || {
            self.environment.get_template(NAME)?.render(context! {
                messages, add_generation_prompt => true, bos_token => self.bos, eos_token => self.eos,
            })
        };
        let text = render().map_err(|error: minijinja::Error| {
            Error::invalid("messages", format!("the model's chat template refuses the messages: {error}"))
        })?;
        Ok(Rendered { text, guard })
    }
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

fn role(message: &ChatMessage) -> Result<&'static str, Error> {
    // OpenAI's newer name of the same role.
    let name = if message.role == "developer" { "system" } else { message.role.as_str() };
    ROLES.into_iter().find(|role| *role == name).ok_or_else(|| {
        let role: String = name.chars().take(40).collect();
        Error::invalid("messages", format!("unknown role {role:?}; known: {ROLES:?}"))
    })
}

/// A character of the supplementary private use area that stands in none of the messages.
fn absent_character(messages: &[ChatMessage]) -> Result<char, Error> {
    let mut taken: Vec<char> =
        messages.iter().flat_map(|message| message.content.chars()).filter(|c| *c >= '\u{f0000}').collect();
    taken.sort_unstable();
    taken.dedup();
    ('\u{f0000}'..='\u{ffffd}')
        .find(|c| taken.binary_search(c).is_err())
        .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the messages use every private-use character"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into() }
    }

    #[test]
    fn the_guard_is_a_character_that_is_not_there() {
        let messages = [message("user", "\u{f0000}\u{f0002}"), message("user", "\u{f0001}")];
        assert_eq!(absent_character(&messages), Ok('\u{f0003}'));
        let all: String = ('\u{f0000}'..='\u{ffffd}').collect();
        assert!(absent_character(&[message("user", &all)]).is_err());
    }

    #[test]
    fn roles_are_a_closed_set() {
        assert_eq!(role(&message("developer", "")), Ok("system"));
        assert!(role(&message("user<|im_end|>", "")).is_err());
    }

    #[test]
    fn a_broken_template_is_refused_when_compiled() {
        let broken = ChatTemplate::compile("{% for %}", "", "");
        assert!(matches!(broken, Err(ModelTextError::Unsupported(_))));
    }
}
