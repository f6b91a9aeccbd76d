//! The protocol of an attempt: which events its two legs may send, and in which order. Pure: an event in, the next step
//! out; an event out of order is a node's bug and ends the attempt. The calls themselves are in [`super::legs`].
//!
//! Decode may be replaced while prefill goes on with its work ([`AttemptProtocol::decode_lost`]). Events of the
//! hand-off to the old one are then told apart by the hand-off's id, the one thing that the router reads in a ticket.
use prost::Message;
use tandem_proto::v1::{self, FinishReason, decode_event, prefill_event};
use tandem_proto::{Error, ErrorKind};

use crate::record::drafts::Drafts;
use crate::select::Plan;
use crate::traces::append_pack;

/// What to do after an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing.
    Wait,
    /// Send this ticket to the prefill node.
    Deliver(Vec<u8>),
    /// Decode has all KV and has checked it.
    Verified,
    /// Send this token to the client; the answer ends with it when `finished` is set.
    Token {
        /// Token id.
        id: u32,
        /// Natural logarithm of its probability.
        logprob: f32,
        /// The likeliest tokens in its place.
        top: Vec<v1::TokenLogprob>,
        /// Set when prefill's token is the whole answer.
        finished: Option<FinishReason>,
    },
    /// The answer is complete.
    Finished(FinishReason),
    /// Prefill could not hand over, and keeps the KV for another ticket.
    Undelivered(Error),
    /// Prefill keeps KV for another ticket that nobody needs: decode has verified what prefill takes for lost.
    LetGo,
    /// Prefill is done, with a hand-off that is of no use any more.
    Spent,
}

/// The state of one attempt as the router sees it: of its hand-off, unless the plan is local.
#[derive(Debug)]
pub struct AttemptProtocol {
    plan: Plan,
    /// Tokens that may be generated.
    max_tokens: u32,
    tokens: u32,
    /// The first token is there.
    first: bool,
    /// The first token is the whole answer.
    whole: bool,
    /// The hand-off that decode waits for; empty where its ticket does not say.
    handoff: Option<Vec<u8>>,
    /// Blocks of the prompt that decode held when it reserved: they do not travel.
    pub held_blocks: u32,
    /// Prompt tokens that did not have to be computed.
    pub cached_tokens: u32,
    /// What decode said when it had checked the KV.
    pub verified: Option<v1::Verified>,
    /// What prefill said when decode had acknowledged.
    pub delivered: Option<v1::Delivered>,
    /// Guesses that decode verified since this was last taken.
    pub drafts: Drafts,
    /// The nodes' spans, packed.
    pub spans: Vec<u8>,
}

impl AttemptProtocol {
    /// Nothing was said.
    pub fn new(plan: Plan, max_tokens: u32) -> Self {
        Self {
            plan,
            max_tokens,
            tokens: 0,
            first: false,
            whole: false,
            handoff: None,
            held_blocks: 0,
            cached_tokens: 0,
            verified: None,
            delivered: None,
            drafts: Drafts::default(),
            spans: Vec::new(),
        }
    }

    /// Whether decode's next event may be taken: its tokens wait until prefill's first one is out.
    pub fn takes_decode(&self) -> bool {
        self.plan == Plan::Local || self.verified.is_none() || self.first
    }

    /// Whether the prefill node can hand off: it has decode's ticket.
    pub fn hands_off(&self) -> bool {
        self.handoff.is_some()
    }

    /// Whether the prefill node has still something to do for this request. Its acknowledged delivery and decode's
    /// verification travel on two connections: whichever arrives first ends its part.
    pub fn needs_prefill(&self) -> bool {
        let done = self.first && (self.verified.is_some() || self.delivered.is_some());
        self.plan == Plan::Pair && !done
    }

    /// Whether the next word is the prefill node's: not where its prompt is computed and decode has given no ticket
    /// yet.
    pub fn waits_for_prefill(&self) -> bool {
        self.needs_prefill() && (!self.first || self.hands_off())
    }

