"""Support for torchtitan's decoders: a ``parallelize_fn`` based on :mod:`fsdpc.torch`.

``model_spec = use(model_spec)`` makes a torchtitan trainer shard with fsdpc. This module does not
import torchtitan; it uses the argument names of version 0.3. Tensor, context, pipeline and expert
parallelism are not supported.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc.torch import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdpc.torch._initialise import full_values
from fsdpc.torch._unit import states_of

__all__ = ["parallelize", "use"]

_OTHERS = ("tp", "cp", "pp", "ep")


def use(spec: Any) -> Any:
    """Return a model specification whose ``parallelize_fn`` is :func:`parallelize`.

    Parameters
    ----------
    spec : torchtitan.protocols.model_spec.ModelSpec
        Specification for a decoder: a model with ``tok_embeddings``, ``layers``, ``norm`` and
        ``lm_head``.
    """
    return dataclasses.replace(spec, parallelize_fn=parallelize)


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Checkpoint activations and shard the model, as torchtitan's own function does (collective).

    Parameters
    ----------
    model : nn.Module
        The model, on the meta device or not.
    parallel_dims, training, parallelism, compile_config, ac_config, dump_folder
        As for torchtitan's own function.

    Raises
    ------
    NotImplementedError
        The configuration requires an unsupported feature; the error names it.
    """
    asked = [name for name in _OTHERS if getattr(parallel_dims, f"{name}_enabled", False)]
    if asked:
        raise NotImplementedError(f"parallel dimensions {asked}: fsdpc shards only over data")
    if getattr(parallelism, "spmd_backend", "default") in ("full_dtensor", "spmd_types"):
        raise NotImplementedError(
            f"spmd_backend {parallelism.spmd_backend!r}: only parameters are DTensors here; set "
            "parallelism.spmd_backend to 'partial_dtensor'"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise NotImplementedError("compile.components has 'model': leave it out")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(
            getattr(torch, training.mixed_precision_param),
            getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
    }
    _shard(model, options, parallelism.fsdp_reshard_after_forward)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)  # the trainer divides losses by all ranks' tokens
    model.__dict__["init_weights"] = partial(_init_weights, model)
    return model


def _shard(model: Any, options: dict[str, Any], reshard: str) -> None:
    """Make units of the embedding, each layer, the norm and head together, and the remainder."""
    if reshard not in ("default", "always", "never"):
        raise ValueError(f"fsdp_reshard_after_forward is default, always or never: {reshard!r}")
    inner = {**options, "reshard_after_forward": reshard != "never"}
    last = {**options, "reshard_after_forward": reshard == "always"}
    ends = [m for m in (model.norm, model.lm_head) if m is not None]
    if model.tok_embeddings is not None and getattr(model, "enable_weight_tying", False):
        ends.insert(0, model.tok_embeddings)
    elif model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **inner)
    if ends:
        fully_shard(ends, **last)
    for layer in model.layers.values():
        fully_shard(layer, **inner)
    fully_shard(model, **options)


def _init_weights(model: nn.Module, **kwargs: Any) -> None:
    """Call the model's method on full parameters, then keep this rank's rows (collective)."""
    with full_values(states_of(model)):
        type(model).init_weights(model, **kwargs)  # type: ignore[operator]
