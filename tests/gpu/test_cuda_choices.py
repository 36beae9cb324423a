"""What $FSDPC_CUDA chooses, with and without a toolkit; nothing is compiled here."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
import native  # noqa: E402

TOOLKIT = cuda_build.Toolkit(Path("/opt/cuda/bin/nvcc"), ())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a toolkit, where a plugin that is compiled is one line of text."""

    def build(out: Path, stays: bool) -> None:
        if cuda_build.find_toolkit() is None:
            raise RuntimeError(cuda_build.NO_TOOLKIT)
        out.write_text("compiled")

    monkeypatch.delenv("FSDPC_CUDA", raising=False)
    monkeypatch.setattr(cuda_build, "find_toolkit", lambda: None)
    monkeypatch.setattr(cuda_build, "build_plugin", build)
    return monkeypatch


def installed(folder: Path, in_place: bool = False) -> tuple[bool, str]:
    """Whether `install` left a plugin in a folder, and its reason if it left none."""
    cuda_build.install(folder, in_place)
    plugin, note = folder / cuda_build.PLUGIN, folder / cuda_build.REASON
    assert plugin.exists() != note.exists()
    return plugin.exists(), note.read_text().strip() if note.exists() else ""


def test_it_is_built_where_it_is_wanted(
    machine: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And not because there happens to be a toolkit: it takes minutes."""
    machine.setattr(cuda_build, "find_toolkit", lambda: TOOLKIT)
    assert installed(tmp_path) == (False, cuda_build.LEFT_OUT)
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "FSDPC_CUDA=1" in told
    machine.setenv("FSDPC_CUDA", "1")
    assert installed(tmp_path) == (True, "")
    machine.setattr(cuda_build, "find_toolkit", lambda: None)
    with pytest.raises(RuntimeError, match="no nvcc"):
        installed(tmp_path)
    machine.setenv("FSDPC_CUDA", "0")
    assert installed(tmp_path) == (False, cuda_build.LEFT_OUT)  # an older build's is gone


def test_in_place_it_is_kept_new_but_not_begun(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(cuda_build, "find_toolkit", lambda: TOOLKIT)
    assert installed(tmp_path, in_place=True) == (False, cuda_build.LEFT_OUT)
    (tmp_path / cuda_build.REASON).unlink()
    (tmp_path / cuda_build.PLUGIN).write_text("old")
    assert installed(tmp_path, in_place=True) == (True, "")
    assert (tmp_path / cuda_build.PLUGIN).read_text() == "compiled"


def test_only_a_plugin_that_stays_looks_in_this_python_s_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "isolated")])
    here = f"{sysconfig.get_path('purelib')}/nvidia/nccl/lib"
    goes, stays = (cuda_build.run_path(each).split(":") for each in (False, True))
    assert here in stays and set(goes) < set(stays) and goes[0] == "$ORIGIN/../nvidia/nccl/lib"
    assert all(each.startswith("$ORIGIN/") for each in goes)
    assert not any(str(tmp_path) in each for each in stays)


def test_other_words_are_refused(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setenv("FSDPC_CUDA", "yes")
    with pytest.raises(RuntimeError, match="FSDPC_CUDA=yes is neither 0 nor 1"):
        installed(tmp_path)


def test_the_build_asks_for_a_toolkit_where_one_is_demanded_and_missing(
    machine: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("setuptools")
    import build_backend

    assert cuda_build.packages_needed() == []
    machine.setenv("FSDPC_CUDA", "1")
    machine.setattr(build_backend.build_meta, "get_requires_for_build_wheel", lambda _: ["wheel"])
    machine.setattr(build_backend.build_meta, "get_requires_for_build_editable", lambda _: [])
    assert build_backend.get_requires_for_build_wheel() == ["wheel", *cuda_build.TOOLKIT_PACKAGES]
    assert build_backend.get_requires_for_build_editable() == [*cuda_build.TOOLKIT_PACKAGES]
    machine.setattr(cuda_build, "find_toolkit", lambda: TOOLKIT)
    assert build_backend.get_requires_for_build_wheel() == ["wheel"]


def test_the_toolkit_is_cuda_home_s_then_pip_s_then_the_path_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("home", "site/nvidia/cu13", "usr"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "include").mkdir()
        (tmp_path / name / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / name / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'usr/bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    found = cuda_build.find_toolkit()
    assert found and found.nvcc == tmp_path / "home/bin/nvcc"
    assert found.includes[0] == tmp_path / "home/include"
    monkeypatch.delenv("CUDA_HOME")
    found = cuda_build.find_toolkit()
    assert found and found.nvcc == tmp_path / "site/nvidia/cu13/bin/nvcc"
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(cuda_build.sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    found = cuda_build.find_toolkit()
    assert found and found.nvcc == tmp_path / "usr/bin/nvcc"


def test_cudnn_is_compiled_in_where_all_its_headers_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site, home = tmp_path / "site/include", tmp_path / "home/include"
    for folder, names in ((site, cuda_build.CUDNN_HEADERS[:1]), (home, cuda_build.CUDNN_HEADERS)):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
    (home / cuda_build.CUDNN_HEADERS[0]).unlink()
    monkeypatch.setattr(cuda_build.sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    toolkit = cuda_build.Toolkit(tmp_path / "home/bin/nvcc", (home,))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other")])
    assert cuda_build.cudnn_commands(toolkit) == []
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    [(source, command)] = cuda_build.cudnn_commands(toolkit)
    assert source.is_file() and str(site) in command and str(home) in command
    (home / "nvrtc.h").unlink()
    assert cuda_build.cudnn_commands(toolkit) == []


def test_a_missing_compiler_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(native.CompileError) as caught:
        native.Builder(tmp_path).compile(native.sources(["base"]))
    assert str(caught.value).startswith("there is no C compiler 'no-such-cc': install")
    assert str(caught.value).count("no-such-cc") == 1


def test_missing_headers_of_python_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(native.CompileError, match=r"Python\.h is not in .*python3-dev"):
        native.build_core(tmp_path / "core.so")


@pytest.mark.parametrize("archs, codes", [
    (["80", "90"], ["sm_80", "sm_90", "compute_90"]),
    (["80", "90-virtual"], ["sm_80", "compute_90"]),
    (["90-virtual"], ["compute_90"]),
])
def test_archs_are_machine_code_or_ptx(archs: list[str], codes: list[str]) -> None:
    _, command = cuda_build.kernel_commands(TOOLKIT, archs)[0]
    assert [word.split(",code=")[1] for word in command if "-gencode" in word] == codes
