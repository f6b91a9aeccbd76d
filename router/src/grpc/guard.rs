//! What stands before `Inference`: whose call it is, and whether it has any chance, are asked of its headers alone;
//! then its message is read within bounds of time, and of memory for all calls together. A stranger's call costs no
//! more than its headers.
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody};
use prost::bytes::Bytes;
use tandem_proto::{Error, MAX_MESSAGE_BYTES};
use tandem_telemetry::clock;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::Service as _;

use super::Inference;
use crate::admission::Tenant;
use crate::api::Service;
use crate::caller::Credentials;
use crate::flow::refused::Refused;
use crate::intake::{FREE_BYTES, Intake, LARGE_BYTES, Reserved};

/// A call's message takes this long at most; one that has room in the [`Intake`], as long as that says.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// What stands before each message: a flag and its length.
const PREFIX_BYTES: usize = 5;
/// A decoded message is larger than its bytes: a token id of one byte becomes four, in a list that grows by doubling.
const DECODED: usize = 8;
/// Of a byte of deflate come so many bytes at most (<https://www.zlib.net/zlib_tech.html>).
const DEFLATED: usize = 1032;
/// Compressed messages from this size on are decoded beside the reactor, others from [`LARGE_BYTES`] on: what one may
/// unpack to is a thousand times what most do.
const LARGE_UNPACKED_BYTES: usize = 1 << 20;

/// `Inference` behind its guard.
#[derive(Clone)]
pub(super) struct Guarded {
    inner: Inference,
    service: Service,
}

/// The room of a call's message. Its handler and its body share it: the one that is done last gives it back.
#[derive(Clone, Debug, Default)]
pub(super) struct MessageRoom(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    reserved: Mutex<Reserved>,
    /// The handler has the message.
    is_read: AtomicBool,
}

impl MessageRoom {
    fn keep(&self, reserved: Reserved) {
        *self.0.reserved.lock().unwrap_or_else(PoisonError::into_inner) = reserved;
    }

    /// The handler has the message: what is wrong with it from here on, the handler counts.
    pub fn read(&self) {
        self.0.is_read.store(true, Ordering::Relaxed);
    }
}

impl Guarded {
    pub fn new(inner: Inference, service: Service) -> Self {
        Self { inner, service }
    }

    fn tenant(&self, request: &http::Request<Body>) -> Result<Tenant, Error> {
        let name = request.headers().get("x-tandem-tenant").and_then(|value| value.to_str().ok());
        let tenant = self.service.tenant(Credentials::of(request.headers(), request.extensions()), name)?;
        self.service.may_enter(&tenant)?;
        Ok(tenant)
    }
}

impl NamedService for Guarded {
    const NAME: &'static str = Inference::NAME;
}

impl tower::Service<http::Request<Body>> for Guarded {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        tower::Service::<http::Request<Body>>::poll_ready(&mut self.inner, context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let tenant = match self.tenant(&request) {
            Ok(tenant) => tenant,
            Err(error) => {
                self.service.refused(error.kind);
                let (headers, received) = (request.headers(), clock::now());
                let (request_id, parent) = (super::request_id(headers), super::parent(headers));
                let (root, parent) = (self.service.root(parent.as_ref()), parent.as_ref());
                let (api, tenant) = (super::API, None);
                let refused = Refused { api, request_id: &request_id, tenant, root, parent, received };
                let status = super::turned_away(&self.service, &refused, error);
                return Box::pin(std::future::ready(Ok(status.into_http())));
            }
        };
        let room = MessageRoom::default();
        request.extensions_mut().insert(tenant);
        request.extensions_mut().insert(room.clone());
        let (service, known) = (self.service.clone(), room.clone());
        let (intake, elsewhere) = (self.service.intake().clone(), self.service.intake().clone());
        let (head, body) = request.into_parts();
        let packing = Packing::of(&head.headers);
        let mut frames = Box::pin(bounded(body, packing, intake, room));
        let mut inner = self.inner.clone();
        let answer = async move {
            // The first frames say how long the message is.
            let mut first = Vec::new();
            let prefix = loop {
                match announced(&first) {
                    None if first.len() < PREFIX_BYTES => {}
                    prefix => break prefix,
                }
                let Some(frame) = frames.next().await else { break None };
                first.push(frame);
            };
            // What is longer than a message may be is refused by its prefix: nothing more of it is read.
            let here = |prefix: Prefix| prefix.bytes > MAX_MESSAGE_BYTES || !prefix.is_large(packing);
            if prefix.is_none_or(here) {
                let all = futures::stream::iter(first).chain(frames);
                return inner.call(http::Request::from_parts(head, Body::new(StreamBody::new(all)))).await;
            }
            while let Some(frame) = frames.next().await {
                first.push(frame);
            }
            decode_elsewhere(inner, &elsewhere, http::Request::from_parts(head, first)).await
        };
        Box::pin(async move {
            let response = answer.await?;
            // What is no message comes to no handler.
            let unread =
                Status::from_header_map(response.headers()).filter(|_| !known.0.is_read.load(Ordering::Relaxed));
            if let Some(status) = unread {
                service.refused(Error::from(status).kind);
            }
            Ok(response)
        })
    }
}

