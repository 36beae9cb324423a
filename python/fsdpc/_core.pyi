"""The extension module: tensors, autograd, operations and the engine.

The build generates signatures and docstrings (tools/stub_docs.py) and argument parsers
(tools/stub_args.py) from this file, so rebuild after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

T = TypeVar("T")
Number = int | float
Operand = Tensor | Number | np.ndarray[Any, Any]
Shape = tuple[int, ...]
Dims = int | Sequence[int] | None
Pair = tuple[int, int]
Index = Any  # int, slice, None, ..., arrays of integers or bool, or a tuple of those
DTypeLike = dtype | str | type | np.dtype[Any]

class PeerError(RuntimeError):
    """Another rank died or left; the message names it, its process and the pending operation.

    The page docs/troubleshooting.md#exceptions explains what to do.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     loss.backward()
    ... except fsdpc.PeerError as error:
    ...     print(error)
    rank 1 (pid 2341) died of signal 9 (Killed) while rank 0 waits for others; ...
    """

class MismatchError(RuntimeError):
    """Ranks called different operations; the error names both before a wrong result is used.

    The page docs/troubleshooting.md#exceptions explains what to do.

    Examples
    --------
    >>> if fsdpc.rank() == 0:  # doctest: +SKIP
    ...     model(x)  # the other ranks call all_reduce() here
    Traceback (most recent call last):
    fsdpc.MismatchError: ranks disagree in operation ...
    """

class dtype:
    """An element type. There is only one object per type, so compare with `is`.

    Examples
    --------
    >>> fsdpc.bfloat16.itemsize, fsdpc.zeros(2).dtype is fsdpc.float32
    (2, True)
    """

    @property
    def name(self) -> str:
        """The dtype's name, as in NumPy."""
    @property
    def itemsize(self) -> int:
        """Bytes per element."""
    @property
    def is_floating_point(self) -> bool:
        """Whether this is a floating-point dtype."""

float32: dtype
bfloat16: dtype
float16: dtype
float64: dtype
int32: dtype
int64: dtype
uint8: dtype
bool_: dtype

def as_dtype(value: DTypeLike, /) -> dtype:
    """Return the dtype object for a name, a NumPy dtype or a Python type."""

class RemovableHandle:
    """The handle returned by register_hook."""

    def remove(self) -> None:
        """Remove the hook; further calls do nothing."""

