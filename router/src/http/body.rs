//! Reads a request body within its bounds of size and time.
use std::ops::Deref;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody};
use futures::StreamExt;
use tandem_proto::{Error, ErrorKind};
use tokio::time::{Instant, timeout, timeout_at};

use super::MAX_BODY_BYTES;
use super::error::ApiError;
use crate::intake::{FREE_BYTES, Intake, Reserved};

/// A body takes this long at most; one that has room in the [`Intake`], as long as that says.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// What is read and thrown away of a body that is too large, so that a client that sends first and reads later finds
/// the error instead of a reset connection.
const DISCARD_BYTES: usize = 256 << 20;
const DISCARD_LIMIT: Duration = Duration::from_secs(10);

/// A request's body. It holds its room in the [`Intake`] for as long as it lives.
#[derive(Debug)]
pub(super) struct Text {
    text: String,
    _room: Reserved,
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

/// The whole body as text.
///
/// # Errors
/// Too large, too slow, cut off, not UTF-8, or too many others at the same time.
pub(super) async fn read(intake: &Intake, body: Body) -> Result<Text, ApiError> {
    let (bytes, _room) = timeout(READ_LIMIT, collect(intake, body)).await.map_err(|_| ApiError::body_too_slow())??;
    let invalid = |_| Error::new(ErrorKind::InvalidArgument, "the request body is not valid UTF-8");
    Ok(Text { text: String::from_utf8(bytes).map_err(invalid)?, _room })
}

async fn collect(intake: &Intake, body: Body) -> Result<(Vec<u8>, Reserved), ApiError> {
    // What the head announces; a body that comes in chunks may be as large as any.
    let announced =
        body.size_hint().exact().map_or(MAX_BODY_BYTES, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let mut pieces = body.into_data_stream();
    if announced > MAX_BODY_BYTES {
        return Err(too_large(&mut pieces).await);
    }
    let mut room = if announced < MAX_BODY_BYTES { Some(intake.reserve(announced).await?) } else { None };
    let within = if announced <= FREE_BYTES { READ_LIMIT } else { Intake::arrives_within(announced) };
    let deadline = Instant::now() + within;
    let mut bytes = Vec::with_capacity(if room.is_some() { announced } else { 0 });
    while let Some(piece) = timeout_at(deadline, pieces.next()).await.map_err(|_| ApiError::body_too_slow())? {
        let cut_off = |error| Error::new(ErrorKind::InvalidArgument, format!("the request body broke off: {error}"));
        let piece = piece.map_err(cut_off)?;
        if bytes.len() + piece.len() > MAX_BODY_BYTES {
            drop((bytes, room));
            return Err(too_large(&mut pieces).await);
        }
        if room.is_none() && bytes.len() + piece.len() > FREE_BYTES {
            room = Some(intake.reserve(MAX_BODY_BYTES).await?);
        }
        intake.pace(bytes.len(), piece.len()).await;
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes, room.unwrap_or_default()))
}

/// Reads on for a while without keeping anything, so that the client hears the error.
async fn too_large(pieces: &mut BodyDataStream) -> ApiError {
    let discard = async {
        let mut left = DISCARD_BYTES;
        while let Some(Ok(piece)) = pieces.next().await
            && piece.len() <= left
        {
            left -= piece.len();
        }
    };
    // Out of time or data: either way the error is the answer.
    let _ = timeout(DISCARD_LIMIT, discard).await;
    ApiError::body_too_large(MAX_BODY_BYTES)
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;
    use crate::intake::BUDGET_BYTES;

    #[tokio::test]
    async fn bounds() {
        let intake = Intake::new(1);
        let read = |body| async { read(&intake, body).await.map(|text| text.to_owned()) };
        assert_eq!(read(Body::from("{}")).await.unwrap(), "{}");
        let status = |error: ApiError| error.into_response().status().as_u16();
        assert_eq!(read(Body::from(vec![0xff])).await.map_err(status), Err(400));
        let piece = vec![b' '; 1 << 20];
        let pieces = (0..100).map(move |_| Ok::<_, std::io::Error>(piece.clone()));
        let large = Body::from_stream(futures::stream::iter(pieces));
        assert_eq!(read(large).await.map_err(status), Err(413));
        let broken = futures::stream::iter([Ok("{"), Err(std::io::Error::other("reset"))]);
        assert_eq!(read(Body::from_stream(broken)).await.map_err(status), Err(400));
        assert_eq!(read(Body::from(vec![b' '; MAX_BODY_BYTES])).await.unwrap().len(), MAX_BODY_BYTES);
        assert_eq!(read(Body::from(vec![b' '; MAX_BODY_BYTES + 1])).await.map_err(status), Err(413));
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_body_that_comes_slowly_gives_its_room_to_others() {
        let intake = Intake::new(1);
        let slow = || {
            // In chunks, one of a kilobyte each second: room for the largest body is taken behind the first sixteen.
            let pieces = futures::stream::repeat(vec![b' '; 1 << 10]).then(|piece| async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok::<_, std::io::Error>(piece)
            });
            Body::from_stream(pieces)
        };
        let begun = Instant::now();
        let reading: Vec<_> = (0..BUDGET_BYTES / MAX_BODY_BYTES)
            .map(|_| {
                let (intake, body) = (intake.clone(), slow());
                tokio::spawn(async move { read(&intake, body).await.map(drop).unwrap_err().into_response().status() })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(intake.load().body_bytes, BUDGET_BYTES, "the slow ones have all the room");
        assert!(read(&intake, Body::from(vec![b' '; MAX_BODY_BYTES])).await.is_ok());
        assert!(begun.elapsed() <= Intake::arrives_within(MAX_BODY_BYTES) + Duration::from_secs(1));
        for one in reading {
            assert_eq!(one.await.unwrap().as_u16(), 408);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_body_holds_its_room_until_it_is_dropped() {
        let intake = Intake::new(1);
        let large = || Body::from(vec![b' '; MAX_BODY_BYTES]);
        let mut held = Vec::new();
        for _ in 0..BUDGET_BYTES / MAX_BODY_BYTES {
            held.push(read(&intake, large()).await.unwrap());
        }
        let refused = read(&intake, large()).await.unwrap_err();
        assert_eq!(refused.into_response().status().as_u16(), 429);
        assert!(read(&intake, Body::from("{}")).await.is_ok(), "small ones need no room");
        held.pop();
        assert!(read(&intake, large()).await.is_ok());
    }
}
