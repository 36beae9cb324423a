"""FSDPModule's methods, lists of modules, plans, whole parameters, hold, by the trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn, wrap

from .test_units import Block, Net, batch, compare, loss_of, pair, twin_gradients

KINDS = ("gather", "reduce", "all_reduce", "collective", "epoch")


def counts() -> Counter[str]:
    return Counter(kind for kind, *_ in _core.trace_events() if kind in KINDS)


def train_step(model: Any) -> None:
    loss_of(model(batch(fsdpc.rank()))).backward()


@pytest.mark.ranks([1, 2])
def test_unshard_and_reshard_by_hand() -> None:
    model, twin = pair("FULL_SHARD")
    model(batch(0))
    block = model.blocks[1]
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()  # a second one is nothing
    assert block.outer.weight._unit.state == "unsharded"
    np.testing.assert_array_equal(
        block.outer.weight.numpy(), twin.blocks[1].outer.weight.detach().numpy()
    )
    block.unshard()  # counted: given up with the second reshard
    block.reshard()
    assert block.outer.weight._unit.state == "unsharded"
    block.reshard()
    assert block.outer.weight._unit.state == "sharded"
    train_step(model)
    compare(model, twin_gradients(twin, lambda m, rank: loss_of(m(batch(rank))).backward()))


@pytest.mark.ranks(2)
def test_reshard_after_backward_keeps_until_weights_change() -> None:
    model, _ = pair("FULL_SHARD")
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for gathers in (7, 0, 0):  # the forward after a step has gathered for the next one
        _core.trace_reset()
        train_step(model)
        assert counts()["gather"] == gathers
        before = loss_of(model(batch(9)))
        assert counts()["gather"] == gathers
        optimizer.step()
        optimizer.zero_grad()
        _core.trace_reset()
        assert float(loss_of(model(batch(9)))) != float(before)
        assert counts()["gather"] == 7  # anew, as weights changed


@pytest.mark.ranks(2)
def test_reshard_after_forward_by_hand() -> None:
    model, _ = pair("FULL_SHARD")
    train_step(model)
    for flag, gathers in ((False, 7), (True, 13)):  # the root's backward follows its forward
        model.set_reshard_after_forward(flag)
        for _ in range(2):
            _core.trace_reset()
            train_step(model)
        assert counts()["gather"] == gathers, flag


@pytest.mark.ranks(2)
def test_prefetch_lists_are_followed() -> None:
    """The named units are gathered before the naming one computes."""
    model, _ = pair("FULL_SHARD")
    train_step(model)
    a, c = model.blocks[0], model.blocks[2]
    names = {m._fsdpc_unit.name: i for i, m in enumerate(
        m for m in model.modules() if isinstance(m, fsdpc.FSDPModule))}  # fmt: skip
    first, last = names["blocks.0"], names["blocks.2"]
    a.set_modules_to_forward_prefetch([c])
    c.set_modules_to_backward_prefetch([a])
    _core.trace_reset()
    train_step(model)
    events = [(kind, unit, back) for kind, unit, *_, back in _core.trace_events()]
    assert events.index(("gather", last, False)) < events.index(("forward", first, False))
    assert events.index(("gather", first, True)) < events.index(("backward", last, True))
    with pytest.raises(TypeError, match="Linear is not sharded"):
        a.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    other, _ = pair("FULL_SHARD")
    other(batch(0))
    with pytest.raises(ValueError, match="not of one model"):
        a.set_modules_to_forward_prefetch([other])


@pytest.mark.ranks([1, 2, 3])
def test_gradient_divide_factor() -> None:
    model, twin = pair("FULL_SHARD")
    for m in model.modules():
        if isinstance(m, fsdpc.FSDPModule):
            m.set_gradient_divide_factor(8.0)
    train_step(model)
    mean = twin_gradients(twin, lambda m, rank: loss_of(m(batch(rank))).backward())
    compare(model, {n: g * fsdpc.world_size() / 8 for n, g in mean.items()})


@pytest.mark.ranks([1, 2])
def test_no_sync_gives_back_what_was_set() -> None:
    """no_sync inside set_requires_gradient_sync(False) does not switch reductions on."""
    model, _ = pair("FULL_SHARD")
    model.set_requires_gradient_sync(False)
    with model.no_sync():
        train_step(model)
    _core.trace_reset()
    train_step(model)
    assert counts()["reduce"] == 0
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    train_step(model)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks([1, 2])
def test_registered_methods_gather_and_reduce() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 4)

        def encode(self, x: Any) -> Any:
            return self.up(x).tanh()

        def forward(self, x: Any) -> Any:
            return self.encode(x).sum()

    fsdpc.manual_seed(1)
    model = fsdpc.fully_shard(Coder())
    fsdpc.manual_seed(1)
    twin = Coder()
    with pytest.raises(RuntimeError, match="is sharded here"):
        model.encode(batch(0))
    fsdpc.register_fsdp_forward_method(model, "encode")
    loss_of(model.encode(batch(fsdpc.rank()))).backward()
    compare(model, twin_gradients(twin, lambda m, r: loss_of(m.encode(batch(r))).backward()))
    fsdpc.register_fsdp_forward_method(twin, "encode")  # nothing happens to plain modules
    assert "encode" not in twin.__dict__
    with pytest.raises(AttributeError, match="no method 'decode'"):
        fsdpc.register_fsdp_forward_method(model, "decode")


@pytest.mark.ranks([1, 2, 3])
def test_a_list_of_modules_is_one_unit() -> None:
    """One gather in forward for both, one in backward, one reduction."""
    fsdpc.manual_seed(5)
    twin = Net()
    fsdpc.manual_seed(5)
    model = Net()
    fsdpc.fully_shard([model.blocks[0], model.blocks[1]])
    fsdpc.fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        _core.trace_reset()
        train_step(model)
        work = twin_gradients(twin, lambda m, rank: loss_of(m(batch(rank))).backward())
        compare(model, work)
    many = fsdpc.world_size() > 1
    seen = Counter((k, u, b) for k, u, *_, b in _core.trace_events() if k in ("gather", "reduce"))
    wanted = {("gather", 0, False), ("gather", 1, False), ("gather", 1, True),
              ("reduce", 0, True), ("reduce", 1, True)}  # fmt: skip
    assert seen == Counter(wanted if many else ())


@pytest.mark.ranks(2)
def test_plans() -> None:
    def units(model: Any) -> list[str]:
        model(batch(0))
        return sorted(
            m._fsdpc_unit.name for m in model.modules() if isinstance(m, fsdpc.FSDPModule)
        )

    whole = ["Net"]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert units(fsdpc.fully_shard(Net(), plan=wrap.by_class(Block))) == sorted(whole + blocks)
    assert units(fsdpc.fully_shard(Net(), plan=wrap.by_size(60))) == sorted(whole + blocks)
    assert units(fsdpc.fully_shard(Net(), plan=wrap.by_size(1000))) == whole
    plan = {
        "blocks.1": {"reshard_after_forward": False},
        "*.inner": {
            "mp_policy": fsdpc.MixedPrecisionPolicy(param_dtype="bfloat16", output_dtype="float32")
        },
    }
    model = fsdpc.fully_shard(Net(), plan=plan)
    inner = [f"{b}.inner" for b in blocks]
    assert units(model) == sorted([*whole, "blocks.1", *inner])
    assert model.blocks[0].inner.weight.dtype is fsdpc.bfloat16
    assert model.blocks[0].outer.weight.dtype is fsdpc.float32
    assert model.blocks[1].outer.weight._unit.state == "unsharded"
    with pytest.raises(ValueError, match="unknown options"):
        fsdpc.fully_shard(Net(), plan={"blocks.*": {"colour": 1}})


@pytest.mark.ranks([1, 2, 3])
def test_summon_full_params() -> None:
    model, twin = pair("FULL_SHARD")
    with fsdpc.summon_full_params(model):
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.numpy() == q.detach().numpy()).all(), name
        with fsdpc.no_grad():
            model.head.weight.fill_(2.0)
        with pytest.raises(RuntimeError, match="inside itself"):
            with fsdpc.summon_full_params(model):
                pass
        with pytest.raises(RuntimeError, match="called inside summon_full_params"):
            model(batch(0))
    assert (fsdpc.full_tensor(model.head.weight).numpy() == 2.0).all()
    with pytest.raises(KeyError), fsdpc.summon_full_params(model), fsdpc.no_grad():
        model.head.weight.fill_(3.0)
        raise KeyError
    with fsdpc.summon_full_params(model, writeback=False), fsdpc.no_grad():
        model.head.weight.fill_(4.0)
    assert (fsdpc.full_tensor(model.head.weight).numpy() == 2.0).all()
    with fsdpc.summon_full_params(model.blocks[0], recurse=False):
        model.blocks[0].outer.weight.numpy()
        with pytest.raises(RuntimeError, match="is sharded here"):
            model.blocks[0].inner.weight.numpy()
    with fsdpc.no_grad():
        twin.head.weight.fill_(2.0)
    x = batch(fsdpc.rank())
    assert (model(x).detach().numpy() == twin(x).detach().numpy()).all()


@pytest.mark.ranks([1, 2, 3])
def test_hold_communicates_nothing() -> None:
    model, twin = pair("FULL_SHARD")
    optimizer = fsdpc.optim.AdamW(model.parameters())
    train_step(model)
    with model.hold():
        _core.trace_reset()
        with fsdpc.no_grad():
            for number in range(3 * fsdpc.rank() + 1):
                x = batch(fsdpc.rank(), number)
                assert (model(x).numpy() == twin(x).detach().numpy()).all()
            with model.hold():
                model(x)
        assert not counts()
        with pytest.raises(RuntimeError, match="forward with gradients of .* inside hold"):
            model(x)
        with pytest.raises(RuntimeError, match="stepped inside hold"):
            optimizer.step()
        with fsdpc.no_grad():
            model.head.weight.local.fill_(1.5)
            twin.head.weight.fill_(1.5)
    x = batch(fsdpc.rank())
    assert (model(x).detach().numpy() == twin(x).detach().numpy()).all()
    optimizer.zero_grad()
    train_step(model)
    compare(model, twin_gradients(twin, lambda m, rank: loss_of(m(batch(rank))).backward()))
    optimizer.step()


class Normed(nn.Module):
    """Linear, batch norm over ranks, linear: statistics are of all ranks' batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.SyncBatchNorm(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_batch_norm_over_ranks_trains_as_one_rank_with_all_batches(strategy: str) -> None:
    fsdpc.manual_seed(2)
    model = Normed()
    fsdpc.manual_seed(2)
    twin = Normed()
    twin.norm._over_ranks = False
    fsdpc.fully_shard([model.first, model.norm], strategy=strategy)
    fsdpc.fully_shard(model, strategy=strategy)
    optimizers = [fsdpc.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    world = fsdpc.world_size()
    for step in range(3):
        rows = np.random.default_rng(step).standard_normal((4 * world, 4)).astype(np.float32)
        own = fsdpc.tensor(rows[4 * fsdpc.rank() : 4 * fsdpc.rank() + 4])
        for m, x in ((model, own), (twin, fsdpc.tensor(rows))):
            (m(x) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, want = model.state_dict(), twin.state_dict()
    for name, value in want.items():
        np.testing.assert_allclose(
            found[name].detach().numpy(), value.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=name
        )


@pytest.mark.ranks(2)
def test_forward_hooks_of_units_see_gathered_parameters() -> None:
    model = Normed()
    fsdpc.fully_shard(model)
    seen: list[tuple[int, ...]] = []
    before = model.register_forward_pre_hook(
        lambda m, args: seen.append(m.last.weight.numpy().shape)
    )
    model.register_forward_hook(lambda m, args, y: y * 2)
    x = fsdpc.ones(4, 4)
    y = model(x)
    y.sum().backward()
    assert seen == [(2, 6)] and model.last.bias.grad is not None
    before.remove()
    model(x)
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="convert the module before fully_shard"):
        model.to("bfloat16")


@pytest.mark.ranks(2)
def test_backward_hooks_of_units_see_gathered_parameters() -> None:
    model, twin = Normed(), Normed()
    twin.load_state_dict(model.state_dict())
    fsdpc.fully_shard(model.last)
    fsdpc.fully_shard(model)
    seen: list[tuple[int, ...]] = []

    def before(m: Any, grad_output: Any) -> Any:
        seen.append(m.weight.numpy().shape)
        return (grad_output[0] * 2,)

    def after(m: Any, grad_input: Any, grad_output: Any) -> Any:
        seen.append(m.weight.numpy().shape)
        return (grad_input[0] * 3,)

    for last in (model.last, twin.last):
        last.register_full_backward_pre_hook(before)
        last.register_full_backward_hook(after)
    x = fsdpc.ones(4, 4) + fsdpc.arange(4).float()
    for m in (model, twin):
        m(x).sum().backward()
    assert seen == [(2, 6)] * 4
    own, want = (fsdpc.full_grad(p) for p in model.parameters()), twin.parameters()
    for grad, p in zip(own, want, strict=True):
        assert np.allclose(grad.numpy(), p.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_a_plan_counts_batch_norm_and_leaves_its_statistics() -> None:
    model = Normed()
    alone = fsdpc.memory_plan(model, 2, (64, 4))
    assert alone.activation > 64 * 6 * 4  # the linear layer's output at least
    assert model.norm.num_batches_tracked.item() == 0
    assert model.norm.running_mean.tolist() == [0.0] * 6
