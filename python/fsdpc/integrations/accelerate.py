"""fsdpc under Hugging Face's Accelerate: one call that replaces ``accelerator.prepare``.

    from fsdpc.integrations.accelerate import prepare

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

The rest of the script does not change, and no part of Accelerate is replaced. The model is prepared
as for evaluation, with autocast only, because units reduce gradients themselves. The optimizer is
an ``AcceleratedOptimizer`` whose state dict contains full tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType
from safetensors.torch import load_file
from torch import nn

from fsdpc.sharding.rules import is_sharded
from fsdpc.torch import get_model_state_dict, optim_state, shard_by_plan
from fsdpc.torch._made_before import give_params, places_of
from fsdpc.torch._mesh import join
from fsdpc.torch.plan import has_plan, layer_classes

#: Options that themselves shard, split or wrap a model.
_OTHERS = {
    DistributedType.FSDP: "FSDP (--use_fsdp, or an fsdp_plugin)",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


class WholeStateOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer, whose state dict contains unsharded tensors by index (collective).

    An optimizer for the unsharded model can load this state dict, and vice versa, on any number of
    ranks.

    Parameters
    ----------
    model : nn.Module
        The sharded model.
    optimizer : torch.optim.Optimizer
        An optimizer over the model's sharded parameters.
    scaler : torch.amp.GradScaler, optional
        The accelerator's scaler.

    Examples
    --------
    As in :func:`prepare`::

        optimizer = WholeStateOptimizer(model, torch.optim.AdamW(model.parameters()))
        torch.save(optimizer.state_dict(), "optimizer.pt")  # on each rank: it gathers
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None):
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._model = model
        self._gathered: dict[str, Any] | None = None
        self._is_accelerate_prepared = True  # so that Accelerate does not wrap it again

    def state_dict(self) -> dict[str, Any]:
        """Return unsharded states on rank 0 and an empty dict on the other ranks (collective)."""
        if self._gathered is not None:
            return self._gathered
        states = optim_state.get_optimizer_state_dict(self._model, self.optimizer, rank0_only=True)
        return states and optim_state.rekey(states, self._model, self.optimizer, by_name=False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the states; inside the block, any rank may call ``state_dict()`` on its own."""
        self._gathered = self.state_dict()
        try:
            yield
        finally:
            self._gathered = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's rows from unsharded states, which must be passed on every rank."""
        states = optim_state.rekey(state_dict, self._model, self.optimizer, by_name=True)
        optim_state.set_optimizer_state_dict(self._model, self.optimizer, states)


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, **options: Any) -> Any:
    """Shard a model and prepare it with its optimizers, loaders and schedulers (collective).

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        From a plain data-parallel launch (``MULTI_CPU``, ``MULTI_GPU``) without FSDP or DeepSpeed.
    model : nn.Module
        Sharded by :func:`fsdpc.torch.shard_by_plan`, unless it already is.
    *others
        Optimizers for this model, loaders and schedulers, as for ``accelerator.prepare``. An
        optimizer created before sharding switches to the sharded parameters, unless it has stepped.
    **options
        Options of ``shard_by_plan``: ``classes`` and those of ``fully_shard``. Without ``classes``,
        if the plan matches no layers, modules of the classes in ``_no_split_modules`` become units.

    Returns
    -------
    tuple
        The model and the other objects, in the given order; only the model if it is the only
        argument.

    Raises
    ------
    ValueError
        The accelerator was launched with another engine or a different number of ranks, an
        optimizer has already stepped, options are given for a sharded model, or the model has no
        plan.

    Notes
    -----
    The accelerator's ``backward``, ``accumulate``, ``clip_grad_norm_``, ``clip_grad_value_``,
    ``gather_for_metrics``, ``get_state_dict``, ``save_model``, ``save_state`` and ``load_state``
    work as usual. The last two gather; :mod:`fsdpc.checkpoint` writes each rank's rows instead.

    Examples
    --------
    ::

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader = prepare(
            accelerator, model, optimizer, loader, classes=["Block"]
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    """
    check(accelerator)
    optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
    if not is_sharded(model):
        _check_ranks(accelerator)
        if accelerator.device_placement and not any(p.is_meta for p in model.parameters()):
            model.to(accelerator.device)
        names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        for optimizer in optimizers:
            _check_new(optimizer, names)
        places = places_of(model)
        if "classes" not in options and not has_plan(model):
            options["classes"] = layer_classes(model) or None  # like Accelerate's FSDP
        shard_by_plan(model, **options)
        for optimizer in optimizers:
            give_params(optimizer, places)
    elif options:
        raise ValueError(
            f"{type(model).__name__} is sharded already: leave out {sorted(options)}, or give "
            "prepare() the model before fully_shard()"
        )
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    model._is_accelerate_prepared = True  # otherwise Accelerate would wrap it in DDP
    accelerator.get_state_dict = partial(_full_state_dict, accelerator)  # type: ignore[method-assign]
    accelerator.register_load_state_pre_hook(_load)
    found = [
        WholeStateOptimizer(model, each, accelerator.scaler)
        if isinstance(each, torch.optim.Optimizer)
        else each
        for each in others
    ]
    if not found:
        return model
    prepared = accelerator.prepare(*found)
    return (model, *(prepared if len(found) > 1 else (prepared,)))


