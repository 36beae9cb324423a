"""Check gradients against plain sums, one unit per check, and check that replicas are equal.

The engine reduces gradients in its own order, with its own buffers and dtype. A check recomputes
the result independently: hooks capture each rank's autograd gradients for the unit's unsharded
parameters, and a plain all-reduce sums them in float64. The result must equal the reduced gradient,
except for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import MismatchError
from fsdpc.nn.module import Module
from fsdpc.nn.parameter import full_grad

# The rounding error allowed in a gradient, in units in the last place.
_ROUNDINGS = 8.0
_PLACES = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SMALLEST = {"float16": 2.0**-24}  # for dtypes in which small gradients vanish


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The result of a check, the same on all ranks; ``text`` is empty if the check passed.

    ``unit`` is the unit whose gradients were compared, ``largest`` the largest difference as a
    fraction of what rounding explains.

    Examples
    --------
    >>> from fsdpc import Audited
    >>> Audited(unit="layers.0", largest=0.25).text  # empty where nothing differs
    ''
    """

    unit: str
    largest: float
    text: str = ""


class _Held(NamedTuple):
    name: str
    p: Any  # of model.parameters()
    unit: _core.Unit
    index: int


def audit(model: Any, every: int = 100, *, raises: bool = True) -> Auditor:
    """Check a model's gradients and replicas during training.

    Parameters
    ----------
    model : Module or torch.nn.Module
        A model sharded over all ranks of the run.
    every : int, default 100
        Number of steps between checks; each check covers the next unit.
    raises : bool, default True
        Whether to raise an error if a check fails; otherwise :meth:`Auditor.step` returns the
        failure.

    Returns
    -------
    Auditor

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1))
    >>> auditor = fsdpc.audit(layer, every=2)
    >>> for _ in range(2):
    ...     layer(fsdpc.tensor([[3.0, 4.0]])).sum().backward()
    ...     found = auditor.step()
    ...     layer.zero_grad()
    >>> found.largest <= 1.0  # of what rounding explains
    True
    """
    return Auditor(model, every, raises)


