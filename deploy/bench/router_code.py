#!/usr/bin/env python3
"""How much code a request takes in the router: counts that no other load of the machine moves.

    deploy/bench/router_code.py PROGRAMS [PROGRAMS ...]

Folders with a router and nodes, as router_turns.py takes them. The router runs in valgrind's callgrind, which counts from the
sixtieth request on. *Instructions* are those of user space. *Lines* are the cache lines (64 bytes) in which they lie: of one that
every second request takes, half. A router whose requests are seldom meets each line anew: of two builds that took the same CPU time
in turns, one had 1,850 lines fewer and 31 thousand instructions more.
"""
import collections
import contextlib
import pathlib
import re
import signal
import statistics
import subprocess

from router_turns import LOADS, Side, parser_of

WARM_UP, REQUESTS = 60, 40
LINE_BYTES = 64
# Of an object (a program or a library), an address and how often it was executed.
COST = re.compile(r"0x([0-9a-f]+) \d+ (\d+)")


class Counted(Side):
    """Its router runs in callgrind."""

    def start(self, stack, folder, name, words):
        if name == "router":
            self.counts = pathlib.Path(folder) / "counts"
            flags = ["--instr-atstart=no", "--dump-instr=yes", "--compress-pos=no", f"--callgrind-out-file={self.counts}"]
            # Slower than its nodes expect it.
            words = ["valgrind", "--tool=callgrind", *flags, *words, "--lease-ms", "60000"]
        return Side.start(stack, folder, name, words)

    def count(self, state):
        """From here on, or not."""
        control = ["callgrind_control", "-i", state, str(self.router.process.pid)]
        subprocess.run(control, check=True, capture_output=True)


def instructions(counts):
    """How often each was executed, by object and address."""
    executed, of, is_call = collections.Counter(), "", False
    for line in counts.read_text().splitlines():
        if found := COST.match(line):
            # What a call costs stands beside it, and once more where it is spent.
            if not is_call:
                executed[of, int(found[1], 16)] += int(found[2])
            is_call = False
        elif line.startswith("ob="):
            of = line.split()[0]
        else:
            is_call = line.startswith("calls=")
    return executed


def measured(programs, api, args):
    """Of a request: instructions, and lines."""
    with contextlib.ExitStack() as stack:
        side = Counted(stack, programs, args.tandem, args.model)
        how = ["--output", str(LOADS["calm"][0]), "--concurrency", "1", "--requests"]
        side.bench(api, *how, str(WARM_UP))
        side.count("on")
        side.bench(api, *how, str(REQUESTS))
        side.count("off")
        side.router.end(signal.SIGTERM)
        executed = instructions(side.counts)
    lines = collections.Counter()
    for (of, address), times in executed.items():
        line = of, address // LINE_BYTES
        lines[line] = max(lines[line], min(1, times / REQUESTS))
    return executed.total() / REQUESTS, lines.total()


def main():
    parser = parser_of(__doc__)
    parser.add_argument("programs", type=pathlib.Path, nargs="+")
    parser.set_defaults(rounds=1)
    args = parser.parse_args()
    print("| programs, API | instructions | lines |\n|---|---:|---:|")
    for api in ("gRPC", "HTTP"):
        for programs in args.programs:
            rounds = [measured(programs, api, args) for _ in range(args.rounds)]
            count, lines = map(statistics.median, zip(*rounds))
            print(f"| {programs}, {api} | {count:,.0f} | {lines:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
