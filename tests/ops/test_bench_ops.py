"""benchmarks/bench_ops.py: it names every operation, compares like with like, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc.tensors import creation

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
import op_cases  # noqa: E402

CASES = [(group, case) for group, make in op_cases.GROUPS.items() for case in make(64)]


def numbers(found: Any) -> list[np.ndarray]:
    """Results of either engine as arrays that can be compared."""
    plain = []
    for x in op_cases.listed(found):
        if not isinstance(x, bool):
            x = x.detach().float()
        plain.append(np.asarray(x))
    return plain


def close(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """Apart by 1e-4 at most, or by 1e-5 of the greatest."""
    greatest = np.abs(theirs).max(initial=0.0, where=np.isfinite(theirs))
    apart = max(1e-4, 1e-5 * greatest)
    np.testing.assert_allclose(ours, theirs, atol=apart, rtol=1e-4, err_msg=name)


def test_every_operation_has_a_case() -> None:
    page = {*fsdpc.functional.__all__, *creation.__all__} - op_cases.NOT_MEASURED
    named = {case.operation for _, case in CASES}
    assert not page - named
    assert {name for name in named - page if re.fullmatch(r"\w+", name)} == set()
    assert op_cases.OF_TRANSFORMERS <= named
    forms = [case.name for _, case in CASES]
    assert len(forms) == len(set(forms))


@pytest.mark.parametrize("group", op_cases.GROUPS)
def test_both_engines_compute_the_same(group: str) -> None:
    """In float32: sums, of up to some thousand terms, have a rounding of the greatest of them."""
    for case in [case for own, case in CASES if own == group]:
        rng = np.random.default_rng(1)
        arrays = [each.make(rng) for each in case.inputs]
        calls: list[tuple[op_cases.Engine, Callable[..., Any]]] = [
            (op_cases.Engine("fsdpc"), case.ours), (op_cases.Engine("torch"), case.theirs),
        ]  # fmt: skip
        results = [
            numbers(call(*engine.tensors(arrays, case.inputs, "fp32", grad=False)))
            for engine, call in calls
        ]
        for ours, theirs in zip(*results, strict=True):
            assert ours.shape == theirs.shape, case.name
            if case.same:
                close(ours, theirs, case.name)
        if not case.has_backward:
            continue
        weights = [np.asarray(rng.standard_normal(y.shape), np.float32) for y in results[0]]
        gradients = []
        for engine, call in calls:
            leaves = engine.tensors(arrays, case.inputs, "fp32", grad=True)
            gradients.append(numbers(engine.with_backward(call, leaves, weights)()))
        for ours, theirs in zip(*gradients, strict=True):
            assert ours.shape == theirs.shape and ours.any(), case.name
            if case.same:
                close(ours, theirs, case.name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/bench_ops.py", "--quick", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_it_runs() -> None:
    done = run("--operations", "add", "softmax", "sort", "--dtypes", "bf16", "fp32")
    assert done.returncode == 0, done.stderr
    time = r"[\d.e+]+ \([\d.e+]+\.\.[\d.e+]+\)"
    row = rf"^\| (?:add|softmax|sort) .* (?:fp32|bf16) \| {time} \| {time} \| [\d.]+ \|$"
    assert len(re.findall(row, done.stdout, re.M)) == 18, done.stdout
    assert "| reductions | 10 | " in done.stdout
    assert re.search(r"Slower than torch by more than 2x: \d+ of 18 rows", done.stdout)
    assert re.search(r"\nIn steps of transformers, .*: \d+ of 16 rows", done.stdout)
    wide = r"\| add \| 2 of 64x64( \| [\d.,]+ / [\d.,]+: [\d.*]+){4} \|"
    assert re.search(wide, done.stdout), done.stdout


def test_unknown_names_are_refused() -> None:
    done = run("--operations", "softmin")
    assert done.returncode == 2 and "no operations softmin; there are !=, &" in done.stderr
