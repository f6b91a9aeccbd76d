"""aiperf's numbers beside those of `tandem bench`, of one shape and rate on one cluster.

Usage: aiperf_beside.py --prompt-tokens TURN  prints the prompt tokens of aiperf's requests, as the server counted them, in the mean
       aiperf_beside.py DIRECTORY             prints the table: means over its turns, which are directories with both reports

Prompts are as long by the server's own count (`usage.prompt_tokens`): `tandem bench --input` counts a chat's template in, aiperf's `--isl` does not.
What aiperf calls inter token latency is our TPOT. aiperf counts from the moment at which it sent a request; `tandem bench` from the moment at which it
was to be sent: the generator's own lag, which its report tells, is in its first-token times.

On few cores the tools slow down what they measure, and not alike. So what the router measured itself in each of the two runs is read from its metrics:
whether the tools agree is whether they are as far from that.
"""

import json
import pathlib
import statistics
import sys

TTFT = "TTFT, mean ms"
TPOT = "inter-token latency, mean ms"
ROUTERS = "router's own "


def report_of(directory: str | pathlib.Path) -> dict:
    reports = sorted(pathlib.Path(directory).rglob("profile_export_aiperf.json"))
    assert reports, f"no profile_export_aiperf.json below {directory}"
    return json.loads(reports[-1].read_text())


def rows(aiperf: dict, bench: dict) -> list[tuple[str, float, float]]:
    completed = max(bench["completed"], 1)
    return [
        (TTFT, aiperf["time_to_first_token"]["avg"], bench["mean_ttft_ms"]),
        (TPOT, aiperf["inter_token_latency"]["avg"], bench["mean_tpot_ms"]),
        ("prompt tokens, mean", aiperf["input_sequence_length"]["avg"], bench["total_input_tokens"] / completed),
        ("output tokens, mean", aiperf["output_sequence_length"]["avg"], bench["total_output_tokens"] / completed),
        ("requests answered", aiperf["request_count"]["avg"], bench["completed"]),
    ]


def of_router(turn: pathlib.Path) -> list[tuple[str, float, float]]:
    """The same two latencies of the two runs, as the router counted them."""

    def total(run: str, when: str, name: str) -> float:
        lines = (turn / f"{run}.{when}").read_text().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def mean_ms(run: str, histogram: str) -> float:
        seconds, count = (total(run, "after", histogram + part) - total(run, "before", histogram + part) for part in ("_sum", "_count"))
        return seconds / count * 1e3

    histograms = {TTFT: "tandem_ttft_seconds", TPOT: "vllm:request_time_per_output_token_seconds"}
    return [(ROUTERS + name, mean_ms("run_aiperf", of), mean_ms("run_bench", of)) for name, of in histograms.items()]


def difference(aiperf: float, bench: float) -> str:
    return f"{(bench / aiperf - 1) * 100:+.1f} %" if aiperf else "–"


def table(directory: pathlib.Path) -> None:
    turns = sorted(path for path in directory.iterdir() if path.is_dir())
    ours = [json.loads((turn / "tandem.json").read_text()) for turn in turns]
    measured = [rows(report_of(turn), own) + of_router(turn) for turn, own in zip(turns, ours)]
    print(f"{f'{directory.name}, {len(turns)} turn(s)':<46}{'aiperf':>10}{'tandem':>10}{'difference':>12}")
    means = {}
    for of_each_turn in zip(*measured):
        name = of_each_turn[0][0]
        theirs, own = means[name] = [statistics.fmean(row[column] for row in of_each_turn) for column in (1, 2)]
        print(f"{name:<46}{theirs:>10.2f}{own:>10.2f}{difference(theirs, own):>12}")
    for name in (TTFT, TPOT):
        theirs, own = (tool / router for tool, router in zip(means[name], means[ROUTERS + name]))
        print(f"{f'{name}: by the router':<46}{theirs:>10.3f}{own:>10.3f}{difference(theirs, own):>12}")
    lag = max(own["tandem"]["run"]["own_lag_p99_ms"] for own in ours)
    print(f"(tandem bench itself sent up to {lag:.2f} ms late at p99; that is in its TTFT and not in aiperf's)")


def main(first: str, turn: str | None = None) -> None:
    if first == "--prompt-tokens":
        assert turn, __doc__
        print(max(1, round(report_of(turn)["input_sequence_length"]["avg"])))
    else:
        table(pathlib.Path(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
