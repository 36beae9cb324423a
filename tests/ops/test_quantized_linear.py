"""Products with quantised weights, against the values that the codes stand for."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import FLOATS, check, values

import fsdpc
from fsdpc import functional as F

SCHEMES = ("nf4", "int4", "int8")


def weights(rows, columns, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def dequantized(codes, scheme, columns):
    return values(F.dequantize(codes, scheme, columns, "float64"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "shape", [(3, 5, 7), (2, 130, 66), (4, 64, 1), (0, 8, 8), (2, 0, 3), (2, 8, 0)]
)
def test_products_and_gradients(shape, scheme, dtype):
    rows, columns, out = shape
    codes = F.quantize(fsdpc.tensor(weights(out, columns)), scheme)
    weight = dequantized(codes, scheme, columns)
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal((rows, columns)), rng.standard_normal(out)]
    check(
        lambda x, bias: F.quantized_linear(x, codes, scheme, bias),
        lambda x, bias: x @ weight.T + bias,
        inputs, dtype, scale=4, what=f"quantized_linear {shape}",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_blocks_of_a_weight(dtype):
    """Blocks have about a million elements; the last is shorter."""
    codes = F.quantize(fsdpc.tensor(weights(1300, 1100)), "nf4")
    weight = dequantized(codes, "nf4", 1100)
    x = fsdpc.tensor(np.random.default_rng(3).standard_normal((3, 1100))).to(dtype)
    x.requires_grad = True
    y = F.quantized_linear(x, codes, "nf4")
    y.sum().backward()
    own, bound = fsdpc.tensor(weight).to(dtype), 0.5 if dtype == "bfloat16" else 2e-4
    assert np.abs(values(y) - values(F.linear(x, own))).max() < bound
    assert np.abs(values(x.grad) - values(own).sum(axis=0)).max() < 2.5 * bound


def test_no_whole_copy_of_a_weight_exists():
    """A weight of 64 MiB in fp32; the largest block has 4 MiB."""
    codes = F.quantize(fsdpc.tensor(weights(4096, 4096)), "nf4")
    x = fsdpc.ones(2, 4096)
    x.requires_grad = True
    fsdpc.reset_peak_memory_stats()
    before = fsdpc.memory_stats()["activation_peak_bytes"]
    F.quantized_linear(x, codes, "nf4").sum().backward()
    assert fsdpc.memory_stats()["activation_peak_bytes"] - before < 5 << 20


@pytest.mark.parametrize("kind", ["normal", "outliers", "heavy tails"])
def test_nf4_has_the_codes_of_bitsandbytes(kind):
    torch = pytest.importorskip("torch")
    bnb = pytest.importorskip("bitsandbytes.functional")
    rng = np.random.default_rng(4)
    w = rng.standard_normal((96, 512)).astype(np.float32) * 0.02
    if kind == "outliers":
        w[:, ::97] *= 20
    elif kind == "heavy tails":
        w = rng.standard_t(3, w.shape).astype(np.float32)
    theirs, state = bnb.quantize_4bit(
        torch.from_numpy(w), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    ours = F.quantize(fsdpc.tensor(w), "nf4")
    assert np.array_equal(ours.numpy()[:, 8 + 512 // 64 :].reshape(-1), theirs.numpy().reshape(-1))
    error = np.square(bnb.dequantize_4bit(theirs, state).numpy() - w).mean()
    assert np.square(dequantized(ours, "nf4", 512) - w).mean() < error * 1.001


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_without_columns_are_zeros(scheme):
    dirty = [fsdpc.full((4, 8), 200, dtype=fsdpc.uint8) for _ in range(50)]
    del dirty
    assert not F.quantize(fsdpc.zeros(4, 0), scheme).numpy().any()


def test_bad_input():
    codes = F.quantize(fsdpc.ones(2, 64), "nf4")
    with pytest.raises(ValueError, match=r"must have the shape \(rows, 41\), as 64 columns in"):
        F.quantized_linear(fsdpc.ones(1, 64), codes[:, :40].contiguous(), "nf4")
    with pytest.raises(ValueError, match=r"shape \(rows, 68\), as 64 columns in int8"):
        F.dequantize(codes, "int8", 64, "float32")
    with pytest.raises(ValueError, match="called 'fp4'; there are nf4 int4 int8"):
        F.quantize(fsdpc.ones(2, 64), "fp4")
    with pytest.raises(ValueError, match="row 0 of a weight has infinities or NaN"):
        F.quantize(fsdpc.tensor([[1.0, float("nan")]]), "int4")
    with pytest.raises(ValueError, match="a float32 matrix, got 1 dimensions of float32"):
        F.quantize(fsdpc.ones(64), "nf4")
    with pytest.raises(TypeError, match="codes must be uint8, got float32"):
        F.quantized_linear(fsdpc.ones(1, 64), fsdpc.ones(2, 41), "nf4")
    with pytest.raises(ValueError, match="bias must be"):
        F.quantized_linear(fsdpc.ones(1, 64), codes, "nf4", fsdpc.ones(3))
    with pytest.raises(TypeError, match="float dtype"):
        F.dequantize(codes, "nf4", 64, "int32")
