#!/usr/bin/env python3
"""`make test-observability`: whether the dashboards, rules and alerts fit each other and the programs.

Without --live it starts a simulated cluster for a moment, to ask what the programs export. With it, real nodes serve
real load, a real Prometheus scrapes them with the shipped configuration, and each query must have an answer.
"""

import argparse
import difflib
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

import dashboards
import live
import metrics
import queries
from live import say

HERE = pathlib.Path(__file__).resolve().parent
# Queries that a loaded cluster need not answer, by how they begin in `queries.Query.where`, and why.
MAY_BE_EMPTY = {}


# What the load of `live.load` must have moved, or it was not the load that it is meant to be.
MOVED = [
    'tandem_plans_total{plan="pair"}',
    'tandem_plans_total{plan="local"}',
    'tandem_handoffs_total{role="router",state="verified"}',
    'tandem_handoffs_total{role="prefill",state="sent"}',
    'tandem_kv_bytes_total{role="router",direction="received"}',
    "vllm:prefix_cache_hits_total",
    'tandem_answers_total{objectives="met"}',
    "tandem_queue_depth",
    'tandem_refused_total{reason="queue_full"}',
    "tandem_node_deaths_total",
    "tandem_replans_total",
    'ALERTS{alertname="TandemNodeDown"}',
]


class Findings:
    """What is wrong, said at once."""

    def __init__(self):
        self.count = 0

    def add(self, text):
        self.count += 1
        print(f"check: WRONG: {text}", flush=True)


def generated(findings, write):
    """The committed dashboards are what dashboards.py writes."""
    for name, text in dashboards.files().items():
        path = dashboards.DASHBOARDS / name
        if write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            findings.add(
                f"{path.relative_to(HERE)} is not what dashboards.py writes: run it and commit what it wrote"
            )
    unknown = {path.name for path in dashboards.DASHBOARDS.glob("*")} - set(dashboards.files())
    for name in sorted(unknown):
        findings.add(f"{name} is in grafana/dashboards, and dashboards.py does not write it")


def promtool(findings, programs):
    """What Prometheus itself says of configuration, rules, tests, and the syntax of every query."""

    def run(*arguments, cwd=HERE / "prometheus"):
        told = subprocess.run(
            [f"{programs}/promtool", *map(str, arguments)],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if told.returncode != 0:
            findings.add(f"promtool {' '.join(map(str, arguments[:2]))}:\n{told.stdout}")
        return told.returncode == 0

    run("check", "config", "prometheus.yml")
    run("check", "rules", *sorted((HERE / "prometheus" / "rules").glob("*.yml")))
    tests = HERE / "prometheus" / "tests"
    run("test", "rules", *sorted(path.name for path in tests.glob("*.yml")), cwd=tests)
    # A query is well formed if a rule may have it.
    asked = queries.of_dashboards()
    lines = [
        f"- {{record: 'check:query', labels: {{n: '{n}'}}, expr: {quoted(query.expr)}}}"
        for n, query in enumerate(asked)
    ]
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as directory:
        path = pathlib.Path(directory) / "queries.yml"
        path.write_text("groups:\n- name: queries\n  rules:\n" + "".join(f"  {line}\n" for line in lines))
        run("check", "rules", path)
    return len(asked)


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def exported(clusters):
    """What the programs of these clusters export, by family."""
    families = {}
    for cluster in clusters:
        for entry in live.targets("", cluster):
            with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=10) as answer:
                metrics.read(answer.read().decode(), entry["labels"]["role"], families)
    metrics.read_absent(families)
    return families


def names(findings, families):
    """Whatever a dashboard or a rule names, some program exports or some rule records."""
    rules = queries.rules()
    recorded = {name for kind, name, _ in rules if kind == "record"}
    asked = queries.of_dashboards() + [queries.Query(f"rule {name}", expr) for _, name, expr in rules]
    for query in asked:
        for problem in queries.problems(query, families, recorded):
            findings.add(f"{query.where}: {problem}")
    used = " ".join(query.expr for query in asked)
    for name in sorted(recorded):
        if name not in used:
            findings.add(f"the rule {name} is used nowhere")


