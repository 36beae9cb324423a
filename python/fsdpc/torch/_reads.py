"""Raise on operations whose result would cover only this rank's rows.

Each rank has some rows of a parameter and of its gradient. Elementwise arithmetic on them is
correct. A sum over rows or a matrix product would be silently wrong, because it covers only this
rank's rows. Tensors of rows therefore call :func:`check` before each operation. Operations within
rows are correct too: ``p.norm(dim=1)`` is allowed, ``p.norm(dim=0)`` is not.

While a unit's module runs, the rows of other units cannot serve as its weights, and a write to them
is too late for this forward. Any use of their values therefore raises an error in the thread that
runs the module.

Results of arithmetic on rows, including masks, are checked like rows. With gradients enabled, sums
and means over all elements cover the whole tensor (``whole_sum``), so penalties are correct. Other
results are not checked.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdpc.torch import _dcp
from fsdpc.torch._dcp import Part

_SPACES = (torch, Tensor, torch.linalg, F, torch.special, torch._C._nn)


def _named(words: str) -> Iterator[tuple[str, Any]]:
    for word in words.split():
        for name in (word, f"__{word}__", f"__r{word}__", f"__i{word}__", f"{word}_"):
            for space in _SPACES:
                func = getattr(space, name, None)
                if callable(func):
                    yield word, func


#: Operations that return rows: copies, also in another dtype or memory.
KEEPING = frozenset(
    func for _, func in _named("bfloat16 clone cpu cuda detach double float half to type_as")
) | {Tensor.data.__get__}
#: Elementwise arithmetic and comparisons, not in place; they return rows, or masks of rows.
ELEMENTWISE = frozenset(
    getattr(space, name)
    for space in (torch, Tensor)
    for word in (
        "abs", "add", "clamp", "clip", "div", "divide", "exp", "lerp", "log", "mul", "multiply",
        "nan_to_num", "neg", "pow", "radd", "rmul", "rsqrt", "rsub", "sign", "sqrt", "square",
        "sub", "subtract", "tanh", "true_divide", "truediv", "where",
        "and", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "eq", "ge", "greater",
        "greater_equal", "gt", "invert", "isfinite", "isinf", "isnan", "isneginf",
        "isposinf", "le", "less", "less_equal", "logical_and", "logical_not", "logical_or",
        "logical_xor", "lt", "ne", "not_equal", "or", "signbit", "xor",
    )
    for name in (word, f"__{word}__", f"_foreach_{word}")
    if hasattr(space, name)
)  # fmt: skip

#: Operations along dimensions: the position and default of the dimension argument.
_ALONG: dict[Any, tuple[str, int, Any]] = {
    func: (word, at, default)
    for words, at, default in (
        ("sum nansum mean nanmean prod std var std_mean var_mean count_nonzero logsumexp", 1, None),
        ("amax amin aminmax max min argmax argmin all any median nanmedian", 1, None),
        ("norm vector_norm quantile nanquantile", 2, None),
        ("mode sort msort argsort cumsum cumprod cummax cummin logcumsumexp", 1, -1),
        ("softmax log_softmax softmin", 1, -1),
        ("topk kthvalue", 2, -1),
        ("normalize", 2, 1),
        ("triu tril", sys.maxsize, -2),
        ("diagonal", 2, 0),
        ("diff", 2, -1),
        ("flip", 1, None),
        ("roll", 2, None),
        ("diag flipud take", sys.maxsize, None),
    )
    for word, func in _named(words)
}
#: Operations that select some rows, in the same format; reading the result is allowed.
_TAKES: dict[Any, tuple[str, int, Any]] = {
    func: (word, at, default)
    for words, at, default in (
        ("index_select gather narrow narrow_copy select unfold", 1, None),
        ("index_add index_copy index_fill scatter scatter_add scatter_reduce", 1, None),
        ("chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split", 2, 0),
        ("select_scatter slice_scatter", 2, 0),
        ("unbind", 1, 0),
        ("take_along_dim", 2, None),
        ("hsplit", sys.maxsize, 1),
        ("vsplit", sys.maxsize, 0),
    )
    for word, func in _named(words)
} | {Tensor.__getitem__: ("indexing", 1, None)}
#: Operations that combine several rows with any arguments.
_ACROSS: dict[Any, str] = {
    func: word
    for word, func in _named("""
        matmul mm bmm mv dot vdot inner outer ger addmm addmv addbmm baddbmm addr einsum tensordot
        linear bilinear chain_matmul multi_dot kron cdist pdist dist cross cosine_similarity
        embedding embedding_bag conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d scaled_dot_product_attention
        svd svdvals qr eig eigh eigvals eigvalsh inv pinv inverse pinverse det slogdet logdet
        cholesky matrix_norm matrix_rank matrix_power matrix_exp svd_lowrank pca_lowrank
        cov corrcoef trace histc bincount unique unique_consecutive
        t adjoint
    """)
}
_ACROSS |= {getattr(Tensor, name).__get__: name for name in ("T", "mT", "H", "mH")}
#: The operations among them that leave a vector unchanged.
_FLIPS = frozenset(
    f for f, name in _ACROSS.items() if name in ("T", "mT", "H", "mH", "t", "adjoint")
)
#: Losses that sum over elements by default.
_LOSSES = frozenset((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss))
_TRANSPOSES = frozenset(
    func for _, func in _named("transpose swapaxes swapdims movedim moveaxis permute")
)
#: Conversions of one element to a number.
AS_NUMBER = frozenset(
    getattr(Tensor, name)
    for name in ("item", "__bool__", "__complex__", "__float__", "__index__", "__int__")
)

#: With gradients recorded, these give the whole tensor's result over all elements.
SUMS = frozenset((torch.sum, Tensor.sum, torch.mean, Tensor.mean))
#: Operations that :func:`check` may refuse even outside forwards.
WATCHED = frozenset((*_ALONG, *_ACROSS, *_LOSSES, *_TRANSPOSES, *AS_NUMBER, torch._foreach_norm))
#: Operations that are checked if gradients are recorded.
TAKING = frozenset(_TAKES)

#: Operations allowed on rows anywhere: they read no values, or return tensors checked in turn.
_FREE = frozenset(
    func
    for _, func in _named("""
        size dim ndimension numel nelement stride storage_offset is_contiguous element_size type
        is_floating_point is_complex is_signed is_conj is_neg is_inference is_shared is_same_size
        get_device requires_grad_ retain_grad detach len repr hash deepcopy reduce_ex as_subclass
        new_empty new_zeros new_ones new_full new_tensor empty_like zeros_like ones_like full_like
        register_post_accumulate_grad_hook untyped_storage can_cast promote_types result_type
    """)
)
#: Attributes that expose or write memory. A forward would not see a write that comes after its
#: gather.
_VALUES = frozenset(
    (*(getattr(Tensor, n).__get__ for n in "T mT H mH real imag".split()), Tensor.data.__set__)
)


#: Operations that convert the first operand and read only the second one's dtype and device.
_LIKE = frozenset((Tensor.to, Tensor.type_as))


class _Running(threading.local):
    """The sharded modules that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[Any] = []


