"""Runs the commands of README and docs: every `sh` block, page after page in the order of docs/SUMMARY.md, each page in
a shell of its own. Prints what ran, with its exit code and time, and what was left out, with the reason.

A block that cannot run everywhere says so above its fence, in a comment that readers of the page do not see:

  <!-- not run: REASON -->            the block; `not run: `CMD`: REASON` leaves out the commands that begin so
  <!-- compiles: HOW LONG -->         the block, or `CMD` of it, unless --compile
  <!-- first: SHELL -->               what the page takes for granted: a file, an address, a program that it names.
                                      Words for it are in session.sh: `stop`, `block`, `said`
  <!-- with: `OLD` = `NEW` -->        a placeholder of the page, and what stands in for it here

Programs that serve (`tandem up`, routers, nodes, Prometheus, etcd) run in the background: the next command begins when they
are ready. Like Ctrl-C, `stop` in a `first` ends those of the page, and so does the page's end; they must exit with 0.
A command with a comment that begins with `fails` must fail. `curl` fails on HTTP errors.

Usage: commands.py [--list] [--compile] [--programs DIR] [--page PAGE]… [--work DIR]

Works in a clone of this repository, whose built programs are those of DIR (default: where cargo builds). See `run.sh` beside it.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import signal
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+\.md)\)")
COMMENT = re.compile(r"<!-- (?P<kind>[a-z ]+): (?P<text>.*) -->", re.DOTALL)
ONE = re.compile(r"`(?P<command>[^`]+)`: (?P<reason>.+)")
INSTEAD = re.compile(r"`(?P<old>[^`]+)` = `(?P<new>[^`]*)`")
KINDS = ("not run", "compiles", "first", "with")
SERVERS = re.compile(r"([A-Z_]+=\S+ )*(\S+/)?(tandem up|tandem-router|tandem-\w+-node|make up|prometheus|etcd) ")
# Seconds after which a command hangs.
LIMIT = 900


@dataclasses.dataclass
class Block:
    page: str
    line: int
    lines: list
    notes: list = dataclasses.field(default_factory=list)

    def commands(self):
        """The block as commands: lines that a backslash, a quote or a word such as `for` joins are one."""
        command = ""
        for line in self.lines:
            if not command and (not line.strip() or line.lstrip().startswith("#")):
                continue
            command += line + "\n"
            parses = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True).returncode == 0
            if parses and not line.endswith("\\"):
                yield command.rstrip("\n")
                command = ""
        if command:
            raise SystemExit(f"{self.page}:{self.line}: a command without an end: {command!r}")


def pages():
    summary = (ROOT / "docs/SUMMARY.md").read_text()
    return list(dict.fromkeys((ROOT / "docs" / link).resolve() for link in LINK.findall(summary)))


def blocks(path):
    """The `sh` blocks of a page with the notes that stand directly above them."""
    page, notes, fence, block, begun = str(path.relative_to(ROOT)), [], None, None, ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        bare = line.strip()
        if fence is not None:
            if bare.startswith("```"):
                fence = None
                if block is not None:
                    yield block
                block = None
            elif block is not None:
                block.lines.append(line[indent:])
        elif bare.startswith("```"):
            fence, indent = bare[3:], len(line) - len(line.lstrip())
            block = Block(page, number, [], notes) if fence == "sh" else None
            notes = []
        elif (begun or bare).startswith("<!--") and not bare.endswith("-->"):
            begun += bare + "\n"
        elif note := COMMENT.fullmatch(begun + bare):
            begun = ""
            if note["kind"] not in KINDS:
                raise SystemExit(f"{page}:{number}: `{note['kind']}` is none of {', '.join(KINDS)}")
            notes.append((note["kind"], note["text"]))
        elif bare:
            if notes:
                raise SystemExit(f"{page}:{number}: no `sh` block below the note above")


def plan(block, compiles):
    """What to do in order: ("first" | "run" | "left", command, reason)."""
    instead = [INSTEAD.fullmatch(text) for kind, text in block.notes if kind == "with"]
    if None in instead:
        raise SystemExit(f"{block.page}:{block.line}: wrong `with`")
    reasons = [(kind, text) for kind, text in block.notes if kind == "not run" or kind == "compiles" and not compiles]
    commands = list(block.commands())

    def left(command):
        for kind, text in reasons:
            one = ONE.fullmatch(text)
            if one is None or command.startswith(one["command"]):
                reason = text if one is None else one["reason"]
                return reason if kind == "not run" else f"compiles, {reason}"
        return None

    for _, text in reasons:
        one = ONE.fullmatch(text)
        if one and not any(command.startswith(one["command"]) for command in commands):
            raise SystemExit(f"{block.page}:{block.line}: no command begins with `{one['command']}`")
    for kind, text in block.notes:
        if kind == "first":
            yield "first", text, ""
    for command in commands:
        reason = left(command)
        for one in instead:
            command = command.replace(one["old"], one["new"])
        yield ("run", command, "") if reason is None else ("left", command, reason)


class Shell:
    """One page's shell. Commands go in one by one, so that variables, folders and servers stay from block to block."""

    def __init__(self, clone, environment):
        head = pathlib.Path(__file__).with_name("session.sh")
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=clone,
            env=environment,
            start_new_session=True,
        )
        self.send(f"source {head}\n")

    def send(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def run(self, how, command):
        """Exit code and output."""
        end = "__end_of_a_command__"
        hung = threading.Timer(LIMIT, os.killpg, (self.process.pid, signal.SIGKILL))
        hung.start()
        self.send(f"{how} <<'{end}'\n{command}\n{end}\n")
        said = []
        for line in self.process.stdout:
            if line.startswith("__exit__ "):
                hung.cancel()
                return int(line.split()[1]), "".join(said)
            said.append(line)
        hung.cancel()
        return 255, "".join(said) + "the shell ended\n"

    def close(self):
        self.send("exit 0\n")
        self.process.stdin.close()
        self.process.wait(timeout=60)


def how(command):
    first = command.splitlines()[0]
    if SERVERS.match(first + " ") and "--check" not in command and "--help" not in command:
        return "serve"
    if re.match(r"(\S+/)?tandem top\b", first):
        return "watch"
    return "ask"


def run_page(path, args, environment, outcome):
    clone, todo = args.work / "tandem", list(blocks(path))
    if not todo:
        return
    shell = None
    for block in todo:
        for what, command, reason in plan(block, args.compile):
            where = f"{block.page}:{block.line}"
            title = " ".join(command.split())
            if what == "left":
                outcome.append((where, title, None, reason))
                continue
            if shell is None:
                shell = Shell(clone, {**environment, "PAGE": str(path)})
            began = time.monotonic()
            print(f"{where}: {'(first) ' if what == 'first' else ''}{title}", flush=True)
            code, said = shell.run(how(command), command)
            wanted = re.search(r"#\s*fails\b", command) is None
            good = (code == 0) == wanted
            tail = "".join(f"    {line}\n" for line in said.splitlines()[-args.tail if good else -40 :])
            print(f"{tail}  -> {code} in {time.monotonic() - began:.1f} s{'' if good else ': WRONG'}", flush=True)
            if what == "run" or not good:
                outcome.append((where, title, good, f"exit {code}"))
    if shell is not None:
        code, said = shell.run("ask", "stop")
        if code != 0:
            print(f"    {said.strip()}\n  -> the end of the page: WRONG", flush=True)
            outcome.append((str(path.relative_to(ROOT)), "what served ends well", False, said.strip()))
        shell.close()


def built_programs(args):
    """Where the pages expect them."""
    return args.work / "tandem" / "target" / "release"


def prepare(args):
    """A clone without anything that is built, but for the programs."""
    args.work.mkdir(parents=True, exist_ok=True)
    clone = args.work / "tandem"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    built = built_programs(args)
    built.parent.mkdir()
    built.symlink_to(args.programs)
    home = args.work / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "EDITOR": "true", "TERM": "xterm"}
    for name in ("CARGO_TARGET_DIR", "TANDEM_CACHE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    environment["KEEP_PROGRAMS"] = "" if args.compile else "1"
    return environment


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what would run, and what is left out")
    parser.add_argument("--compile", action="store_true", help="also what compiles")
    parser.add_argument("--programs", type=pathlib.Path)
    parser.add_argument("--page", action="append", help="this page alone, from the root; repeatable")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/tandem-docs"))
    parser.add_argument("--tail", type=int, default=3, help="lines of output that are shown of what went well")
    args = parser.parse_args()
    chosen = [path for path in pages() if not args.page or str(path.relative_to(ROOT)) in args.page]
    if args.list:
        for path in chosen:
            for block in blocks(path):
                for what, command, reason in plan(block, args.compile):
                    text = " ".join(command.split())
                    print(f"{block.page}:{block.line}: {what:5} {text}{f'   [{reason}]' if reason else ''}")
        return
    if args.programs is None:
        target = subprocess.run([ROOT / "deploy/target_dir.sh"], capture_output=True, text=True, check=True).stdout
        args.programs = pathlib.Path(target.strip()) / "release"
    args.programs = args.programs.resolve()
    if not (args.programs / "tandem").exists():
        raise SystemExit(f"no programs in {args.programs}: make build")
    environment, outcome = prepare(args), []
    if ROOT / "README.md" not in chosen:
        # What its first commands do.
        subprocess.run([args.work / "tandem/deploy/setup.sh"], check=True, env=environment)
    for path in chosen:
        readme = path.name == "README.md" and path.parent == ROOT
        # The README says so; all other pages expect it.
        own = {} if readme else {"PATH": f"{built_programs(args)}:{environment['PATH']}"}
        run_page(path, args, {**environment, **own}, outcome)
    print("\nleft out:")
    for where, title, good, reason in outcome:
        if good is None:
            print(f"  {where}: {title}\n      {reason}")
    wrong = [one for one in outcome if one[2] is False]
    ran, left = sum(one[2] is not None for one in outcome), sum(one[2] is None for one in outcome)
    print(f"\n{ran} commands ran, {len(wrong)} of them wrong; {left} were left out")
    for where, title, _, reason in wrong:
        print(f"  {where}: {title}: {reason}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
