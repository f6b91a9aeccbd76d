#!/usr/bin/env python3
"""Disaggregated and aggregated serving on the same cores: `make bench-disagg`.

Three clusters, one at a time under load, in turn: *aggregated* (one node computes prompts and answers), *disaggregated* (every
prompt on the prefill node) and *auto* (the router decides for each prompt, the default). Cores are shared out as `tandem up`
does: the nodes split them and lend them to each other, or, with --no-pin, every node has all. Prints a Markdown table of
medians and draws them.
"""
import argparse
import contextlib
import pathlib
import statistics

from cluster import Cluster
from target_dir import TARGET_DIR

MODES = {
    "aggregated": ["--aggregated", "--decode", "1"],
    "disaggregated": ["--prefill", "1", "--decode", "1", "--router-arg=--local-prefill=never"],
    "auto": ["--prefill", "1", "--decode", "1"],
}
# What a figure is called, its key, its digits, and whether more is better.
FIGURES = [
    ("good answers/s", "request_goodput", 2, True),
    ("tokens/s", "output_throughput", 1, True),
    ("TTFT p50 ms", "median_ttft_ms", 0, False),
    ("TTFT p99 ms", "p99_ttft_ms", 0, False),
    ("TPOT p50 ms", "median_tpot_ms", 1, False),
    ("ITL p99 ms", "p99_itl_ms", 1, False),
]


def measure(args, cluster, row):
    """One interval of a row, the numbers of vLLM's names."""
    letter, load = row.split("@")
    flag = "--concurrency" if load.startswith("c") else "--rate"
    limits = ["--seconds", str(args.seconds), "--ttft-ms", str(args.ttft_ms), "--tpot-ms", str(args.tpot_ms)]
    numbers = cluster.bench("--row", letter, flag, load.lstrip("c"), *limits)
    if numbers["failed"]:
        raise SystemExit(f"{numbers['failed']} requests of row {row} failed")
    numbers["local"] = sum(point["server"]["local"] for point in numbers["tandem"]["points"])
    return numbers


def median(intervals, key):
    values = [interval[key] for interval in intervals if interval.get(key) is not None]
    return statistics.median(values) if values else float("nan")


def table(args, measured):
    print(f"\n| row | serving | {' | '.join(name for name, *_ in FIGURES)} | local |")
    print("|---|---|" + "---|" * (len(FIGURES) + 1))
    for row in args.rows.split(","):
        for mode in MODES:
            intervals = measured[row, mode]
            cells = [f"{median(intervals, key):.{digits}f}" for _, key, digits, _ in FIGURES]
            local = sum(interval["local"] for interval in intervals) / sum(interval["completed"] for interval in intervals)
            print(f"| {row} | {mode} | {' | '.join(cells)} | {100 * local:.0f} % |")


def losses(args, measured):
    """What `auto` loses to the better of the two: of each interval of a round, so that a slow minute counts for all."""
    print("\n| row | auto ÷ the better of both: good answers/s | tokens/s |")
    print("|---|---|---|")
    for row in args.rows.split(","):
        cells = []
        for key in ("request_goodput", "output_throughput"):
            turns = zip(*(measured[row, mode] for mode in MODES), strict=True)
            ratios = [turn[2][key] / max(turn[0][key], turn[1][key]) for turn in turns if max(turn[0][key], turn[1][key]) > 0]
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else "–")
        print(f"| {row} | {' | '.join(cells)} |")


def plot(args, measured):
    """Bars of every figure, one panel each, a group of three a row; SVG."""
    colours = {"aggregated": "#8a8f98", "disaggregated": "#3b7dd8", "auto": "#d9822b"}
    rows, width, height, gap = args.rows.split(","), 420, 150, 56
    parts = []
    for number, (name, key, digits, more) in enumerate(FIGURES):
        left, top = 20 + number % 2 * (width + 40), 50 + number // 2 * (height + gap)
        most = max((median(measured[row, mode], key) for row in rows for mode in MODES), default=0) or 1
        parts.append(f'<text x="{left}" y="{top - 8}" class="t">{name}, {"more" if more else "less"} is better</text>')
        for group, row in enumerate(rows):
            at, each = left + group * width / len(rows), width / len(rows) / 3.6
            for place, mode in enumerate(MODES):
                value = median(measured[row, mode], key)
                tall = height * value / most if value == value else 0
                x, y = at + place * each, top + height - tall
                parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{each - 1:.1f}" height="{tall:.1f}" fill="{colours[mode]}"/>')
                parts.append(f'<text x="{x + each / 2:.1f}" y="{y - 2:.1f}" class="v">{value:.{digits}f}</text>')
            parts.append(f'<text x="{at + 1.5 * each:.1f}" y="{top + height + 13}" class="r">{row}</text>')
    for place, (mode, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{20 + place * 130}" y="10" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{38 + place * 130}" y="20" class="t">{mode}</text>')
    tall = 50 + (len(FIGURES) + 1) // 2 * (height + gap)
    style = "text{font-family:sans-serif;fill:#555}.t{font-size:12px}.v{font-size:8px;text-anchor:middle}.r{font-size:11px;text-anchor:middle}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width + 80} {tall}"><style>{style}</style>{"".join(parts)}</svg>\n'
    pathlib.Path(args.svg).write_text(svg)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default=str(TARGET_DIR / "release/tandem"))
    parser.add_argument("--rows", default="A@c4,B@c2,C@c4,D@2,E@c4",
                        help="rows of `tandem bench`, each at so many requests at once (c4) or a second (2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--no-pin", action="store_true", help="every node has a thread on each core")
    parser.add_argument("--ttft-ms", type=float, default=2000)
    parser.add_argument("--tpot-ms", type=float, default=50)
    parser.add_argument("--svg", help="writes the figures as bars into this file")
    args = parser.parse_args()

    measured = {(row, mode): [] for row in args.rows.split(",") for mode in MODES}
    common = ["--no-pin"] if args.no_pin else []
    common += [f"--router-arg=--ttft-objective-ms={args.ttft_ms:g}", f"--router-arg=--tpot-objective-ms={args.tpot_ms:g}"]
    for turn in range(args.rounds):
        # Clusters of its own: processes keep what memory they got, and a virtual machine's is not all equally fast.
        with contextlib.ExitStack() as stack:
            clusters = {mode: stack.enter_context(Cluster(args.tandem, [*flags, *common])) for mode, flags in MODES.items()}
            for row in args.rows.split(","):
                # Another one begins each time.
                for place in range(len(MODES)):
                    mode = list(MODES)[(turn + place) % len(MODES)]
                    print(f"round {turn + 1}: row {row}, {mode}", flush=True)
                    measured[row, mode].append(measure(args, clusters[mode], row))
    table(args, measured)
    losses(args, measured)
    if args.svg:
        plot(args, measured)


if __name__ == "__main__":
    main()