RUNNING = _Running()


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an operation on rows would be wrong.

    Raises
    ------
    RuntimeError
        A unit's module is running, and these are rows of another unit's parameter.
    NotImplementedError
        The result would cover only this rank's rows.
    """
    if RUNNING.modules:
        _check_forward(func, args, kwargs)
    if func in WATCHED and func not in AS_NUMBER:
        for rows, info in _rows_in(args, kwargs):
            if info.is_cut and _reads_across(func, rows, args, kwargs):
                _refuse(func, rows, info)


def _rows_in(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            info = each._fsdpc_info() if isinstance(each, Part) else None
            if info is not None:
                yield each, info


def _reads_across(func: Any, rows: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _ALONG:
        return _is_over_rows(_ALONG[func], rows, args, kwargs)
    if func in _TRANSPOSES:
        dims = [d for a in (*args[1:], *kwargs.values()) for d in _as_dims(a)]
        if func in (torch.permute, Tensor.permute):
            return not dims or dims[0] % rows.ndim != 0
        return any(d % rows.ndim == 0 for d in dims)
    if func in _LOSSES:
        return kwargs.get("reduction", "mean") != "none"
    return func not in _FLIPS or rows.ndim > 1


def _as_dims(value: Any) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return [d for d in value if isinstance(d, int)] if isinstance(value, (list, tuple)) else []


def _is_over_rows(
    along: tuple[str, int, Any], rows: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    _, at, default = along
    given = args[at] if len(args) > at else default
    dim = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), given)
    if isinstance(dim, Tensor) or "other" in kwargs:  # max(a, b): elementwise
        return False
    dims = _as_dims(dim)
    return not dims or rows.ndim < 2 or any(d % rows.ndim == 0 for d in dims)


def _is_some_rows(index: Any, rows: Any) -> bool:
    """Return whether an index selects rows by position; a mask does not."""
    index = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not None]
    if not index or (index[0] is Ellipsis and len(index) <= rows.ndim):
        return False
    first = index[1] if index[0] is Ellipsis else index[0]
    if isinstance(first, slice):
        return first.start not in (None, 0) or first.stop is not None or first.step not in (None, 1)
    return not (isinstance(first, Tensor) and first.dtype is torch.bool)


def refuse_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Make backward raise through a selection of rows, which differs between ranks."""
    rows, info = next(_rows_in(args, kwargs), (None, None))
    if info is None or not (info.is_cut and rows.requires_grad):
        return
    if func is Tensor.__getitem__:
        if not _is_some_rows(args[1], rows):
            return
    elif not _is_over_rows(_TAKES[func], rows, args, kwargs):
        return
    text = (
        f"backward through {_name(func)} of {rows._fsdpc_what}: this rank has {info} only, and "
        f"took other rows than the other ranks. For a gradient, {_GATHER}"
    )

    def refuse(grad: Any) -> NoReturn:
        raise NotImplementedError(text)

    for each in result if isinstance(result, (list, tuple)) else (result,):
        each.register_hook(refuse)


