#!/usr/bin/env python3
"""Where the time to a first token goes, by the router's system calls: in, at the prefill node, and back. Root, for tracefs.

    deploy/bench/router_way.py PROGRAMS [PROGRAMS ...]

Folders with a router and nodes, as router_turns.py takes them, one after the other in each round. *In* is from a request that
was read to the prefill node's message written, *node* until its first token was read, *back* until a client has it. The load is
that script's `short`. Only requests count with no other one within 3 ms: their calls cannot be mixed up.
"""
import collections
import contextlib
import pathlib
import re
import statistics
import subprocess

from router_turns import LOADS, WARM_UP, Side, parser_of

TRACEFS = pathlib.Path("/sys/kernel/tracing")
# x86-64's numbers of read, readv, recvfrom, recvmsg; write, writev, sendto, sendmsg.
READS, WRITES = {0, 19, 45, 47}, {1, 20, 44, 46}
CALL = re.compile(r"-(\d+)\s+\[\d+\]\s+\S+\s+([\d.]+): sys_(enter|exit): NR (\d+) (?:\(([0-9a-f]+)|= (-?\d+))")
# Bytes, by which words are told apart: a request has more, a node's first token as many, its acknowledgements fewer.
REQUEST, FIRST_TOKEN = 120, 20
APART_US = 3000
Io = collections.namedtuple("Io", "begun ended reads fd count")


@contextlib.contextmanager
def traced(pid):
    """Its system calls, in a trace of its own, which leaves nothing behind."""
    trace = TRACEFS / f"instances/router-way-{pid}"
    trace.mkdir()
    try:
        threads = " ".join(task.name for task in pathlib.Path(f"/proc/{pid}/task").iterdir())
        settings = {"buffer_size_kb": "65536", "trace_clock": "mono", "set_event_pid": threads, "events/raw_syscalls/enable": "1"}
        for name, value in settings.items():
            (trace / name).write_text(value)
        yield trace
    finally:
        (trace / "events/raw_syscalls/enable").write_text("0")
        trace.rmdir()


def transfers(trace):
    """What was read and written, in microseconds, in the order of its beginning."""
    begun, seen = {}, []
    for line in (trace / "trace").read_text().splitlines():
        call = CALL.search(line)
        if call is None:
            continue
        thread, at, number = call[1], float(call[2]) * 1e6, int(call[4])
        if call[3] == "enter":
            begun[thread] = (at, number, int(call[5], 16))
            continue
        since, entered, fd = begun.pop(thread, (at, None, None))
        if entered == number and number in READS | WRITES and int(call[6]) > 0:
            seen.append(Io(since, at, number in READS, fd, int(call[6])))
    return sorted(seen)


def connections(process, node):
    """Descriptors of the process's connections to the node."""
    ss = ["ss", "--tcp", "--numeric", "--processes", "--no-header"]
    listening, connected = (
        subprocess.run([*ss, *more], check=True, capture_output=True, text=True).stdout.splitlines()
        for more in (["--listening"], [])
    )
    ports = {line.split()[3].rpartition(":")[2] for line in listening if f"pid={node.pid}," in line}
    to_it = (line for line in connected if line.split()[4].rpartition(":")[2] in ports)
    return {int(fd) for line in to_it for fd in re.findall(rf"pid={process.pid},fd=(\d+)", line)}


def ways(seen, prefill, nodes):
    """Of each request that stands alone: in, node, back, and all of it."""
    requests = [n for n, io in enumerate(seen) if io.reads and io.fd not in nodes and io.count > REQUEST]
    ends = [float("-inf"), *(seen[n].ended for n in requests), float("inf")]
    for number, n in enumerate(requests):
        request, rest = seen[n], iter(seen[n:])
        if request.ended - ends[number] < APART_US or ends[number + 2] - request.ended < APART_US:
            continue
        asked = next((io for io in rest if not io.reads and io.fd in prefill), None)
        token = next((io for io in rest if io.reads and io.fd in prefill and io.count >= FIRST_TOKEN), None)
        told = next((io for io in rest if not io.reads and io.fd == request.fd), None)
        if told and told.ended - request.ended < 2 * APART_US:
            times = [request.ended, asked.ended, token.ended, told.ended]
            yield [*(after - before for before, after in zip(times, times[1:])), times[-1] - times[0]]


def measured(programs, api, args):
    """The ways of a run's requests, with new processes."""
    with contextlib.ExitStack() as stack:
        side = Side(stack, programs, args.tandem, args.model)
        side.bench(api, *WARM_UP)
        router = side.router.process
        with traced(router.pid) as trace:
            tokens, how, requests = LOADS["short"]
            side.bench(api, "--output", str(tokens), *how, "--requests", str(2 * requests))
            prefill, decode = (connections(router, node.process) for node in side.nodes)
            return list(ways(transfers(trace), prefill, prefill | decode))


def main():
    parser = parser_of(__doc__)
    parser.add_argument("programs", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    if not (TRACEFS / "trace").exists():
        subprocess.run(["mount", "-t", "tracefs", "nodev", str(TRACEFS)], check=True)
    print("| programs, API | requests | in, µs | node, µs | back, µs | all of it, µs |")
    print("|---|---:|---:|---:|---:|---:|")
    seen = collections.defaultdict(list)
    for _ in range(args.rounds):
        for api in ("gRPC", "HTTP"):
            for programs in args.programs:
                seen[programs, api] += measured(programs, api, args)
    for (programs, api), found in seen.items():
        medians = " | ".join(f"{statistics.median(part):,.0f}" for part in zip(*found))
        print(f"| {programs}, {api} | {len(found)} | {medians} |", flush=True)


if __name__ == "__main__":
    main()
