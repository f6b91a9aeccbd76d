//! Which lines are logged: `--log-filter`, or else `RUST_LOG`, or else those that people want. It may change while the
//! process runs.
use std::fmt::{self, Display};
use std::str::FromStr;
use std::sync::OnceLock;

use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::registry::Registry;
use tracing_subscriber::reload::{Handle, Layer};

/// The HTTP/2 stack below us logs every frame at debug; nobody asks for that with `debug`.
const QUIET: &str = "info,h2=warn,hyper=warn,hyper_util=warn,tower=warn,tonic=warn,opentelemetry=warn";

/// That of this process's log.
static NOW: OnceLock<Handle<EnvFilter, Registry>> = OnceLock::new();

/// Directives as `RUST_LOG` has them, such as `info,access=off`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFilter {
    /// Empty: those of `RUST_LOG`.
    directives: String,
}

impl FromStr for LogFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let filter = Self { directives: text.to_owned() };
        filter.given().map(|_| filter).map_err(|error| error.to_string())
    }
}

impl Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.directives)
    }
}

impl LogFilter {
    /// Holds from now on.
    pub fn set(&self) {
        // Before the log has started there is nothing to filter.
        if let Some(now) = NOW.get()
            && let Err(error) = now.reload(self.filter())
        {
            tracing::error!(%error, "the log's filter stays");
        }
    }

    /// The first of the process; later ones take its place by [`Self::set`].
    pub(crate) fn install(&self) -> Layer<EnvFilter, Registry> {
        let (layer, handle) = Layer::new(self.filter());
        // A second log of the process is none.
        let _ = NOW.set(handle);
        layer
    }

    fn filter(&self) -> EnvFilter {
        match self.directives.is_empty() {
            true => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(QUIET)),
            // They were tried before.
            false => self.given().unwrap_or_else(|_| EnvFilter::new(QUIET)),
        }
    }

    fn given(&self) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
        EnvFilter::builder().parse(format!("{QUIET},{}", self.directives))
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn wrong_directives_are_refused() {
        for wrong in ["info,tandem=loud", "=", "a=b=c"] {
            assert!(wrong.parse::<LogFilter>().is_err(), "{wrong}");
        }
        let text = "warn,access=off";
        assert_eq!(text.parse::<LogFilter>().map(|filter| filter.to_string()), Ok(text.to_owned()));
    }

    #[test]
    fn lines_are_chosen_by_the_last_filter_and_frames_by_nobody() {
        let of = |text: &str| text.parse::<LogFilter>().expect("a filter");
        let subscriber = tracing_subscriber::registry().with(of("warn").install());
        tracing::subscriber::with_default(subscriber, || {
            let told = || {
                let (own, frames) =
                    (tracing::enabled!(tracing::Level::DEBUG), tracing::enabled!(target: "h2", tracing::Level::DEBUG));
                (tracing::enabled!(tracing::Level::INFO), own, frames)
            };
            assert_eq!(told(), (false, false, false));
            of("debug").set();
            assert_eq!(told(), (true, true, false));
            of("debug,h2=debug").set();
            assert_eq!(told(), (true, true, true));
            of("off").set();
            assert_eq!(told(), (false, false, false));
        });
    }
}
