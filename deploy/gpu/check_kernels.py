#!/usr/bin/env python3
"""Compiles every CUDA kernel of the engine for each architecture, by nvcc and by NVRTC. No GPU needed.

nvcc runs with every warning an error. The table has, for each kernel, what ptxas says of it: registers, static shared
memory, bytes of the stack. A kernel that spills registers fails the check. NVRTC then compiles the same files as a node
does at its first start: alone, with the headers beside them and no others.

  check_kernels.py --toolchain DIR [--kernels DIR] [--out DIR] [--json FILE]

--out keeps the cubins, as NAME.sm_90a.cubin. Exits 1 when a file does not compile or a kernel spills.
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ARCHITECTURES = ["sm_80", "sm_90a"]
# What both compilers are asked for; the engine asks NVRTC for the same (engine/cuda/src/compile.rs).
OPTIONS = ["-std=c++17"]

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(.*)")
SHARED = re.compile(r"(\d+) bytes smem")


def main():
    parser = argparse.ArgumentParser(description="Compiles every CUDA kernel by nvcc and NVRTC")
    parser.add_argument("--toolchain", type=pathlib.Path, required=True, help="folder of bin/nvcc and lib/libnvrtc.so.13")
    parser.add_argument("--kernels", type=pathlib.Path, default=ROOT / "engine/cuda/kernels")
    parser.add_argument("--out", type=pathlib.Path, help="folder to keep the cubins in")
    parser.add_argument("--json", type=pathlib.Path, help="file for the table")
    args = parser.parse_args()

    sources = sorted(args.kernels.glob("*.cu"))
    if not sources:
        sys.exit(f"cuda-check: no kernels in {args.kernels}")
    jobs = [(source, architecture) for source in sources for architecture in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or pathlib.Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = list(pool.map(lambda job: by_nvcc(args.toolchain, *job, out), jobs))
    failures = [failure for _, failure in compiled if failure]
    rows = [row for kernels, _ in compiled for row in kernels]
    print_table(rows)
    failures += [
        f"{row['kernel']} ({row['file']}, {row['architecture']}) spills {row['spill_bytes']} bytes"
        for row in rows
        if row["spill_bytes"]
    ]

    nvrtc = Nvrtc(args.toolchain / "lib")
    headers = {header.name: header.read_bytes() for header in sorted(args.kernels.glob("*.cuh"))}
    for source, architecture in jobs:
        image, log = nvrtc.compile(source, headers, architecture)
        print(f"NVRTC {nvrtc.version}  {source.name:24} {architecture:8} {len(image) if image else 'failed':>9}")
        if image is None or "warning" in log:
            failures.append(f"NVRTC, {source.name} for {architecture}:\n{log}")

    if args.json:
        args.json.write_text(json.dumps({"nvrtc": nvrtc.version, "kernels": rows}, indent=1) + "\n")
    for failure in failures:
        print(f"cuda-check: {failure}", file=sys.stderr)
    print(f"cuda-check: {len(rows)} kernels of {len(sources)} files: {'ok' if not failures else 'FAILED'}")
    sys.exit(1 if failures else 0)


def by_nvcc(toolchain, source, architecture, out):
    """Rows of the table, and what went wrong or None."""
    cubin = out / f"{source.stem}.{architecture}.cubin"
    command = [toolchain / "bin/nvcc", *OPTIONS, "-O3", f"-arch={architecture}", "-cubin", "-Werror=all-warnings"]
    command += ["-Xptxas=-v", "-o", cubin, source]
    run = subprocess.run(command, capture_output=True, text=True)
    said = run.stdout + run.stderr
    if run.returncode:
        return [], f"nvcc, {source.name} for {architecture}:\n{said}"
    rows = list(read_ptxas(said, source.name))
    return rows, None if rows else f"nvcc found no kernel in {source.name}"


def read_ptxas(said, file):
    """What `ptxas -v` printed, by kernel."""
    row = None
    for line in said.splitlines():
        if entry := ENTRY.search(line):
            row = {"file": file, "kernel": entry[1], "architecture": entry[2], "stack_bytes": 0, "spill_bytes": 0}
        elif row and (spills := SPILLS.search(line)):
            row["stack_bytes"] = int(spills[1])
            row["spill_bytes"] = int(spills[2]) + int(spills[3])
        elif row and (used := USED.search(line)):
            shared = SHARED.search(used[2])
            yield row | {"registers": int(used[1]), "shared_bytes": int(shared[1]) if shared else 0}
            row = None


def print_table(rows):
    columns = ["file", "kernel", "architecture", "registers", "shared_bytes", "stack_bytes", "spill_bytes"]
    widths = [max([len(column)] + [len(str(row[column])) for row in rows]) for column in columns]
    for row in [dict(zip(columns, columns)), *rows]:
        cells = [str(row[column]) for column in columns]
        text = [cell.ljust(width) if at < 3 else cell.rjust(width) for at, (cell, width) in enumerate(zip(cells, widths))]
        print("  ".join(text).rstrip())


class Nvrtc:
    """The run-time compiler, as far as this check needs it."""

    def __init__(self, folder):
        # Its second half, which it would look for along the loader's paths.
        for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(folder / "libnvrtc.so.13")
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.must(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def must(self, status):
        if status:
            raise RuntimeError(f"NVRTC: {self.library.nvrtcGetErrorString(status).decode()}")

    def compile(self, source, headers, architecture):
        """The image, None where it does not compile; and the log."""
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        options = [option.encode() for option in [*OPTIONS, f"-arch={architecture}"]]
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self.must(self.library.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), texts, names))
        try:
            status = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            log = self.bytes_of(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            return (None if status else self.bytes_of(program, "CUBIN")), log
        finally:
            self.must(self.library.nvrtcDestroyProgram(ctypes.byref(program)))

    def bytes_of(self, program, what):
        size = ctypes.c_size_t()
        self.must(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.must(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw


if __name__ == "__main__":
    main()
