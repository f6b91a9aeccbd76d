#!/usr/bin/env python3
"""Fifty mixed requests and a real Jaeger: hand-offs, local plans, re-plans after a kill, refusals, cancellations.

Every span that the router's own ring shows is found by Jaeger's query API. No span has a warning, all children lie in their
parents (but for `kv.transfer`, which outlives its `kv.post`), the phases tile the request, and Jaeger's critical path runs
through them. Exits with 2, and says what is missing, where Jaeger cannot be built.

    run.py [--simulated] [--keep]     --keep: Jaeger and its traces stay until Ctrl-C
"""
import argparse
import collections
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from critical_path import critical_path

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET = subprocess.check_output([ROOT / "deploy/target_dir.sh"], text=True).strip()
TANDEM = pathlib.Path(TARGET) / "release/tandem"
PHASES = ["queue", "route", "prefill", "transfer", "decode"]
SLOTS = 8
# Tokens: all slots are taken before the first answer ends.
LONG_ANSWER = 500
STORY = "Once upon a time there was a small town by the sea, where the fishermen left before dawn and came home at noon. "
# Exporters send four times a second, Jaeger stores at once; the nodes' last spans come within a second.
ARRIVED = 20


def fail(message):
    sys.exit(f"test-jaeger: {message}")


