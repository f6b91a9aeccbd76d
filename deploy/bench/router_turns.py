#!/usr/bin/env python3
"""Two builds of the router in turns, under the same load: what a change costs or gives.

    deploy/bench/router_turns.py BEFORE AFTER

BEFORE and AFTER are folders with tandem-router, tandem-prefill-node and tandem-decode-node: of a worktree of another
commit, built there, and of this one. Each router has nodes of its own commit, simulated. The load is `tandem bench` of
this build in all turns, as what it sends changes from commit to commit, too.

Both clusters run beside each other, and only one has load at a time: turns of some seconds, as on a machine with
neighbours only what is close in time is slowed alike. The order changes from turn to turn. CPU time is that of the
router's process, with the threads that have ended. Ratios (after ÷ before) and differences are medians of the
rounds, with the quartiles; a round's own is the median of its turns. Each round has new processes, and two of one
program differ by some percent, why is not known: rounds count, not turns. The same folder twice shows
what is noise. Rows: `short` has 200 requests a second of 8 tokens, `calm` 60 of them, for machines whose cores 200
keep busy, `long` 64 streams of 400 tokens at a time. Before a round each router has answered more short requests than
it keeps traces of: until then its memory grows, and that costs what no later request does.
"""
import argparse
import contextlib
import pathlib
import signal
import statistics
import tempfile
import time

import cluster
from seen_instructions import Program
from target_dir import TARGET_DIR

# Of an answer, how it is asked for, and how many there are in a turn.
LOADS = {
    "short": (8, ["--rate", "200"], 400),
    "calm": (8, ["--rate", "60"], 180),
    "long": (400, ["--concurrency", "64"], 128),
}
WARM_UP = ["--output", "8", "--concurrency", "8", "--requests", "2000"]


def cpu_us(pid):
    """Of the whole process so far: by its clock of CPU time, whose number clock_getcpuclockid(3) makes of the pid."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e3


def quartiles(ratios):
    """The lower one, the median and the upper one: within what was seen, and of one value that one thrice."""
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


class Side:
    """A router with simulated nodes of its own build."""

    def __init__(self, stack, programs, tandem, model):
        self.tandem = tandem
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-turns-"))
        flags = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", model, "--local-prefill", "never"]
        self.router = self.start(stack, folder, "router", [programs / "tandem-router", *flags])
        http, grpc = (self.router.said(api + r"=(?:http://)?(\S+)") for api in ("http", "grpc"))
        self.whom = {"HTTP": ["--url", f"http://{http}"], "gRPC": ["--url", f"grpc://{grpc}", "--http", f"http://{http}"]}
        words = ["--listen", "127.0.0.1:0", "--router", f"http://{grpc}", "--model", model]
        words += ["--simulated", "--simulated-step-us", "1000"]
        roles = ("prefill", "decode")
        self.nodes = [self.start(stack, folder, role, [programs / f"tandem-{role}-node", *words]) for role in roles]
        for node in self.nodes:
            node.said(r"(joined the router)")

    @staticmethod
    def start(stack, folder, name, words):
        program = Program(folder, name, words)
        stack.callback(program.end, signal.SIGKILL)
        return program

    def bench(self, api, *how):
        return cluster.bench(self.tandem, *self.whom[api], "--input", "96", "--warmup", "0", *how)

    def turn(self, api, load):
        """CPU time of the router for a request, in microseconds, and the median TTFT in milliseconds."""
        tokens, how, requests = LOADS[load]
        before = cpu_us(self.router.process.pid)
        measured = self.bench(api, "--output", str(tokens), *how, "--requests", str(requests))
        return (cpu_us(self.router.process.pid) - before) / requests, measured["median_ttft_ms"]


def turns(args, api, load, round_number):
    """What each turn measured of each build: of a round, with new processes."""
    with contextlib.ExitStack() as stack:
        # By place: both may be one folder.
        programs = (args.before, args.after)
        order = (0, 1) if round_number % 2 == 0 else (1, 0)
        sides = {which: Side(stack, programs[which], args.tandem, args.model) for which in order}
        for side in sides.values():
            side.bench(api, *WARM_UP)
        measured = ([], [])
        for number in range(args.turns):
            for which in order if number % 2 == 0 else reversed(order):
                measured[which].append(sides[which].turn(api, load))
        return measured


def of_rounds(rounds, what, compared):
    """Quartiles of the rounds: of a round the median of what its turns compare."""
    pairs = ([(before[what], after[what]) for before, after in zip(*measured)] for measured in rounds)
    return quartiles([statistics.median(compared(before, after) for before, after in turns) for turns in pairs])


def parser_of(description):
    """With the flags that a load on a Side needs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path.home() / ".cache/tandem/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=pathlib.Path, default=default, help="of the router")
    parser.add_argument("--tandem", type=pathlib.Path, default=TARGET_DIR / "release/tandem", help="whose bench is the load")
    parser.add_argument("--rounds", type=int, default=8)
    return parser


def main():
    parser = parser_of(__doc__)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--turns", type=int, default=3, help="of each build in a round")
    parser.add_argument("--rows", default="gRPC short,HTTP short,gRPC long,HTTP long")
    args = parser.parse_args()
    print("| API, load | CPU time a request before, µs | after | after ÷ before | TTFT p50 before, ms | after | later by, µs |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in args.rows.split(","):
        api, load = row.split()
        rounds = [turns(args, api, load, number) for number in range(args.rounds)]
        sides = [[turn for measured in rounds for turn in measured[which]] for which in (0, 1)]
        cpu, ttft = ([[turn[what] for turn in each] for each in sides] for what in (0, 1))
        low, ratio, high = of_rounds(rounds, 0, lambda before, after: after / before)
        sooner, later, latest = of_rounds(rounds, 1, lambda before, after: 1e3 * (after - before))
        before, after, ttft_before, ttft_after = (statistics.median(each) for each in (*cpu, *ttft))
        ratios = f"**{ratio:.3f}** ({low:.3f} to {high:.3f})"
        ttfts = f"{ttft_before:.2f} | {ttft_after:.2f} | **{later:.0f}** ({sooner:.0f} to {latest:.0f})"
        print(f"| {row} | {before:,.0f} | {after:,.0f} | {ratios} | {ttfts} |", flush=True)


if __name__ == "__main__":
    main()
