#!/usr/bin/env python3
"""The steps of check.sh, each within the time that is left: facts, tests, bounds, two nodes on one card, rows, hand-offs. A
step that fails is a line in the report, and the next one runs all the same. Exits 1 when a test failed or tokens differ."""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

# Rows of the 8B shape in bf16, the bound that each is held against, and the aim.
ROWS = {
    "decode1x1024": ("bytes", 0.80),
    "decode32x1024": ("bytes", 0.75),
    "decode128x1024": ("bytes", 0.75),
    "prefill8192": ("flops", 0.60),
    "checksum256": ("copy", 0.50),
}
HANDOFF_LAYERS = 8
GOLDEN_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Llama-3.1-8B: weights a token reads (all but the embedding), bytes of KV and products of a token, by layer and beside.
LAYER_WEIGHTS = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
HEAD_WEIGHTS = 4096 * 128256
LAYER_KV_BYTES = 2 * 1024 * 2


class Check:
    def __init__(self, here, out, seconds, layers):
        self.here, self.out, self.layers = here, out, layers
        self.tiny = here / "source/engine/tests/families/data/llama"
        # Models are written where it is fastest, and gone afterwards: in memory where it has room.
        memory = pathlib.Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 40 << 30
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="tandem-check-", dir=memory if roomy else self.out))
        self.until = time.monotonic() + seconds
        self.report = {"layers": layers, "steps": {}}
        self.failed = []

    def left(self, most):
        return max(1.0, min(most, self.until - time.monotonic()))

    def run(self, words, most, **more):
        """Exit code and output, which goes into the log as well; -9 when the time was over."""
        words = [str(word) for word in words]
        print(f"$ {' '.join(words)}", flush=True)
        # A group of its own, so that what it started ends with it.
        try:
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                     start_new_session=True, **more)
        except FileNotFoundError as error:
            print(error, flush=True)
            return 127, str(error)
        try:
            said, _ = child.communicate(timeout=self.left(most))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            said += "\n(the time was over)"
        print(said[-4000:], flush=True)
        return child.returncode, said

    def facts(self):
        code, said = self.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit",
                               "--format=csv,noheader"], 30)
        self.report["card"] = said.strip() if code == 0 else None
        self.run([self.here / "programs/tandem", "doctor", "--device", "cuda", "--model", self.tiny,
                  "--ucx-lib-dir", self.here / "ucx"], 60)

    def tests(self):
        """Every packed test program on the real driver."""
        results = {}
        source = self.here / "source"
        built_in = pathlib.Path((source / "built-in").read_text().strip())
        if not built_in.exists():
            built_in.parent.mkdir(parents=True, exist_ok=True)
            built_in.symlink_to(source)
        cache = pathlib.Path(os.environ.get("TANDEM_CACHE") or pathlib.Path.home() / ".cache/tandem")
        golden = {"TANDEM_GPU_GOLDEN": "14,64"} if (cache / GOLDEN_MODEL).is_file() else {}
        environment = os.environ | golden | {"TANDEM_TEST_UCX_CUDA": str(self.here / "ucx"), "TANDEM_REQUIRE_UCX_CUDA": "1"}
        for program in sorted((self.here / "programs/deps").iterdir()):
            code, said = self.run([program, "--test-threads", "1"], 180, env=environment)
            sums = re.findall(r"^test result: .*?(\d+) passed; (\d+) failed", said, re.MULTILINE)
            passed, failed = (sum(int(one[at]) for one in sums) for at in (0, 1))
            results[program.name] = {"exit": code, "passed": passed, "failed": failed}
            if code != 0 or not sums:
                self.failed.append(f"tests of {program.name}")
        self.report["tests"] = results

    def bounds(self):
        """What the card gives to a copy and to a product, by PyTorch."""
        code, said = self.run([sys.executable, "-c", TORCH], 90)
        line = said.strip().splitlines()[-1] if said.strip() else ""
        self.report["bounds"] = json.loads(line) if code == 0 and line.startswith("{") else None

    def checkpoint(self, layers):
        """A model of the 8B shape, or None."""
        path = self.scratch / f"shape-8b-{layers}"
        if not path.exists():
            code, _ = self.run([sys.executable, self.here / "big_checkpoints.py", "llama-3.1-8b", "safetensors", path,
                                "--layers", layers], 150)
            if code != 0:
                return None
        return path

    def rows(self):
        model, rows = self.checkpoint(self.layers), {}
        if model:
            _, said = self.run([self.here / "programs/bench_cuda", "--model", model, "--rows", ",".join(ROWS)], 200)
            for line in said.splitlines():
                if line.startswith('{"row":'):
                    row = json.loads(line)
                    rows[row["row"]] = row | self.beside(row)
        self.report["rows"] = rows

    def handoff(self):
        """Hand-offs of prompts between two processes on the card, beside a copy within it."""
        # The weights are there four times: two nodes that push while they compute, two that push afterwards.
        layers = min(HANDOFF_LAYERS, self.layers)
        model = self.checkpoint(layers)
        if not model:
            self.failed.append("bench_handoff: no model")
            return
        # Behind a folder, as cargo has it: it looks for the nodes one above.
        bench = self.here / "programs/examples/bench_handoff"
        flags = ("--device cuda:0 --block-size 64 --max-num-batched-tokens 2048 --ucx-profile shm "
                 f"--ucx-lib-dir {self.here / 'ucx'}")
        code, said = self.run([bench, "--model", model, "--links", "ucx,tcp", "--prompts", "2048,8000", "--rounds", "7",
                               "--kv-blocks", "512", "--node-args", flags], 150)
        table = [line for line in said.splitlines() if line.startswith("|")]
        self.report["handoff"] = {"layers": layers, "table": table}
        if code != 0:
            self.failed.append("bench_handoff")

    def beside(self, row):
        """The least milliseconds by the measured bounds, and what part of them the row reaches."""
        bounds, kind = self.report.get("bounds"), ROWS.get(row["row"], (None, None))[0]
        if not bounds or not kind:
            return {}
        weights = self.layers * LAYER_WEIGHTS + HEAD_WEIGHTS
        # A copy reads and writes each byte.
        read_gb_per_s = 2 * bounds["copy_gb_per_s"]
        if kind == "bytes":
            batch, context = map(int, re.findall(r"\d+", row["row"]))
            read = 2 * weights + batch * context * self.layers * LAYER_KV_BYTES
            least = read / read_gb_per_s / 1e6
        elif kind == "flops":
            tokens = int(re.findall(r"\d+", row["row"])[0])
            attention = 2 * 2 * self.layers * 4096 * tokens * tokens / 2
            least = (2 * tokens * self.layers * LAYER_WEIGHTS + attention) / bounds["product_tflop_per_s"] / 1e9
        else:
            least = (256 << 20) / read_gb_per_s / 1e6
        return {"least_ms": least, "part": least / row["ms"], "aim": ROWS[row["row"]][1]}

    def pair(self):
        """Two nodes on the one card answer as one node does, whichever way KV takes."""
        ucx = ["--ucx-lib-dir", self.here / "ucx"]
        ways = {
            "one": ["--aggregated", "--decode", "1"],
            "tcp": ["--router-arg=--local-prefill=never", "--transport", "tcp"],
            "ucx": ["--router-arg=--local-prefill=never", "--transport", "ucx", *ucx],
        }
        ready, answers = {}, {}
        for name, flags in ways.items():
            ready[name], answers[name] = self.ask_cluster(name, flags)
        self.report["pair"] = {"ready": ready, "answers": answers}
        for name in ("tcp", "ucx"):
            if not answers["one"] or None in answers["one"] or answers[name] != answers["one"]:
                self.failed.append(f"two nodes over {name} and one node answer differently: {answers}")

    def ask_cluster(self, name, flags):
        """The decode node's line and the answers to a few prompts of a cluster of `tandem up`."""
        tandem, state = self.here / "programs/tandem", self.out / f"{name}.json"
        command = [tandem, "--state", state, "up", "--device", "cuda:0", "--model", self.tiny, "--kv-blocks", "256",
                   "--log-dir", self.out / f"logs-{name}", *flags]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = []
        try:
            for line in up.stdout:
                lines.append(line.rstrip())
                print(lines[-1], flush=True)
                if line.startswith("ready "):
                    break
            else:
                return None, []
            said = [self.run([tandem, "--state", state, "generate", "--max-tokens", "32", "--ignore-eos", text], 60)
                    for text in ["a", "hello world, hello card", "to be or not to be " * 8]]
            decode = [line for line in lines if "decode" in line]
            return (decode or lines)[-1], [text.splitlines()[0] if code == 0 and text else None for code, text in said]
        finally:
            up.terminate()
            up.wait(timeout=30)

    def table(self):
        lines = [f"# Tandem on {self.report.get('card') or 'an unknown card'}", "", "| tests | passed | failed |", "|---|---|---|"]
        lines += [f"| {name} | {one['passed']} | {one['failed']} |" for name, one in self.report.get("tests", {}).items()]
        lines += ["", f"8B shape, bf16, {self.layers} layers; bounds: {self.report.get('bounds')}", "",
                  "| row | ms | least ms | part | aim |", "|---|---|---|---|---|"]
        for name in ROWS:
            row = self.report.get("rows", {}).get(name)
            cells = [f"{row[key]:.3f}" if row and key in row else "–" for key in ("ms", "least_ms", "part")]
            lines.append(f"| {name} | {' | '.join(cells)} | {ROWS[name][1]} |")
        handoff = self.report.get("handoff", {})
        lines += ["", f"Hand-offs between two processes on the card, {handoff.get('layers')} layers:", "",
                  *handoff.get("table", [])]
        lines += ["", f"Two nodes on the card: {self.report.get('pair', {}).get('ready')}", ""]
        lines += [f"FAILED: {what}" for what in self.failed]
        return "\n".join(lines) + "\n"


