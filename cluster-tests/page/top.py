#!/usr/bin/env python3
"""top.py TANDEM URL: `tandem top` on a terminal of its own: it shows the nodes, opens a request, and leaves the terminal
as it was. Then on a router that is not there: it says so."""
import codecs
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


class Screen:
    """What stands on the terminal: the program writes only cells that change, wherever they are."""

    PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[=>78]|\r|\n|[^\x1b]", re.DOTALL)

    def __init__(self):
        self.cells, self.row, self.column, self.rest = {}, 0, 0, ""

    def write(self, text):
        text, end = self.rest + text, 0
        for part in self.PART.finditer(text):
            if part.start() != end:
                break
            end = part.end()
            numbers, command = part.group(1), part.group(2)
            if command == "H":
                place = [int(number or 1) for number in numbers.split(";")] if numbers else [1, 1]
                self.row, self.column = place[0] - 1, place[1] - 1
            elif command == "J":
                self.cells = {}
            elif part.group(0)[0] not in "\x1b\r\n":
                self.cells[self.row, self.column] = part.group(0)
                self.column += 1
        # The beginning of a sequence.
        self.rest = text[end:]

    def text(self):
        line = lambda row: "".join(self.cells.get((row, column), " ") for column in range(COLUMNS)).rstrip()
        return "\n".join(line(row) for row in range(ROWS))


class Top:
    """The program on a terminal of its own."""

    def __init__(self, *arguments):
        self.terminal, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before, self.written, self.screen = termios.tcgetattr(self.theirs), b"", Screen()
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.process = subprocess.Popen(arguments, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs)

    def read(self):
        """What there is within a moment; says whether there was anything."""
        if not select.select([self.terminal], [], [], 0.1)[0]:
            return False
        piece = os.read(self.terminal, 1 << 16)
        self.written += piece
        self.screen.write(self.decoder.decode(piece))
        return True

    def until(self, words, seconds=10):
        end = time.monotonic() + seconds
        while words not in self.screen.text():
            if time.monotonic() > end:
                sys.exit(f"test-page: no {words!r} within {seconds} s in:\n{self.screen.text()}")
            self.read()

    def press(self, keys):
        os.write(self.terminal, keys)

    def end(self):
        self.press(b"q")
        end = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        while self.read():
            pass
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
