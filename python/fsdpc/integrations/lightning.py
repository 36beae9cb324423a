"""Strategies for Lightning's Trainer and Fabric over :mod:`fsdpc.torch`.

Pass ``Trainer(strategy=FsdpcStrategy())`` or ``Fabric(strategy=FsdpcFabricStrategy())``; after
importing this module, ``"fsdpc"`` also works for either. Both launch processes and communicate like
Lightning's DDP strategies, because its FSDP and model-parallel strategies do not support CPUs or
loss scaling. Tested with lightning 2.6.

A LightningModule is the outermost unit, so its steps can read any of its parameters. With manual
optimization, backward runs inside a step, so each child is an outermost unit instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from fsdpc.integrations import _units
from fsdpc.torch import (
    FSDPModule,
    MixedPrecisionPolicy,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from fsdpc.torch._made_before import places_of
from fsdpc.torch.optim_state import rekey

StateDictType = Literal["full", "sharded"]
_MODEL = "model"  # the model's name in a folder, as Lightning's consolidate_checkpoint expects


class FsdpcStrategy(DDPStrategy):
    """Shards a LightningModule across a Trainer's ranks.

    Parameters
    ----------
    units : optional
        Modules to gather as units: classes or their names, or a plan as for
        :func:`fsdpc.torch.fully_shard`. None means the ``fsdp_plan`` of transformers models, or the
        elements of each ``nn.ModuleList``. If ``configure_model`` shards, this is ignored, and only
        the remaining parameters form a unit.
    state_dict_type : {"full", "sharded"}, default "full"
        Format of checkpoints. "full": Lightning's file, written on rank 0, from which any strategy
        can resume. "sharded": a folder of ``torch.distributed.checkpoint``, written by all ranks.
    cluster_environment : ClusterEnvironment, optional
        The ranks' launcher, as for any Lightning strategy. ``fsdpc run`` and ``fsdpc.launch`` are
        detected in addition to the launchers that Lightning detects.
    precision_plugin : Precision, optional
        For "16-mixed" on CPUs, ``MixedPrecision("16-mixed", "cpu")``; on CPUs the Trainer replaces
        its own argument with "bf16-mixed".
    process_group_backend : str, optional
    start_method : {"popen", "spawn", "fork", "forkserver"}, default "popen"
        How Lightning starts ranks if no launcher has started them.
    options
        Options of :func:`fsdpc.torch.fully_shard`, such as ``strategy``, ``mp_policy`` and
        ``offload_policy``.

    Notes
    -----
    With mixed precision, inner units are gathered and compute in the lower dtype, reduce in float32
    and cast their inputs. The outermost unit stays in float32 under autocast, as in DDP.
    ``mp_policy`` replaces both.
    """

    strategy_name = "fsdpc"

    def __init__(
        self,
        units: _units.Units = None,
        state_dict_type: StateDictType = "full",
        *,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment or _environment(),
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self._sharded = _is_sharded_type(state_dict_type)
        self._fsdpc_units, self._options = units, options

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True, because parameters are loaded into units after sharding."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return False, because :meth:`load_checkpoint` restores optimizers by name."""
        return False

    def setup(self, trainer: Trainer) -> None:
        """Shard the module if necessary, and create optimizers for its parameters (collective)."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        _refuse_callbacks(trainer)
        module = self.lightning_module
        if self._layer_sync is not None:
            raise NotImplementedError("sync_batchnorm: convert layers in the module's __init__")
        self.precision_plugin.convert_module(module)
        if not _units.is_sharded(module) and not any(p.is_meta for p in module.parameters()):
            self.model_to_device()
        inner = _inner_options(self.precision_plugin, MixedPrecision, self._options)
        for m in [module] if module.automatic_optimization else _children(module):
            _units.shard(m, self._fsdpc_units, inner, self._options)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's method as the forward of the outermost unit."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's method as the outermost unit's forward."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's method as the outermost unit's forward."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's method as the outermost unit's forward."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        module = self.lightning_module
        method = getattr(module, name)
        if isinstance(module, FSDPModule):
            return module._fsdpc_run(method, args, kwargs)
        return method(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients local for accumulation."""
        assert self.lightning_module is not None
        with _units.no_sync(self.lightning_module):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return full parameters on rank 0, or DTensors (collective)."""
        assert self.lightning_module is not None
        return _model_state(self.lightning_module, self._sharded)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return full states on rank 0, indexed as in torch, or DTensors (collective)."""
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return _optimizer_state(self.lightning_module, optimizer, self._sharded)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file from rank 0, or a folder from all ranks (collective)."""
        assert self.lightning_module is not None
        path = Path(self.broadcast(filepath))
        if not self._sharded:
            if self.is_global_zero and _units.is_folder_of_parts(path):
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError('storage_options: folders (state_dict_type="sharded") take none')
        names = [f"optimizer_{i}" for i in range(len(checkpoint.get("optimizer_states", ())))]
        states = dict(zip(names, checkpoint.pop("optimizer_states", ()), strict=True))
        state = {_MODEL: checkpoint.pop("state_dict"), **states}
        _units.save_parts(path, state, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the model and, if fitting, optimizers from either checkpoint type (collective)."""
        module = self.lightning_module
        assert module is not None
        path = Path(self.broadcast(checkpoint_path))
        strict = module.strict_loading
        if _units.is_folder_of_parts(path):
            named = {f"optimizer_{i}": o for i, o in enumerate(self.optimizers)}
            _units.load_parts(path, (_MODEL, module), named, strict)
            return self.checkpoint_io.load_checkpoint(path / _units.META, weights_only=weights_only)
        if path.is_dir():
            raise ValueError(f"{path} is a folder without {_units.META}: its save did not end")
        checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        states = checkpoint.get("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            set_optimizer_state_dict(module, optimizer, _named(module, optimizer, state))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full parameters from a file; those in a folder are already loaded."""
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict)

    def on_exception(self, exception: BaseException) -> None:
        """Do nothing, because the engine itself reports where ranks are waiting."""

    def teardown(self) -> None:
        """Do not move the module or the optimizers, because units stay on their device."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name "fsdpc"; the base class registers its own names."""
        strategy_registry.register("fsdpc", cls, description="units sharded by fsdpc")