def get_json(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Jaeger:
    """The process, with memory as its storage."""

    def __init__(self, program, logs):
        ports = {name: str(free_port()) for name in ["JAEGER_HTTP", "JAEGER_GRPC", "JAEGER_OTLP"]}
        self.url, self.otlp = (f"http://127.0.0.1:{ports[name]}" for name in ["JAEGER_HTTP", "JAEGER_OTLP"])
        self.log = logs / "jaeger.log"
        with self.log.open("w") as log:
            command = [program, "--config", f"file:{HERE / 'jaeger.yaml'}"]
            # Traces of its own would go to port 4317, whoever listens there.
            env = {**os.environ, **ports, "OTEL_TRACES_SAMPLER": "always_off"}
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                get_json(f"{self.url}/api/services")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    fail(f"Jaeger does not start:\n{self.log.read_text()[-3000:]}")
                time.sleep(0.1)

    def trace(self, trace_id):
        """Spans by id, with their warnings: nanoseconds of API v3, warnings of both."""
        try:
            classic = get_json(f"{self.url}/api/traces/{trace_id}")["data"][0]
            otlp = get_json(f"{self.url}/api/v3/traces/{trace_id}")["result"]["resourceSpans"]
        except urllib.error.HTTPError:
            return {}
        spans = {}
        for resource in otlp:
            of = {a["key"]: value(a) for a in resource["resource"]["attributes"]}
            for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                attributes = {a["key"]: value(a) for a in span.get("attributes", [])}
                warnings = attributes.get("@jaeger@warnings", [])
                spans[span["spanId"]] = {
                    "id": span["spanId"],
                    "parent": span.get("parentSpanId", ""),
                    "name": span["name"],
                    "service": of["service.name"],
                    "start": int(span["startTimeUnixNano"]),
                    "end": int(span["endTimeUnixNano"]),
                    "attributes": attributes,
                    "error": span.get("status", {}).get("message", ""),
                    "warnings": warnings if isinstance(warnings, list) else [warnings],
                }
        for span in classic["spans"]:
            spans[span["spanID"]]["warnings"] += span.get("warnings") or []
        return spans

    def end(self):
        self.process.terminate()
        self.process.wait()


def value(attribute):
    """Of an OTLP attribute."""
    ((kind, found),) = attribute["value"].items()
    if kind == "intValue":
        return int(found)
    if kind == "arrayValue":
        return [value({"value": one}) for one in found.get("values", [])]
    return found


class Cluster:
    """`tandem up` with a collector."""

    def __init__(self, work, name, collector, flags):
        self.state, self.out = work / f"{name}.json", work / f"{name}.txt"
        logs = work / f"{name}-logs"
        command = [TANDEM, "--state", self.state, "up", "--log-dir", logs, "--otlp-endpoint", collector, *flags]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 180
        while not (ready := re.search(r"^ready .*http=(\S+)", self.out.read_text(), re.M)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                fail(f"no cluster:\n{self.out.read_text()[-3000:]}")
            time.sleep(0.1)
        self.host = ready[1].removeprefix("http://")
        self.model = get_json(f"http://{self.host}/v1/models")["data"][0]["id"]

    def pid(self, node):
        return dict(get_state(self.state)["processes"])[node]

    def ask(self, prompt, max_tokens, stop_after=None):
        """Streams an answer; gives the trace id, the status, and the tokens that came. Leaves after `stop_after` of them."""
        connection = http.client.HTTPConnection(self.host, timeout=120)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        if stop_after == 0:
            time.sleep(0.05)
            connection.close()
            return Answer(None, 0, 0)
        response = connection.getresponse()
        parent = response.getheader("traceparent") or ""
        tokens = 0
        for line in response:
            tokens += line.startswith(b"data: {") and b'"choices":[{' in line
            if stop_after is not None and tokens >= stop_after:
                break
        connection.close()
        return Answer(parent.split("-")[1] if parent else None, response.status, tokens)

    def trace(self, trace_id):
        """As the router itself shows it."""
        return get_json(f"http://{self.host}/api/traces/{trace_id}")["spans"]

    def recent(self):
        """The ids of all traces that the router holds."""
        return [trace["traceID"] for trace in get_json(f"http://{self.host}/api/traces?limit=100")["data"]]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


Answer = collections.namedtuple("Answer", "trace status tokens")


def get_state(path):
    return json.loads(path.read_text())


class Asked:
    """Requests in threads of their own."""

    def __init__(self):
        self.answers, self.threads, self.lock = [], [], threading.Lock()

    def start(self, cluster, *args, **kwargs):
        def run():
            answer = cluster.ask(*args, **kwargs)
            with self.lock:
                self.answers.append(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def join(self):
        for thread in self.threads:
            thread.join(180)
        return self.answers


def prompt(number, sentences=8):
    """No two begin alike: what is cached does not travel."""
    return f"Chapter {number * 7919}. " + STORY * sentences


def handed_off(cluster):
    """Forty of the fifty. What became of each is looked up in its trace."""
    for number in range(12):
        answer = cluster.ask(prompt(number), 6 if number % 2 else 2)
        assert answer.status == 200, answer
    for number in range(10):
        # Before the first token, behind it, amid the answer.
        cluster.ask(prompt(20 + number), 60, stop_after=[0, 1, 4][number % 3])
    until(lambda: idle(cluster), "cancelled requests end")
    running, refused = Asked(), Asked()
    # One after the other: the router takes no more at once than its nodes have room for.
    for number in range(SLOTS):
        running.start(cluster, prompt(40 + number, 2), LONG_ANSWER)
        until(lambda: busy(cluster) > number, "a slot is taken")
    running.start(cluster, prompt(40 + SLOTS, 2), LONG_ANSWER)
    for number in range(9):
        refused.start(cluster, prompt(60 + number), 4)
    statuses = collections.Counter(answer.status for answer in refused.join())
    os.kill(cluster.pid("decode-1"), signal.SIGKILL)
    answers = running.join()
    assert all(answer.status == 200 and answer.tokens >= LONG_ANSWER for answer in answers), answers
    assert statuses[429], statuses


def local(cluster):
    """The last ten."""
    for number in range(10):
        answer = cluster.ask(prompt(80 + number, 3), 5 if number % 2 else 1)
        assert answer.status == 200, answer


def gauge(cluster, name):
    with urllib.request.urlopen(f"http://{cluster.host}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def busy(cluster):
    return gauge(cluster, "tandem_inflight_requests")


def idle(cluster):
    return busy(cluster) == 0


def until(holds, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def check(cluster, jaeger, trace_id):
    """One trace: in Jaeger as in the router, without a warning, tiled, with its critical path. Gives what it was."""
    shown, spans = {}, {}

    def arrived():
        nonlocal shown, spans
        shown = {span["span_id"] for span in cluster.trace(trace_id)}
        spans = jaeger.trace(trace_id)
        return shown == set(spans)

    deadline = time.monotonic() + ARRIVED
    while not arrived():
        if time.monotonic() > deadline:
            fail(f"trace {trace_id}: Jaeger has {len(spans)} spans, the router {len(shown)}:\n{told(spans)}")
        time.sleep(0.2)
    warned = [(span["service"], span["name"], span["warnings"]) for span in spans.values() if span["warnings"]]
    assert not warned, f"trace {trace_id}: {warned}\n{told(spans)}"
    roots = [span for span in spans.values() if span["parent"] not in spans]
    assert len(roots) == 1, f"trace {trace_id}: {len(roots)} roots\n{told(spans)}"
    root = roots[0]
    for span in spans.values():
        if span is root or span["name"] == "kv.transfer":
            continue
        parent = spans[span["parent"]]
        inside = parent["start"] <= span["start"] <= span["end"] <= parent["end"]
        assert inside, f"trace {trace_id}: {span['name']} is not within {parent['name']}\n{told(spans)}"
    phases = [span for span in spans.values() if span["parent"] == root["id"] and span["service"] == "tandem-router"]
    phases.sort(key=lambda span: span["start"])
    names = [span["name"] for span in phases]
    assert names == [name for name in PHASES if name in names], names
    gaps = [after["start"] - before["end"] for before, after in zip(phases, phases[1:])]
    assert set(gaps) <= {1000}, f"trace {trace_id}: {gaps} ns between the phases\n{told(spans)}"
    if phases:
        assert phases[0]["start"] == root["start"] and root["end"] - phases[-1]["end"] <= 1_000_000, told(spans)
    path = critical_path(list(spans.values()))
    through = set(path)
    for span_id in path:
        while span_id in spans:
            through.add(span_id)
            span_id = spans[span_id]["parent"]
    missed = [span["name"] for span in phases if span["id"] not in through and span["end"] > span["start"]]
    assert not missed, f"trace {trace_id}: the critical path misses {missed}\n{told(spans)}"
    return root, spans


def kind(root):
    """What the request was."""
    attributes = root["attributes"]
    if attributes.get("tandem.refused"):
        return "refused"
    if attributes.get("tandem.replans"):
        return "re-planned"
    if attributes.get("error.type"):
        return "cancelled" if attributes["error.type"] == "Cancelled" else "failed"
    return "local" if attributes.get("tandem.route.plan") == "local" else "hand-off"


def told(spans):
    """For people."""
    start = min((span["start"] for span in spans.values()), default=0)
    lines = [
        f"  {(span['start'] - start) / 1e3:10.1f} {(span['end'] - start) / 1e3:10.1f} us  {span['service']:15} "
        f"{span['name']:16} {span['id']} in {span['parent']} {span['error']} {span['warnings'] or ''}"
        for span in sorted(spans.values(), key=lambda span: span["start"])
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    built = subprocess.run([ROOT / "deploy/tools/build.sh", "jaeger"], check=False)
    if built.returncode:
        sys.exit(built.returncode)
    program = pathlib.Path(os.environ.get("TANDEM_CACHE", pathlib.Path.home() / ".cache/tandem")) / "tools/jaeger"
    if not TANDEM.exists():
        print(f"test-jaeger: no {TANDEM}: `make build` makes it")
        sys.exit(2)
    work = pathlib.Path(tempfile.mkdtemp(prefix="tandem-jaeger."))
    jaeger = Jaeger(program, work)
    print(f"test-jaeger: Jaeger at {jaeger.url}, logs in {work}")
    common = ["--prefill", "2", "--decode", "2", "--router-arg=--max-inflight", f"--router-arg={SLOTS}"]
    common += ["--router-arg=--max-queue", "--router-arg=1"]
    if args.simulated:
        step = "--simulated-step-us=10000"
        common += ["--simulated", f"--prefill-arg={step}", f"--decode-arg={step}"]
    counts, seen = collections.Counter(), 0
    try:
        for name, ask in [("never", handed_off), ("always", local)]:
            cluster = Cluster(work, name, jaeger.otlp, [*common, f"--router-arg=--local-prefill={name}"])
            try:
                ask(cluster)
                until(lambda: idle(cluster), "all requests end")
                # The nodes' last spans are on their way.
                time.sleep(1.5)
                for trace_id in cluster.recent():
                    root, spans = check(cluster, jaeger, trace_id)
                    counts[kind(root)] += 1
                    seen += len(spans)
            finally:
                cluster.end()
        print(f"test-jaeger: {sum(counts.values())} requests, {seen} spans: {dict(counts)}")
        assert sum(counts.values()) == 50, counts
        for wanted in ["hand-off", "local", "re-planned", "refused", "cancelled"]:
            assert counts[wanted], f"no request was {wanted}: {counts}"
        services = sorted(service for service in get_json(f"{jaeger.url}/api/services")["data"] if "tandem" in service)
        assert services == ["tandem-decode", "tandem-prefill", "tandem-router"], services
        print("test-jaeger: every span found, no warning, phases tile, critical paths run through them")
        if args.keep:
            print(f"test-jaeger: {jaeger.url} stays until Ctrl-C")
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        jaeger.end()
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
