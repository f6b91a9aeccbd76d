#!/usr/bin/env python3
"""Two builds of the bench_cpu example in turns, row by row: what a change costs or gives.

    deploy/bench/in_turns.py BEFORE AFTER

BEFORE and AFTER are the example's programs: of a worktree of another commit, built there by `cargo build --release
--workspace --examples`, and of this one.

Each round runs every row with both, the order changing from round to round. The last column is the median of the
rounds' ratios of tokens per second (after ÷ before), with the quartiles: on a machine with neighbours two runs next to
each other are slowed alike, and two medians are not.
"""
import argparse
import json
import pathlib
import statistics
import subprocess

ROWS = "prefill512,prefill2048,decode1x0,decode1x256,decode8x256,decode32x256,decode1x1024,decode16x1024"


def tokens_per_s(program, row, args):
    command = [program, "--model", args.model, "--threads", str(args.threads), "--rows", row, "--samples", "2", "--json"]
    done = subprocess.run(command + args.flags.split(), check=True, capture_output=True, text=True)
    # The best of its samples: the rounds are what is repeated.
    found = json.loads(done.stdout)
    return found["tokens_per_s"] * found["ms"] / found["best_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    default = pathlib.Path.home() / ".cache/tandem/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", default=str(default))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--flags", default="", help="flags of bench_cpu, as in --flags='--arithmetic f32'")
    args = parser.parse_args()
    print(f"{args.threads} threads, {args.rounds} rounds, flags: {args.flags or 'none'}\n")
    print("| row | before, tokens/s | after, tokens/s | after ÷ before (quartiles) |")
    print("|---|---|---|---|")
    for row in args.rows.split(","):
        seen = []
        for turn in range(args.rounds):
            order = [args.before, args.after] if turn % 2 == 0 else [args.after, args.before]
            speeds = {program: tokens_per_s(program, row, args) for program in order}
            seen.append((speeds[args.before], speeds[args.after]))
        before, after = (statistics.median(column) for column in zip(*seen))
        low, ratio, high = statistics.quantiles([b / a for a, b in seen], n=4)
        print(f"| {row} | {before:.0f} | {after:.0f} | **{ratio:.3f}** ({low:.3f} to {high:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
