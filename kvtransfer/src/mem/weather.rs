//! What may happen to the frames of a `MemNetwork`: they are late, lost or damaged, and writing takes time. The network
//! asks; a simulation answers.
use futures::future::BoxFuture;

/// What travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A range of blocks, from the sender.
    Data,
    /// Behind all ranges.
    Seal,
    /// The sender's sign of life.
    KeepAlive,
    /// The sender gives up.
    Cancel,
    /// The sender has closed the connection.
    Close,
    /// The receiver's.
    Answer,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is there.
    Arrived {
        /// One bit of the first byte is not as it was sent.
        flip: bool,
        /// The last 8 bytes are missing.
        truncate: bool,
    },
    /// It never arrives, and nobody notices.
    Lost,
    /// The connection breaks.
    Severed,
}

impl Fate {
    /// As it was sent.
    pub const UNHARMED: Self = Self::Arrived { flip: false, truncate: false };
}

/// When a receiver's machine touches a frame's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Between two pieces of it.
    Writing,
    /// All bytes are there; the receiver is to notice.
    Written,
}

/// Decides what happens to frames between the addresses `from` and `to`.
pub trait Weather: Send + Sync {
    /// Ready when the frame is at its receiver and that one looks at it.
    fn travel(&self, from: u64, to: u64, frame: Frame) -> BoxFuture<'static, Fate>;

    /// Ready when the machine goes on with a range that it is writing.
    fn pass(&self, from: u64, to: u64, window: Window) -> BoxFuture<'static, ()>;
}
