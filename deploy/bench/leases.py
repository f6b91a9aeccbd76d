#!/usr/bin/env python3
"""How many sequences a decode node of little memory runs, and what comes of it: one build beside another.

    deploy/bench/leases.py BEFORE/tandem AFTER/tandem

Row C's prompts with `max_tokens` far above what answers need: they end with their first paragraph
(about 80 tokens, few above 400), and 1,900 are allowed. Clusters of the builds in turn, one under
load at a time; a node's running sequences are asked twice a second. Prints a Markdown table of
medians over the rounds.
"""
import argparse
import json
import statistics
import threading
import urllib.request

from cluster import Cluster

# Greedy answers of a small model go round in circles and never end; a paragraph is what these answers have.
PARAGRAPH = json.dumps({"temperature": 0.8, "stop": ["\n\n"]})


class Running:
    """Sequences in the decode node's batch, twice a second, until the block is left."""

    def __init__(self, cluster):
        self.url, self.seen, self.over = f"{cluster.http}/debug/cluster", [], threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self):
        while not self.over.wait(0.5):
            nodes = json.load(urllib.request.urlopen(self.url, timeout=10))["nodes"]
            self.seen += [node["running"] for node in nodes if node["role"] == "decode"]

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def measure(args, cluster):
    load = ["--input", "16..64", "--output", str(args.output), "--stop-at-eos", "--extra-body", PARAGRAPH, "--concurrency", str(args.concurrency)]
    limits = ["--seconds", str(args.seconds), "--warmup", "15", "--drain", "90", "--ttft-ms", str(args.ttft_ms), "--tpot-ms", str(args.tpot_ms)]
    with Running(cluster) as running:
        numbers = cluster.bench(*load, *limits, api="chat")
    numbers["running"] = statistics.mean(running.seen)
    return numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", nargs="+", help="programs, each beside its own nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--output", type=int, default=1900)
    parser.add_argument("--ttft-ms", type=float, default=1000)
    parser.add_argument("--tpot-ms", type=float, default=150)
    parser.add_argument("--flags", default="--kv-blocks 512", help="flags of `tandem up`")
    args = parser.parse_args()
    found = {program: [] for program in args.tandem}
    for _ in range(args.rounds):
        for program in args.tandem:
            with Cluster(program, args.flags.split()) as cluster:
                found[program].append(measure(args, cluster))
    figures = [("running, mean", "running", 1), ("answers/s", "request_throughput", 2), ("good answers/s", "request_goodput", 2),
               ("tokens/s", "output_throughput", 0), ("TTFT p50 ms", "median_ttft_ms", 0), ("TPOT p50 ms", "median_tpot_ms", 1),
               ("failed", "failed", 0)]
    print(f"\n| build | {' | '.join(name for name, *_ in figures)} |\n|---|{'---|' * len(figures)}")
    for program, rounds in found.items():
        cells = [f"{statistics.median(numbers[key] or 0 for numbers in rounds):.{digits}f}" for _, key, digits in figures]
        print(f"| {program} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
