"""benchmarks/gpu_check.py: the checks it makes, their order, what it says without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
import checks  # noqa: E402
import common  # noqa: E402
import gpu_check  # noqa: E402
from checks import Check, Outcome  # noqa: E402

import cuda_build  # noqa: E402
import native  # noqa: E402

PROGRAMS = gpu_check.test_programs()
TESTS = [path.name for path in PROGRAMS if path.name.startswith("test_")]
SANITIZER = Path("/x/compute-sanitizer")


def names(found: list[Check], stage: str) -> list[str]:
    return [check.name for check in found if check.stage == stage]


def test_every_test_is_a_check_and_speed_comes_first() -> None:
    found = gpu_check.checks_of(PROGRAMS, SANITIZER)
    assert TESTS and names(found, "ctests") == TESTS
    assert names(found, "kernel-speed") == ["bench_kernels"]
    stages = list(dict.fromkeys(check.stage for check in found))
    assert ["build", *stages] == list(gpu_check.STAGES)
    assert {c.stage for c in found if c.speed} == {"kernel-speed", "step-speed"}
    assert not names(gpu_check.checks_of(PROGRAMS, None), "sanitizers")


def test_each_has_a_limit() -> None:
    limits = {"kernel-speed": 100, "step-speed": 390, "ctests": 60, "pytest": 300,
              "sanitizers": 100}
    for check in gpu_check.checks_of(PROGRAMS, SANITIZER):
        assert check.cap_s == limits[check.stage], check.name
    [steps] = [c for c in gpu_check.checks_of(PROGRAMS, None) if c.stage == "step-speed"]
    assert steps.command[-2:] == ("--shape-seconds", "120")
    assert steps.command[steps.command.index("--engines") + 1] == "fsdp2"


def test_c_tests_demand_a_gpu_and_python_ones_do_not_see_that() -> None:
    """The engine knows the name, and the tests in Python skip by themselves."""
    for check in gpu_check.checks_of(PROGRAMS, SANITIZER):
        demanded = check.environment.get("FSDPC_TEST_GPU") == "1"
        assert demanded == (check.stage in ("kernel-speed", "ctests", "sanitizers")), check.name


def test_what_sanitizers_look_at() -> None:
    found = {c.name: c.command for c in gpu_check.sanitizer_checks(PROGRAMS, SANITIZER)}
    for name in TESTS:
        includes = (ROOT / "tests" / "gpu" / f"{name}.c").read_text()
        nccl = any(word in includes for word in ("nccl_rig.h", "nccl_load.h", "test_comm_nccl"))
        assert (f"{name} under memcheck" in found) != nccl, name
        ours = name.endswith("_kernels") and name != "test_product_kernels"  # cuBLASLt's
        assert (f"{name} under racecheck" in found) == ours, name
    command = found["test_graph under memcheck"]
    assert command[command.index("--report-api-errors") + 1] == "no"
    assert "--report-api-errors" not in found["test_nn_kernels under racecheck"]


def test_tests_of_several_gpus_are_those_that_loop_over_ranks_with_one_each() -> None:
    emulated = re.compile(r"(?ms)^#if defined\(FSDPC_EMU\)$.*?^#(?:else|endif)")
    texts = {path.stem: emulated.sub("", path.read_text())
             for path in (ROOT / "tests" / "gpu").glob("test_*.c")}
    looping = {name: "size = 2; size <= most" in text for name, text in texts.items()
               if re.search(r"<= most|(?<!&)\bmost[,)]", text.partition("int main")[2])}
    assert {name for name, from_two in looping.items() if from_two} == set(gpu_check.NEED_TWO)
    assert {name for name, from_two in looping.items() if not from_two} == set(
        gpu_check.MORE_WORLDS)


def test_choices() -> None:
    def names_of(*words: str, skip: tuple[str, ...] = ()) -> list[str]:
        return [c.name for c in gpu_check.checks_of(PROGRAMS, SANITIZER)
                if gpu_check.chosen(c.name, c.stage, words, skip)]

    assert names_of("pytest") == ["tests/gpu"]
    assert names_of("ctests", skip=("streams",)) == [n for n in TESTS if n != "test_streams"]
    assert names_of("test_graph") == ["test_graph", "test_graph under memcheck"]
    assert names_of("kernel-speed", "step-speed") == ["bench_kernels", "bench_gpu.py"]
    assert names_of("build") == names_of("nothing like that") == []


def test_stages_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def python(code: str) -> tuple[str, ...]:
        return (sys.executable, "-c", code)

    todo = [Check("late", python("print('x: 1 checks, 0 failed')"), "sanitizers",
                  judge=checks.c_test),
            Check("pair", python("pass"), "ctests", gpus=2),
            Check("none", python("print('x: no GPU, nothing tested')"), "ctests",
                  judge=checks.c_test),
            Check("rows", python("print('4 TB/s'); raise SystemExit(1)"), "kernel-speed",
                  speed=True)]
    record = checks.Record(tmp_path, "gpu_check")
    outcomes = gpu_check.run_stages(todo, 1, time.monotonic() + 60, record)
    assert [(o.check.name, o.state) for o in outcomes] == [
        ("rows", checks.FAILED), ("pair", checks.LACKING), ("none", checks.UNTESTED),
        ("late", checks.HELD)]
    assert gpu_check.report(outcomes, record) == 1
    said = capsys.readouterr().out
    assert "4 TB/s" in said and "not here: needs 2 GPUs, there is 1" in said
    assert "4 checks: 1 failed, 1 not here, 1 nothing tested, 1 held" in said
    assert gpu_check.report([o for o in outcomes if o.good], record) == 0
    assert gpu_check.report([outcomes[2]], record) == 1 and gpu_check.report([], record) == 1
    [never] = gpu_check.run_stages(todo[:1], 1, time.monotonic(), record)
    assert never.state == checks.NOT_RUN and not never.good


def test_products_of_the_plain_kernel_are_refused() -> None:
    gpu_check.demand_products("CUDA 13.0, 1 GPU(s), products by cuBLASLt 13.1.0, for attention")
    with pytest.raises(RuntimeError, match="without cuBLASLt") as told:
        gpu_check.demand_products("CUDA 13.0, 1 GPU(s), products by the plain kernel (no libcu")
    assert "nvidia/cu13/lib" in str(told.value)
    with pytest.raises(RuntimeError, match="the plugin none; it says: not built: no nvcc"):
        gpu_check.demand_products("not built: no nvcc")


def test_archs_are_those_of_the_gpus() -> None:
    h200, ada = "NVIDIA H200, 580.1, 143771 MiB, 9.0", "NVIDIA L4, 580.1, 23034 MiB, 8.9"
    assert gpu_check.archs_of([h200, h200]) == ["90"]
    assert gpu_check.archs_of([h200, ada, "NVIDIA B200, 580.1, 1 MiB, 10.0"]) == ["89", "90", "100"]


def run_here(tmp_path: Path, *arguments: str, script: str | None = None) -> tuple[int, str]:
    """gpu_check's status and output, on a PATH whose nvidia-smi is this shell script."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    if script is not None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    done = subprocess.run([sys.executable, "benchmarks/gpu_check.py", *arguments], cwd=ROOT,
                          env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    status, said = run_here(tmp_path, script="echo 'no devices were found'; exit 6")
    assert status == 2 and "ended with 6 and said: no devices were found" in said
    assert (tmp_path / "out" / "gpu_check.log").read_text() == said


