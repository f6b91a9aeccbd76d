//! The admin port: `/health/live` and `/health/ready` for supervisors, and `/metrics`, whose families are in
//! `families`.
mod families;
mod scrape;

use std::fmt::Display;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::get;
use prometheus_client::registry::Registry;
use tandem_proto::v1::Role;
use tandem_telemetry::exposition::exposition;

use crate::node::{Node, role_name};
use scrape::Read;

/// The routes.
pub fn routes(node: Arc<Node>) -> Router {
    let ready = || get(async |State(node): State<Arc<Node>>| answer(node.failed(), node.work.is_draining()));
    let live = get(async |State(node): State<Arc<Node>>| answer(node.failed(), false));
    let health = Router::new().route("/health/live", live).route("/health/ready", ready()).route("/health", ready());
    let metrics = Arc::new(Metrics::new(&node));
    let scrape = async move |headers: HeaderMap| {
        let (kind, text) = metrics.text(headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()));
        ([(header::CONTENT_TYPE, kind)], text)
    };
    health.route("/metrics", get(scrape)).with_state(node)
}

/// A node that failed stays so; one that drains lives, and takes nothing new.
fn answer(failed: Option<impl Display>, is_draining: bool) -> (StatusCode, String) {
    match (failed, is_draining) {
        (Some(reason), _) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        (None, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
        (None, false) => (StatusCode::OK, "ok\n".to_owned()),
    }
}

/// The metrics of a node, which are read at each scrape.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
}

impl Metrics {
    /// All of this node.
    pub fn new(node: &Arc<Node>) -> Self {
        let mut registry = Registry::default();
        let who = [("role", role_name(node.role).to_owned()), ("instance", node.node_id.clone())];
        let own = registry.sub_registry_with_labels(who.map(|(key, value)| (key.into(), value.into())).into_iter());
        let read = |families| Box::new(Read { node: node.clone(), families });
        let decodes = node.role == Role::Decode;
        own.register_collector(read(families::requests));
        own.register_collector(read(families::ports));
        own.register_collector(read(families::handoffs));
        own.register_collector(read(if decodes { families::received } else { families::sent }));
        let model = node.engine.spec().model_name.clone();
        let vllm = own.sub_registry_with_label(("model_name".into(), model.into()));
        vllm.register_collector(read(families::vllm));
        if decodes {
            vllm.register_collector(read(families::vllm_decode));
            vllm.register_collector(read(families::vllm_answers));
        }
        Self { registry }
    }

    /// The content type and the text for a scraper with this `Accept` header.
    pub fn text(&self, accept: Option<&str>) -> (&'static str, String) {
        exposition(&self.registry, accept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_drains_lives_and_one_that_failed_does_not() {
        let ok = (StatusCode::OK, "ok\n".to_owned());
        assert_eq!(answer(None::<&str>, false), ok);
        assert_eq!(answer(None::<&str>, true), (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()));
        for is_draining in [false, true] {
            let failed = answer(Some("the engine hangs"), is_draining);
            assert_eq!(failed, (StatusCode::SERVICE_UNAVAILABLE, "the engine hangs\n".to_owned()));
        }
    }
}
