//! Joins engine and KV transport on the sending side; the two do not know each other. Blocks are pushed in ranges of
//! the hand-off's indices, so that chunks can leave as they finish; today all leave after the forward pass.
use std::sync::Arc;

use tandem_engine::KvLease;
use tandem_kvtransfer::transport::check_identity;
use tandem_kvtransfer::{Outgoing, Receipt, seal_for};
use tandem_node::{CheckedRequest, Node, Trace};
use tandem_proto::v1::{Seal, Ticket};
use tandem_proto::{Error, ErrorKind, TraceContext};
use tandem_telemetry::{Kind, clock};

/// An open hand-off. Dropping it cancels it at the receiver.
pub struct Handoff<'a> {
    node: &'a Arc<Node>,
    request: &'a CheckedRequest,
    ticket: Ticket,
    outgoing: Outgoing,
}

impl<'a> Handoff<'a> {
    /// Checks the ticket and connects to the node that granted it.
    ///
    /// # Errors
    /// `Incompatible` when the ticket is for another node, model, layout or prompt; `Unavailable` when its node is not
    /// there.
    pub async fn open(node: &'a Arc<Node>, request: &'a CheckedRequest, ticket: Ticket) -> Result<Self, Error> {
        check_identity(&ticket, node.incarnation(), node.engine.spec().compatibility_digest)?;
        let blocks = node.engine.pool().blocks_for(request.prompt.len());
        if ticket.blocks as usize != blocks {
            let message = format!("the ticket is for {} blocks, the prompt has {blocks}", ticket.blocks);
            return Err(Error::new(ErrorKind::Incompatible, message));
        }
        let outgoing = node.transport.open(&ticket).await?;
        Ok(Self { node, request, ticket, outgoing })
    }

    /// Of the ticket.
    pub fn id(&self) -> &[u8] {
        &self.ticket.handoff_id
    }

    /// Sends the prompt's KV and waits until the receiver has verified it.
    ///
    /// # Errors
    /// The receiver's refusal, its death, or the end of its lease.
    pub async fn deliver(
        mut self,
        first_token: u32,
        lease: Arc<KvLease>,
        forward: TraceContext,
        trace: &mut Trace,
    ) -> Result<Receipt, Error> {
        let start = clock::now();
        let post = trace.open("kv.post", Kind::Producer, forward, start);
        // Hashing reads the same bytes as sending: side by side, each finds them in the cache of the other.
        let sealing = tokio::task::spawn_blocking(self.sealing(lease.clone()));
        self.outgoing.push(0, lease.blocks(), lease.clone()).await?;
        let mut seal =
            sealing.await.map_err(|error| Error::new(ErrorKind::Internal, format!("hashing failed: {error}")))?;
        seal.first_token = first_token;
        seal.sampler_position = seal.prompt_tokens + 1;
        seal.traceparent = post.to_string();
        seal.first_post_unix_ns = clock().unix_ns(start);
        trace.attr("tandem.kv.blocks", lease.blocks().len());
        trace.attr("tandem.kv.bytes", lease.blocks().len() * self.node.arena.block_bytes());
        trace.attr("tandem.kv.transport", self.node.transport.info().name);
        trace.close(clock::now());
        Ok(self.outgoing.seal(seal).await?)
    }

    fn sealing(&self, lease: Arc<KvLease>) -> impl FnOnce() -> Seal + Send + 'static {
        let (arena, ticket) = (self.node.arena.clone(), self.ticket.clone());
        let tokens = u32::try_from(self.request.prompt.len()).unwrap_or(u32::MAX);
        let hashes = self.request.hashes(self.node.engine.spec());
        move || seal_for(&arena, lease.blocks(), &ticket, tokens, hashes)
    }
}
