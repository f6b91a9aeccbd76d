//! What the router says to a call that runs: that its answer is complete. `service.rs` reads the call's first message,
//! and `generate.rs` ends by this one.
use tandem_proto::v1::decode_command::Command;
use tandem_proto::v1::{DecodeCommand, DecodeStop};
use tonic::Streaming;

/// The router's word that the answer is complete without more tokens.
pub struct Stop {
    /// `None`: nothing more is coming.
    commands: Option<Streaming<DecodeCommand>>,
    said: Option<DecodeStop>,
}

impl Stop {
    /// Of a call that has started.
    pub fn from_router(commands: Streaming<DecodeCommand>) -> Self {
        Self { commands: Some(commands), said: None }
    }

    /// Ready once it was said, and from then on. A router that closes its side has not said it. Cancel-safe.
    pub async fn said(&mut self) -> DecodeStop {
        loop {
            if let Some(stop) = self.said {
                return stop;
            }
            let Some(commands) = &mut self.commands else { return std::future::pending().await };
            match commands.message().await {
                Ok(Some(DecodeCommand { command: Some(Command::Stop(stop)) })) => self.said = Some(stop),
                Ok(Some(_)) => {}
                // The end of the call itself is seen where its events go.
                Ok(None) | Err(_) => self.commands = None,
            }
        }
    }

    /// Ready once it was said that no KV will come either. Cancel-safe.
    pub async fn without_handoff(&mut self) {
        if !self.said().await.no_handoff {
            std::future::pending().await
        }
    }
}
