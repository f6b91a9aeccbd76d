#!/usr/bin/env python3
"""top.py TANDEM URL: `tandem top` on a terminal of its own: it shows the nodes, opens a request, and leaves the terminal
as it was. Then on a router that is not there: it says so."""
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

ROWS, COLUMNS = 40, 160
ALTERNATE, RESTORED = b"\x1b[?1049h", b"\x1b[?1049l"


class Top:
    """The program, and all that it wrote."""

    def __init__(self, *arguments):
        self.terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs, self.written = theirs, b""
        self.process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs)

    def text(self):
        """Without the sequences that move and colour, and without blanks: those that are there already are not written."""
        return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\s", b"", self.written).decode(errors="replace")

    def until(self, words, seconds=10):
        """Waits for these words; what came before does not count."""
        end = time.monotonic() + seconds
        while words.replace(" ", "") not in self.text():
            if time.monotonic() > end:
                sys.exit(f"test-page: no {words!r} within {seconds} s in:\n{self.text()[-3000:]}")
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.written += os.read(self.terminal, 1 << 16)

    def press(self, keys):
        self.written = b"" if keys != b"q" else self.written
        os.write(self.terminal, keys)

    def end(self):
        self.press(b"q")
        end = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.written += os.read(self.terminal, 1 << 16)
        while select.select([self.terminal], [], [], 0.1)[0]:
            self.written += os.read(self.terminal, 1 << 16)
        assert self.process.returncode == 0, self.process.returncode
        assert RESTORED in self.written, "the terminal's own screen is back"
        assert termios.tcgetattr(self.theirs) == self.before, "and its modes"


def main():
    tandem, url = sys.argv[1:]
    top = Top(tandem, "top", "--url", url)
    for words in ("live", "prefill-0", "decode-1", "q quit"):
        top.until(words)
    assert ALTERNATE in top.written
    top.press(b"\x1b[B")
    top.press(b"\r")
    top.until("kv.transfer")
    top.until("Esc back")
    top.end()
    print("test-page: tandem top shows nodes and a waterfall, and leaves the terminal as it was")
    nobody = Top(tandem, "top", "--url", "http://127.0.0.1:9")
    nobody.until("no connection to the router")
    nobody.end()
    print("test-page: tandem top says that there is no router")


main()
