//! What a gRPC client says when it has met an HTTP port: the transport's own words do not help there.
use std::error::Error;
use std::time::Duration;

use crate::state::State;

/// It was reached a moment ago.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A hint where the server at `url` answers HTTP/1.1, which a gRPC port does not; `cluster` is the running one.
pub async fn hint(url: &str, cluster: Option<&State>) -> Option<String> {
    let client = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build().ok()?;
    client.get(format!("{url}/health")).send().await.ok()?;
    let port = match cluster {
        Some(cluster) if cluster.http == url => format!("the gRPC port is {}", cluster.grpc),
        _ => "`tandem up` prints the gRPC port as grpc=".to_owned(),
    };
    Some(format!("{url} answers HTTP/1.1: is this the HTTP port? {port}"))
}

/// All that an error has to say. tonic says "transport error" and keeps what happened in the sources, some of which
/// begin with the same words.
pub fn with_causes(mut text: String, error: &dyn Error) -> String {
    let mut cause = error.source();
    while let Some(source) = cause {
        let said = source.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = source.source();
    }
    text
}
