"""benchmarks/README.md is made from the recorded rows, and benchmarks append to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.bench_page import BENCHMARKS, KEYS, faults, selected


def test_the_page_and_its_rows_are_in_order() -> None:
    assert not faults()


def test_a_marker_selects_columns_and_rows() -> None:
    table = {"columns": ["model", "engine", "ms (range)"],
             "rows": [["a", "x", "1 (0..2)"], ["a", "y", "3"], ["b", "x", "5"]]}  # fmt: skip
    assert selected(table, ["only: ^b", "hide: model"]) == [["engine", "ms (range)"], ["x", "5"]]
    assert selected(table, ["model by engine: ms (range)"])[1:] == [["a", "1", "3"], ["b", "5", ""]]


def test_a_benchmark_that_ends_well_appends_its_table(tmp_path: Path) -> None:
    copy = shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    script, env = copy / "bench_growth.py", {**os.environ, "FSDPC_BENCH_RECORD": "1"}
    for ends in ("1 / 0", ""):
        script.write_text(f"import common\ncommon.table(['step', 'ms (range)'], [[5, 6]])\n{ends}")
        subprocess.run([sys.executable, script], env=env)
    old, new = map(json.loads, (copy / "rows" / "growth.jsonl").read_text().splitlines())
    assert list(new) == KEYS and new["question"] == old["question"] and new["rows"] == [["5", "6"]]