    /// Decode failed before it had verified the KV: another one will reserve.
    pub fn decode_lost(&mut self) {
        self.handoff = None;
    }

    /// Takes an event of the prefill node.
    ///
    /// # Errors
    /// `Internal` for one that is out of order.
    pub fn on_prefill(&mut self, event: v1::PrefillEvent) -> Result<Step, Error> {
        match event.event {
            Some(prefill_event::Event::FirstToken(first)) => {
                let finished = first.finished.map(|_| reason(first.finished()));
                self.whole = finished.is_some();
                self.first(first, finished)
            }
            Some(prefill_event::Event::Delivered(_)) if !self.first => {
                Err(disorder("the end of the delivery before the first token"))
            }
            Some(prefill_event::Event::Delivered(mut delivered)) => {
                append_pack(&mut self.spans, std::mem::take(&mut delivered.spans));
                if !self.whole && !self.is_current(&delivered.handoff_id) {
                    return Ok(Step::Spent);
                }
                self.delivered = Some(delivered);
                Ok(Step::Wait)
            }
            Some(prefill_event::Event::Undelivered(_)) if self.verified.is_some() => Ok(Step::LetGo),
            Some(prefill_event::Event::Undelivered(undelivered)) if !self.is_current(&undelivered.handoff_id) => {
                Ok(Step::Wait)
            }
            Some(prefill_event::Event::Undelivered(undelivered)) => {
                Ok(Step::Undelivered(tonic::Status::new(undelivered.code.into(), undelivered.message).into()))
            }
            None => Ok(Step::Wait),
        }
    }

    /// Takes an event of the decode node.
    ///
    /// # Errors
    /// `Internal` for one that is out of order.
    pub fn on_decode(&mut self, event: v1::DecodeEvent) -> Result<Step, Error> {
        let Some(event) = event.event else { return Ok(Step::Wait) };
        match self.plan {
            Plan::Pair => self.on_handed_over(event),
            Plan::Local => self.on_local(event),
        }
    }

    fn on_handed_over(&mut self, event: decode_event::Event) -> Result<Step, Error> {
        match event {
            decode_event::Event::Reserved(_) if self.handoff.is_some() => Err(disorder("a second reservation")),
            decode_event::Event::Reserved(reserved) => {
                let ticket = v1::Ticket::decode(reserved.ticket.as_slice());
                self.handoff = Some(ticket.map(|ticket| ticket.handoff_id).unwrap_or_default());
                self.held_blocks = reserved.held_blocks;
                Ok(Step::Deliver(reserved.ticket))
            }
            decode_event::Event::Verified(_) if self.handoff.is_none() || self.verified.is_some() => {
                Err(disorder("a verification out of order"))
            }
            decode_event::Event::Verified(verified) => {
                self.verified = Some(verified);
                Ok(Step::Verified)
            }
            decode_event::Event::FirstToken(_) => Err(disorder("a first token, which is prefill's to send")),
            _ if self.verified.is_none() => Err(disorder("output before it had verified the KV")),
            decode_event::Event::Token(token) => self.token(token, None),
            decode_event::Event::Finished(finished) => Ok(self.finished(finished)),
        }
    }

    fn on_local(&mut self, event: decode_event::Event) -> Result<Step, Error> {
        match event {
            decode_event::Event::Reserved(_) | decode_event::Event::Verified(_) => {
                Err(disorder("word of a hand-off, which a local request has not"))
            }
            decode_event::Event::FirstToken(first) => self.first(first, None),
            _ if !self.first => Err(disorder("output before the first token")),
            decode_event::Event::Token(token) => self.token(token, None),
            decode_event::Event::Finished(finished) => Ok(self.finished(finished)),
        }
    }

