//! Reads a request body within its bounds of size and time.
use std::time::Duration;

use axum::body::Body;
use futures::StreamExt;
use tandem_proto::{Error, ErrorKind};
use tokio::time::timeout;

use super::MAX_BODY_BYTES;
use super::error::ApiError;

/// A body takes this long at most.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// What is read and thrown away of a body that is too large, so that a client that sends first and reads later finds
/// the error instead of a reset connection.
const DISCARD_BYTES: usize = 256 << 20;
const DISCARD_LIMIT: Duration = Duration::from_secs(10);

/// The whole body as text.
///
/// # Errors
/// Too large, too slow, cut off, or not UTF-8.
pub(super) async fn read(body: Body) -> Result<String, ApiError> {
    let bytes = timeout(READ_LIMIT, collect(body)).await.map_err(|_| ApiError::body_too_slow())??;
    let invalid = |_| Error::new(ErrorKind::InvalidArgument, "the request body is not valid UTF-8");
    Ok(String::from_utf8(bytes).map_err(invalid)?)
}

async fn collect(body: Body) -> Result<Vec<u8>, ApiError> {
    let mut pieces = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let cut_off = |error| Error::new(ErrorKind::InvalidArgument, format!("the request body broke off: {error}"));
        let piece = piece.map_err(cut_off)?;
        if bytes.len() + piece.len() > MAX_BODY_BYTES {
            drop(bytes);
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
            return Err(ApiError::body_too_large(MAX_BODY_BYTES));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test]
    async fn bounds() {
        assert_eq!(read(Body::from("{}")).await.unwrap(), "{}");
        let status = |error: ApiError| error.into_response().status().as_u16();
        assert_eq!(read(Body::from(vec![0xff])).await.map_err(status), Err(400));
        let piece = vec![b' '; 1 << 20];
        let pieces = (0..100).map(move |_| Ok::<_, std::io::Error>(piece.clone()));
        let large = Body::from_stream(futures::stream::iter(pieces));
        assert_eq!(read(large).await.map_err(status), Err(413));
        let broken = futures::stream::iter([Ok("{"), Err(std::io::Error::other("reset"))]);
        assert_eq!(read(Body::from_stream(broken)).await.map_err(status), Err(400));
    }
}
