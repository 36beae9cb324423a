"""Loading: each rank reads its own elements; all ranks verify checksums together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc.checkpoint import generators, saving
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.names import FAMILIES, file_names
from fsdpc.checkpoint.replicas import MASTER, Replicas, check, is_outer, saved_of
from fsdpc.checkpoint.schema import FLOATS
from fsdpc.checkpoint.shards import (
    RESIDUAL,
    Saved,
    Shard,
    States,
    residuals_of,
    shards_of,
    states_of,
)
from fsdpc.checkpoint.source import Source, SourceTensor, open_source
from fsdpc.checkpoint.values import decode
from fsdpc.display import html
from fsdpc.distributed.agree import agreed
from fsdpc.nn.parameter import RowCode
from fsdpc.optim.ema import STATE

Names = str | Mapping[str, str] | Callable[[str], str]
_MAY_LACK = ("optimizer", "ema", "scheduler", "scaler", "data")


@dataclass
class LoadReport:
    """The result of a load.

    Parameters
    ----------
    extra : any
        The value saved as ``"extra"``.
    missing : list of str
        Names in the model or optimizer that are not in the checkpoint.
    unexpected : list of str
        Names in the checkpoint that are not in the model or optimizer.
    zeroed : list of str
        What ``Compression`` keeps for the next sums and begins at zero, because the checkpoint has
        none of a run on as many hosts and ranks, or in the same rank of PowerSGD.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import checkpoint, nn
    >>> model = nn.Linear(2, 1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoint.save(folder.name + "/step-1", {"model": model, "extra": {"step": 7}})
    >>> checkpoint.load(folder.name + "/step-1", {"model": model}).extra
    {'step': 7}
    """

    extra: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    zeroed: list[str] = field(default_factory=list)

    def _repr_html_(self) -> str:
        """Return a table for display in notebooks."""
        return html.fields("a load", {
            "extra": repr(self.extra), "missing": ", ".join(self.missing) or "nothing",
            "unexpected": ", ".join(self.unexpected) or "nothing",
            "zeroed": ", ".join(self.zeroed) or "nothing",
        })  # fmt: skip


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    names: Names | None = None,
    optional: Collection[str] = (),
) -> LoadReport:
    """Read a checkpoint into existing objects; collective.

    Parameters
    ----------
    path : path
        A folder that :func:`fsdpc.checkpoint.save` wrote, with any number of ranks. Or a Hugging
        Face safetensors folder (single or sharded), or one such file; these contain only the model.
    state : mapping
        The same keys as for :func:`save`; each object is changed in place. ``"extra"`` is optional.
    strict : bool, default True
        Reject missing or unexpected names. Shapes must always match.
    names : "llama", "gpt2", mapping or callable, optional
        Maps the model's names to names in the file, if they differ: a Hugging Face family or your
        own mapping.
    optional : collection of str, optional
        State keys that the checkpoint may lack, such as ``("scaler",)``; the corresponding objects
        then stay unchanged.

    Returns
    -------
    LoadReport

    Raises
    ------
    CheckpointError
        Something is damaged, missing or does not match; every rank's error lists all problems.
    OSError
        A file cannot be read; raised on every rank.

    Notes
    -----
    Each rank reads its own elements directly into place, or one chunk at a time if dtypes differ.
    The ranks' checksums are combined into checksums of whole tensors, which are known only after
    all reads. If a checksum is wrong or a read fails, all loaded floating point values become NaN,
    so that a run cannot use them by accident. ``fsdpc ckpt verify`` can check the files before a
    load, and takes as long as the load.

    If the state contains an optimizer, loading resumes a run and restores the random number
    generators. Per-rank states of Python, NumPy and torch are restored only if the number of ranks
    is the same.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import checkpoint, nn
    >>> model = nn.Linear(2, 1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoint.save(folder.name + "/step-1", {"model": model, "extra": {"step": 1}})
    >>> checkpoint.load(folder.name + "/step-1", {"model": model}).extra
    {'step': 1}
    """
    saving.finish()
    job = agreed(
        lambda: _Load(Path(os.path.abspath(os.fspath(path))), state, strict, names, optional)
    )
    job.check_base()
    try:
        job.verify(agreed(job.read))
    except Exception:
        job.spoil()
        raise
    agreed(job.apply)
    return job.report


class _Load:
    """A load on this rank: which bytes to read, from which files, and into which memory."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Any],
        strict: bool,
        names: Names | None,
        optional: Collection[str],
    ) -> None:
        saving.check_kinds(state, "loading")
        unknown = sorted(set(optional) - set(_MAY_LACK))
        if unknown:
            raise ValueError(f"optional: {unknown[0]!r} is not one of {', '.join(_MAY_LACK)}")
        self.state = {kind: value for kind, value in state.items() if value is not None}
        self.source: Source = open_source(folder)
        self.report = LoadReport(decode(self.source.content.get("extra")))
        self.reads: list[tuple[Shard, SourceTensor]] = []
        self.encodes: list[tuple[Shard, SourceTensor]] = []  # of quantised weights
        self.zeroed: list[Shard] = []
        self.wrong: list[str] = []
        self.differ: list[tuple[str, str, str]] = []  # name, saved value, value here
        self.replicas: Replicas | None = None  # that train apart
        for kind in _MAY_LACK:
            if kind in self.state and kind not in self.source.content:
                if kind in optional:
                    del self.state[kind]
                else:
                    self.wrong.append(f"it has no {kind}")
        self._match_replicas()
        if "model" in self.state:
            self._match_model(names)
        if "optimizer" in self.state and not self.wrong and not self.differ:
            self._match_optimizer()
        if "ema" in self.state and not self.wrong and not self.differ:
            self.state["ema"].counts()  # raises inside swap()
            self.averages, given = self._states("ema", self.state["ema"].optimizer)
            self._match_states(self.averages, given)
        if strict:
            self.differ += [(name, "missing", "") for name in self.report.missing]
            self.differ += [(name, "", "unexpected") for name in self.report.unexpected]
        self.wrong += _table(self.differ)
        if self.wrong and names is None and "model" in self.state:
            self.wrong += [f"names='{family}' fits it" for family in FAMILIES if self._fits(family)]
        if self.wrong:
            raise CheckpointError("\n  ".join([f"{folder} does not fit:", *self.wrong]))

    def _fits(self, family: str) -> bool:
        given = dict(self.source.model)
        mapped = file_names(family, [p.name for p in self.held.shards], given)
        found = [(given.get(mapped[shard.name]), shard) for shard in self.held.shards]
        return any(name != file for name, file in mapped.items()) and all(
            t is not None and tuple(t.shape) == _shape_in_file(shard, t) for t, shard in found
        )

    def _match_model(self, names: Names | None) -> None:
        held = self.held = shards_of(self.state["model"], True)
        check(self.state, (unit for unit, _ in held.units), "loading")
        if self.replicas is not None:
            shared, own = self.replicas.split(held)
            held = self.held = replace(held, shards=shared)
            for shard in (*own, *self.replicas.momentum):
                self._match_state(shard)
            known = {shard.name for shard in self.replicas.momentum}
            surplus = {name for name in self.source.optimizer if is_outer(name)} - known
            self.report.unexpected += sorted(surplus)
        given = dict(self.source.model)
        mapped = file_names(names, [p.name for p in held.shards], given)
        codes = self.source.content.get("codes", {})
        used: set[str] = set()
        self.filled: list[str] = []
        aliases_of: dict[str, list[str]] = {}
        for alias, first in held.aliases.items():
            aliases_of.setdefault(first, []).append(alias)
        for shard in held.shards:
            candidates = [mapped[shard.name]]
            aliases = aliases_of.get(shard.name, ())
            candidates += [file_names(names, [a], given)[a] for a in aliases]
            found = next((name for name in candidates if name in given), None)
            used.update(candidates)
            if found is None:
                self.report.missing.append(shard.name)
                continue
            self.filled.append(shard.name)
            saved, own = codes.get(found), shard.code and list(shard.code)
            if saved != own and (saved or not _encodes(shard, given[found])):
                self.differ.append((shard.name, *(_code_name(code) for code in (saved, own))))
            else:
                self._match(shard, given[found])
        self.report.unexpected += sorted(set(given) - used)

    def _match_optimizer(self) -> None:
        content = self.source.content["optimizer"]
        own, given = self._states("optimizer", self.state["optimizer"])
        self.own = own
        if content["class"] != own.access.kind:
            self.wrong.append(f"its optimizer is {content['class']}, this one {own.access.kind}")
            return
        if len(content["param_groups"]) != len(own.groups):
            self.wrong.append(
                f"its optimizer has {len(content['param_groups'])} parameter groups, this one "
                f"{len(own.groups)}"
            )
            return
        for i, (theirs, ours) in enumerate(zip(content["param_groups"], own.groups, strict=True)):
            if set(theirs["params"]) != set(ours["params"]):
                missing = sorted(set(ours["params"]) - set(theirs["params"]))
                unexpected = sorted(set(theirs["params"]) - set(ours["params"]))
                self.wrong.append(
                    f"parameter group {i} of its optimizer: missing {missing}, unexpected "
                    f"{unexpected}"
                )
        self._match_states(own, given)
        for shard in residuals_of(self.held):
            saved = self.source.optimizer.get(shard.name)
            if saved and (tuple(saved.shape), saved.dtype) == (shard.shape, shard.dtype):
                self.reads.append((shard, saved))
            else:
                self.zeroed.append(shard)

    def _states(self, kind: str, optimizer: Any) -> tuple[States, dict[str, SourceTensor]]:
        """Return the states to read of an optimizer or of averages, and those in the files."""
        averages, outer = f".{STATE}", "outer" in self.source.content
        held = self.replicas.own(self.source.optimizer) if self.replicas else self.source.optimizer
        given = {
            name: tensor
            for name, tensor in held.items()
            if name.endswith(averages) is (kind == "ema") and not name.endswith(f".{RESIDUAL}")
            and not (outer and name.endswith(f".{MASTER}"))
        }
        steps = {name: int(count) for name, count in self.source.content[kind]["steps"].items()}
        return states_of(optimizer, self.state["model"], Saved(steps, given)), given

    def _match_states(self, own: States, given: dict[str, SourceTensor]) -> None:
        shards = self.replicas.of_all(own.shards) if self.replicas else own.shards
        for shard in shards:
            self._match_state(shard)
        self.report.unexpected += sorted(set(given) - {p.name for p in own.shards})

    def _match_state(self, shard: Shard) -> None:
        if shard.name in self.source.optimizer:
            self._match(shard, self.source.optimizer[shard.name])
        else:
            self.report.missing.append(shard.name)

    def _match_replicas(self) -> None:
        """Find out whose anchors to read, before what replicas have of their own."""
        saved, rounds = self.source.content.get("outer"), self.state.get("outer")
        cure = "load only the model, before making the Outer"
        if self.wrong or saved is rounds is None:
            return
        if saved is None:
            self.wrong.append(f"it has no outer: {cure}")
        elif rounds is None and {"optimizer", "ema"} & set(self.state):
            self.wrong.append(
                f"its states are those of {saved['replicas']} replicas that train apart: give the "
                "Outer as 'outer', or load only the model"
            )
        elif rounds is not None:
            given = saved_of(self.source.content, self.source.optimizer)
            found = Replicas(rounds, self.state["model"], given)
            if found.count == saved["replicas"]:
                self.replicas = found
            else:
                self.wrong.append(
                    f"{saved['replicas']} replicas trained apart, and this run has "
                    f"{found.count}: {cure}"
                )

    def _match(self, shard: Shard, source: SourceTensor) -> None:
        shape = _shape_in_file(shard, source)
        if tuple(source.shape) != shape:
            self.differ.append((shard.name, str(tuple(source.shape)), str(shape)))
        elif _encodes(shard, source):
            self.encodes.append((shard, source))
        elif source.dtype != shard.dtype and not {source.dtype, shard.dtype} <= FLOATS:
            self.differ.append((shard.name, source.dtype, shard.dtype))
        else:
            self.reads.append((shard, source))

    def read(self) -> list[int]:
        """Read this rank's shards and return its contribution to every checksum."""
        crcs = self._read([(shard, source, shard.memory) for shard, source in self.reads])
        for shard, source in self.encodes:  # one at a time: fp32 takes eight times as much memory
            assert isinstance(shard.code, RowCode)
            first, rows = map(shard.code.rows, (shard.first, shard.numel))
            columns = shard.code.columns
            values = _core.zeros((rows, columns))
            place = replace(shard, first=first * columns, numel=values.numel())
            crcs += self._read([(place, source, values)])
            try:
                codes = shard.code.encode(values)
            except ValueError as error:
                raise CheckpointError(
                    f"'{shard.name}' in {self.source.folder / source.file}: of the rows from "
                    f"{first} on, {error}"
                ) from None
            shard.memory.copy_(codes.reshape(shard.memory.shape))
        return crcs

    def _read(self, reads: list[tuple[Shard, SourceTensor, _core.Tensor]]) -> list[int]:
        """Read shards into memory and return this rank's contribution to each checksum."""
        paths = list(dict.fromkeys(t.file for _, t, _ in reads))
        number_of = {name: i for i, name in enumerate(paths)}
        folder = self.source.folder
        return _core.read_shards(
            [os.fsencode(folder / name) for name in paths],
            [(number_of[t.file], t.dtype, t.begin, t.end) for _, t, _ in reads],
            [(i, p.first, memory) for i, (p, _, memory) in enumerate(reads) if p.numel > 0],
            any(t.crc is not None for _, t, _ in reads),
            saving._hook,
        )

    def check_base(self) -> None:
        """Raise if a model's frozen parameters, which the checkpoint lacks, differ; collective."""
        base_crc = self.held.base_crc if "model" in self.state else None
        if base_crc is None or "base" not in self.source.content:
            return
        saved, own = self.source.content["base"]["crc32c"], f"{base_crc():08x}"
        if saved != own:
            raise CheckpointError(
                f"{self.source.folder} was saved over another base: the frozen parameters had the "
                f"checksum {saved}, and those of the model have {own}; load the same base first, "
                "quantised in the same way"
            )

    def verify(self, crcs: list[int]) -> None:
        """Compare the checksums of whole tensors with those in the manifest; collective."""
        reads = self.reads + self.encodes
        replicas = [shard.replica for shard, _ in reads]
        mine = np.array([crcs, replicas], np.int64).reshape(2, -1)
        every = distributed.world().all_gather(_core.tensor(mine)).numpy()
        wrong = []
        for i, (shard, source) in enumerate(reads):
            want = source.crc
            if want is None:
                continue
            for replica in np.unique(every[:, 1, i]):
                shards = every[every[:, 1, i] == replica, 0, i]
                got = int(np.bitwise_xor.reduce(shards))
                if got != want:
                    file = self.source.folder / source.file
                    wrong.append(f"'{shard.name}' in {file}: checksum {got:08x}, not {want:08x}")
                    break
        if wrong:
            raise CheckpointError(
                f"damaged: {'; '.join(wrong)}; all values that were to be loaded are NaN now: "
                "load another checkpoint before the model is used"
            )

    def spoil(self) -> None:
        """Fill all floats with NaN, so that corrupt values cannot be mistaken for valid ones."""
        for shard, _ in self.reads + self.encodes:
            if shard.numel and (shard.code or shard.dtype in FLOATS):
                shard.memory.fill_(255 if shard.code else float("nan"))  # 255: in all scales, NaN

    def apply(self) -> None:
        """Restore everything that is not a tensor."""
        content = self.source.content
        if "model" in self.state:
            self.held.loaded(self.filled)
        if "optimizer" in self.state:
            self.own.access.apply(content["optimizer"]["param_groups"], self.own.steps)
            for shard in self.zeroed:
                shard.memory.fill_(0)
            self.report.zeroed = [shard.name for shard in self.zeroed]
            rng = content["rng"]
            _core.set_rng_state(rng["seed"], rng["next_stream"])
            generators.restore(rng.get("ranks", []))
        if "ema" in self.state:
            ema, access = self.state["ema"], self.averages.access
            access.apply([{} for _ in ema.optimizer.param_groups], self.averages.steps)
            ema.set_counts(content["ema"]["num_updates"], content["ema"]["calls"])
        if self.replicas is not None:
            rounds, states = self.state["outer"], self.replicas.states
            states.access.apply([{} for _ in states.groups], states.steps)
            rounds.calls = content["outer"]["calls"]
        for kind in ("scheduler", "scaler", "data"):
            if kind in self.state:
                self.state[kind].load_state_dict(decode(content[kind]))


def _encodes(shard: Shard, source: SourceTensor) -> bool:
    """Return whether floats in the file are to be encoded."""
    return isinstance(shard.code, RowCode) and source.dtype in FLOATS


def _shape_in_file(shard: Shard, source: SourceTensor) -> tuple[int, ...]:
    if _encodes(shard, source):
        assert isinstance(shard.code, RowCode)
        return shard.shape[0], shard.code.columns
    return shard.shape


def _code_name(code: list[Any] | None) -> str:
    return "not quantised" if code is None else f"{code[0]}, {code[1]} columns"


def _table(differ: list[tuple[str, str, str]]) -> list[str]:
    """Return the differences as table rows; layers with the same differences share a row."""
    counts: dict[tuple[str, str, str], list[str]] = {}
    for name, saved, now in differ:
        counts.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), saved, now), []).append(name)
    rows = [("parameter", "saved", "now")] if differ else []
    for (pattern, saved, now), names in counts.items():
        shown = f"'{names[0]}'" if len(names) == 1 else f"'{pattern}' ({len(names)} of them)"
        rows.append((shown, saved, now))
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else []
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return [*lines, "give the model and the options that it was saved with"] if rows else []
