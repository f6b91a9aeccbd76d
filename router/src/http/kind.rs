//! The two endpoints that generate: chats and completions. Their answers differ in form, and in nothing else.

/// Which endpoint answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

impl Kind {
    /// `gen_ai.operation.name` of the request's span.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }
}