class Tensor:
    """A dense, row-major array whose operations autograd can record.

    ``Tensor(data)`` shares memory with a tensor of the same dtype and copies anything else.
    Subclasses may add attributes (they have a ``__dict__``; Tensor itself has none).

    Examples
    --------
    >>> x = fsdpc.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad.tolist()
    [[2.0, 4.0], [6.0, 8.0]]
    """

    def __new__(
        cls: type[T],
        data: Any,
        dtype: DTypeLike | None = None,
        requires_grad: bool = False,
    ) -> T: ...
    @property
    def shape(self) -> Shape:
        """The shape, a tuple."""
    @property
    def dtype(self) -> dtype:
        """The element type."""
    @property
    def ndim(self) -> int:
        """The number of dimensions."""
    @property
    def device(self) -> str:
        """The tensor's device: "cpu", or the name of the plugin that provides the device."""
    @property
    def nbytes(self) -> int:
        """Total size of the elements in bytes."""
    @property
    def requires_grad(self) -> bool:
        """Whether backward computes this tensor's gradient."""
    @requires_grad.setter
    def requires_grad(self, value: bool) -> None: ...
    @property
    def grad(self) -> Tensor | None:
        """The gradient of a leaf, with the leaf's shape and dtype, or None."""
    @grad.setter
    def grad(self, value: Tensor | None) -> None: ...
    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is a leaf, which means that no recorded operation produced it."""
    @property
    def grad_fn(self) -> str | None:
        """The name of the operation that computed the tensor, or None."""
    @property
    def _version(self) -> int:
        """The number of in-place writes to the tensor's memory."""
    @property
    def is_deferred(self) -> bool:
        """Whether the tensor has no memory yet."""
    @property
    def data_ptr(self) -> int:
        """The address of the first element."""
    @property
    def T(self) -> Tensor:
        """A copy of the tensor with its last two dimensions transposed."""
    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one dimension.

        Raises IndexError if the dimension does not exist.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([[1, 2, 3]])
        >>> x.size(), x.size(1)
        ((1, 3), 3)
        """

    def dim(self) -> int:
        """Return the number of dimensions.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2]]).dim()
        2
        """

    def numel(self) -> int:
        """Return the number of elements.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2]]).numel()
        2
        """

    # autograd
    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Compute the gradients of all leaves that this tensor depends on.

        They are added to ``.grad``. If the tensor has several elements, ``gradient`` is required
        and must have the same shape and dtype. ``retain_graph`` keeps the data for a second
        backward. Raises RuntimeError if nothing requires grad, and ValueError if a gradient is
        missing or does not match.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0, 2.0], requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad.tolist()
        [2.0, 4.0]
        """

    def detach(self) -> Tensor:
        """Return a tensor that shares this tensor's memory but is detached from the graph.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0], requires_grad=True)
        >>> (2 * x).detach().requires_grad
        False
        """

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether backward computes this tensor's gradient; return the tensor.

        Raises TypeError if the dtype is not floating-point, and RuntimeError when disabling
        gradients for the result of an operation.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0]).requires_grad_().requires_grad
        True
        """

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call ``hook(gradient)`` in backward when this tensor's gradient is complete.

        If the hook returns a tensor, it replaces the gradient and must have the same shape and
        dtype. Raises RuntimeError if the tensor does not require grad.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0], requires_grad=True)
        >>> handle = x.register_hook(lambda gradient: 10 * gradient)
        >>> (2 * x).sum().backward()
        >>> x.grad.tolist()
        [20.0]
        >>> handle.remove()
        """

    # out of the tensor
    def item(self) -> Any:
        """Return the tensor's only element as a Python number.

        Raises ValueError if the tensor has several elements.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([2.5]).item()
        2.5
        """

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2]]).tolist()
        [[1, 2]]
        """

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return an array that shares the tensor's memory, or a copy if the tensor is on a GPU.

        bfloat16 becomes ml_dtypes' type if that is installed, otherwise a float32 copy. Raises
        RuntimeError if the tensor requires grad; call ``detach()`` first.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0, 2.0])
        >>> x.numpy()[0] = 5.0
        >>> x.tolist()
        [5.0, 2.0]
        """

    def bits(self) -> np.ndarray[Any, Any]:
        """Return a NumPy view of the memory as unsigned integers, for example uint16 for bfloat16.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0]).bits().tolist()
        [1065353216]
        """

    def __format__(self, spec: str, /) -> str:
        """Format a 0-d tensor as a number, and any other tensor as ``str`` does."""
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return an array for ``numpy.asarray``, sharing memory as :meth:`numpy` does."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that shares the memory, for other libraries' ``from_dlpack``."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and index: (1, 0) for the CPU."""
    def __buffer__(self, flags: int, /) -> memoryview:
        """Return a ``memoryview``; raise BufferError for bfloat16 and for tensors on a GPU."""
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __contains__(self, element: Any) -> bool: ...
    # other dtypes, copies
    def to(self, dtype: DTypeLike) -> Tensor:
        """Convert to another dtype; return the tensor itself if it already has that dtype.

        Rounds to nearest. Raises TypeError if the dtype is unknown.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1, 2]).to("float32").tolist()
        [1.0, 2.0]
        """

    def float(self) -> Tensor:
        """Convert to float32: ``to(fsdpc.float32)``.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1]).float().dtype.name
        'float32'
        """

    def bfloat16(self) -> Tensor:
        """Convert to bfloat16: ``to(fsdpc.bfloat16)``.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1]).bfloat16().dtype.name
        'bfloat16'
        """

    def half(self) -> Tensor:
        """Convert to float16: ``to(fsdpc.float16)``.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1]).half().dtype.name
        'float16'
        """

    def double(self) -> Tensor:
        """Convert to float64: ``to(fsdpc.float64)``.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1]).double().dtype.name
        'float64'
        """

    def clone(self) -> Tensor:
        """Return a copy of the tensor; gradients flow through it to this tensor.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0])
        >>> x.clone().data_ptr == x.data_ptr
        False
        """

    def contiguous(self) -> Tensor:
        """Return the tensor itself, because its memory is always dense.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> x = tensor([1.0])
        >>> x.contiguous() is x
        True
        """

    # in place (leaves that require grad: only inside no_grad); gradients flow
    def copy_(self, source: Any) -> Tensor:
        """Copy from a tensor, array or number, with broadcasting and conversion; return the tensor.

        Raises RuntimeError for a leaf that requires grad, except inside ``no_grad``, or if a
        gradient would flow into memory shared with another tensor. Raises ValueError if the shapes
        do not match.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0, 2.0]).copy_([3.0, 4.0]).tolist()
        [3.0, 4.0]
        """

    def fill_(self, value: Number) -> Tensor:
        """Set every element to a number; return the tensor.

        Raises RuntimeError as ``copy_`` does, and TypeError if the value is not a number.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0, 2.0]).fill_(7).tolist()
        [7.0, 7.0]
        """

    def zero_(self) -> Tensor:
        """Set every element to 0; return the tensor.

        RuntimeError as for ``copy_``.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0, 2.0]).zero_().tolist()
        [0.0, 0.0]
        """

    def set_data_(self, source: Tensor, /) -> Tensor:
        """Make this tensor use another tensor's memory and dtype.

        Raises ValueError if the shapes differ.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0]).set_data_(tensor([2])).tolist()
        [2]
        """

    def materialize_(self) -> Tensor:
        """Allocate uninitialised memory for a deferred tensor; return the tensor.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1.0]).materialize_().is_deferred
        False
        """

    # shapes
    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """Return a tensor of another shape that shares this tensor's memory.

        One size may be -1, in which case it is inferred. Raises ValueError if the number of
        elements differs.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1, 2, 3, 4]).reshape(2, -1).tolist()
        [[1, 2], [3, 4]]
        """

    def view(self, *shape: int | Sequence[int]) -> Tensor:
        """Return a tensor of another shape that shares this tensor's memory, like :meth:`reshape`.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1, 2]).view(2, 1).tolist()
        [[1], [2]]
        """

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Flatten the dimensions from start_dim to end_dim into one; the result shares the memory.

        Raises IndexError if the dimension does not exist.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2], [3, 4]]).flatten().tolist()
        [1, 2, 3, 4]
        """

    def unsqueeze(self, dim: int) -> Tensor:
        """Insert a dimension of size 1 at the given index; the result shares the memory.

        Raises IndexError if dim is not in [-ndim - 1, ndim].

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1, 2]).unsqueeze(0).shape
        (1, 2)
        """

    def squeeze(self, dim: int) -> Tensor:
        """Remove a dimension if its size is 1; the result shares the memory.

        Raises IndexError if the dimension does not exist.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2]]).squeeze(0).shape
        (2,)
        """

    def permute(self, *dims: int | Sequence[int]) -> Tensor:
        """Permute the dimensions; a copy.

        Raises ValueError or IndexError unless each dimension occurs exactly once.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([[1, 2], [3, 4]]).permute(1, 0).tolist()
        [[1, 3], [2, 4]]
        """

    def expand(self, *shape: int | Sequence[int]) -> Tensor:
        """Return a copy of the tensor, broadcast to a shape.

        -1 keeps a size. Raises ValueError if the tensor cannot be broadcast to the shape.

        Examples
        --------
        >>> from fsdpc import tensor
        >>> tensor([1, 2]).expand(2, -1).tolist()
        [[1, 2], [1, 2]]
        """

    def __getitem__(self, index: Index) -> Tensor: ...
    # operations that are methods too, by tools/stub_methods.py
    def maximum(self, b: Operand) -> Tensor: ...
    def minimum(self, b: Operand) -> Tensor: ...
    def pow(self, exponent: Operand) -> Tensor: ...
    def neg(self) -> Tensor: ...
    def abs(self) -> Tensor: ...
    def exp(self) -> Tensor: ...
    def log(self) -> Tensor: ...
    def sqrt(self) -> Tensor: ...
    def tanh(self) -> Tensor: ...
    def sigmoid(self) -> Tensor: ...
    def rsqrt(self) -> Tensor: ...
    def sin(self) -> Tensor: ...
    def cos(self) -> Tensor: ...
    def log1p(self) -> Tensor: ...
    def expm1(self) -> Tensor: ...
    def erf(self) -> Tensor: ...
    def sign(self) -> Tensor: ...
    def relu(self) -> Tensor: ...
    def matmul(self, b: Tensor) -> Tensor: ...
    def softmax(self, dim: int = -1) -> Tensor: ...
    def log_softmax(self, dim: int = -1) -> Tensor: ...
    def sum(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def transpose(self, dim0: int, dim1: int) -> Tensor: ...
    def clamp(self, min: Operand | None = None, max: Operand | None = None) -> Tensor: ...
    def isfinite(self) -> Tensor: ...
    def isinf(self) -> Tensor: ...
    def isnan(self) -> Tensor: ...
    def logical_and(self, y: Any) -> Tensor: ...
    def logical_not(self) -> Tensor: ...
    def logical_or(self, y: Any) -> Tensor: ...
    def logical_xor(self, y: Any) -> Tensor: ...
    def all(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def any(self, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor: ...
    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor: ...
    def cumsum(self, dim: int) -> Tensor: ...
    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor: ...
    def max(self, dim: int | None = None, keepdim: bool = False) -> Any: ...
    def min(self, dim: int | None = None, keepdim: bool = False) -> Any: ...
    def norm(self, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor: ...
    def std(self, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor: ...
    def var(self, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor: ...
    def argsort(self, dim: int = -1, descending: bool = False) -> Tensor: ...
    def gather(self, dim: int, index: Tensor) -> Tensor: ...
    def index_select(self, dim: int, index: Tensor) -> Tensor: ...
    def masked_fill(self, mask: Any, value: float | Tensor) -> Tensor: ...
    def masked_select(self, mask: Tensor) -> Tensor: ...
    def nonzero(self) -> Tensor: ...
    def scatter_add(self, dim: int, index: Tensor, src: Tensor) -> Tensor: ...
    def sort(self, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]: ...
    def topk(self, k: int, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]: ...
    def chunk(self, chunks: int, dim: int = 0) -> list[Tensor]: ...
    def flip(self, dims: int | Sequence[int]) -> Tensor: ...
    def outer(self, b: Tensor) -> Tensor: ...
    def repeat(self, *counts: int | Sequence[int]) -> Tensor: ...
    def repeat_interleave(self, repeats: int, dim: int) -> Tensor: ...
    def roll(self, shift: int, dim: int) -> Tensor: ...
    def split(self, sizes: int | Sequence[int], dim: int = 0) -> list[Tensor]: ...
    def tril(self, diagonal: int = 0) -> Tensor: ...
    def triu(self, diagonal: int = 0) -> Tensor: ...
    # end of operations that are methods too
    def __add__(self, other: Operand) -> Tensor: ...
    def __radd__(self, other: Operand) -> Tensor: ...
    def __sub__(self, other: Operand) -> Tensor: ...
    def __rsub__(self, other: Operand) -> Tensor: ...
    def __mul__(self, other: Operand) -> Tensor: ...
    def __rmul__(self, other: Operand) -> Tensor: ...
    def __truediv__(self, other: Operand) -> Tensor: ...
    def __rtruediv__(self, other: Operand) -> Tensor: ...
    def __eq__(self, other: object) -> Any: ...
    def __ne__(self, other: object) -> Any: ...
    def __lt__(self, other: Operand) -> Any: ...
    def __le__(self, other: Operand) -> Any: ...
    def __gt__(self, other: Operand) -> Any: ...
    def __ge__(self, other: Operand) -> Any: ...
    def __and__(self, other: Any) -> Tensor: ...
    def __or__(self, other: Any) -> Tensor: ...
    def __xor__(self, other: Any) -> Tensor: ...
    def __invert__(self) -> Tensor: ...
    def __hash__(self) -> int: ...
    def __pow__(self, exponent: Operand) -> Tensor: ...
    def __rpow__(self, base: Operand) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
    def __abs__(self) -> Tensor: ...
    def __matmul__(self, other: Tensor) -> Tensor: ...
    # in place; the result's shape must be the tensor's
    def __iadd__(self, other: Operand) -> Tensor: ...
    def __isub__(self, other: Operand) -> Tensor: ...
    def __imul__(self, other: Operand) -> Tensor: ...
    def __itruediv__(self, other: Operand) -> Tensor: ...
    def __ifloordiv__(self, other: Operand) -> Tensor: ...
    def __imod__(self, other: Operand) -> Tensor: ...
    def __ipow__(self, exponent: Operand) -> Tensor: ...
    def __imatmul__(self, other: Tensor) -> Tensor: ...
    def __iand__(self, other: Operand) -> Tensor: ...
    def __ior__(self, other: Operand) -> Tensor: ...
    def __ixor__(self, other: Operand) -> Tensor: ...

# ---- creating tensors ----

def tensor(data: Any, dtype: DTypeLike | None = None, requires_grad: bool = False) -> Tensor:
    """Create a new tensor from a number, a nested sequence of numbers or an array.

    Parameters
    ----------
    data : number, sequence or numpy.ndarray
        Of any shape; Python floats become float32, integers int64.
    dtype : dtype, optional
        Dtype of the result; by default the data's.
    requires_grad : bool, default False

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.tensor([[1.0, 2.0], [3.0, 4.0]]).shape, fsdpc.tensor(3).dtype.name
    ((2, 2), 'int64')
    """

def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that shares an array's memory, or a copy if the device is a GPU.

    Examples
    --------
    >>> import fsdpc
    >>> import numpy as np
    >>> array = np.zeros(2, np.float32)
    >>> x = fsdpc.from_numpy(array)
    >>> array[0] = 5.0
    >>> x.tolist()
    [5.0, 0.0]
    """

def from_dlpack(source: Any) -> Tensor:
    """Return a tensor that shares the memory of another library's tensor, through DLPack.

    Parameters
    ----------
    source : object with ``__dlpack__``
        A torch or JAX tensor, or a NumPy or CuPy array, on this process's device.

    Examples
    --------
    >>> import fsdpc
    >>> import numpy as np
    >>> fsdpc.from_dlpack(np.ones(2, np.float32)).tolist()
    [1.0, 1.0]
    """

def empty(
    *shape: int | Sequence[int], dtype: DTypeLike | None = None, requires_grad: bool = False
) -> Tensor:
    """Create an uninitialised tensor.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.empty(2, 3).shape, fsdpc.empty((2, 3)).shape
    ((2, 3), (2, 3))
    """

def zeros(
    *shape: int | Sequence[int], dtype: DTypeLike | None = None, requires_grad: bool = False
) -> Tensor:
    """Create a tensor of zeros.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.zeros(2, 3, dtype="int32").tolist()
    [[0, 0, 0], [0, 0, 0]]
    """

def ones(
    *shape: int | Sequence[int], dtype: DTypeLike | None = None, requires_grad: bool = False
) -> Tensor:
    """Create a tensor of ones.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.ones(2).tolist()
    [1.0, 1.0]
    """

def full(
    shape: int | Sequence[int],
    value: Number,
    dtype: DTypeLike | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Create a tensor filled with one value.

    Integers are exact. Raises ValueError if the dtype cannot represent the value: an integer
    beyond its range, or a finite number that would become infinite.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.full((2,), 0.5).tolist()
    [0.5, 0.5]
    """

def arange(
    start: Number,
    stop: Number | None = None,
    step: Number = 1,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return the numbers from start (0 by default) up to, but excluding, stop.

    Integers are exact. Raises ValueError if the dtype cannot represent the first or last number.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.arange(3).tolist(), fsdpc.arange(1, 2, 0.5).tolist()
    ([0, 1, 2], [1.0, 1.5])
    """

def linspace(
    start: float, stop: float, steps: int, dtype: DTypeLike | None = None
) -> Tensor:
    """Return equally spaced numbers that include both endpoints, each rounded once.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.linspace(0, 1, 5).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

def randint(
    low: int, high: int, shape: int | Sequence[int], dtype: DTypeLike | None = None
) -> Tensor:
    """Draw integers uniformly from [low, high), as int64 unless a dtype is given.

    For ranges of fewer than 2^53 integers, the probabilities differ by a factor of at most 1 +
    2^-11.

    Raises
    ------
    ValueError
        There is no integer between the bounds.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.randint(0, 10, (2, 3))
    >>> x.shape, x.dtype.name, set(x.flatten().tolist()) <= set(range(10))
    ((2, 3), 'int64', True)
    """

def randn(
    *shape: int | Sequence[int],
    dtype: DTypeLike | None = None,
    seed: int | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Draw from the standard normal distribution; a ``seed`` replaces the global seed.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.randn(2, 3, seed=0).tolist() == fsdpc.randn(2, 3, seed=0).tolist()
    True
    """

def empty_deferred(
    shape: int | Sequence[int], dtype: DTypeLike | None = None, requires_grad: bool = False
) -> Tensor:
    """Create a tensor without memory; ``materialize_`` allocates it."""

def init_(
    tensor: Tensor, kind: str, a: float, b: float, seed: int, stream: int, first: int = 0
) -> Tensor:
    """Fill a tensor with a constant, or with normal or uniform random numbers; return it."""

# ---- operations ----

def add(a: Operand, b: Operand) -> Tensor:
    """Return a + b, element by element.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.add(tensor([1.0, 2.0]), 1).tolist()
    [2.0, 3.0]
    """

def sub(a: Operand, b: Operand) -> Tensor:
    """Return a - b, element by element.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sub(tensor([1.0, 2.0]), 1).tolist()
    [0.0, 1.0]
    """

def mul(a: Operand, b: Operand) -> Tensor:
    """Return a * b, element by element.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.mul(tensor([1.0, 2.0]), 3).tolist()
    [3.0, 6.0]
    """

def div(a: Operand, b: Operand) -> Tensor:
    """Return a / b, element by element; integers become float32.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.div(tensor([1, 2]), 2).tolist()
    [0.5, 1.0]
    """

def maximum(a: Operand, b: Operand) -> Tensor:  # method
    """Return the elementwise maximum, or NaN if either element is NaN.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.maximum(tensor([1.0, 5.0]), tensor([2.0, 3.0])).tolist()
    [2.0, 5.0]
    """

def minimum(a: Operand, b: Operand) -> Tensor:  # method
    """Return the elementwise minimum, or NaN if either element is NaN.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.minimum(tensor([1.0, 5.0]), tensor([2.0, 3.0])).tolist()
    [1.0, 3.0]
    """

def mask(x: Operand, keep: Operand) -> Tensor:
    """Return x where keep is true, and elsewhere negative zero, which leaves sums unchanged."""

def keep(x: Operand, keep: Operand) -> Tensor:
    """Return x where keep is true, and 0 elsewhere."""

def pow(x: Operand, exponent: Operand) -> Tensor:  # method
    """Return x ** exponent, element by element.

    Shapes broadcast as in NumPy. int32, int64 and floats promote as in PyTorch; a number takes the
    tensor's dtype. Raises ValueError if shapes cannot be broadcast, and TypeError for bool, uint8
    and objects other than tensors and numbers.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.pow(tensor([2.0, 3.0]), 2).tolist()
    [4.0, 9.0]
    """

def neg(x: Tensor) -> Tensor:  # method
    """Return -x, element by element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.neg(tensor([1.0, -2.0])).tolist()
    [-1.0, 2.0]
    """

def abs(x: Tensor) -> Tensor:  # method
    """Return the absolute value of each element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.abs(tensor([1.0, -2.0])).tolist()
    [1.0, 2.0]
    """

def exp(x: Tensor) -> Tensor:  # method
    """Return e ** x, element by element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.exp(tensor([0.0])).tolist()
    [1.0]
    """

def log(x: Tensor) -> Tensor:  # method
    """Return the natural logarithm of each element, or NaN for negative elements.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.log(tensor([1.0, 0.0])).tolist()
    [0.0, -inf]
    """

def sqrt(x: Tensor) -> Tensor:  # method
    """Return the square root of each element, or NaN for negative elements.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sqrt(tensor([4.0, 9.0])).tolist()
    [2.0, 3.0]
    """

def tanh(x: Tensor) -> Tensor:  # method
    """Return the hyperbolic tangent of each element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.tanh(tensor([0.0])).tolist()
    [0.0]
    """

def sigmoid(x: Tensor) -> Tensor:  # method
    """Return 1 / (1 + e ** -x), element by element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sigmoid(tensor([0.0])).tolist()
    [0.5]
    """

def rsqrt(x: Tensor) -> Tensor:  # method
    """Return 1 / sqrt(x), element by element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.rsqrt(tensor([4.0])).tolist()
    [0.5]
    """

def sin(x: Tensor) -> Tensor:  # method
    """Return the sine of each element, given in radians.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sin(tensor([0.0])).tolist()
    [0.0]
    """

def cos(x: Tensor) -> Tensor:  # method
    """Return the cosine of each element, given in radians.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.cos(tensor([0.0])).tolist()
    [1.0]
    """

def log1p(x: Tensor) -> Tensor:  # method
    """Return log(1 + x), element by element, accurate near 0.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.log1p(tensor([0.0])).tolist()
    [0.0]
    """

def expm1(x: Tensor) -> Tensor:  # method
    """Return e ** x - 1, element by element, accurate near 0.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.expm1(tensor([0.0])).tolist()
    [0.0]
    """

def erf(x: Tensor) -> Tensor:  # method
    """Return the error function of each element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.erf(tensor([0.0])).tolist()
    [0.0]
    """

def sign(x: Tensor) -> Tensor:  # method
    """Return the sign of each element: -1, 0 or 1.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sign(tensor([-3.0, 0.0, 2.0])).tolist()
    [-1.0, 0.0, 1.0]
    """

def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e ** x), element by element, without overflow."""

def clamp_min(x: Tensor, bound: float) -> Tensor:
    """Return the maximum of each element and a bound; NaN stays NaN."""

def clamp_max(x: Tensor, bound: float) -> Tensor:
    """Return the minimum of each element and a bound; NaN stays NaN."""

def huber(x: Tensor, beta: float) -> Tensor:
    """Return x ** 2 / (2 beta) if abs(x) is below beta, and abs(x) - beta / 2 otherwise."""

def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), element by element.

    Source: Elfwing, Uchibe & Doya 2017.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.silu(tensor([0.0])).tolist()
    [0.0]
    """

def relu(x: Tensor) -> Tensor:  # method
    """Return max(x, 0), element by element.

    x has any shape and a float dtype, which the result keeps. Raises TypeError for other dtypes.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.relu(tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Apply the Gaussian error linear unit.

    Parameters
    ----------
    x : Tensor
    approximate : {"none", "tanh"}
        Use erf, or tanh as in GPT-2.

    Source: Hendrycks & Gimpel 2016.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [round(y, 4) for y in F.gelu(tensor([-1.0, 0.0, 1.0])).tolist()]
    [-0.1587, 0.0, 0.8413]
    """

def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the SiLU-gated product ``silu(gate) * up``, in one pass.

    Source: Shazeer 2020.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.swiglu(tensor([0.0]), tensor([3.0])).tolist()  # silu(gate) * up
    [0.0]
    """

def matmul(a: Tensor, b: Tensor) -> Tensor:  # method
    """Multiply matrices.

    a is (..., n, k) and b is (..., k, m), with the same float dtype; leading dimensions broadcast.
    A vector is treated as a row on the left or a column on the right; the added dimension is
    removed from the result. Raises TypeError if the dtypes differ, and ValueError if the shapes do
    not match.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.matmul(tensor([[1.0, 2.0]]), tensor([[3.0], [4.0]])).tolist()
    [[11.0]]
    """

def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: Literal["oi", "io"] = "oi"
) -> Tensor:
    """Multiply rows by a weight: ``x @ weight.T + bias``.

    Parameters
    ----------
    x : Tensor
        (..., in)
    weight : Tensor
        (out, in), or (in, out) with layout "io"; of x's dtype.
    bias : Tensor, optional
        (out), of x's dtype.
    layout : {"oi", "io"}
        "io" is the layout of transformers' Conv1D, and so of GPT-2.

    Returns
    -------
    Tensor
        (..., out)

    Notes
    -----
    The gradient of the weight is written directly to its destination (a sharded parameter's reduce
    buffer, added in its dtype), without a temporary.

    Examples
    --------
    >>> import fsdpc
    >>> x, w = fsdpc.tensor([[1.0, 2.0]]), fsdpc.tensor([[3.0, 4.0]], requires_grad=True)
    >>> fsdpc.functional.linear(x, w).sum().backward()
    >>> w.grad.tolist()
    [[1.0, 2.0]]
    """

def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, layout: Literal["oi", "io"] = "oi"
) -> Tensor:
    """Multiply rows by a weight and apply gelu: ``gelu(linear(x, weight, bias), "tanh")``.

    Parameters
    ----------
    x : Tensor
        (..., in)
    weight : Tensor
        (out, in), or (in, out) with layout "io"; of x's dtype.
    bias : Tensor, optional
        (out), of x's dtype.
    layout : {"oi", "io"}
        "io" is the layout of transformers' Conv1D, and so of GPT-2.

    Returns
    -------
    Tensor
        (..., out)

    Raises
    ------
    TypeError
        An operand is not a floating point tensor of x's dtype.
    ValueError
        Shapes do not match.

    Notes
    -----
    GPUs can compute gelu with tanh, as in GPT-2, inside the matrix product's kernel, for bf16 and
    fp16, if cuBLASLt has such a kernel for the shape. It rounds once instead of twice. Otherwise
    the bits equal those of two operations. For gelu with erf, write ``gelu(linear(x, weight,
    bias))``. If only a :func:`linear` uses the result of a tanh gelu (this one or ``gelu(x,
    "tanh")``), its backward computes the gradient of gelu's input in the same way.

    Examples
    --------
    >>> import fsdpc
    >>> x, w = fsdpc.tensor([[1.0, 2.0]]), fsdpc.tensor([[3.0, 4.0]])
    >>> fsdpc.functional.linear_gelu(x, w).tolist()
    [[11.0]]
    """

def quantized_linear(x: Tensor, codes: Tensor, scheme: str, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a quantised weight: ``linear(x, dequantize(codes, scheme, in), bias)``.

    Parameters
    ----------
    x : Tensor
        (..., in)
    codes : Tensor
        (out, bytes), uint8, as from :func:`quantize`; they get no gradient.
    scheme : {"nf4", "int4", "int8"}
    bias : Tensor, optional
        (out), of x's dtype.

    Returns
    -------
    Tensor
        (..., out)

    Raises
    ------
    TypeError
        An operand has another dtype.
    ValueError
        Shapes do not match, or the scheme is unknown.

    Notes
    -----
    Blocks of the weight are dequantised to x's dtype, one at a time; no whole copy of it exists.

    Examples
    --------
    >>> import fsdpc
    >>> codes = fsdpc.functional.quantize(fsdpc.tensor([[1.0, -0.5]]), "int8")
    >>> fsdpc.functional.quantized_linear(fsdpc.tensor([[2.0, 0.0]]), codes, "int8").tolist()
    [[2.0]]
    """

def quantize(values: Tensor, scheme: str) -> Tensor:
    """Encode the rows of a matrix in few bits.

    Parameters
    ----------
    values : Tensor
        (rows, columns), float32.
    scheme : {"nf4", "int4", "int8"}
        "nf4" (NormalFloat, Dettmers et al. 2023): 4 bits per element, and per block of 64 elements
        a scale of a byte. "int4": 4 bits, and an fp32 scale per block of 128. "int8": 8 bits, and
        an fp32 scale per row. Blocks begin anew in each row.

    Returns
    -------
    Tensor
        (rows, bytes), uint8. A row has all of its codes and scales: for nf4, ``8 + columns / 64 +
        columns / 2`` bytes.

    Raises
    ------
    ValueError
        A value is not finite, ``values`` is not such a matrix, or the scheme is unknown.

    Examples
    --------
    >>> from fsdpc import functional as F, ones
    >>> F.quantize(ones(2, 128), "nf4").shape
    (2, 74)
    """

def dequantize(codes: Tensor, scheme: str, columns: int, dtype: DTypeLike) -> Tensor:
    """Return the values that :func:`quantize` stored, as a matrix of ``columns`` columns.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.dequantize(F.quantize(tensor([[1.0, -1.0, 0.0]]), "int4"), "int4", 3, "float32").tolist()
    [[1.0, -1.0, 0.0]]
    """

def softmax(x: Tensor, dim: int = -1) -> Tensor:  # method
    """Return the softmax along a dimension; any dimension but the last requires two copies.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.softmax(tensor([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """

def log_softmax(x: Tensor, dim: int = -1) -> Tensor:  # method
    """Return the logarithm of :func:`softmax`, computed without overflow.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [round(y, 4) for y in F.log_softmax(tensor([1.0, 1.0])).tolist()]
    [-0.6931, -0.6931]
    """

def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift.

    Parameters
    ----------
    x : Tensor
        (..., cols)
    weight, bias : Tensor, optional
        (cols), of x's dtype.
    eps : float
        Added to the variance.

    Source: Ba, Kiros & Hinton 2016.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.layer_norm(tensor([[1.0, 3.0]]), eps=0.0).tolist()
    [[-1.0, 1.0]]
    """

def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divide the last dimension by its root mean square, then scale.

    Source: Zhang & Sennrich 2019.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.rms_norm(tensor([[1.0, -1.0]]), eps=0.0).tolist()
    [[1.0, -1.0]]
    """

def row_moments(
    x: Tensor, rows: int, dy: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Compute each row's mean and sum of squared deviations or, given dy, two other sums.

    Given dy, the results are each row's sums of dy and of ``dy * (x - shift)``. x and dy have the
    same shape and are treated as rows; shift has one value per row, or fewer, which repeat. The
    result has shape (2, rows) and, like shift, dtype float32 (float64 if x is float64). It has no
    gradient.
    """

def row_affine(
    x: Tensor,
    rows: int,
    a: Tensor,
    c: Tensor | None = None,
    shift: Tensor | None = None,
    y: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    """Compute ``(x - shift) * a + y * b + c``, rounded once and without a gradient.

    x and y have the same shape and are treated as rows; the other tensors have per-row values, as
    in :func:`row_moments`.
    """

def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table.

    Parameters
    ----------
    ids : Tensor
        Any shape, int32 or int64.
    weight : Tensor
        (rows, dim)
    padding_idx : int, optional
        Index of a row that gets no gradient from these lookups; negative values count from the end.

    Returns
    -------
    Tensor
        (..., dim)

    Raises
    ------
    IndexError
        An id is negative or too large.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.embedding(tensor([1, 0, 1]), tensor([[1.0], [2.0]])).tolist()
    [[2.0], [1.0], [2.0]]
    """

def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: tuple[int, int, int, int],
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Convolve images with filters; ``padding`` is (top, bottom, left, right)."""

def pool2d(x: Tensor, max: bool, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the maximum or the mean of each window."""

def element_places(index: Tensor, shape: int | Sequence[int], dim: int) -> Tensor | None:
    """Return the memory positions of the elements that an index selects along a dimension.

    Returns None if an index is out of range. Only on the host.
    """

def scatter_rows(ids: Tensor, x: Tensor, rows: int) -> Tensor:
    """Return a (rows, dim) tensor whose row i sums the rows of x (..., dim) with id i.

    Raises IndexError if an id is out of range.
    """

def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements by angles that increase with the position.

    Parameters
    ----------
    x : Tensor
        (batch, tokens, heads, dim); elements i and i + dim/2 are a pair.
    cos, sin : Tensor
        (tokens or more, dim/2), see :func:`rotary_tables`; no gradient.

    Source: Su et al. 2021; halves as in transformers' LLaMA checkpoints.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> cos, sin = F.rotary_tables(tokens=2, dim=2)
    >>> F.rotary(tensor([[[[1.0, 0.0], [1.0, 0.0]]]]), cos, sin).tolist()[0][0][0]
    [1.0, 0.0]
    """

def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    layout: Literal["bhtd", "bthd"] = "bhtd",
    mask: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Compute attention with the fused kernel; a nonzero ``window`` limits the number of keys."""

def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    causal: bool = True,
    scale: float | None = None,
    layout: Literal["bhtd", "bthd"] = "bhtd",
    window: int = 0,
) -> Tensor:
    """Attend within each document of a row; a nonzero ``window`` limits the number of keys."""

def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute ``functional.cross_entropy`` of class ids without weights; the result is float32."""

def nll_loss(log_p: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute the negative log likelihood with the defaults of ``functional.nll_loss``."""

def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    chunk_rows: int = 0,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight), targets)`` without storing all logits.

    Parameters
    ----------
    x : Tensor
        (..., in)
    weight : Tensor
        (classes, in), of x's dtype.
    targets : Tensor
        (...), int32 or int64.
    ignore_index : int
        Rows with this target are ignored.
    chunk_rows : int
        Number of rows whose logits exist at the same time; 0 chooses the number that fits in 24
        MiB, but at least 64; on a GPU 64 MiB, at least 256 and an eighth of all rows.
    reduction : {"mean", "sum", "none"}
        The mean covers only rows that are not ignored; "none" returns (...), with 0 for those.
    label_smoothing : float
        This fraction of the target, in [0, 1), is spread over all classes.
    softcap : float
        If positive, logits become ``softcap * tanh(logits / softcap)``.
    z_loss : float
        Adds this factor times the square of each row's log-sum-exp.

    Returns
    -------
    Tensor
        A float32 scalar, or (...) with "none". The mean is NaN if all rows are ignored.

    Raises
    ------
    IndexError
        A target is neither a class nor ``ignore_index``.
    ValueError
        Shapes do not match, or an option is out of range.

    Notes
    -----
    With several chunks, the weight's gradient is summed in fp32 in forward and becomes its gradient
    in backward; with one chunk, the logits' gradient is kept. With "none", backward computes the
    logits again.

    Source: Chowdhery et al. 2022 (z-loss), Gemma Team 2024 (soft caps).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> x, weight = tensor([[0.0]]), tensor([[1.0], [2.0]])
    >>> round(F.linear_cross_entropy(x, weight, tensor([1])).item(), 4)  # log(2)
    0.6931
    """

def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zero elements with probability p and scale the others by 1 / (1 - p).

    Notes
    -----
    The mask depends only on the seed (``fsdpc.manual_seed``) and the number of random streams taken
    before. It is not kept; recomputation draws the same mask.

    Source: Srivastava et al. 2014.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.dropout(tensor([1.0, 2.0]), 0.5, training=False).tolist()
    [1.0, 2.0]
    """

def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # method
    """Sum elements over dimensions.

    x has any shape and dtype. dim is one or several dimensions, or None for all; keepdim keeps
    them with size 1. Raises IndexError if x has no such dimension. Floats keep their dtype and are
    summed in float32 or float64; integers and bool become int64.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sum(tensor([[1.0, 2.0], [3.0, 4.0]]), 0).tolist()
    [4.0, 6.0]
    """

def sum_squares(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Sum the squares of elements over dimensions, treating 16-bit floats as float32."""

def cumsum(x: Tensor, dim: int) -> Tensor:
    """Return cumulative sums along a dimension."""

def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the log of the sum of exponentials along a dimension."""

def result_type(x: Tensor, y: Tensor) -> dtype:
    """Return the dtype that an operation on x and y produces, like PyTorch's ``result_type``."""

def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:  # method
    """Average elements over dimensions.

    x has any shape and dtype. dim is one or several dimensions, or None for all; keepdim keeps
    them with size 1. Raises IndexError if x has no such dimension. Floats keep their dtype;
    integers and bool become float32.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.mean(tensor([[1.0, 2.0], [3.0, 4.0]]), 1).tolist()
    [1.5, 3.5]
    """

def cast(x: Tensor, dtype: DTypeLike) -> Tensor:
    """Convert to another dtype, rounding to nearest; the gradient has x's dtype.

    x has any shape and dtype. Raises TypeError if the dtype is unknown.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.cast(tensor([1, 2]), "float32").tolist()
    [1.0, 2.0]
    """

def array_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes.

    Any dtype is allowed. NaN equals itself, but 0.0 and -0.0 differ. Raises TypeError if either
    argument is not a tensor.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.array_equal(tensor([1.0]), tensor([1.0])), F.array_equal(tensor([1.0]), tensor([1]))
    (True, False)
    """

# ---- operations: shapes ----

def reshape(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """Return a tensor of another shape that shares x's memory.

    x has any dtype; one size may be -1, in which case it is inferred. Raises ValueError if the
    number of elements differs.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.reshape(tensor([1, 2, 3, 4]), (2, -1)).tolist()
    [[1, 2], [3, 4]]
    """

def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:  # method
    """Transpose two dimensions; a copy.

    x has any shape and dtype. Raises IndexError if x has no such dimension.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.transpose(tensor([[1, 2], [3, 4]]), 0, 1).tolist()
    [[1, 3], [2, 4]]
    """

def permute(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Permute the dimensions; a copy.

    x has any dtype. Raises ValueError or IndexError unless dims lists each dimension exactly once.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.permute(tensor([[1, 2], [3, 4]]), (1, 0)).tolist()
    [[1, 3], [2, 4]]
    """

def expand(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    """Return a copy of x, broadcast to a shape.

    x has any dtype; -1 keeps a size. Raises ValueError if x cannot be broadcast to the shape.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.expand(tensor([1, 2]), (2, -1)).tolist()
    [[1, 2], [1, 2]]
    """

def flip(x: Tensor, dims: Dims) -> Tensor:
    """Return a copy of x that is reversed along the given dimensions."""

def roll(x: Tensor, shift: int, dim: int) -> Tensor:
    """Return a copy of x that is shifted along a dimension; elements wrap around."""

def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a dimension.

    Raises TypeError if the tensors' dtypes differ, and ValueError if their sizes in other
    dimensions do.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.concat([tensor([1, 2]), tensor([3])]).tolist()
    [1, 2, 3]
    """

def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a new dimension.

    Raises TypeError if the tensors' dtypes differ, and ValueError if their shapes do.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.stack([tensor([1, 2]), tensor([3, 4])], 1).tolist()
    [[1, 3], [2, 4]]
    """

# ---- the tape ----

def set_grad_enabled(enabled: bool, /) -> bool:
    """Enable or disable gradient recording; return the previous setting."""

def is_grad_enabled() -> bool:
    """Return whether operations are recorded on this thread.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.no_grad():
    ...     fsdpc.is_grad_enabled()
    False
    """

def in_backward() -> bool:
    """Return whether a backward pass is running."""

def boundary(x: Tensor, callback: Callable[[], Any]) -> Tensor:
    """Return x; in backward, call a function when the result's gradient is complete.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> x = fsdpc.ones(1, requires_grad=True)
    >>> y = F.boundary(x, lambda: print("backward has come here"))
    >>> (2 * y).sum().backward()
    backward has come here
    """

def checkpoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping its intermediate results; backward runs it again.

    Parameters
    ----------
    fn : callable
        Called with the following arguments, and again in each backward.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> x = fsdpc.tensor([1.0, 2.0], requires_grad=True)
    >>> F.checkpoint(lambda x: F.relu(x) * x, x).sum().backward()
    >>> x.grad.tolist()
    [2.0, 4.0]
    """

def checkpoint_products(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Like ``checkpoint``, but keep the results of products, which backward does not repeat."""

def custom(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    backward: Callable[..., Tensor | Sequence[Tensor | None] | None],
) -> tuple[Tensor, ...]:
    """Record that outputs were computed from inputs, with a Python function as backward.

    Parameters
    ----------
    inputs : sequence of Tensor
        The tensors from which the outputs were computed, with any shapes and dtypes.
    outputs : sequence of Tensor
        The results, with any shapes and dtypes. Integers and bool have no gradient.
    backward : callable
        Called once for each backward through the result, with a gradient, in its shape and dtype,
        or None for each output. It returns a gradient, in its shape and dtype, or None for each
        input: a sequence, or a single value if there is one input. Nothing is recorded while it
        runs.

    Returns
    -------
    tuple of Tensor
        A tensor for each output, over the same memory. In ``no_grad``, or if no input requires
        grad, they do not require grad and ``backward`` is dropped.

    Raises
    ------
    TypeError
        ``inputs`` or ``outputs`` is not a sequence of tensors.

    Notes
    -----
    ``Tensor.backward`` raises ValueError if ``backward`` returns a wrong number of gradients, or a
    gradient whose shape or dtype differs from its input's. It raises TypeError for other results,
    and passes on exceptions from ``backward``. docs/custom.md has examples, including kernels in C.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import functional as F
    >>> def cube(x):
    ...     with fsdpc.no_grad():
    ...         y = x * x * x
    ...     return F.custom([x], [y], lambda dy: 3 * dy * x * x)[0]
    >>> x = fsdpc.tensor([1.0, 2.0], requires_grad=True)
    >>> cube(x).sum().backward()
    >>> x.grad.tolist()
    [3.0, 12.0]
    """

def backward(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None = None,
    retain_graph: bool = False,
) -> None:
    """Compute the gradients of all leaves that the given tensors depend on."""

def manual_seed(seed: int) -> None:
    """Set the seed for dropout and initialisation, and restart their random streams at 0.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.manual_seed(0)
    >>> a = fsdpc.randn(3)
    >>> fsdpc.manual_seed(0)
    >>> a.tolist() == fsdpc.randn(3).tolist()
    True
    """

def initial_seed() -> int:
    """Return the seed set by ``manual_seed``, or 0 if none was set."""

def next_stream() -> int:
    """Reserve the next random stream and return its index."""

# ---- the runtime ----

def set_num_threads(threads: int) -> None:
    """Set the number of compute threads for this rank; results do not depend on it.

    Examples
    --------
    >>> import fsdpc
    >>> before = fsdpc.num_threads()
    >>> fsdpc.set_num_threads(1)
    >>> fsdpc.num_threads()
    1
    >>> fsdpc.set_num_threads(before)
    """

def set_ordered(ordered: bool, /) -> None:
    """Choose whether sums use the fastest order or the same order in every run."""

def num_threads() -> int:
    """Return this rank's number of compute threads.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.num_threads() >= 1
    True
    """

def engine_threads() -> int:
    """Return how many kernel and stream threads the engine currently has in this process."""

def usable_cores() -> int:
    """Return how many cores CPU affinity and quota let this process use; starts no threads."""

def memory_stats() -> dict[str, int]:
    """Return current and peak bytes by category, and the number of system allocations."""

def reset_peak_memory_stats() -> None:
    """Reset the peaks to the current values.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.reset_peak_memory_stats()
    >>> held = fsdpc.memory_stats()
    >>> held["total_bytes"] == held["total_peak_bytes"]
    True
    """

def check_environment() -> dict[str, Any]:
    """Return the library's environment variables; raise ValueError if any is invalid."""

def runtime_config() -> dict[str, Any]:
    """Return the instruction set, threads and available kernels, for show_config()."""

def plugin_config(path: str, /) -> dict[str, Any]:
    """Open the plugin at a path; return its "description" and its number of "devices"."""

def plugin_library(path: str, library: str | None, /) -> str:
    """Open the library that a plugin's transport uses; return a description of it."""

def set_device(path: str | None, /) -> None:
    """Select the CPU or a plugin's device; call it before creating the first tensor."""

def device_name() -> str:
    """Return "cpu", or the name of the selected plugin."""

def adopt_stream(handle: int, /) -> None:
    """Use the stream with this raw handle as the main stream, ordered after the current one."""

def set_reclaim(callable: Callable[[], object] | None, /) -> None:
    """Set a function to call when device memory runs out, before the allocation is retried once."""

def stream_handle() -> int:
    """Return the raw handle of the main stream, or 0 on the CPU."""

def device_ordinal() -> int:
    """Return the index of the GPU, or 0 on the CPU."""

# ---- the engine ----

def listen_for_rank(address: str, rank: int, /) -> int:
    """Open the socket that a launcher passes to a rank."""

class Transport:
    """Carries messages between hosts, using the caller's threads or a plugin."""

    def __init__(
        self, rank: int, size: int, plugin: str | None = None, peers: int = 1
    ) -> None: ...
    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent to other hosts so far."""
    @property
    def rank(self) -> int:
        """This rank."""
    @property
    def buffers(self) -> int:
        """Number of message buffers per direction: four for each of the `peers`."""
    @property
    def tags(self) -> int:
        """Tags at or above this value mark a peer's last message."""
    @property
    def failed(self) -> bool:
        """Whether this rank or another has aborted the transport."""
    def take(self, buffer: int, seconds: float, /) -> tuple[int, int, memoryview] | None:
        """Return the (peer, tag, memory) of the next message to send, or None if there is none. The
        memory remains valid until its buffer is reused. Raises PeerError at the end.
        """

    def buffer(self, buffer: int, size: int, /) -> memoryview:
        """Return memory for the next incoming message; it is valid until the message is
        delivered."""
    def deliver(self, buffer: int, peer: int, tag: int, /) -> bool:
        """Deliver the message in the buffer; return False if no more messages will arrive."""
    def abort(self, reason: str, /) -> None:
        """Make every operation fail with this reason."""
    def close(self) -> None:
        """Stop sending."""

class Tier:
    """This rank's unnamed file for offloaded shards; ``chunk`` is in elements."""

    def __init__(self, folder: str | bytes, rank: int, chunk: int = 0) -> None: ...
    def stats(self) -> dict[str, int]:
        """Return the file size, the bytes read and written, and whether I/O bypasses the page
        cache."""

class SavedTensors:
    """A store of tensors that leave memory until backward, for a file or the "host" of a GPU.

    ``place`` None makes a plan. ``fraction`` of the arrays leave. ``begin`` and ``end`` enclose
    the forward of a unit whose tensors belong to another library.
    """

    def __init__(self, place: Tier | str | None, fraction: float = 1.0) -> None: ...
    @property
    def away_bytes(self) -> int:
        """The size of the file, or of the host's memory."""
    @property
    def staging_bytes(self) -> int:
        """The memory of the threads that read and write, if there is a file."""
    def call(
        self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, whose saved native tensors leave afterwards."""
    def begin(self) -> None:
        """Release the memory of tensors that were being written, and write those of the forward
        that ended last."""
    def end(self, unit: str, owner: Any) -> SavedSet:
        """Return the set of a forward's tensors.

        ``owner.arrays()`` lists addresses and bytes, ``leave`` receives which of them leave,
        ``release`` frees these, ``restore`` returns their new addresses, and ``settle`` receives
        whether they have been restored.
        """

class SavedSet:
    """The saved tensors of one forward."""

    def need(self) -> None:
        """Bring the tensors back into memory, and begin to read those that left before."""

#: (file or None, params, masters, states, gradients, fraction of the latter three): which arrays
#: are in a file; ("host", ...): in host memory next to a GPU.
Offload = tuple[Tier | str | None, bool, bool, bool, bool, float]

class Comm:
    """A group of ranks that share ``secret``; ``transport`` carries bytes between hosts.

    ``library`` is the preferred NCCL. Messages name its ranks by ``ranks``. Without an address,
    peers and transports are simulated.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str | None,
        socket_fd: int = -1,
        news_fd: int = -1,
        local_rank: int = 0,
        library: str | None = None,
        secret: str | None = None,
        hosts: int = 1,
        transport: Transport | None = None,
        ranks: list[int] | None = None,
    ) -> None: ...
    @property
    def rank(self) -> int:
        """This process's rank in the group."""
    @property
    def world_rank(self) -> int:
        """This process's rank in the original group that this group was split from."""
    @property
    def size(self) -> int:
        """Number of ranks."""
    @property
    def hosts(self) -> int:
        """Number of hosts, or 0 if the group was created by :meth:`split`."""
    @property
    def waited_ns(self) -> int:
        """Time spent waiting for other ranks so far, in nanoseconds."""
    @property
    def transport(self) -> str:
        """"self", "shm", "hosts" or "nccl"."""
    def all_reduce(self, tensor: Tensor, op: str = "sum", /) -> None:
        """Reduce a tensor over the ranks, in place."""
    def all_gather(self, tensor: Tensor, /) -> Tensor:
        """Return all ranks' tensors, stacked as (size, ...)."""
    def broadcast(self, tensor: Tensor, root: int = 0, /) -> None:
        """Copy the root's values to all ranks, in place."""
    def barrier(self) -> None:
        """Wait for all ranks."""
    def split(self, color: int, key: int, /) -> Comm:
        """Return the group of ranks with the same color, ordered by key."""
    def watch(self, peers: list[tuple[int, int, int, str]], host: str, /) -> None:
        """Watch other hosts from the first rank of this host, which is named ``host``.

        Each peer is (socket, first rank, number of ranks, host name); the group takes ownership of
        the connected socket.
        """

    def abort(self, reason: str, /) -> None:
        """Make this rank and all peers fail."""
    def close(self) -> None:
        """Leave without waiting for peers."""

class Group:
    """A process group of ranks on one host, for collectives of torch.distributed.

    Memory is given by its address and bytes; ``keep`` lives until the operation is done. ``what``
    describes the data, and must be the same on all ranks. The ranks meet through ``address``, and
    admit only ranks that know ``secret``.
    """

    def __init__(
        self, rank: int, size: int, address: str, secret: str, timeout_s: float
    ) -> None: ...
    def part(self, members: list[int], id: int, /) -> Group:
        """Return the group of these ranks; only they call it, with the same unused id."""
    def all_reduce(
        self,
        keep: Any,
        send: int,
        recv: int,
        numel: int,
        dtype: str,
        op: str,
        first: int,
        part: int,
        what: str,
        /,
    ) -> GroupWork:
        """Reduce elements; this rank receives ``part`` of them, from ``first`` on."""
    def all_gather(
        self, keep: Any, send: int, recv: int, n_bytes: int, what: str, /
    ) -> GroupWork:
        """Gather the bytes of all ranks, in rank order."""
    def broadcast(
        self, keep: Any, data: int, n_bytes: int, root: int, what: str, /
    ) -> GroupWork:
        """Copy the root's bytes to all ranks."""
    def exchange(
        self,
        keep: Any,
        send: int,
        n_bytes: int,
        recv: int,
        most: int,
        extents: list[tuple[int, int, int]],
        root: int,
        what: str,
        /,
    ) -> GroupWork:
        """Receive an extent (from, bytes, to) of the ``send`` of every rank.

        No rank's ``send`` has more than ``most`` bytes, which is the same on all ranks.
        """

    def all_to_all(
        self,
        keep: Any,
        send: int,
        recv: int,
        sends: list[int],
        receives: list[int],
        what: str,
        /,
    ) -> GroupWork:
        """Send a part of ``send`` to each rank; the lists are the bytes for and from each.

        If a rank sends other than its peer expects, nothing is copied, and ``differ`` says so.
        """

    def barrier(self, what: str, /) -> GroupWork:
        """Complete once all ranks have posted it."""
    def send(self, keep: Any, data: int, n_bytes: int, peer: int, tag: int, /) -> GroupWork:
        """Send a message."""
    def recv(self, keep: Any, data: int, n_bytes: int, peer: int, tag: int, /) -> GroupWork:
        """Receive a message with this tag and size from a peer, or from any peer if it is -1."""
    def set_timeout(self, seconds: float, /) -> None:
        """Set the deadline of later waits."""
    def abort(self, reason: str, /) -> None:
        """Make all ranks' operations on the group fail."""
    def close(self) -> None:
        """Leave without waiting for peers."""

class GroupWork:
    """An operation of a :class:`Group`.

    If it is dropped before it is done, a receive is cancelled, a send is finished from a copy, and
    any other operation makes the group fail.
    """

    @property
    def differ(self) -> tuple[int, int, int, int] | None:
        """(from, to, bytes sent, bytes expected) of an all_to_all that is done, if they differ."""
    @property
    def source(self) -> int:
        """The rank that a message came from, or -1."""
    def wait(self) -> None:
        """Wait until it is done."""
    def test(self) -> bool:
        """Advance all groups' operations; return whether this one is done."""

class Unit:
    """A unit, which one ``fully_shard`` call creates."""

    def __init__(
        self,
        name: str,
        names: list[str],
        params: list[Any],
        shard: Comm,
        replicate: Comm | None = None,
        param_dtype: dtype | None = None,
        reduce_dtype: dtype | None = None,
        output_dtype: dtype | None = None,
        cast_forward_inputs: bool = True,
        reshard_after_forward: bool | None = None,
        keep_grads: bool = False,
        deterministic: bool = False,
        modules: int = 1,
        offload: Offload | None = None,
        band_per_param: bool = False,
        gather_codec: str = "exact",
        reduce_codec: str = "exact",
        error_feedback: bool = False,
        error_every: int = 0,
        error_budget: float = 0.0,
        low_rank: tuple[int, int, bool, bool, float, int] | None = None,
    ) -> None: ...
    name: str
    """Name shown in messages and traces."""
    @property
    def trained_groups(self) -> int:
        """Number of flat groups that have gradients; they precede the frozen groups."""
    @property
    def has_root(self) -> bool:
        """Whether the outermost module has run."""
    prefetch: int
    """Number of units that its root prefetches or, before a root exists, the value that was set."""
    @property
    def state(self) -> str:
        """"sharded", "gathering" or "unsharded"."""
    @property
    def params(self) -> list[tuple[str, dtype, tuple[int, ...]]]:
        """(name, original dtype, shape) of each parameter."""
    @property
    def param_dtype(self) -> dtype | None:
        """The dtype of unsharded parameters, or None for the original dtype."""
    @property
    def reduce_dtype(self) -> dtype | None:
        """The dtype of gradients, or None to use that of unsharded parameters."""
    @property
    def gather_codec(self) -> str:
        """The form in which gathers send parameters to other hosts, or "exact"."""
    reduce_codec: str
    """The form in which reductions send sums to other hosts, or "exact"."""
    low_rank: tuple[int, int, bool, bool, float, int] | None
    """How replicas sum matrices, or None if exactly: rank, start_step, warm_start, error_feedback,
    min_rate, seed."""
    @property
    def error_feedback(self) -> bool:
        """Whether reductions add what earlier ones left out."""
    @property
    def codec_errors(
        self,
    ) -> tuple[tuple[float, int, bool] | None, tuple[float, int, bool] | None]:
        """Of gathers and of reductions, or None if never measured: the relative error of all
        ranks, the number of backwards before it was measured, and whether numbers are sent exactly,
        as it exceeds the budget."""
    @property
    def residuals(self) -> list[Tensor | None]:
        """What reductions left out, by flat group and stage; None: nothing is kept."""
    @property
    def low_rank_state(self) -> Tensor | None:
        """What sums in low rank left out, then the last factors Q; None: nothing is kept."""
    @property
    def low_rank_sums(self) -> Tensor:
        """The number of sums over replicas that have begun, of which start_step are exact."""
    @property
    def gather_bytes(self) -> int:
        """Number of bytes that a rank sends to one rank of each other host in a gather."""
    rank_dependent: bool
    """Whether the unit may run on only some ranks."""
    @property
    def offload(self) -> Offload | None:
        """Which arrays are in a file or, for ("host", ...), in host memory instead of GPU
        memory."""
    @property
    def keep_grads(self) -> bool:
        """Whether the unit has its own reduce buffer."""
    reshard_after_forward: bool
    """Whether forward frees unsharded parameters."""
    reshard_after_backward: bool
    """Whether backward frees unsharded parameters."""
    requires_sync: bool
    """Whether backward reduces gradients."""
    requires_all_reduce: bool
    """Whether backward sums gradients over replicas."""
    divide_factor: float
    """The divisor for sums."""
    @property
    def mesh_shape(self) -> tuple[int, int]:
        """(number of replicas, ranks per shard group)."""
    @property
    def apart(self) -> bool:
        """Whether its replicas train apart, and meet only in outer steps."""
    @property
    def comms(self) -> list[Comm]:
        """[shard group], or [shard group, replicas]."""
    def call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any:
        """Run a module's forward as this unit."""
    def local(self, i: int, /) -> Tensor:
        """Return this rank's rows of parameter i in the original dtype."""
    def grad(self, i: int, /) -> Tensor | None:
        """Return the gradient of this rank's rows, or None if there is none."""
    def write(self, i: int, full: Tensor, /) -> None:
        """Copy this rank's rows from a full value."""
    def init(self, i: int, kind: str, a: Number, b: Number, seed: int, stream: int, /) -> None:
        """Initialise this rank's rows, as ``init_`` does."""
    def collect(self, i: int, what: bool | Tensor, out: Tensor | None = None, /) -> Tensor:
        """Return the full value (if ``what`` is False), the full gradient (True), or the full
        tensor whose rows the ranks pass. The result is written to `out` if given; collective.
        """

    def zero_grad(self) -> None:
        """Clear the gradients."""
    def refuse_stepped(self) -> None:
        """Raise NotImplementedError if an optimizer steps the unit inside backward."""
    def bind(self, i: int, full: Tensor | None, /) -> None:
        """Make parameter i use a separate full tensor or, if None, the unit's tensor again."""
    def unshard(self) -> None:
        """Start gathering parameters and keep them unsharded; collective. ``unshard_wait``
        completes it."""
    def unshard_wait(self) -> None:
        """Wait for ``unshard`` to complete."""
    def reshard(self) -> None:
        """Free the parameters that ``unshard`` gathered."""
    def reset(self) -> None:
        """Return all of the root's units to their sharded state."""
    def hold(self, begin: bool, /) -> None:
        """Freeze or unfreeze the root's weights."""
    def set_is_last_backward(self, flag: bool, /) -> bool:
        """Set whether the root's backward waits for reductions at its end; return the old value."""
    def set_ahead(self, backward: bool, units: list[Unit], /) -> None:
        """Set which units to prefetch when this unit runs."""
    def schedule(
        self,
    ) -> tuple[list[tuple[int, bool]] | None, list[tuple[int, str, bool]] | None, int]:
        """Return the recorded uses as (unit, backward), the last step's actions as (unit, kind,
        backward), and the prefetch distance. The uses and actions may be None.
        """

    def take_options(self, other: Unit, /) -> None:
        """Copy the settings of the unit that this one replaces."""
    def train_apart(self) -> None:
        """Let its replicas meet only in outer steps; call it before the first forward."""

def optimizers() -> dict[str, tuple[str, int]]:
    """Return the table of optimizers: the options of each, and its number of states by default."""

def code_row(shape: Sequence[int], /) -> int:
    """Return the row inside which a parameter's blocks are counted; 0: its states are not coded."""

def encode_blocks(code: str, values: Tensor, row: int, /) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8) and the blocks' maxima of float32 numbers in rows."""

def decode_blocks(code: str, codes: Tensor, maxima: Tensor, row: int, /) -> Tensor:
    """Return the numbers of codes."""

def codec_bytes(form: str, numel: int, /) -> int:
    """Return how many bytes the sums of so many gradients take between hosts."""

class Optimizer:
    """Updates flat shards by a row of the table of optimizers."""

    def __init__(
        self,
        kind: str,
        state_dtype: DTypeLike = None,
        seed: int = 0,
        min_coded_numel: int = 0,
    ) -> None: ...
    def add(self, unit: Unit, i: int, group: int, /) -> None:
        """Add a unit's parameter."""
    def take_number(self) -> int:
        """Return an index for a parameter that belongs to no unit."""
    def check(self, **options: Any) -> None:
        """Raise if an option is out of range, or if two contradict each other."""
    def set_hyper(self, group: int, /, **options: Any) -> None:
        """Set a group's options after checking them; options that are omitted become 0."""
    def step(self) -> None:
        """Make one update; collective."""
    def outer_begin(self, codec: str, /) -> None:
        """Make replicas train apart, with outer steps by this optimizer of kind "Outer"."""
    def outer_step(self, group: int, /) -> None:
        """Step the anchors of one group, and set the parameters to them; collective."""
    def step_in_backward(self, refresh: Callable[[], None] | None, /) -> None:
        """Step units inside backward, and call ``refresh`` before each; None: after backward."""
    def step_alone(
        self,
        group: int,
        number: int,
        step: int,
        copy_gradient: bool,
        p: Tensor,
        grad: Tensor,
        states: tuple[Tensor, ...],
        maxima: tuple[Tensor, ...],
        code_row: int,
        /,
    ) -> None:
        """Update a parameter that belongs to no unit; a code_row of 0 means no codes."""
    def state_names(self, group: int, /) -> tuple[str, ...]:
        """Return the names of the states that a group's options require."""
    def state_codes(self, group: int, /) -> tuple[str, ...]:
        """Return the names of the block codes that coded states have."""
    def state(self, unit: Unit, i: int, which: int, write: bool = False, /) -> Tensor | None:
        """Return this rank's rows of a state, or None if no step has used it yet. uint8 rows are
        block codes.
        """
    def maxima(self, unit: Unit, i: int, which: int, write: bool = False, /) -> Tensor | None:
        """Return the maxima of this rank's blocks of a coded state, else None."""
    def factors(self, unit: Unit, i: int, whole: bool = False, /) -> tuple[Tensor, Tensor]:
        """Return Adafactor's means by row and by column: this rank's, or copies of all, which is
        collective.
        """
    def make_states(self, unit: Unit, i: int, /) -> None:
        """Create the missing states."""
    def write(self, unit: Unit, i: int, which: int, full: Tensor, /) -> None:
        """Copy or encode this rank's rows of a full state."""
    def collect(self, unit: Unit, i: int, which: int, /) -> Tensor:
        """Return a full state, decoded; collective."""
    def step_count(self, unit: Unit, i: int, /) -> int:
        """Return a parameter's step count."""
    def set_step_count(self, unit: Unit, i: int, steps: int, /) -> None:
        """Set a parameter's step count; 0 clears its states."""

class StepGraph:
    """A captured training step of these units' model; the constructor begins the capture."""

    def __init__(self, units: list[Unit], optimizer: Optimizer) -> None: ...
    def end(self) -> None:
        """End the capture and run the step once."""
    def abandon(self, why: str, /) -> None:
        """End the capture and discard the captured calls."""
    def replay(self) -> None:
        """Run the step once more."""

def is_capturing() -> bool:
    """Return whether a step is being captured."""

def dry_run(
    params: list[Any], dtypes: list[dtype], lent: list[dtype | None], fn: Callable[[], Any], /
) -> tuple[int, int, int]:
    """Return the peak bytes that ``fn()`` would use, the bytes that it left behind, and the
    floating point operations of its products, without computing anything.
    """

def in_dry_run() -> bool:
    """Return whether ``dry_run`` is running its function."""

def play(fn: Callable[[], Any], orders: bool, /) -> tuple[Any, int]:
    """Call ``fn()`` on a device that computes nothing; return its result and the bytes that it left
    allocated.

    Groups without an address may have any size and, with ``orders``, order streams as GPUs do. The
    trace records floating-point operation counts instead of nanoseconds.
    """

weight_schemes: tuple[str, ...]
pooled_buffers: int

def plan_root(
    units: list[Any],
    mesh: tuple[int, int],
    groups: tuple[tuple[int, int], tuple[int, int]],
    remote: bool,
    single: bool,
    prefetch: int,
    n_states: int,
    state_format: tuple[dtype, int],
    micro_steps: int,
    outer_codec: str | None = None,
    /,
) -> list[tuple[str, str, int, int, str]]:
    """Return (name, class, bytes, count, where) for all of a rank's memory, without allocating it.

    Each unit is (parameters, param_dtype, reduce_dtype, offload, whether it encloses other units,
    keep_grads, rank_dependent, reshard_after_forward); each parameter is (dtype, shape, frozen).
    ``groups`` is (hosts, ranks per host) of the shard group and of the replicas. ``where`` is
    "memory", "pinned", "file" or "message" (bytes sent to a rank of each other host).
    ``outer_codec``: the replicas of ``groups`` train apart, on a mesh that has none.
    """

def plan_unsharded(
    units: list[tuple[int, int, bool]], ranks: int, prefetch: int, remote: bool, /
) -> int:
    """Return how many bytes the units' unsharded parameters need on a rank's GPU or a CPU host.

    Each unit is (bytes, bytes of the rank's own slices, whether its memory is never shared).
    """

class TorchUnit:
    """Runs a unit on another framework's tensors, including its schedule and gradients."""

    def __init__(
        self,
        unit: Unit,
        slots: list[tuple[dict[str, Any], str, int]],
        params: list[Any],
        adopt: Callable[[int], None],
        renew: Callable[[], None],
        streams: Callable[[], int] | None,
        gives_back: bool,
        local: str | None = None,
    ) -> None: ...
    def place(self, grads: list[Any], lent: list[Any] | None, /) -> None:
        """Use these gradients, which are rows of ``lent`` or, if that is None, of the unit's own
        memory."""
    @property
    def in_backward(self) -> bool:
        """Whether the root's backward is running."""
    @property
    def depth(self) -> int:
        """Nesting depth of the root's running forwards."""
    @property
    def has_factor(self) -> bool:
        """Whether a deferred clipping factor has yet to be applied."""
    @property
    def lends_unsharded(self) -> bool:
        """Whether unsharded parameters are in memory passed to :meth:`bind`."""
    generation: int
    """Generation of the weights; set it to that of the forward being recomputed."""
    def bind(
        self,
        unsharded: list[Any],
        bases: tuple[Any, ...],
        lent: list[Any] | None,
        set_version: Callable[[tuple[Any, ...], tuple[int, ...]], None],
        at_end: Callable[[], None],
        mates: list[TorchUnit],
        stored: list[Callable[[Any], Any] | None],
        /,
    ) -> None:
        """Set the unsharded tensors, the callbacks, and the TorchUnits that have the same root.

        ``stored`` has, for each parameter, a function that returns the part of a gradient that the
        unit stores, or None if that is all of it.
        """
    def enter(self, grad: bool, in_task: bool, /) -> bool:
        """Begin a module's forward."""
    def leave(self) -> None:
        """End a module's forward."""
    def mark(self) -> Callable[[Any], None]:
        """Return a callable for autograd nodes that begins the unit's backward."""
    def end_backward(self) -> None:
        """End the unit's backward."""
    def guard(self, modules: list[tuple[dict[str, Any], Callable[..., Any]]], /) -> None:
        """Make modules that read the unit's parameters reject calls from outside the unit."""
    def lift(self, begin: bool, /) -> None:
        """Allow or forbid calls to guarded modules."""
    def finish(self) -> None:
        """End the root's backward after waiting for reductions."""
    def catch_up(self) -> None:
        """Update the engine from ``.grad``, unless this backward has already done so."""
    def follow(self, i: int = ..., /) -> None:
        """Copy in the tensors that the user assigned to ``.data``, for one parameter or all."""
    def follow_root(self) -> None:
        """Detect changes to the parameters of all units; called before an epoch."""
    def settle(self) -> bool:
        """Set ``.grad`` to the reduced gradients; return whether hooks are waiting for them."""
    def take_grads(self, i: int = ..., /) -> None:
        """Update the engine's gradients from ``.grad``, for one parameter or all."""
    def add_product(self, i: int, dy: int, x: int, rows: int, n_out: int, n_in: int, /) -> bool:
        """Add dy' x, from dense memory at these addresses, to parameter i's gradient; return False
        if the unit's reduce dtype does not allow it.
        """

    def lend(self, i: int, leaf: Tensor, /) -> None:
        """Make the gradient of a leaf with parameter i's values go to parameter i, whose reduce
        buffer may lend memory for it.
        """

    def accept(self, leaf: Tensor, direct: bool, /) -> None:
        """Prepare for that gradient in backward, or leave it in ``leaf.grad`` if not direct."""

    def apply_scale(self) -> None:
        """Apply the deferred clipping factor."""
    def reset(self) -> None:
        """Return all of the root's units to their sharded state after an exception."""
    def hide(self, gave_up: bool, /) -> None:
        """Put the sharded parameters back into the modules, and discard an incomplete backward."""
    def pin(self) -> None:
        """Record that ``Unit.unshard`` was called."""
    def hold(self, begin: bool, /) -> None:
        """Start or stop keeping the unsharded parameters visible."""

def unit_places(unit: Unit, /) -> list[tuple[int, int, int, int, int, int]]:
    """Return (group, full_offset, first, numel, shard_offset, master_offset) per parameter."""

def unit_memory(unit: Unit, kind: str, /) -> list[Tensor]:
    """Return the "master", "grad" or "unsharded" memory of each flat group that has it."""

def grad_memory(unit: Unit, /) -> list[Tensor]:
    """Return new zeroed memory for the gradient shards of each group that has any."""

def rebuild(value: Any, kind: type, change: Callable[[Any], Any], /) -> Any:
    """Return a structure with tensors of this type replaced, or the same object if none changes.

    ``change`` maps a tensor to its replacement; None keeps it.
    """

def product(
    out: int,
    a: int,
    b: int,
    bias: int,
    m: int,
    n: int,
    k: int,
    trans_a: bool,
    trans_b: bool,
    dtype: dtype | str,
    /,
) -> None:
    """Write A' B' + bias, (m, n), from dense memory at these addresses; bias 0 means no bias."""

def make_root(units: list[Unit], encloses: list[bool], /) -> None:
    """Join units, outermost first; collective."""

def grad_norm(units: list[Unit], tensors: list[Tensor], p: float = 2.0, /) -> float:
    """Return the global p-norm, summed exactly; collective."""

def grad_norms(
    units: list[Unit], tensors: list[Tensor], p: float = 2.0, /
) -> tuple[list[list[float | None]], list[float]]:
    """Return the norm of every parameter of the units, and of every tensor; collective."""

def norms_of_rows(
    units: list[Unit], indices: list[int], tensors: list[Tensor], p: float, /
) -> list[float]:
    """Return the norms of full parameters, given this rank's rows; collective in their shard group.
    """

def clip_grads(
    units: list[Unit], tensors: list[Tensor], p: float, max_norm: float, /
) -> Tensor:
    """Return the norm as a tensor, and defer multiplying by its clipping factor; collective."""

def scale_grads(
    units: list[Unit], tensors: list[Tensor], norm: float, max_norm: float, /
) -> None:
    """Defer the clipping factor."""

def multiply_grads(units: list[Unit], tensors: list[Tensor], factor: float, /) -> bool:
    """Defer multiplying by a factor; return whether the tensors contain NaN or infinity."""

def clamp_(tensors: list[Tensor], limit: float, /) -> None:
    """Clamp tensors to [-limit, limit], in place."""

def crc32c(crc: int, buffer: Any, /) -> int:
    """Extend a CRC-32C checksum with a buffer; the initial value is 0."""

def trace_events() -> list[tuple[str, int, int, int, int, bool]]:
    """Return the events, oldest first, as (kind, unit, epoch, bytes, ns, in_backward)."""

def trace_reset() -> None:
    """Empty the trace."""

def trace_resize(events: int, waits: bool, /) -> int:
    """Resize the trace to this many events, keeping the newest; return the previous size."""

# ---- checkpoints ----

Hook = Callable[[str, str], Any]

class Save:
    """A save in progress."""

    def __init__(
        self,
        comm: Comm,
        paths: tuple[str, str, str, str],
        model: list[tuple[str, str, Shape]],
        optimizer: list[tuple[str, str, Shape]],
        pieces: list[tuple[int, int, Tensor]],
        members: dict[str, str],
        files: dict[str, str],
        max_file_bytes: float,
        hook: Hook | None = None,
        overwrite: bool = False,
    ) -> None: ...
    def run(self) -> None:
        """Save now; collective."""
    def start(self) -> None:
        """Copy the pieces, then save the copies in a background thread; collective."""
    def wait(self) -> None:
        """Wait for the thread and raise its error, if any."""
    @property
    def done(self) -> bool:
        """Whether the thread has finished."""

def safetensors_layout(
    tensors: list[tuple[str, str, Shape]], /
) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a file header for these tensors, and each tensor's (begin, end)."""

def safetensors_header(path: Any, /) -> list[tuple[str, str, Shape, int, int]]:
    """Return (name, dtype, shape, begin, end) for each tensor in a file."""

def read_shards(
    paths: list[bytes],
    tensors: list[tuple[int, str, int, int]],
    pieces: list[tuple[int, int, Tensor]],
    check: bool,
    hook: Hook | None = None,
    /,
) -> list[int]:
    """Read parts of files into tensors; return this rank's checksums."""

def sum_runs(paths: list[bytes], runs: list[tuple[int, int, int]], /) -> list[int]:
    """Return the checksum of each range of bytes (file, offset, bytes)."""

def master_shard(unit: Unit, i: int, write: bool, /) -> tuple[Tensor, int, int, int]:
    """Return (flat tensor, first element, replica, number of replicas) for a parameter's master."""

def crc32c_combine(crc_a: int, crc_b: int, bytes_b: int, /) -> int:
    """Return the CRC-32C of the concatenation of A and B."""

def rng_state() -> tuple[int, int]:
    """Return the seed for dropout and initialisation, and the index of the next stream."""

def set_rng_state(seed: int, next_stream: int, /) -> None:
    """Restore a result of :func:`rng_state`."""