class FsdpcFabricStrategy(FabricDDPStrategy):
    """Shards the module passed to ``fabric.setup``.

    Parameters
    ----------
    units, state_dict_type, cluster_environment, start_method, options
        As for :class:`FsdpcStrategy`.
    precision : Precision, optional
        For "16-mixed" on CPUs, Fabric's ``MixedPrecision``.

    Notes
    -----
    ``fabric.setup(model, optimizer)`` switches the optimizer to the sharded parameters, even if it
    was created earlier. A checkpoint contains exactly one model, which ``state`` must include.
    """

    def __init__(
        self,
        units: _units.Units = None,
        state_dict_type: StateDictType = "full",
        *,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment or _environment(),
            precision=precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self._sharded = _is_sharded_type(state_dict_type)
        self._fsdpc_units, self._options = units, options
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]

    def setup_module(self, module: nn.Module) -> Any:
        """Shard a module; collective."""
        inner = _inner_options(self.precision, FabricMixedPrecision, self._options)
        _units.shard(module, self._fsdpc_units, inner, self._options)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> Any:
        """Shard a module and make the optimizers update its sharded parameters (collective)."""
        places = places_of(module)
        self.setup_module(module)
        for optimizer in optimizers:
            _units.move(optimizer, places)
        return module, optimizers, scheduler

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a file on rank 0, or a folder from all ranks; collective."""
        path = Path(self.broadcast(path))
        key, module, optimizers = _parts_of(state)
        converted = {key: _model_state(module, self._sharded)}
        for name, optimizer in optimizers.items():
            converted[name] = _optimizer_state(module, optimizer, self._sharded)
        rest = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()
            if name not in converted
        }
        for part in (converted, rest):
            for name, wanted in (filter or {}).items():
                if name in part:
                    part[name] = {k: v for k, v in part[name].items() if wanted(k, v)}
        if self._sharded:
            _units.save_parts(path, converted, rest)
        elif self.is_global_zero:
            if _units.is_folder_of_parts(path):
                shutil.rmtree(path)
            self.checkpoint_io.save_checkpoint({**converted, **rest}, path, storage_options)
        self.barrier()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load entries of ``state`` in place, on any number of ranks, and return the others."""
        path = Path(self.broadcast(path))
        if not _units.is_folder_of_parts(path) and (not state or isinstance(state, nn.Module)):
            return super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, nn.Module) or not state:
            raise ValueError("a folder is loaded into a state: pass {'model': model, ...}")
        key, module, optimizers = _parts_of(state)
        if _units.is_folder_of_parts(path):
            _units.load_parts(path, (key, module), optimizers, strict)
            rest = self.checkpoint_io.load_checkpoint(path / _units.META, weights_only=weights_only)
        else:
            rest = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            module.load_state_dict(rest.pop(key), strict=strict)
            for name, optimizer in optimizers.items():
                states = _named(module, optimizer, rest.pop(name))
                set_optimizer_state_dict(module, optimizer, states)
        for name, value in list(state.items()):
            if name == key or name in optimizers:
                continue
            if name not in rest:
                if strict:
                    raise KeyError(f"the checkpoint has no '{name}', which the state asks for")
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name "fsdpc"; the base class keeps its own names."""
        strategy_registry.register("fsdpc", cls, description="units sharded by fsdpc")


class _NoSync:
    """Implements Fabric's ``no_backward_sync`` for units."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return _units.no_sync(module) if enabled else nullcontext()


