//! The compose file of this host, as text. It goes behind deploy/compose/compose.yaml and says only what differs. Pure.
use std::fmt::Write;
use std::path::Path;

use super::plan::Node;

/// The nodes of compose.yaml.
const SHIPPED: [&str; 4] = ["prefill-0", "prefill-1", "decode-0", "decode-1"];

/// As the image of compose.gpu.yaml.
const BUILD: &str = r#"    build:
      context: ${TANDEM_CONTEXT:-../..}
      dockerfile: deploy/Dockerfile
      target: gpu
      args:
        BUILD: ${TANDEM_BUILD:-dist}
        PROGRAMS: ${TANDEM_PROGRAMS:-built}
        REVISION: ${TANDEM_REVISION:-unknown}
        DEBIAN_IMAGE:
        RUST_IMAGE:
"#;

/// What the file is made of.
pub struct Written<'a> {
    /// The command that made it.
    pub command: &'a str,
    /// What the reader should know, a line each.
    pub notes: &'a [String],
    /// In the order of their ports.
    pub nodes: &'a [Node],
    /// Folder and name of the model; `None`: the one of compose.yaml.
    pub model: Option<(&'a Path, &'a str)>,
}

impl Written<'_> {
    /// The text.
    pub fn text(&self) -> String {
        let mut out = format!(
            "# Written by `{}`. From this folder:\n#\n#   COMPOSE_FILE=compose.yaml:FILE docker compose up --wait\n",
            self.command
        );
        for note in self.notes {
            let _ = writeln!(out, "#\n# {note}");
        }
        out.push_str("services:\n");
        for (number, node) in (1..).zip(self.nodes) {
            self.node(&mut out, number, node);
        }
        for gone in SHIPPED.iter().filter(|name| self.nodes.iter().all(|node| node.name() != **name)) {
            let _ = writeln!(out, "  {gone}: !reset null\n");
        }
        self.around(&mut out);
        out
    }

    fn on_gpus(&self) -> bool {
        self.nodes.iter().any(|node| node.gpu.is_some())
    }

    fn node(&self, out: &mut String, number: usize, node: &Node) {
        let (name, role) = (node.name(), node.role);
        let _ = writeln!(out, "  {name}:");
        if !SHIPPED.contains(&name.as_str()) {
            let _ = writeln!(out, "    extends: {{file: compose.yaml, service: {role}-0}}");
        }
        let model = self.model.map_or_else(String::new, |(_, file)| format!(", MODEL: {}", quoted(file)));
        // As in compose.gpu.yaml.
        let gpu = node.gpu.map_or("", |_| ", DEVICE: \"${TANDEM_DEVICE:-cpu}\", XDG_CACHE_HOME: /tmp");
        let _ = writeln!(out, "    environment: {{ROLE: {role}, NODE: {name}, NUMBER: \"{number:02}\"{model}{gpu}}}");
        if let Some(cpus) = &node.cpus {
            let _ = writeln!(out, "    cpuset: {}", quoted(cpus));
        }
        if let Some(gpu) = node.gpu {
            let _ = writeln!(
                out,
                "    image: ${{TANDEM_GPU_IMAGE:-tandem:gpu}}\n    ulimits: {{memlock: -1}}\n    deploy:\n      \
                 resources:\n        reservations:\n          \
                 devices: [{{driver: nvidia, device_ids: [\"{gpu}\"], capabilities: [gpu]}}]"
            );
            if number == 1 {
                out.push_str(BUILD);
            }
        } else if node.cpus.is_some() {
            // Of the IPC namespace that the nodes share.
            out.push_str(
                "    command:\n      - --transport=${TANDEM_TRANSPORT:-auto}\n      - --ucx-profile=shm\n      \
                 - --lend-cores=/dev/shm/tandem-cores\n",
            );
        }
        self.models(out);
        out.push('\n');
    }

    /// The services beside the nodes.
    fn around(&self, out: &mut String) {
        let names: Vec<String> = self.nodes.iter().map(Node::name).collect();
        let _ = writeln!(out, "  nodes:\n    networks: {{control: {{aliases: !override [{}]}}}}", names.join(", "));
        if self.on_gpus() {
            out.push_str("    ulimits: {memlock: -1}\n    shm_size: ${TANDEM_SHM_SIZE:-16g}\n");
        }
        out.push_str("\n  router:\n");
        out.push_str(
            "    command: !override [\"--local-prefill=${TANDEM_LOCAL_PREFILL:-auto}\"]\n    depends_on: !override\n",
        );
        out.push_str("      model: {condition: service_completed_successfully}\n");
        for service in names.iter().map(String::as_str).chain(["jaeger"]) {
            let _ = writeln!(out, "      {service}: {{condition: service_started}}");
        }
        if let Some((_, file)) = self.model {
            let _ = writeln!(out, "    environment: {{MODEL: {}}}", quoted(file));
        }
        self.models(out);
        if let Some((_, file)) = self.model {
            let sha256 = "${TANDEM_MODEL_SHA256:-}";
            let _ = writeln!(out, "\n  model:\n    command: !override [/models, {}, \"{sha256}\"]", quoted(file));
            self.models(out);
        }
        out.push_str("\n  prometheus:\n    configs: [{source: targets, target: /etc/prometheus/targets/tandem.yml}]\n");
        out.push_str(
            "\nconfigs:\n  targets:\n    content: |\n      - {labels: {role: router}, targets: [\"router:9464\"]}\n",
        );
        for (number, node) in (1..).zip(self.nodes) {
            let _ = writeln!(
                out,
                "      - {{labels: {{role: {}}}, targets: [\"{}:91{number:02}\"]}}",
                node.role,
                node.name()
            );
        }
    }

    /// The folder of the model, in place of the volume.
    fn models(&self, out: &mut String) {
        if let Some((folder, _)) = self.model {
            let folder = quoted(&folder.to_string_lossy());
            let _ = writeln!(
                out,
                "    volumes: [{{type: bind, source: {folder}, target: /models, read_only: true, \
                 bind: {{create_host_path: false}}}}]"
            );
        }
    }
}

