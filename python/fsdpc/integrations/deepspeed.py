"""DeepSpeed's ``initialize`` and engine on top of :mod:`fsdpc.torch`, without DeepSpeed itself.

In a script, replace ``import deepspeed`` with ``from fsdpc.integrations import deepspeed``. The
table :data:`KEYS`, shown in the docs, specifies how each configuration key is handled.
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from fsdpc import checkpoint, distributed
from fsdpc.integrations import _ds_keys, _units
from fsdpc.integrations._ds_keys import KEYS
from fsdpc.integrations._ds_schedules import SCHEDULES
from fsdpc.sharding.amp import LossScaler
from fsdpc.sharding.compression import Compression
from fsdpc.tensors.device import get_default_device
from fsdpc.torch import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    _device,
    clip_grad_norm_,
    get_model_state_dict,
    optim,
)
from fsdpc.torch._made_before import moved, places_of
from fsdpc.torch._mesh import join

__all__ = ["KEYS", "DeepSpeedEngine", "init_distributed", "initialize"]

_STAGES = ("NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD")
_OFFLOADS = {
    "offload_optimizer": ("optimizer", "masters", "gradients"),
    "offload_param": ("params",),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def init_distributed(
    dist_backend: str | None = "gloo",
    *,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **_: Any,
) -> None:
    """Join torch's process group if a launcher set its variables and it is not yet joined.

    Parameters
    ----------
    dist_backend : str, default "gloo"
    timeout, init_method, rank, world_size : optional
        As for ``torch.distributed.init_process_group``.
    """
    if torch.distributed.is_initialized() or ("RANK" not in os.environ and init_method is None):
        return
    torch.distributed.init_process_group(
        dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    units: _units.Units = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Shard a model according to a DeepSpeed configuration, and create its engine (collective).

    Parameters
    ----------
    args : optional
        ``args.deepspeed_config`` is used if ``config`` is not given.
    model : nn.Module
        Sharded in place, with rank 0's values, unless part of it already is; it stays on its
        device.
    optimizer : Optimizer or callable, optional
        An optimizer for the model's parameters, which switches to the sharded ones, or a function
        that creates one from parameters. By default the configuration's.
    model_parameters : iterable, optional
        Parameters or parameter groups from before sharding; by default all that require gradients.
    training_data : Dataset, optional
        Dataset for the returned loader; each rank reads its part.
    lr_scheduler : scheduler or callable, optional
        By default the configuration's.
    config : mapping or path
        A DeepSpeed configuration. Keys that have no effect are logged once.
    collate_fn : callable, optional
        As for the loader.
    units : optional
        Modules to gather as units: classes or their names, or a plan as for
        :func:`fsdpc.torch.fully_shard`. None means the ``fsdp_plan`` of transformers models, or the
        elements of each ``nn.ModuleList``.
    others
        ``config_params`` is the older name of ``config``; DeepSpeed's other arguments must be None.

    Returns
    -------
    (DeepSpeedEngine, Optimizer, DataLoader or None, scheduler or None)

    Raises
    ------
    NotImplementedError
        A configuration key is not supported; the error names it.
    ValueError
        A key is unknown, or batch sizes contradict each other.
    """
    config = config if config is not None else others.pop("config_params", None)
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    for name, value in others.items():
        if value is not None and name not in ("dist_init_required", "distributed_port"):
            raise NotImplementedError(f"deepspeed.initialize({name}=...) has no meaning here")
    if model is None or config is None:
        raise ValueError("deepspeed.initialize needs model= and config=")
    if not isinstance(config, Mapping):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    init_distributed()
    world = join()
    said = _ds_keys.check(config)
    batch = _batch_sizes(said, world.size)
    places = places_of(model)
    groups = None if model_parameters is None else list(model_parameters)
    _units.shard(model, units, _shard_options(said))
    made = _optimizer(said, optimizer, model, groups, places)
    scheduler = _scheduler(said, lr_scheduler, made)
    loader = None
    if training_data is not None:
        loader = DataLoader(
            training_data,
            batch_size=batch[1],
            sampler=DistributedSampler(training_data, world.size, world.rank),
            collate_fn=collate_fn,
            drop_last=bool(said.get("dataloader_drop_last")),
        )
    engine = DeepSpeedEngine(model, made, scheduler, said, batch)
    engine.training_dataloader = loader
    return engine, made, loader, scheduler


