//! The gRPC service `Membership`: one stream per node feeds the table. The stream's end, for any reason, is the node's
//! death, and the node's death (silence, replacement) ends the stream, so that a node that wakes up registers anew.
//!
//! A node is in the table from the first message that it sends after it was accepted. Its registration alone may be the
//! word of one that has given up meanwhile: links and proxies that stood still deliver such when they go on. Requests
//! would be lost there, and a session that lives would be taken for the older one and ended.
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use http::uri::Authority;
use tandem_proto::{Error, ErrorKind, v1};
use tandem_telemetry::{Budget, clock};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Extensions, Request, Response, Status, Streaming};

use super::node_client::peer_role;
use super::now::transport_names;
use super::{Membership, Node, REPORT_INTERVAL, registration};
use crate::index::CacheChanges;

/// That wait for a node to read them: the acceptance or a wish for a snapshot, its end, and readings of the clock.
const REPLIES: usize = 4;
/// Lines a second of refused registrations: whoever reaches the port can have as many refused as it likes.
static LINES_LEFT: Budget = Budget::new(20);

type Reports = Streaming<v1::NodeReport>;
type Replies = mpsc::Sender<Result<v1::RouterReport, Status>>;
/// Takes spans that came outside of calls.
type Strays = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// The service. Spans that nodes send outside of their calls are no business of the table: they go to `spans`, packed.
#[derive(Clone)]
pub struct JoinService {
    membership: Membership,
    spans: Strays,
}

#[tonic::async_trait]
impl v1::membership_server::Membership for JoinService {
    type JoinStream = ReceiverStream<Result<v1::RouterReport, Status>>;

