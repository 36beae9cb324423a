"""Modules that compute a tile of tokens at a time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.cli import estimate, train_config
from fsdpc.cli.train import make_model
from fsdpc.models import GPT2, Llama, preset
from fsdpc.sharding.tiles import is_tiled

BATCH = (2, 50)
IDS = np.arange(100).reshape(BATCH) % 61


class MLP(nn.Module):
    def __init__(self, dim: int = 8, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.rows: list[int] = []

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        self.rows.append(x.shape[-2])
        return self.down(self.up(x).tanh())


def model(kind: Any = Llama, tokens: int = 0) -> Any:
    fsdpc.manual_seed(3)
    m = kind(preset("2M"))
    if tokens:
        assert fsdpc.tile_tokens([block.mlp for block in m.blocks()], tokens) == len(m.blocks())
    return m


def train(m: Any) -> list[np.ndarray]:
    loss = m(fsdpc.tensor(IDS), fsdpc.tensor(IDS))
    loss.backward()
    return [loss.numpy(), *(p.grad.numpy().copy() for p in m.parameters())]


@pytest.mark.parametrize("kind", [Llama, GPT2])
@pytest.mark.parametrize("tokens", [1, 7, 99, 100, 1000])
def test_values_and_gradients(tokens: int, kind: Any) -> None:
    want, got = train(model(kind).double()), train(model(kind, tokens).double())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    again, nested = train(model(kind, tokens)), model(kind, tokens)
    fsdpc.checkpoint_activations(nested.blocks())
    assert all(map(np.array_equal, train(nested), again))
    whole = train(model(kind))  # of one tile
    assert tokens < 100 or all(map(np.array_equal, whole, again))


def test_arguments_and_outputs() -> None:
    class Two(nn.Module):
        def forward(self, x: Any, name: float, gate: Any = None) -> tuple[Any, Any]:
            return x * name * gate, gate.sum(-1, keepdim=True)

    x, gate = (fsdpc.randn(2, 3, 5, 4, requires_grad=True) for _ in range(2))
    tiled, found = Two(), []
    assert fsdpc.tile_tokens([tiled, tiled], 7) == 1
    for each in (Two(), tiled):
        x.grad = gate.grad = None
        a, b = each(x.transpose(1, 2), name=3.0, gate=gate.transpose(1, 2))
        (a.sum() + (b * b).sum()).backward()
        found.append([t.numpy().copy() for t in (a, b, x.grad, gate.grad)])
    assert all(map(np.array_equal, *found))
    assert tiled(fsdpc.zeros(2, 0, 4), 1.0, fsdpc.zeros(2, 0, 4))[0].shape == (2, 0, 4)


def test_how_often_tiles_run() -> None:
    mlp, x = MLP(), fsdpc.ones(2, 50, 8)
    fsdpc.tile_tokens([mlp], 40)
    with fsdpc.no_grad():
        mlp(x)
    mlp(x).sum().backward()
    assert mlp.rows == [40, 40, 20] * 2 + [20, 40, 40]  # in backward, the last tile first
    mlp.rows.clear()
    fsdpc.functional.checkpoint(lambda x: mlp(x).tanh(), x).sum().backward()
    assert mlp.rows == [40, 40, 20] * 2 + [20, 40, 40]
    drop = nn.Sequential(nn.Dropout(0.5))
    fsdpc.tile_tokens([drop], 10)
    for call in (drop, lambda x: fsdpc.functional.checkpoint(drop, x)):
        x = fsdpc.ones(2, 50, 8, requires_grad=True)
        y = call(x)
        y.sum().backward()
        assert np.array_equal(x.grad.numpy(), y.numpy())  # the same numbers
        assert len({tile.tobytes() for tile in np.split(y.numpy()[0], 5)}) == 5


def activations(layers: int, tokens: int) -> int:
    """The peak of MLPs in a row over 512 tokens, planned and run."""
    m = nn.Sequential(*[MLP(64, 1024) for _ in range(layers)])
    if tokens:
        fsdpc.tile_tokens(list(m), tokens)
    m = fsdpc.fully_shard(m)
    for _ in range(2):
        before = fsdpc.memory_stats()["activation_bytes"]
        fsdpc.reset_peak_memory_stats()
        m(fsdpc.empty(512, 64)).sum().backward()
    peak = fsdpc.memory_stats()["activation_peak_bytes"] - before
    assert fsdpc.memory_plan(m, 1, (512, 64)).activation == peak
    return peak


@pytest.mark.ranks(1)
@pytest.mark.parametrize("tokens", [32, 128])
def test_memory(tokens: int) -> None:
    kept, wide = 512 * 64 * 4, 512 * 1024 * 4
    few, many = activations(4, tokens), activations(8, tokens)
    assert many - few == 4 * kept  # what a layer keeps is its input
    assert few < 8 * kept + 4 * wide * tokens / 512 < 4 * wide < activations(4, 0)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("of_unit", ["around", "itself", "inside"])
@pytest.mark.parametrize("precision", [None, fsdpc.bfloat16])
def test_sharded(of_unit: str, precision: Any) -> None:
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=fsdpc.float32)
    both = model(GPT2, 16), model(GPT2)
    for m in both:
        for block in m.blocks():
            inside = [block.mlp.c_fc, block.mlp.c_proj]
            for unit in {"inside": inside, "around": [block], "itself": [block.mlp]}[of_unit]:
                fsdpc.fully_shard(unit, mp_policy=policy)
        fsdpc.fully_shard(m, mp_policy=policy)
    for _ in range(2):
        for m in both:
            m.zero_grad()
            before = fsdpc.memory_stats()["activation_bytes"]
            fsdpc.reset_peak_memory_stats()
            m(fsdpc.tensor(IDS + fsdpc.rank()), fsdpc.tensor(IDS)).backward()
            peak = fsdpc.memory_stats()["activation_peak_bytes"] - before
        for p, q in zip(*(m.parameters() for m in both), strict=True):
            a, b = (fsdpc.full_grad(each).numpy() for each in (p, q))
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    assert fsdpc.memory_plan(m, None, BATCH).activation == peak


def test_fitted() -> None:
    m = model(tokens=16)
    most = 0.7 * (fsdpc.memory_plan(m, 1, BATCH).activation or 0)
    assert fsdpc.fit_activations(m, BATCH, most).peak <= most
    assert all(is_tiled(block.mlp) for block in m.blocks())
    assert all(map(np.array_equal, train(m), train(model(tokens=16))))


def test_command_line(capsys: Any) -> None:
    found = []
    for more in ([], ["--tile-tokens", "64"]):
        assert estimate.main(["--seq", "1024", "--batch", "1", "--dtype", "fp32", *more]) == 0
        text = re.search(r"activation +([\d.]+) MiB", capsys.readouterr().out)
        found.append(float(text[1]))  # type: ignore[index]
    assert found[1] < 0.6 * found[0]
    assert estimate.main(["--tile-tokens", "0"]) == 2
    assert "--tile-tokens must be at least 1, got 0" in capsys.readouterr().err
    options = train_config.parse(["--tile-tokens", "9", "--checkpoint-activations"])
    options.model, options.preset = "llama", "2M"
    assert all(is_tiled(block.mlp) for block in make_model(options).blocks())
    assert train_config.kept_options(options)["tile_tokens"] == 9


def test_what_is_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(-2)

    mlp, mean, x = MLP(), Mean(), fsdpc.ones(2, 5, 4)
    fsdpc.checkpoint_activations([mlp])
    keeping = MLP()
    fsdpc.checkpoint_activations([keeping], save="products")
    wrong: list[tuple[Any, str]] = [
        (MLP(), "takes an iterable of modules, got a MLP: put it into a list"),
        ([mean, 3], "takes modules, got int"),
        ([mean, mlp], "MLP is checkpointed already; a tiled module recomputes by itself"),
        ([keeping], "MLP is checkpointed already; a tiled module recomputes by itself"),
        ([nn.ModuleList()], "ModuleList has no forward: choose the modules in it"),
        ([nn.Sequential(nn.BatchNorm1d(4))],
         "'0' of Sequential, a BatchNorm1d, mixes tokens; choose modules whose output at a token"),
        (model().blocks(), "'self_attn' of Block, a Attention, mixes tokens"),
        ([model(tokens=5).blocks()[0].mlp], "FeedForward is in tiles of 5 tokens already"),
    ]  # fmt: skip
    tokens = [([mean], rf"tokens must be .*, got {n}", n) for n in (0, 2.0, True)]
    for modules, text, n in [*tokens, *((*each, 8) for each in wrong)]:
        with pytest.raises((TypeError, ValueError), match=text):
            fsdpc.tile_tokens(modules, n)
    assert not is_tiled(mean)  # all are checked before any is changed
    fsdpc.tile_tokens([mean], 8)
    for given, options, text in (
        ([x], {}, r"Mean returned \(1, 4\) for a tile \(1, 8\) of tokens: it must return"),
        ([x[0, 0]], {}, r"Mean needs a tensor \(\.\.\., tokens, features\)"),
        ([x], {"mask": x[..., 0]}, r"'mask' of Mean is \(2, 5\), which .* '0' \(2, 5, 4\)"),
        ([x, [x]], {}, "argument '1' of Mean is a list with tensors, which are not split"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            mean(*given, **options)
