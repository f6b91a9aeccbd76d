"""One slice of a trace, replayed by several clients at once, and their records as those of one run.

Each client is a `tandem bench` of its own with its part of the requests: every third one of three. All have the same contents
(--salt), so that what one asked is in the nodes' caches for the others.
"""
import json
import pathlib
import random
import subprocess
import tempfile

# Requests before this, ms, are there to give all parts one beginning, and are left out.
BEGIN_MS = 1000


def slice_of(trace, first_s, requests, seed=0):
    """Lines of Mooncake's format from this second on, each at a time of its own within its tick, in order."""
    lines = [json.loads(line) for line in pathlib.Path(trace).read_text().splitlines() if line.strip()]
    lines.sort(key=lambda line: line["timestamp"])
    start = lines[0]["timestamp"]
    stamps = sorted({line["timestamp"] for line in lines})
    tick = min((b - a for a, b in zip(stamps, stamps[1:])), default=0)
    moments = random.Random(seed)
    for line in lines:
        line["timestamp"] += moments.uniform(0, tick) - start
    lines.sort(key=lambda line: line["timestamp"])
    chosen = [line for line in lines if line["timestamp"] >= first_s * 1e3][:requests]
    if not chosen:
        raise SystemExit(f"{trace}: no request from second {first_s} on")
    shift = BEGIN_MS - first_s * 1e3
    return [line | {"timestamp": line["timestamp"] + shift} for line in chosen]


def write_parts(lines, parts, directory):
    """A file for each of the clients; which request is whose is decided by its place alone."""
    files = []
    for part in range(parts):
        file = pathlib.Path(directory) / f"part-{part}.jsonl"
        beginning = lines[0] | {"timestamp": 0}
        file.write_text("".join(json.dumps(line) + "\n" for line in [beginning, *lines[part::parts]]))
        files.append(file)
    return files


def joined(records, into):
    """The records of several runs that began at the same time as those of one interval."""
    info, interval, all_records = None, None, []
    for file in records:
        for line in map(json.loads, pathlib.Path(file).read_text().splitlines()):
            if "record" in line:
                all_records.append(line)
            elif "interval" in line:
                interval = max(interval or line, line, key=lambda one: one["interval"]["seconds"])
            else:
                info = line
    into.write_text("".join(json.dumps(line) + "\n" for line in [info, interval, *all_records]))


def replay(tandem, routers, lines, clients, how):
    """The numbers of the JSON that `tandem bench` writes of all clients together; client N asks router N, around."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as directory:
        directory = pathlib.Path(directory)
        salt, running = str(random.getrandbits(32)), []
        records = [directory / f"records-{client}.jsonl" for client in range(clients)]
        for client, file in enumerate(write_parts(lines, clients, directory)):
            http, grpc = routers[client % len(routers)]
            command = [tandem, "bench", "--url", grpc, "--http", http, "--trace", file, "--salt", salt, "--threads", "1",
                       "--trace-from", str(BEGIN_MS / 1e3), "--trace-requests", str(len(lines)), "--records", records[client], *how]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for process in running:
            if process.wait() != 0:
                raise SystemExit(f"a client ended with {process.returncode}")
        whole, out = directory / "whole.jsonl", directory / "whole.json"
        joined(records, whole)
        subprocess.run([tandem, "bench", "report", whole, "--json", out], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())
