"""`make bench-cpu`: our CPU executor beside other engines, in turns, on the same cores, with the same model and threads.

Prints markdown. A cell is the median over the rounds; of more rounds than `--rounds`, those count in which other
programs used the machine least (never: those that were fastest). A peer runs each row in the settings that suit it best,
which are tried once before the rounds. `roofline.py` says what a row costs at least; `llama_rows.cpp` is the peer."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import resource
import statistics
import subprocess
import sys
import time

import fair
import roofline
import serving
from target_dir import TARGET_DIR

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CACHE = pathlib.Path(os.environ.get("TANDEM_CACHE", pathlib.Path.home() / ".cache/tandem"))
MODEL = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = ["prefill512", "prefill2048", "decode1x0", "decode1x256", "decode8x256", "decode16x256", "decode32x256",
        "decode1x1024", "decode8x1024", "decode16x1024", "decode32x1024"]
TICKS = os.sysconf("SC_CLK_TCK")


class Llama:
    """llama.cpp in a process that stays for a round, in the faster of the two ways its OpenMP threads may wait for one
    another."""

    def __init__(self, driver, model, threads, cores, env):
        self.command = ["taskset", "-c", cores, driver, model, str(threads)]
        self.env = dict(env, OMP_PROC_BIND="true", OMP_NUM_THREADS=str(threads))
        self.running = {}
        for wait in ["active", "passive"] if threads > 1 else ["passive"]:
            self.start(wait)
        fair.require_amx(self.system)
        self.keep_faster_wait()

    def start(self, wait):
        # "active" is libgomp's default: spin a while, then sleep.
        env = dict(self.env, OMP_WAIT_POLICY=wait) if wait == "passive" else self.env
        process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.system = json.loads(process.stdout.readline())["system"]
        self.running[wait] = process

    def start_anew(self):
        """Each process of ours has other memory, and a virtual machine's is not all equally fast: so has each of
        llama.cpp's."""
        for wait in list(self.running):
            end(self.running.pop(wait))
            self.start(wait)

    def keep_faster_wait(self):
        tried = {w: statistics.median(self.measure("decode1x256", (w, "f16", "on", 512)) for _ in range(3)) for w in self.running}
        best = max(tried, key=tried.get)
        for wait in [w for w in self.running if w != best]:
            end(self.running.pop(wait))

    def settings(self, row, kv):
        """Everything worth trying for a row, as (wait, kv, flash, ubatch)."""
        flashes = ["on", "off"] if kv == "f16" else ["on"]  # a quantized V needs flash attention
        ubatches = [512, 2048] if row == "prefill2048" else [512]
        return [(wait, kv, flash, ubatch) for wait in self.running for flash in flashes for ubatch in ubatches]

    def measure(self, row, setting):
        wait, kv, flash, ubatch = setting
        process = self.running[wait]
        process.stdin.write(f"{row} {kv} {flash} {ubatch}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama_rows ended in row {row} {setting}")
        return json.loads(line)["tokens_per_s"]

    def best_setting(self, row, kv):
        settings = self.settings(row, kv)
        speeds = {s: max(self.measure(row, s) for _ in range(2)) if len(settings) > 1 else 0.0 for s in settings}
        return max(speeds, key=speeds.get)

    def cpu_seconds(self):
        def of(process):
            fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / TICKS
        return sum(of(process) for process in self.running.values())

    def close(self):
        for process in self.running.values():
            end(process)


def end(process):
    process.stdin.close()
    process.wait()


class Ours:
    """engine/examples/bench_cpu.rs, a process for each sample."""

    def __init__(self, driver, model, threads, cores, env, isa, *flags):
        self.command = ["taskset", "-c", cores, driver, "--model", model, "--threads", str(threads), "--json", *flags]
        self.command += ["--isa", isa] if isa else []
        self.env = env

    def lines(self, *flags):
        done = subprocess.run([*self.command, *flags], stdout=subprocess.PIPE, text=True, check=True, env=self.env)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def measure(self, row, _setting=None):
        short = row.startswith("decode") and int(row.removeprefix("decode").split("x")[0]) <= 8
        found = self.lines("--rows", row, "--samples", "3" if short else "1")
        return next(line["tokens_per_s"] for line in found if line["row"] == row)

    def ceilings(self):
        found = {line["row"]: line for line in self.lines("--rows", "decode1x0", "--samples", "5", "--ceilings")}
        return found["read"]["gb_per_s"], found["gemm"]["gflop_per_s"]


def busy_seconds():
    fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / TICKS


def observed(measure, llama):
    """(tokens/s, cores that other programs used meanwhile)."""
    def own():
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        me = time.process_time()
        return children.ru_utime + children.ru_stime + me + llama.cpu_seconds()
    begin, busy, mine = time.monotonic(), busy_seconds(), own()
    speed = measure()
    others = (busy_seconds() - busy - (own() - mine)) / max(time.monotonic() - begin, 1e-3)
    return speed, max(others, 0.0)


def quiet_median(samples, rounds):
    """Median speed of the `rounds` samples that other programs disturbed least, and how much those were disturbed."""
    chosen = sorted(samples, key=lambda sample: sample[1])[:rounds]
    return statistics.median(s for s, _ in chosen), statistics.mean(o for _, o in chosen)


