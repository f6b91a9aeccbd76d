#!/usr/bin/env python3
"""`make bench-serving`: `tandem up` beside llama.cpp's server, on the same cores, with the same model.

Both run at the same time and only one is under load; `tandem bench` asks both over OpenAI's completions API, in turns.
The first column is `tandem up` without flags. llama-server has the flags that were its best: a slot for each of 8
requests, 8-bit KV with flash attention, a thread for each core. Prints a Markdown table of medians over the rounds.
"""
import argparse
import contextlib
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import fair
from cluster import Cluster, bench
from target_dir import TARGET_DIR

CACHE = pathlib.Path(os.environ.get("TANDEM_CACHE", pathlib.Path.home() / ".cache/tandem"))
OURS = {
    "tandem up": [],
    "cores not lent": ["--no-lend"],
    "not pinned": ["--no-pin"],
    "aggregated": ["--aggregated", "--decode", "1"],
}
# What a figure is called, its digits, and how to find it in the numbers of `tandem bench`.
FIGURES = [
    ("output tok/s", 0, lambda n: n["output_throughput"]),
    ("prompt tok/s", 0, lambda n: n["total_input_tokens"] / n["duration"]),
    ("TTFT p50 ms", 0, lambda n: n["median_ttft_ms"]),
    ("TPOT p50 ms", 1, lambda n: n["median_tpot_ms"]),
    ("ITL p99 ms", 0, lambda n: n["p99_itl_ms"]),
]


class LlamaServer:
    """llama-server until the block is left."""

    def __init__(self, program, model, threads, tandem):
        # It says what it was built with only where it says much else, and then ends for want of a model.
        told = subprocess.run([program, "-lv", "4", "-m", os.devnull], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        fair.require_amx(told.stdout)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.tandem, self.http = tandem, f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile("w+", prefix="llama-server-", suffix=".log")
        command = [program, "-m", model, "--port", str(port), "-t", str(threads), "-np", "8", "-c", str(8 * 4096),
                   "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "--no-webui"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def said(self):
        return pathlib.Path(self.log.name).read_text()

    def wait(self):
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.http}/health", timeout=2).close()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        sys.exit(f"llama-server does not serve:\n{self.said()[-2000:]}")

    def bench(self, *flags, api):
        return bench(self.tandem, "--url", self.http, "--api", api, *flags)

    def __enter__(self):
        try:
            self.wait()
        except SystemExit:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=30)
        self.log.close()


def median(values):
    """Of those that there are: within a short interval llama-server may finish no long prompt."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default=str(TARGET_DIR / "release/tandem"))
    parser.add_argument("--llama", default=str(CACHE / "peers/llama-server-build/bin/llama-server"))
    parser.add_argument("--model", default=str(CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--rows", default="A@1,A@8,B@1,B@8", help="rows of `tandem bench` at so many requests at once")
    parser.add_argument("--ours", default=",".join(OURS), help="which of our clusters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))

    measured = {}
    for turn in range(args.rounds):
        # Processes of its own: they keep what memory they got, and a virtual machine's is not all equally fast.
        with contextlib.ExitStack() as stack:
            servers = {name: stack.enter_context(Cluster(args.tandem, OURS[name])) for name in args.ours.split(",")}
            servers["llama-server"] = stack.enter_context(LlamaServer(args.llama, args.model, threads, args.tandem))
            for row in args.rows.split(","):
                letter, together = row.split("@")
                for place in range(len(servers)):
                    name = list(servers)[(turn + place) % len(servers)]
                    print(f"round {turn + 1}: row {row}, {name}", file=sys.stderr, flush=True)
                    load = ["--row", letter, "--concurrency", together, "--seconds", str(args.seconds)]
                    numbers = servers[name].bench(*load, api="completions")
                    if numbers["failed"]:
                        sys.exit(f"{numbers['failed']} requests of row {row} failed at {name}")
                    measured.setdefault((row, name), []).append(numbers)

    names = [*args.ours.split(","), "llama-server"]
    print(f"\n| row | figure | {' | '.join(names)} | {names[0]} ÷ llama-server |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for row in args.rows.split(","):
        for figure, digits, of in FIGURES:
            medians = {name: median(of(n) for n in measured[row, name]) for name in names}
            cells = " | ".join("–" if value is None else f"{value:.{digits}f}" for value in medians.values())
            ours, theirs = next(iter(medians.values())), medians["llama-server"]
            ratio = f"{ours / theirs:.2f}" if ours is not None and theirs else "–"
            print(f"| {row.replace('@', ' × ')} | {figure} | {cells} | {ratio} |")


if __name__ == "__main__":
    main()
