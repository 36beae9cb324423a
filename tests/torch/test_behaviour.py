"""What scripts do beside the plain loop: the behaviours of PyTorch's own FSDP2 suite."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import FSDPModule, fully_shard, register_fsdp_forward_method

from .common import (
    ATOL,
    RTOL,
    Block,
    Net,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full_parameters,
    loss_of,
    shard,
    twin,
)


def assert_same_grads(ours: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Full gradients, by name; collective."""
    tolerance = tolerance or {"rtol": RTOL, "atol": ATOL}
    theirs = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        grad = fsdpc.torch.full_grad(p)
        expected = theirs[name].grad
        assert (grad is None) == (expected is None), name
        if grad is not None:
            torch.testing.assert_close(
                grad, expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def end_step(ours: Any, plain: nn.Module) -> None:
    """The gradients of both agree; the next step begins with none."""
    assert_same_grads(ours, plain)
    ours.zero_grad()
    plain.zero_grad()


def both(ours: Any, plain: nn.Module, step: int = 0) -> None:
    """One backward of each, the plain one on averaged gradients."""
    x = batch(step, fsdpc.rank())
    for model in (ours, plain):
        loss_of(model, x).backward()
    average_grads(plain)


def assert_same_steps(ours: Any, plain: nn.Module) -> None:
    """Three backwards of each end with the same gradients."""
    for step in range(3):
        both(ours, plain, step)
        end_step(ours, plain)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("shape", [(5, 3), (16, 15), (7, 15), (15, 3), (1, 4)])
def test_uneven_shapes(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0])
    ours = fully_shard(twin(plain))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, plain)]
    for step in range(3):
        x = torch.randn(4, shape[1], generator=torch.Generator().manual_seed(step + fsdpc.rank()))
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            if model is plain:
                average_grads(plain)
            optimizer.step()
    assert_same_parameters(ours, plain)


class Checkpointed(Net):
    """Blocks under activation checkpointing."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class InnerCheckpointed(Block):
    """A unit that checkpoints what is inside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["reentrant", "not", "inside", "root"])
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing(kind: str, reshard: bool) -> None:
    model: Any = build()
    plain = twin(model)
    if kind == "inside":
        for block in model.blocks:
            block.__class__ = InnerCheckpointed
    elif kind != "root":
        model.__class__ = Checkpointed
        model.reentrant = kind == "reentrant"
    ours = shard(model, reshard_after_forward=reshard)
    for step in range(3):
        x = batch(step, fsdpc.rank())
        y = checkpoint(ours, x, use_reentrant=False) if kind == "root" else ours(x)
        (y**2).mean().backward()
        loss_of(plain, x).backward()
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks(2)
def test_several_forwards_before_one_backward() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        total = sum(loss_of(m, batch(k, fsdpc.rank())) for k in range(3))
        total.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_backwards_interleaved_with_forwards() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        losses = [loss_of(m, batch(k, fsdpc.rank())) for k in range(2)]
        for loss in losses:
            loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


