"""Layers with parameters beside torch's of the same state: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import nn

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 2, 8)).astype(np.float32)  # tokens, batch, elements
MEMORY = RNG.standard_normal((7, 2, 8)).astype(np.float32)
PADDING = np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=bool)
CAUSAL = np.triu(np.ones((5, 5), dtype=bool), 1)


def same_state(ours: nn.Module, theirs: torch.nn.Module) -> None:
    """Give ours what theirs has, by name."""
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    assert list(ours.state_dict()) == list(state)
    ours.load_state_dict(state)


def compare(ours: nn.Module, theirs: torch.nn.Module, *inputs: np.ndarray, **options: Any) -> None:
    """Values, and gradients of every input and parameter."""
    xs = [fsdpc.tensor(x, requires_grad=True) for x in inputs]
    ts = [torch.tensor(x, requires_grad=True) for x in inputs]

    def of(make: Any) -> dict[str, Any]:
        return {k: make(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}

    y, want = ours(*xs, **of(fsdpc.tensor)), theirs(*ts, **of(torch.tensor))
    if isinstance(want, tuple):
        if want[1] is not None:
            np.testing.assert_allclose(y[1].detach().numpy(), want[1].detach(), atol=1e-6)
        y, want = y[0], want[0]
    np.testing.assert_allclose(y.detach().numpy(), want.detach(), atol=3e-6)
    g = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(fsdpc.tensor(g))
    want.backward(torch.tensor(g))
    for x, t in zip(xs, ts, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), t.grad, atol=3e-5)
    for (name, p), (other, q) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        np.testing.assert_allclose(p.grad.numpy(), q.grad, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_attention(bias: bool, batch_first: bool, need_weights: bool) -> None:
    ours = nn.MultiheadAttention(8, 2, 0.0, bias, batch_first)
    theirs = torch.nn.MultiheadAttention(8, 2, 0.0, bias, batch_first=batch_first)
    same_state(ours, theirs)
    x, memory = (a.transpose(1, 0, 2) if batch_first else a for a in (X, MEMORY))
    compare(ours, theirs, x, memory, memory, need_weights=need_weights)
    for options in (
        {"key_padding_mask": PADDING},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
        {"attn_mask": np.where(CAUSAL, -np.inf, 0.5).astype(np.float32)},
        {"attn_mask": RNG.standard_normal((4, 5, 5)).astype(np.float32)},
    ):
        ours.zero_grad()
        theirs.zero_grad()
        compare(ours, theirs, x, x, x, need_weights=need_weights, **options)


def test_causal_attention_needs_no_mask() -> None:
    attention = nn.MultiheadAttention(8, 2)
    x = fsdpc.tensor(X)
    masked, _ = attention(x, x, x, attn_mask=fsdpc.tensor(CAUSAL), need_weights=False)
    for weights in (False, True):
        y, found = attention(x, x, x, need_weights=weights, is_causal=True)
        np.testing.assert_allclose(y.detach().numpy(), masked.detach().numpy(), atol=1e-6)
        assert (found is not None) == weights
    with pytest.raises(ValueError, match="3 heads of 8 elements"):
        nn.MultiheadAttention(8, 3)


def test_dropout_is_of_training() -> None:
    attention, x = nn.MultiheadAttention(8, 2, 0.5), fsdpc.tensor(X)
    y, _ = attention(x, x, x)
    z, _ = attention(x, x, x)
    assert not fsdpc.functional.array_equal(y, z)
    attention.eval()
    same = [attention(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert fsdpc.functional.array_equal(*same)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(activation: str, norm_first: bool) -> None:
    options: dict[str, Any] = {
        "dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm_first
    }  # fmt: skip
    ours = nn.TransformerEncoderLayer(8, 2, 16, **options)
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, **options)
    same_state(ours, theirs)
    x = X.transpose(1, 0, 2)
    compare(ours, theirs, x)
    ours.zero_grad()
    theirs.zero_grad()
    compare(ours, theirs, x, src_mask=CAUSAL, src_key_padding_mask=PADDING)
    with pytest.raises(ValueError, match="activation is 'relu', 'gelu' or a function"):
        nn.TransformerEncoderLayer(8, 2, activation="tanh")


def test_convolutions_and_norms() -> None:
    image = RNG.standard_normal((3, 4, 6, 5)).astype(np.float32)
    row = image.reshape(3, 4, 30)
    for ours, theirs, x in (
        (nn.Conv2d(4, 6, 3, 2, 1, groups=2), torch.nn.Conv2d(4, 6, 3, 2, 1, groups=2), image),
        (nn.Conv2d(4, 2, (3, 2), padding="same", bias=False),
         torch.nn.Conv2d(4, 2, (3, 2), padding="same", bias=False), image),
        (nn.Conv1d(4, 6, 3, dilation=2), torch.nn.Conv1d(4, 6, 3, dilation=2), row),
        (nn.GroupNorm(2, 4), torch.nn.GroupNorm(2, 4), image),
        (nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4), image),
        (nn.BatchNorm1d(4, momentum=None), torch.nn.BatchNorm1d(4, momentum=None), row),
        (nn.SyncBatchNorm(4, affine=False), torch.nn.BatchNorm2d(4, affine=False), image),
    ):  # fmt: skip
        same_state(ours, theirs)
        compare(ours, theirs, x)
        ours.zero_grad()
        theirs.zero_grad()
        compare(ours, theirs, x * 2 + 1)
        for name, value in theirs.state_dict().items():
            np.testing.assert_allclose(ours.state_dict()[name].detach().numpy(), value, atol=1e-5)
        ours.eval()
        theirs.eval()
        ours.zero_grad()
        theirs.zero_grad()
        compare(ours, theirs, x)
    with pytest.raises(ValueError, match="4 channels to 6 in 4 groups"):
        nn.Conv2d(4, 6, 3, groups=4)
    with pytest.raises(ValueError, match="3 groups of 4 channels"):
        nn.GroupNorm(3, 4)
    with pytest.raises(ValueError, match="BatchNorm2d: x has shape"):
        nn.BatchNorm2d(4)(fsdpc.tensor(row))
