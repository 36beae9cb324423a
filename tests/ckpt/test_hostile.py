"""Files made to mislead: each is refused for its reason, and nothing is read beside it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

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
    open_before = os.listdir("/proc/self/fd")
    for name in hostile.CASES:
        with pytest.raises(CheckpointError):
            checkpoint.load(folder / f"{name}.safetensors", model)
    assert os.listdir("/proc/self/fd") == open_before


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", hostile.INDICES)
def test_indices(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=hostile.INDICES[name][1]):
        checkpoint.load(folder / f"index_{name}", {"model": fsdpc.nn.Linear(1, 1)})


MANIFESTS: dict[str, tuple[tuple[Any, ...], Any, str]] = {  # where, what is put there, the reason
    "no tensors": (("tensors",), None, "'tensors' must be there as a dict"),
    "a tensor that is none": (("tensors", "model", "weight"), 3, "tensor 'weight': its entry"),
    "unknown dtype": (("tensors", "model", "weight", "dtype"), "F12", "'F12', which is none of"),
    "negative extent": (("tensors", "model", "weight", "shape"), [-2, -8], "whole number from 0"),
    "float extent": (("tensors", "model", "weight", "shape"), [4.0, 4], "whole number"),
    "overflow": (("tensors", "model", "weight", "shape"), [2**40, 2**40], "beyond memory"),
    "offsets of others": (("tensors", "model", "weight", "offsets"), [0, 8], "are not those of"),
    "three offsets": (("tensors", "model", "weight", "offsets"), [0, 64, 64], "are not two"),
    "no file": (("tensors", "model", "weight", "file"), "../x", "none of model.safetensors"),
    "no checksum": (("tensors", "model", "weight", "crc32c"), "0x00", "8 hexadecimal digits"),
    "another shape": (("tensors", "model", "weight", "shape"), [2, 8], "holds other tensors"),
    "a path": (("files",), {"../model.safetensors": {
        "bytes": 1, "header_bytes": 1, "header_crc32c": "00000000"}}, "none of ../model"),
    "header beyond": (("files", "model.safetensors", "header_bytes"), 2**60, "'header_bytes'"),
    "layout": (("layout",), "striped", "version 1 with layout 'striped'; this fsdpc reads"),
    "world": (("world",), 0, "'world' must be"),
    "seed": (("rng", "seed"), 2**64, "'seed' must be"),
    "strategies": (("strategies",), [3], "strategies must be str"),
    "another version": (("version",), 2, "version 2 with layout 'full'; this fsdpc reads"),
    "of others": ((), None, "not a manifest of fsdpc"),
}  # fmt: skip


@pytest.mark.ranks([1, 2])
def test_manifests_whose_checksum_is_right(tmp_path: Path) -> None:
    """A checksum proves no good will: each lie is refused for what it is, on every rank."""
    model = {"model": fsdpc.nn.Linear(4, 4)}
    for name, (where, what, reason) in MANIFESTS.items():
        folder = tmp_path / name
        checkpoint.save(folder, model)
        content = json.loads((folder / "manifest.json").read_text())
        del content["checksum"]
        holder = content
        for key in where[:-1]:
            holder = holder[key]
        if where:
            holder[where[-1]] = what
        else:
            content = {"a": 1}
        text = (json.dumps(content)[:-1] + ', "checksum":"').encode()
        fsdpc.barrier()
        if fsdpc.rank() == 0:
            digits = f"{_core.crc32c(0, text):08x}"
            (folder / "manifest.json").write_bytes(text + digits.encode() + b'"\n}\n')
        fsdpc.barrier()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, model)
        assert reason in str(caught.value), name


def test_a_good_one_is_read(folder: Path) -> None:
    path = folder / "good.safetensors"
    path.write_bytes(hostile.framed(hostile.one(), hostile.FOUR))
    begin = path.stat().st_size - 4
    assert _core.safetensors_header(path) == [("a", "F32", (1,), begin, begin + 4)]


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
