"""Parameters of tensor subclasses: gathered by hooks of their own, or as the bytes they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import fsdpc
from fsdpc.torch import (
    MixedPrecisionPolicy,
    fully_shard,
    get_model_state_dict,
    summon_full_params,
)

from .common import join_gloo


class Rounded(torch.Tensor):
    """Values that ranks gather in bfloat16; modules see them in the dtype of computation."""

    seen: list[Any] = []
    writes_all = False

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Rounded.seen.append((mesh, outer_size, outer_stride, type(module), mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        padded = self._data.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        padded[: self._data.shape[0]] = self._data
        return (padded,), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        assert metadata == "metadata" and gathered.dtype is torch.bfloat16
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered[: len(gathered) if self.writes_all else out.shape[0]])
            return None
        made = gathered.to(param_dtype)
        return made, (gathered, made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x._data

        args, kwargs = pytree.tree_map_only(Rounded, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        return inner["_data"]  # as in PyTorch's own test


class OldRounded(Rounded):
    """The same with the signature of torch 2.5, and without rows that pad."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self._data.to(torch.bfloat16),), "metadata"


class WritesAll(Rounded):
    """Writes the rows that pad too, which FSDP2 does not take."""

    writes_all = True


class OwnMemory(torch.Tensor):
    """A subclass that holds no other tensor."""

    writes_all = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor).to(torch.bfloat16),), "metadata"

    fsdp_post_all_gather = Rounded.fsdp_post_all_gather


def own_memory(values: torch.Tensor) -> OwnMemory:
    return values.as_subclass(OwnMemory)


def build(kind: Any = Rounded, sizes: tuple[int, ...] = (6, 5, 4)) -> Any:
    torch.manual_seed(3)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    for layer in layers:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return nn.Sequential(*layers)


def shard(model: Any, by: Any = fully_shard, **options: Any) -> Any:
    for layer in model:
        by(layer, **options)
    return by(model, **options)


def train(model: nn.Module, steps: int = 6, dtype: torch.dtype = torch.float32) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    chance, losses = torch.Generator().manual_seed(1), []
    inputs = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    for _ in range(steps):
        x = torch.randn(8, inputs, generator=chance)
        loss = model(x.to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Rounded, OldRounded, WritesAll, own_memory])
def test_hooks_gather_as_under_fsdp2(tmp_path: Path, kind: Any, reshard: bool) -> None:
    """FSDP2 takes only `Rounded` here: rows are uneven, and it drops hooks of `OwnMemory`."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    options = {"reshard_after_forward": reshard}
    ours = shard(build(kind), **options)
    theirs = shard(build(), fsdp2, **options)
    assert train(ours) == train(theirs)
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_hooks_compute_in_the_dtype_of_the_policy() -> None:
    """Here over the back end "fsdpc"."""
    torch.set_num_threads(1)
    ours = shard(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert ours[0].weight.dtype is torch.float32
    plain = build(lambda values: values)
    for p in plain.parameters():
        p.data = p.data.to(torch.bfloat16)
    x = torch.ones(2, 6)
    assert torch.equal(ours(x), plain(x.to(torch.bfloat16)))
    losses = train(ours, 20, torch.bfloat16)
    assert losses[-1] < losses[0] / 2


@pytest.mark.ranks(2)
def test_the_unit_stores_plain_values(tmp_path: Path) -> None:
    """Optimizers, norms and state dicts see no subclass; full copies are one again."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    ours, plain = shard(build()), build(lambda values: values)
    weight = ours[0].weight
    assert type(weight.to_local()) is torch.Tensor
    assert weight.to_local().shape == (3 - fsdpc.rank(), 6)
    assert torch.equal(weight.full_tensor(), plain[0].weight)
    before = get_model_state_dict(ours)["0.weight"]
    assert type(before) is torch.Tensor and torch.equal(before, plain[0].weight)
    x = torch.ones(2, 6)
    y = ours(x)
    unsharded = ours._fsdpc_state.root.states[1].unsharded[0]
    assert unsharded.untyped_storage().nbytes() == 0  # after forward
    y.sum().backward()
    assert unsharded.untyped_storage().nbytes() == 0
    assert weight.grad.full_tensor().shape == (5, 6) and weight.grad.norm() > 0
    with summon_full_params(ours), torch.no_grad():
        assert isinstance(ours[0].weight, Rounded)
        assert torch.equal(ours[0](x), plain[0](x))  # not rounded, as in an unsharded model
        ours[0].weight._data.zero_()
    assert not weight.full_tensor().any() and torch.equal(ours[0](x), plain[0].bias.expand(2, -1))
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(4)
def test_hooks_get_the_mesh_of_shards_and_the_module(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    Rounded.seen.clear()
    policy = MixedPrecisionPolicy()
    ours = shard(build(), mesh=mesh, mp_policy=policy)
    losses = train(ours)
    seen = Rounded.seen[0]
    assert seen == (mesh["shard"], (5, 6), (6, 1), type(ours[0]), policy)
    theirs = shard(build(), fsdp2, mesh=mesh)
    assert losses == train(theirs)
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, timeout=60)
def test_hooks_do_not_communicate_while_weights_are_held() -> None:
    ours, x = shard(build()), torch.ones(2, 6)
    train(ours, 1)
    y = ours(x).detach()
    with ours.hold(), torch.no_grad():
        if fsdpc.rank() == 0:
            assert torch.equal(ours(x), y) and torch.equal(ours(x), y)
    other = shard(build())
    train(other, 1)
    assert train(ours) == train(other)