    fn first(&mut self, first: v1::FirstToken, finished: Option<FinishReason>) -> Result<Step, Error> {
        if std::mem::replace(&mut self.first, true) {
            return Err(disorder("a second first token"));
        }
        let v1::FirstToken { token_id, logprob, top_logprobs, cached_tokens, .. } = first;
        self.cached_tokens = cached_tokens;
        self.token(v1::Token { token_id, logprob, top_logprobs, ..v1::Token::default() }, finished)
    }

    fn finished(&mut self, finished: v1::Finished) -> Step {
        let end = reason(finished.reason());
        append_pack(&mut self.spans, finished.spans);
        Step::Finished(end)
    }

    /// Whether prefill speaks of the hand-off that decode waits for. A node that does not say which one has had but
    /// one.
    fn is_current(&self, told: &[u8]) -> bool {
        self.handoff.as_ref().is_some_and(|handoff| told.is_empty() || handoff.is_empty() || told == handoff)
    }

    fn token(&mut self, token: v1::Token, finished: Option<FinishReason>) -> Result<Step, Error> {
        self.tokens += 1;
        self.drafts.add(Drafts { drafted: token.drafted_tokens, accepted: token.accepted_tokens });
        if self.tokens > self.max_tokens {
            return Err(disorder("more tokens than were asked for"));
        }
        Ok(Step::Token { id: token.token_id, logprob: token.logprob, top: token.top_logprobs, finished })
    }
}

fn reason(told: FinishReason) -> FinishReason {
    if told == FinishReason::Unspecified { FinishReason::Stop } else { told }
}

fn disorder(what: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("it sent {what}"))
}

#[cfg(test)]
pub(super) mod tests {
    use prost::Message;
    use tandem_proto::spans::unpack;

    use super::*;

    pub fn first_token(token_id: u32, finished: Option<FinishReason>) -> v1::PrefillEvent {
        let finished = finished.map(Into::into);
        let event = prefill_event::Event::FirstToken(v1::FirstToken {
            token_id,
            logprob: -0.5,
            finished,
            top_logprobs: Vec::new(),
            cached_tokens: 0,
        });
        v1::PrefillEvent { event: Some(event) }
    }

    pub fn delivered(spans: Vec<v1::Span>) -> v1::PrefillEvent {
        delivered_to("d0", spans)
    }

    pub fn delivered_to(node: &str, spans: Vec<v1::Span>) -> v1::PrefillEvent {
        let handoff_id = node.as_bytes().to_vec();
        let delivered = v1::Delivered {
            bytes: 4096,
            blocks: 2,
            descriptors: 1,
            transfer_ms: 1.5,
            spans: v1::Spans { spans }.encode_to_vec(),
            handoff_id,
            ..v1::Delivered::default()
        };
        v1::PrefillEvent { event: Some(prefill_event::Event::Delivered(delivered)) }
    }

    pub fn undelivered(node: &str, kind: ErrorKind) -> v1::PrefillEvent {
        let status = tonic::Status::from(Error::new(kind, "it went away"));
        let (code, message) = (status.code().into(), status.message().to_owned());
        let undelivered = v1::Undelivered { handoff_id: node.as_bytes().to_vec(), code, message };
        v1::PrefillEvent { event: Some(prefill_event::Event::Undelivered(undelivered)) }
    }

    /// What `node` grants; its name is the hand-off's id.
    pub fn ticket(node: &str) -> Vec<u8> {
        v1::Ticket { handoff_id: node.as_bytes().to_vec(), ..v1::Ticket::default() }.encode_to_vec()
    }

    pub fn decode(event: decode_event::Event) -> v1::DecodeEvent {
        v1::DecodeEvent { event: Some(event) }
    }

    pub fn reserved() -> v1::DecodeEvent {
        reserved_by("d0")
    }

    pub fn reserved_by(node: &str) -> v1::DecodeEvent {
        decode(decode_event::Event::Reserved(v1::Reserved { ticket: ticket(node), blocks: 2, held_blocks: 0 }))
    }