def _full_state_dict(accelerator: Accelerator, model: Any, unwrap: bool = True) -> Any:
    """Return full tensors on every rank, which Accelerate saves; collective if it is sharded."""
    if is_sharded(model):
        return get_model_state_dict(model)
    return type(accelerator).get_state_dict(accelerator, model, unwrap)


def _load(models: list[nn.Module], folder: str) -> None:
    """Load the models that ``save_state`` saved, and leave none for Accelerate to load."""
    torch.distributed.barrier()  # rank 0 may still be writing: save_state() does not wait for it
    for i, model in enumerate(models):
        suffix = f"_{i}" if i else ""
        path = Path(folder) / f"model{suffix}.safetensors"
        if path.exists():
            values = load_file(path)
            named = dict(model.named_parameters(remove_duplicate=False))
            first = {id(named[n]): values[n] for n in values if n in named}
            for n, p in named.items():  # tied parameters are in the file once
                if id(p) in first:
                    values.setdefault(n, first[id(p)])
            model.load_state_dict(values)
        else:
            path = Path(folder) / f"pytorch_model{suffix}.bin"
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    models.clear()


def check(accelerator: Accelerator) -> None:
    """Raise ValueError if the accelerator is configured to shard or split models itself."""
    engine = _OTHERS.get(accelerator.distributed_type)
    if getattr(accelerator, "parallelism_config", None) is not None:
        engine = "a parallelism_config"
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={hook}): units reduce gradients themselves; "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=...) says in what dtype"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise ValueError("save_on_each_node: only rank 0 has whole states, for all hosts' folder")
    if engine is not None:
        raise ValueError(
            f"the accelerator was made for {engine}, and fsdpc shards the model itself: leave it "
            "out of the launch and of Accelerator(), and give prepare() options of fully_shard() "
            "(mesh, strategy, mp_policy, offload_policy)"
        )


def _check_ranks(accelerator: Accelerator) -> None:
    """Raise ValueError if the accelerator would give every rank the same data."""
    ranks = join().size
    if ranks != accelerator.num_processes:
        raise ValueError(
            f"fsdpc has {ranks} ranks, and the accelerator counts {accelerator.num_processes}, so "
            "loaders would give ranks the same data: on CPUs under torchrun make it "
            "Accelerator(cpu=True), and TrainingArguments(use_cpu=True)"
        )


def _check_new(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise ValueError if sharding would discard existing optimizer states."""
    for p in optimizer.state:
        if id(p) in names and optimizer.state[p]:
            raise ValueError(
                f"{type(optimizer).__name__} has states of the unsharded '{names[id(p)]}': give it "
                "to prepare() before its first step, and load states afterwards"
            )
