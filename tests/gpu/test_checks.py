"""benchmarks/checks.py: how commands end, what is kept of them, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
sys.path[:0] = [str(ROOT / "benchmarks")]
import checks  # noqa: E402
from checks import Check  # noqa: E402


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while not is_gone(pid) and time.monotonic() < end:
        os.sched_yield()
    return is_gone(pid)


# Starts a process that no signal but SIGKILL ends, names it, and goes on as `then` says.
GRANDCHILD = """
import subprocess, sys, time
code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);' \\
       'print("ready", flush=True); time.sleep(600)'
child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("code, state, detail", [
    ("print('test_x: 12 checks, 0 failed')", checks.HELD, "12 checks"),
    ("print('x: 1,000 things'); print('a: 2 checks, 0 failed\\nb: 3 checks, 0 failed')",
     checks.HELD, "5 checks"),
    ("print('test_x: no GPU, nothing tested')", checks.UNTESTED, "test_x: no GPU, nothing tested"),
    ("print('test_x: 0 checks, 0 failed')", checks.UNTESTED, "0 checks"),
    ("pass", checks.UNTESTED, "0 checks"),
    ("import sys; print('test_x: 5 checks, 1 failed'); sys.exit('x.c:1: CHECK(a) failed')",
     checks.FAILED, "exit 1: x.c:1: CHECK(a) failed"),
    ("print('the reason'); raise SystemExit(3)", checks.FAILED, "exit 3: the reason"),
    ("import os; os.kill(os.getpid(), 11)", checks.FAILED, "signal SIGSEGV"),
])  # fmt: skip
def test_how_c_tests_end(code: str, state: str, detail: str) -> None:
    outcome = checks.run(Check("x", python(code), judge=checks.c_test))
    assert (outcome.state, outcome.detail) == (state, detail)
    assert outcome.good == (state == checks.HELD)


@pytest.mark.parametrize("last, state", [
    ("===== 7 passed in 3.21s =====", checks.HELD),
    ("===== 7 passed, 2 skipped in 63.21s (0:01:03) =====", checks.PARTLY),
    ("===== 9 skipped in 0.21s =====", checks.UNTESTED),
    ("", checks.UNTESTED),
])
def test_skips_are_no_tests(last: str, state: str) -> None:
    printed = f"SKIPPED [1] a.py:3: 3 passed in vain\n{last}\n"
    assert checks.pytest_run(printed)[0] == state


def test_what_is_no_text_and_what_is_no_program() -> None:
    bytes_ = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\xff'); sys.exit(4)"
    outcome = checks.run(Check("x", python(bytes_)))
    assert outcome.verdict == "failed: exit 4: caf\ufffd\ufffd"
    outcome = checks.run(Check("x", ("/nowhere/program",)))
    assert outcome.state == checks.FAILED and "/nowhere/program" in outcome.detail


@pytest.mark.parametrize("then, state", [("time.sleep(600)", checks.FAILED), ("", checks.HELD)],
                         ids=["cut off", "ended"])
def test_no_process_outlives_its_check(then: str, state: str) -> None:
    begin = time.monotonic()
    outcome = checks.run(Check("x", python(GRANDCHILD.format(then=then)), cap_s=3))
    assert time.monotonic() - begin < TIMEOUT_S and outcome.state == state, outcome
    assert (outcome.detail == "cut off after 3 s") == (state == checks.FAILED)
    assert wait_until_gone(int(outcome.stdout))


def test_checks_of_a_check_end_with_it(tmp_path: Path) -> None:
    """As bench_gpu.py's turns do, which are in sessions of their own."""
    inner = f"import pathlib, os, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(" \
            "str(os.getpid())); time.sleep(600)"  # fmt: skip
    outer = f"""
import sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}]
import checks
checks.end_by_exception()
checks.run(checks.Check("inner", (sys.executable, "-c", {inner!r})))
"""
    outcome = checks.run(Check("outer", python(outer), cap_s=3))
    assert outcome.detail == "cut off after 3 s"
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_giving_up_ends_what_runs() -> None:
    code = GRANDCHILD.format(then="time.sleep(600)")
    running = checks.run_all([Check("quick", python("pass")), Check("slow", python(code))],
                             lambda: 600, at_once=2)
    assert next(running).check.name == "quick"
    live = running.gi_frame.f_locals["live"]
    pid = live[0].process.pid
    running.close()
    assert wait_until_gone(pid)


def test_several_run_at_once_and_the_rest_not_when_time_is_over() -> None:
    """Two that end only together with the other; then one that finds no time left."""
    left = [600.0, 600.0, 0.0]
    one, other = os.pipe(), os.pipe()
    codes = [f"import os; os.write(os.open('/proc/{os.getpid()}/fd/{a[1]}', os.O_WRONLY), b'x');"
              f"os.read(os.open('/proc/{os.getpid()}/fd/{b[0]}', os.O_RDONLY), 1)"
              for a, b in ((one, other), (other, one))]
    both = [Check(str(i), python(code), cap_s=30) for i, code in enumerate(codes)]
    outcomes = list(checks.run_all([*both, Check("late", python("pass"))], lambda: left.pop(0), 2))
    for each in (*one, *other):
        os.close(each)
    assert {o.check.name: o.state for o in outcomes} == {
        "0": checks.HELD, "1": checks.HELD, "late": checks.NOT_RUN}


def test_sigterm_ends_it_all(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = [{str(ROOT / "benchmarks")!r}]
import checks
checks.end_by_exception()
code = {GRANDCHILD.format(then="open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)")!r}
print("begun", flush=True)
checks.run(checks.Check("x", (sys.executable, "-c", code, sys.argv[1])))
"""
    named = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", program, str(named)], stdout=subprocess.PIPE)
    end = time.monotonic() + TIMEOUT_S
    while not (named.exists() and named.read_text()) and time.monotonic() < end:
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    process.stdout.close()
    assert wait_until_gone(int(named.read_text()))


def test_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a measurement that failed, its stderr apart; failures' last lines; skips."""
    rows = "import sys; print('| 125M | native | 40 ms |'); sys.exit('a warning\\none row failed')"
    skips = "print('SKIPPED [1] test_x.py: one GPU\\n== 3 passed, 1 skipped in 0.1s ==')"
    todo = [Check("rows", python(rows), "step-speed", speed=True),
            Check("bad", python("print('why'); raise SystemExit(3)"), "ctests"),
            Check("good", python("print('unseen')"), "ctests"),
            Check("skips", python(skips), "pytest", judge=checks.pytest_run)]
    for _ in range(2):  # runs add up
        record = checks.Record(tmp_path / "out", "gpu_check")
        for outcome in checks.run_all(todo, lambda: 60):
            record.outcome(outcome)
    said = capsys.readouterr().out
    assert "| 125M | native | 40 ms |" in said and "failed: exit 1: one row failed" in said
    assert "    a warning" in said and "    why" in said and "unseen" not in said
    assert "held in part: 3 passed, 1 skipped" in said and "    SKIPPED [1] test_x.py" in said
    log = (tmp_path / "out" / "gpu_check.log").read_text()
    assert said.splitlines()[0] in log and log.count("unseen") == 2
    lines = (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert [row["check"] for row in kept] == ["rows", "bad", "good", "skips"] * 2
    assert kept[0]["rows"].startswith("| 125M") and kept[0]["state"] == checks.FAILED
    assert kept[2]["rows"] == "" and kept[2]["state"] == checks.HELD
