"""openai-python, unmodified: lists models, completes, chats, streams, and gets its own exception for a wrong request.

Usage: openai_client.py http://host:port
"""

import sys

import openai


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    models = client.models.list().data
    assert len(models) == 1, models
    model = models[0].id
    print("models:", model)

    completion = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)
    print("completion:", completion.choices[0].text)
    assert "Paris" in completion.choices[0].text
    assert completion.usage.completion_tokens <= 8

    messages = [{"role": "user", "content": "Name three colours."}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, chunks, usage, reason = "", 0, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            chunks += 1
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    print("chat:", text)
    assert chunks > 1 and text == whole.choices[0].message.content, (text, whole)
    assert reason == whole.choices[0].finish_reason in ("stop", "length")
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens

    for wrong in ({"max_tokens": -1}, {"temperature": -1.0}):
        try:
            client.chat.completions.create(model=model, messages=messages, **wrong)
        except openai.BadRequestError as error:
            print("refused:", error.message)
        else:
            raise AssertionError(f"{wrong} was accepted")

    # A client that leaves in the middle.
    with client.chat.completions.create(model=model, messages=messages, max_tokens=200, stream=True) as stream:
        next(iter(stream))
    print("openai-python: passed")


if __name__ == "__main__":
    main(sys.argv[1])