class Twice(Net):
    """The first block runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.ranks(2)
def test_one_module_twice() -> None:
    model: Any = build()
    model.__class__ = Twice
    plain = twin(model)
    ours = shard(model)
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_no_grad_evaluation_between_steps() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        both(ours, plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                x = batch(9, 0)
                torch.testing.assert_close(ours(x), plain(x), rtol=RTOL, atol=ATOL)


@pytest.mark.ranks(2)
def test_frozen_and_unfrozen_later() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        for p in m.blocks[1].parameters():
            p.requires_grad_(False)
        m.first.weight.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for m in (ours, plain):
                for p in m.parameters():
                    p.requires_grad_(True)
        both(ours, plain, step)
        end_step(ours, plain)


class Tied(nn.Module):
    """A head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = Block(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


@pytest.mark.ranks(2)
def test_tied_parameters() -> None:
    torch.manual_seed(0)
    plain = Tied()
    ours = twin(plain)
    fully_shard(ours.block)
    fully_shard(ours)
    assert ours.head.weight is ours.embed.weight
    ids = torch.arange(5) + fsdpc.rank()
    for m in (ours, plain):
        m(ids).square().mean().backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
    other = Tied()
    fully_shard(other.embed)
    with pytest.raises(ValueError, match=r"'head.weight' is sharded already"):
        fully_shard(other)


@pytest.mark.ranks(2)
def test_a_list_is_one_unit() -> None:
    model = build()
    plain = twin(model)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.first, model.last])
    ours: Any = fully_shard(model)
    assert ours.first._fsdpc_unit is ours.last._fsdpc_unit
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_unshard_and_reshard() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    handle = ours.unshard(async_op=True)
    handle.wait()
    assert torch.equal(ours.first.weight, plain.first.weight)
    assert isinstance(ours.blocks[0], FSDPModule)
    assert ours.blocks[0].linear.weight.shape == (10, 20)
    ours.reshard()
    assert ours.last.weight.shape == ((3, 20), (2, 20))[fsdpc.rank()]
    both(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_no_sync() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    counts = []
    for micro in range(3):
        ours.set_requires_gradient_sync(micro == 2)
        fsdpc._core.trace_reset()
        x = batch(0, fsdpc.rank(), micro)
        loss_of(ours, x).backward()
        loss_of(plain, x).backward()
        counts.append(fsdpc._core.trace_counts()["reduce"])
        assert (ours.last.weight.grad is None) == (micro < 2)
    assert counts == [0, 0, 4]
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_hybrid_and_replicated() -> None:
    for shape in ((2, 1), (1, 2)):
        model = build()
        plain = twin(model)
        ours = shard(model, mesh=fsdpc.init_device_mesh("cpu", shape))
        both(ours, plain)
        assert_same_grads(ours, plain)
    model = build()
    plain = twin(model)
    for block in model.blocks:
        fully_shard(block, strategy="NO_SHARD")
    ours = fully_shard(model, strategy="NO_SHARD")
    assert ours.first.weight.shape == (20, 7)
    both(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(4)
def test_hybrid_two_by_two() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model, mesh=fsdpc.init_device_mesh("cpu", (2, 2)))
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_state_dict_is_full() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for _ in range(2):
        state = ours.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        both(ours, plain)
    fresh = build(seed=8)
    target = shard(twin(fresh))
    target.load_state_dict(plain.state_dict())
    assert_same_parameters(target, plain, rtol=0, atol=0)
    partial = {k: v for k, v in fresh.state_dict().items() if k.startswith("first")}
    result = target.load_state_dict(partial, strict=False)
    assert "last.weight" in result.missing_keys
    assert torch.equal(target.first.weight.full_tensor(), fresh.first.weight)
    assert torch.equal(target.last.weight.full_tensor(), plain.last.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(partial)
    loss_of(target, batch(0, 0)).backward()
    full = fsdpc.torch.get_model_state_dict(ours, rank0_only=True)
    assert len(full) == (len(plain.state_dict()) if fsdpc.rank() == 0 else 0)


class Around(nn.Module):
    """A unit with a parameter of its own, and modules that are none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = build(seed=seed)
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x)) * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_state_dicts_of_parts_are_full_too(when: str) -> None:
    """Parts that are no unit, in front of the first forward and behind it."""
    plain = nn.ModuleDict({"model": Around(3), "more": nn.Linear(3, 3)})
    ours: Any = twin(plain)
    fresh = nn.ModuleDict({"model": Around(9), "more": nn.Linear(3, 3)})
    for block in ours.model.net.blocks:
        fully_shard(block)
    fully_shard(ours.model)
    if when == "after":
        loss_of(ours.model, batch(0, fsdpc.rank())).backward()
    for source in (plain, fresh):
        if source is fresh:
            for part in ("model.net.blocks", "model.net.first", "model.net.last", "model.head"):
                ours.get_submodule(part).load_state_dict(fresh.get_submodule(part).state_dict())
            ours.load_state_dict(fresh.state_dict())
        for part in ("", "model", "model.net", "model.net.blocks", "model.head", "more"):
            found, expected = (m.get_submodule(part).state_dict() for m in (ours, source))
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected), part
    torch.testing.assert_close(ours.model(batch(0, 0)), fresh.model(batch(0, 0)))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        ours.model.head.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})


@pytest.mark.ranks(2)
def test_summon_full_params() -> None:
    ours = shard(build())
    with fsdpc.torch.summon_full_params(ours):
        assert ours.first.weight.shape == (20, 7)
        with torch.no_grad():
            ours.first.weight.fill_(0.5)
    assert (ours.first.weight.full_tensor() == 0.5).all()
    loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_exceptions_leave_a_usable_model() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    ours.zero_grad()
    plain.zero_grad()
    with pytest.raises(RuntimeError):
        ours(torch.randn(4, 8))

    def stop(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    middle = []
    handle = ours.blocks[1].register_forward_hook(lambda m, i, o: middle.append(o))
    y = ours(batch(0, fsdpc.rank()))
    handle.remove()
    middle[0].register_hook(stop)
    with pytest.raises(KeyError):
        y.sum().backward()
    both(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_other_forward_methods() -> None:
    class Head(nn.Linear):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square() + self.weight.sum()

    torch.manual_seed(0)
    plain = Head(4, 3)
    ours = fully_shard(twin(plain))
    register_fsdp_forward_method(ours, "score")
    x = torch.ones(2, 4) * (fsdpc.rank() + 1)
    for m in (ours, plain):
        m.score(x).sum().backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_gradient_penalty_is_refused() -> None:
    ours = shard(build(), reshard_after_forward=True)
    x = batch(0, fsdpc.rank()).requires_grad_()
    y = ours(x).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.square().sum().backward()


@pytest.mark.ranks(2)
def test_unused_parameters_have_no_gradient() -> None:
    class Branch(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.blocks[fsdpc.rank() if self.training else 0](x)

    model: Any = build()
    model.__class__ = Branch
    plain = twin(model)
    ours = fully_shard(model)
    for m in (ours, plain):
        m.eval()
    both(ours, plain)
    assert_same_grads(ours, plain)
    ours.zero_grad()
    ours.train()
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    assert ours.blocks[0].linear.weight.grad is not None
    assert ours.blocks[1].linear.weight.grad is not None
    assert ours.blocks[2].linear.weight.grad is None


@pytest.mark.ranks(2)
def test_hooks_of_pieces_run_after_reduction() -> None:
    """An optimizer in backward takes the same steps to the bit."""
    results = []
    for in_backward in (False, True):
        ours = shard(build())
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in ours.parameters()}
        if in_backward:
            for p in ours.parameters():
                p.register_post_accumulate_grad_hook(
                    lambda p, o=optimizers: (o[p].step(), o[p].zero_grad())[0]
                )
        for step in range(3):
            loss_of(ours, batch(step, fsdpc.rank())).backward()
            if not in_backward:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
        results.append(full_parameters(ours))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.ranks(2)
def test_structured_outputs_and_views() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 6)

        def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
            y = self.linear(x)
            return {"out": (y[:, :3], [y[:, 3:]]), "n": 3, "text": "t", "x": scale["s"] * 2}

    torch.manual_seed(0)
    plain = Odd()
    ours = fully_shard(twin(plain))
    for m in (ours, plain):
        x = batch(0, fsdpc.rank()).requires_grad_()
        out = m(x, scale={"s": x.mean() * 3})
        a, (b,) = out["out"]
        a += 1.0
        (a.sum() * b.sum() + out["x"]).backward()
        m.input_grad = x.grad
    average_grads(plain)
    assert_same_grads(ours, plain)
    torch.testing.assert_close(ours.input_grad, plain.input_grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", ["zero_grad", "backward", "norm", "clip", "step"])
def test_a_deleted_model_frees_everything(after: str) -> None:
    ours = shard(build())
    loss_of(ours, batch(0, 0)).backward()
    grad = next(ours.parameters()).grad if after == "norm" else None
    optimizer = fsdpc.torch.optim.AdamW(ours.parameters()) if after == "step" else None
    if after == "zero_grad":
        ours.zero_grad()
    elif grad is not None:
        grad.norm()
    elif after != "backward":
        fsdpc.torch.clip_grad_norm_(ours.parameters(), 1e-3)
    if optimizer is not None:
        optimizer.step()
    before = fsdpc.memory_stats()
    assert before["master_bytes"] > 0
    dead = weakref.ref(ours._fsdpc_state)
    del ours, optimizer
    gc.collect()
    assert dead() is None
    if grad is not None:
        assert grad.clone().sum() == grad.sum()
        with pytest.raises(RuntimeError, match="whose model was deleted"):
            grad.norm()
        del grad
    assert fsdpc.memory_stats()["master_bytes"] == 0


@pytest.mark.ranks(2)
def test_parameters_replaced_later_are_named() -> None:
    ours = shard(build())
    ours.first.weight = nn.Parameter(torch.zeros(20, 7))
    with pytest.raises(RuntimeError, match=r"'first.weight' of unit 'Net' was replaced"):
        ours(batch(0, 0))


@pytest.mark.ranks(2)
def test_a_plan_hands_the_strategy_on() -> None:
    model = fully_shard(build(), plan={"blocks.*": {}}, strategy="SHARD_OPTIM")
    assert model._fsdpc_unit.keep_grads
    assert all(block._fsdpc_unit.keep_grads for block in model.blocks)