def _name(func: Any) -> str:
    named = _ALONG.get(func) or _TAKES.get(func)
    if named:
        return named[0]
    return _ACROSS.get(func) or getattr(func, "__name__", str(func)).strip("_")


#: How to read a parameter with gradients outside its unit's forward.
_GATHER = (
    "call a method that register_fsdp_forward_method(module, name) registered, or read the "
    "parameter between unshard() and reshard() of its module"
)


def _refuse(func: Any, rows: Any, info: Any) -> NoReturn:
    optimizer = _stepping()
    where = f", in {optimizer}.step()" if optimizer else ""
    if optimizer:
        cure = (
            "Name the parameter in fully_shard(whole_params=...), which one rank then steps, or "
            "use an optimizer that steps each element by itself (AdamW, SGD, Lion)"
        )
    else:
        cure = f"Take it of full_tensor(), which gathers the rows of all ranks{rows._fsdpc_cure}"
        if torch.is_grad_enabled() and rows.requires_grad:
            cure += (
                ". For a gradient, make it of p.sum(), p.pow(2).sum() and the like, which are of "
                f"the whole; or {_GATHER}"
            )
    raise NotImplementedError(
        f"{_name(func)} of {rows._fsdpc_what}{where}: this rank has {info} only, and would get "
        f"another result than the other ranks. {cure}"
    )


def check_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if recorded arithmetic mixes rows with other rows, or with values from a batch.

    Such arithmetic would fail on ranks with a different number of rows, or produce gradients that
    are never reduced. Values computed from the same rows have the same shape, and are allowed.
    """
    if func in _LIKE:
        return
    for rows, info in _rows_in(args, kwargs):
        if not (info.is_spread and rows.requires_grad):
            continue
        for other in (*args, *kwargs.values()):
            if not isinstance(other, Tensor) or other is rows or not other.requires_grad:
                continue
            theirs = other._fsdpc_info() if isinstance(other, Part) else None
            if theirs is not None:
                is_other = (theirs.shape, theirs.rows) != (info.shape, info.rows)
                what = f"{other._fsdpc_what} of which it has {theirs}"
            else:
                is_other = info.is_cut and other.shape != rows.shape
                what = f"a tensor {tuple(other.shape)} that needs a gradient"
            if is_other:
                raise NotImplementedError(
                    f"{_name(func)} of {rows._fsdpc_what} and {what}: this rank has {info} only. "
                    f"In a method of the module, or in a loss function, {_GATHER}"
                )


def _stepping() -> str:
    """Return the class name of the optimizer that is stepping in this thread, or "" if none is."""
    frame = sys._getframe(2)
    while frame is not None:
        own = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(own, torch.optim.Optimizer):
            return type(own).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# ---- inside a forward ----


def _check_forward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    if func in _FREE or (name in ("__get__", "__set__") and func not in _VALUES):
        return
    if func in _LIKE:
        args, kwargs = args[:1], {}
    for rows, info in _rows_in(args, kwargs):
        _refuse_forward(_name(func), rows, info)


def _refuse_forward(name: str, rows: Any, info: Any) -> NoReturn:
    unit = info.unit.name
    raise RuntimeError(
        f"{name} of {rows._fsdpc_what} in the forward of {type(RUNNING.modules[-1]).__name__}: "
        f"unit '{unit}' does not run there, and this rank has {info} only. Do not shard '{unit}' "
        "by itself, so that the unit around it holds the parameter. Or read the parameter in a "
        "method of its own module, and call register_fsdp_forward_method(module, name). A hook "
        "that logs values calls full_tensor() first"
    )


_dcp.check_read = check
