#!/usr/bin/env python3
"""What `--pools` gives: chats beside many long documents of the same tenant, with pools and without, in turns.

    deploy/bench/pools.py [--rounds 3]

Simulated nodes, one of each role: a step of 1 ms, and 20 µs for each token of a prompt. Documents of 6,000 tokens come in
a closed loop, 64 at a time, each answered by 16 tokens: more than the nodes can do. Beside them come 10 chats of 64 tokens
a second. Two tenants would have their fair shares without pools: here both are one tenant's. Prints a Markdown table of
medians over the rounds.
"""
import argparse
import signal
import statistics
import subprocess
import time

from cluster import Cluster
from target_dir import TARGET_DIR

COST = ["--simulated-step-us=1000", "--simulated-token-us=20"]
NODES = ["--simulated", "--no-pin", "--kv-blocks", "65536", *(f"--{role}-arg={cost}" for role in ("prefill", "decode") for cost in COST)]
WAYS = {"one for all": [], "two pools": ["--router-arg=--pools=chat=0-1023:1,document=1024-:1"]}
DOCUMENTS = ["--input", "6000", "--output", "16", "--concurrency", "64", "--requests", "100000", "--warmup", "0"]
CHATS = ["--input", "64", "--output", "16", "--rate", "10", "--warmup", "0"]
# Until the queue is as long as it gets.
UNDER_WAY = 5


def turn(tandem, flags, chats):
    """TTFT of the chats, p50 and p99 in ms, and how many were answered."""
    with Cluster(tandem, [*NODES, *flags]) as cluster:
        load = [tandem, "bench", "--url", cluster.grpc, "--http", cluster.http, *DOCUMENTS]
        documents = subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(UNDER_WAY)
            seen = cluster.bench(*CHATS, "--requests", str(chats))
        finally:
            documents.send_signal(signal.SIGKILL)
            documents.wait()
        return seen["median_ttft_ms"], seen["p99_ttft_ms"], seen["completed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default=str(TARGET_DIR / "release/tandem"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=200)
    args = parser.parse_args()
    turns = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            turns[way].append(turn(args.tandem, WAYS[way], args.chats))
    print("| pools | chats answered | TTFT of a chat p50, ms | p99, ms |\n|---|---:|---:|---:|")
    for way, measured in turns.items():
        p50, p99, answered = (statistics.median(each) for each in zip(*measured))
        print(f"| {way} | {answered:.0f} of {args.chats} | {p50:.1f} | {p99:.1f} |")


if __name__ == "__main__":
    main()
