"""FSDP1 scripts: the class, its policies, contexts and state dicts."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdpc.torch import FullyShardedDataParallel as FSDP
from fsdpc.torch.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from .common import (
    Block,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    loss_of,
    train_twins,
    twin,
)

POLICIES: dict[str, Any] = {
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=150),
    "modules": ModuleWrapPolicy({Block}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training(policy: str, strategy: str) -> None:
    model = build()
    plain = twin(model)
    ours = FSDP(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=POLICIES[policy],
        cpu_offload=CPUOffload(offload_params=True),
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
        use_orig_params=True,
    )
    units = {"transformer": 4, "size": 5, "modules": 4}[policy]
    assert len({m._fsdpc_unit for m in FSDP.fsdp_modules(ours)}) == units
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 4)


@pytest.mark.ranks(2)
def test_torch_policies_and_meta() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as Theirs

    ours = FSDP(build(), auto_wrap_policy=Theirs({Block}))
    assert len(FSDP.fsdp_modules(ours)) == 4
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def init(m: nn.Module) -> None:
        m.to_empty(device="cpu", recurse=False)
        torch.manual_seed(1)
        m.reset_parameters()  # type: ignore[operator]

    made = FSDP(meta, param_init_fn=init, sync_module_states=True)
    assert made[0].weight.full_tensor().abs().max() <= 0.5
    made(torch.ones(1, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_contexts_and_state_dicts() -> None:
    model = build()
    plain = twin(model)
    ours = FSDP(
        model,
        auto_wrap_policy=POLICIES["modules"],
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        ),
    )
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    with ours.no_sync():
        ours(batch(0, 0)).float().sum().backward()
        assert ours.first.weight.grad is None
    ours(batch(1, 0)).float().sum().backward()
    assert ours.clip_grad_norm_(0.1) > 0
    with FSDP.summon_full_params(ours, writeback=False):
        assert ours.first.weight.shape == (20, 7)
    optimizer.step()
    with FSDP.state_dict_type(
        ours, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)
    ):
        state = ours.state_dict()
        assert len(state) == (len(plain.state_dict()) if fsdpc.rank() == 0 else 0)
    full = ours.state_dict()
    states = FSDP.optim_state_dict(ours, optimizer)
    assert states["state"]["last.weight"]["exp_avg"].shape == (5, 20)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        own = {k: v.clone() for k, v in ours.state_dict().items()}
        assert own["first.weight"].shape == (20, 7)
        assert own["first.weight"].to_local().shape == (10, 7)
        ours.load_state_dict(own)
    plain.load_state_dict(full)
    fresh = FSDP(build(seed=5), auto_wrap_policy=POLICIES["modules"])
    fresh.load_state_dict(full)
    assert_same_parameters(fresh, plain, rtol=0, atol=0)
    resumed = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(fresh, resumed, states))
    assert torch.equal(
        resumed.state[fresh.first.weight]["exp_avg"],
        optimizer.state[ours.first.weight]["exp_avg"],
    )
    loss_of(fresh, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_the_module_is_sharded_in_place() -> None:
    model: Any = build()
    for i in range(3):
        model.blocks[i] = FSDP(model.blocks[i])
    ours = FSDP(model)
    assert ours is model and isinstance(ours, FSDP) and isinstance(ours, type(build()))
    assert list(ours.state_dict()) == list(build().state_dict())
    assert FSDP.fsdp_modules(ours, root_only=True) == [ours] and len(FSDP.fsdp_modules(ours)) == 4
    inside = ours.module
    assert not isinstance(inside, FSDP) and not hasattr(inside, "module")
    x = batch(0, 0)
    assert torch.equal(inside(x), ours(x)) and ours.check_is_root()
    assert not ours.blocks[0].check_is_root()
    with pytest.raises(TypeError, match="make a plain one"):
        type(ours)(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="sharded already"):
        FSDP(ours)

    def ones(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            assert m.weight.shape == (m.out_features, m.in_features)
            nn.init.ones_(m.weight)

    ours.apply(ones)
    assert (ours.blocks[1].linear.weight.full_tensor() == 1).all()
    assert (ours.first.weight.full_tensor() == 1).all()
    with enable_wrap(wrapper_cls=FSDP):
        assert isinstance(wrap(nn.Linear(2, 2)), FSDP)
    assert type(wrap(nn.Linear(2, 2))) is nn.Linear


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_summoned_gradients(kind: str) -> None:
    """Full ones inside; what is written to them counts in the next step."""
    model = build()
    plain = twin(model)
    ours = FSDP(model, auto_wrap_policy=POLICIES["modules"])
    maker: Any = torch.optim.SGD if kind == "theirs" else fsdpc.torch.optim.SGD
    optimizers = (maker(ours.parameters(), lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5))
    x = batch(0, fsdpc.rank())
    for m in (ours, plain):
        loss_of(m, x).backward()
    average_grads(plain)
    with FSDP.summon_full_params(ours, with_grads=True):
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1.3e-6, atol=1e-6)
            p.grad.mul_(3)
            q.grad.mul_(3)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(ours, plain)
    ours.zero_grad()
    with FSDP.summon_full_params(ours, writeback=False, with_grads=True):
        assert all(p.grad is None for p in ours.parameters())


@pytest.mark.ranks(2)
def test_scaled_losses() -> None:
    """What overflows on one rank is skipped on all, and the scale is halved on all."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

    from fsdpc.torch.sharded_grad_scaler import ShardedGradScaler

    expected = inspect.signature(Theirs.__init__).parameters
    assert list(inspect.signature(ShardedGradScaler.__init__).parameters) == list(expected)
    ours = FSDP(build(), auto_wrap_policy=POLICIES["modules"])
    plain = build()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    for overflow in (True, False):
        x = batch(0, fsdpc.rank())
        optimizer.zero_grad()
        scaler.scale(loss_of(ours, x)).backward()
        if overflow and fsdpc.rank() == 1:
            ours.last.weight.grad.to_local()[0, 0] = float("inf")  # in rows that rank 0 has not
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        if overflow:
            assert_same_parameters(ours, plain, rtol=0, atol=0)
    loss_of(plain, batch(0, fsdpc.rank())).backward()
    average_grads(plain)
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert_same_parameters(ours, plain)