@pytest.mark.ranks(2)
def test_hooks_set_on_local_tensors(tmp_path: Path) -> None:
    """FSDP2 also takes hooks that are set on a plain local tensor."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    losses = []
    for by in (fully_shard, fsdp2):
        model = shard(build(lambda values: values, (6, 8, 4)), by)
        for layer in model:
            local = layer.weight._local_tensor
            local._data = local
            local.writes_all = False
            for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
                setattr(local, hook, getattr(OldRounded, hook).__get__(local))
        losses.append(train(model))
    assert losses[0] == losses[1] == train(shard(build(Rounded, (6, 8, 4))))
    dist.destroy_process_group()
    fsdpc.shutdown()


class Scaled(torch.Tensor):
    """Frozen codes with a scale per row, quantised weights of no library."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> Any:
        return Scaled(inner["codes"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.codes * weight.scales, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return Scaled(args[0].codes.detach(), args[0].scales.detach())


def quantise(values: torch.Tensor) -> Scaled:
    scales = values.abs().amax(1, keepdim=True) / 127
    codes = (values / scales).round().to(torch.int8)
    return Scaled(torch.stack([codes] * 8, -1)[..., 0], scales)  # not dense


def build_frozen(to: Any) -> Any:
    """Quantised layers that alternate with trained ones."""
    torch.manual_seed(3)
    frozen = [nn.Linear(6, 5), nn.Linear(4, 6)]
    for layer in frozen:
        layer.requires_grad_(False)
        layer.weight = nn.Parameter(to(layer.weight.detach()), requires_grad=False)
    return nn.Sequential(nn.Sequential(frozen[0], nn.Linear(5, 4)), nn.Sequential(frozen[1]))


@pytest.mark.ranks([1, 2])
def test_frozen_subclasses_are_sharded_as_bytes(tmp_path: Path) -> None:
    """The unsharded parameter is the subclass again, over gathered bytes, and so are copies."""
    torch.set_num_threads(1)
    join_gloo(tmp_path)
    ours, plain = shard(build_frozen(quantise)), build_frozen(quantise)
    weight = ours[0][0].weight
    assert weight.dtype is torch.uint8 and weight.shape == (128,)  # 30 and 20 bytes, aligned
    assert weight.to_local().numel() == 128 // fsdpc.world_size()
    assert train(ours) == train(plain)
    x = torch.ones(2, 6)
    with torch.no_grad(), summon_full_params(ours):
        assert torch.equal(ours(x), plain(x))
        assert torch.equal(ours[0][0].weight.codes, plain[0][0].weight.codes)
        ours[0][0].weight.scales.mul_(2)
        plain[0][0].weight.scales.mul_(2)
    assert torch.equal(ours(x), plain(x))
    dist.destroy_process_group()
    fsdpc.shutdown()


def is_frozen(module: Any, name: str) -> bool:
    return isinstance(module, nn.Linear) and not module.weight.requires_grad


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao(tmp_path: Path, config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.set_num_threads(1)
    join_gloo(tmp_path)

    def build() -> nn.Module:
        model = build_frozen(torch.clone)
        quantization.quantize_(model, getattr(quantization, config)(), is_frozen)
        return model

    ours, plain = shard(build()), build()
    assert ours[0][0].weight.dtype is torch.uint8
    assert train(ours) == train(plain)
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    values = torch.ones(4, 4)

    def layer(value: torch.Tensor, trained: bool = True) -> Any:
        made = nn.Linear(4, 4)
        made.weight = nn.Parameter(value, requires_grad=trained)
        return made

    with pytest.raises(NotImplementedError, match="'weight' .* TwoTensor, .* is trained: .*Freeze"):
        fully_shard(layer(TwoTensor(values, values)))
    with pytest.raises(NotImplementedError, match="'weight' .* Rounded, on the meta device: give"):
        fully_shard(layer(Rounded(values.to("meta"))))
    with pytest.raises(NotImplementedError, match=r"Shard\(dim=1\) for 'weight', a Rounded"):
        fully_shard(layer(Rounded(values)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    late = fully_shard(layer(Rounded(values))).double()
    with pytest.raises(NotImplementedError, match="its unit stores torch.float64, not"):
        late(values.double())
    whole = fully_shard(layer(Rounded(values)), strategy="NO_SHARD")
    with pytest.raises(NotImplementedError, match="'weight' .* gather hooks, and its unit is not"):
        whole(values)
    alone = fully_shard(layer(Rounded(values)))
    alone.set_reduce_scatter_unused_params(True)
    with pytest.raises(NotImplementedError, match="leave out set_reduce_scatter_unused_params"):
        alone(values)
    dist.destroy_process_group()
    fsdpc.shutdown()
