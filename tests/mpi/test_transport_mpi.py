"""Links over MPI, by each MPI that is installed; the C program says what it tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import need, need_mpi

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

sys.path.insert(0, str(ROOT / "tools"))
import ctest  # noqa: E402
import mpi_build  # noqa: E402
import native  # noqa: E402

FOLDER = ROOT / "build" / "mpi"
COMPILERS = mpi_build.find_compilers()
# Every test starts more processes than a small machine has cores.
OPTIONS = {"openmpi": ["--oversubscribe", "--bind-to", "none"], "mpich": []}

if not COMPILERS:
    need(f"{mpi_build.NONE}: {mpi_build.INSTALL}")

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def program() -> Path:
    """The C program, which opens the plugin as the extension does."""
    return ctest.build("plain", [ROOT / "tests" / "mpi" / "test_transport_mpi.c"])[0]


@pytest.fixture(scope="session", params=mpi_build.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    need_mpi(request.param)
    return request.param


@pytest.fixture(scope="session")
def start(program: Path, family: str) -> Start:
    """Start so many processes of the program in a mode."""
    plugin = mpi_build.build_plugin(family, COMPILERS[family], FOLDER)
    compiler = Path(COMPILERS[family])
    mpiexec = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    need(None if mpiexec.exists() else f"there is no {mpiexec}")
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def run(mode: str, processes: int, preload: str = "") -> subprocess.CompletedProcess[str]:
        command = [str(mpiexec), *OPTIONS[family], "-n", str(processes)]
        if preload:  # its launcher may not tell how a process ended
            command += ["sh", "-c", f'LD_PRELOAD={preload} "$@"; echo "status $?"', "sh"]
        command += [str(program), str(plugin), mode]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S,
                              env=environment)

    return run


@pytest.mark.parametrize("processes", [2, 4])
def test_messages(start: Start, processes: int) -> None:
    done = start("suite", processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" checks, 0 failed") == processes, done.stdout + done.stderr


def test_an_abort_reaches_all(start: Start) -> None:
    done = start("abort", 3)
    assert done.stdout.count(" checks, 0 failed") == 3, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["late", "again", "orphan", "names"])
def test_clean_ends(start: Start, mode: str) -> None:
    """Whoever is done first leaves the others alone, or says that it left; MPI starts once.

    Shared memory of MPICH 5 loses its name early, so that a killed rank leaves none.
    """
    done = start(mode, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" checks, 0 failed") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["leave", "fail"])
def test_ends_that_are_not_clean(start: Start, family: str, mode: str) -> None:
    if (family, mode) == ("mpich", "leave"):
        pytest.skip("MPICH's mpiexec takes status 0 for a success, with or without MPI_Finalize")
    assert start(mode, 2).returncode != 0


def test_mpi_finalize_has_a_deadline(start: Start, tmp_path: Path) -> None:
    """It never returns, as that of MPICH over UCX's TCP did once; the exit status is kept."""
    source, library = tmp_path / "stuck.c", tmp_path / "stuck.so"
    source.write_text(
        "#include <unistd.h>\nint MPI_Finalize(void)\n{\n    for (;;)\n        pause();\n}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = start("stuck", 2, str(library))
    # MPICH's launcher may end the second process when the first has ended.
    said = "MPI_Finalize has not returned within 1 s (FSDPC_TIMEOUT_S)"
    assert done.stderr.count(said) in (1, 2), done.stdout + done.stderr
    assert set(re.findall(r"status (\d+)", done.stdout)) == {"0"}, done.stdout + done.stderr


def test_a_world_of_another_size(program: Path, start: Start, family: str) -> None:
    """A process that no mpiexec started is a world of one."""
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    plugin = FOLDER / mpi_build.library_name(family)
    done = subprocess.run([program, plugin], capture_output=True, text=True, env=environment,
                          timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert "MPI has 1 processes and this world 2 ranks" in done.stdout, done.stdout + done.stderr


def test_another_family_is_refused(program: Path, start: Start, family: str) -> None:
    """Its library is in the process already, so the plugin's calls would go there."""
    others = [name for name in COMPILERS if name != family]
    need(None if others else "one family of MPI is installed")
    plugin = mpi_build.build_plugin(others[0], COMPILERS[others[0]], FOLDER)
    listed = subprocess.run(["ldd", FOLDER / mpi_build.library_name(family)], capture_output=True,
                            text=True, check=True).stdout
    library = next(line.split()[2] for line in listed.splitlines() if "libmpi" in line)
    done = subprocess.run([program, plugin], capture_output=True, text=True, timeout=TIMEOUT_S,
                          env={**os.environ, "LD_PRELOAD": library})
    assert done.returncode == 2
    assert f"refused: {plugin.name} was built with" in done.stdout, done.stdout + done.stderr


def test_a_compiler_beside_python_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip puts that of its wheels there, and may be run outside an activated environment."""
    (tmp_path / "mpi.h").write_text("#define MPICH 1\n")
    compiler = tmp_path / "mpicc-of-a-wheel"
    compiler.write_text(f'#!/bin/sh\nexec cc -I{tmp_path} "$@"\n')
    compiler.chmod(0o755)
    assert mpi_build.find_compilers([compiler.name]) == {}
    monkeypatch.setattr(mpi_build, "SCRIPTS", str(tmp_path))
    assert mpi_build.find_compilers([compiler.name]) == {"mpich": str(compiler)}


def test_plugins_are_those_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDPC_MPI: 0 removes them, 1 wants one, nothing takes what there is."""
    plugin = tmp_path / mpi_build.library_name("mpich")
    plugin.touch()
    monkeypatch.setenv("FSDPC_MPI", "0")
    mpi_build.install(tmp_path)
    assert not plugin.exists()
    monkeypatch.setenv("FSDPC_MPI", "2")
    with pytest.raises(RuntimeError, match="FSDPC_MPI=2 is neither 0 nor 1"):
        mpi_build.install(tmp_path)
    monkeypatch.setenv("FSDPC_MPI", "1")
    monkeypatch.setattr(mpi_build, "find_compilers", dict)
    with pytest.raises(RuntimeError, match="or build without FSDPC_MPI=1"):
        mpi_build.install(tmp_path)
    plugin.touch()
    monkeypatch.setattr(mpi_build, "find_compilers", lambda: {"mpich": "false"})
    with pytest.raises(native.CompileError):
        mpi_build.install(tmp_path)
    monkeypatch.delenv("FSDPC_MPI")
    mpi_build.install(tmp_path)
    assert not plugin.exists() and f"{plugin.name} is not built" in capsys.readouterr().err
