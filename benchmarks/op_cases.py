"""Operations of docs/operations.md beside the torch calls that do the same.

A case has the inputs of one call, ours and torch's. Its name begins with the operation's name on
that page; what stands behind, in brackets, is a form of it, or what torch has in its place. Outputs
have n x n elements where they are as large as the input; shapes follow from n.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fsdpc
from fsdpc import functional as F

FLOATS = ("fp32", "bf16")
FP32 = ("fp32",)


@dataclass(frozen=True)
class Input:
    """An array of a case: what makes it, and whether it takes the dtype and has a gradient."""

    make: Callable[[np.random.Generator], np.ndarray]
    cast: bool = True
    grad: bool = True


@dataclass(frozen=True)
class Case:
    """One call of both engines; `same` says whether equal inputs must give equal results."""

    name: str
    inputs: tuple[Input, ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    dtypes: tuple[str, ...] = FLOATS
    backward: bool = True
    same: bool = True

    @property
    def operation(self) -> str:
        """The name on the page."""
        return self.name.split(" (")[0]

    @property
    def has_backward(self) -> bool:
        """Whether a gradient is measured too."""
        return self.backward and any(each.grad for each in self.inputs)


def noise(*shape: int) -> Input:
    """Normal numbers."""
    return Input(lambda rng: rng.standard_normal(shape, dtype=np.float32))


def doubles(*shape: int) -> Input:
    """Numbers between 0.5 and 1.5 that stay float64."""
    return Input(lambda rng: rng.random(shape) + 0.5, cast=False)


def positive(*shape: int) -> Input:
    """Numbers between 0.5 and 1.5."""
    return Input(lambda rng: rng.random(shape, dtype=np.float32) + np.float32(0.5))


def probabilities(*shape: int) -> Input:
    """Numbers between 0 and 1, without a gradient."""
    return Input(lambda rng: rng.random(shape, dtype=np.float32), grad=False)


def fixed(given: Input) -> Input:
    """The input without a gradient."""
    return replace(given, grad=False)


def ids(high: int, *shape: int) -> Input:
    """Whole numbers below a bound."""
    return Input(lambda rng: rng.integers(0, high, shape), cast=False, grad=False)


def flags(*shape: int) -> Input:
    """As many true as false."""
    return Input(lambda rng: rng.random(shape) < 0.5, cast=False, grad=False)


def given(array: np.ndarray) -> Input:
    """This array as it is, without a gradient."""
    return Input(lambda rng: array, cast=False, grad=False)


def case(name: str, *inputs: Input, **changes: Any) -> Case:
    """A case of functions that both engines have by the same name, where none are given."""
    own = name.split(" (")[0]
    ours = changes.pop("ours", None) or getattr(F, own, None) or getattr(fsdpc, own)
    theirs = changes.pop("theirs", None) or getattr(torch, own, None) or getattr(TF, own)
    return Case(name, inputs, ours, theirs, **changes)


def both(name: str, call: Callable[..., Any], *inputs: Input, **changes: Any) -> Case:
    """A case whose one call takes tensors of either engine."""
    return Case(name, inputs, call, call, **changes)


def first(call: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """The call with options behind the tensor; of several results the first."""

    def run(x: Any) -> Any:
        found = call(x, *options)
        return found[0] if isinstance(found, tuple) else found

    return run


def both_first(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], x: Input, *options: Any
) -> Case:
    """A case of two functions with equal options, of which the first result counts."""
    return Case(name, (x,), first(ours, *options), first(theirs, *options), FP32)


def arithmetic(n: int) -> list[Case]:
    """Two tensors, element by element."""
    two = (noise(n, n), noise(n, n))
    return [
        *(case(name, *two) for name in ("add", "sub", "mul", "maximum", "minimum")),
        case("add (a row)", noise(n, n), noise(n)),
        case("mul (a row)", noise(n, n), noise(n)),
        case("div", noise(n, n), positive(n, n)),
        *(case(f"{name} (float64)", doubles(n, n), doubles(n, n), dtypes=FP32)
          for name in ("sub", "div")),
        case("neg", noise(n, n)),
        both("pow (2.5)", lambda x: x**2.5, positive(n, n)),
        case("pow (a tensor)", positive(n, n), noise(n, n), ours=F.pow, theirs=torch.pow),
    ]  # fmt: skip


def of_one_element(n: int) -> list[Case]:
    """Functions of one tensor, element by element."""
    names = ["abs", "exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "relu"]
    return [
        *(case(name, noise(n, n)) for name in names),
        case("sign", noise(n, n), backward=False),  # zeros
        *(case(name, positive(n, n)) for name in ("log", "log1p", "sqrt", "rsqrt")),
        *(case(f"{name} (float64)", doubles(n, n), dtypes=FP32) for name in ("sqrt", "exp")),
        case("silu", noise(n, n)),
        case("gelu", noise(n, n)),
        case("gelu (tanh)", noise(n, n), ours=partial(F.gelu, approximate="tanh"),
             theirs=partial(TF.gelu, approximate="tanh")),
    ]  # fmt: skip


def masks(n: int) -> list[Case]:
    """Comparisons, choices and logic."""
    two, bools = (noise(n, n), noise(n, n)), (flags(n, n), flags(n, n))
    compared = [("==", operator.eq), ("!=", operator.ne), ("<", operator.lt), ("<=", operator.le),
                (">", operator.gt), (">=", operator.ge)]  # fmt: skip
    bitwise = [("&", operator.and_), ("|", operator.or_), ("^", operator.xor)]
    logic = ("logical_and", "logical_or", "logical_xor")
    return [
        *(both(name, call, *two, backward=False) for name, call in compared),
        case("array_equal", *two, theirs=torch.equal, backward=False),
        case("where", flags(n, n), *two),
        both("clamp", lambda x: x.clamp(-1.0, 1.0), noise(n, n)),
        both("masked_fill", lambda x, m: x.masked_fill(m, 0.0), noise(n, n), flags(n, n)),
        *(case(name, noise(n, n), backward=False) for name in ("isnan", "isinf", "isfinite")),
        *(case(name, *bools, dtypes=FP32) for name in logic),
        case("logical_not", flags(n, n), dtypes=FP32),
        *(both(name, call, *bools, dtypes=FP32) for name, call in bitwise),
        both("~", operator.invert, flags(n, n), dtypes=FP32),
    ]  # fmt: skip


def reductions(n: int) -> list[Case]:
    """Sums, statistics, extrema, order."""
    x = noise(n, n)
    host = {"dtypes": FP32}
    found = {"dtypes": FP32, "backward": False}
    return [
        case("sum", x),
        *(both(f"sum (dim {d})", lambda x, d=d: x.sum(d), x) for d in (0, 1)),
        both("sum (dim 0, float64)", lambda x: x.sum(0), doubles(n, n), dtypes=FP32),
        *(both(name, call, ids(100, n, n), dtypes=FP32) for name, call in (
            ("sum (int64)", lambda x: x.sum()), ("sum (dim 1, int64)", lambda x: x.sum(1)))),
        case("mean", x),
        *(case(name, flags(n, n), dtypes=FP32) for name in ("any", "all")),
        both("cumsum (dim 1)", lambda x: x.cumsum(1), x),
        *(case(name, x) for name in ("var", "std")),
        case("norm", x, theirs=torch.linalg.vector_norm),
        both("logsumexp (dim 1)", lambda x: x.logsumexp(1), x),
        *(both(f"softmax (dim {d})", lambda x, d=d: x.softmax(d), x) for d in (1, 0)),
        both("log_softmax (dim 1)", lambda x: x.log_softmax(1), x),
        *(case(name, x, **host) for name in ("max", "min")),
        *(both_first(f"{name} (dim 1)", getattr(F, name), getattr(torch, name), x, 1)
          for name in ("max", "min", "amax", "amin")),
        *(both(f"{name} (dim 1)", operator.methodcaller(name, 1), x, **found)
          for name in ("argmax", "argmin", "argsort")),
        both_first("sort (dim 1)", F.sort, torch.sort, x),
        both_first("topk (16, dim 1)", F.topk, torch.topk, x, min(16, n)),
    ]  # fmt: skip


def written(x: Any, index: Any, value: Any) -> Any:
    """Write into x in place."""
    x[index] = value
    return x


def by_index(n: int) -> list[Case]:
    """Elements and rows by index."""
    x, places, rows = noise(n, n), ids(n, n, n), ids(n, n)
    plain = {"dtypes": FP32, "backward": False}
    return [
        both("gather", lambda x, i: x.gather(1, i), x, places),
        both("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), x, places, noise(n, n)),
        both("index_select", lambda x, i: x.index_select(0, i), x, rows),
        case("embedding", ids(4 * n, 4 * n), noise(4 * n, n // 4), theirs=TF.embedding),
        case("masked_select", x, flags(n, n), dtypes=FP32),
        both("nonzero", lambda m: m.nonzero(), flags(n, n), **plain),
        both("x[array]", operator.getitem, x, rows, dtypes=FP32),
        both("x[mask]", operator.getitem, x, flags(n, n), dtypes=FP32),
        both("x[array] (written)", written, x, given(np.arange(n)[::-1].copy()), noise(n, n),
             **plain),
        both("x[mask] (written)", lambda x, m: written(x, m, 1.0), x, flags(n, n), **plain),
    ]  # fmt: skip


def shapes(n: int) -> list[Case]:
    """Tensors turned, joined, cut, repeated."""
    x, half, only = noise(n, n), noise(n, n // 2), {"dtypes": FP32}
    view, heads = "torch: a view", noise(1, n, 16, n // 16)
    return [
        both("reshape (both: a view)", lambda x: x.reshape(-1), x, **only),
        both(f"transpose ({view})", lambda x: x.transpose(0, 1), x, **only),
        both("transpose (torch: contiguous)", lambda x: x.transpose(0, 1).contiguous(), x, **only),
        both(f"permute ({view})", lambda x: x.permute(0, 2, 1, 3), heads, **only),
        both("permute (torch: contiguous)", lambda x: x.permute(0, 2, 1, 3).contiguous(), heads,
             **only),
        both(f"expand ({view})", lambda x: x.expand(n, n), noise(n, 1), **only),
        *(Case(name, (half, half), lambda x, y, c=ours: c([x, y], 1),
               lambda x, y: torch.cat([x, y], 1), **only)
          for name, ours in (("cat", F.cat), ("concat", F.concat))),
        Case("stack", (noise(n // 2, n), noise(n // 2, n)), lambda x, y: F.stack([x, y], 1),
             lambda x, y: torch.stack([x, y], 1), **only),
        both("split (torch: views)", lambda x: x.split(n // 4, 1), x, **only),
        both("chunk (torch: views)", lambda x: x.chunk(4, 1), x, **only),
        both("flip", lambda x: x.flip((1,)), x, **only),
        both("roll", lambda x: x.roll(3, 1), x, **only),
        both("repeat", lambda x: x.repeat(2, 2), noise(n // 2, n // 2), **only),
        both("repeat_interleave", lambda x: x.repeat_interleave(2, 1), half, **only),
        case("pad", x, ours=lambda x: F.pad(x, (1, 1, 1, 1)),
             theirs=lambda x: TF.pad(x, (1, 1, 1, 1)), **only),
        case("pad (reflect)", noise(1, n, n), ours=lambda x: F.pad(x, (1, 1), "reflect"),
             theirs=lambda x: TF.pad(x, (1, 1), "reflect"), **only),
        *(both(name, operator.methodcaller(name), x, **only) for name in ("tril", "triu")),
        case("one_hot", ids(n // 8, 8 * n), ours=lambda i: F.one_hot(i, n // 8),
             theirs=lambda i: TF.one_hot(i, n // 8), **only),
        case("cast (fp32 to bf16)", x, ours=lambda x: x.to("bfloat16"),
             theirs=lambda x: x.to(torch.bfloat16), **only),
    ]  # fmt: skip


def documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int) -> torch.Tensor:
    """Attention of torch, a call for each document of so many tokens."""
    parts = zip(*(x.split(tokens, 2) for x in (q, k, v)), strict=True)
    return torch.cat([TF.scaled_dot_product_attention(*p, is_causal=True) for p in parts], 2)


def products(n: int) -> list[Case]:
    """Matrix products and attention."""
    x, w, row = noise(n, n), noise(n, n), noise(n)
    heads = tuple(noise(1, 16, n, n // 16) for _ in range(3))
    few = tuple(noise(1, 4, n // 2, n // 16) for _ in range(3))
    attention, scale = TF.scaled_dot_product_attention, (n // 16) ** -0.5
    batch, equation = noise(16, n // 4, n // 4), "bij,bjk->bik"
    # a query that sees no key has no weights in torch: column 0 is seen by all
    mask = Input(lambda rng: (rng.random((n // 2, n // 2)) < 0.5) | (np.arange(n // 2) == 0),
                 cast=False, grad=False)  # fmt: skip
    return [
        case("matmul", x, w),
        case("linear", x, w, row, theirs=TF.linear),
        case("linear_gelu (torch: two calls)", x, w, row,
             theirs=lambda x, w, b: TF.gelu(TF.linear(x, w, b), approximate="tanh")),
        case("outer", row, noise(n)),
        case("einsum", batch, batch, ours=partial(F.einsum, equation),
             theirs=partial(torch.einsum, equation)),
        case("scaled_dot_product_attention", *heads, theirs=attention),
        case("scaled_dot_product_attention (causal)", *heads,
             ours=partial(F.scaled_dot_product_attention, causal=True),
             theirs=partial(attention, is_causal=True)),
        case("scaled_dot_product_attention (mask)", *few, mask,
             ours=lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, mask=m),
             theirs=lambda q, k, v, m: attention(q, k, v, attn_mask=m)),
        case("varlen_attention (torch: 4 calls)", *heads,
             ours=lambda q, k, v: F.varlen_attention(q, k, v, [n // 4] * 4),
             theirs=lambda q, k, v: documents(q, k, v, n // 4)),
        case("attention_weights", *few[:2],
             theirs=lambda q, k: (q.float() @ k.float().transpose(-2, -1) * scale).softmax(-1)),
    ]  # fmt: skip


def normalisation(n: int) -> list[Case]:
    """Norms over rows, groups and batches."""
    x, row = noise(n, n), positive(n)
    image, channel = noise(16, 64, n // 32, n // 32), positive(64)
    return [
        case("layer_norm", x, row, noise(n),
             theirs=lambda x, w, b: TF.layer_norm(x, (n,), w, b)),
        case("rms_norm", x, row, theirs=lambda x, w: TF.rms_norm(x, (n,), w, 1e-6)),
        case("group_norm", image, channel, noise(64),
             ours=lambda x, w, b: F.group_norm(x, 8, w, b),
             theirs=lambda x, w, b: TF.group_norm(x, 8, w, b)),
        case("batch_norm", image, channel, noise(64),
             ours=lambda x, w, b: F.batch_norm(x, None, w, b),
             theirs=lambda x, w, b: TF.batch_norm(x, None, None, w, b, training=True)),
        case("batch_statistics", image,
             theirs=lambda x: torch.var_mean(x.float(), (0, 2, 3), correction=0)[::-1]),
    ]  # fmt: skip


def windows(n: int) -> list[Case]:
    """Convolutions and pooling."""
    image, row = noise(16, 16, n // 16, n // 16), noise(16, 64, n)
    return [
        case("conv1d", noise(8, 16, 8 * n), noise(16, 16, 3), noise(16),
             ours=partial(F.conv1d, padding=1), theirs=partial(TF.conv1d, padding=1)),
        case("conv2d", noise(4, 16, n // 8, n // 8), noise(16, 16, 3, 3), noise(16),
             ours=partial(F.conv2d, padding=1), theirs=partial(TF.conv2d, padding=1)),
        *(case(name, x, ours=first(getattr(F, name), 2), theirs=first(getattr(TF, name), 2))
          for name, x in (("max_pool1d", row), ("max_pool2d", image), ("avg_pool1d", row),
                          ("avg_pool2d", image))),
    ]  # fmt: skip


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions as transformers computes them."""
    a, b = x.chunk(2, -1)
    cos, sin = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (cos, sin))
    return x * cos + torch.cat((-b, a), -1) * sin


