"""Human-readable checkpoint contents: `inspect`, and the tables of ``fsdpc ckpt ls``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpc.checkpoint import manifest
from fsdpc.checkpoint.source import Source, damaged, open_source
from fsdpc.checkpoint.values import decode
from fsdpc.display import html
from fsdpc.display.svg import size

ROWS = 200  # tensors that a notebook shows
TITLES = ("tensor", "dtype", "shape", "size", "crc32c", "file")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint.

    Parameters
    ----------
    kind : "model" or "optimizer"
    name : str
    dtype : str
        Dtype as named by safetensors, such as ``F32`` or ``BF16``.
    shape : tuple of int
    nbytes : int
    file : str
        The file that contains the tensor.
    crc32c : int or None
        The saved checksum; None in files from other libraries.

    Examples
    --------
    >>> from fsdpc.checkpoint import TensorInfo
    >>> TensorInfo("model", "head.weight", "F32", (2, 3), 24, "a.safetensors", None).cells()
    ('head.weight', 'F32', '2 x 3', '24 B', '-', 'a.safetensors')
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    crc32c: int | None

    def cells(self) -> tuple[str, ...]:
        """Return the tensor's row in a table whose headings are `TITLES`."""
        return (
            self.name if self.kind == "model" else f"[optimizer] {self.name}",
            self.dtype,
            " x ".join(map(str, self.shape)) or "scalar",
            size(self.nbytes),
            "-" if self.crc32c is None else f"{self.crc32c:08x}",
            self.file,
        )


@dataclass(frozen=True)
class CheckpointInfo:
    """The result of :func:`inspect`.

    Parameters
    ----------
    path : Path
    step : int or None
        The run's step, if saved by :class:`CheckpointManager` or in ``extra["step"]``.
    world : int or None
        Number of ranks that saved; None in files from other libraries.
    strategies : tuple of str
        The units' strategies.
    meshes : tuple of (int, int)
        Replicas and shards of each mesh.
    model, optimizer : str or None
        Class names; None if not saved, and in files from other libraries.
    states : tuple of str
        Other contents: ``"ema"``, ``"outer"``, ``"scheduler"``, ``"scaler"``, ``"data"``,
        ``"rng"``.
    extra : any
        The value saved as ``"extra"``.
    tensors : tuple of TensorInfo
        Sorted by kind and name.

    Examples
    --------
    >>> import tempfile, fsdpc
    >>> from fsdpc import checkpoint, nn
    >>> folder = tempfile.mkdtemp() + "/step-1"
    >>> checkpoint.save(folder, {"model": nn.Linear(3, 2), "extra": {"step": 1}})
    >>> info = checkpoint.inspect(folder)
    >>> info.step, info.world, info.nbytes, info.damaged()
    (1, 1, 32, [])
    """

    path: Path
    step: int | None
    world: int | None
    strategies: tuple[str, ...]
    meshes: tuple[tuple[int, int], ...]
    model: str | None
    optimizer: str | None
    states: tuple[str, ...]
    extra: Any
    tensors: tuple[TensorInfo, ...]
    _source: Source = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(t.nbytes for t in self.tensors)

    def damaged(self) -> list[str]:
        """Read all tensors and compare their checksums.

        Returns
        -------
        list of str
            Tensors that differ from the saved ones, with their files. Empty if there are none;
            files from other libraries have no checksums to compare.
        """
        return damaged(self._source)

    def facts(self) -> dict[str, str]:
        """Describe the checkpoint, except for its tensors, as text."""
        found = {"tensors": f"{len(self.tensors)}, {size(self.nbytes)}"}
        if self.step is not None:
            found["step"] = str(self.step)
        if self.world is not None:
            meshes = ", ".join(f"{r} x {s}" for r, s in self.meshes)
            how = f" ({', '.join(self.strategies) or '?'}; replicas x shards {meshes})"
            found["written by"] = f"{self.world} ranks{how if meshes else ''}"
            found["model"] = self.model or "none"
            found["optimizer"] = self.optimizer or "none"
            found["states"] = ", ".join(self.states)
            found["extra"] = repr(self.extra)
        known = sum(t.crc32c is not None for t in self.tensors)
        found["checksums"] = f"of {known} of {len(self.tensors)} tensors"
        return found

    def __repr__(self) -> str:
        lines = [f"{name}: {words}" for name, words in self.facts().items()]
        return "\n  ".join([f"checkpoint {self.path}", *lines])

    def _repr_html_(self) -> str:
        """Return tables of the contents, for display in notebooks."""
        rows = [t.cells() for t in self.tensors[:ROWS]]
        more = len(self.tensors) - len(rows)
        return html.fields(f"checkpoint {self.path}", self.facts(), TITLES, rows,
                             f"and {more} more" if more else "")  # fmt: skip


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Describe a checkpoint, without a model and without reading tensors.

    Parameters
    ----------
    path : path
        A folder that :func:`fsdpc.checkpoint.save` wrote, a Hugging Face safetensors folder, or one
        such file.

    Returns
    -------
    CheckpointInfo
        A description that prints like ``fsdpc ckpt ls``; notebooks show tables.

    Raises
    ------
    CheckpointError
        The path is not a checkpoint, or its files are inconsistent.

    Notes
    -----
    Any process may call it; it is not collective. It checks headers and the manifest's own
    checksum; :meth:`CheckpointInfo.damaged` also reads the tensors.

    Examples
    --------
    >>> import tempfile
    >>> import fsdpc
    >>> from fsdpc import checkpoint
    >>> folder = tempfile.mkdtemp() + "/step-3"
    >>> checkpoint.save(folder, {"model": fsdpc.nn.Linear(4, 2), "extra": {"step": 3}})
    >>> found = checkpoint.inspect(folder)
    >>> found.step, found.nbytes, [(t.name, t.shape) for t in found.tensors]
    (3, 40, [('bias', (2,)), ('weight', (2, 4))])
    >>> found.damaged()
    []
    """
    source = open_source(Path(path))
    content = source.content
    extra = decode(content.get("extra"))
    others = ("ema", "outer", "scheduler", "scaler", "data", "rng")
    return CheckpointInfo(
        path=Path(path),
        step=manifest.step_of(content),
        world=content.get("world"),
        strategies=tuple(content.get("strategies", [])),  # absent without a model
        meshes=tuple((m["replicate"], m["shard"]) for m in content.get("meshes", [])),
        model=None if (name := content.get("model_class")) == "NoneType" else name,
        optimizer=content.get("optimizer", {}).get("class"),
        states=tuple(kind for kind in others if kind in content),
        extra=extra,
        tensors=tuple(
            TensorInfo(kind, name, t.dtype, t.shape, t.nbytes, t.file, t.crc)
            for kind, name, t in source.tensors()
        ),
        _source=source,
    )  # fmt: skip
