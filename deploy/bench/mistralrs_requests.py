"""Runs in the environment that has PyPI's mistralrs: loads MODEL_DIR, then for each line of standard input, a list of
prompts and a number of tokens as JSON, answers all prompts at once and prints {"tokens": …, "seconds": …}."""
import json
import sys
import threading
import time

from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which


def main(model_dir, dtype):
    runner = Runner(which=Which.Plain(model_id=model_dir, dtype=getattr(ModelDType, dtype)), prefix_cache_n=0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.monotonic()
        # A stream is the only call that does not lock the runner until its answer is there.
        streams = [runner.send_chat_completion_request(request(prompt, job["max_tokens"])) for prompt in job["prompts"]]
        counts = [0] * len(streams)
        threads = [threading.Thread(target=count, args=(stream, counts, i)) for i, stream in enumerate(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps({"tokens": sum(counts), "seconds": time.monotonic() - begin}), flush=True)


def request(prompt, max_tokens):
    return ChatCompletionRequest(model="default", messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens,
                                 temperature=0.0, ignore_eos=True, stream=True)


def count(stream, counts, i):
    for chunk in stream:
        counts[i] = chunk.usage.completion_tokens if chunk.usage else counts[i] + 1


if __name__ == "__main__":
    main(*sys.argv[1:])