class Normed(nn.Module):
    """A batch norm between layers, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)
        self.register_buffer("shift", torch.full((5,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shift.dtype is torch.bfloat16  # type: ignore[union-attr]
        return self.last(self.norm(self.first(x))) + self.shift


@pytest.mark.ranks(2)
def test_batch_norms_keep_their_dtype() -> None:
    torch.manual_seed(0)
    low = torch.bfloat16
    ours = FSDP(
        Normed(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(low, torch.float32, low),
    )
    y = ours(batch(0, 0))
    assert y.dtype is low
    assert isinstance(ours.norm, FSDP) and ours.norm.running_mean.dtype is torch.float32
    assert ours.norm._fsdpc_state.policy.param_dtype is torch.float32
    y.float().sum().backward()
    state = ours.state_dict()
    assert state["shift"].dtype is torch.float32 and ours.shift.dtype is low


@pytest.mark.ranks(2)
def test_custom_policies_choose_options() -> None:
    def choose(m: nn.Module) -> Any:
        if isinstance(m, Block):
            return {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
        return isinstance(m, nn.Linear) and m.out_features == 5

    from torch.distributed.fsdp.wrap import CustomPolicy as Theirs

    for policy in (CustomPolicy(choose), Theirs(choose)):
        ours = FSDP(build(), auto_wrap_policy=policy)
        assert len(FSDP.fsdp_modules(ours)) == 5
        assert ours.blocks[0]._fsdpc_state.policy.param_dtype is torch.bfloat16
        assert ours.last._fsdpc_state.policy.param_dtype is None
    wrong = CustomPolicy(lambda m: isinstance(m, Block) and {"forward_prefetch": True})
    with pytest.raises(NotImplementedError, match=r"\['forward_prefetch'\] for Block"):
        FSDP(build(), auto_wrap_policy=wrong)


@pytest.mark.ranks(2)
def test_rank_0_alone_has_the_weights() -> None:
    """As large models are loaded: meta elsewhere, memory unit by unit, values and buffers sent."""
    if fsdpc.rank() == 0:
        torch.manual_seed(3)
        model = Normed()
        model.norm.running_mean.fill_(0.25)  # type: ignore[union-attr]
    else:
        with torch.device("meta"):
            model = Normed()
    made = []

    def empty(m: nn.Module) -> None:
        m.to_empty(device="cpu", recurse=False)
        made.append(type(m).__name__)

    ours = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        param_init_fn=empty,
        sync_module_states=True,
    )
    assert len(made) == (0 if fsdpc.rank() == 0 else 4)
    torch.manual_seed(3)
    plain = Normed()
    plain.norm.running_mean.fill_(0.25)  # type: ignore[union-attr]
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_checkpoint_wrappers(before: bool) -> None:
    """As tutorials apply them, around the units or inside; states go by the plain names."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    def checkpointed(model: nn.Module) -> None:
        wrapper.apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                wrapper.checkpoint_wrapper, checkpoint_impl=wrapper.CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda m: isinstance(m, Block),
        )

    model = build()
    plain = twin(model)
    if before:
        checkpointed(model)
    ours = FSDP(model, auto_wrap_policy=POLICIES["modules"])
    if not before:
        checkpointed(ours)
    assert len(FSDP.fsdp_modules(ours)) == 4
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for step in range(2):
        x = batch(step, fsdpc.rank())
        for m, o in ((ours, optimizer), (plain, theirs)):
            o.zero_grad()
            loss_of(m, x).backward()
            if m is plain:
                average_grads(plain)
            o.step()
    state = ours.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    states = FSDP.optim_state_dict(ours, optimizer)["state"]
    assert list(states) == [n for n, _ in plain.named_parameters()]
    for name, p in plain.named_parameters():
        torch.testing.assert_close(states[name]["exp_avg"], theirs.state[p]["exp_avg"])
    ours.load_state_dict(state)
    fresh = FSDP(build(seed=4), auto_wrap_policy=POLICIES["modules"])
    fresh.load_state_dict(state)
    assert_same_parameters(fresh, plain)
    resumed = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    full = FSDP.optim_state_dict(ours, optimizer)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(fresh, resumed, full))
    for p, q in zip(fresh.parameters(), ours.parameters(), strict=True):
        assert torch.equal(resumed.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])


