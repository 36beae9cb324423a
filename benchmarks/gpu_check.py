"""Everything that only a GPU can show, in one command and one table.

    python benchmarks/gpu_check.py [--seconds 480] [--only WORD ...] [--skip WORD ...] [--list]

Stages, in this order:

    build         extension, plugin and tests, for the GPUs of this machine, in the source tree
    kernel-speed  each kernel beside the device's copy
    step-speed    tokens/s and MFU of whole steps, beside torch's FSDP2
    ctests        kernels against their twins on the CPU, streams, memory, NCCL
    pytest        tests/gpu
    sanitizers    the C tests again under compute-sanitizer, where the toolkit has one

--only and --skip take stages, and parts of checks' names. The build is fast where nothing changed,
and `--skip build` takes what is there. Time counts from the start, the build too. Each check has
a limit of its own; one that does not fit into what is left is told as not run, and is a failure.

What is printed, and more, is appended to gpu_check.log and gpu_check.jsonl in the folder of --out,
as checks end. Ends with 0 if every check held, as far as this machine can have it; 1 if one did
not, or tested nothing; 2 where none could be run. On a machine without a GPU `--archs 90` shows
that everything compiles, and `--emulate` runs the C tests on the emulated device.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).resolve().parent)]
import checks  # noqa: E402
import common  # noqa: E402
from checks import Check, Outcome, Record  # noqa: E402

import cuda_build  # noqa: E402
import native  # noqa: E402

STAGES = ("build", "kernel-speed", "step-speed", "ctests", "pytest", "sanitizers")
AT_ONCE = {"ctests": 4}  # each of which leaves most of a GPU idle
SHAPES = ("125M", "1B", "SmolLM3-3B")
ENGINES = ("fsdp2", "door", "native", "native+graph", "native+graph+cudnn1")
C_TEST_S, PYTEST_S, SHAPE_S, KERNELS_S, SANITIZER_S = 60, 300, 120, 100, 100
STARTS_S = 30  # bench_gpu.py's own, and of its product
HANG_S = 120  # a Python test that takes longer prints where it is
EMULATION_FACTOR = 10  # of limits

# What is looked at for races between the threads of a kernel: ours alone.
HAZARDOUS = ("test_attention_kernels", "test_factored_kernels", "test_flat_kernels",
             "test_moments_kernels", "test_nn_kernels", "test_norm_kernels",
             "test_step_kernels", "test_weight_kernels")  # fmt: skip
# Ranks with a GPU each: those that need two, and those that try more worlds where there are more.
# Sanitizers would look at NCCL's kernels and threads there.
NEED_TWO = ("test_engine_windows", "test_nccl_register")
MORE_WORLDS = ("test_comm_nccl", "test_streams", "test_comm_cuda")
OVER_NCCL = (*NEED_TWO, *MORE_WORLDS, "test_nccl_faults", "test_nccl_load")


@dataclass(frozen=True)
class Built:
    """What the build left: the programs, and why others are missing."""

    programs: tuple[Path, ...]
    failed: dict[str, str]
    sanitizer: Path | None


# -- the build ------------------------------------------------------------------------------------


def build(archs: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Build the extension and the plugin in place, and the tests; as cuda_build.build_tests."""
    core = native.build_core(native.core_in_place())
    plugin = core.with_name(cuda_build.PLUGIN)
    cuda_build.build_plugin(plugin, archs, stays=True)
    plugin.with_name(cuda_build.REASON).unlink(missing_ok=True)
    return cuda_build.build_tests(archs)


def test_programs() -> list[Path]:
    """The programs that a build should leave."""
    return [cuda_build.tests_folder() / path.stem for path in cuda_build.test_sources()]


def find_built() -> tuple[list[Path], dict[str, str]]:
    """What an earlier build left."""
    wanted = test_programs()
    failed = {path.name: "it is not there" for path in wanted if not path.exists()}
    core = native.core_in_place()
    for path in (core, core.with_name(cuda_build.PLUGIN)):
        if not path.exists():
            raise RuntimeError(f"{path.relative_to(ROOT)} is not built: run the stage build first")
    return [path for path in wanted if path.exists()], failed


def emulated() -> list[Path]:
    """The C tests, built for the emulated device."""
    return [path for path in cuda_build.build_emulated() if path.name != cuda_build.PLUGIN]


def sanitizer_of(toolkit: cuda_build.Toolkit | None) -> Path | None:
    """compute-sanitizer, in the toolkit or on PATH."""
    found = [shutil.which("compute-sanitizer")]
    if toolkit is not None:
        home = toolkit.nvcc.parent.parent
        found = [home / "bin/compute-sanitizer", home / "compute-sanitizer/compute-sanitizer",
                 *found]  # fmt: skip
    return next((Path(each) for each in found if each and os.access(each, os.X_OK)), None)


def archs_of(gpus: Sequence[str]) -> list[str]:
    """Compute capabilities of these GPUs, ascending: "..., 9.0" is "90"."""
    return sorted({line.rsplit(",", 1)[-1].strip().replace(".", "") for line in gpus}, key=int)