def compare(options, threads):
    cores = ",".join(options.cores.split(",")[:threads])
    cpu_clock = options.clock == "cpu" and threads == 1
    env = dict(os.environ, LD_PRELOAD=str(pathlib.Path(options.llama).parent / "libcpu_clock.so")) if cpu_clock else dict(os.environ)
    ours = Ours(options.driver, options.model, threads, cores, env, options.isa)
    exact = Ours(options.driver, options.model, threads, cores, env, options.isa, "--arithmetic", "f32")
    llama = Llama(options.llama, options.model, threads, cores, env)
    gb_per_s, gflop_per_s = ours.ceilings()
    model = roofline.read_gguf(options.model)
    print(f"\n## {threads} thread{'s' if threads > 1 else ''} (cores {cores}), {'CPU' if cpu_clock else 'wall'} time\n")
    print(f"Ceilings, measured: {gb_per_s:.1f} GB/s read, {gflop_per_s:.0f} GFLOP/s GEMM. llama.cpp: {llama.system.strip(' |')}\n")
    print("| row | ours | llama.cpp f16 KV | llama.cpp q8_0 KV | ratio to its best | roofline | share | ours, f32 | its ratio "
          "| llama.cpp's settings | others' cores |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    for row in options.rows:
        settings = {kv: llama.best_setting(row, kv) for kv in ("f16", "q8_0")}
        turns = {"ours": lambda: ours.measure(row), "exact": lambda: exact.measure(row), **{kv: lambda s=s: llama.measure(row, s) for kv, s in settings.items()}}
        samples = {name: [] for name in turns}
        for _ in range(options.rounds + options.extra_rounds):
            llama.start_anew()
            for name, turn in turns.items():
                samples[name].append(observed(turn, llama))
        results.append(line(row, samples, settings, options, roofline.bound_ms(model, row, gb_per_s, gflop_per_s), threads))
    llama.close()
    return {"threads": threads, "gb_per_s": gb_per_s, "gflop_per_s": gflop_per_s, "rows": results}


def line(row, samples, settings, options, bound_ms, threads):
    cells = {name: quiet_median(found, options.rounds) for name, found in samples.items()}
    tokens = int(re.match(r"(?:prefill|decode)(\d+)", row)[1])
    bound = tokens / bound_ms * 1e3
    best = max(("f16", "q8_0"), key=lambda kv: cells[kv][0])
    speed = {name: cell[0] for name, cell in cells.items()}
    wait, _, flash, ubatch = settings[best]
    chosen = f"flash {flash}" + (f", ubatch {ubatch}" if row.startswith("prefill") else "") + (f", {wait} wait" if threads > 1 else "")
    others = statistics.mean(cell[1] for cell in cells.values())
    print(f"| {row} | {speed['ours']:.0f} | {speed['f16']:.0f} | {speed['q8_0']:.0f} | **{speed['ours'] / speed[best]:.2f}** ({best}) | "
          f"{bound:.0f} | {speed['ours'] / bound:.0%} | {speed['exact']:.0f} | {speed['exact'] / speed[best]:.2f} | {chosen} | {others:.2f} |",
          flush=True)
    return {"row": row, "median": speed, "roofline": bound, "settings": settings, "samples": samples}


def output(*command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def describe(options):
    info = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)
    flags = set((re.search(r"flags\s*: (.*)", info) or ["", ""])[1].split())
    isa = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8") if f in flags]
    commit = options.commit or output("git", "rev-parse", "--short", "HEAD") + (" and changes" if output("git", "status", "--porcelain", "-uno") else "")
    print(f"# CPU rows, tokens/s\n\n{datetime.datetime.now():%Y-%m-%d %H:%M}, {name[1] if name else platform.machine()}, {os.cpu_count()} cores, "
          f"{' '.join(isa)}; Linux {platform.release()}; commit {commit}; {pathlib.Path(options.model).name}; "
          f"llama-cpp-python 0.3.36 ({output('cc', '--version').splitlines()[0] if output('cc', '--version') else 'cc'}); load average {os.getloadavg()[0]:.1f}")
    print(f"\nMedians of {options.rounds} rounds" + (f", the quietest of {options.rounds + options.extra_rounds}" if options.extra_rounds else "")
          + "; \"others' cores\" is what other programs used meanwhile.", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description="our CPU executor beside llama.cpp")
    parser.add_argument("--model", default=str(MODEL), help="one, or several with commas between: tables of each")
    parser.add_argument("--driver", default=str(TARGET_DIR / "release/examples/bench_cpu"), help="our example")
    parser.add_argument("--llama", default=str(CACHE / "peers/llama-build/llama_rows"))
    parser.add_argument("--threads", default="1,2", help="thread counts, one table each")
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0)))))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra-rounds", type=int, default=0, help="on a shared machine: more rounds, the quietest count")
    parser.add_argument("--peers", default="", help="mistralrs: 16 requests at once beside it as well")
    parser.add_argument("--tandem", default=str(TARGET_DIR / "release/tandem"), help="the program of that part")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu, on a shared machine: with one thread its CPU time counts, for every engine (cpu_clock.c)")
    parser.add_argument("--isa", help="our kernels' instruction set, such as avx512 (default: the best here)")
    parser.add_argument("--commit", help="what to print as the commit of --driver")
    parser.add_argument("--json", help="file for every sample")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    return options


def main():
    options = arguments()
    models = options.model.split(",")
    for path in (*models, options.driver, options.llama):
        if not os.path.exists(path):
            sys.exit(f"bench_cpu: {path} is missing; `make bench-cpu` or `make bench-cpu-1b` makes it")
    available, results = len(options.cores.split(",")), []
    for options.model in models:
        describe(options)
        results += [compare(options, n) for n in map(int, options.threads.split(",")) if n <= available]
    if options.peers == "mistralrs":
        results.append(serving.compare(CACHE, options.tandem, options.cores, options.rounds))
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
