"""What programs export, out of the text of their /metrics, and the table of it in docs/metrics.md. Asks nobody."""

import dataclasses
import pathlib
import re

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
TABLE, GUIDE = DOCS / "metrics.md", DOCS / "observability.md"
ROLES = ("router", "prefill", "decode")
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Of every series; Prometheus adds `job`.
COMMON = {"role", "instance"}
# Labels whose values are others in each cluster.
FREE = {"model_name", "tenant", "node_instance", "priority", "backend", "name", "le", "block_size", "num_gpu_blocks", "etcd"}
# Families all of whose labels are such.
FREE_FAMILIES = {"tandem_kv_way_fallbacks_total"}
# What router and nodes export of ports that have certificates, which no cluster of this check has.
WITHIN_TLS = {"router": ("http", "grpc", "nodes"), "prefill": ("grpc",), "decode": ("grpc",)}
CERTIFICATE = "tandem_certificate_not_after_seconds"
CERTIFICATE_TEXT = (
    f"# HELP {CERTIFICATE} Unix time at which a port's certificate ends, or one of the authorities' behind it\n"
    f"# TYPE {CERTIFICATE} gauge\n"
)
# What a router exports that registers in etcd.
IN_ETCD = """\
# HELP tandem_etcd_registered Whether the router stands in etcd, where nodes look for it: 1 or 0
# TYPE tandem_etcd_registered gauge
tandem_etcd_registered{role="router",instance="i",etcd="etcd://h/p"} 1
"""
# Of samples whose names end so; everything else has no unit but what its meaning says.
UNITS = {
    "_seconds": "s",
    "_ms": "ms",
    "_bytes": "bytes",
    "_bytes_per_second": "bytes/s",
    "_ratio": "ratio",
    "_perc": "ratio",
    "_bytes_transferred": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
}


@dataclasses.dataclass
class Metric:
    """One family: its samples are named as it is, or with one of the endings of a histogram."""

    kind: str
    # By who exports it: what the router says of the whole is not what a node says of itself.
    help: dict = dataclasses.field(default_factory=dict)
    labels: dict = dataclasses.field(default_factory=dict)

    @property
    def roles(self):
        return set(self.help)

    def samples(self, name):
        return [name + part for part in ("_bucket", "_sum", "_count")] if self.kind == "histogram" else [name]


def read_absent(into):
    """Adds what the programs would export within TLS, and with etcd."""
    read(IN_ETCD, "router", into)
    for role, ports in WITHIN_TLS.items():
        samples = (f'{CERTIFICATE}{{role="{role}",instance="i",port="{port}"}} 1\n' for port in ports)
        read(CERTIFICATE_TEXT + "".join(samples), role, into)


def read(text, role, into):
    """Adds the families of one program's classic text."""
    helps, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            helps[name] = words.rstrip(".")
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            kinds[name] = kind
    for name, kind in kinds.items():
        metric = into.setdefault(name, Metric(kind))
        metric.help[role] = helps[name]
        if metric.kind != kind:
            raise ValueError(f"{name} is a {kind} of {role}, and a {metric.kind} elsewhere")
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if not found or line.startswith("#"):
            continue
        name = found[1]
        family = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
        for label, value in LABEL.findall(found[2] or ""):
            if label not in COMMON:
                into[family].labels.setdefault(label, set()).add(value)


def unit(name, kind):
    stem = name.removesuffix("_total")
    endings = [ending for ending in UNITS if stem.endswith(ending)]
    if not endings:
        return "1" if kind != "gauge" or "info" not in name else ""
    return UNITS[max(endings, key=len)]


def row(name, metric):
    labels = []
    for label, values in sorted(metric.labels.items()):
        if label == "le":
            continue
        known = "" if label in FREE or name in FREE_FAMILIES else "=" + ", ".join(sorted(values))
        labels.append(f"`{label}{known}`")
    roles = ", ".join(role for role in ROLES if role in metric.roles)
    meaning = {}
    for role, text in metric.help.items():
        meaning.setdefault(text, []).append(role)
    whole = "; ".join(
        text if len(meaning) == 1 else f"{', '.join(roles)}: {text}" for text, roles in meaning.items()
    ).replace("|", "\\|")
    cells = [f"`{name}`", metric.kind, unit(name, metric.kind), roles, " ".join(labels), whole]
    return f"| {' | '.join(cells)} |"


HEAD = """\
# Metrics

Every metric that the programs export. `deploy/observability/check.py --write` writes this file out
of their own `/metrics`; `make test-observability` fails when it is not up to date. How to scrape
them, the dashboards and the alerts: [observability.md](observability.md).

Each series also has `role` and `instance`, the program's own. A histogram `x` has the samples
`x_bucket`, `x_sum` and `x_count`; in OpenMetrics its buckets point to traces. A router with
`--nodes` has `port="nodes"` beside the ports listed here. Names that begin with `vllm:` mean what
they mean in vLLM, and public dashboards read them.
"""
COLUMNS = "| name | type | unit | from | labels | meaning |\n|---|---|---|---|---|---|"


def table(metrics):
    def rows(prefix):
        return "\n".join(row(name, metrics[name]) for name in sorted(metrics) if name.startswith(prefix))

    own, vllm = rows("tandem_"), rows("vllm:")
    return f"{HEAD}\n## Tandem's own\n\n{COLUMNS}\n{own}\n\n## vLLM's names\n\n{COLUMNS}\n{vllm}\n"
