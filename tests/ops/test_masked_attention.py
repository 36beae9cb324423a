"""Attention with masks beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS

import fsdpc

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
    with pytest.raises(ValueError, match="4 query heads and 3 of keys"):
        F.scaled_dot_product_attention(q, k[:, :3], v[:, :3], mask=mask)
    with pytest.raises(ValueError, match="layout is 'bhtd' or 'bthd', not 'tbhd'"):
        F.scaled_dot_product_attention(q, k, v, layout="tbhd", mask=mask)
