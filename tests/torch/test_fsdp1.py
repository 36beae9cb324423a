"""FSDP1 scripts: the class, its policies, contexts and state dicts."""

from __future__ import annotations

import functools
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
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from .common import Block, assert_same_parameters, batch, build, loss_of, train_twins, twin

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
        states = FSDP.optim_state_dict(ours, optimizer)
        assert bool(states) == (fsdpc.rank() == 0)
    full = ours.state_dict()
    states = FSDP.optim_state_dict(ours, optimizer)
    assert states["state"]["last.weight"]["exp_avg"].shape == (5, 20)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        own = {k: v.clone() for k, v in ours.state_dict().items()}
        assert own["first.weight"].shape == (10, 7)
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


@pytest.mark.ranks(1)
def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match="process_group"):
        FSDP(build(), process_group=object())
    with pytest.raises(NotImplementedError, match="only the CPU"):
        FSDP(build(), device_id="cuda:0")
    with pytest.raises(NotImplementedError, match="keep_low_precision_grads"):
        FSDP(build(), mixed_precision=MixedPrecision(keep_low_precision_grads=True))
