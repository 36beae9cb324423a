"""Operations on tensors, each with its backward; docs/operations.md lists them.

Elementwise operations broadcast as in NumPy and promote floats as in PyTorch; matrix products and
normalisations require equal dtypes. All operations compute in fp32 internally (fp64 for float64)
and round once to the result's dtype. No result depends on the number of threads.
"""

from fsdpc._core import (
    abs,
    add,
    array_equal,
    boundary,
    cast,
    checkpoint,
    concat,
    cos,
    custom,
    dequantize,
    div,
    dropout,
    embedding,
    erf,
    exp,
    expand,
    expm1,
    gelu,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_gelu,
    log,
    log1p,
    log_softmax,
    matmul,
    maximum,
    mean,
    minimum,
    mul,
    neg,
    permute,
    pow,
    quantize,
    quantized_linear,
    relu,
    reshape,
    rms_norm,
    rotary,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    softmax,
    sqrt,
    stack,
    sub,
    sum,
    swiglu,
    tanh,
    transpose,
)
from fsdpc.functional import _methods
from fsdpc.functional.attention import (
    attention_weights,
    scaled_dot_product_attention,
    varlen_attention,
)
from fsdpc.functional.convolution import (
    avg_pool1d,
    avg_pool2d,
    conv1d,
    conv2d,
    max_pool1d,
    max_pool2d,
)
from fsdpc.functional.elementwise import (
    clamp,
    isfinite,
    isinf,
    isnan,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    where,
)
from fsdpc.functional.indexing import (
    argsort,
    gather,
    index_select,
    masked_fill,
    masked_select,
    nonzero,
    scatter_add,
    sort,
    topk,
)
from fsdpc.functional.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from fsdpc.functional.normalization import (
    batch_norm,
    batch_statistics,
    group_norm,
    sum_over_ranks,
)
from fsdpc.functional.positions import rotary_tables
from fsdpc.functional.reductions import (
    ValuesIndices,
    all,
    amax,
    amin,
    any,
    argmax,
    argmin,
    cumsum,
    logsumexp,
    max,
    min,
    norm,
    std,
    var,
)
from fsdpc.functional.shapes import (
    cat,
    chunk,
    einsum,
    flip,
    one_hot,
    outer,
    pad,
    repeat,
    repeat_interleave,
    roll,
    split,
    tril,
    triu,
)

_methods.install()

__all__ = [
    "abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "array_equal",
    "attention_weights", "avg_pool1d", "avg_pool2d", "batch_norm", "batch_statistics",
    "binary_cross_entropy_with_logits", "boundary", "cast", "cat", "checkpoint", "chunk", "clamp",
    "concat", "conv1d", "conv2d", "cos", "cross_entropy", "cumsum", "custom", "dequantize", "div",
    "dropout", "einsum", "embedding", "erf", "exp", "expand", "expm1", "flip", "gather", "gelu",
    "group_norm", "index_select", "isfinite", "isinf", "isnan", "kl_div", "l1_loss", "layer_norm",
    "linear", "linear_cross_entropy", "linear_gelu", "log", "log1p", "log_softmax", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "masked_fill", "masked_select",
    "matmul", "max", "max_pool1d", "max_pool2d", "maximum", "mean", "min", "minimum", "mse_loss",
    "mul", "neg", "nll_loss", "nonzero", "norm", "one_hot", "outer", "pad", "permute", "pow",
    "quantize", "quantized_linear", "relu", "repeat", "repeat_interleave", "reshape", "rms_norm",
    "roll", "rotary", "rotary_tables", "rsqrt", "scaled_dot_product_attention", "scatter_add",
    "sigmoid", "sign", "silu", "sin", "smooth_l1_loss", "softmax", "sort", "split", "sqrt", "stack",
    "std", "sub", "sum", "sum_over_ranks", "swiglu", "tanh", "topk", "transpose", "tril", "triu",
    "ValuesIndices", "var", "varlen_attention", "where",
]  # fmt: skip
