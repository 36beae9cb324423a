"""What a build says: how many files there are to compile, and how many are done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import native  # noqa: E402


class Fake(native.Builder):
    """Compiles nothing; a file is stale until it was compiled once."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.compiled: list[Path] = []

    def is_stale(self, source: Path, flags: object = ()) -> bool:
        return source not in self.compiled

    def compile_one(self, source: Path, flags: object = ()) -> None:
        self.compiled.append(source)


def test_a_build_counts_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    builder, every = Fake(tmp_path), native.sources()
    assert len(every) > 100
    objects = builder.compile(every)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith(f"compiling {len(every)} files, ")
    assert said[-1] == f"{len(every)}/{len(every)} compiled"
    assert objects == builder.compile(every) == [builder.object_path(path) for path in every]
    assert capfd.readouterr().err == ""


def test_a_few_files_are_compiled_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Fake(tmp_path).compile(native.sources(["base"])[: native.Counter.LEAST - 1])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("files", "cores", "said"), [
    (220, 2, "about 2 minutes"), (220, 4, "about a minute"), (30, 2, "less than a minute"),
])  # fmt: skip
def test_how_long_it_may_take(
    files: int, cores: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(native, "usable_cores", lambda: cores)
    native.Counter(files)
    assert capfd.readouterr().err == f"compiling {files} files, {said}\n"


def test_every_failure_of_a_build_is_told(tmp_path: Path) -> None:
    class Failing(Fake):
        def compile_one(self, source: Path, flags: object = ()) -> None:
            raise native.CompileError(source.name)

    with pytest.raises(native.CompileError) as raised:
        Failing(tmp_path).compile(native.sources(["base"]))
    assert str(raised.value).splitlines() == [p.name for p in native.sources(["base"])]