class Auditor:
    """An auditor from :func:`audit`; call :meth:`step` after the last backward in each step.

    Notes
    -----
    Between checks it sends and copies nothing. A checked step keeps float64 copies of one unit's
    gradients on every rank, and makes two all-reduces for each. Replicas' weights are compared by
    checksum, in one all-gather. Parameters that belong to no unit are not checked.

    Examples
    --------
    ::

        auditor = fsdpc.audit(model, every=100)
        for x, y in batches:
            model(x, y).backward()
            auditor.step()  # before clipping and the optimizer's step
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(self, model: Any, every: int, raises: bool) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.model: Any = model
        self.every: int = every
        self.raises: bool = raises
        self.checks: int = 0
        self._steps = 0
        self._hooks: list[Any] = []
        self._seen: dict[int, np.ndarray] = {}  # index -> gradient and its magnitude, summed here
        self._native = isinstance(model, Module)
        self._units = self._of_units()
        if not self._units:
            raise ValueError(f"{type(model).__name__} is not sharded: there is nothing to audit")
        if every == 1:  # also check the first step
            self._watch()

    def _of_units(self) -> list[list[_Held]]:
        found: dict[Any, list[_Held]] = {}
        for name, p in self.model.named_parameters():
            info = p if self._native else getattr(p, "fsdpc", None)
            unit = getattr(info, "_unit" if self._native else "unit", None)
            if unit is not None:
                found.setdefault(unit, []).append(_Held(name, p, unit, info._index))
        return list(found.values())

    def step(self) -> Audited | None:
        """Run a check if one is due, in which case the call is collective.

        Returns
        -------
        Audited or None
            None between checks.

        Raises
        ------
        MismatchError
            With ``raises``: a gradient is not the sum of the ranks' gradients, or replicas differ.
        """
        self._steps += 1
        found = None
        if self._hooks and self._steps % self.every == 0:
            found = self._check()
        if (self._steps + 1) % self.every == 0 and not self._hooks:
            self._watch()
        if found is not None and found.text and self.raises:
            raise MismatchError(found.text)
        return found

    def _watch(self) -> None:
        """Hook the next unit's gradients in every micro-step of the next step."""
        held = self._units[self.checks % len(self._units)]
        if held[0].unit.apart:
            raise NotImplementedError(
                f"an audit of '{held[0].unit.name}', whose replicas train apart: audit before "
                "making the Outer"
            )
        held[0].unit.refuse_stepped()  # its gradients do not outlive backward
        for one in held:
            if self._native:
                self._catch(one, one.p)
            elif unsharded := one.p.fsdpc._state.unsharded:
                self._catch(one, unsharded[one.index])
            else:  # created by the first forward
                state = one.p.fsdpc._state
                state.when_rooted.append(
                    lambda one=one, s=state: self._catch(one, s.unsharded[one.index])
                )

    def _catch(self, one: _Held, whole: Any) -> None:
        if one.p.requires_grad:
            whole.requires_grad_()  # as in the forward
            self._hooks.append(whole.register_hook(self._hook(one.index)))

    def _hook(self, index: int) -> Any:
        def add(grad: Any) -> None:
            values = _numpy(grad)
            both = np.stack([values, np.abs(values)])
            self._seen[index] = self._seen[index] + both if index in self._seen else both

        return add

    def _check(self) -> Audited:
        held = self._units[self.checks % len(self._units)]
        self.checks += 1
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        largest, texts = 0.0, []
        for one in held:
            if one.p.requires_grad:
                ratio, text = self._compare(one)
                largest = max(largest, ratio)
                texts += [text] if text else []
        self._seen.clear()
        texts += self._replicas()
        return Audited(unit=held[0].unit.name, largest=largest, text=texts[0] if texts else "")

    def _compare(self, one: _Held) -> tuple[float, str]:
        """Return a gradient's largest difference, and a text that describes the first one."""
        _, dtype, shape = one.unit.params[one.index]
        mine = self._seen.get(one.index, np.zeros((2, *shape)))
        factor = one.unit.divide_factor or distributed.world_size()
        expected, magnitude = distributed.all_reduce(mine.reshape(2, *shape)) / factor
        reduced = self._reduced(one.p)
        got = np.zeros(shape) if reduced is None else _numpy(reduced).reshape(shape)
        used = {dtype.name}
        for each in (one.unit.param_dtype, one.unit.reduce_dtype):
            used |= {each.name} if each is not None else set()
        place = max(_PLACES[name] for name in used)
        allowed = _ROUNDINGS * (place * magnitude + max(_SMALLEST.get(name, 0) for name in used))
        with np.errstate(invalid="ignore"):
            ratio = np.abs(got - expected) / np.maximum(allowed, np.finfo(np.float64).tiny)
        ratio[~np.isfinite(got) & ~np.isfinite(expected)] = 0  # an overflow, in both results
        ratio[np.isnan(ratio)] = math.inf
        # Ranks compare the same numbers, but a rank whose numbers differ must not be the only one
        # to raise.
        worst = distributed.all_reduce(float(ratio.max(initial=0)), "max")
        if worst <= 1:
            return worst, ""
        wrong = np.argwhere(ratio > 1)
        at = tuple(wrong[0].tolist()) if len(wrong) else (0,) * len(shape)
        return worst, (
            f"unit '{one.unit.name}': the reduced gradient of '{one.name}' is not the mean of what "
            f"the ranks had, first at {list(at)}: {got[at]:.9g}, not {expected[at]:.9g}, in "
            f"{len(wrong)} of {got.size} elements; {self._owners(one, at)}"
        )

    def _reduced(self, p: Any) -> Any:
        if self._native:
            return full_grad(p)
        from fsdpc.torch import full_grad as of_torch

        return of_torch(p)

    def _owners(self, one: _Held, at: tuple[int, ...]) -> str:
        """Describe which ranks hold the row that contains an element."""
        rows, first, _, _ = _core.master_shard(one.unit, one.index, False)
        _, _, shape = one.unit.params[one.index]
        flat = int(np.ravel_multi_index(at, shape)) if shape else 0
        has = first <= flat < first + rows.numel()
        ranks = np.flatnonzero(distributed.all_gather(int(has))).tolist()
        return f"held by rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _replicas(self) -> list[str]:
        """Compare checksums of replicated rows, and describe the first difference."""
        held = [one for unit in self._units for one in unit]
        marks = np.zeros((len(held), 3), np.int64)
        for mark, one in zip(marks, held, strict=True):
            rows, first, _, _ = _core.master_shard(one.unit, one.index, False)
            mark[:] = first, rows.numel(), _core.crc32c(0, rows.bits())
        ranks = distributed.all_gather(marks)
        for i, one in enumerate(held):
            seen: dict[tuple[int, int], tuple[int, int]] = {}
            for rank, (first, numel, crc) in enumerate(ranks[:, i].tolist()):
                other, known = seen.setdefault((first, numel), (rank, crc))
                if known != crc:
                    return [
                        f"unit '{one.unit.name}': the weights of '{one.name}' differ between "
                        f"replicas, first on ranks {other} and {rank} (elements {first} to "
                        f"{first + numel})"
                    ]
        return []


def _numpy(value: Any) -> np.ndarray:
    value = value.detach().double()
    return np.array((value.cpu() if hasattr(value, "cpu") else value).numpy())
