"""Every key of a DeepSpeed configuration, and what becomes of it: the table of the docs.

``docs/coming-from-deepspeed.md`` shows :data:`KEYS` as it stands here; a test compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

#: Taken as said; changes nothing here; cannot be done, so that only "off" is taken.
Kind = Literal["used", "nothing", "refused"]


class Key(NamedTuple):
    """What becomes of a key, and the sentence of the table."""

    kind: Kind
    says: str


def _used(says: str) -> Key:
    return Key("used", says)


def _nothing(says: str) -> Key:
    return Key("nothing", f"nothing: {says}")


def _refused(says: str) -> Key:
    return Key("refused", f"refused unless off: {says}")


_UNIT = "the unit is what is gathered and reduced at once"
_RING = "a ring of 12 chunks reads ahead and writes behind"
_LOGS = "log what the loop has"

KEYS: dict[str, Key] = {
    "train_batch_size": _used("sequences of all ranks in a step; any two of these three give it"),
    "train_micro_batch_size_per_gpu": _used("batch size of the loader that is returned"),
    "gradient_accumulation_steps": _used(
        "backwards in a step; the last reduces (`set_requires_gradient_sync`)"
    ),
    "managed_gradient_accumulation": Key(
        "refused",
        "refused unless true: `step()` ends a step after `gradient_accumulation_steps` backwards",
    ),
    "gradient_clipping": _used(
        "`clip_grad_norm_` before the step; 1.0 where not given, as there since 0.19.3; 0: none"
    ),
    "optimizer": _used(
        "`type`: Adam (with `adam_w_mode`), AdamW, SGD of `fsdpc.torch.optim`, or the class of "
        "that name in `torch.optim`; `params`: its options, `weight_decay` 0 where not given"
    ),
    "scheduler": _used(
        "`type`: WarmupLR, WarmupDecayLR, WarmupCosineLR, or the class of that name in "
        "`torch.optim.lr_scheduler`"
    ),
    "bf16.enabled": _used("bfloat16 compute; fp32 masters, sums, gradients and states"),
    "fp16.enabled": _used("the same in float16, with a loss scale"),
    "fp16.loss_scale": _used("0: dynamic"),
    "fp16.initial_scale_power": _used("as there"),
    "fp16.loss_scale_window": _used("as there"),
    "fp16.hysteresis": _used("as there"),
    "fp16.consecutive_hysteresis": _used("as there"),
    "fp16.min_loss_scale": _used("as there"),
    "fp16.auto_cast": _nothing("inputs of units are cast always"),
    "fp16.fp16_master_weights_and_grads": _refused("masters are fp32"),
    "bf16.immediate_grad_update": _nothing("gradients are reduced within backward"),
    "bf16.check_grad_overflow": _used(
        "a step whose gradients are not finite is skipped; true in stages 1 and 2 and false in 0 "
        "and 3 where not given, as there since 0.19.3"
    ),
    "bf16.bf16_master_weights_and_grads": _refused("masters are fp32"),
    "bf16.bf16_optimizer_states": _refused("`fsdpc.torch.optim` has states in fp32"),
    "zero_optimization.stage": _used(
        "0, 1, 2, 3: NO_SHARD, SHARD_OPTIM, SHARD_GRAD_OP, FULL_SHARD"
    ),
    "zero_optimization.offload_optimizer.device": _used(
        '"nvme": optimizer states, masters and gradients on a disk ([offload.md](offload.md)); '
        '"cpu": in host memory, where a GPU computes'
    ),
    "zero_optimization.offload_optimizer.nvme_path": _used("the folder"),
    "zero_optimization.offload_optimizer.ratio": _used("the part of each unit that is there"),
    "zero_optimization.offload_param.device": _used('"nvme": gathered parameters too'),
    "zero_optimization.offload_param.nvme_path": _used("the folder"),
    "communication_data_type": _used('"fp32", "bf16" or "fp16": what gradients travel in'),
    "dataloader_drop_last": _used("of the loader that is returned"),
    "activation_checkpointing.partition_activations": _refused(
        "`torch.utils.checkpoint` keeps whole ones"
    ),
    "activation_checkpointing.cpu_checkpointing": _refused("on CPUs they are there anyway"),
    "activation_checkpointing.contiguous_memory_optimization": _nothing("an allocator's concern"),
    "activation_checkpointing.number_checkpoints": _nothing(
        "the model checkpoints its layers: `torch.utils.checkpoint`, or "
        "`model.gradient_checkpointing_enable()`"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": _nothing("nothing is synchronised"),
    "activation_checkpointing.profile": _nothing("`torch.profiler` shows recomputation"),
    "zero_optimization.overlap_comm": _nothing("the next unit is gathered ahead always"),
    "zero_optimization.contiguous_gradients": _nothing("gradients of a unit are one buffer"),
    "zero_optimization.reduce_scatter": _nothing(_UNIT),
    "zero_optimization.allgather_partitions": _nothing(_UNIT),
    "zero_optimization.reduce_bucket_size": _nothing(_UNIT),
    "zero_optimization.allgather_bucket_size": _nothing(_UNIT),
    "zero_optimization.use_multi_rank_bucket_allreduce": _nothing(_UNIT),
    "zero_optimization.sub_group_size": _nothing(_UNIT),
    "zero_optimization.round_robin_gradients": _nothing(_UNIT),
    "zero_optimization.stage3_prefetch_bucket_size": _nothing(
        "one unit ahead; `set_prefetch_distance` says otherwise"
    ),
    "zero_optimization.stage3_max_live_parameters": _nothing(
        "`reshard_after_forward` of a unit says what stays"
    ),
    "zero_optimization.stage3_max_reuse_distance": _nothing(
        "`reshard_after_forward` of a unit says what stays"
    ),
    "zero_optimization.stage3_param_persistence_threshold": _nothing(
        "small parameters belong to the unit around them"
    ),
    "zero_optimization.stage3_model_persistence_threshold": _nothing(
        "small parameters belong to the unit around them"
    ),
    "zero_optimization.stage3_module_granularity_threshold": _nothing(
        "`units=` says what is gathered as one"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _nothing(
        "`save_16bit_model` gathers always"
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _nothing(_UNIT),
    "zero_optimization.elastic_checkpoint": _nothing(
        "deprecated there; checkpoints load at any number of ranks"
    ),
    "zero_optimization.load_from_fp32_weights": _nothing("masters are what is loaded"),
    "zero_optimization.ignore_unused_parameters": _nothing(
        "parameters that no rank used have no gradient"
    ),
    "zero_optimization.legacy_stage1": _nothing("there is one implementation"),
    "zero_optimization.memory_efficient_linear": _nothing("torch's layers are left as they are"),
    "zero_optimization.override_module_apply": _nothing("`apply` sees full parameters"),
    "zero_optimization.log_trace_cache_warnings": _nothing("the recorded order is followed"),
    "zero_optimization.offload_optimizer.pin_memory": _nothing(
        "memory of the host is used as it is"
    ),
    "zero_optimization.offload_optimizer.buffer_count": _nothing(_RING),
    "zero_optimization.offload_optimizer.fast_init": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline_read": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline_write": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline": _nothing(_RING),
    "zero_optimization.offload_optimizer.super_offload": _refused(
        "a step begins when all gradients are there"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _nothing(
        "`fsdpc.set_num_threads` says how many"
    ),
    "zero_optimization.offload_param.pin_memory": _nothing("memory of the host is used as it is"),
    "zero_optimization.offload_param.buffer_count": _nothing(
        "the page cache holds as many as memory has room for"
    ),
    "zero_optimization.offload_param.buffer_size": _nothing(
        "the page cache holds as many as memory has room for"
    ),
    "zero_optimization.offload_param.max_in_cpu": _nothing(
        "the page cache holds as many as memory has room for"
    ),
    "zero_optimization.cpu_offload": _nothing("on CPUs states are there anyway"),
    "zero_optimization.zenflow": _refused("every step updates all parameters"),
    "zero_optimization.leaf_module": _refused("`units=` says what is gathered as one"),
    "zero_optimization.zero_hpz_partition_size": _refused(
        "`fully_shard(mesh=...)` of (replicate, shard) by hand is HYBRID_SHARD"
    ),
    "zero_optimization.mics_shard_size": _refused(
        "`fully_shard(mesh=...)` of (replicate, shard) by hand is HYBRID_SHARD"
    ),
    "zero_optimization.mics_hierarchical_params_gather": _refused("see `mics_shard_size`"),
    "zero_optimization.zero_quantized_weights": _refused("values travel unquantised"),
    "zero_optimization.zero_quantized_gradients": _refused("values travel unquantised"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused("values travel unquantised"),
    "zero_optimization.zeropp_loco_param": _refused("values travel unquantised"),
    "aio": _nothing(_RING),
    "prescale_gradients": _nothing("sums are in fp32 and scaled once"),
    "gradient_predivide_factor": _nothing("sums are in fp32 and scaled once"),
    "gradient_allreduce_op": Key(
        "refused", 'refused unless "mean": gradients are means over ranks'
    ),
    "sparse_gradients": _refused("gradients are dense"),
    "data_types.grad_accum_dtype": _used('"fp32", which it is; others are refused'),
    "seq_parallel_communication_data_type": _nothing("there is no sequence parallelism"),
    "zero_allow_untested_optimizer": _nothing("any optimizer that is element by element is taken"),
    "zero_force_ds_cpu_optimizer": _nothing("`fsdpc.torch.optim` steps on CPUs"),
    "checkpoint": _nothing("folders are shared, and load at any number of ranks"),
    "steps_per_print": _nothing(_LOGS),
    "wall_clock_breakdown": _nothing("`torch.profiler`: the trace has the names of units"),
    "memory_breakdown": _nothing("`fsdpc.memory_plan(model)` says it"),
    "dump_state": _nothing(_LOGS),
    "disable_allgather": _nothing("it is DeepSpeed's debugging"),
    "timers": _nothing(_LOGS),
    "flops_profiler": _refused("`torch.utils.flop_counter` counts"),
    "comms_logger": _refused("`fsdpc.schedule(model)` shows what was gathered and reduced"),
    "tensorboard": _refused(_LOGS),
    "wandb": _refused(_LOGS),
    "csv_monitor": _refused(_LOGS),
    "comet": _refused(_LOGS),
    "amp": _refused("it is Apex's; use `bf16` or `fp16`"),
    "torch_autocast": _refused("use `bf16` or `fp16`, or autocast in the model"),
    "autotuning": _refused("`fsdpc.simulate` compares settings"),
    "elasticity": _refused("checkpoints load at any number of ranks"),
    "compression_training": _refused("weights stay as they are"),
    "sparse_attention": _refused("attention is the model's"),
    "data_efficiency": _refused("data is the script's"),
    "curriculum_learning": _refused("data is the script's"),
    "hybrid_engine": _refused("`summon_full_params` lets a model generate"),
    "tensor_parallel": _refused("there is none"),
    "expert_parallel": _refused("AutoEP; there is no expert parallelism"),
    "pipeline": _refused("there is none"),
    "compile": _refused("call `torch.compile` on layers before"),
}

#: Values by which a key is off, beside those that are false.
_OFF = ("none", "auto", -1)
#: And what is as if they were not given, by key.
_DEFAULT: dict[str, tuple[Any, ...]] = {
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a configuration, down to the keys of the table."""
    for name, value in config.items():
        key = prefix + name
        inside = any(known.startswith(key + ".") for known in KEYS)
        if key not in KEYS and inside and isinstance(value, Mapping):
            yield from flatten(value, key + ".")
        elif not (inside and value in (None, False)):
            yield key, value


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value or not value.get("enabled", True)
    return not value or value in _OFF


def check(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of the keys that are used.

    Raises
    ------
    ValueError
        A key is none of DeepSpeed's.
    NotImplementedError
        A key cannot be honoured; says why.
    """
    found: dict[str, Any] = {}
    idle = []
    for key, value in flatten(config):
        if key not in KEYS:
            raise ValueError(
                f"'{key}' is no key of a DeepSpeed configuration that is known here: see the table "
                "of docs/coming-from-deepspeed.md"
            )
        kind, says = KEYS[key]
        off = value in (None, "auto", *_DEFAULT[key]) if key in _DEFAULT else _is_off(value)
        if kind == "refused" and not off:
            raise NotImplementedError(f"'{key}': {value!r} in a DeepSpeed configuration: {says}")
        if kind == "used" and value is not None and value != "auto":
            found[key] = value
        elif kind == "nothing":
            idle.append(key)
    if idle:
        logging.getLogger("fsdpc.integrations").info(
            "DeepSpeed's keys that change nothing here: %s", ", ".join(idle)
        )
    return found
