"""What would go wrong silently is an error that names unit and parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdpc
from fsdpc.torch import (
    MixedPrecisionPolicy,
    full_grad,
    fully_shard,
    optim,
    set_model_state_dict,
    summon_full_params,
)

from .common import (
    Net,
    batch,
    build,
    join_gloo,
    loss_of,
    shard,
    train_twins,
    twin,
)


@pytest.mark.ranks([1, 2])
def test_submodules_outside_of_their_unit() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    x = batch(0, 0)
    named = "'Net.last' was called outside of the forward of its unit"
    with pytest.raises(RuntimeError, match=named):
        ours.last(torch.ones(2, 20))
    loss_of(ours, x).backward()
    for call in (lambda: ours.first(x), lambda: ours.blocks[1].linear(torch.ones(2, 20))):
        with pytest.raises(RuntimeError, match="was called outside of the forward of its unit"):
            call()
    assert "forward" in ours.first.__dict__
    ours.unshard()
    assert torch.equal(ours.first(x), plain.first(x))
    ours.reshard()
    with summon_full_params(ours):
        assert torch.equal(ours.first(x), plain.first(x))
        with pytest.raises(RuntimeError, match=r"FSDPNet was called .*\s*summon_full_params"):
            ours(x)
    with pytest.raises(RuntimeError, match="'Net.first' was called"):
        ours.first(x)
    assert ours.blocks[0](torch.ones(2, 20)).shape == (2, 20)  # a unit by itself


@pytest.mark.ranks(2)
def test_a_forward_of_the_users_own_stays() -> None:
    ours = shard(build())
    calls = []
    old = ours.first.forward

    def mine(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return type(ours.first).forward(ours.first, x)

    ours.first.forward = mine
    loss_of(ours, batch(0, 0)).backward()
    loss_of(ours, batch(0, 0)).backward()
    assert len(calls) == 2 and ours.first.forward is mine and old is not mine


@pytest.mark.ranks(2)
def test_an_embedding_does_not_look_up_other_rows() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="no forward of its own"):
        fully_shard(nn.ModuleList(model))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    for p in model.parameters():
        nn.init.ones_(p)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="'Sequential.0' was called outside"):
        model[0](torch.tensor([1]))


@pytest.mark.ranks(1)
def test_fully_shard_inside_forward() -> None:
    class Late(Net):
        around = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fully_shard(self if self.around else self.blocks[0])
            return super().forward(x)

    late = Late()
    with pytest.raises(RuntimeError, match=r"fully_shard\(Block\) inside the forward of Late"):
        late(batch(0, 0))
    late.around = True
    with pytest.raises(RuntimeError, match=r"fully_shard\(Late\) inside the forward of Late"):
        late(batch(0, 0))
    fully_shard(late.blocks[1])
    late.around = False
    with pytest.raises(RuntimeError, match=r"fully_shard\(Block\) inside the forward of FSDPLate"):
        fully_shard(late)(batch(0, 0))

    class Makes(nn.Module):
        """Shards what is not part of it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fully_shard(nn.Linear(7, 7))(x)

    assert Makes()(batch(0, 0)).shape == (4, 7)


@pytest.mark.ranks(1)
def test_fully_shard_inside_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: fully_shard(nn.Linear(2, 2)) and None)
    with pytest.raises(RuntimeError, match="fully_shard inside backward"):
        x.sum().backward()


@pytest.mark.ranks(1)
def test_a_model_elsewhere_is_named() -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:0")  # type: ignore[assignment]

    model = nn.Linear(2, 2)
    model._parameters["weight"] = Elsewhere(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="'weight' is on cuda:0, 'bias' is on cpu"):
        fully_shard(model)
    model._parameters["bias"] = Elsewhere(torch.zeros(2))
    with pytest.raises(ValueError, match="to be sharded on a GPU, and the engine computes on the"):
        fully_shard(model)


@pytest.mark.ranks(1)
def test_lists_that_are_no_unit() -> None:
    model = build()
    with pytest.raises(ValueError, match="got an empty list"):
        fully_shard([])
    with pytest.raises(ValueError, match="given one Block twice"):
        fully_shard([model.blocks[0], model.blocks[1], model.blocks[0]])
    for both in ([model, model.blocks[1]], [model.blocks[1], model]):
        with pytest.raises(ValueError, match="given a Net and its own 'blocks.1' in one list"):
            fully_shard(both)
    assert type(model) is Net
    fully_shard(model)
    with pytest.raises(ValueError, match="Block is inside FSDPNet, .* 'norm.weight': call fully_s"):
        fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="Block is inside FSDPNet"):
        fully_shard([model.blocks[2], model.blocks[0]])