/// Serves a large message, all of whose frames are here, on a thread of its own: the reactor is not held up while its
/// ids become a list, and when that thread ends, the memory that the list took goes back to the system. The room of
/// these messages bounds the threads.
async fn decode_elsewhere(
    mut inner: Inference,
    intake: &Intake,
    request: http::Request<Vec<Result<Frame<Bytes>, Status>>>,
) -> Result<http::Response<Body>, Infallible> {
    let runtime = tokio::runtime::Handle::current();
    let serve = move || {
        let request = request.map(|frames| Body::new(StreamBody::new(futures::stream::iter(frames))));
        runtime.block_on(inner.call(request))
    };
    let served = intake.behind(serve).await;
    served.unwrap_or_else(|_| Ok(Status::internal("the message could not be read").into_http()))
}

/// The frames of one message, and nothing behind it: a second one would be read without room. Its length stands at its
/// beginning; for a long one, room is asked before more of it is read, and HTTP/2's flow control holds the client back
/// meanwhile.
fn bounded(
    mut body: Body,
    packing: Packing,
    intake: Intake,
    room: MessageRoom,
) -> impl Stream<Item = Result<Frame<Bytes>, Status>> + Send {
    let mut deadline = Instant::now() + READ_LIMIT;
    async_stream::try_stream! {
        let (mut start, mut arrived) = (Vec::with_capacity(PREFIX_BYTES), 0_usize);
        while !body.is_end_stream() {
            let slow = |_| Status::deadline_exceeded("the message did not arrive in time");
            let Some(frame) = timeout_at(deadline, body.frame()).await.map_err(slow)? else { break };
            let frame = frame?;
            arrived = arrived.saturating_add(frame.data_ref().map_or(0, Bytes::len));
            if let Some(data) = frame.data_ref().filter(|_| start.len() < PREFIX_BYTES) {
                start.extend(data.iter().take(PREFIX_BYTES - start.len()));
                // What is longer than a message may be, tonic refuses by the same prefix.
                let prefix = Prefix::read(&start).filter(|prefix| prefix.bytes <= MAX_MESSAGE_BYTES);
                if let Some(bytes) = prefix.map(|prefix| prefix.unpacked(packing)).filter(|bytes| *bytes >= FREE_BYTES) {
                    room.keep(intake.reserve_for(bytes, bytes * DECODED).await.map_err(Status::from)?);
                    deadline = Instant::now() + Intake::arrives_within(bytes);
                }
            }
            if Prefix::read(&start).is_some_and(|prefix| arrived > prefix.bytes.saturating_add(PREFIX_BYTES)) {
                Err(Status::invalid_argument("a call of Generate has one message"))?;
            }
            yield frame;
        }
    }
}

/// What stands before the message, once the frames that say it are here.
fn announced(frames: &[Result<Frame<Bytes>, Status>]) -> Option<Prefix> {
    let data = frames.iter().flatten().filter_map(Frame::data_ref);
    Prefix::read(&data.flatten().take(PREFIX_BYTES).copied().collect::<Vec<u8>>())
}

/// How a call's message is compressed, if it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    Gzip,
    /// One that has no bound: of a few bytes may come a message of the largest size.
    Other,
}

impl Packing {
    fn of(headers: &http::HeaderMap) -> Self {
        let gzip = headers.get("grpc-encoding").is_some_and(|encoding| encoding == "gzip");
        if gzip { Self::Gzip } else { Self::Other }
    }
}

