"""Parameters, and deferred initialisation for parameters that have no memory yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.tensors.grad_mode import no_grad

_deferring = False


class deferred_init:
    """Build modules without allocating their parameters.

    Inside the context, a new parameter has only a shape and a dtype, and records how to initialise
    itself. ``fully_shard`` then initialises only each rank's rows; ``Module.materialize``
    initialises an unsharded module. Both methods produce the same values as parameters created
    outside the context.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.deferred_init():
    ...     layer = fsdpc.nn.Linear(1 << 20, 1 << 20)   # 4 TB, were it real
    >>> layer.weight.is_deferred
    True
    """

    def __enter__(self) -> deferred_init:
        global _deferring
        self._before = _deferring
        _deferring = True
        return self

    def __exit__(self, *exc: object) -> None:
        global _deferring
        _deferring = self._before


def is_deferring() -> bool:
    """Return whether :class:`deferred_init` is active."""
    return _deferring


class Recipe(NamedTuple):
    """How to draw a parameter's initial values; ``zero_row`` is the index of a row to set to 0."""

    kind: str
    a: float
    b: float
    seed: int
    stream: int
    zero_row: int | None = None

    def fill(self, p: Tensor) -> None:
        """Draw the values into a tensor."""
        _core.init_(p, *self[:5])
        if self.zero_row is not None:
            with no_grad():
                p[self.zero_row] = 0

    def fill_unit(self, unit: _core.Unit, index: int) -> None:
        """Draw the values of this rank's rows in a unit."""
        unit.init(index, *self[:5])
        if self.zero_row is None:
            return
        rows, first, _, _ = _core.master_shard(unit, index, True)
        dim = unit.params[index][2][1]
        at = self.zero_row * dim - first
        if 0 <= at < rows.numel():
            with no_grad():
                rows[at : at + dim] = 0


class RowCode(NamedTuple):
    """How a quantised weight stores its rows: a scheme, and the number of elements of a row."""

    scheme: str
    columns: int

    @property
    def bytes(self) -> int:
        """The bytes of a row."""
        return int(self.encode(_core.zeros((0, self.columns))).shape[1])

    def __str__(self) -> str:
        return f"{self.scheme}, {self.columns} columns"

    def rows(self, numel: int) -> int:
        """Return how many rows ``numel`` bytes hold; rows of no bytes need not be encoded."""
        return numel // self.bytes if numel else 0

    def encode(self, values: Tensor) -> Tensor:
        """float32 (rows, columns) -> uint8 (rows, bytes)."""
        return _core.quantize(values, self.scheme)

    def quantized(self, weight: Parameter) -> Parameter:
        """Return a frozen parameter with the codes of a weight (rows, columns)."""
        shape = weight.shape[0], self.bytes
        if weight.is_deferred:
            p = Parameter(_core.empty_deferred(shape, dtype=_core.uint8), requires_grad=False)
            p._recipe = weight._recipe and CodedRecipe(weight._recipe, self, tuple(weight.shape))
        else:
            p = Parameter(self.encode(weight.detach().float()), requires_grad=False)
        p._code, p._plain_dtype = self, weight.dtype
        return p


class Codes(Tensor):
    """A quantised weight in a state dict, which is refused by weights of another scheme."""

    _code: RowCode

    @classmethod
    def of(cls, values: Tensor, code: RowCode) -> Codes:
        """Return a view of a weight's bytes."""
        codes = cls(values)
        codes._code = code
        return codes


class CodedRecipe(NamedTuple):
    """How to draw the initial values of a quantised weight: those of a weight of this shape."""

    of: Recipe
    code: RowCode
    shape: tuple[int, int]

    def fill(self, p: Tensor) -> None:
        """Draw the values and encode them into a tensor."""
        p.detach().copy_(self.code.encode(self._values()))

    def fill_unit(self, unit: _core.Unit, index: int) -> None:
        """Draw the values and encode this rank's rows in a unit."""
        codes, first, _, _ = _core.master_shard(unit, index, True)
        row = self.code.rows(first)
        rows = self._values()[row : row + self.code.rows(codes.numel())]
        codes.copy_(self.code.encode(rows.contiguous()).reshape(-1))

    def _values(self) -> Tensor:
        values = _core.zeros(self.shape)
        self.of.fill(values)
        return values