def _environment() -> ClusterEnvironment | None:
    """Return an environment that reads torchrun's variables, if fsdpc's launchers set them."""
    return TorchElasticEnvironment() if "FSDPC_LAUNCHER_PID" in os.environ else None


def _is_sharded_type(state_dict_type: str) -> bool:
    if state_dict_type not in ("full", "sharded"):
        raise ValueError(f"state_dict_type is 'full' or 'sharded', got {state_dict_type!r}")
    return state_dict_type == "sharded"


def _inner_options(precision: Any, mixed: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Derive inner units' options from a precision plugin, unless the user passed a policy."""
    if "mp_policy" in options or not isinstance(precision, mixed):
        return {}
    dtype = torch.float16 if precision.precision == "16-mixed" else torch.bfloat16  # type: ignore[attr-defined]
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}


def _children(module: LightningModule) -> list[nn.Module]:
    """Return the child modules to shard if backward runs inside a step."""
    own = [name for name, p in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"{type(module).__name__} has parameters of its own, {own[:3]}, and manual "
            "optimization, where it is no unit: put them into a module inside of it"
        )
    return [m for m in module.children() if any(True for _ in m.parameters())]


def _refuse_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise NotImplementedError(
                f"{type(callback).__name__} keeps a copy of the whole model, and units "
                "have rows: keep an average of the parameters in on_train_batch_end instead"
            )


def _model_state(module: nn.Module, sharded: bool) -> dict[str, Any]:
    """Return DTensors, or full parameters on rank 0 (collective)."""
    if sharded:
        return get_model_state_dict(module, sharded=True)
    return get_model_state_dict(module, rank0_only=True)


def _optimizer_state(module: nn.Module, optimizer: Any, sharded: bool) -> dict[str, Any]:
    """Return DTensors, or the unsharded optimizer's full states on rank 0 (collective)."""
    if sharded:
        return get_optimizer_state_dict(module, optimizer, sharded=True)
    states = get_optimizer_state_dict(module, optimizer, rank0_only=True)
    return rekey(states, module, optimizer, by_name=False) if states else {}


def _named(module: nn.Module, optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
    """Key a file's states by parameter name; those from a consolidated folder already are."""
    if all(isinstance(name, str) for group in states["param_groups"] for name in group["params"]):
        return states
    return rekey(states, module, optimizer, by_name=True)


def _parts_of(state: Mapping[str, Any]) -> tuple[str, nn.Module, dict[str, Any]]:
    """Return the key and module of a state's only sharded model, and the optimizers."""
    models = [(k, m) for k, m in state.items() if isinstance(m, nn.Module) and _units.is_sharded(m)]
    if len(models) != 1:
        raise ValueError(
            f"a checkpoint is of one model that fabric.setup() sharded, and the state has "
            f"{len(models)}: {list(state)}"
        )
    optimizers = {k: o for k, o in state.items() if isinstance(o, torch.optim.Optimizer)}
    return *models[0], optimizers


#: For ``strategy="fsdpc"``; they may exist if this module was imported before.
_REGISTRIES: tuple[tuple[Any, Callable[[Any], None]], ...] = (
    (StrategyRegistry, FsdpcStrategy.register_strategies),
    (STRATEGY_REGISTRY, FsdpcFabricStrategy.register_strategies),
)
for _registry, _register in _REGISTRIES:
    if "fsdpc" not in _registry:
        _register(_registry)
