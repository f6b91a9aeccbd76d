"""A loaded cluster and a Prometheus that scrapes it, for as long as a block of Python lasts."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))
from cluster import Cluster  # noqa: E402
from target_dir import TARGET_DIR  # noqa: E402

TANDEM = TARGET_DIR / "release" / "tandem"
# Every prompt is handed off, and there are few places: the rest waits or is refused.
PAIRS = ["--prefill", "2", "--decode", "2", "--kv-blocks", "512"]
PAIRS += [f"--router-arg={flag}" for flag in ("--local-prefill=never", "--max-inflight=6", "--max-queue=6")]
# Every prompt is computed where it is decoded.
LOCAL = ["--aggregated", "--decode", "1", "--kv-blocks", "512"]
# Some scrapes after the last event, and two evaluations of rules: an alert is pending one after it is true.
SETTLE_S = 32


def say(text):
    print(f"check: {text}", flush=True)


def targets(name, cluster):
    """What stands in targets/*.yml for this cluster, as Prometheus' file_sd reads it; JSON is YAML."""
    router = cluster.http.removeprefix("http://")
    lists = [{"labels": {"role": "router", "instance": f"{name}-router"}, "targets": [router]}]
    for node, line in cluster.nodes.items():
        labels = {"role": node.split("-")[0], "instance": f"{name}-{node}"}
        lists.append({"labels": labels, "targets": [line["admin"]]})
    return lists


class Prometheus:
    """The API of a running one."""

    def __init__(self, url):
        self.url = url.rstrip("/")

    def get(self, path, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            return {"error": json.load(error).get("error", str(error))}

    def has_samples(self, expr, start, end):
        """Whether the expression has a number at some moment; or what is wrong with it."""
        data = self.get("query_range", query=expr, start=start, end=end, step=5)
        if "error" in data:
            return data["error"]
        return any(value != "NaN" for series in data["result"] for _, value in series["values"])

    def has_traces(self, expr, start, end):
        """Whether an exemplar of what the expression reads leads to a trace."""
        told = self.get("query_exemplars", query=expr, start=start, end=end)
        return isinstance(told, list) and any(
            point["labels"].get("trace_id") for series in told for point in series["exemplars"]
        )

    def wait(self, seconds):
        """So long; then each target must have been scraped, whether or not it was there."""
        time.sleep(seconds)
        active = self.get("targets", state="active")["activeTargets"]
        silent = [target["labels"]["instance"] for target in active if target["health"] == "unknown"]
        if silent or not active:
            raise SystemExit(f"check: Prometheus has not scraped {', '.join(silent) or 'anybody'}")


@contextlib.contextmanager
def prometheus(programs, clusters):
    """The shipped configuration, with these clusters as its targets."""
    with tempfile.TemporaryDirectory(prefix="tandem-prometheus-") as directory:
        work = pathlib.Path(directory)
        shutil.copytree(HERE / "prometheus", work / "config")
        lists = [entry for name, cluster in clusters.items() for entry in targets(name, cluster)]
        (work / "config" / "targets" / "tandem.yml").write_text(json.dumps(lists))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = (work / "log.txt").open("w")
        process = subprocess.Popen(
            [
                f"{programs}/prometheus",
                f"--config.file={work}/config/prometheus.yml",
                f"--storage.tsdb.path={work}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            for _ in range(100):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{server.url}/-/ready", timeout=5).close()
                    break
                if process.poll() is not None:
                    break
                time.sleep(0.2)
            else:
                raise SystemExit("check: Prometheus is not ready")
            if process.poll() is not None:
                raise SystemExit(f"check: Prometheus ended:\n{(work / 'log.txt').read_text()}")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)
            log.close()


def ask(cluster, *flags):
    """A load whose numbers do not matter; some of it may be refused."""
    command = [
        TANDEM,
        "bench",
        "--url",
        cluster.grpc,
        "--http",
        cluster.http,
        "--warmup",
        "0",
        "--threads",
        "1",
        *flags,
    ]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def load(pairs, local):
    """Hand-offs with shared prefixes, local prompts, a queue that refuses, a killed node."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        say("hand-offs, and prompts computed where they are decoded")
        both = [
            pool.submit(
                ask,
                pairs,
                "--input",
                "64..256",
                "--output",
                "24",
                "--prefix-reuse",
                "0.5",
                "--concurrency",
                "3",
                "--seconds",
                "10",
            ),
            pool.submit(ask, local, "--input", "48", "--output", "24", "--concurrency", "1", "--seconds", "20"),
        ]
        concurrent.futures.wait(both)
        say("more than there is room for")
        ask(pairs, "--input", "64", "--output", "16", "--concurrency", "24", "--seconds", "20")
        say("a decode node is killed under load")
        running = pool.submit(ask, pairs, "--input", "64", "--output", "64", "--concurrency", "4", "--seconds", "20")
        time.sleep(8)
        os.kill(int(pairs.nodes["decode-1"]["pid"]), signal.SIGKILL)
        running.result()
