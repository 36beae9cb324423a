"""Write benchmarks/README.md from benchmarks/page.md and the tables in benchmarks/rows.

    python tools/bench_page.py          # write the page
    python tools/bench_page.py --check  # fail if the page differs from that, or a table is odd

A line `<!-- rows: FILE/QUESTION -->` of page.md becomes the last table of rows/FILE.jsonl that
answers this question, under a line with its machine, commit and date. Words after the question
select what the page shows of it; the file keeps all:

    <!-- rows: FILE/QUESTION | only: PATTERN | hide: COLUMN; COLUMN -->   some rows and columns
    <!-- rows: FILE/QUESTION | COLUMN by COLUMN: COLUMN -->               a row and a column a value

FSDPC_BENCH_RECORD=1 appends what a benchmark prints (benchmarks/common.py); a table added by hand
has the same keys.
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
PROSE_WORDS = 2500  # in page.md, besides its markers
# The machines as page.md introduces them: pattern -> name.
MACHINES = {r"AMD EPYC \((Zen \d)\b[^)]*\)( held to AVX2)?.*": r"\1\2",
            r"AMD EPYC \(AVX2, no AVX-512\).*": "an EPYC with AVX2",
            r"Intel Xeon .*": "Xeon", r"NVIDIA (H\d+) .*": r"\1"}  # fmt: skip
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


def selected(table: dict[str, Any], words: list[str]) -> list[list[str]]:
    """Return the columns and rows that a marker selects by the words after its question."""
    columns, rows = table["columns"], table["rows"]
    for each in words:
        verb, _, names = each.partition(": ")
        if verb == "only":
            rows = [row for row in rows if re.search(names, " | ".join(row))]
        elif verb == "hide":
            kept = [i for i, name in enumerate(columns) if name not in names.split("; ")]
            columns, *rows = [[row[i] for i in kept] for row in [columns, *rows]]
        else:
            down, across = (columns.index(name) for name in verb.split(" by "))
            value = columns.index(names)
            cells = {(row[down], row[across]): row[value].partition(" (")[0] for row in rows}
            heads, sides = ([*dict.fromkeys(row[i] for row in rows)] for i in (across, down))
            rows = [[side, *(cells.get((side, head), "") for head in heads)] for side in sides]
            columns = [f"{columns[down]}: {names.partition(' (')[0]}", *heads]
    return [columns, *rows]


def markdown(table: dict[str, Any], words: list[str]) -> str:
    """Return what the words select of a table, under a line on its measurement."""
    machine = table["machine"]
    for pattern, name in MACHINES.items():
        machine = re.sub(pattern, name, machine)
    commit = "" if table["commit"] == "not recorded" else f"commit {table['commit']}"
    line = f"*{'; '.join(filter(None, [machine, commit, table['date']]))}.* {table['notes']}"
    shown = textwrap.fill(line.rstrip(), 110, break_long_words=False, break_on_hyphens=False)
    rows = selected(table, words)
    lines = [re.sub(r"\d\.\d+e\+0\d", lambda found: f"{float(found[0]):,.0f}",
                    "| " + " | ".join(row) + " |") for row in rows]  # fmt: skip
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return shown + "\n\n" + "\n".join(lines)


def prose() -> str:
    """Return page.md."""
    return (BENCHMARKS / "page.md").read_text(encoding="utf-8")


def page() -> str:
    """Return the whole page."""

    def shown(found: re.Match[str]) -> str:
        question, *words = found[2].split(" | ")
        return markdown(newest(found[1], question), words)

    return NOTICE + MARKER.sub(shown, prose())


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
