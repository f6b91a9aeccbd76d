"""Reads aiperf's report: every request was answered, none failed, and the latencies are there.

Usage: aiperf_check.py DIRECTORY REQUESTS
"""

import json
import pathlib
import sys


def main(directory: str, requests: str) -> None:
    reports = sorted(pathlib.Path(directory).rglob("profile_export_aiperf.json"))
    assert reports, f"no profile_export_aiperf.json below {directory}"
    report = json.loads(reports[-1].read_text())
    errors = report.get("error_summary") or []
    assert not errors, errors
    answered = report["request_count"]["avg"]
    assert answered == float(requests), f"{answered} of {requests} requests were answered"
    for metric in ("time_to_first_token", "inter_token_latency", "output_sequence_length"):
        values = report[metric]
        print(f"aiperf: {metric}: avg {values['avg']:.2f} {values.get('unit', '')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