/// What stands before each message.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    compressed: bool,
    /// As they come, compressed or not.
    bytes: usize,
}

impl Prefix {
    fn read(start: &[u8]) -> Option<Self> {
        let bytes: [u8; 4] = start.get(1..PREFIX_BYTES)?.try_into().ok()?;
        Some(Self { compressed: start[0] != 0, bytes: usize::try_from(u32::from_be_bytes(bytes)).ok()? })
    }

    /// The message's bytes once it is unpacked, at most. tonic stops unpacking at the largest size.
    fn unpacked(self, packing: Packing) -> usize {
        match (self.compressed, packing) {
            (false, _) => self.bytes,
            (true, Packing::Gzip) => self.bytes.saturating_mul(DEFLATED).min(MAX_MESSAGE_BYTES),
            (true, Packing::Other) => MAX_MESSAGE_BYTES,
        }
    }

    /// Whether decoding it takes too long for the reactor.
    fn is_large(self, packing: Packing) -> bool {
        self.unpacked(packing) >= if self.compressed { LARGE_UNPACKED_BYTES } else { LARGE_BYTES }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use tandem_proto::v1;
    use tonic::Code;

    use super::*;
    use crate::admission::keys::Keys;
    use crate::flow::tests::fakes;
    use crate::limits::Limits;

    const METHOD: &str = "/tandem.v1.Inference/Generate";

    fn guarded(service: &Service) -> Guarded {
        Guarded::new(super::super::inference(service), service.clone())
    }

    /// A body that says whether anybody read it, and never ends.
    fn silent(read: Arc<Mutex<bool>>) -> Body {
        let frames = futures::stream::poll_fn(move |_| {
            *read.lock().unwrap() = true;
            Poll::<Option<Result<Frame<Bytes>, Status>>>::Pending
        });
        Body::new(StreamBody::new(frames))
    }

    fn request(body: Body, headers: &[(&'static str, &str)]) -> http::Request<Body> {
        let mut request = http::Request::post(METHOD).header("content-type", "application/grpc").body(body).unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        request
    }

    fn code(response: &http::Response<Body>) -> Option<Code> {
        Status::from_header_map(response.headers()).map(|status| status.code())
    }

    #[tokio::test]
    async fn a_stranger_s_message_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        std::fs::write(&path, r#"{"keys": [{"name": "alice", "key": "sk-alice-0123456789abcdef"}]}"#).unwrap();
        let keys = Keys::load(&path, std::time::Instant::now()).unwrap();
        let service = fakes::router_with_keys(Limits::default(), keys);
        for headers in [&[][..], &[("authorization", "Bearer wrong-key-1")]] {
            let read = Arc::new(Mutex::new(false));
            let response = guarded(&service).call(request(silent(Arc::clone(&read)), headers)).await.unwrap();
            assert_eq!(code(&response), Some(Code::Unauthenticated));
            assert!(response.headers().contains_key("x-request-id"));
            assert!(!*read.lock().unwrap(), "nothing of it was read");
        }
        assert!(service.metrics_text(None).1.contains("outcome=\"unauthenticated\"} 2"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_never_ends_is_given_up() {
        let service = fakes::router(Limits::default());
        let call = guarded(&service).call(request(silent(Arc::default()), &[]));
        let response = tokio::time::timeout(2 * READ_LIMIT, call).await.expect("an answer").unwrap();
        assert_eq!(code(&response), Some(Code::DeadlineExceeded));
    }

    #[tokio::test]
    async fn nothing_is_read_behind_the_message() {
        let service = fakes::router(Limits::default());
        // An empty message, and the beginning of a large one.
        let prefixes = [0, 0, 0, 0, 0, 0, 0, 128, 0, 0];
        let frames = futures::stream::iter([Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(&prefixes)))]);
        let body = Body::new(StreamBody::new(frames.chain(futures::stream::pending())));
        let response = guarded(&service).call(request(body, &[])).await.unwrap();
        assert_eq!(code(&response), Some(Code::InvalidArgument));
    }

    #[tokio::test(start_paused = true)]
    async fn long_messages_wait_for_room_and_are_refused_without() {
        let service = fakes::router(Limits::default());
        let all = service.intake().reserve(crate::intake::BUDGET_BYTES).await.unwrap();
        let announces = |bytes: u32| {
            let prefix: Vec<u8> = [&[0][..], &bytes.to_be_bytes()].concat();
            let frames = futures::stream::iter([Ok::<_, Status>(Frame::data(Bytes::from(prefix)))]);
            Body::new(StreamBody::new(frames.chain(futures::stream::pending())))
        };
        let call = guarded(&service).call(request(announces(1 << 20), &[]));
        assert_eq!(code(&call.await.unwrap()), Some(Code::ResourceExhausted));
        drop(all);
        let held = tokio::spawn(guarded(&service).call(request(announces(1 << 20), &[])));
        while service.intake().load().body_bytes == 0 {
            tokio::task::yield_now().await;
        }
        held.abort();
        let _ = held.await;
        assert_eq!(service.intake().load().body_bytes, 0, "a call that is gone leaves its room");
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_is_too_long_is_refused_by_its_length() {
        let service = fakes::router(Limits::default());
        let prefix = Ok::<_, Status>(Frame::data(Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff])));
        let body = Body::new(StreamBody::new(futures::stream::iter([prefix]).chain(futures::stream::pending())));
        let call = guarded(&service).call(request(body, &[]));
        let response = tokio::time::timeout(Duration::from_secs(1), call).await.expect("at once").unwrap();
        assert_eq!(code(&response), Some(Code::OutOfRange));
    }

    fn gzipped(message: &[u8]) -> http::Request<Body> {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut packer, message).unwrap();
        let packed = packer.finish().unwrap();
        let bytes = [&[1][..], &u32::try_from(packed.len()).unwrap().to_be_bytes(), &packed].concat();
        let frames = futures::stream::iter([Ok::<_, Status>(Frame::data(Bytes::from(bytes)))]);
        request(Body::new(StreamBody::new(frames)), &[("grpc-encoding", "gzip")])
    }

    #[tokio::test]
    async fn compressed_messages_are_read_as_far_as_a_message_may_go() {
        let service = fakes::router(Limits::default());
        let input = v1::generate_request::Input::TokenIds(v1::TokenIds::default());
        let prompt = v1::GenerateRequest { input: Some(input), ..Default::default() };
        let answered = guarded(&service).call(gzipped(&prompt.encode_to_vec())).await.unwrap();
        let status = Status::from_header_map(answered.headers()).expect("refused");
        assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "the prompt is empty"));
        let bomb = guarded(&service).call(gzipped(&vec![0; 8 * MAX_MESSAGE_BYTES])).await.unwrap();
        assert_eq!(code(&bomb), Some(Code::ResourceExhausted));
        let counted = service.metrics_text(None).1;
        for outcome in ["invalid_argument", "overloaded"] {
            assert!(counted.contains(&format!("outcome=\"{outcome}\"}} 1")), "{outcome} in {counted}");
        }
    }

