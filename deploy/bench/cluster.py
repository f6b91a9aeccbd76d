"""A `tandem up` cluster for as long as a block of Python lasts."""
import json
import pathlib
import signal
import subprocess
import tempfile


def bench(tandem, *flags):
    """The numbers of the JSON that `tandem bench` with these flags writes."""
    with tempfile.NamedTemporaryFile(prefix="tandem-bench-", suffix=".json") as out:
        subprocess.run([tandem, "bench", *flags, "--json", out.name], check=True, stdout=subprocess.DEVNULL)
        return json.loads(pathlib.Path(out.name).read_text())


class Cluster:
    """`tandem up` with these flags, until the block is left; `wrapper` is a command before it, such as taskset."""

    def __init__(self, tandem, flags, wrapper=()):
        self.tandem = tandem
        self.directory = tempfile.TemporaryDirectory(prefix="tandem-bench-")
        state = pathlib.Path(self.directory.name) / "state.json"
        command = [*wrapper, tandem, "--state", str(state), "up", "--log-dir", self.directory.name, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # What each node's line says of it, by name; the HTTP and gRPC addresses of the routers after the first.
        self.nodes, others, ready = {}, [], None
        for line in self.process.stdout:
            kind, *words = line.split() or [""]
            if kind == "ready":
                ready = line
                break
            if kind == "node":
                self.nodes[words[0]] = dict(word.split("=", 1) for word in words[1:])
            if kind == "router":
                others.append(self.addresses(words[1:]))
        if ready is None:
            raise SystemExit(f"{' '.join(map(str, command))} ended: see what it said above")
        self.http, self.grpc = self.addresses(ready.split()[1:])
        self.routers = [(self.http, self.grpc), *others]

    @staticmethod
    def addresses(words):
        """HTTP's and gRPC's of a router."""
        urls = dict(word.split("=", 1) for word in words)
        return urls["http"], urls["grpc"].replace("http://", "grpc://")

    def bench(self, *flags, api="grpc"):
        """What `tandem bench` with these flags measures of it: the numbers of its JSON."""
        whom = ["--url", self.grpc, "--http", self.http] if api == "grpc" else ["--url", self.http, "--api", api]
        return bench(self.tandem, *whom, *flags)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.directory.cleanup()