class Parameter(Tensor):
    """A leaf tensor that a module owns and an optimizer trains.

    Parameters
    ----------
    data : Tensor or array_like
        Initial values; the parameter shares a tensor's memory.
    requires_grad : bool, default True
        Whether the parameter needs gradients.

    Notes
    -----
    After sharding, ``shape`` is still the full shape, but modules can read the values only inside
    the unit's forward and backward. ``local`` contains this rank's rows, ``grad`` their gradient;
    :func:`fsdpc.full_tensor` and :func:`fsdpc.full_grad` gather full values.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layer = nn.Module()
    >>> layer.factor = nn.Parameter(fsdpc.ones(3))
    >>> [(name, p.shape) for name, p in layer.named_parameters()]
    [('factor', (3,))]
    """

    _unit: Any = None
    _index: int = -1
    _recipe: Recipe | CodedRecipe | None = None
    _code: RowCode | None = None  # of a quantised weight, whose data are its codes
    _plain_dtype: _core.dtype = _core.float32  # of a quantised weight's values and adapters
    _ignored: bool = False  # set by fully_shard(ignored_params=...)
    _swapped: bool = False  # its average is in its place (EMA.swap); units know for theirs

    def __new__(cls, data: Any, dtype: Any = None, requires_grad: bool = True) -> Parameter:
        return super().__new__(cls, data, dtype, requires_grad)

    @classmethod
    def empty(cls, shape: Iterable[int], dtype: Any = None) -> Parameter:
        """Create an uninitialised parameter, deferred inside :class:`deferred_init`."""
        shape = tuple(shape)
        make = _core.empty_deferred if _deferring else _core.empty
        return cls(make(shape, dtype=dtype or _core.float32))

    @property
    def local(self) -> Tensor:
        """This rank's rows in the original dtype, or the whole parameter before it is sharded.

        The tensor shares the engine's memory, so the next forward sees values that you write to it.
        """
        return self if self._unit is None else self._unit.local(self._index)

    @local.setter
    def local(self, value: Tensor) -> None:
        if not _is_same(value, self.local):  # `p.local -= y` assigns here; rows are written
            raise AttributeError("rows are written in place: p.local.copy_(values)")

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the local rows, averaged over ranks, or None if there is none.

        A gradient kept after ``zero_grad()`` normally does not change. Backward overwrites it if
        gradients are offloaded or a step was captured (:func:`fsdpc.graph_step`).
        """
        if self._unit is None:
            return Tensor.grad.__get__(self)
        return self._unit.grad(self._index)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._unit is None:
            Tensor.grad.__set__(self, value)
        elif value is None:
            self._unit.zero_grad()
        elif not _is_same(value, self.grad):  # `p.grad *= y` assigns here; it is already written
            raise ValueError(
                "the gradient of a sharded parameter is written only by reductions; assign None "
                "to drop its unit's gradients, or write into p.grad in place"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        values = Tensor.__deepcopy__(self, memo)
        made = type(self)(values, requires_grad=self.requires_grad)
        made._code, made._plain_dtype = self._code, self._plain_dtype
        return made

    def __reduce__(self) -> Any:
        raise TypeError("parameters are not pickled: save state_dict() instead")


def _is_same(x: Any, own: Tensor | None) -> bool:
    """Return whether x is the tensor that a property returned, possibly wrapped in a new object."""
    if not isinstance(x, Tensor) or own is None:
        return False
    return (x.data_ptr, x.shape, x.dtype) == (own.data_ptr, own.shape, own.dtype)


def full_tensor(p: Tensor) -> Tensor:
    """Return a parameter's full value in its original dtype (collective if it is sharded).

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1))
    >>> fsdpc.full_tensor(layer.weight).shape
    (1, 2)
    """
    unit = getattr(p, "_unit", None)
    return p.detach() if unit is None else unit.collect(p._index, False)


def full_grad(p: Tensor) -> Tensor | None:
    """Return a parameter's full averaged gradient, or None (collective if it is sharded).

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1))
    >>> layer(fsdpc.tensor([[3.0, 4.0]])).sum().backward()
    >>> fsdpc.full_grad(layer.weight).tolist()
    [[3.0, 4.0]]
    """
    unit = getattr(p, "_unit", None)
    if p.grad is None:
        return None
    return p.grad if unit is None else unit.collect(p._index, True)