def _batch_sizes(said: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Return the global batch size, the micro-batch size, and the micro-batches per step."""
    total = said.get("train_batch_size")
    micro = said.get("train_micro_batch_size_per_gpu")
    steps = said.get("gradient_accumulation_steps")
    if total is None and micro is None:
        raise ValueError(
            "a DeepSpeed configuration has train_batch_size or train_micro_batch_size_per_gpu"
        )
    if steps is None:
        steps = 1 if total is None or micro is None else total // (micro * ranks)
    if micro is None:
        micro = total // (ranks * steps)
    if total is None:
        total = micro * steps * ranks
    if total != micro * steps * ranks or min(total, micro, steps) < 1:
        raise ValueError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {ranks} ranks"
        )
    return total, micro, steps


def _shard_options(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``fully_shard`` options for a configuration."""
    stage = int(said.get("zero_optimization.stage", 0))
    if not 0 <= stage < len(_STAGES):
        raise ValueError(f"zero_optimization.stage {stage} is not one of 0, 1, 2, 3")
    options: dict[str, Any] = {"strategy": _STAGES[stage], "sync_module_states": True}
    half = [name for name in ("bf16", "fp16") if said.get(f"{name}.enabled")]
    if len(half) > 1:
        raise ValueError("bf16 and fp16 are enabled: choose one")
    travels = said.get("communication_data_type", "fp32")
    if travels not in _DTYPES:
        raise NotImplementedError(f"communication_data_type {travels!r}: fp32, bf16 or fp16")
    if said.get("data_types.grad_accum_dtype", "fp32") != "fp32":
        raise NotImplementedError("data_types.grad_accum_dtype: sums are fp32")
    if half or travels != "fp32":
        dtype = _DTYPES[half[0]] if half else None
        options["mp_policy"] = MixedPrecisionPolicy(dtype, _DTYPES[travels])
        options["master_dtype"] = torch.float32
    tiers: dict[str, Any] = {}
    for name, classes in _OFFLOADS.items():
        device = said.get(f"zero_optimization.{name}.device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"zero_optimization.{name}.device is none, cpu or nvme: {device!r}")
        if device == "cpu" and get_default_device() != "cpu":
            tiers |= dict.fromkeys(classes, "host")
        if device == "nvme":
            tiers |= dict.fromkeys(classes, "disk")
            tiers["path"] = said.get(f"zero_optimization.{name}.nvme_path")
    if tiers:
        ratio = float(said.get("zero_optimization.offload_optimizer.ratio", 1.0))
        options["offload_policy"] = OffloadPolicy(**tiers, fraction=ratio if "path" in tiers else 1)
    gather, reduce = (
        "int8" if said.get(f"zero_optimization.zero_quantized_{what}") else None
        for what in ("weights", "gradients")
    )
    if gather or reduce:
        options["compression"] = Compression(gather=gather, reduce=reduce)
    return options


def _optimizer(
    said: Mapping[str, Any], given: Any, model: nn.Module, groups: Any, places: Any
) -> Any:
    """Return an optimizer for the sharded parameters."""
    params: Any = [p for p in model.parameters() if p.requires_grad]
    if groups is not None and groups and isinstance(groups[0], Mapping):
        params = [{**g, "params": moved(g["params"], places)} for g in groups]
    elif groups is not None:
        params = moved(groups, places)
    if isinstance(given, torch.optim.Optimizer):
        _units.move(given, places)
        return given
    if given is not None:
        return given(params)
    if "optimizer" not in said:
        return None
    kind, options = said["optimizer"]["type"], dict(said["optimizer"].get("params", {}))
    options.pop("torch_adam", None)
    if kind.lower() in ("adam", "adamw"):
        if not options.pop("bias_correction", True):
            raise NotImplementedError("optimizer.params.bias_correction false")
        decoupled = options.pop("adam_w_mode", True) or kind.lower() == "adamw"
        options.setdefault("weight_decay", 0.0)
        options["betas"] = tuple(options.get("betas", (0.9, 0.999)))
        return (optim.AdamW if decoupled else optim.Adam)(params, **options)
    if kind.lower() == "sgd":
        return optim.SGD(params, **options)
    found = getattr(torch.optim, kind, None)
    if found is None:
        raise NotImplementedError(
            f"optimizer.type {kind!r}: it is not in torch.optim; pass optimizer= instead"
        )
    return found(params, **options)


def _scheduler(said: Mapping[str, Any], given: Any, optimizer: Any) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if "scheduler" not in said:
        return None
    kind, options = said["scheduler"]["type"], dict(said["scheduler"].get("params", {}))
    found = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if found is None:
        raise NotImplementedError(
            f"scheduler.type {kind!r}: there are {sorted(SCHEDULES)} and torch's; pass "
            "lr_scheduler= instead"
        )
    return found(optimizer, **options)


class DeepSpeedEngine:
    """The engine that :func:`initialize` returns: a sharded model that counts its backward passes.

    All other attributes and methods are the model's. It is not an ``nn.Module``.

    Attributes
    ----------
    module : nn.Module
        The sharded model.
    optimizer, lr_scheduler, training_dataloader
        As returned by :func:`initialize`.
    micro_steps, global_steps, skipped_steps : int
        Number of calls of :meth:`step`; of completed steps; of completed steps that overflowed.
    device : torch.device
        Device of the parameters.
    global_rank, local_rank, world_size, dp_world_size, mp_world_size : int
        This rank in the world and on its host; the number of ranks, all data-parallel; and 1 for
        model parallelism.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        said: Mapping[str, Any],
        batch: tuple[int, int, int],
    ) -> None:
        self.module: nn.Module = module
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self.training_dataloader: Any = None
        self.micro_steps: int = 0
        self.global_steps: int = 0
        self.skipped_steps: int = 0
        self.device: torch.device = torch.device(_device.home())
        self.global_rank: int = distributed.rank()
        self.local_rank: int = distributed.local_rank()
        self.world_size: int = distributed.world_size()
        self.dp_world_size: int = self.world_size
        self.mp_world_size: int = 1
        self._said, self._batch = said, batch
        self._clip = float(said.get("gradient_clipping", 1.0))
        self._norm: float | None = None
        self._applied = False
        self._ran_backward = False
        checks = said.get("bf16.check_grad_overflow", self.zero_optimization_stage() in (1, 2))
        self._skips = self.fp16_enabled() or (self.bfloat16_enabled() and bool(checks))
        self._in_no_sync = False
        self._scaler: LossScaler | None = None
        if said.get("fp16.enabled"):
            rule = {
                name: said[f"fp16.{name}"]
                for name in (
                    "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
                    "consecutive_hysteresis", "loss_scale",
                )
                if f"fp16.{name}" in said
            }  # fmt: skip
            self._scaler = LossScaler(**rule)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"DeepSpeedEngine has no '{name}' here, and neither has its module, a "
                f"{type(self.module).__name__}: docs/coming-from-deepspeed.md lists what there is"
            ) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    forward = __call__

    def train_batch_size(self) -> int:
        """Return the number of sequences per step, over all ranks."""
        return self._batch[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of sequences per backward pass on each rank."""
        return self._batch[1]

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backward passes per step."""
        return self._batch[2]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return sequences per step, sequences per rank and backward, and backwards per step."""
        return self._batch

    @property
    def global_samples(self) -> int:
        """The number of sequences processed so far, over all ranks and steps."""
        return self.global_steps * self._batch[0]

    def fp16_enabled(self) -> bool:
        """Return whether the configuration specifies float16 compute."""
        return bool(self._said.get("fp16.enabled"))

    def bfloat16_enabled(self) -> bool:
        """Return whether the configuration specifies bfloat16 compute."""
        return bool(self._said.get("bf16.enabled"))

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the configuration's ZeRO stage."""
        return int(self._said.get("zero_optimization.stage", 0))

    def gradient_clipping(self) -> float:
        """Return the maximum gradient norm, or 0 if clipping is off."""
        return self._clip

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm, before clipping, or None before the first step."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` changed parameters."""
        return self._applied

    def zero_grad(self) -> None:
        """Clear the gradients of the optimizer's parameters."""
        self.optimizer.zero_grad()

    @property
    def cur_scale(self) -> float:
        """The loss scale, or 1 without loss scaling."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next call to :meth:`step` completes a step."""
        return (self.micro_steps + 1) % self._batch[2] == 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local inside the block, where calling :meth:`step` raises an error."""
        context: AbstractContextManager[Any] = _units.no_sync(self.module)
        with context:
            self._in_no_sync = True
            try:
                yield
            finally:
                self._in_no_sync = False

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward on this rank's loss, divided by the number of backward passes per step.

        Parameters
        ----------
        loss : Tensor
            The loss of this micro-batch.
        retain_graph : bool, default False
            Keep the graph for another backward through the same forward.
        scale_wrt_gas : bool, default True
            False if the loss is already divided.

        Returns
        -------
        Tensor
            The divided loss.
        """
        if not self._in_no_sync:
            for m in self.module.modules():
                if isinstance(m, FSDPModule):
                    m.set_requires_gradient_sync(
                        self.is_gradient_accumulation_boundary(), recurse=False
                    )
        loss = loss / self._batch[2] if scale_wrt_gas else loss
        (loss * self.cur_scale if self._scaler else loss).backward(retain_graph=retain_graph)
        self._ran_backward = True
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; after the last one, clip, step and clear gradients (collective).

        Parameters
        ----------
        lr_kwargs : mapping, optional
            Arguments for the scheduler's ``step``.
        """
        if self._in_no_sync:
            raise RuntimeError("engine.step() inside engine.no_sync(): gradients are not reduced")
        if not self._ran_backward and (self._batch[2] > 1 or self._scaler is not None):
            raise RuntimeError(
                "engine.step() without engine.backward(loss): loss.backward() does not divide by "
                f"gradient_accumulation_steps {self._batch[2]}, and knows no loss scale"
            )
        self._ran_backward = False
        ends = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._applied = False
        if not ends:
            return
        self.global_steps += 1
        self._applied = self._apply()
        if self._applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad()

    def _apply(self) -> bool:
        """Clip and step, unless the gradients overflowed."""
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        scale = self.cur_scale
        limit = self._clip * scale if self._clip > 0 else math.inf
        norm = float(clip_grad_norm_(params, limit))
        overflowed = self._skips and not math.isfinite(norm)
        if self._scaler is not None:
            self._scaler._adjust(overflowed)
        if overflowed:
            return False
        if self._scaler is not None:
            torch._foreach_mul_([p.grad for p in params if p.grad is not None], 1 / scale)
        self._norm = norm / scale
        self.optimizer.step()
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write ``save_dir/tag`` with :func:`fsdpc.checkpoint.save`; collective.

        Parameters
        ----------
        save_dir : path
        tag : str, optional
            By default ``global_step<n>``.
        client_state : mapping, optional
            The script's own state: numbers, text, lists, tuples and dicts.
        save_latest : bool, default True
            Whether to write the tag to ``save_dir/latest``.
        """
        tag = tag or f"global_step{self.global_steps}"
        counts = (self.micro_steps, self.global_steps, self.skipped_steps)
        extra = {"counts": list(counts), "client_state": dict(client_state or {})}
        checkpoint.save(Path(save_dir) / tag, self._state(extra=extra), overwrite=True)
        if save_latest and self.global_rank == 0:
            made = Path(save_dir) / f".latest.{os.getpid()}"
            made.write_text(tag, encoding="utf-8")
            made.replace(Path(save_dir) / "latest")
        distributed.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint from :meth:`save_checkpoint`, on any number of ranks (collective).

        Returns
        -------
        (str or None, dict)
            The folder, or None if ``load_dir`` has no ``latest``, and the script's state.
        """
        latest = Path(load_dir) / "latest"
        if tag is None and not latest.is_file():
            return None, {}
        path = Path(load_dir) / (tag or latest.read_text(encoding="utf-8").strip())
        state = self._state()
        if load_module_only or not load_optimizer_states:
            state.pop("optimizer", None)
            state.pop("scaler", None)
        if load_module_only or not load_lr_scheduler_states:
            state.pop("scheduler", None)
        extra = checkpoint.load(path, state, strict=load_module_strict).extra
        if not load_module_only:
            self.micro_steps, self.global_steps, self.skipped_steps = extra["counts"]
        return str(path), extra["client_state"]

    def _state(self, **others: Any) -> dict[str, Any]:
        parts = {
            "model": self.module, "optimizer": self.optimizer, "scheduler": self.lr_scheduler,
            "scaler": self._scaler,
        }  # fmt: skip
        return {**{name: part for name, part in parts.items() if part is not None}, **others}

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Write full parameters in the compute dtype, using ``torch.save`` on rank 0 (collective).

        Parameters
        ----------
        save_dir : path
        save_filename : str, default "pytorch_model.bin"
        """
        half = next((_DTYPES[n] for n in ("bf16", "fp16") if self._said.get(f"{n}.enabled")), None)
        state = get_model_state_dict(self.module, rank0_only=True)
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            found = {
                name: value.to(half) if half and value.is_floating_point() else value
                for name, value in state.items()
            }
            torch.save(found, Path(save_dir) / save_filename)
        distributed.barrier()
        return True
