"""A streamed chat with openai-python, and the milliseconds of each phase.

Usage: chat.py http://HOST:PORT "A question"
"""

import os
import sys

import openai


def main(url: str, question: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        # Tandem's own: an object `tandem` in the last chunk.
        stream_options={"include_usage": True, "include_timings": True},
    )
    timings = None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        timings = (chunk.model_extra or {}).get("tandem", timings)
    print()
    if timings is None:
        raise SystemExit("the answer has no timings: is this a Tandem router?")
    phases = ", ".join(f"{name} {timings[f'{name}_ms']:.1f}" for name in ("queue", "route", "prefill", "ttft", "tpot"))
    print(f"milliseconds: {phases}; trace {timings['trace_id']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
