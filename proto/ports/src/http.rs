//! HTTP/1.1 on a port, by hyper's own server: axum's would wait for the head of a request for ever.
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::CancellationToken;

use crate::Port;

/// Serves `app` until `stop`; then nobody new is let in, idle connections close, and it returns when the requests under
/// way were answered. A response may take as long as it takes: only silence of the client is bounded.
pub async fn serve_http(port: Port, app: axum::Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(port.limits.silence);
    let (connections, tls) = (GracefulShutdown::new(), port.speaking("http/1.1"));
    loop {
        let connection = tokio::select! {
            connection = port.accept(&tls) => connection,
            () = stop.cancelled() => break,
        };
        let serving = http.serve_connection(TokioIo::new(connection), TowerToHyperService::new(app.clone()));
        let serving = connections.watch(serving);
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%error, "HTTP connection");
            }
        });
    }
    drop(port);
    connections.shutdown().await;
}
