"""``fsdpc ckpt convert``: every format to every other, byte for byte, without holding tensors."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint.convert import convert

from .common import Odd
from .test_command import alone, output
from .test_resume import Run


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.safetensors")}


@pytest.mark.ranks(1)
def test_all_that_is_no_tensor_goes_along(tmp_path: Path) -> None:
    made = Run("FULL_SHARD").train(2)
    state = {**made.state, "extra": {"a": (1, None), 3: float("inf")}}
    checkpoint.save(tmp_path / "c", state)
    convert(tmp_path / "c", tmp_path / "copy")
    assert len(files(tmp_path / "c")) == 2 and files(tmp_path / "copy") == files(tmp_path / "c")
    found = [json.loads((tmp_path / f / "manifest.json").read_text()) for f in ("c", "copy")]
    assert {**found[0], "checksum": 0} == {**found[1], "checksum": 0}  # in another order


@alone
@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_to_torch_and_back(form: str, tmp_path: Path) -> None:
    model = Odd()
    model.register_buffer("none", fsdpc.tensor(np.zeros((0, 3), np.float32)))
    model.register_buffer("flags", fsdpc.tensor(np.array([True, False, True])))
    model.register_buffer("scalar", fsdpc.tensor(np.array(2.5)))
    checkpoint.save(tmp_path / "c", {"model": model})
    code, text = output("convert", tmp_path / "c", tmp_path / "t", "--layout", form)
    assert (code, text) == (0, "")
    want = load_file(tmp_path / "c" / "model.safetensors")
    if form == "torch":
        found = torch.load(tmp_path / "t", weights_only=True)
    else:
        found = {name: torch.empty_like(t) for name, t in want.items()}
        dcp.load(found, checkpoint_id=str(tmp_path / "t"), no_dist=True)
    assert found.keys() == want.keys()
    for name, t in want.items():
        assert found[name].dtype == t.dtype and torch.equal(found[name], t), name
    assert output("convert", tmp_path / "t", tmp_path / "back")[0] == 0
    assert files(tmp_path / "c") == files(tmp_path / "back")
    code, text = output("convert", tmp_path / "t", tmp_path / "back")
    assert code == 1 and "not written over" in text
    assert {p.name for p in tmp_path.iterdir()} == {"c", "t", "back"}  # no scratch is left


@alone
def test_what_a_dcp_folder_has_beside_tensors_is_named(tmp_path: Path) -> None:
    state = {"a": torch.arange(6), "steps": 3, "optimizer.a.exp_avg": torch.ones(6)}
    dcp.save(state, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    code, text = output("convert", tmp_path / "d", tmp_path / "c")
    assert code == 0 and "left out, as they are no tensors: steps" in text
    assert load_file(tmp_path / "c" / "model.safetensors")["a"].tolist() == list(range(6))
    assert (tmp_path / "c" / "optimizer-00001-of-00001.safetensors").exists()
    found = checkpoint.inspect(tmp_path / "c")
    assert (found.world, found.model, found.strategies, found.meshes) == (1, None, (), ())


@alone
def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    """Each is refused by its reason, and nothing is made."""

    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("ran",))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    torch.save({"a": torch.ones(3), "b": 1}, tmp_path / "mixed.pt")
    torch.save({"a": torch.ones(3, dtype=torch.complex64)}, tmp_path / "complex.pt")
    torch.save({"a": torch.ones(3000)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-2000])
    save_file({"a": torch.ones(3, dtype=torch.int8)}, tmp_path / "int8.safetensors")
    checkpoint.save(tmp_path / "flipped", {"model": Odd()})
    data = bytearray((tmp_path / "flipped" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped" / "model.safetensors").write_bytes(data)
    for name, words in (
        ("evil.pt", "holds more than tensors"),
        ("mixed.pt", "is not a flat dict of tensors"),
        ("complex.pt", "'a' is torch.complex64, which fsdpc has no tensors of"),
        ("cut.pt", "is no file of torch.save, or damaged"),
        ("int8.safetensors", "'a' is I8, which fsdpc has no tensors of"),
        ("flipped", "damaged: 'frozen' in model.safetensors|damaged: 'narrow' in"),
    ):
        code, text = output("convert", tmp_path / name, tmp_path / "x")
        assert code == 1 and any(w in text for w in words.split("|")), (name, text)
        assert not (tmp_path / "x").exists()


@alone
def test_torch_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    """Of before the zip format, and tensors that are not contiguous: held, and right."""
    state = {"a": torch.arange(12.0).reshape(3, 4).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    for name, new in (("old.pt", False), ("new.pt", True)):
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=new)
        convert(tmp_path / name, tmp_path / name[:3])
        found = load_file(tmp_path / name[:3] / "model.safetensors")
        assert all(torch.equal(found[n], t) for n, t in state.items())


@alone
def test_data_at_odd_places(tmp_path: Path) -> None:
    """Headers of others need not be a multiple of any element."""
    data = np.arange(5, dtype=np.float32)
    header = b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'
    header += b" " * (-len(header) % 4 + 1)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    for form in ("full", "torch", "dcp"):
        convert(path, tmp_path / form, form)
    assert torch.load(tmp_path / "torch")["a"].tolist() == list(range(5))
    assert load_file(tmp_path / "full" / "model.safetensors")["a"].tolist() == list(range(5))


class Watch:
    """The most memory of its own, not of files, that this process has while it is entered."""

    def __enter__(self) -> Watch:
        self.begin = self.most = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @staticmethod
    def _now() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) << 10

    def _look(self) -> None:
        while not self._over.wait(0.0005):
            self.most = max(self.most, self._now())

    @property
    def grown(self) -> int:
        return self.most - self.begin


M_MMAP_THRESHOLD = -3  # of malloc.h
TURNS = [
    ("safetensors", "full"), ("full", "torch"), ("full", "dcp"), ("torch", "full"), ("dcp", "full"),
]  # fmt: skip


@alone
def test_nothing_is_held(tmp_path: Path) -> None:
    """64 MiB in 16 tensors go from format to format in a few tensors' memory."""
    # What is freed goes back at once: else malloc keeps more or less of it, by how threads meet.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    tensors = {f"{i:02}": torch.full((1 << 20,), float(i)) for i in range(16)}
    save_file(tensors, tmp_path / "large.safetensors")
    save_file({"small": torch.ones(3)}, tmp_path / "small.safetensors")
    del tensors
    for size in ("small", "large"):  # the first imports and warms up everything
        made = {"safetensors": tmp_path / f"{size}.safetensors"}
        for source, form in TURNS:
            to = tmp_path / f"{size}-{source}-{form}"
            with Watch() as watch:
                convert(made[source], to, form)
            assert size == "small" or watch.grown < 24 << 20, (source, form, watch.grown)
            made.setdefault(form, to)
