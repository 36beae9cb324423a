"""benchmarks/gpu_check.py: the checks it makes, how each ends, what it says without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
import gpu_check  # noqa: E402
from gpu_check import Check  # noqa: E402

TESTS = sorted(path for path in (ROOT / "tests" / "gpu").glob("*.c"))


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_every_test_is_a_check_and_every_kernel_one_for_races() -> None:
    programs = [path.with_suffix("") for path in TESTS]
    plain = [c.name for c in gpu_check.checks_of(programs, None)]
    tests = [path.name for path in programs if path.name.startswith("test_")]
    assert tests and set(tests) < set(plain)
    assert plain[-2:] == ["bench_kernels", "bench_gpu.py"]
    sanitized = [c.name for c in gpu_check.checks_of(programs, Path("/x/compute-sanitizer"))]
    for name in tests:
        assert f"{name} under memcheck" in sanitized
        assert (f"{name} under racecheck" in sanitized) == name.endswith("_kernels"), name


def test_how_checks_end(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        Check("good", python("print('unseen')")),
        Check("bad", python("print('the reason'); raise SystemExit(3)")),
        Check("fast", python("print('4 TB/s')"), speed=True),
    ]
    outcomes = list(gpu_check.run_checks(checks, 60))
    assert [o.verdict for o in outcomes] == ["held", "failed (3)", "held"]
    assert gpu_check.report(outcomes) == 1
    said = capsys.readouterr().out
    assert "2 of 3 checks held" in said and "the reason" in said and "4 TB/s" in said
    assert "unseen" not in said
    assert gpu_check.report(outcomes[::2]) == 0


def test_what_takes_too_long_is_no_success() -> None:
    endless = python("import time; print('begun', flush=True); time.sleep(600)")
    late, never = gpu_check.run_checks([Check("late", endless), Check("never", endless)], 1.0)
    assert late.verdict.startswith("failed (cut off") and "begun" in late.output
    assert never.verdict == "not run: 1 s are over"
    assert not late.held and not never.held


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.main([]) == 2
    assert "no GPU: nvidia-smi" in capsys.readouterr().err
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    tool.chmod(0o755)
    assert gpu_check.main([]) == 2
    assert "ended with 6 and said: no devices were found" in capsys.readouterr().err
