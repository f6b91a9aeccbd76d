#!/usr/bin/env python3
"""Two builds of the router in turns, under the same load: what a change costs or gives.

    deploy/bench/router_turns.py BEFORE AFTER

BEFORE and AFTER are folders with tandem-router, tandem-prefill-node and tandem-decode-node: of a worktree of another
commit, built there, and of this one. Each router has nodes of its own commit, simulated. The load is `tandem bench` of
this build in all turns, as what it sends changes from commit to commit, too.

Each round runs every row with both, the order changing from round to round. CPU time is that of the router's process,
with the threads that have ended. The last column is the median of the rounds' ratios (after ÷ before), with the
quartiles. The same folder twice shows what is noise. Rows: `short` has 200 requests a second of 8 tokens, `long` 64
streams of 400 tokens at a time. Before it each router has answered more short requests than it keeps traces of: until
then its memory grows, and that costs what no later request does.
"""
import argparse
import pathlib
import signal
import statistics
import tempfile
import time

import cluster
from seen_instructions import Program
from target_dir import TARGET_DIR

# Of an answer, how it is asked for, and how many there are.
LOADS = {
    "short": (8, ["--rate", "200"], 1600),
    "long": (400, ["--concurrency", "64"], 256),
}
WARM_UP = ["--output", "8", "--concurrency", "8", "--requests", "2000"]


def cpu_us(pid):
    """Of the whole process so far: by its clock of CPU time, whose number clock_getcpuclockid(3) makes of the pid."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e3


def quartiles(ratios):
    """The lower one, the median and the upper one: within what was seen, and of one value that one thrice."""
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def turn(programs, tandem, model, api, load):
    """CPU time of the router for a request, in microseconds, and the median TTFT in milliseconds."""
    tokens, how, requests = LOADS[load]
    with tempfile.TemporaryDirectory(prefix="tandem-turns-") as folder:
        started = []
        try:
            flags = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", model, "--local-prefill", "never"]
            started.append(router := Program(folder, "router", [programs / "tandem-router", *flags]))
            http, grpc = (router.said(api + r"=(?:http://)?(\S+)") for api in ("http", "grpc"))
            for role in ("prefill", "decode"):
                words = ["--listen", "127.0.0.1:0", "--router", f"http://{grpc}", "--model", model]
                words += ["--simulated", "--simulated-step-us", "1000"]
                started.append(Program(folder, role, [programs / f"tandem-{role}-node", *words]))
                started[-1].said(r"(joined the router)")
            whom = ["--url", f"grpc://{grpc}", "--http", f"http://{http}"] if api == "gRPC" else ["--url", f"http://{http}"]
            whom += ["--input", "96", "--warmup", "0"]
            cluster.bench(tandem, *whom, *WARM_UP)
            before = cpu_us(router.process.pid)
            measured = cluster.bench(tandem, *whom, "--output", str(tokens), *how, "--requests", str(requests))
            return (cpu_us(router.process.pid) - before) / requests, measured["median_ttft_ms"]
        finally:
            for program in started:
                program.end(signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    default = pathlib.Path.home() / ".cache/tandem/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=pathlib.Path, default=default, help="of the router")
    parser.add_argument("--tandem", type=pathlib.Path, default=TARGET_DIR / "release/tandem", help="whose bench is the load")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="gRPC short,HTTP short,gRPC long,HTTP long")
    args = parser.parse_args()
    print("| API, load | CPU time a request before, µs | after | after ÷ before (quartiles) | TTFT p50 before, ms | after |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in args.rows.split(","):
        api, load = row.split()
        # By place: both may be one folder.
        builds, turns = (args.before, args.after), ([], [])
        for number in range(args.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                turns[which].append(turn(builds[which], args.tandem, args.model, api, load))
        cpu, ttft = ([[measured[what] for measured in each] for each in turns] for what in (0, 1))
        low, ratio, high = quartiles([after / before for before, after in zip(*cpu)])
        before, after, ttft_before, ttft_after = (statistics.median(each) for each in (*cpu, *ttft))
        ratios = f"**{ratio:.3f}** ({low:.3f} to {high:.3f})"
        print(f"| {row} | {before:,.0f} | {after:,.0f} | {ratios} | {ttft_before:.2f} | {ttft_after:.2f} |", flush=True)


if __name__ == "__main__":
    main()
