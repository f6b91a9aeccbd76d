#!/usr/bin/env python3
"""The load by which the shipped router is optimized: load.py TANDEM, beside which lie the programs of the cluster.

All that clients ask for often: the three APIs, single requests at random moments and many streams at once, prompts short and long,
cached and new, two nodes of each role. The nodes are simulated: the router does not know. As many requests on every machine, so
that a token counts for as many of them: what the compiler takes for hot must not depend on how fast the machine is.
"""
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "bench"))
from cluster import Cluster  # noqa: E402

LOADS = [
    # Single requests: nearly all of what the router does once a request.
    ("--input", "32..256", "--output", "2..32", "--rate", "100", "--requests", "800"),
    # Streams: what it does once a token.
    ("--input", "64..512", "--output", "256", "--concurrency", "32", "--requests", "320"),
    # A common prefix, long prompts.
    ("--input", "1024..2048", "--output", "4..16", "--prefix-reuse", "0.8", "--rate", "20", "--requests", "140"),
]


def main():
    step = [f"--{role}-arg=--simulated-step-us=1000" for role in ("prefill", "decode")]
    flags = ["--simulated", "--prefill", "2", "--decode", "2", "--no-pin", "--threads", "1", "--kv-blocks", "16384", *step]
    with Cluster(sys.argv[1], flags) as cluster:
        for api in ("grpc", "completions", "chat"):
            for load in LOADS:
                print(f"load: {api} {' '.join(load)}", flush=True)
                cluster.bench(*load, "--warmup", "0", "--threads", "1", api=api)


main()