@pytest.mark.ranks(1)
def test_options_of_another_type_are_named() -> None:
    linear = nn.Linear(2, 2)
    half = {"param_dtype": torch.float16}
    with pytest.raises(TypeError, match="mp_policy takes a MixedPrecisionPolicy, got dict"):
        fully_shard(linear, mp_policy=half)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mp_policy.reduce_dtype takes a torch.dtype.*'bf16'"):
        fully_shard(linear, mp_policy=MixedPrecisionPolicy(reduce_dtype="bf16"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ignored_params takes parameters, got str 'weight'"):
        fully_shard(linear, ignored_params=["weight"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="ignored_params takes an iterable of parameters"):
        fully_shard(linear, ignored_params=linear.weight)
    assert type(linear) is nn.Linear


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stays", [False, True])
def test_writes_inside_of_forward(stays: bool) -> None:
    """On several ranks the page is read-only; alone, it is found by the end of forward."""

    class Writing(nn.Linear):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scale != 1:
                with torch.no_grad():
                    self.weight.mul_(self.scale)
            return super().forward(x)

    model: Any = Writing(3, 2)
    before = twin(model)
    fully_shard(model, reshard_after_forward=not stays)
    x, lost = torch.ones(1, 3), "of unit 'Writing' was written in place .* write is lost"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=lost):
            model(x)
    model.scale = before.scale = 1
    assert torch.equal(model(x), before(x))
    model.unshard()
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(RuntimeError, match=lost):
        model.reshard()
    y = model(x)
    assert torch.equal(y, before(x))
    y.sum().backward()
    assert model.weight.grad is not None
    with torch.no_grad():
        model.weight.zero_()  # the rows
    assert not torch.equal(model(x), before(x))


class Gathers(torch.Tensor):
    """As low precision libraries hook into FSDP2's gathers."""

    def fsdp_pre_all_gather(self, mesh: Any) -> None: ...


@pytest.mark.ranks(1)
def test_parameters_that_are_no_plain_tensors(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.two_tensor import TwoTensor

    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    values = torch.ones(4, 4)
    for value, error, what in (
        (DTensor.from_local(values.to(torch.int8), mesh["tp"]), TypeError, "torch.int8 cannot"),
        (TwoTensor(values, values), NotImplementedError, "TwoTensor, a subclass"),
        (values.as_subclass(Gathers), NotImplementedError, "Gathers, whose fsdp_pre"),
        (values.to(torch.complex64), TypeError, "torch.complex64 cannot be sharded"),
    ):
        model: Any = nn.Sequential(nn.Linear(4, 4))
        model[0].weight = nn.Parameter(value, requires_grad=value.dtype is not torch.int8)
        with pytest.raises(error, match=f"parameter '0.weight'.*{what}.* with ignored_params"):
            fully_shard(model, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"], ignored_params={model[0].weight})
        assert type(model[0].weight) is type(nn.Parameter(value, requires_grad=False))
    torch.distributed.destroy_process_group()


@pytest.mark.ranks(1)
def test_errors_have_the_types_of_fsdp2() -> None:
    ours = fully_shard(nn.Linear(4, 4))
    plain: Any = nn.Linear(4, 5)
    with pytest.raises(ValueError, match="gives 'x' for 'weight'"):
        fully_shard(plain, shard_placement_fn=lambda p: "x")
    for call in (ours.set_modules_to_forward_prefetch, ours.set_modules_to_backward_prefetch):
        with pytest.raises(ValueError, match="Linear is not sharded"):
            call([plain])
    with pytest.raises(ValueError, match="True or False, got 2"):
        ours.set_reshard_after_forward(2)
    for wrong, error in (("2", TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match=f"max_input_buffers takes .*{wrong}"):
            ours.set_reduce_scatter_max_input_buffers(wrong)


@pytest.mark.ranks(2)
def test_hooks_that_would_never_run() -> None:
    """Gradients arrive at full parameters; hooks of this rank's rows run after the reduction."""
    early = build()
    early.last.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match="'last.weight' has hooks, which would go with it"):
        fully_shard(early)
    ours = shard(build())
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match=r"on rows .* of '.*norm.bias' \(20,\), where"
        ):
            ours.blocks[1].norm.bias.register_hook(lambda grad: grad * 2)
        ours(batch(0, fsdpc.rank()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, optim.AdamW])
def test_torchs_own_state_dict_functions(make: Any, stepped: bool) -> None:
    """They gather parameters and states, which are DTensors."""
    from torch.distributed.checkpoint import state_dict

    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = make(ours.parameters()), torch.optim.AdamW(plain.parameters())
    if stepped:
        train_twins(ours, plain, optimizers, 1)
        for m in (ours, plain):
            m.zero_grad()
    whole = state_dict.StateDictOptions(full_state_dict=True)
    values = state_dict.get_model_state_dict(ours, options=whole)
    for name, value in plain.state_dict().items():
        assert type(values[name]) is torch.Tensor
        torch.testing.assert_close(values[name], value)
    states = [
        state_dict.get_optimizer_state_dict(m, optimizer, options=whole)["state"]
        for m, optimizer in zip((ours, plain), optimizers, strict=True)
    ]
    assert states[0].keys() == states[1].keys()
    for name, state in states[1].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(states[0][name][key]) is torch.Tensor
            torch.testing.assert_close(states[0][name][key], state[key], rtol=1e-4, atol=1e-6)
    linear = nn.Linear(2, 2)
    named = state_dict.get_optimizer_state_dict(linear, torch.optim.AdamW(linear.parameters()))
    assert named["state"]["weight"]["exp_avg"].shape == (2, 2)


@pytest.mark.ranks(2)
def test_gradients_know_the_whole() -> None:
    ours = shard(build())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    for p in ours.parameters():
        grad: Any = p.grad
        full = grad.full_tensor()
        assert full.shape == p.fsdpc.shape == grad.shape and torch.equal(full, full_grad(p))
        assert type(grad.to_local()) is torch.Tensor
        assert grad.to_local().shape == p.to_local().shape
        torch.testing.assert_close(full.norm(), grad.norm().full_tensor())
        for kept in (grad.clone(), grad.detach(), 2 * grad / 2):
            assert torch.equal(kept.full_tensor(), full)


@pytest.mark.ranks([1, 2])
def test_wrappers_that_take_rows_for_parameters(tmp_path: Any) -> None:
    join_gloo(tmp_path)
    for used in (False, True):
        ours = shard(build())
        if used:
            loss_of(ours, batch(0, 0)).backward()
        before = ours.state_dict()
        around = nn.Sequential(ours, nn.Linear(5, 5))
        for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel):
            for model in (ours, ours.blocks[0], around):
                with pytest.raises(RuntimeError, match="around .*, which fsdpc shards: this rank"):
                    wrap(model)
        for name, value in ours.state_dict().items():
            assert torch.equal(value, before[name])
    plain = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    for model in (plain, nn.Sequential(plain, nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="holds a .*DistributedDataParallel.*without it"):
            fully_shard(model)
    dist.destroy_process_group()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("over", ["all", "around", "unit", "layer", "replicate"])
def test_torchs_fully_shard_over_ours_is_named(tmp_path: Any, over: str, used: bool) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard as theirs

    join_gloo(tmp_path)
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    if used:
        train_twins(ours, plain, optimizers, 1)
    modules = {"around": nn.Sequential(ours, nn.ReLU()), "unit": ours.blocks[0], "layer": ours.last}
    again = over in ("all", "unit")
    wrong = "already been applied" if again else r"would shard rows .* fsdpc shards already: leave"
    wrong = "already managed by `fully_shard`" if over == "replicate" else wrong
    with pytest.raises(AssertionError if again else RuntimeError, match=wrong):
        (replicate if over == "replicate" else theirs)(modules.get(over, ours))
    train_twins(ours, plain, optimizers, 2)
    dist.destroy_process_group()


@pytest.mark.ranks([1, 2])
def test_memory_that_parameters_share_is_named() -> None:
    flat = torch.zeros(12)
    apart, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    apart.weight, apart.bias = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:6])
    fully_shard(apart)
    shared.weight, shared.bias = nn.Parameter(flat[6:10].view(2, 2)), nn.Parameter(flat[9:11])
    with pytest.raises(ValueError, match="'weight' and 'bias' are over the same memory"):
        fully_shard(shared)


@pytest.mark.ranks([1, 2])
def test_complex_values_are_refused() -> None:
    ours = shard(build())
    before = ours.state_dict()
    given = {**before, "last.weight": before["last.weight"] + 1j}
    for load in (ours.load_state_dict, lambda sd: set_model_state_dict(ours, sd)):
        with pytest.raises(TypeError, match="complex64 for 'last.weight', which is torch.float32"):
            load(given)
    part = nn.Sequential(ours)
    with pytest.raises(TypeError, match="complex64 for '0.last.weight'"):
        part.load_state_dict({f"0.{name}": value for name, value in given.items()})
    with pytest.raises(RuntimeError, match=r"of other shapes or complex \['last.weight'\]"):
        set_model_state_dict(ours, given if fsdpc.rank() == 0 else {}, rank0_only=True)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.ranks(1)
def test_offload_policies() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    with pytest.raises(TypeError, match="offload_policy takes an OffloadPolicy .*got int: 5"):
        fully_shard(nn.Linear(2, 2), offload_policy=5)
    fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())
