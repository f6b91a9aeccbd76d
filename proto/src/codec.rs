//! How messages become bytes on a call, and bytes messages. Prost's own way through tonic's buffer puts one byte of a
//! varint there at a time, and asks each time whether there is room: 38 of the router's 610 thousand instructions for a
//! request with 96 token ids. Here a message becomes bytes by itself, where its size is known, and is put into the
//! buffer whole. One that comes is cut off the buffer, which copies nothing, and read from there. Read as a slice,
//! each of its fields of bytes would be copied twice: once to be given out, once into the message.
use std::marker::PhantomData;

use prost::Message;
use prost::bytes::{Buf, BufMut};
use tonic::Status;
use tonic::codec::{BufferSettings, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Each call has a buffer for either direction; they grow when a message is larger.
const BUFFER_BYTES: usize = 2 << 10;
/// What a stream writes before it lets others go.
const MOST_AT_ONCE: usize = 32 << 10;

/// `application/grpc+proto`.
#[derive(Debug)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Whole<T>;
    type Decoder = Whole<U>;

    fn encoder(&mut self) -> Whole<T> {
        Whole(PhantomData)
    }

    fn decoder(&mut self) -> Whole<U> {
        Whole(PhantomData)
    }
}

/// Writes and reads a message whole.
#[derive(Debug)]
pub struct Whole<T>(PhantomData<T>);

impl<T: Message> Encoder for Whole<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put_slice(&message.encode_to_vec());
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

impl<T: Message + Default> Decoder for Whole<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        let message = T::decode(buf.copy_to_bytes(buf.remaining()));
        message.map(Some).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }
}

fn buffers() -> BufferSettings {
    BufferSettings::new(BUFFER_BYTES, MOST_AT_ONCE)
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use proptest::prelude::*;
    use tonic::Streaming;
    use tonic::codec::{Codec as _, EncodeBody};

    use super::*;
    use crate::v1;

    proptest! {
        #[test]
        fn messages_come_as_they_went(prompts in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..2_000), 0..4)) {
            let spec = |prompt: &Vec<u32>| v1::RequestSpec { prompt: prompt.clone(), ..v1::RequestSpec::default() };
            let went: Vec<_> = prompts.iter().map(spec).collect();
            let mut codec = Codec::<v1::RequestSpec, v1::RequestSpec>::default();
            let messages = stream::iter(went.clone()).map(Ok);
            let body = EncodeBody::new_client(codec.encoder(), messages, None, None);
            let came = Streaming::new_request(codec.decoder(), body, None, None).map(Result::unwrap);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            prop_assert_eq!(runtime.block_on(came.collect::<Vec<_>>()), went);
        }
    }
}
