"""Output tokens a second of 16 requests at once: a `tandem up` cluster over HTTP beside mistral.rs in its own process, in
turns on the same cores. The whole answer counts, prompts included. Each peer has the weights in the form that suits it."""
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import statistics
import subprocess
import time

from cluster import Cluster

HERE = pathlib.Path(__file__).resolve().parent
REQUESTS, WORDS, MAX_TOKENS = 16, 200, 32


class Mistralrs:
    def __init__(self, cache, cores, dtype):
        model = cache / "peers/safetensors"
        python = cache / "peers/venv/bin/python"
        self.process = subprocess.Popen(["taskset", "-c", cores, python, HERE / "mistralrs_requests.py", model, dtype],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("mistral.rs ended")

    def tokens_per_s(self, prompts):
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS}) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        return answer["tokens"] / answer["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Tandem:
    """One prefill and one decode node, a thread each, as `tandem up` starts them."""

    def __init__(self, cluster):
        self.address = cluster.http.removeprefix("http://")
        self.model = self.call("GET", "/v1/models")["data"][0]["id"]

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address, timeout=300)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:300]}")
        return json.loads(text)

    def ask(self, prompt):
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS,
                "temperature": 0, "ignore_eos": True}
        return self.call("POST", "/v1/chat/completions", body)["usage"]["completion_tokens"]

    def tokens_per_s(self, prompts):
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            tokens = sum(threads.map(self.ask, prompts))
        return tokens / (time.monotonic() - begin)


def prompts(turn):
    """Different in every turn, so that no prefix cache answers."""
    words = ["river", "stone", "letter", "window", "garden", "winter", "market", "engine", "silver", "harbor"]
    return [f"Turn {turn}, story {i}. " + " ".join(words[(i * 7 + turn * 3 + k * (i + 1)) % 10] for k in range(WORDS))
            for i in range(REQUESTS)]


def compare(cache, program, cores, rounds, dtypes=("F32", "BF16")):
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(program, [], wrapper=["taskset", "-c", cores]))
        engines = {"tandem": Tandem(cluster)}
        for dtype in dtypes:
            engines[f"mistral.rs {dtype}"] = stack.enter_context(contextlib.closing(Mistralrs(cache, cores, dtype)))
        speeds = {name: [] for name in engines}
        for turn in range(rounds + 1):
            for name, engine in engines.items():
                speeds[name].append(engine.tokens_per_s(prompts(turn)))
    medians = {name: statistics.median(found[1:]) for name, found in speeds.items()}  # the first turn warms up
    print(f"\n## {REQUESTS} requests at once, {WORDS} words in, {MAX_TOKENS} tokens out (cores {cores})\n")
    print("| engine | output tokens/s | ours / it |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.1f} | {medians['tandem'] / value:.2f} |", flush=True)
    return {"requests": speeds}