def demand_products(plugin: str) -> None:
    """Refuse a plugin without a GPU, and products that would silently be the plain kernel's."""
    if ", no GPU: " in plugin or plugin.startswith(("not built", "does not load")):
        raise RuntimeError(f"nvidia-smi finds a GPU, and the plugin none; it says: {plugin}")
    if "products by cuBLASLt " not in plugin:
        looked = cuda_build.run_path(stays=True).replace(":", "\n    ")
        raise RuntimeError(f"the plugin multiplies without cuBLASLt; it says: {plugin}\nit looked "
                           f"in LD_LIBRARY_PATH, the system's folders and\n    {looked}")


# -- the checks -----------------------------------------------------------------------------------


def first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    says = re.compile(r"(?<!-W)error", re.IGNORECASE)  # not in the compiler's own options
    errors = [line.strip() for line in text.splitlines() if says.search(line)]
    return errors[0] if errors else checks.last_line(text)


def c_checks(programs: Sequence[Path]) -> Iterator[Check]:
    """The C tests."""
    for path in programs:
        if path.name.startswith("test_"):
            yield Check(path.name, (str(path),), "ctests", C_TEST_S, checks.c_test,
                        {"FSDPC_TEST_GPU": "1"}, gpus=2 if path.name in NEED_TWO else 1)


def sanitizer_checks(programs: Sequence[Path], sanitizer: Path) -> Iterator[Check]:
    """The C tests under memcheck, and kernels that share memory between threads under racecheck.

    Errors that calls return are what tests provoke, and no errors here.
    """
    for tool in ("memcheck", "racecheck"):
        for check in c_checks(programs):
            if check.name in OVER_NCCL or (tool == "racecheck" and check.name not in HAZARDOUS):
                continue
            command = (str(sanitizer), "--tool", tool, "--error-exitcode", "1")
            command += ("--report-api-errors", "no") if tool == "memcheck" else ()
            yield replace(check, name=f"{check.name} under {tool}", stage="sanitizers",
                          command=(*command, *check.command), cap_s=SANITIZER_S)


def checks_of(programs: Sequence[Path], sanitizer: Path | None) -> list[Check]:
    """All that there is to run, in order."""
    found = [Check(path.name, (str(path),), "kernel-speed", KERNELS_S, checks.c_test,
                   {"FSDPC_TEST_GPU": "1"}, speed=True)
             for path in programs if path.name.startswith("bench_")]  # fmt: skip
    steps = (sys.executable, "benchmarks/bench_gpu.py", "--shapes", *SHAPES, "--engines", *ENGINES,
             "--shape-seconds", str(SHAPE_S))  # fmt: skip
    found.append(Check("bench_gpu.py", steps, "step-speed", len(SHAPES) * SHAPE_S + STARTS_S,
                       speed=True))
    found += c_checks(programs)
    pytest = (sys.executable, "-m", "pytest", "-v", "-rfEs", "--color=no", "-p", "no:cacheprovider",
              "--continue-on-collection-errors", "-o", f"faulthandler_timeout={HANG_S}",
              "tests/gpu")  # fmt: skip
    found.append(Check("tests/gpu", pytest, "pytest", PYTEST_S, checks.pytest_run))
    if sanitizer is not None:
        found += sanitizer_checks(programs, sanitizer)
    return found


def chosen(name: str, stage: str, only: Sequence[str], skip: Sequence[str]) -> bool:
    """Whether a check is chosen, by its stage or by a part of its name."""

    def named(words: Sequence[str]) -> bool:
        return any(word == stage or (word not in STAGES and word in name) for word in words)

    return (not only or named(only)) and not named(skip)


def stage_of(program: str) -> str:
    """The stage that a program of tests/gpu is for."""
    return "ctests" if program.startswith("test_") else "kernel-speed"


def asked_for(o: argparse.Namespace, found: Sequence[Check]) -> list[Check]:
    """Those of the checks that the command line asks for."""
    todo = [check for check in found if chosen(check.name, check.stage, o.only, o.skip)]
    if not o.emulate:
        return todo
    return [replace(check, cap_s=check.cap_s * EMULATION_FACTOR, gpus=0)
            for check in todo if check.stage == "ctests"]  # fmt: skip


def run_stages(todo: Sequence[Check], gpus: int, end: float, record: Record) -> list[Outcome]:
    """Run the checks stage by stage until all have ended or it is `end`; record each at once."""
    outcomes = []
    for stage in STAGES:
        here = [check for check in todo if check.stage == stage]
        for check in here:
            if check.gpus > gpus:
                lacking = f"needs {check.gpus} GPUs, there is {gpus}"
                outcomes.append(Outcome(check, checks.LACKING, lacking))
                record.outcome(outcomes[-1])
        able = [check for check in here if check.gpus <= gpus]
        for outcome in checks.run_all(able, lambda: end - time.monotonic(), AT_ONCE.get(stage, 1)):
            outcomes.append(outcome)
            record.outcome(outcome)
    return outcomes


