"""Files made to mislead: each is refused for its reason, and nothing is read beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import fsdpc
from fsdpc import _core, checkpoint
from fsdpc.checkpoint import CheckpointError

DATA = Path(__file__).resolve().parents[1] / "data" / "make_hostile.py"
CORPUS = Path(__file__).resolve().parents[1] / "fuzz" / "corpus" / "safetensors"
_spec = importlib.util.spec_from_file_location("make_hostile", DATA)
hostile = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hostile)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    hostile.write(made)
    return made


@pytest.mark.parametrize("name", hostile.CASES)
def test_files(name: str, folder: Path) -> None:
    path = folder / f"{name}.safetensors"
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        _core.safetensors_header(path)
    assert hostile.CASES[name][1] in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.ranks([1, 2])
def test_load_refuses_all_of_them(folder: Path) -> None:
    model = {"model": fsdpc.nn.Linear(1, 1)}
    for name in hostile.CASES:
        with pytest.raises(CheckpointError):
            checkpoint.load(folder / f"{name}.safetensors", model)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", hostile.INDICES)
def test_indices(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=hostile.INDICES[name][1]):
        checkpoint.load(folder / f"index_{name}", {"model": fsdpc.nn.Linear(1, 1)})


def test_a_good_one_is_read(folder: Path) -> None:
    path = folder / "good.safetensors"
    path.write_bytes(hostile.framed(hostile.one(), hostile.FOUR))
    tensors, metadata, begin, _ = _core.safetensors_header(path)
    assert tensors == [("a", "F32", (1,), begin, begin + 4)] and metadata == {}


def test_the_corpus_of_the_fuzzer(tmp_path: Path) -> None:
    """Inputs that once took a path of their own: read or refused, nothing else."""
    found = list(CORPUS.iterdir())
    assert len(found) > 50
    read = 0
    for path in found:
        try:
            _core.safetensors_header(path)
            read += 1
        except (ValueError, TypeError, NotImplementedError):
            pass
    assert 0 < read < len(found)
