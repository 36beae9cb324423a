"""Sharded training at several world sizes, bitwise against one process and against itself."""

from __future__ import annotations

import numpy as np
import pytest

import fsdpc
from fsdpc import _core
from fsdpc.launching.launcher import launch

from .common import assert_same, batch, build, parameters, train, train_in_one_process

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

BF16, F32 = fsdpc.bfloat16, fsdpc.float32


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_one_process(accumulate: int) -> None:
    """Losses and final parameters have the bits of a process that sums the ranks' gradients."""
    model = build(sharded=True)
    losses, _ = train(model, 4, accumulate)
    sharded = parameters(model)
    reference, all_losses = train_in_one_process(fsdpc.world_size(), 4, accumulate)
    assert losses == all_losses[fsdpc.rank()]
    assert_same(sharded, parameters(reference))


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reduce_dtype", [F32, BF16], ids=["f32", "bf16"])
def test_bf16_repeats_and_learns(reduce_dtype: object) -> None:
    results = []
    for _ in range(2):
        model = build(True, BF16, reduce_dtype)
        results.append((train(model, 3), parameters(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    model = build(True, BF16, reduce_dtype)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(*batch(0, fsdpc.rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def bits_of_a_run(dtype: str | None) -> tuple[list[float], list[float], int]:
    """Losses, norms and a checksum of the parameters after three steps, on a fresh rank."""
    fsdpc.init()
    model = build(True, dtype, F32)
    losses, norms = train(model, 3)
    crc = 0
    for value in parameters(model).values():
        crc = _core.crc32c(crc, value)
    fsdpc.shutdown()
    return losses, norms, crc


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_no_alias_has_the_same_bits(ranks: int, dtype: str | None) -> None:
    """With private, NaN-filled memory for every unit nothing changes: nobody reads too late."""
    shared = launch(bits_of_a_run, ranks, dtype)
    private = launch(bits_of_a_run, ranks, dtype, env={"FSDPC_NO_ALIAS": "1"})
    assert shared == private
    assert all(np.isfinite(losses).all() for losses, _, _ in shared)


@pytest.mark.ranks([1, 2, 3])
def test_deferred_initialisation_is_the_same_everywhere() -> None:
    plain = {n: p.numpy().copy() for n, p in build(sharded=False).named_parameters()}
    assert_same(parameters(build(sharded=True)), plain)


@pytest.mark.ranks([1, 2])
def test_values_are_taken_from_a_built_model() -> None:
    fsdpc.manual_seed(7)
    model = build(sharded=False)
    before = {n: p.numpy().copy() for n, p in model.named_parameters()}
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    assert_same(parameters(model), before)


@pytest.mark.ranks(2)
def test_norm_does_not_depend_on_sharding() -> None:
    model = build(sharded=True)
    model(*batch(0, 0)).backward()  # the same batch on every rank: the mean is each one's gradient
    twin = build(sharded=False)
    twin(*batch(0, 0)).backward()
    assert float(fsdpc.clip_grad_norm_(model, np.inf)) == float(fsdpc.clip_grad_norm_(twin, np.inf))


@pytest.mark.ranks(2)
def test_activation_checkpointing_changes_nothing() -> None:
    plain = build(sharded=True)
    losses, norms = train(plain, 3)
    saved = parameters(plain)
    fsdpc.manual_seed(7)
    model = fsdpc.models.Llama(plain.config)
    assert fsdpc.checkpoint_activations(model.blocks(), 2) == 2
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    assert train(model, 3) == (losses, norms)
    assert_same(parameters(model), saved)


@pytest.mark.ranks([1, 2])
def test_pieces_are_rows() -> None:
    model = build(sharded=True)
    rank, world = fsdpc.rank(), fsdpc.world_size()
    for name, p in model.named_parameters():
        assert p.local.ndim == p.ndim, name
        assert p.local.shape[1:] == p.shape[1:], name
    model(*batch(0, rank)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.shape == p.local.shape, name
        assert fsdpc.full_grad(p).shape == p.shape, name
    rows = fsdpc.all_reduce(int(sum(p.local.numel() for p in model.parameters())))
    assert rows == model.num_parameters()
    assert world > 1 or rows == sum(p.local.numel() for p in model.parameters())


@pytest.mark.ranks(2)
def test_foreign_writes_to_pieces_are_seen() -> None:
    """An edit of .local, by NumPy and behind the engine's back, reaches the next forward."""
    model = build(sharded=True)
    x, y = batch(0, 0)
    before = float(model(x, y))
    for p in model.parameters():
        p.local.numpy()[...] *= 0.5
    twin = build(sharded=False)
    for p in twin.parameters():
        p.numpy()[...] *= 0.5
    after = float(model(x, y))
    assert after != before
    assert after == float(twin(x, y))


@pytest.mark.ranks(2)
def test_evaluation_and_training_alternate() -> None:
    model, other = build(sharded=True), build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    plain = fsdpc.optim.AdamW(other.parameters(), lr=1e-2)
    for step in range(3):
        with fsdpc.no_grad():
            model(*batch(99, fsdpc.rank()))
        for m, o in ((model, optimizer), (other, plain)):
            o.zero_grad()
            m(*batch(step, fsdpc.rank())).backward()
            o.step()
    assert_same(parameters(model), parameters(other))


@pytest.mark.ranks(2)
def test_state_dict_round_trip() -> None:
    model = build(sharded=True)
    train(model, 2)
    state = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    other = build(sharded=True)
    assert other.load_state_dict(state) == ([], [])
    assert_same(parameters(other), parameters(model))
    assert float(other(*batch(5, 0))) == float(model(*batch(5, 0)))
