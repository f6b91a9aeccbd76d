"""A `tandem up` cluster for as long as a block of Python lasts."""
import pathlib
import signal
import subprocess
import tempfile


class Cluster:
    """`tandem up` with these flags, until the block is left; its addresses for `tandem bench --url … --http …`."""

    def __init__(self, tandem, flags):
        self.directory = tempfile.TemporaryDirectory(prefix="tandem-bench-")
        state = pathlib.Path(self.directory.name) / "state.json"
        command = [tandem, "--state", str(state), "up", "--log-dir", self.directory.name, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ready = next((line for line in self.process.stdout if line.startswith("ready ")), None)
        if ready is None:
            raise SystemExit(f"{' '.join(command)} ended: see what it said above")
        urls = dict(word.split("=", 1) for word in ready.split()[1:])
        self.http, self.grpc = urls["http"], urls["grpc"].replace("http://", "grpc://")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)
        self.directory.cleanup()
