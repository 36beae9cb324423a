"""Everything that only a GPU can show, in one command and one table.

    python benchmarks/gpu_check.py [--archs 90] [--seconds 480] [--only WORD ...] [--list]

Builds the plugin and the tests of tests/gpu for the GPUs of this machine, runs each test (kernels
against their twins on the CPU, streams, events and memory, transports), then again under
compute-sanitizer where the toolkit has one, and last the speed of the kernels and of whole steps.
A check that does not fit into what is left of the time is told as not run, and counts as a failure.

Ends with 0 if every check held, 1 if one did not, 2 where there is no GPU or no toolkit.  On a
machine without a GPU the same tests run on the emulated device: ``pytest tests/emu``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).resolve().parent)]
import common  # noqa: E402

import cuda_build  # noqa: E402

LAST_LINES = 20  # of a check that failed
SANITIZERS = ("memcheck", "racecheck")
HAZARDOUS = ("test_attention_kernels", "test_flat_kernels", "test_nn_kernels", "test_norm_kernels",
             "test_product_kernels", "test_step_kernels")


@dataclass(frozen=True)
class Check:
    """A command that shows something by ending with 0; `speed` prints rows worth keeping."""

    name: str
    command: tuple[str, ...]
    speed: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    check: Check
    verdict: str  # "held", "failed (3)", "not run: ..."
    seconds: float
    output: str

    @property
    def held(self) -> bool:
        """Whether the check ended as it should."""
        return self.verdict == "held"


def gpus() -> str:
    """One line on the GPUs of this machine; RuntimeError says why there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError("no GPU: nvidia-smi, which comes with the driver, is not on PATH")
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    found = "; ".join(done.stdout.split("\n")).strip("; ")
    if done.returncode != 0 or not found:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise RuntimeError(f"no GPU: nvidia-smi ended with {done.returncode} and said: {said}")
    return found


def checks_of(programs: Sequence[Path], sanitizer: Path | None) -> list[Check]:
    """What to run, quickest answers first."""
    tests = [path for path in programs if path.name.startswith("test_")]
    checks = [Check(path.name, (str(path),)) for path in tests]
    checks.append(Check("tests/gpu", (sys.executable, "-m", "pytest", "-q", "tests/gpu")))
    if sanitizer is not None:
        # Races are between threads that share memory, so kernels alone are looked at for them.
        checks += [
            Check(f"{path.name} under {tool}", (str(sanitizer), "--tool", tool,
                                                "--error-exitcode", "1", str(path)))
            for tool in SANITIZERS
            for path in tests
            if tool == "memcheck" or path.name in HAZARDOUS
        ]  # fmt: skip
    benches = [path for path in programs if path.name.startswith("bench_")]
    speed = [Check(path.name, (str(path),), speed=True) for path in benches]
    steps = (sys.executable, "benchmarks/bench_gpu.py", "--engines", "native", "door", "fsdp2")
    return [*checks, *speed, Check("bench_gpu.py", steps, speed=True)]


def run_checks(checks: Sequence[Check], seconds: float) -> Iterator[Outcome]:
    """Run checks one after the other until all have ended or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    for check in checks:
        begin = time.monotonic()
        if begin >= deadline:
            yield Outcome(check, f"not run: {seconds:g} s are over", 0.0, "")
            continue
        try:
            done = subprocess.run(check.command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                  stderr=subprocess.STDOUT, timeout=deadline - begin)  # fmt: skip
            verdict = "held" if done.returncode == 0 else f"failed ({done.returncode})"
            output = done.stdout
        except subprocess.TimeoutExpired as late:
            verdict = f"failed (cut off, {seconds:g} s are over)"
            output = (late.stdout or b"").decode(errors="replace")
        yield Outcome(check, verdict, time.monotonic() - begin, output)


def sanitizer_of(toolkit: cuda_build.Toolkit) -> Path | None:
    """compute-sanitizer, beside nvcc or on PATH."""
    beside = toolkit.nvcc.with_name("compute-sanitizer")
    found = str(beside) if beside.exists() else shutil.which("compute-sanitizer")
    return Path(found) if found else None


def prepare(archs: Sequence[str]) -> tuple[str, list[Check]]:
    """Build what is to be run; the machine's GPUs and the checks."""
    found, toolkit = gpus(), cuda_build.find_toolkit()
    if toolkit is None:
        raise RuntimeError(cuda_build.NO_TOOLKIT)
    cuda_build.build_plugin(cuda_build.DEFAULT_OUT, archs)
    return found, checks_of(cuda_build.build_tests(archs), sanitizer_of(toolkit))


def report(outcomes: Sequence[Outcome]) -> int:
    """Print the table, then what failed and what was measured; the exit status."""
    common.table(["check", "result", "seconds"],
                 [[o.check.name, o.verdict, f"{o.seconds:.1f}"] for o in outcomes])  # fmt: skip
    for o in outcomes:
        if not o.held:
            print(f"\n{o.check.name}: {o.verdict}")
            print("\n".join(o.output.splitlines()[-LAST_LINES:]))
        elif o.check.speed:
            print(f"\n{o.output}")
    held = sum(o.held for o in outcomes)
    print(f"\n{held} of {len(outcomes)} checks held")
    return 0 if held == len(outcomes) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--archs", default="90", help="compute capabilities, e.g. 80,90")
    p.add_argument("--seconds", type=float, default=480, help="for all checks together")
    p.add_argument("--only", nargs="+", default=[], metavar="WORD", help="checks named like this")
    p.add_argument("--list", action="store_true", help="name the checks and end")
    o = p.parse_args(arguments)
    try:
        found, checks = prepare(o.archs.split(","))
    except RuntimeError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if o.only:
        checks = [c for c in checks if any(word in c.name for word in o.only)]
    if not checks:
        print(f"gpu_check: no check is named like {' or '.join(o.only)}", file=sys.stderr)
        return 2
    if o.list:
        print("\n".join(check.name for check in checks))
        return 0
    common.header()
    print(f"GPUs: {found}\n")
    return report(list(run_checks(checks, o.seconds)))


if __name__ == "__main__":
    sys.exit(main())
