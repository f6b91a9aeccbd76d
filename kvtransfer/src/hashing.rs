//! Where KV is hashed: on a thread that may block, unless there is so little of it that going there and back takes
//! longer.
use futures::future::{Either, Ready, ready};
use tokio::task::{JoinError, JoinHandle, spawn_blocking};

/// Hashed in some 6 µs, which is what a thread takes to wake up.
const AT_ONCE_BYTES: usize = 64 << 10;

/// Work under way, or done.
pub type Hashing<T> = Either<Ready<Result<T, JoinError>>, JoinHandle<T>>;

/// Starts `work`, which hashes `bytes`. Needs a tokio runtime.
pub fn start<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> Hashing<T> {
    if is_little(bytes) { Either::Left(ready(Ok(work()))) } else { Either::Right(spawn_blocking(work)) }
}

/// Whether `bytes` are hashed where they are.
pub fn is_little(bytes: usize) -> bool {
    bytes <= AT_ONCE_BYTES
}