def test_the_checks_are_listed_without_a_build(tmp_path: Path) -> None:
    status, said = run_here(tmp_path, "--list", "--only", "ctests", "--skip", "nccl")
    assert status == 0
    assert said.splitlines() == [f"ctests: {name}" for name in TESTS if "nccl" not in name]


def test_a_program_that_does_not_compile_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the sources are given to it: the compiler is the C one, and nothing is linked to CUDA."""
    sources = [ROOT / "tests" / "c" / name for name in ("test_status.c", "test_dtype.c")]
    broken = ROOT / "build" / "check" / "test_broken.c"
    broken.parent.mkdir(parents=True, exist_ok=True)
    broken.write_text("int main(void) { return undeclared; }\n")
    linker = tmp_path / "bin" / "nvcc"
    linker.parent.mkdir()
    linker.write_text("#!/bin/sh\nfor word; do shift; case $word in -cudart=*|-Xlinker=*) ;; "
                      "*) set -- \"$@\" \"$word\";; esac; done\nexec cc \"$@\"\n")
    linker.chmod(0o755)
    monkeypatch.setattr(cuda_build, "find_toolkit", lambda: cuda_build.Toolkit(linker, ()))
    for name in ("cudnn_commands", "kernel_commands"):
        monkeypatch.setattr(cuda_build, name, lambda *_: [])
    monkeypatch.setattr(cuda_build, "without_border", lambda: [])
    monkeypatch.setattr(cuda_build, "test_sources", lambda: [*sources, broken])
    monkeypatch.setattr(cuda_build, "object_folder", lambda _: tmp_path / "objects")
    monkeypatch.setattr(cuda_build, "tests_folder", lambda: tmp_path / "tests")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_broken").write_text("an older one")
    programs, failed = cuda_build.build_tests(["90"])
    broken.unlink()
    assert [path.name for path in programs] == ["test_status", "test_dtype"]
    assert subprocess.run([programs[0]], capture_output=True).returncode == 0
    assert list(failed) == ["test_broken"] and not (tmp_path / "tests" / "test_broken").exists()
    assert "undeclared" in gpu_check.first_error(failed["test_broken"])
    before = [path.stat().st_mtime_ns for path in programs]
    monkeypatch.setattr(cuda_build, "test_sources", lambda: sources)
    assert cuda_build.build_tests(["90"]) == (programs, {})
    assert before == [path.stat().st_mtime_ns for path in programs]  # nothing was linked again


def test_an_extension_is_looked_for_where_this_python_does() -> None:
    import fsdpc._core

    assert native.core_in_place().name == Path(fsdpc._core.__file__).name


def test_the_commit_of_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FSDPC_COMMIT", raising=False)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "unknown"  # no repository
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common.commit() == "unknown"  # no git
    monkeypatch.setenv("FSDPC_COMMIT", "0123abc")
    assert common.commit() == "0123abc"
    assert f"Python {sys.version.split()[0]}, numpy " in common.versions()


def test_a_table_of_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(Check("x", (), "ctests"), checks.FAILED, "exit 1: a | b" + "c" * 400)
    gpu_check.report([outcome], checks.Record(tmp_path, "gpu_check"))
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ctests")]
    assert row.count("|") == 5 and len(row) < 220