def report(outcomes: Sequence[Outcome], record: Record) -> int:
    """Say all in one table; the exit status."""
    rows = [f"| {o.check.stage} | {o.check.name} | {o.verdict.replace('|', '/')[:160]} "
            f"| {o.seconds:.1f} |" for o in outcomes]  # fmt: skip
    record.say("\n".join(["", "| stage | check | result | seconds |", "|---|---|---|---|", *rows]))
    states = [o.state for o in outcomes]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    record.say(f"\n{len(outcomes)} checks: {', '.join(counts)}")
    return 0 if outcomes and all(o.good for o in outcomes) else 1


# -- the command ----------------------------------------------------------------------------------


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--archs", default="", help="compute capabilities, e.g. 90; default: the GPUs'")
    p.add_argument("--seconds", type=float, default=480, help="for everything together")
    p.add_argument("--only", nargs="+", default=[], metavar="WORD", help="stages, or checks")
    p.add_argument("--skip", nargs="+", default=[], metavar="WORD", help="stages, or checks")
    p.add_argument("--out", type=Path, default=os.environ.get("OUT") or ROOT / "build/gpu_check",
                   help="folder of the log; default $OUT, or build/gpu_check")  # fmt: skip
    p.add_argument("--emulate", action="store_true", help="C tests alone, on the emulated device")
    p.add_argument("--list", action="store_true", help="name the checks and end")
    return p.parse_args(arguments)


def environment() -> None:
    """What all checks find: this tree's package, output as it is printed, and the commit."""
    places = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ["FSDPC_COMMIT"] = common.commit()


def prepare(o: argparse.Namespace, gpus: Sequence[str], record: Record) -> Built:
    """Build what is to be run, or find it; say what it is."""
    begun = time.monotonic()
    if o.emulate:
        return Built(tuple(emulated()), {}, None)
    toolkit = cuda_build.find_toolkit()
    if chosen("", "build", [], o.skip):
        archs = o.archs.split(",") if o.archs else archs_of(gpus)
        programs, failed = build(archs)
        record.say(f"built for {', '.join(archs)} in {time.monotonic() - begun:.1f} s")
    else:
        programs, failed = find_built()
    return Built(tuple(programs), failed, sanitizer_of(toolkit))


def say_what_is_lacking(built: Built, gpus: Sequence[str], record: Record) -> None:
    """What the machine cannot show."""
    if built.sanitizer is None:
        record.say("no compute-sanitizer in the toolkit or on PATH: nothing runs under it")
    if len(gpus) < 4:
        two, more = (", ".join(names) for names in (NEED_TWO, MORE_WORLDS))
        record.say(f"{len(gpus)} GPU(s): {two} need two; {more}, and tests/gpu, try worlds of up to"
                   " 4 with a GPU for each rank")


def check_gpus(o: argparse.Namespace, record: Record) -> int:
    """Build and check everything chosen; return the exit status."""
    end = time.monotonic() + o.seconds
    record.say(f"gpu_check {' '.join(sys.argv[1:])}\nmachine: {common.machine()}\n"
               f"commit: {common.commit()}  date: {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
               f"versions: {common.versions()}")
    gpus, missing = ["the emulated device"] if o.emulate else [], ""
    try:
        gpus = gpus or common.gpus()
    except RuntimeError as error:
        if not o.archs:
            raise
        missing = str(error)
    record.say(f"GPUs: {'; '.join(gpus) or missing}\n")
    record.keep({"begun": time.time(), "commit": common.commit(), "machine": common.machine(),
                 "versions": common.versions(), "gpus": gpus})
    built = prepare(o, gpus, record)
    if not gpus:
        raise RuntimeError(f"{missing}\n{len(built.programs)} programs are built, "
                           f"{len(built.failed)} are not; nothing was run")
    todo = asked_for(o, checks_of(built.programs, built.sanitizer))
    outcomes = [Outcome(Check(name, (), "build"), checks.FAILED,
                        f"did not compile: {first_error(why)}", stderr=why)
                for name, why in built.failed.items()
                if any(chosen(name, stage, o.only, o.skip) for stage in ("build", stage_of(name)))]
    for outcome in outcomes:
        record.outcome(outcome)
    if not todo and not outcomes:
        if "build" in o.only:
            return 0
        raise RuntimeError(f"no check is named like {' or '.join(o.only)}")
    if not o.emulate:
        plugin, nccl = common.plugin_says()
        record.say(f"plugin: {plugin}\nNCCL: {nccl}")
        demand_products(plugin)
        say_what_is_lacking(built, gpus, record)
    outcomes += run_stages(todo, len(gpus), end, record)
    return report(outcomes, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    o = options(arguments)
    checks.end_by_exception()
    environment()
    if o.list:
        sanitizer = sanitizer_of(cuda_build.find_toolkit())
        for check in asked_for(o, checks_of(test_programs(), sanitizer)):
            print(f"{check.stage}: {check.name}")
        return 0
    record = Record(o.out, "gpu_check")
    try:
        return check_gpus(o, record)
    except RuntimeError as error:
        record.say(f"gpu_check: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
