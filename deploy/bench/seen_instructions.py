#!/usr/bin/env python3
"""What traces and logs cost the router, in instructions: a count that no other load of the machine moves.

The router runs in valgrind's callgrind, once "unseen" (no log, no collector) and once "seen" (it logs at info and sends
spans, lines and metrics to a collector), beside simulated nodes. Two numbers of requests each; their difference has no
start-up in it. Programs: those of `make build`, and `cargo build --release --locked -p tandem-cluster-tests --example
bench_router`, which is the collector. Prints a Markdown table.
"""
import argparse
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import cluster
from target_dir import TARGET_DIR

# Of an answer; how many are under way; microseconds of a node's step, which are for the long ones as many times more as
# valgrind is slower, so that tokens of several answers meet in the router as they do without it; and how often.
SHORT = {"tokens": 8, "at_once": 1, "step_us": 1_000, "requests": (50, 150)}
LONG = {"tokens": 400, "at_once": 64, "step_us": 50_000, "requests": (64, 192)}


class Program:
    """A program, and what it says."""

    def __init__(self, folder, name, words, **environment):
        self.log = pathlib.Path(folder) / name
        with self.log.open("w") as out:
            self.process = subprocess.Popen(list(map(str, words)), stdout=out, stderr=out, env=os.environ | environment)

    def said(self, pattern, seconds=120):
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log.read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.log.name} does not say {pattern!r}: {self.log.read_text()[-600:]}")
            time.sleep(0.2)
        return found.group(1)

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(120)


def instructions(programs, model, api, seen, load, requests):
    """Of the router's whole life with so many requests."""
    with tempfile.TemporaryDirectory(prefix="tandem-seen-") as folder:
        beside = []
        try:
            flags = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", model, "--local-prefill", "never"]
            if seen:
                beside.append(Program(folder, "collector", [programs / "examples/bench_router", "--collector"]))
                flags += ["--otlp-endpoint", "http://" + beside[-1].said(r"collector=(\S+)")]
            valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counts"]
            router = Program(folder, "router", [*valgrind, programs / "tandem-router", *flags], RUST_LOG="info" if seen else "off")
            http, grpc = router.said(r"http=(\S+)"), router.said(r"grpc=(\S+)")
            http, grpc = (url if "://" in url else "http://" + url for url in (http, grpc))
            for role in ("prefill", "decode"):
                words = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--router", grpc, "--model", model]
                node = [programs / f"tandem-{role}-node", *words, "--simulated", "--simulated-step-us", load["step_us"]]
                beside.append(Program(folder, role, node))
                beside[-1].said(r"(joined the router)")
            whom = ["--url", grpc.replace("http://", "grpc://"), "--http", http] if api == "gRPC" else ["--url", http]
            asked = ["--input", 96, "--output", load["tokens"], "--concurrency", load["at_once"], "--requests", requests]
            cluster.bench(programs / "tandem", *whom, *map(str, asked), "--warmup", "0")
            # Spans and lines go out in batches.
            time.sleep(1.5)
            router.end()
            return int(router.said(r"Collected : (\d+)"))
        finally:
            for program in beside:
                program.end(signal.SIGKILL)


def of_one(programs, model, api, seen, load):
    fewer, more = load["requests"]
    counts = [instructions(programs, model, api, seen, load, requests) for requests in (fewer, more)]
    return (counts[1] - counts[0]) / (more - fewer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=TARGET_DIR / "release", help="where they are")
    cache = pathlib.Path(os.environ.get("TANDEM_CACHE", pathlib.Path.home() / ".cache/tandem"))
    parser.add_argument("--model", type=pathlib.Path, default=cache / "SmolLM2-135M-Instruct.Q4_1.gguf", help="of the router")
    arguments = parser.parse_args()
    print("| API | a request of 8 tokens, unseen | seen | more | a stream of 400 tokens, unseen | more, % of it |")
    print("|---|---:|---:|---:|---:|---:|")
    for api in ("gRPC", "HTTP"):
        unseen, seen = (of_one(arguments.programs, arguments.model, api, each, SHORT) for each in (False, True))
        stream = of_one(arguments.programs, arguments.model, api, False, LONG)
        more = seen - unseen
        cells = [f"{count:,.0f}" for count in (unseen, seen, more, stream)]
        print(f"| {api} | {' | '.join(cells)} | {100 * more / stream:.1f} |", flush=True)


if __name__ == "__main__":
    main()
