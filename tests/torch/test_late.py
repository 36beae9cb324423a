"""What is put into a sharded module, or taken out of it, after ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdpc
from fsdpc.torch import fully_shard, summon_full_params

from .common import (
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full,
    full_parameters,
    loss_of,
    shard,
    train_twins,
    twin,
)


class Adapted(nn.Module):
    """A layer with an adapter, which merges as PEFT's do."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 3, bias=False)
        self.up = nn.Linear(3, base_layer.out_features, bias=False)
        self.merged = False

    def delta(self) -> torch.Tensor:
        """What the adapter adds to the weight."""
        return self.up.weight @ self.down.weight

    def merge(self) -> None:
        """Add it."""
        self.base_layer.weight.data += self.delta()
        self.merged = True

    def unmerge(self) -> None:
        """Take it away again."""
        self.base_layer.weight.data -= self.delta()
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return y if self.merged else y + self.up(self.down(x))


def trained(**options: Any) -> tuple[Any, Any]:
    """A sharded model with adapters, and its twin, after two steps."""
    model = build()
    for block in model.blocks:
        block.linear = Adapted(block.linear)
    plain = twin(model)
    ours = shard(model, **options)
    train(ours, plain)
    return ours, plain


def train(ours: nn.Module, plain: nn.Module) -> None:
    """Two steps of both."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 2)


def merge(model: nn.Module, method: str = "merge") -> None:
    """As ``merge_adapter()`` and ``unmerge_adapter()`` do."""
    for m in model.modules():
        if isinstance(m, Adapted):
            getattr(m, method)()


def unload(model: nn.Module) -> None:
    """As ``unload()`` does."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.linear = block.linear.base_layer


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_adapters_are_merged(whole: bool) -> None:
    """By themselves and inside ``summon_full_params``."""
    ours, plain = trained()
    before = full_parameters(ours)
    if whole:
        with torch.no_grad(), summon_full_params(ours):
            merge(ours)
    else:
        merge(ours)
    merge(plain)
    assert_same_parameters(ours, plain)
    assert not torch.equal(
        full_parameters(ours)["blocks.0.linear.base_layer.weight"],
        before["blocks.0.linear.base_layer.weight"],
    )
    x = batch(0, 0)
    torch.testing.assert_close(ours(x), plain(x))
    for m in (ours, plain):
        merge(m, "unmerge")
    train(ours, plain)


@pytest.mark.ranks([1, 2])
def test_adapters_are_not_merged_in_forward() -> None:
    """As PEFT's layers do that are merged and disabled."""
    ours, plain = trained()
    layer = ours.blocks[1].linear
    layer.register_forward_pre_hook(lambda module, _: module.merge() if early else None)
    early = True
    with pytest.raises(RuntimeError, match=r"Adapted.merge\(\) inside forward.*before"):
        ours(batch(0, 0))
    early = False
    train(ours, plain)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_unloaded(merged: bool) -> None:
    """What is taken out is gathered still, and trained no more."""
    ours, plain = trained()
    for m in (ours, plain):
        if merged:
            merge(m)
        unload(m)
    train(ours, plain)
    values = ours.state_dict()
    assert values.keys() == plain.state_dict().keys()
    doubled = {name: 2 * full(value) for name, value in values.items()}
    ours.load_state_dict({name: 2 * value for name, value in values.items()})
    plain.load_state_dict(doubled)
    train(ours, plain)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_trainable_modules_that_come_late(used: bool) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    if used:
        train(ours, plain)
    x = batch(0, fsdpc.rank())
    last, linear = ours.last, ours.blocks[1].linear
    late = r"'{}' {} of unit '{}' came after fully_shard\(\).*before fully_shard\(\), or freeze"
    ours.last = nn.Linear(20, 9)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=late.format("last.weight", r"\(9, 20\)", "Net")):
            ours(x)
    ours.last = last
    ours.blocks[1].linear = Adapted(linear)
    named = late.format("linear.down.weight", r"\(3, 20\)", "blocks.1")
    with pytest.raises(RuntimeError, match=named):
        ours(x)
    ours.blocks[1].linear = linear
    ours.blocks.append(nn.Linear(20, 20))
    with pytest.raises(RuntimeError, match=late.format("blocks.3.weight", ".*", "Net")):
        ours(x)
    del ours.blocks[3]
    ours.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=late.format("scale", ".*", "Net")):
        ours(x)
    del ours.scale
    train(ours, plain)


@pytest.mark.ranks([1, 2])
def test_frozen_modules_may_come_late() -> None:
    ours, plain = (shard(build()), build())
    train(ours, plain)
    for m in (ours, plain):
        torch.manual_seed(1)
        m.last = nn.Linear(20, 9).requires_grad_(False)
    x = batch(0, 0)
    torch.testing.assert_close(ours(x), plain(x))
    for m in (ours, plain):
        loss_of(m, x).backward()
    average_grads(plain)
    torch.testing.assert_close(ours.first.weight.grad.full_tensor(), plain.first.weight.grad)
    ours.last.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'last.weight' .* came after fully_shard"):
        ours(x)
    for m in (ours, plain):
        m.last = nn.Identity()
    torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("used", [False, True])