    async fn join(&self, request: Request<Reports>) -> Result<Response<Self::JoinStream>, Status> {
        let peer = request.remote_addr().map(|peer| peer.ip());
        let (_, caller, mut reports) = request.into_parts();
        let (info, endpoint) = self.membership.registration(&mut reports, &caller, peer).await?;
        let (replies, receiver) = mpsc::channel(REPLIES);
        // The channel is empty and has room.
        let _ = replies.try_send(Ok(self.membership.reply(info.incarnation)));
        tokio::spawn(self.clone().session(endpoint, info, reports, replies));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

impl JoinService {
    /// Fills this table.
    pub fn new(membership: Membership, spans: impl Fn(&[u8]) + Send + Sync + 'static) -> Self {
        Self { membership, spans: Arc::new(spans) }
    }

    /// An accepted node's stream, until it ends.
    async fn session(self, endpoint: Authority, info: v1::Register, mut reports: Reports, replies: Replies) {
        let first = timeout(self.membership.lease(), reports.message()).await;
        let Ok(Ok(Some(first))) = first else {
            tracing::debug!(node = info.node_id, "registered, and said no more");
            return;
        };
        let node = match self.membership.register_at(endpoint, info, clock::now()) {
            Ok(node) => node,
            Err(error) => {
                let _ = replies.try_send(Err(self.membership.refused(error)));
                return;
            }
        };
        let (role, transport) = (node.role.as_str(), transport_names(&node.info));
        let (incarnation, v1::Register { node_id, arithmetic, kv_order, .. }) = (node.incarnation(), &node.info);
        tracing::info!(node = node_id, role, transport, arithmetic, kv_order, %incarnation, "node joined");
        let Self { membership, spans } = self;
        Session { membership, node, spans, why: "its stream was cut" }.run(first, reports, replies).await;
    }
}

impl Membership {
    /// The first message of a stream, and where the node that sent it is dialled.
    async fn registration(
        &self,
        reports: &mut Reports,
        caller: &Extensions,
        peer: Option<IpAddr>,
    ) -> Result<(v1::Register, Authority), Status> {
        let refuse = |error| self.refused(error);
        let late = |what: &str| Error::new(ErrorKind::DeadlineExceeded, what);
        let first = timeout(self.lease(), reports.message()).await;
        let first = first.map_err(|_| refuse(late("no Register came within the lease")))?;
        let first = first.map_err(|status| refuse(status.into()))?;
        let Some(v1::node_report::Report::Register(info)) = first.and_then(|first| first.report) else {
            return Err(refuse(Error::new(ErrorKind::InvalidArgument, "the first message of Join is a Register")));
        };
        self.is_its_own(&info, caller)?;
        let admitted = timeout(self.lease(), self.admits(&info, peer)).await;
        let endpoint = admitted.map_err(|_| refuse(late("the name of its endpoint is not resolved")))?;
        Ok((info, endpoint.map_err(refuse)?))
    }

    /// Counts it, and says it where there are not too many.
    fn refused(&self, error: Error) -> Status {
        self.refusals.count(error.kind);
        if let Some(untold) = LINES_LEFT.take(clock::now()) {
            tracing::warn!(%error, untold, "refused a node");
        }
        error.into()
    }

    /// Whether it is who its certificate says that it is, where nodes have such.
    fn is_its_own(&self, info: &v1::Register, caller: &Extensions) -> Result<(), Status> {
        let role = registration::role(info).map_err(|error| self.refused(error))?;
        self.strangers.registers(caller, peer_role(role), &info.node_id)
    }

    fn reply(&self, accepted_incarnation: u64) -> v1::RouterReport {
        v1::RouterReport {
            accepted_incarnation,
            report_interval_ms: REPORT_INTERVAL.min(self.lease() / 3).as_millis() as u32,
            lease_ms: u32::try_from(self.lease().as_millis()).unwrap_or(u32::MAX),
            kv_snapshot: false,
            clock: None,
        }
    }
}

/// A registered node's stream. Dropping it removes the node.
struct Session {
    membership: Membership,
    node: Arc<Node>,
    spans: Strays,
    why: &'static str,
}

impl Session {
    /// Takes the `first` report and all others.
    async fn run(mut self, first: v1::NodeReport, mut reports: Reports, replies: Replies) {
        let mut taken = self.take(first, &replies);
        self.why = loop {
            if let Err(why) = taken {
                break why;
            }
            taken = tokio::select! {
                biased;
                why = self.node.died() => {
                    let gone = Error::new(ErrorKind::Aborted, format!("the router gave this node up: {why}"));
                    let _ = replies.try_send(Err(gone.into()));
                    return;
                }
                () = replies.closed() => Err("its stream was closed"),
                report = reports.message() => match report {
                    Ok(Some(report)) => self.take(report, &replies),
                    Ok(None) => Err("it left"),
                    Err(_) => Err("its stream was cut"),
                }
            };
        };
    }

    fn reply(&self) -> v1::RouterReport {
        self.membership.reply(self.node.info.incarnation)
    }

    /// What time it is here. A node that asks faster than it reads gets no answer: the next one is as good.
    fn tell_time(&self, probe: v1::ClockProbe, received: Instant, replies: &Replies) {
        if replies.capacity() < 2 {
            return;
        }
        let clock = v1::ClockReading {
            sent_unix_ns: probe.sent_unix_ns,
            received_unix_ns: clock().unix_ns(received),
            answered_unix_ns: clock().unix_ns(clock::now()),
        };
        let _ = replies.try_send(Ok(v1::RouterReport { clock: Some(clock), ..self.reply() }));
    }

    fn take(&self, report: v1::NodeReport, replies: &Replies) -> Result<(), &'static str> {
        use v1::node_report::Report;
        let session = self.node.session;
        match report.report {
            Some(Report::Load(load)) => self.membership.report(session, &load, clock::now()),
            Some(Report::ClockProbe(probe)) => self.tell_time(probe, clock::now(), replies),
            Some(Report::Draining(_)) => self.membership.draining(session, clock::now()),
            Some(Report::Register(_)) => {
                self.membership.refusals.count(ErrorKind::InvalidArgument);
                return Err("it registered twice on one stream");
            }
            Some(Report::KvEvents(events)) => {
                let changes = match CacheChanges::try_from(events) {
                    Ok(changes) => changes,
                    Err(error) => {
                        self.membership.refusals.count(error.kind);
                        let _ = replies.try_send(Err(error.into()));
                        return Err("it told of blocks by names that are none");
                    }
                };
                if let Err(gap) = self.membership.kv_events(session, &changes, clock::now()) {
                    tracing::warn!(node = self.node.info.node_id, %gap, "asking the node for a snapshot of its cache");
                    // The next gap comes behind a snapshot at the earliest: a node that read what was sent left room.
                    let asked = replies.try_send(Ok(v1::RouterReport { kv_snapshot: true, ..self.reply() }));
                    return asked.map_err(|_| "it does not read its stream");
                }
            }
            Some(Report::Spans(packed)) => (self.spans)(&packed),
            // A report of a later version.
            None => {}
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.membership.leave(self.node.session, self.why);
    }
}