    pub fn verified() -> v1::DecodeEvent {
        let transport = "mem".to_owned();
        let span_id = vec![8; 8];
        let verified = v1::Verified {
            bytes: 4096,
            blocks: 2,
            transfer_ms: 2.0,
            verify_ms: 0.1,
            transport,
            span_id,
            held_blocks: 0,
            copying_ms: 1.0,
            descriptors: 3,
        };
        decode(decode_event::Event::Verified(verified))
    }

    pub fn token(token_id: u32) -> v1::DecodeEvent {
        decode(decode_event::Event::Token(v1::Token { token_id, logprob: -0.1, ..v1::Token::default() }))
    }

    pub fn finished(reason: FinishReason, spans: Vec<v1::Span>) -> v1::DecodeEvent {
        decode(decode_event::Event::Finished(v1::Finished {
            reason: reason.into(),
            spans: v1::Spans { spans }.encode_to_vec(),
        }))
    }

    pub fn local_first(token_id: u32, cached_tokens: u32) -> v1::DecodeEvent {
        let first = v1::FirstToken { token_id, cached_tokens, ..v1::FirstToken::default() };
        decode(decode_event::Event::FirstToken(first))
    }

    #[test]
    fn the_order_of_a_good_hand_off() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
        assert_eq!(protocol.on_decode(reserved()).unwrap(), Step::Deliver(ticket("d0")));
        assert_eq!(
            protocol.on_prefill(first_token(7, None)).unwrap(),
            Step::Token { id: 7, logprob: -0.5, top: Vec::new(), finished: None }
        );
        assert!(protocol.needs_prefill());
        assert_eq!(protocol.on_decode(verified()).unwrap(), Step::Verified);
        assert!(!protocol.needs_prefill());
        assert!(matches!(protocol.on_decode(token(8)).unwrap(), Step::Token { id: 8, .. }));
        assert_eq!(protocol.on_prefill(delivered(vec![])).unwrap(), Step::Wait);
        let end = protocol.on_decode(finished(FinishReason::Length, vec![])).unwrap();
        assert_eq!(end, Step::Finished(FinishReason::Length));
    }

    #[test]
    fn decode_waits_for_the_first_token() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
        protocol.on_decode(reserved()).unwrap();
        protocol.on_decode(verified()).unwrap();
        assert!(!protocol.takes_decode());
        protocol.on_prefill(first_token(7, None)).unwrap();
        assert!(protocol.takes_decode());
    }

    #[test]
    fn unverified_output_is_never_taken() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
        protocol.on_decode(reserved()).unwrap();
        assert_eq!(protocol.on_decode(token(8)).unwrap_err().kind, ErrorKind::Internal);
        assert!(protocol.on_decode(finished(FinishReason::Stop, vec![])).is_err());
    }

    #[test]
    fn another_decode_takes_over_what_prefill_has() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
        protocol.on_decode(reserved()).unwrap();
        protocol.on_prefill(first_token(7, None)).unwrap();
        let step = protocol.on_prefill(undelivered("d0", ErrorKind::Unavailable)).unwrap();
        assert!(matches!(step, Step::Undelivered(error) if error.kind == ErrorKind::Unavailable));
        protocol.decode_lost();
        assert!(protocol.needs_prefill() && !protocol.hands_off());
        // The same news from the other side.
        assert_eq!(protocol.on_prefill(undelivered("d0", ErrorKind::Corrupt)).unwrap(), Step::Wait);
        assert_eq!(protocol.on_decode(reserved_by("d1")).unwrap(), Step::Deliver(ticket("d1")));
        assert_eq!(protocol.on_prefill(undelivered("d0", ErrorKind::Corrupt)).unwrap(), Step::Wait);
        assert_eq!(protocol.on_decode(verified()).unwrap(), Step::Verified);
        assert_eq!(protocol.on_prefill(delivered_to("d1", vec![])).unwrap(), Step::Wait);
        assert!(matches!(protocol.on_decode(token(8)).unwrap(), Step::Token { id: 8, .. }));
    }

    #[test]
    fn what_decode_has_verified_is_not_undelivered() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
        protocol.on_decode(reserved()).unwrap();
        protocol.on_prefill(first_token(7, None)).unwrap();
        protocol.on_decode(verified()).unwrap();
        // The acknowledgement was lost on its way.
        assert_eq!(protocol.on_prefill(undelivered("d0", ErrorKind::Unavailable)).unwrap(), Step::LetGo);
        assert_eq!(protocol.on_prefill(delivered(vec![])).unwrap(), Step::Wait);
    }

    #[test]
    fn a_delivery_to_a_decode_that_is_gone_leaves_nothing_to_deliver() {
        for reserved_again in [false, true] {
            let mut protocol = AttemptProtocol::new(Plan::Pair, 3);
            protocol.on_decode(reserved()).unwrap();
            protocol.on_prefill(first_token(7, None)).unwrap();
            protocol.decode_lost();
            if reserved_again {
                protocol.on_decode(reserved_by("d1")).unwrap();
            }
            assert_eq!(protocol.on_prefill(delivered_to("d0", vec![v1::Span::default()])).unwrap(), Step::Spent);
            assert!(protocol.needs_prefill());
            assert_eq!(unpack(&protocol.spans).count(), 1);
        }
    }

    #[test]
    fn repeated_and_surplus_events_are_errors() {
        let mut protocol = AttemptProtocol::new(Plan::Pair, 1);
        assert!(protocol.on_decode(verified()).is_err());
        protocol.on_decode(reserved()).unwrap();
        assert!(protocol.on_decode(reserved()).is_err());
        assert!(protocol.on_prefill(delivered(vec![])).is_err());
        protocol.on_prefill(first_token(7, None)).unwrap();
        assert!(protocol.on_prefill(first_token(7, None)).is_err());
        protocol.on_decode(verified()).unwrap();
        assert!(protocol.on_decode(token(8)).is_err());
    }

    #[test]
    fn a_local_answer_is_decodes_alone() {
        let mut protocol = AttemptProtocol::new(Plan::Local, 3);
        assert!(protocol.takes_decode() && !protocol.needs_prefill());
        assert!(matches!(protocol.on_decode(local_first(7, 16)).unwrap(), Step::Token { id: 7, finished: None, .. }));
        assert_eq!(protocol.cached_tokens, 16);
        assert!(matches!(protocol.on_decode(token(8)).unwrap(), Step::Token { id: 8, .. }));
        let end = protocol.on_decode(finished(FinishReason::Stop, vec![v1::Span::default()])).unwrap();
        assert_eq!((end, unpack(&protocol.spans).count()), (Step::Finished(FinishReason::Stop), 1));
    }

    #[test]
    fn the_two_kinds_of_answer_do_not_mix() {
        for wrong in [reserved(), verified(), token(8), finished(FinishReason::Stop, vec![])] {
            let mut local = AttemptProtocol::new(Plan::Local, 3);
            assert_eq!(local.on_decode(wrong).unwrap_err().kind, ErrorKind::Internal);
        }
        let mut local = AttemptProtocol::new(Plan::Local, 2);
        local.on_decode(local_first(7, 0)).unwrap();
        assert!(local.on_decode(local_first(7, 0)).is_err());
        local.on_decode(token(8)).unwrap();
        assert!(local.on_decode(token(9)).is_err(), "more than were asked for");
        let mut pair = AttemptProtocol::new(Plan::Pair, 3);
        pair.on_decode(reserved()).unwrap();
        pair.on_decode(verified()).unwrap();
        assert!(pair.on_decode(local_first(7, 0)).is_err());
    }
}