def torch_tables(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions, in double and then rounded, as ours."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def gates(n: int) -> list[Case]:
    """Gates, positions, noise."""
    cos, sin = (given(t.numpy()) for t in torch_tables(n, n // 16))
    return [
        case("swiglu (torch: two calls)", noise(n, n), noise(n, n),
             theirs=lambda gate, up: TF.silu(gate) * up),
        case("rotary (torch: as transformers)", noise(1, n, 16, n // 16), cos, sin, theirs=turned),
        case("rotary_tables", ours=lambda: F.rotary_tables(n, 2 * n),
             theirs=lambda: torch_tables(n, 2 * n), dtypes=FP32),
        case("dropout (0.1)", noise(n, n), ours=lambda x: F.dropout(x, 0.1),
             theirs=lambda x: TF.dropout(x, 0.1), same=False),
    ]  # fmt: skip


def losses(n: int) -> list[Case]:
    """Losses, averaged."""
    logits, targets = noise(n // 8, 8 * n), ids(8 * n, n // 8)
    x, y = noise(n, n), fixed(noise(n, n))
    wide = Input(lambda rng: rng.standard_normal((4 * n, n), dtype=np.float32) / n**0.5)
    names = ("mse_loss", "l1_loss", "smooth_l1_loss")
    return [
        case("cross_entropy", logits, targets, theirs=lambda x, t: TF.cross_entropy(x.float(), t)),
        case("linear_cross_entropy (torch: two calls)", noise(n // 4, n), wide, ids(4 * n, n // 4),
             theirs=lambda x, w, t: TF.cross_entropy(TF.linear(x, w).float(), t)),
        case("nll_loss", logits, targets, theirs=TF.nll_loss, dtypes=FP32),
        *(case(name, x, y, theirs=getattr(TF, name), dtypes=FP32) for name in names),
        case("binary_cross_entropy_with_logits", x, probabilities(n, n),
             theirs=TF.binary_cross_entropy_with_logits, dtypes=FP32),
        case("kl_div", x, probabilities(n, n), ours=partial(F.kl_div, reduction="batchmean"),
             theirs=partial(TF.kl_div, reduction="batchmean"), dtypes=FP32),
    ]  # fmt: skip


class Exponential(torch.autograd.Function):
    """An exponential whose backward is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keep the result."""
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        """Multiply by the result."""
        return dy * ctx.saved_tensors[0]


def exponential(x: fsdpc.Tensor) -> fsdpc.Tensor:
    """Ours."""
    with fsdpc.no_grad():
        y = F.exp(x)
    return F.custom([x], [y], lambda dy: dy * y)[0]


def hooked(x: torch.Tensor) -> torch.Tensor:
    """An alias with a hook on its gradient."""
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda _: None)
    return y


def tape(n: int) -> list[Case]:
    """What stands on the tape."""
    x, only = noise(n, n), {"dtypes": FP32}
    return [
        case("boundary (torch: a hook)", x, ours=lambda x: F.boundary(x, int), theirs=hooked,
             **only),
        case("checkpoint (of a gelu)", x, ours=partial(F.checkpoint, F.gelu),
             theirs=partial(torch_checkpoint, TF.gelu, use_reentrant=False), **only),
        case("custom (an exponential)", x, ours=exponential, theirs=Exponential.apply, **only),
    ]  # fmt: skip


def creation(n: int) -> list[Case]:
    """Tensors from a shape, or of another's shape."""
    size, only = (n, n), {"dtypes": FP32}
    drawn = {"dtypes": FP32, "same": False}
    like, args = fixed(noise(n, n)), {"full": (size, 2.0), "arange": (n * n,)}
    args |= {"linspace": (0.0, 1.0, n * n), "eye": (n,), "randint": (0, 10, size)}
    undefined = ("empty", "rand", "randn", "randint")

    def made(name: str) -> Case:
        given = args.get(name, (size,))
        options = drawn if name in undefined else only
        return case(name, ours=lambda: getattr(fsdpc, name)(*given),
                    theirs=lambda: getattr(torch, name)(*given), **options)  # fmt: skip

    def alike(name: str) -> Case:
        more = (2.0,) if name == "full_like" else ()
        options = drawn if name.removesuffix("_like") in undefined else only
        return case(name, like, ours=lambda x: getattr(fsdpc, name)(x, *more),
                    theirs=lambda x: getattr(torch, name)(x, *more), **options)  # fmt: skip

    names = ("zeros", "ones", "full", "empty", "rand", "randn")
    alikes = [f"{name}_like" for name in names]
    return [made(each) for each in (*names, "arange", "linspace", "eye", "randint")] + [
        alike(each) for each in alikes
    ]  # fmt: skip


GROUPS: dict[str, Callable[[int], list[Case]]] = {
    "arithmetic": arithmetic, "of one element": of_one_element, "masks": masks,
    "reductions": reductions, "by index": by_index, "shapes": shapes, "products": products,
    "normalisation": normalisation, "windows": windows, "gates": gates, "losses": losses,
    "tape": tape, "creation": creation,
}  # fmt: skip

#: Of the page and without a case: a type, a seed, copies and views of data, and a collective, which
#: alone gives back what it was given; bench_qlora.py has the operations on quantised weights.
NOT_MEASURED = {
    "ValuesIndices", "dequantize", "from_dlpack", "from_numpy", "manual_seed", "quantize",
    "quantized_linear", "sum_over_ranks", "tensor",
}  # fmt: skip

#: What steps of transformers are made of.
OF_TRANSFORMERS = {
    "add", "cross_entropy", "dropout", "embedding", "gelu", "layer_norm", "linear", "mul",
    "rms_norm", "rotary", "scaled_dot_product_attention", "silu", "softmax", "swiglu",
}  # fmt: skip


class Engine:
    """How one engine makes tensors, calls, and goes backward."""

    def __init__(self, name: str) -> None:
        self.native = name == "fsdpc"

    def tensors(
        self, arrays: Sequence[np.ndarray], inputs: Sequence[Input], dtype: str, grad: bool
    ) -> list[Any]:
        """The inputs of a case; of those that have gradients, leaves where gradients are wanted."""
        kind = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        made = []
        for array, each in zip(arrays, inputs, strict=True):
            x = fsdpc.tensor(array) if self.native else torch.from_numpy(array.copy())
            if each.cast:
                x = x.to(kind if self.native else getattr(torch, kind))
            made.append(x.requires_grad_() if each.grad and grad else x)
        return made

    def with_backward(
        self, call: Callable[..., Any], tensors: Sequence[Any], weights: Sequence[np.ndarray]
    ) -> Callable[[], Any]:
        """A call and its backward, from given gradients of the results."""
        leaves = [x for x in tensors if x.requires_grad]
        outputs = listed(call(*tensors))
        gradients = [
            fsdpc.tensor(w).to(y.dtype) if self.native else torch.from_numpy(w).to(y.dtype)
            for w, y in zip(weights, outputs, strict=True)
        ]
        backward = fsdpc._core.backward if self.native else torch.autograd.backward

        def run() -> list[Any]:
            for x in leaves:
                x.grad = None
            backward(listed(call(*tensors)), gradients)
            return [x.grad for x in leaves]

        return run


def listed(found: Any) -> list[Any]:
    """Results as a list."""
    return list(found) if isinstance(found, (list, tuple)) else [found]
