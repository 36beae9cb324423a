"""Checkpoints from one format to another, in one process."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

from fsdpc import _core, distributed
from fsdpc.checkpoint import saving
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.pieces import FILE_DTYPES, Held, Piece, pieces_of
from fsdpc.checkpoint.source import Source, SourceTensor, open_source

_BY_FILE = {file: name for name, file in FILE_DTYPES.items()}


class Loose:
    """Tensors by name that are no module's: what a conversion saves.

    Parameters
    ----------
    tensors : dict of str to Tensor
    """

    def __init__(self, tensors: dict[str, _core.Tensor]) -> None:
        self.tensors = tensors

    def modules(self) -> list[Any]:
        """Return nothing: there are none."""
        return []


@pieces_of.register
def _(model: Loose, write: bool) -> Held:
    rank = distributed.rank()
    return Held(
        [
            Piece(name, tuple(t.shape), 0, t.numel(), t, rank)
            for name, t in model.tensors.items()
        ],
        {},
        [],
    )


def convert(path: Path, to: Path, layout: str = "full") -> None:
    """Write a checkpoint in another format.

    Parameters
    ----------
    path : Path
        Ours in either layout, Hugging Face's, a safetensors file; with torch, a DCP folder or a
        ``torch.save`` file of a flat dict of tensors.
    to : Path
        What to make; must not be there.
    layout : "full", "dcp" or "torch"
        Full safetensors with a manifest; a folder of PyTorch's distributed checkpoints; a
        ``torch.save`` file.

    Raises
    ------
    CheckpointError
        The source is damaged or of no known format.
    ImportError
        torch is needed and not installed.
    """
    if to.exists():
        raise CheckpointError(f"{to} is there already and is not written over")
    tensors, optimizer, content = _read(path)
    if layout == "full":
        _save_full(to, tensors, optimizer, content)
        return
    torch = importlib.import_module("torch")
    state = {name: _to_torch(torch, t) for name, t in tensors.items()}
    if optimizer:
        state |= {f"optimizer.{name}": _to_torch(torch, t) for name, t in optimizer.items()}
    if layout == "torch":
        torch.save(state, to)
    else:
        dcp = importlib.import_module("torch.distributed.checkpoint")
        dcp.save(state, checkpoint_id=str(to), no_dist=True)


Tensors = dict[str, _core.Tensor]


def _read(path: Path) -> tuple[Tensors, Tensors, dict[str, Any]]:
    if path.is_dir() and (path / ".metadata").exists():
        return (*_split(_read_dcp(path)), {})
    if path.is_file() and path.suffix != ".safetensors":
        torch = importlib.import_module("torch")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} holds more than tensors: {error}") from None
        if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
            raise CheckpointError(f"{path} is not a flat dict of tensors")
        return (*_split({name: _from_torch(t) for name, t in state.items()}), {})
    source = open_source(path)
    return _load_all(source, source.model), _load_all(source, source.optimizer), source.content


def _split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    own = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    states = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n not in own}
    return own, states


def _load_all(source: Source, table: dict[str, SourceTensor]) -> Tensors:
    paths = source.paths()
    number = {name: i for i, name in enumerate(paths)}
    tensors: Tensors = {}
    entries, want = [], []
    for name, t in table.items():
        if t.dtype not in _BY_FILE:
            raise CheckpointError(f"'{name}' is {t.dtype}, which fsdpc has no tensors of")
        tensors[name] = _core.empty(*t.shape, dtype=_BY_FILE[t.dtype])
        flat = tensors[name].reshape(-1)
        for part in t.parts:
            rows = flat[part.first : part.first + part.numel]
            entries.append((number[part.file], len(want), rows,
                            part.numel, t.dtype, part.begin, 0, 0, 0, 0))  # fmt: skip
            want.append((name, part))
    files = [str(source.folder / name) for name in paths]
    got = _core.read_pieces(files, entries, len(want), True)
    wrong = [f"'{name}' in {part.file}" for (name, part), crc in zip(want, got, strict=True)
             if part.crc is not None and part.crc != crc]  # fmt: skip
    if wrong:
        raise CheckpointError(f"{source.folder}: damaged: {', '.join(wrong)}")
    return tensors


def _save_full(to: Path, tensors: Tensors, optimizer: Tensors, content: dict[str, Any]) -> None:
    kept = {key: content[key] for key in ("optimizer", "scheduler", "scaler", "data", "rng",
                                          "aliases") if key in content}  # fmt: skip
    saving.save_loose(to, Loose(tensors), Loose(optimizer), kept, content.get("extra"))


def _to_torch(torch: Any, t: _core.Tensor) -> Any:
    if t.dtype is _core.bfloat16:
        return torch.from_numpy(t.float().numpy()).to(torch.bfloat16)  # exact, there and back
    return torch.from_numpy(t.numpy().copy())


def _from_torch(t: Any) -> _core.Tensor:
    torch = importlib.import_module("torch")
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return _core.tensor(t.float().numpy()).to(_core.bfloat16)
    return _core.tensor(t.numpy())


def _read_dcp(path: Path) -> Tensors:
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return {name: _from_torch(t) for name, t in state.items()}
