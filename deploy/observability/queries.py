"""Every query of the dashboards and rules, and what it names. Asks nobody."""

import dataclasses
import json
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
DASHBOARDS = HERE / "grafana" / "dashboards"
RULES = HERE / "prometheus" / "rules"
# What stands for Grafana's variables. A rate wants four scrapes, as Grafana would choose.
VARIABLES = {"$job": ".*", "$instance": ".*"}
RATE_INTERVAL = "20s"
NAME = re.compile(r"\b(?:tandem_\w+|(?:vllm|tandem):[\w:]+)")
SELECTOR = re.compile(rf"({NAME.pattern})(?:\{{([^}}]*)\}})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
# Prometheus' own, and the target's.
TARGET_LABELS = {"job", "role", "instance", "alertname", "alertstate", "severity"}


@dataclasses.dataclass(frozen=True)
class Query:
    """One expression and where it stands."""

    where: str
    expr: str
    # Whether Grafana draws its exemplars, too.
    exemplars: bool = False


def of_dashboard(dashboard, rate_interval=RATE_INTERVAL):
    def expanded(expr):
        for variable, value in {**VARIABLES, "$__rate_interval": rate_interval}.items():
            expr = expr.replace(variable, value)
        return expr

    title = dashboard["title"].removeprefix("Tandem / ")
    for annotation in dashboard["annotations"]["list"]:
        yield Query(f"{title}: annotation {annotation['name']}", expanded(annotation["expr"]))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            # label_values(series, label): what Grafana asks for.
            series = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])[1]
            yield Query(f"{title}: variable {variable['name']}", expanded(series))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            where = f"{title}: {panel['title']}: {target['legendFormat'] or target['refId']}"
            yield Query(where, expanded(target["expr"]), target["exemplar"])


def of_dashboards(rate_interval=RATE_INTERVAL):
    dashboards = [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]
    return [query for dashboard in dashboards for query in of_dashboard(dashboard, rate_interval)]


def of_rules(text):
    """(kind, name, expression) of each rule. The files are ours: a rule is `- record:` or `- alert:`, then `expr:`."""
    for found in re.finditer(r"^( *)- (record|alert): (\S+)\n((?:\1 .*\n|\s*\n)*)", text + "\n", re.M):
        indent, kind, name, body = found.groups()
        line = re.search(rf"^{indent}  expr: (?!\|)(.*)$", body, re.M)
        block = re.search(rf"^{indent}  expr: \|\n((?:{indent}    .*\n|\s*\n)+)", body, re.M)
        yield kind, name, (line or block)[1].strip()


def rules():
    return [rule for path in sorted(RULES.glob("*.yml")) for rule in of_rules(path.read_text())]


def problems(query, metrics, recorded):
    """What the query names that nobody exports: metrics, labels of them, and values of these labels."""
    samples = {sample: (name, metric) for name, metric in metrics.items() for sample in metric.samples(name)}
    labels = set(TARGET_LABELS)
    for name, matchers in SELECTOR.findall(query.expr):
        if name.startswith("tandem:"):
            if name not in recorded:
                yield f"{name} is recorded by no rule"
            continue
        if name not in samples:
            yield f"{name} is exported by no program"
            continue
        _, metric = samples[name]
        labels |= set(metric.labels)
        for label, how, value in MATCHER.findall(matchers):
            known = metric.roles if label == "role" else metric.labels.get(label)
            if known is None and label not in TARGET_LABELS:
                yield f"{name} has no label {label}"
            elif known is not None and label not in ("le",):
                for one in value.split("|") if "~" in how else [value]:
                    # `.*` and the like choose; only words can be misspelt.
                    if re.fullmatch(r"\w+", one) and one not in known:
                        yield f"{name} has no {label}=\"{one}\", only {', '.join(sorted(known))}"
    for grouped in GROUPING.findall(query.expr):
        for label in filter(None, (label.strip() for label in grouped.split(","))):
            if label not in labels:
                yield f"nothing here has the label {label}"