    #[test]
    fn room_is_asked_for_what_a_message_may_become() {
        let unpacked = |start: &[u8], packing| Prefix::read(start).unwrap().unpacked(packing);
        assert_eq!(unpacked(&[0, 0, 0, 1, 0], Packing::Gzip), 256);
        assert_eq!(unpacked(&[1, 0, 0, 1, 0], Packing::Gzip), 256 * DEFLATED);
        assert_eq!(unpacked(&[1, 0, 255, 0, 0], Packing::Gzip), MAX_MESSAGE_BYTES);
        assert_eq!(unpacked(&[1, 0, 0, 0, 9], Packing::Other), MAX_MESSAGE_BYTES);
        assert!(Prefix::read(&[0, 0, 0, 0]).is_none());
    }

    #[test]
    fn a_quarter_of_a_million_ids_are_not_the_reactors() {
        let large = |start: &[u8], packing| Prefix::read(start).unwrap().is_large(packing);
        assert!(large(&[0, 0, 4, 0, 0], Packing::Other) && !large(&[0, 0, 3, 255, 255], Packing::Other));
        // Packed, a kilobyte is what most prompts are.
        assert!(large(&[1, 0, 0, 4, 0], Packing::Gzip) && !large(&[1, 0, 0, 3, 0], Packing::Gzip));
        assert!(large(&[1, 0, 0, 0, 9], Packing::Other));
    }
}
