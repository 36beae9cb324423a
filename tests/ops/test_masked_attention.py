"""Attention with masks, and in windows, beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS

import fsdpc
from fsdpc import _core
from fsdpc.models.attention import attend

F = fsdpc.functional
SEEN = np.random.default_rng(2).random((2, 1, 5, 7)) > 0.4
SEEN[..., 0] = True


def inputs(kv_heads=4):
    return [noise(2, 4, 5, 8), noise(2, kv_heads, 7, 8, seed=1), noise(2, kv_heads, 7, 8, seed=2)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masks_of_bool(kv_heads, dtype):
    same_as_torch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask=fsdpc.tensor(SEEN)),
        lambda q, k, v: TF.scaled_dot_product_attention(
            q, k, v, torch.tensor(SEEN), enable_gqa=True),
        inputs(kv_heads), dtype, 5,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_are_added_have_gradients(causal):
    bias = np.where(SEEN, noise(2, 1, 5, 7, seed=3), -np.inf)
    tri = np.tri(5, 7, 2, dtype=bool)

    def theirs(q, k, v, b):
        b = b.masked_fill(~torch.tensor(tri), -np.inf) if causal else b
        return TF.scaled_dot_product_attention(q, k, v, b, scale=0.3)

    q, k, v = inputs()
    same_as_torch(
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, causal, 0.3, mask=b),
        theirs, [q, k, v, np.where(SEEN, bias, -1e9)], "float64",
    )  # fmt: skip
    y = F.scaled_dot_product_attention(*(fsdpc.tensor(x) for x in (q, k, v)), scale=0.3,
                                       mask=fsdpc.tensor(bias))  # fmt: skip
    want = TF.scaled_dot_product_attention(*(torch.tensor(x) for x in (q, k, v)),
                                           torch.tensor(bias), scale=0.3)  # fmt: skip
    np.testing.assert_allclose(y.numpy(), want.numpy(), rtol=1e-9, atol=1e-12)


def test_layouts_and_queries_that_see_nothing():
    q, k, v = (fsdpc.tensor(x) for x in inputs())
    nothing = SEEN.copy()
    nothing[:, :, 2] = False
    mask = fsdpc.tensor(nothing)
    y = F.scaled_dot_product_attention(q, k, v, mask=mask)
    assert not y[:, :, 2].numpy().any() and np.isfinite(y.numpy()).all()
    turned = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bthd", mask=mask
    )
    assert fsdpc.functional.array_equal(turned.transpose(1, 2), y)
    all_seen = F.scaled_dot_product_attention(q, k, v, mask=fsdpc.ones(5, 7, dtype="bool"))
    np.testing.assert_allclose(
        all_seen.numpy(), F.scaled_dot_product_attention(q, k, v).numpy(), rtol=1e-9
    )
    with pytest.raises(ValueError, match="heads of q must be a multiple of heads of k"):
        F.scaled_dot_product_attention(q, k[:, :3], v[:, :3], mask=mask)
    with pytest.raises(ValueError, match="layout is 'bhtd' or 'bthd', not 'tbhd'"):
        F.scaled_dot_product_attention(q, k, v, layout="tbhd", mask=mask)
    with pytest.raises(ValueError, match=r"mask has shape .5, 6. .*must broadcast to"):
        F.scaled_dot_product_attention(q, k, v, mask=fsdpc.ones(5, 6, dtype="bool"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 5, 7), (2, 1, 1, 7), (4, 5, 1), (1, 7)])
def test_masks_that_are_added_in_the_kernel(shape, dtype):
    bias = noise(*shape, seed=3)
    bias = np.where(noise(*shape, seed=4) > 0.3, -np.inf, bias) if shape[-1] == 7 else bias
    mask = fsdpc.tensor(bias).to("float64" if dtype == "float64" else "bfloat16")
    seen = torch.tensor(mask.to("float64").numpy())
    same_as_torch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask=mask),
        lambda q, k, v: TF.scaled_dot_product_attention(q, k, v, seen).nan_to_num(),
        inputs(), dtype, 5,
    )  # fmt: skip


def test_queries_that_see_the_least_number_alone_take_the_mean():
    q, k, v = (fsdpc.tensor(x).to("float32").detach().requires_grad_() for x in inputs())
    bias = np.zeros((5, 7), np.float32)
    bias[2] = bias[0, 3] = np.finfo(np.float32).min
    y = F.scaled_dot_product_attention(q, k, v, mask=fsdpc.tensor(bias))
    np.testing.assert_allclose(y.numpy()[:, :, 2], v.numpy().mean(2), rtol=1e-5, atol=1e-6)
    y[:, :, 2].sum().backward()
    np.testing.assert_allclose(v.grad.numpy(), 1 / 7, rtol=1e-5)
    assert all(np.isfinite(x.grad.numpy()).all() for x in (q, k))


def test_weights_are_kept_for_the_gradient_of_a_mask_alone():
    tokens = 256
    q, k, v = (fsdpc.randn(1, 2, tokens, 8).requires_grad_() for _ in range(3))
    kept = []
    for wanted in (False, True):
        mask = fsdpc.zeros(tokens, tokens, requires_grad=wanted)
        before = fsdpc.memory_stats()["activation_bytes"]
        y = F.scaled_dot_product_attention(q, k, v, mask=mask)
        kept.append(fsdpc.memory_stats()["activation_bytes"] - before)
        del y
    weights = 2 * tokens * tokens * 4
    assert kept[0] < weights / 4 and kept[1] >= weights


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [1, 3, 6])
@pytest.mark.parametrize("lengths", [None, [4, 3, 4, 3]])
def test_windows_are_masks(lengths, window, dtype):
    """In rows, and in documents that share one; torch's sees a mask of both."""
    behind = np.arange(7)[:, None] - np.arange(7)
    seen = (behind >= 0) & (behind < window)
    if lengths:
        seen &= (np.arange(7) < 4)[:, None] == (np.arange(7) < 4)
    arrays = [noise(2, 7, heads, 8, seed=heads) for heads in (4, 2, 2)]
    same_as_torch(
        lambda q, k, v: attend(q, k, v, window, lengths=lengths),
        lambda q, k, v: TF.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), torch.tensor(seen), enable_gqa=True
        ).transpose(1, 2),
        arrays, dtype, 5,
    )  # fmt: skip
    x = fsdpc.tensor(arrays[0])
    with pytest.raises(ValueError, match="a window of 3 keys that is not causal"):
        _core.scaled_dot_product_attention(x, x, x, window=3)
    with pytest.raises(ValueError, match="window is -1 and cannot be negative"):
        _core.scaled_dot_product_attention(x, x, x, causal=True, window=-1)