@pytest.mark.ranks(4)
def test_groups_of_torch(tmp_path: Any) -> None:
    import torch.distributed as dist

    rank = fsdpc.rank()
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = build()
    plain = twin(model)
    ours = FSDP(
        model,
        process_group=(rows[rank // 2], columns[rank % 2]),
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,  # type: ignore[attr-defined]
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    assert ours.first.weight.to_local().shape == (10, 7)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-1) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 2)
    alone = FSDP(build(), process_group=dist.group.WORLD, sharding_strategy="HYBRID_SHARD")
    assert alone.first.weight.to_local().shape == (5, 7)
    dist.destroy_process_group()


@pytest.mark.ranks(1)
def test_refusals() -> None:
    with pytest.raises(ValueError, match="not both"):
        FSDP(build(), process_group=object(), device_mesh=object())
    with pytest.raises(ValueError, match="to be sharded on a GPU, and the engine computes on"):
        FSDP(build(), device_id="cuda:0")
    with pytest.raises(TypeError, match="takes a BackwardPrefetch or None, got 'soon'"):
        FSDP(build(), backward_prefetch="soon")
    with pytest.raises(NotImplementedError, match="keep_low_precision_grads"):
        FSDP(build(), mixed_precision=MixedPrecision(keep_low_precision_grads=True))
    ours = FSDP(build())
    with pytest.raises(NotImplementedError, match=r"register_comm_hook\(None\): gradients are"):
        ours.register_comm_hook(None, None)
    with pytest.raises(NotImplementedError, match="flat parameters, which do not exist"):
        FSDP.set_state_dict_type(ours, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(ValueError, match="ShardedStateDictConfig does not go with FULL"):
        FSDP.set_state_dict_type(ours, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())
    with pytest.raises(ValueError, match="Normed has meta parameters and no reset"):
        with torch.device("meta"):
            meta = Normed()
        meta.extra = nn.Parameter(torch.empty(3, device="meta"))
        FSDP(meta)