def explained(findings):
    """Each alert stands in the tables of docs/observability.md with what to do, and no other."""
    text = metrics.GUIDE.read_text()
    told = set(re.findall(r"^\| (Tandem\w+) \|", text, re.M))
    alerts = {name for kind, name, _ in queries.rules() if kind == "alert"}
    for name in sorted(alerts ^ told):
        findings.add(f"{name} is {'not ' if name in alerts else 'still '}in docs/observability.md")


def table(findings, families, write):
    """docs/metrics.md says what the programs export."""
    expected = metrics.table(families)
    if write:
        metrics.TABLE.write_text(expected)
        return
    found = metrics.TABLE.read_text() if metrics.TABLE.exists() else ""
    if found != expected:
        lines = difflib.unified_diff(
            found.splitlines(), expected.splitlines(), "docs/metrics.md", "the programs", lineterm="", n=0
        )
        findings.add("docs/metrics.md is not up to date (check.py --write):\n" + "\n".join(lines))


def answered(findings, server, start):
    """Every query has a number at some moment since then, and a trace where it is drawn with exemplars."""
    end = time.time()
    rules = [queries.Query(f"rule {name}", name) for kind, name, _ in queries.rules() if kind == "record"]
    asked = queries.of_dashboards() + rules
    for query in asked:
        outcome = server.has_samples(query.expr, start, end)
        if outcome is True and query.exemplars and not server.has_traces(query.expr, start, end):
            outcome = "no exemplar has a trace id"
        if outcome is True:
            continue
        reason = next((why for where, why in MAY_BE_EMPTY.items() if query.where.startswith(where)), None)
        if outcome is False and reason is not None:
            say(f"empty, as it may be: {query.where}: {reason}")
        else:
            findings.add(f"{query.where}: {outcome or 'no sample'}\n    {query.expr}")
    say(f"{len(asked)} queries and recording rules asked of {server.url}")


def moved(findings, server, start):
    """The load was of all kinds."""
    for expr in MOVED:
        if server.has_samples(f"sum({expr}) > 0", start, time.time()) is not True:
            findings.add(f"the load did not move {expr}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write the dashboards and docs/metrics.md instead of comparing"
    )
    parser.add_argument("--live", action="store_true", help="ask a Prometheus that scrapes a loaded cluster")
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="this one, which scrapes a cluster that was under load for the last minutes",
    )
    arguments = parser.parse_args()
    findings = Findings()
    programs = subprocess.run([HERE / "prometheus.sh"], stdout=subprocess.PIPE, text=True, check=False)
    if programs.returncode != 0:
        raise SystemExit(programs.returncode)
    programs = programs.stdout.strip()
    generated(findings, arguments.write)
    asked = promtool(findings, programs)
    say(f"{asked} queries of {len(dashboards.ALL)} dashboards and {len(queries.rules())} rules parse")
    with live.Cluster(live.TANDEM, ["--simulated", "--prefill", "1", "--decode", "1"]) as cluster:
        families = exported([cluster])
    names(findings, families)
    explained(findings)
    table(findings, families, arguments.write)
    say(f"{len(families)} metrics compared with what dashboards, rules and docs/metrics.md name")
    if arguments.prometheus:
        answered(findings, live.Prometheus(arguments.prometheus), time.time() - 600)
    elif arguments.live:
        with live.Cluster(live.TANDEM, live.PAIRS) as pairs, live.Cluster(
            live.TANDEM, live.LOCAL
        ) as local, live.prometheus(programs, {"pairs": pairs, "local": local}) as server:
            start = time.time()
            live.load(pairs, local)
            server.wait(live.SETTLE_S)
            answered(findings, server, start)
            moved(findings, server, start)
    if findings.count:
        raise SystemExit(f"check: {findings.count} wrong")
    say("all well")


if __name__ == "__main__":
    sys.exit(main())