def test_parameters_that_are_replaced(used: bool) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    if used:
        train(ours, plain)
    weight, values = ours.last.weight, plain.state_dict()
    for value in (nn.Parameter(torch.ones(5, 20)), nn.Parameter(torch.ones(9, 20)), None):
        ours.last.weight = value
        for _ in range(2):
            with pytest.raises(RuntimeError, match="'last.weight' of unit 'Net' was replaced"):
                ours(batch(0, 0))
        for call in (
            ours.state_dict,
            lambda: ours.load_state_dict(values),
            lambda: ours.apply(print),
        ):
            with pytest.raises(RuntimeError, match="'last.weight' of unit 'Net' was replaced by"):
                call()
        assert ours.last.weight is value
    ours.last.weight = weight
    train(ours, plain)


@pytest.mark.ranks([1, 2])
def test_dtensors_that_replace_parameters_are_copied_in() -> None:
    """With any placement, and with the attributes that frameworks set on them."""
    ours = shard(build())
    held, values = ours.first.weight, torch.arange(140.0).view(20, 7)
    for factor, placements in ((2, held.placements), (3, [Replicate()])):
        whole = values * factor
        given = nn.Parameter(distribute_tensor(whole, held.device_mesh, placements))
        given.mark = factor
        ours.first.weight = given
        assert ours.first.weight is held and held.mark == factor
        assert torch.equal(held.detach().full_tensor(), whole)
        with summon_full_params(ours):
            assert torch.equal(ours.first.weight, whole)
    held.mark = 4
    ours.apply(lambda m: m is not ours.first or setattr(m, "seen", m.weight.mark))
    assert ours.first.seen == 4
    ours(batch(0, 0))


@pytest.mark.ranks([1, 2])
def test_an_ignored_parameter_may_be_replaced() -> None:
    model = build()
    ignored = model.last.weight
    ours = shard(model, ignored_params=[ignored])
    ours(batch(0, 0))
    ours.last.weight = nn.Parameter(torch.ones(9, 20))
    assert ours(batch(0, 0)).shape == (4, 9)


@pytest.mark.ranks([1, 2])
def test_what_is_replaced_inside_of_summon_full_params() -> None:
    ours, plain = (shard(build()), build())
    for m in (ours, plain):
        with summon_full_params(m):
            m.last.weight = nn.Parameter(2 * m.last.weight.detach())
            m.first.weight.data = 2 * m.first.weight.detach()
    train(ours, plain)
    for m in (ours, plain):
        m.apply(lambda m: type(m) is nn.Linear and m.register_parameter("weight", _ones(m)))
    assert_same_parameters(ours, plain)
    before = full_parameters(ours)
    resized = r"'last.weight' of unit 'Net' was \(5, 20\) at fully_shard\(\) and now is \(9, 20\)"
    for way in ("data", "parameter"):
        with pytest.raises(RuntimeError, match=resized), summon_full_params(ours):
            ours.first.weight.data.zero_()
            if way == "data":
                ours.last.weight.data = torch.ones(9, 20)
            else:
                ours.last.weight = nn.Parameter(torch.ones(9, 20))
    for name, value in full_parameters(ours).items():
        assert torch.equal(value, before[name])
    train(ours, plain)


def _ones(module: nn.Linear) -> nn.Parameter:
    return nn.Parameter(torch.ones_like(module.weight))


@pytest.mark.ranks([1, 2])
def test_embeddings_are_resized_before() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.resize_token_embeddings(40, mean_resizing=False)
    for p in model.parameters():
        nn.init.ones_(p)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    ids = torch.arange(8).view(1, 8)
    for m in (model, model.model):
        with pytest.raises(NotImplementedError, match=r"resize_token_.*before fully_shard\(\)"):
            m.resize_token_embeddings(50)
        with pytest.raises(NotImplementedError, match="resize_"), summon_full_params(model):
            m.resize_token_embeddings(50)
    assert model(ids, labels=ids).logits.shape == (1, 8, 40)
    assert model.config.vocab_size == 40


@pytest.mark.ranks([1, 2])
def test_a_dtensor_in_a_parameters_place_is_copied(tmp_path: Any) -> None:
    """As transformers' loaders assign them; optimizers of either object step the parameter."""
    plain = build()
    model = twin(plain)
    for p in model.parameters():
        p.data.zero_()
    ours = shard(model)
    for name, p in list(ours.named_parameters()):
        owner, _, key = name.rpartition(".")
        value = distribute_tensor(plain.get_parameter(name).detach(), p.device_mesh, p.placements)
        setattr(ours.get_submodule(owner), key, nn.Parameter(value))
        assert ours.get_parameter(name) is p
    train(ours, plain)
