"""Sends a request under a trace of its own and prints where its time went: every span below its parent, and the phases
that add up to the first token. Standard library only.

Usage: trace.py http://HOST:PORT "A prompt"
"""

import json
import os
import secrets
import sys
import time
import urllib.error
import urllib.request

WAIT_SECONDS = 10


def call(url: str, body: dict | None = None, headers: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    if key := os.environ.get("TANDEM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return json.load(answer)


def fetch(url: str, trace: str) -> list[dict]:
    """The spans, once the nodes' last ones have come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            spans = call(f"{url}/api/traces/{trace}")["spans"]
            if any(span["name"] == "decode" for span in spans):
                return spans
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        if time.monotonic() > deadline:
            raise SystemExit(f"no trace {trace} after {WAIT_SECONDS} s")
        time.sleep(0.1)


def draw(spans: list[dict]) -> None:
    times = {span["span_id"]: (int(span["start_unix_ns"]), int(span["end_unix_ns"])) for span in spans}
    first = min(start for start, _ in times.values())

    def below(parent: str | None, depth: int) -> None:
        children = [span for span in spans if (span.get("parent_span_id") or None) == parent]
        for span in sorted(children, key=lambda span: times[span["span_id"]]):
            start, end = ((at - first) / 1e6 for at in times[span["span_id"]])
            print(f"{'  ' * depth + span['name']:32}{start:9.1f} to {end:8.1f} ms  {span.get('instance', '')}")
            below(span["span_id"], depth + 1)

    # The client's span, which began the trace, is not among them.
    for root in [span for span in spans if span.get("parent_span_id") not in times]:
        below(root.get("parent_span_id") or None, 0)
        break


def main(url: str, prompt: str) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    model = call(f"{url}/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    body["stream_options"] = {"include_timings": True}
    answer = call(f"{url}/v1/completions", body, headers)
    print(answer["choices"][0]["text"].strip())
    timings = answer["tandem"]
    draw(fetch(url, trace))
    parts = {name: timings[f"{name}_ms"] for name in ("queue", "route", "prefill")}
    sum_of = " + ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
    print(f"{sum_of} = {sum(parts.values()):.1f} ms; first token after {timings['ttft_ms']:.1f} ms")
    if abs(sum(parts.values()) - timings["ttft_ms"]) > 0.01 * timings["ttft_ms"] + 0.1:
        raise SystemExit("the phases do not add up to the first token")


if __name__ == "__main__":
    main(*sys.argv[1:])
