"""Train two models side by side and find their first difference.

Each side is a native or torch model, sharded or not. Both sides' full values are converted to NumPy
one tensor at a time, in the order they are computed: loss, gradients, norm, parameters, optimizer
states. This module never imports torch: a caller with a torch model has already done so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fsdpc import _core, distributed, nn
from fsdpc.display import html
from fsdpc.nn.parameter import full_grad, full_tensor
from fsdpc.optim.state import full_states
from fsdpc.sharding import clip

KINDS = ("parameter", "loss", "gradient", "norm", "state")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two models to compare, with its optimizer and loss.

    Parameters
    ----------
    model : fsdpc.nn.Module or torch.nn.Module
        Sharded or not.
    optimizer : object, optional
        An object with ``step`` and ``zero_grad``; both sides have one, or neither does.
    loss : callable, optional
        ``loss(model, *batch)`` returns the scalar for backward; by default ``model(*batch)``. The
        batch's arrays are passed as tensors of the model's library.
    rename : callable, optional
        ``rename(name)`` returns the other side's name for a parameter.
    arrange : callable, optional
        ``arrange(name, array)`` returns a parameter, its gradient or one of its states in the other
        side's layout, for example transposed; `name` is the common name.

    Examples
    --------
    >>> from fsdpc import nn, optim
    >>> from fsdpc.testing import Side
    >>> model = nn.Linear(2, 1)
    >>> side = Side(model=model, optimizer=optim.SGD(model.parameters(), lr=0.1))
    """

    model: Any
    optimizer: Any = None
    loss: Callable[..., Any] | None = None
    rename: Callable[[str], str] | None = None
    arrange: Callable[[str, np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits on the difference between two values, which passes if any of them allows it.

    Parameters
    ----------
    rtol : float, default 0
        Relative to the larger magnitude of the two values.
    scale : float, default 0
        Relative to the largest magnitude in the second side's tensor, for sums whose terms cancel.
    atol : float, default 0
        Absolute.
    ulp : int, default 0
        Steps between representable numbers of the narrower dtype.

    Notes
    -----
    ``rtol``, ``scale`` and ``atol`` are added, as in numpy.allclose. If all are 0, values must be
    equal after both are rounded to the narrower dtype; 0 equals -0, and NaN equals NaN.

    Examples
    --------
    >>> from fsdpc.testing import Tolerance
    >>> Tolerance(rtol=1e-4, ulp=2).ulp
    2
    """

    rtol: float = 0.0
    scale: float = 0.0
    atol: float = 0.0
    ulp: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Difference:
    """The first difference between two models.

    Parameters
    ----------
    step : int
        1 for the first step; 0 is before it.
    what : str
        "parameter", "loss", "gradient", "norm", or "state" with the state's name.
    name : str
        Name of the parameter; "" for losses and norms.
    index : tuple of int
        The first element, in row-major order, beyond the tolerance.
    a, b : float
        The element's two values.
    ulp : int or None
        Steps between the two in the narrower dtype; None if either is not finite.
    dtype : str
        The narrower dtype.
    count, numel : int
        Number of elements beyond the tolerance, and total number of elements.
    rank : int
        The rank that found the difference; all ranks of a sharded model return the same one.

    Examples
    --------
    >>> from fsdpc.testing import Difference
    >>> place = {"step": 3, "what": "gradient", "name": "weight", "index": (0, 1)}
    >>> found = Difference(**place, a=1.0, b=1.5, ulp=None, dtype="float32", count=1, numel=4)
    >>> found.name, found.index, found.b - found.a
    ('weight', (0, 1), 0.5)
    """

    step: int
    what: str
    name: str
    index: tuple[int, ...]
    a: float
    b: float
    ulp: int | None
    dtype: str
    count: int
    numel: int
    rank: int = 0

    def __repr__(self) -> str:
        place = self.name + (str(list(self.index)) if self.index else "")
        ulp = "not finite" if self.ulp is None else f"{self.ulp:,} ulp of {self.dtype} apart"
        return (
            f"rank {self.rank}, step {self.step}: {self.what}{' ' + place if place else ''} is "
            f"{self.a!r} against {self.b!r}, {ulp}; {self.count:,} of {self.numel:,} elements "
            "differ by more than is allowed"
        )

    def _repr_html_(self) -> str:
        """Return a table, for display in notebooks."""
        ulp = "not finite" if self.ulp is None else f"{self.ulp:,} ulp of {self.dtype}"
        return html.fields("the first difference", {
            "where": f"step {self.step}, rank {self.rank}: {self.what} {self.name}".rstrip(),
            "index": list(self.index), "a": repr(self.a), "b": repr(self.b), "apart": ulp,
            "elements": f"{self.count:,} of {self.numel:,} ({self.count / self.numel:.1%})",
        })  # fmt: skip


@dataclass(frozen=True)
class _Value:
    """A tensor's values as float64, which represents every dtype here exactly, and its dtype."""

    numbers: np.ndarray
    dtype: str


_MISSING = _Value(np.zeros(()), "float64")  # missing gradient or state: broadcasts as zeros


def compare(
    a: Any,
    b: Any,
    batches: Iterable[Sequence[Any]],
    steps: int = 1,
    *,
    tolerance: Tolerance | Mapping[str, Tolerance] | None = None,
    max_norm: float | None = None,
) -> Difference | None:
    """Train two models side by side, and return the first difference that exceeds a tolerance.

    Parameters
    ----------
    a, b : Side, or a model
        The two models; ``b`` is the reference.
    batches : iterable of sequence
        Both models' inputs, one batch per step; a sequence restarts at its end.
    steps : int, default 1
        0 compares only the parameters.
    tolerance : Tolerance or mapping of str to Tolerance, optional
        One tolerance, or one for each kind: "parameter" (before the first step and after each),
        "loss", "gradient", "norm", "state". Kinds that a mapping omits are not compared. By
        default, values must be equal.
    max_norm : float, optional
        Clip both sides' gradients to this global norm, after comparing them, and compare the norms.

    Returns
    -------
    Difference or None
        None if there is no difference within `steps`; a test can ``assert compare(...) is None``.

    Raises
    ------
    TypeError
        A model belongs to neither library.
    ValueError
        The sides' parameters have different names or shapes, only one side has an optimizer, the
        batches end early, or a kind is unknown.

    Notes
    -----
    Collective if a side is sharded: every rank calls it and gets full values, but its own loss. If
    the other side is not sharded, pass the same batches on all ranks, so that the mean over ranks
    equals each rank's own gradient. A missing gradient or state counts as zeros.

    Examples
    --------
    >>> import fsdpc, numpy as np
    >>> fsdpc.manual_seed(0)
    >>> a, b = fsdpc.nn.Linear(3, 2), fsdpc.nn.Linear(3, 2)
    >>> b.load_state_dict(a.state_dict())
    ([], [])
    >>> mean = lambda model, x: model(x).mean()
    >>> batch = (np.ones((4, 3), np.float32),)
    >>> compare(Side(model=a, loss=mean), Side(model=b, loss=mean), [batch])
    """
    sides = (_side(a), _side(b))
    tolerances = _by_kind(tolerance)
    if (sides[0].optimizer is None) != (sides[1].optimizer is None):
        raise ValueError("one side has an optimizer and the other has none: give both or neither")
    _check_names(*sides)
    feed = _repeat(batches)
    found = _first(0, "parameter", tolerances, sides, lambda side, name: side.full(name))
    step = 0
    while found is None and step < steps:
        step += 1
        try:
            batch = next(feed)
        except StopIteration:
            raise ValueError(f"the batches ended before step {step} of {steps}") from None
        found = _one_step(step, batch, sides, tolerances, max_norm)
    return found


def _one_step(
    step: int,
    batch: Sequence[Any],
    sides: tuple[_Model, _Model],
    tolerances: Mapping[str, Tolerance],
    max_norm: float | None,
) -> Difference | None:
    losses = [side.forward_backward(batch) for side in sides]
    found = _agreed(sides, _compare(step, "loss", "", *losses, tolerances.get("loss")))
    found = found or _first(step, "gradient", tolerances, sides, lambda side, name: side.grad(name))
    if found is None and max_norm is not None:
        norms = [side.clip(max_norm) for side in sides]
        found = _agreed(sides, _compare(step, "norm", "", *norms, tolerances.get("norm")))
    if found is not None or sides[0].optimizer is None:
        return found
    for side in sides:
        side.optimizer.step()
    found = _first(step, "parameter", tolerances, sides, lambda side, name: side.full(name))
    common = [name for name in sides[0].state_names() if name in sides[1].state_names()]
    for name in common:
        found = found or _first(
            step, f"state {name}", tolerances, sides, lambda side, p, name=name: side.state(p, name)
        )
    return found


def _by_kind(tolerance: Tolerance | Mapping[str, Tolerance] | None) -> Mapping[str, Tolerance]:
    if tolerance is None or isinstance(tolerance, Tolerance):
        return dict.fromkeys(KINDS, tolerance or Tolerance())
    unknown = sorted(set(tolerance) - set(KINDS))
    if unknown:
        raise ValueError(f"unknown kinds {unknown}; there are {', '.join(KINDS)}")
    return tolerance


def _repeat(batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    if not isinstance(batches, Sequence):
        yield from batches
    while isinstance(batches, Sequence) and batches:
        yield from batches


def _check_names(a: _Model, b: _Model) -> None:
    only_a = sorted(a.parameters.keys() - b.parameters.keys())
    only_b = sorted(b.parameters.keys() - a.parameters.keys())
    if only_a or only_b:
        raise ValueError(f"the sides' parameters differ: only a has {only_a}, only b has {only_b}")


# ---- the two libraries ----


class _Model:
    """Gives native and torch models the interface that `compare` needs."""

    def __init__(self, side: Side) -> None:
        self.model, self.optimizer, self.arrange = side.model, side.optimizer, side.arrange
        self.loss = side.loss or (lambda model, *batch: model(*batch))
        rename = side.rename or str
        self.parameters = {rename(name): p for name, p in side.model.named_parameters()}

    def is_sharded(self) -> bool:
        return any(
            getattr(p, "_unit", None) is not None or hasattr(p, "full_tensor")
            for p in self.parameters.values()
        )

    def forward_backward(self, batch: Sequence[Any]) -> _Value:
        (self.optimizer or self.model).zero_grad()
        loss = self.loss(self.model, *(self.tensor(each) for each in batch))
        loss.backward()
        return self.value(loss.detach())

    def arranged(self, name: str, value: _Value) -> _Value:
        if self.arrange is None or value.numbers.shape != tuple(self.parameters[name].shape):
            return value
        return _Value(np.asarray(self.arrange(name, value.numbers)), value.dtype)

    def read(self, value: Any) -> _Value:
        """Return the value of a tensor or number; None counts as missing."""
        if value is None:
            return _MISSING
        if isinstance(value, (int, float)):
            return _Value(np.array(value, np.float64), "float32")
        return self.value(value)

    # Each library implements these operations differently. Reading a sharded model is collective.
    tensor: Callable[[Any], Any]  # converts an array of the batch
    value: Callable[[Any], _Value]  # converts a tensor
    full: Callable[[str], _Value]
    grad: Callable[[str], _Value]
    clip: Callable[[float], _Value]
    state_names: Callable[[], list[str]]
    state: Callable[[str, str], _Value]


class _Native(_Model):
    def tensor(self, each: Any) -> Any:
        return _core.tensor(each) if isinstance(each, np.ndarray) else each

    def value(self, tensor: Any) -> _Value:
        wide = tensor if tensor.dtype is _core.float64 else tensor.to(_core.float32)
        return _Value(wide.detach().numpy().astype(np.float64), tensor.dtype.name)

    def full(self, name: str) -> _Value:
        return self.value(full_tensor(self.parameters[name]))

    def grad(self, name: str) -> _Value:
        return self.read(full_grad(self.parameters[name]))

    def clip(self, max_norm: float) -> _Value:
        return self.value(clip.clip_grad_norm_(self.model, max_norm))

    def state_names(self) -> list[str]:
        first = next(iter(self.parameters.values()), None)
        return [] if first is None else list(self.optimizer.state(first))

    def state(self, name: str, state: str) -> _Value:
        p = self.parameters[name]
        if state == "step":
            return self.read(self.optimizer.step_count(p))
        return self.read(dict(full_states(self.optimizer, p, state)).get(state))


class _Torch(_Model):
    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.torch = sys.modules["torch"]

    def tensor(self, each: Any) -> Any:
        return self.torch.from_numpy(each) if isinstance(each, np.ndarray) else each

    def value(self, tensor: Any) -> _Value:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Value(whole.detach().double().cpu().numpy().copy(), dtype)

    def full(self, name: str) -> _Value:
        return self.value(self.parameters[name])

    def grad(self, name: str) -> _Value:
        return self.read(self.parameters[name].grad)

    def clip(self, max_norm: float) -> _Value:
        parameters = self.model.parameters()
        return self.value(self.torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def state_names(self) -> list[str]:
        known = (self.optimizer.state.get(p) for p in self.parameters.values())
        return list(next(filter(None, known), {}))

    def state(self, name: str, state: str) -> _Value:
        return self.read(self.optimizer.state.get(self.parameters[name], {}).get(state))


def _side(given: Any) -> _Model:
    side = given if isinstance(given, Side) else Side(model=given)
    if isinstance(side.model, nn.Module):
        return _Native(side)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(side.model, torch.nn.Module):
        return _Torch(side)
    raise TypeError(
        f"compare takes modules of fsdpc.nn or torch.nn, or Sides of them, got "
        f"{type(side.model).__name__}"
    )


# ---- comparing ----


def _first(
    step: int,
    what: str,
    tolerances: Mapping[str, Tolerance],
    sides: tuple[_Model, _Model],
    read: Callable[[_Model, str], _Value],
) -> Difference | None:
    """Compare all tensors of one kind, in the order of the first model's parameters."""
    allowed = tolerances.get(what.split()[0])
    if allowed is None:
        return None
    found = None
    for name in sides[0].parameters:  # no early exit: a peer may still be reading
        values = [side.arranged(name, read(side, name)) for side in sides]
        found = found or _compare(step, what, name, *values, allowed)
    return _agreed(sides, found)


def _agreed(sides: tuple[_Model, _Model], found: Difference | None) -> Difference | None:
    """Return the first rank's difference on all ranks, so that they stop together."""
    if not any(side.is_sharded() for side in sides) or distributed.world_size() == 1:
        return found
    text = b"" if found is None else json.dumps(asdict(found)).encode()
    lengths = distributed.all_gather(len(text))
    if not lengths.any():
        return None
    first = int(lengths.nonzero()[0][0])
    buffer = np.zeros(int(lengths[first]), np.uint8)
    if first == distributed.rank():
        buffer[:] = np.frombuffer(text, np.uint8)
    fields = json.loads(distributed.broadcast(buffer, first).tobytes())
    return Difference(**{**fields, "index": tuple(fields["index"]), "rank": first})


def _compare(
    step: int, what: str, name: str, a: _Value, b: _Value, allowed: Tolerance | None
) -> Difference | None:
    if allowed is None:
        return None
    x = np.zeros_like(b.numbers) if a is _MISSING else a.numbers
    y = np.zeros_like(a.numbers) if b is _MISSING else b.numbers
    if x.shape != y.shape:
        raise ValueError(f"{what} {name} has shape {x.shape} on side a and {y.shape} on side b")
    finite = np.isfinite(x) & np.isfinite(y)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(y[np.isfinite(y)])
        bound = allowed.atol + allowed.rtol * np.maximum(np.abs(x), np.abs(y))
        bound = bound + allowed.scale * (size.max() if size.size else 0.0)
        wrong = (x != y) & ~(np.isnan(x) & np.isnan(y)) & ~(finite & (np.abs(x - y) <= bound))
    if not wrong.any():
        return None
    dtype = min(a.dtype, b.dtype, key=lambda each: _MANTISSA_BITS[each])
    apart = _steps_between(x, y, dtype)
    wrong &= (apart > allowed.ulp) | ~finite
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    return Difference(
        step=step,
        what=what,
        name=name,
        index=index,
        a=float(x[index]),
        b=float(y[index]),
        ulp=int(apart[index]) if finite[index] else None,
        dtype=dtype,
        count=int(wrong.sum()),
        numel=wrong.size,
    )


_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def _steps_between(x: np.ndarray, y: np.ndarray, dtype: str) -> np.ndarray:
    x, y = _ordered(x, dtype), _ordered(y, dtype)
    return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)


def _ordered(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Map numbers of a dtype to integers in the same order, with 0 at 0 and neighbours 1 apart."""
    with np.errstate(over="ignore"):
        if dtype == "float64":
            bits, low = numbers.view(np.int64), 63
        elif dtype == "float16":
            bits, low = numbers.astype(np.float16).view(np.int16).astype(np.int64), 15
        else:
            bits, low = numbers.astype(np.float32).view(np.int32).astype(np.int64), 31
    if dtype == "bfloat16":  # round to nearest even, because wider dtypes also occur here
        bits, low = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 15
    return np.where(bits < 0, -(bits & ((1 << low) - 1)), bits)
