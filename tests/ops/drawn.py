"""Random cases of operations, beside torch.

A row of the table (drawn_rows.py) draws one case: tensors, and the operation on them by fsdpc and
by torch. Shapes are 0-d, empty, of one element or small; some tensors are views. Values are
ordinary, or have NaN, infinities, -0.0 or a dtype's extremes among them.

torch computes twice. With the case's own dtypes it says which shape, dtype or error is right.
With floats as float64 it says which values and gradients are. Cases depend on their number only.

Tolerances are in units of the last place of the result's dtype: of each element for operations of
single elements, else of the largest element in the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fsdpc

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTS = ("int32", "int64")
NUMBERS = FLOATS + INTS
ANY = (*NUMBERS, "uint8", "bool")
TORCH = {name: getattr(torch, name) for name in ANY}
#: Units in the last place, and what is rounded to zero, of each dtype.
UNIT = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
TINY = {"float32": 2.0**-125, "bfloat16": 2.0**-125, "float16": 2.0**-23, "float64": 2.0**-1021}
LARGEST = {
    name: float(torch.finfo(TORCH[name]).max) if name in FLOATS else torch.iinfo(TORCH[name]).max
    for name in (*NUMBERS, "uint8")
}
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)


@dataclass
class Drawn:
    """One input: what it holds, and how our tensor comes to it."""

    values: np.ndarray[Any, Any]  # float64 for floats, else of the dtype itself
    dtype: str
    view: bool

    def ours(self) -> fsdpc.Tensor:
        whole = np.concatenate([self.values[:1], self.values]) if self.view else self.values
        x = fsdpc.tensor(whole).to(self.dtype)
        return x[1:] if self.view else x

    def theirs(self, wide: bool) -> torch.Tensor:
        return torch.tensor(self.values).to(
            torch.float64 if wide and self.dtype in FLOATS else TORCH[self.dtype]
        )


@dataclass
class Case:
    """Tensors and the operation on them."""

    inputs: list[Drawn]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    says: str = ""  # the arguments that are no tensors


@dataclass(frozen=True)
class Row:
    """How cases of an operation are drawn and compared."""

    draw: Callable[[Draw], Case]
    units: float = 4  # in the last place
    whole: bool = False  # errors are relative to the largest element
    special_grad: bool = True  # gradients too, where elements are special or equal
    special: bool = True  # NaN and infinities are as torch has them
    extreme: bool = True  # so are the dtype's largest elements
    signed: bool = False  # -0.0 is not 0.0
    promotes: bool = False  # torch's float64 gets inputs that are rounded to the result's dtype
    allows: str = ""  # torch's errors that we have not, by their text
    dtyped: bool = True  # the result's dtype is torch's
    lenient: tuple[str, ...] = field(default=())  # our errors that torch has not, by their text


class Draw:
    """Where a case gets its choices from."""

    def __init__(self, row: Row, seed: Sequence[int]) -> None:
        self.rng = np.random.default_rng(seed)
        kinds = ["ordinary", *["special"] * row.special, *["extreme"] * row.extreme]
        self.kind = self.choose(kinds)

    def choose(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def flag(self, likely: float = 0.5) -> bool:
        return bool(self.rng.random() < likely)

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        extents = [1, 2, 3, 5, 17] if self.flag(0.85) else self.choose([[0, 1, 2], [1, 33, 70]])
        return tuple(self.choose(extents) for _ in range(self.rng.integers(low, high + 1)))

    def dim(self, shape: Sequence[int]) -> int:
        n = max(len(shape), 1)
        return int(self.rng.integers(-n, n))

    def dims(self, shape: Sequence[int]) -> Any:
        """All, one, or several dimensions."""
        if not shape or self.flag(0.3):
            return None
        if self.flag():
            return self.dim(shape)
        n = int(self.rng.integers(1, len(shape) + 1))
        return tuple(int(d) for d in self.rng.permutation(len(shape))[:n])

    def broadcastable(self, shape: Sequence[int]) -> tuple[int, ...]:
        cut = int(self.rng.integers(0, len(shape) + 1))
        return tuple(1 if self.flag(0.3) else n for n in shape[cut:])

    def tensor(
        self, shape: Sequence[int], dtypes: Sequence[str] = FLOATS, low: float = -math.inf
    ) -> Drawn:
        """Elements of at least `low`; extremes and what is special only where that is no bound."""
        dtype = self.choose(dtypes)
        if dtype == "bool":
            array: Any = self.rng.random(shape) < 0.5
        elif dtype in FLOATS:
            array = self.rng.standard_normal(shape) * self.choose([1, 1, 0.01, 20])
            if low > -math.inf:
                array = low + np.abs(array)
            elif self.kind != "ordinary":
                array = np.where(self.rng.random(shape) < 0.3, self.among(dtype, shape), array)
            array = rounded(array, dtype)
        else:
            array = self.rng.integers(max(-9, low) if dtype != "uint8" else 0, 10, shape)
            if self.kind == "extreme" and low == -math.inf:
                most = int(LARGEST[dtype])
                ends = np.array([0, most, most - 1, 0 if dtype == "uint8" else -most - 1])
                array = np.where(self.rng.random(shape) < 0.3, self.rng.choice(ends, shape), array)
            array = array.astype(dtype)
        return Drawn(np.asarray(array), dtype, len(shape) > 0 and self.flag(0.3))

    def among(self, dtype: str, shape: Sequence[int]) -> Any:
        top = LARGEST[dtype]
        ends = [top, -top, top / 2, TINY[dtype], -TINY[dtype], 0.0, -0.0, 1e4, -1e4]
        return self.rng.choice(np.array(SPECIAL if self.kind == "special" else ends), shape)

    def number(self, integral: bool = False) -> Any:
        """Return a Python number: whole, a fraction, and now and then one of the special ones."""
        if integral or self.flag():
            return self.choose([0, 1, -1, 2, 3, -7, 2**24 + 1, 2**31 - 1, 2**53 + 1, -(2**62) - 1])
        plain = [0.25, -1.5, 0.1, 3.0, 1e-3]
        return self.choose([*plain, *SPECIAL] if self.kind == "special" else plain)


def rounded(array: Any, dtype: str) -> np.ndarray[Any, Any]:
    return torch.tensor(np.asarray(array)).to(TORCH[dtype]).double().numpy()


def tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def attempt(fn: Callable[[], Any]) -> tuple[list[Any], Exception | None]:
    try:
        return tensors(fn()), None
    except Exception as error:  # whatever kind: both sides are to have one
        return [], error


def array_of(x: Any) -> np.ndarray[Any, Any]:
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return (x.double() if x.is_floating_point() else x).numpy()
    return np.asarray((x.detach().double() if x.dtype.is_floating_point else x.detach()).numpy())


def compare(
    row: Row, got: Any, want: Any, dtype: str, scale: float, whole: bool, unit: float
) -> str:
    """Return what differs, or nothing."""
    a, b = array_of(got), array_of(want)
    if a.shape != b.shape:
        return f"shape {a.shape}, torch {b.shape}"
    if dtype not in FLOATS:
        return "" if np.array_equal(a, b) else f"{a.tolist()}, torch {b.tolist()}"
    if b.dtype == np.float64:
        b = rounded(b, dtype)
    else:
        b = b.astype(np.float64)
    with np.errstate(all="ignore"):
        largest = max(scale, float(np.max(np.abs(b), initial=0, where=np.isfinite(b))))
        bound = unit * (largest if whole else np.abs(b)) + TINY[dtype]
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= bound)
        edge = np.abs(b) + bound >= LARGEST[dtype]  # whether it overflows is a matter of rounding
        same |= edge & (np.isinf(a) | np.isinf(b)) & (np.sign(a) == np.sign(b))
        if row.signed and not whole:
            same &= (a != 0) | (b != 0) | (np.signbit(a) == np.signbit(b))
    if same.all():
        return ""
    wrong = ~same
    return f"{a[wrong][:6].tolist()}, torch {b[wrong][:6].tolist()}, at {np.argwhere(wrong)[0]}"


def check(row: Row, seed: Sequence[int]) -> str:
    """Draw a case and return what differs, or nothing."""
    draw = Draw(row, seed)
    case = row.draw(draw)
    narrow = [x.theirs(False) for x in case.inputs]
    ours = [x.ours() for x in case.inputs]
    real, error = attempt(lambda: case.theirs(*narrow))
    floats = [i for i, x in enumerate(case.inputs) if x.dtype in FLOATS]
    graded = error is None and draw.kind in ("ordinary", "special" * row.special_grad)
    for i in floats if graded else []:
        ours[i].requires_grad_()
    got, own = attempt(lambda: case.ours(*ours))
    says = describe(case, draw)
    if error or own:
        if error is None and any(text in str(own) for text in row.lenient):
            return ""
        if own is None and row.allows and row.allows in str(error):
            return ""
        if error and own and isinstance(own, (ValueError, TypeError, IndexError)):
            return "" if len(str(own)) > 10 else f"{says}: a poor text: {own!r}"
        return f"{says}: {own!r}, torch {error!r}"
    wide = [x.theirs(True) for x in case.inputs]
    if row.promotes:
        common = torch.result_type(*narrow[-2:])
        if common.is_floating_point:
            wide = [*narrow[:-2], *(t.to(common).double() for t in narrow[-2:])]
    for i in floats if graded else []:
        wide[i].requires_grad_()
    want = tensors(case.theirs(*wide))
    scale = max((finite_size(x) for x in case.inputs), default=0.0)
    if len(got) != len(want):
        return f"{says}: {len(got)} results, torch {len(want)}"
    for y, w, r in zip(got, want, real, strict=True):
        if row.dtyped and y.dtype.name != str(r.dtype).removeprefix("torch."):
            return f"{says}: dtype {y.dtype.name}, torch {r.dtype}"
        found = compare(
            row, y, w, y.dtype.name, scale, row.whole, row.units * UNIT.get(y.dtype.name, 0)
        )
        if found:
            return f"{says}: {found}"
    overflowed = any(not np.isfinite(array_of(y)).all() for y in got) and draw.kind == "ordinary"
    if not graded or overflowed or any(np.isnan(case.inputs[i].values).any() for i in floats):
        return ""
    found = gradients(row, case, [ours[i] for i in floats], [wide[i] for i in floats], got, want)
    return f"{says}: {found}" if found else ""


def gradients(row: Row, case: Case, ours: Any, theirs: Any, got: Any, want: Any) -> str:
    """Compare them where torch's are finite, relative to the largest."""
    graded = [(y, w) for y, w in zip(got, want, strict=True) if w.requires_grad]
    if not graded:
        return ""
    for y, w in graded:
        if not y.requires_grad:
            return "no gradient"
        weights = np.random.default_rng(y.numel()).standard_normal(y.shape)
        g = rounded(weights, y.dtype.name)
        y.backward(fsdpc.tensor(g).to(y.dtype), True)
        w.backward(torch.tensor(g), retain_graph=True)
    scale = max(1.0, *(finite_size(x) for x in case.inputs))
    for x, t in zip(ours, theirs, strict=True):
        if t.grad is None:
            continue
        if x.grad is None:
            return "no gradient of an input"
        names = {x.dtype.name, *(y.dtype.name for y, _ in graded)}
        finite = t.grad.abs() < min(LARGEST[name] for name in names) / 64
        own = fsdpc.functional.where(fsdpc.tensor(finite.numpy()), x.grad, 0)
        unit = max(UNIT[x.dtype.name], *(UNIT[y.dtype.name] for y, _ in graded))
        unit *= max(row.units, 64)  # many may be added up, and powers have steep slopes
        found = compare(row, own, t.grad.where(finite, 0), x.dtype.name, scale, True, unit)
        if found:
            return f"gradient {found}"
    return ""


def finite_size(x: Drawn) -> float:
    if x.dtype not in FLOATS:
        return 0.0
    return float(np.max(np.abs(x.values), initial=0, where=np.isfinite(x.values)))


def describe(case: Case, draw: Draw) -> str:
    parts = [f"{x.dtype}{list(x.values.shape)}{' view' * x.view}" for x in case.inputs]
    few = [str(x.values.tolist()) for x in case.inputs if x.values.size <= 6]
    return f"{', '.join(parts)} {case.says} [{draw.kind}; {'; '.join(few)}]"
