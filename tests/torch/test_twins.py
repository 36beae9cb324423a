"""The same models trained by both libraries: losses stay together for 50 steps of AdamW.

Both compute in float32 and sum in another order. A loss near 4 has a rounding error of 5e-7, and
measured differences are not above that at any step. torch in float32 is up to 1e-6 from torch in
float64. The bound leaves room for other processors, which round differently.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fsdpc
from fsdpc import functional as F
from fsdpc.models import from_config

STEPS, BOUND = 50, 1e-5  # in nats, at each step

Batch = tuple[np.ndarray, np.ndarray]


def cnn(nn: Any) -> Any:
    """A small network for images (batch, 3, 32, 32), of torch.nn or of fsdpc.nn."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # the norm would undo a bias
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def images(step: int, count: int = 16) -> Batch:
    """Noisy tiles in the colours of ten classes, float32 (count, 3, 32, 32), and the classes."""
    tiles = np.random.default_rng(0).normal(0, 0.3, (10, 3, 4, 4))
    patterns = tiles.repeat(8, 2).repeat(8, 3)
    rng = np.random.default_rng(1 + step)
    classes = rng.integers(0, 10, count)
    return (patterns[classes] + rng.normal(0, 1, (count, 3, 32, 32))).astype(np.float32), classes


def walks(step: int, rows: int = 4, tokens: int = 32) -> Batch:
    """Ids that walk by a stride of 1, 2 or 3, and the ids one further, (rows, tokens)."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 96, (rows, 1)) + rng.integers(1, 4, (rows, 1)) * np.arange(tokens + 1)
    return np.ascontiguousarray(ids[:, :-1] % 96), np.ascontiguousarray(ids[:, 1:] % 96)


def losses(model: Any, optimizer: Any, loss_of: Callable[[Any, int], Any]) -> np.ndarray:
    """Take STEPS steps of AdamW and return the loss of each, in nats."""
    stepper = optimizer(model.parameters(), lr=3e-3, weight_decay=0.1)
    found = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        found.append(float(loss.detach()))
    return np.array(found)


def check(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> None:
    """Losses in float32, and torch's in float64, are within the bound of each other, and fall."""
    for a, b in ((ours, theirs), (ours, exact), (theirs, exact)):
        np.testing.assert_allclose(a, b, rtol=0, atol=BOUND)
    assert ours[-10:].mean() < 0.7 * ours[:10].mean()


def test_an_image_classifier() -> None:
    """Running statistics, which no gradient touches, stay together too."""
    torch.set_num_threads(1)  # OpenMP's threads spin: two on a busy machine take ten times as long
    torch.manual_seed(0)
    theirs = cnn(torch.nn)
    exact = copy.deepcopy(theirs).double()
    ours = cnn(fsdpc.nn)
    ours.load_state_dict({n: each.numpy() for n, each in theirs.state_dict().items()})

    def of_torch(model: Any, step: int) -> torch.Tensor:
        x, classes = map(torch.from_numpy, images(step))
        return torch.nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)), classes)

    def of_fsdpc(model: Any, step: int) -> fsdpc.Tensor:
        x, classes = map(fsdpc.tensor, images(step))
        return F.cross_entropy(model(x), classes)

    check(
        losses(ours, fsdpc.optim.AdamW, of_fsdpc),
        losses(theirs, torch.optim.AdamW, of_torch),
        losses(exact, torch.optim.AdamW, of_torch),
    )
    for name, value in ours.named_buffers():
        want = theirs.get_buffer(name).numpy()
        np.testing.assert_allclose(value.numpy(), want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_gpt2() -> None:
    """transformers' model and ours with its weights, the head tied to the embedding."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config)
    exact = copy.deepcopy(theirs).double()
    ours = from_config(json.loads(config.to_json_string()))
    weights = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    ours.load_state_dict(weights)

    def of_torch(model: Any, step: int) -> torch.Tensor:
        x, y = map(torch.from_numpy, walks(step))
        return torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())

    check(
        losses(ours, fsdpc.optim.AdamW, lambda model, step: model(*walks(step))),
        losses(theirs, torch.optim.AdamW, of_torch),
        losses(exact, torch.optim.AdamW, of_torch),
    )
