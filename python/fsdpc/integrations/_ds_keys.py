"""Every key of a DeepSpeed configuration and how fsdpc handles it, as tabulated in the docs.

``docs/coming-from-deepspeed.md`` shows :data:`KEYS`, one row for each text; a test compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

#: Honoured; without effect; unsupported, so only "off" is accepted.
Kind = Literal["used", "nothing", "refused"]


class Key(NamedTuple):
    """How a key is handled, and the sentence that describes it in the docs' table."""

    kind: Kind
    says: str


def _used(says: str) -> Key:
    return Key("used", says)


def _nothing(says: str) -> Key:
    return Key("nothing", f"no effect: {says}")


def _refused(says: str) -> Key:
    return Key("refused", f"refused unless off: {says}")


_UNIT = "each unit is gathered and reduced as a whole"
_RING = "a ring of 12 chunks reads ahead and writes behind"
_LOGS = "log from your loop"

KEYS: dict[str, Key] = {
    "train_batch_size": _used(
        "sequences per step over all ranks; two of the first three keys determine the third"
    ),
    "train_micro_batch_size_per_gpu": _used("batch size of the returned loader"),
    "gradient_accumulation_steps": _used(
        "backwards in a step; the last reduces (`set_requires_gradient_sync`)"
    ),
    "managed_gradient_accumulation": Key(
        "refused",
        "refused unless true: `step()` ends a step after `gradient_accumulation_steps` backwards",
    ),
    "gradient_clipping": _used(
        "`clip_grad_norm_` before the step; default 1.0, as in DeepSpeed from 0.19.3; 0: none"
    ),
    "optimizer": _used(
        "`type`: Adam (with `adam_w_mode`), AdamW, SGD of `fsdpc.torch.optim`, or the class of "
        "that name in `torch.optim`; `params`: its options, `weight_decay` 0 by default"
    ),
    "scheduler": _used(
        "`type`: WarmupLR, WarmupDecayLR, WarmupCosineLR, or the class of that name in "
        "`torch.optim.lr_scheduler`"
    ),
    "bf16.enabled": _used("bfloat16 compute; fp32 masters, sums, gradients and states"),
    "fp16.enabled": _used("the same in float16, with a loss scale"),
    "fp16.loss_scale": _used("0: dynamic"),
    "fp16.initial_scale_power": _used("as in DeepSpeed"),
    "fp16.loss_scale_window": _used("as in DeepSpeed"),
    "fp16.hysteresis": _used("as in DeepSpeed"),
    "fp16.consecutive_hysteresis": _used("as in DeepSpeed"),
    "fp16.min_loss_scale": _used("as in DeepSpeed"),
    "fp16.auto_cast": _nothing("units always cast their inputs"),
    "fp16.fp16_master_weights_and_grads": _refused("masters are fp32"),
    "bf16.immediate_grad_update": _nothing("backward reduces gradients"),
    "bf16.check_grad_overflow": _used(
        "skips steps whose gradients are not finite; by default true in stages 1 and 2, false in "
        "0 and 3, as in DeepSpeed from 0.19.3"
    ),
    "bf16.bf16_master_weights_and_grads": _refused("masters are fp32"),
    "bf16.bf16_optimizer_states": _refused("`fsdpc.torch.optim` keeps states in fp32"),
    "zero_optimization.stage": _used(
        "0, 1, 2, 3: NO_SHARD, SHARD_OPTIM, SHARD_GRAD_OP, FULL_SHARD"
    ),
    "zero_optimization.offload_optimizer.device": _used(
        '"nvme": optimizer states, masters and gradients on a disk ([offload.md](offload.md)); '
        '"cpu": in host memory, if a GPU computes'
    ),
    "zero_optimization.offload_optimizer.nvme_path": _used("the folder"),
    "zero_optimization.offload_optimizer.ratio": _used("the offloaded part of each unit"),
    "zero_optimization.offload_param.device": _used('"nvme": gathered parameters too'),
    "zero_optimization.offload_param.nvme_path": _used("the folder"),
    "communication_data_type": _used('"fp32", "bf16" or "fp16": dtype of gradients in transit'),
    "dataloader_drop_last": _used("for the returned loader"),
    "activation_checkpointing.partition_activations": _refused(
        "it splits them over tensor-parallel ranks, and `torch.utils.checkpoint` keeps whole ones"
    ),
    "activation_checkpointing.cpu_checkpointing": _refused(
        "on CPUs they are in host memory; `OffloadPolicy` has `activations=\"disk\"`"
    ),
    "activation_checkpointing.contiguous_memory_optimization": _nothing("the allocator decides"),
    "activation_checkpointing.number_checkpoints": _nothing(
        "checkpoint layers in the model (`torch.utils.checkpoint`, or "
        "`model.gradient_checkpointing_enable()`)"
    ),
    "activation_checkpointing.synchronize_checkpoint_boundary": _nothing("nothing is synchronised"),
    "activation_checkpointing.profile": _nothing("`torch.profiler` shows recomputation"),
    "zero_optimization.overlap_comm": _nothing("the next unit is always gathered ahead"),
    "zero_optimization.contiguous_gradients": _nothing("gradients of a unit are one buffer"),
    "zero_optimization.reduce_scatter": _nothing(_UNIT),
    "zero_optimization.allgather_partitions": _nothing(_UNIT),
    "zero_optimization.reduce_bucket_size": _nothing(_UNIT),
    "zero_optimization.allgather_bucket_size": _nothing(_UNIT),
    "zero_optimization.use_multi_rank_bucket_allreduce": _nothing(_UNIT),
    "zero_optimization.sub_group_size": _nothing(_UNIT),
    "zero_optimization.round_robin_gradients": _nothing(_UNIT),
    "zero_optimization.stage3_prefetch_bucket_size": _nothing(
        "one unit is gathered ahead; `set_prefetch_distance` changes this"
    ),
    "zero_optimization.stage3_max_live_parameters": _nothing(
        "use `reshard_after_forward` of each unit"
    ),
    "zero_optimization.stage3_max_reuse_distance": _nothing(
        "use `reshard_after_forward` of each unit"
    ),
    "zero_optimization.stage3_param_persistence_threshold": _nothing(
        "small parameters belong to their unit"
    ),
    "zero_optimization.stage3_model_persistence_threshold": _nothing(
        "small parameters belong to their unit"
    ),
    "zero_optimization.stage3_module_granularity_threshold": _nothing("use `units=`"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _nothing(
        "`save_16bit_model` always gathers"
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _nothing(_UNIT),
    "zero_optimization.elastic_checkpoint": _nothing("checkpoints load at any number of ranks"),
    "zero_optimization.load_from_fp32_weights": _nothing("loading sets the masters"),
    "zero_optimization.ignore_unused_parameters": _nothing(
        "parameters that no rank used have no gradient"
    ),
    "zero_optimization.legacy_stage1": _nothing("there is one implementation"),
    "zero_optimization.memory_efficient_linear": _nothing("torch's layers do not change"),
    "zero_optimization.override_module_apply": _nothing("`apply` sees unsharded parameters"),
    "zero_optimization.log_trace_cache_warnings": _nothing("units follow the recorded order"),
    "zero_optimization.offload_optimizer.pin_memory": _nothing("host memory is used as it is"),
    "zero_optimization.offload_optimizer.buffer_count": _nothing(_RING),
    "zero_optimization.offload_optimizer.fast_init": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline_read": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline_write": _nothing(_RING),
    "zero_optimization.offload_optimizer.pipeline": _nothing(_RING),
    "zero_optimization.offload_optimizer.super_offload": _refused(
        "a step begins when all gradients are reduced"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _nothing(
        "use `fsdpc.set_num_threads`"
    ),
    "zero_optimization.offload_param.pin_memory": _nothing("host memory is used as it is"),
    "zero_optimization.offload_param.buffer_count": _nothing("the page cache uses the free memory"),
    "zero_optimization.offload_param.buffer_size": _nothing("the page cache uses the free memory"),
    "zero_optimization.offload_param.max_in_cpu": _nothing("the page cache uses the free memory"),
    "zero_optimization.cpu_offload": _nothing("on CPUs states are in host memory anyway"),
    "zero_optimization.zenflow": _refused("every step updates all parameters"),
    "zero_optimization.leaf_module": _refused("use `units=`"),
    "zero_optimization.zero_hpz_partition_size": _nothing(
        "on CPUs, each host keeps what forward received"
    ),
    "zero_optimization.mics_shard_size": _refused(
        "call `fully_shard(mesh=...)` with (replicate, shard): HYBRID_SHARD"
    ),
    "zero_optimization.mics_hierarchical_params_gather": _refused("see `mics_shard_size`"),
    "zero_optimization.zero_quantized_weights": _used(
        "`compression=Compression(gather=\"int8\")`, which says what is rounded"
    ),
    "zero_optimization.zero_quantized_gradients": _used(
        "`compression=Compression(reduce=\"int8\")`: a host's sums are encoded once"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused(
        "`zero_quantized_weights` is for all weights"
    ),
    "zero_optimization.zeropp_loco_param": _refused(
        "call `fully_shard(compression=Compression(error_feedback=True, ...))`"
    ),
    "aio": _nothing(_RING),
    "prescale_gradients": _nothing("sums are in fp32 and scaled once"),
    "gradient_predivide_factor": _nothing("sums are in fp32 and scaled once"),
    "gradient_allreduce_op": Key(
        "refused", 'refused unless "mean": gradients are means over ranks'
    ),
    "sparse_gradients": _refused("gradients are dense"),
    "data_types.grad_accum_dtype": _used('"fp32"; others are refused'),
    "seq_parallel_communication_data_type": _nothing("sequence parallelism is not supported"),
    "zero_allow_untested_optimizer": _nothing("every element-wise optimizer is accepted"),
    "zero_force_ds_cpu_optimizer": _nothing("`fsdpc.torch.optim` steps on CPUs"),
    "checkpoint": _nothing("folders are shared, and load at any number of ranks"),
    "steps_per_print": _nothing(_LOGS),
    "wall_clock_breakdown": _nothing("use `torch.profiler`, whose trace names the units"),
    "memory_breakdown": _nothing("use `fsdpc.memory_plan(model)`"),
    "dump_state": _nothing(_LOGS),
    "disable_allgather": _nothing("for debugging DeepSpeed"),
    "timers": _nothing(_LOGS),
    "flops_profiler": _refused("use `torch.utils.flop_counter`"),
    "comms_logger": _refused("use `fsdpc.schedule(model)`"),
    "tensorboard": _refused(_LOGS),
    "wandb": _refused(_LOGS),
    "csv_monitor": _refused(_LOGS),
    "comet": _refused(_LOGS),
    "amp": _refused("use `bf16` or `fp16`"),
    "torch_autocast": _refused("use `bf16` or `fp16`, or autocast in the model"),
    "autotuning": _refused("`fsdpc.simulate` compares settings"),
    "elasticity": _refused("checkpoints load at any number of ranks"),
    "compression_training": _refused("weights stay as they are"),
    "sparse_attention": _refused("attention belongs to the model"),
    "data_efficiency": _refused("data belongs to the script"),
    "curriculum_learning": _refused("data belongs to the script"),
    "hybrid_engine": _refused("generate inside `summon_full_params`"),
    "tensor_parallel": _refused("not supported"),
    "expert_parallel": _refused("not supported"),
    "pipeline": _refused("not supported"),
    "compile": _refused("call `torch.compile` on layers first"),
}

#: Values, besides falsy ones, that switch a key off.
_OFF = ("none", "auto", -1)
#: Values equivalent to an absent key, by key.
_DEFAULT: dict[str, tuple[Any, ...]] = {
    "gradient_allreduce_op": ("mean",),
    "managed_gradient_accumulation": (True,),
}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a configuration into (dotted key, value) pairs, to the depth of the table's keys."""
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
    """Return the configuration's values for the keys that are used.

    Raises
    ------
    ValueError
        A key is unknown to DeepSpeed.
    NotImplementedError
        A key is not supported; the error explains why.
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
            "DeepSpeed keys without effect here: %s", ", ".join(idle)
        )
    return found
