"""Builds the book: lays the repository's pages out for mdBook as they lie, so that links between them hold, and checks
every link and anchor of the HTML. Pages are those of docs/SUMMARY.md; files that they link to come along.

Usage: book.py --mdbook PATH [--out DIR]
"""

import argparse
import html.parser
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def outside_code(text):
    """The lines that are not in code blocks."""
    code = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        code ^= fence
        if not code and not fence:
            yield line


def targets(page):
    """Files that a page links to, as paths in the repository."""
    for line in outside_code(page.read_text()):
        for link in LINK.findall(line):
            if "://" not in link and not link.startswith("#"):
                yield (page.parent / link.split("#")[0]).resolve()


def as_index(link):
    """mdBook makes index.html of a README, and does not say so in links to it."""
    return link if "://" in link else re.sub(r"(^|/)README\.md(?=#|$)", r"\1index.md", link)


def lay_out(source):
    """Copies pages and what they link to, and writes the table of contents as seen from the root."""
    summary = DOCS / "SUMMARY.md"
    pages = list(dict.fromkeys(targets(summary)))
    unlisted = [page for page in DOCS.rglob("*.md") if page not in pages and page != summary]
    if unlisted:
        raise SystemExit(f"docs/SUMMARY.md lacks {', '.join(str(page.relative_to(ROOT)) for page in unlisted)}")
    files = pages + [target for page in pages for target in targets(page) if target.is_file()]
    for file in dict.fromkeys(files):
        to = source / as_index(str(file.relative_to(ROOT)))
        to.parent.mkdir(parents=True, exist_ok=True)
        if file in pages:
            to.write_text(LINK.sub(lambda match: f"]({as_index(match[1])})", file.read_text()))
        else:
            shutil.copyfile(file, to)
    for page in pages:
        for folder in {target for target in targets(page) if target.is_dir()}:
            (source / folder.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)

    def place(match):
        return f"]({as_index(str((DOCS / match[1]).resolve().relative_to(ROOT)))})"

    (source / "SUMMARY.md").write_text(LINK.sub(place, summary.read_text()))


class Page(html.parser.HTMLParser):
    """Anchors of a page and where it links to."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def dead_links(book):
    """Links of the HTML that lead nowhere within it."""
    pages = {path: Page(path.read_text()) for path in book.rglob("*.html")}
    for path, page in pages.items():
        # mdBook's page for wrong addresses has links from the root.
        if path.name == "404.html":
            continue
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or link.startswith("//"):
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            if not target.exists():
                yield path.relative_to(book), link
            elif url.fragment and target in pages and urllib.parse.unquote(url.fragment) not in pages[target].anchors:
                yield path.relative_to(book), link


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mdbook", required=True)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/docs")
    args = parser.parse_args()
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    lay_out(out / "src")
    shutil.copyfile(DOCS / "book.toml", out / "book.toml")
    subprocess.run([args.mdbook, "build", "--dest-dir", str(out / "book"), str(out)], check=True)
    dead = list(dead_links(out / "book"))
    for page, link in dead:
        print(f"{page}: {link} leads nowhere", file=sys.stderr)
    if dead:
        raise SystemExit(1)
    print(f"{out / 'book' / 'index.html'}: every link leads somewhere")


if __name__ == "__main__":
    main()