/// A string of YAML, in which compose replaces nothing.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "$$"))
}

#[cfg(test)]
mod tests {
    use super::super::plan::{on_cpus, on_gpus};
    use super::*;

    fn text(nodes: &[Node], model: Option<(&Path, &str)>) -> String {
        Written { command: "tandem compose", notes: &["A note.".to_owned()], nodes, model }.text()
    }

    #[test]
    fn a_gpu_each_and_no_node_that_was_not_asked_for() {
        let text = text(&on_gpus(&[0, 1, 2, 3], 1, None), None);
        for part in [
            "  prefill-1: !reset null\n",
            "  decode-2:\n    extends: {file: compose.yaml, service: decode-0}\n",
            "    environment: {ROLE: decode, NODE: decode-2, NUMBER: \"04\", DEVICE: \"${TANDEM_DEVICE:-cpu}\", XDG_CACHE_HOME",
            "device_ids: [\"3\"]",
            "aliases: !override [prefill-0, decode-0, decode-1, decode-2]",
            "targets: [\"decode-2:9104\"]",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert_eq!(text.matches("target: gpu").count(), 1);
        assert!(!text.contains("MODEL"), "{text}");
    }

    #[test]
    fn a_model_of_ones_own_takes_the_volumes_place() {
        let text = text(&on_cpus(None, 1, 1), Some((Path::new("/data/$x"), "a \"b\".gguf")));
        assert!(text.contains("source: \"/data/$$x\", target: /models"), "{text}");
        assert!(!text.contains("DEVICE"), "nodes on CPUs: {text}");
        assert!(text.contains("MODEL: \"a \\\"b\\\".gguf\""), "{text}");
        assert_eq!(text.matches("target: /models").count(), 4);
    }

    #[test]
    fn nodes_with_cores_of_their_own_lend_them() {
        let parts = Some(vec!["0,2".to_owned(), "1,3".to_owned()]);
        let text = text(&on_cpus(parts, 1, 1), None);
        assert!(text.contains("cpuset: \"1,3\"") && text.contains("--lend-cores=/dev/shm/tandem-cores"), "{text}");
    }
}
