"""openai-python, unmodified, over every field that the router lists. One test a function; each prints its name.

Usage: openai_features.py http://host:port
"""

import json
import sys
import urllib.error
import urllib.request
import uuid

import openai

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def fetch(method: str, url: str, body=None):
    """Status and JSON of an answer, whatever the status is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Api:
    """A client and the one model."""

    def __init__(self, url: str):
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt=PROMPT, **fields):
        return self.client.completions.create(model=self.model, prompt=prompt, **{**GREEDY, **fields})

    def chat(self, messages=MESSAGES, **fields):
        return self.client.chat.completions.create(model=self.model, messages=messages, **{**GREEDY, **fields})

    def tokenize(self, text: str):
        return fetch("POST", f"{self.url}/tokenize", {"prompt": text})[1]["tokens"]

    def refuses(self, param: str, call, **fields):
        try:
            call(**fields)
        except openai.BadRequestError as error:
            assert error.param == param and error.type == "invalid_request_error", (fields, error.body)
        else:
            raise AssertionError(f"{fields} was accepted")


def models(api: Api):
    card = api.client.models.retrieve(api.model)
    assert card.id == api.model and card.object == "model"
    try:
        api.client.models.retrieve("no-such-model")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was found")


def forms_of_a_prompt(api: Api):
    text = api.complete().choices[0].text
    tokens = api.tokenize(PROMPT)
    assert fetch("POST", f"{api.url}/detokenize", {"tokens": tokens})[1]["prompt"] == PROMPT
    assert api.complete(prompt=tokens).choices[0].text == text
    for several in ([PROMPT, PROMPT], [tokens, tokens]):
        choices = api.complete(prompt=several).choices
        assert [choice.index for choice in choices] == [0, 1] and all(choice.text == text for choice in choices)


def content_parts(api: Api):
    parts = [{"type": "text", "text": "Name three"}, {"type": "text", "text": "colours."}]
    joined = [{"role": "user", "content": "Name three\ncolours."}]
    answer = api.chat([{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == api.chat(joined).choices[0].message.content


def lengths(api: Api):
    for field in ("max_tokens", "max_completion_tokens"):
        answer = api.chat(**{"max_tokens": 12, field: 3})
        assert answer.usage.completion_tokens <= 3 and answer.choices[0].finish_reason in ("length", "stop")
    exact = api.complete(max_tokens=20, extra_body={"ignore_eos": True})
    assert exact.usage.completion_tokens == 20 and exact.choices[0].finish_reason == "length"
    least = api.complete(max_tokens=20, extra_body={"min_tokens": 10})
    assert least.usage.completion_tokens >= 10


def seeds_and_sampling(api: Api):
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "extra_body": {"top_k": 40, "min_p": 0.01}}
    assert api.complete(**sampled).choices[0].text == api.complete(**sampled).choices[0].text
    several = api.complete(**sampled, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].text == api.complete(**sampled).choices[0].text, "answer i is what seed + i gives"
    assert several.choices[1].text == api.complete(**{**sampled, "seed": 8}).choices[0].text
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "extra_body": {"repetition_penalty": 1.2}}
    assert api.complete(**penalties).choices[0].text
    first = api.tokenize(api.complete(max_tokens=1).choices[0].text)
    banned = api.complete(max_tokens=1, logit_bias={str(first[0]): -100}).choices[0].text
    assert banned != api.complete(max_tokens=1).choices[0].text


def stops(api: Api):
    text = api.complete(max_tokens=16).choices[0].text
    stop = text.strip().split()[1]
    stopped = api.complete(max_tokens=16, stop=[stop, "never"])
    assert stop not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop"
    ids = api.complete(extra_body={"return_token_ids": True}).choices[0].token_ids
    early = api.complete(extra_body={"stop_token_ids": [ids[2]], "return_token_ids": True})
    assert early.choices[0].token_ids == ids[:3] and early.choices[0].finish_reason == "stop"


def logprobs(api: Api):
    chosen = api.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in chosen)
    assert chosen[0].token == chosen[0].top_logprobs[0].token, "greedy takes the likeliest"
    answer = api.complete(logprobs=2).choices[0]
    assert len(answer.logprobs.tokens) == len(answer.logprobs.token_logprobs) == len(answer.logprobs.text_offset)
    assert "".join(answer.logprobs.tokens).startswith(answer.text)


def echo(api: Api):
    assert api.complete(echo=True).choices[0].text == PROMPT + api.complete().choices[0].text
    api.refuses("echo", api.complete, echo=True, logprobs=1)


def streams(api: Api):
    whole = api.chat(n=2, seed=3, temperature=0.8)
    texts, roles, usage = ["", ""], [0, 0], []
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in api.chat(n=2, seed=3, temperature=0.8, stream=True, stream_options=options):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [choice.message.content for choice in whole.choices] and roles == [1, 1]
    assert all(usage) and usage[-1].completion_tokens == whole.usage.completion_tokens
    plain = list(api.complete(stream=True))
    assert not any(chunk.usage for chunk in plain)
    assert "".join(choice.text for chunk in plain for choice in chunk.choices) == api.complete().choices[0].text
    echoed = "".join(c.text for chunk in api.complete(stream=True, echo=True) for c in chunk.choices)
    assert echoed.startswith(PROMPT)


def usage_and_timings(api: Api):
    long = "A word. " * 40 + str(uuid.uuid4())
    api.complete(prompt=long)
    again = api.complete(prompt=long)
    assert again.usage.prompt_tokens_details.cached_tokens > 0, again.usage
    last = list(api.complete(stream=True, stream_options={"include_timings": True}))[-1]
    timings = last.model_extra["tandem"]
    parts = timings["queue_ms"] + timings["route_ms"] + timings["prefill_ms"]
    assert abs(parts - timings["ttft_ms"]) <= 0.01 * timings["ttft_ms"] + 0.01, timings
    assert len(timings["trace_id"]) == 32
    trace = fetch("GET", f"{api.url}/api/traces/{timings['trace_id']}")[1]
    assert any(span["name"] == "queue" for span in trace["spans"]) and trace["data"][0]["traceID"] == timings["trace_id"]
    assert "tandem-router" in fetch("GET", f"{api.url}/api/v3/services")[1]["services"]


def refusals(api: Api):
    for param, fields in {
        "max_tokens": {"max_tokens": -1},
        "temperature": {"temperature": -1.0},
        "n": {"n": 1000},
        "stop": {"stop": ["a", "b", "c", "d", "e"]},
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        "response_format": {"response_format": {"type": "json_object"}},
        "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    }.items():
        api.refuses(param, api.chat, **fields)
    assert api.chat(extra_body={"unknown_field": [1]}).choices, "unknown fields are ignored"
    for method, path, status in [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)]:
        got, answer = fetch(method, api.url + path)
        error = answer["error"]
        assert got == status and {"message", "type", "param", "code"} <= error.keys()


def headers(api: Api):
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    raw = api.client.completions.with_raw_response.create(
        model=api.model, prompt=PROMPT, max_tokens=1, extra_headers={"x-request-id": "mine-1", "traceparent": parent}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().id.endswith("mine-1")
    assert raw.headers["traceparent"].split("-")[1] == parent.split("-")[1]
    assert "access-control-allow-origin" not in raw.headers, "CORS is off by default"


def leaving(api: Api):
    with api.chat(max_tokens=200, stream=True) as stream:
        next(iter(stream))
    assert api.complete(max_tokens=1).choices, "the next request is served"


TESTS = [
    models, forms_of_a_prompt, content_parts, lengths, seeds_and_sampling, stops, logprobs, echo, streams, usage_and_timings,
    refusals, headers, leaving,
]


def main(url: str) -> None:
    api = Api(url)
    for test in TESTS:
        test(api)
        print("openai-python:", test.__name__)
    print(f"openai-python: {len(TESTS)} passed")


if __name__ == "__main__":
    main(sys.argv[1])
