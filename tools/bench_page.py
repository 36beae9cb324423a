"""Write benchmarks/README.md from benchmarks/page.md and the tables in benchmarks/rows.

    python tools/bench_page.py          # write the page
    python tools/bench_page.py --check  # fail if the page differs from that, or a table is odd

A line `<!-- rows: FILE/QUESTION -->` of page.md becomes the last table of rows/FILE.jsonl that
answers this question, under a line with its machine, commit and date. FSDPC_BENCH_RECORD=1 appends
what a benchmark prints (benchmarks/common.py); a table added by hand has the same keys.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAGE = BENCHMARKS / "README.md"
MARKER = re.compile(r"^<!-- rows: (\w+)/(.+) -->$", re.M)
PROSE_WORDS = 3000  # in page.md, besides its markers
KEYS = ["question", "title", "command", "machine", "commit", "date", "notes", "columns", "rows"]
NOTICE = "<!-- Made by tools/bench_page.py from page.md and rows/*.jsonl: edit those instead. -->\n"


def tables(name: str) -> list[dict[str, Any]]:
    """Return the tables of one file of benchmarks/rows, oldest first."""
    text = (BENCHMARKS / "rows" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def newest(name: str, question: str) -> dict[str, Any]:
    """Return the last table of a file that answers the question."""
    found = [each for each in tables(name) if each["question"] == question]
    if not found:
        known = sorted({each["question"] for each in tables(name)})
        sys.exit(f"rows/{name}.jsonl has no question {question!r}; it has {known}")
    return found[-1]


def markdown(table: dict[str, Any]) -> str:
    """Return a table under a line that says where and when it was measured."""
    about = [table["title"], table["machine"], f"commit {table['commit']}", table["date"]]
    line = f"**{about[0]}.** " + "; ".join(filter(None, about[1:])) + ". " + table["notes"]
    shown = textwrap.fill(line.rstrip(), 110, break_long_words=False, break_on_hyphens=False)
    rows = [table["columns"], *table["rows"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(table["columns"]))
    return shown + "\n\n" + "\n".join(lines)


def prose() -> str:
    """Return page.md."""
    return (BENCHMARKS / "page.md").read_text(encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    return NOTICE + MARKER.sub(lambda found: markdown(newest(found[1], found[2])), prose())


def faults() -> list[str]:
    """Return what is wrong with the page, its prose and the tables."""
    found = []
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        found.append("benchmarks/README.md is not up to date: run python tools/bench_page.py")
    words = len(MARKER.sub("", prose()).split())
    if words > PROSE_WORDS:
        found.append(f"benchmarks/page.md: {words} words, at most {PROSE_WORDS}: use rows")
    for path in sorted((BENCHMARKS / "rows").glob("*.jsonl")):
        if f"rows: {path.stem}/" not in prose() and f"rows/{path.name}" not in prose():
            found.append(f"benchmarks/page.md: no table of rows/{path.name}, nor its name")
        for number, table in enumerate(tables(path.stem), 1):
            label, wide = f"rows/{path.name}:{number}", len(table.get("columns", []))
            if list(table) != KEYS:
                found.append(f"{label}: keys {list(table)} are not {KEYS}")
            for row in table.get("rows", []):
                if len(row) != wide or not all(isinstance(cell, str) for cell in row):
                    found.append(f"{label}: {row} is not {wide} texts")
    return found


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    if not check:
        PAGE.write_text(page(), encoding="utf-8")
    elif found := faults():
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