TORCH = """
import json, time
import torch
def seconds(work, times):
    work(); torch.cuda.synchronize(); begin = time.perf_counter()
    for _ in range(times): work()
    torch.cuda.synchronize(); return (time.perf_counter() - begin) / times
source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda"); target = torch.empty_like(source)
copy = (4 << 30) / seconds(lambda: target.copy_(source), 20) / 1e9
del source, target
a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
product = 2 * 8192 ** 3 / seconds(lambda: a @ b, 20) / 1e12
print(json.dumps({"copy_gb_per_s": round(copy, 1), "product_tflop_per_s": round(product, 1), "torch": torch.__version__}))
"""


def main():
    # Called by check.sh, which gives the folder that pack.sh made as the first argument.
    parser = argparse.ArgumentParser(prog="check.sh", usage="check.sh OUT [--seconds N] [--layers N]",
                                     description="Checks Tandem on a card")
    parser.add_argument("here", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(args.here, args.out.resolve(), args.seconds, args.layers)
    for step in (check.facts, check.tests, check.bounds, check.pair, check.rows, check.handoff):
        begin = time.monotonic()
        try:
            step()
        except Exception as error:  # the other steps are worth their time
            check.failed.append(f"{step.__name__}: {error}")
        check.report["steps"][step.__name__] = round(time.monotonic() - begin, 1)
        # After each step: what is there when the time is over counts.
        check.report["failed"] = check.failed
        (check.out / "check.json").write_text(json.dumps(check.report, indent=1) + "\n")
        (check.out / "check.md").write_text(check.table())
    shutil.rmtree(check.scratch, ignore_errors=True)
    print(check.table())
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
