"""``FullyShardedDataParallel``: FSDP1's call over the same units.

``FullyShardedDataParallel(module, ...)`` shards the module in place and returns it. The module's
class changes to a subclass of ``FullyShardedDataParallel``, :class:`fsdpc.torch.FSDPModule` and its
previous class. Parameter names therefore do not change, and nested calls need no special treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fsdpc.sharding.fsdp_module import plain_class
from fsdpc.sharding.rules import is_sharded, outside_units, sharded_class
from fsdpc.sharding.strategies import ShardingStrategy, host_mesh
from fsdpc.torch import _comm_hooks, _device, optim_state, state_dict
from fsdpc.torch._checks import log_once
from fsdpc.torch._mesh import join
from fsdpc.torch._module import FSDPModule, fully_shard
from fsdpc.torch._unit import states_of
from fsdpc.torch.clip import clip_grad_norm_
from fsdpc.torch.policies import CPUOffloadPolicy, MixedPrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import StateDictSettings


class FullyShardedDataParallel(FSDPModule):
    """Shard a module with FSDP1's arguments, in the same order; collective.

    Parameters
    ----------
    module : nn.Module
        Modified in place and returned.
    process_group : ProcessGroup or (shard group, replicate group), optional
        All ranks by default.
    sharding_strategy : ShardingStrategy, default FULL_SHARD
        HYBRID_SHARD without groups or a mesh shards within a host and replicates over hosts.
    cpu_offload : CPUOffload, optional
        On GPUs, keeps masters, gradients and optimizer states in pinned host memory. Has no effect
        on CPUs, which is logged once.
    auto_wrap_policy : callable or policy, optional
        Selects units, as in :mod:`fsdpc.torch.wrap` or ``torch.distributed.fsdp.wrap``.
    backward_prefetch, forward_prefetch, limit_all_gathers
        All-gathers always follow the recorded order; conflicting values are logged once.
    mixed_precision : MixedPrecision, optional
    ignored_modules, ignored_states : iterable, optional
        Modules or parameters that are neither sharded nor reduced.
    param_init_fn : callable, optional
        Called on every module with meta parameters, unit by unit, before sharding. By default,
        ``to_empty`` and ``reset_parameters`` are called.
    device_id : torch.device, str or int, optional
        Device to move the module to, unless it is on the meta device. An int is a GPU index.
    sync_module_states : bool, default False
        Copy rank 0's parameters and buffers; otherwise different initial values are an error.
    use_orig_params : bool, default False
        Accepted: parameters are always the original ones, under their names.
    device_mesh : DeviceMesh, optional

    Returns
    -------
    the same module

    Raises
    ------
    NotImplementedError
        An option cannot work here; the error says why.

    Notes
    -----
    ``model.module`` is the same module without this class. Source: PyTorch FSDP (Zhao et al. 2023).

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import FullyShardedDataParallel
    >>> model = FullyShardedDataParallel(torch.nn.Linear(4, 2), use_orig_params=True)
    >>> model(torch.ones(1, 4)).shape
    torch.Size([1, 2])
    """

    def __new__(
        cls,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = "BACKWARD_PRE",
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
    ) -> Any:
        if cls is not FullyShardedDataParallel:
            raise TypeError(f"{cls.__name__} is what sharding made of a module: make a plain one")
        _move(module, device_id)
        ahead = forward_prefetch or not limit_all_gathers
        hints = _hints(module, cpu_offload, backward_prefetch, ahead)
        options = {
            "sharding_strategy": sharding_strategy,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "sync_module_states": sync_module_states,
            "process_group": process_group,
            "device_mesh": device_mesh,
            "cpu_offload": cpu_offload,
        }
        ignored = _ignored(ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            _shard_inside(module, auto_wrap_policy, options, ignored)
        _shard(module, options, ignored, outer=True)
        for text in hints:
            log_once(text)
        return module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because the module already exists."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name in ("module", "_fsdp_wrapped_module"):
                return _without_class(self)
            raise

    def __getitem__(self, key: Any) -> Any:
        return _without_class(self)[key]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their global norm, and return the norm; collective."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)  # type: ignore[attr-defined]

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Accept torch's own hooks, as options of :class:`fsdpc.Compression`; call before forwards.

        ``bf16_compress_hook`` and ``fp16_compress_hook`` apply to what leaves a host; ranks of a
        host sum exactly. Their ``state`` is None or a process group as large as the model's.
        ``powerSGD_hook`` applies to replicas. Its ``PowerSGDState`` is read once; factors begin
        with other random numbers than torch's, and ``orthogonalization_epsilon`` is not needed.
        """
        _comm_hooks.register([each.unit for each in states_of(self)], state, hook)  # type: ignore[arg-type]

    def check_is_root(self) -> bool:
        """Return whether this unit is the outermost, which is known after the first forward."""
        root = self._fsdpc_state.root
        return root is not None and root.head is self._fsdpc_state.torch_unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return all sharded modules in a module, including itself, outermost first."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if root_only:
            inner = {id(c) for m in found for c in m.modules() if c is not m}
            found = [m for m in found if id(m) not in inner]
        return found

    summon_full_params: Final = staticmethod(state_dict.summon_full_params)

    # ---- state dicts ----

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict that :meth:`state_dict_type` selects, or a full one; collective."""
        rows, rank0_only = _wanted(self, "state_dict_config")
        if state_dict._Option.depth:
            return super().state_dict(*args, **kwargs)
        if rows:
            return state_dict.local_state_dict(self, *args, **kwargs)  # type: ignore[arg-type]
        call = super().state_dict
        if rank0_only:
            full = state_dict.get_model_state_dict(self, rank0_only=True)  # type: ignore[arg-type]
            found = {} if kwargs.get("destination") is None else kwargs["destination"]
            found.update({kwargs.get("prefix", "") + name: t for name, t in full.items()})
            return found
        return state_dict.module_state_dict(self, call, args, kwargs)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Set the type of state dict that ``state_dict()`` returns; return the old settings."""
        from torch.distributed import fsdp

        before = FullyShardedDataParallel.get_state_dict_type(module)
        kind = fsdp.StateDictType[state_dict_type.name]
        if kind is fsdp.StateDictType.LOCAL_STATE_DICT:
            raise NotImplementedError(
                "LOCAL_STATE_DICT holds FSDP1's flat parameters, which do not exist here: "
                "SHARDED_STATE_DICT has DTensors by name"
            )
        what = kind.name.partition("_")[0].title()  # Full or Sharded
        for config in (state_dict_config, optim_state_dict_config):
            if config is not None and type(config).__name__.startswith("Full") != (what == "Full"):
                raise ValueError(f"{type(config).__name__} does not go with {kind.name}")
        settings = fsdp.StateDictSettings(
            kind,
            state_dict_config or getattr(fsdp, f"{what}StateDictConfig")(),
            optim_state_dict_config or getattr(fsdp, f"{what}OptimStateDictConfig")(),
        )
        for m in FullyShardedDataParallel.fsdp_modules(module):
            m.__dict__["_fsdp1_settings"] = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings of ``state_dict()``."""
        from torch.distributed import fsdp

        return _settings(module) or fsdp.StateDictSettings(
            fsdp.StateDictType.FULL_STATE_DICT,
            fsdp.FullStateDictConfig(),
            fsdp.FullOptimStateDictConfig(),
        )

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """Set the type of state dict that ``state_dict()`` returns within the context."""
        cls = FullyShardedDataParallel
        before = cls.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for m in cls.fsdp_modules(module):
                m.__dict__["_fsdp1_settings"] = before

    # ---- optimizer states ----

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Any = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return optimizer states by name, as :meth:`state_dict_type` specifies; collective."""
        source = optim if optim_state_dict is None else optim_state.Saved(optim, optim_state_dict)
        rows, rank0 = _wanted(model, "optim_state_dict_config")
        if rows:
            return optim_state.local_optimizer_state_dict(model, source)
        return optim_state.get_optimizer_state_dict(model, source, rank0_only=rank0)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return this rank's part of named states, for ``optim.load_state_dict``.

        Parameters
        ----------
        model, optim
        optim_state_dict : dict
            Result of :meth:`optim_state_dict`; rank 0's if the configuration sets ``rank0_only``.
        is_named_optimizer : bool, default False
            Refused.
        load_directly : bool, default False
            Also load the result into the optimizer.
        group : optional
            Ignored: all ranks take part.
        """
        if is_named_optimizer:
            raise NotImplementedError("is_named_optimizer: pass a torch.optim.Optimizer")
        _, rank0 = _wanted(model, "optim_state_dict_config")
        result = optim_state.to_load(model, optim, optim_state_dict, rank0_only=rank0)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return full states by parameter name, as older versions of FSDP1 do; collective."""
        return optim_state.get_optimizer_state_dict(model, optim, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Return this rank's rows of the states, by parameter name."""
        return optim_state.local_optimizer_state_dict(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of full states; every rank passes all of them."""
        return optim_state.to_load(model, _given(optim), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Convert a :meth:`sharded_optim_state_dict` result for ``optim.load_state_dict``."""
        return optim_state.to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return this rank's part of full states, which only rank 0 passes; collective."""
        return optim_state.to_load(model, _given(optim), full_optim_state_dict, rank0_only=True)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: Any,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert states keyed by index to states keyed by parameter name, or the reverse.

        Parameters
        ----------
        optim_state_dict : dict
        optim_state_key_type : OptimStateKeyType
            Key type for the result.
        model : nn.Module
            Sharded or plain.
        optim_input : optional
            Ignored.
        optim : Optimizer, optional
            The optimizer whose parameter order the indices follow; by default the model's order.
        """
        by_name = optim_state_key_type.name == "PARAM_NAME"
        return optim_state.rekey(optim_state_dict, model, optim, by_name)


def _settings(module: nn.Module) -> StateDictSettings | None:
    """Return a module's state dict settings, or None for full tensors on all ranks."""
    found = FullyShardedDataParallel.fsdp_modules(module)
    return found[0].__dict__.get("_fsdp1_settings") if found else None


def _wanted(module: nn.Module, config: str) -> tuple[bool, bool]:
    """Return whether state dicts are sharded, and whether only rank 0 gets full ones."""
    settings = _settings(module)
    kind = getattr(settings, "state_dict_type", None)
    rank0_only = getattr(getattr(settings, config, None), "rank0_only", False)
    return kind is not None and kind.name == "SHARDED_STATE_DICT", rank0_only


def _given(optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optim is None:
        raise ValueError("optim: pass the optimizer that the states are for")
    return optim


def _without_class(module: Any) -> Any:
    """Return the module without the FSDP1 class, so that loops over ``.module`` end."""
    face = object.__new__(sharded_class(FSDPModule, plain_class(type(module))))
    face.__dict__ = module.__dict__
    return face


# ---- sharding ----


def _shard_inside(
    module: nn.Module, policy: Any, options: dict[str, Any], ignored: list[nn.Parameter]
) -> None:
    """Make units of the submodules that a policy selects; batch norms keep their dtype."""
    precision = options["mixed_precision"]
    if precision is not None and (precision.param_dtype or precision.reduce_dtype):
        classes = tuple(getattr(precision, "_module_classes_to_ignore", ()))
        for m in module.modules():
            own = [p for p in m.parameters() if not any(p is q for q in ignored)]
            if isinstance(m, classes) and own and m is not module and not is_sharded(m):
                keep = MixedPrecisionPolicy(own[0].dtype, None, precision.param_dtype)
                _shard(m, {**options, "mixed_precision": None}, ignored, policy=keep)

    done = {m for m in module.modules() if is_sharded(m)}

    def shard(m: nn.Module, **own: Any) -> nn.Module:
        if unknown := sorted(set(own) - set(options)):
            raise NotImplementedError(
                f"the policy gives {unknown} for {type(m).__name__}: units can differ in "
                f"{sorted(options)}"
            )
        _shard(m, {**options, **own}, ignored)
        done.add(m)
        return m

    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(module, set(), {})
        for m in reversed(list(module.modules())):
            if m in chosen and m is not module and m not in done:
                shard(m, **chosen[m])
        return

    def can(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        has_forward = recurse or type(module).forward is not nn.Module.forward
        return has_forward and policy(
            module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel
        )

    from torch.distributed.fsdp.wrap import _recursive_wrap

    _recursive_wrap(module, can, shard, done, set(ignored), only_wrap_children=True)


def _shard(
    module: nn.Module,
    options: dict[str, Any],
    ignored: list[nn.Parameter],
    outer: bool = False,
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    precision, synced = options["mixed_precision"], options["sync_module_states"]
    if getattr(precision, "keep_low_precision_grads", False):
        raise NotImplementedError("keep_low_precision_grads: gradients have the parameters' dtype")
    mesh, strategy = _mesh(
        options["sharding_strategy"], options["process_group"], options["device_mesh"]
    )
    own = [] if is_sharded(module) else [m for _, m in outside_units(module, "", set())]
    for m in own:
        _materialize(m, options["param_init_fn"])
    outside = {id(p) for p in ignored}
    for m in own if precision is not None and precision.buffer_dtype is not None else ():
        if not any(id(p) in outside for p in m.parameters(recurse=False)):
            _cast_buffers(m, precision.buffer_dtype)
    if policy is None and precision is not None:
        cast = precision.cast_forward_inputs or (outer and precision.cast_root_forward_inputs)
        policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, None, cast)
    fully_shard(
        module,
        mesh=mesh,
        strategy=strategy,
        offload_policy=CPUOffloadPolicy() if _offloads(options["cpu_offload"], module) else None,
        mp_policy=policy or MixedPrecisionPolicy(cast_forward_inputs=outer),
        ignored_params=ignored,
        sync_module_states=synced,
        dtensor=strategy is not ShardingStrategy.NO_SHARD,
    )
    kind = FullyShardedDataParallel
    module.__class__ = sharded_class(kind, plain_class(type(module)), prefix=kind.__name__)
    kept = {id(b) for b in options.get("kept_buffers", ())}
    buffers = [b for m in own for b in m._buffers.values() if b is not None and id(b) not in kept]
    if synced:
        state_dict.sync_buffers(module._fsdpc_state, buffers)  # type: ignore[arg-type]


def _move(module: nn.Module, device_id: Any) -> None:
    """Move a module that has values to ``device_id``, as FSDP1 does."""
    if device_id is None or (isinstance(device_id, int) and not torch.cuda.is_available()):
        return  # without GPUs, a GPU index has no meaning
    at = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    _device.choose([], at.type)
    if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module.to(at)


def _offloads(offload: Any, module: nn.Module) -> bool:
    """Return whether the option offloads to host memory and the module computes elsewhere."""
    on_gpu = not _device.on_cpu() or any(p.is_cuda for p in module.parameters())
    return bool(getattr(offload, "offload_params", False)) and on_gpu


def _hints(module: nn.Module, offload: Any, backward: Any, ahead: bool) -> list[str]:
    """Check ``backward_prefetch``, and return messages about options without effect."""
    found = []
    if getattr(offload, "offload_params", False) and not _offloads(offload, module):
        found.append("cpu_offload changes nothing: masters are in host memory")
    name = getattr(backward, "name", backward)
    if name is not None and name not in ("BACKWARD_PRE", "BACKWARD_POST"):
        raise TypeError(f"backward_prefetch takes a BackwardPrefetch or None, got {backward!r}")
    if ahead or name != "BACKWARD_PRE":
        found.append(
            "backward_prefetch, forward_prefetch and limit_all_gathers change nothing: units are "
            "gathered ahead in the recorded order, as far as set_prefetch_distance() says"
        )
    return found


def _ignored(modules: Any, states: Any) -> list[nn.Parameter]:
    params = [p for m in modules or () for p in m.parameters()]
    for each in states or ():
        params += list(each.parameters()) if isinstance(each, nn.Module) else [each]
    return params


def _mesh(strategy: Any, group: Any, mesh: Any) -> tuple[Any, ShardingStrategy]:
    """Convert FSDP1's arguments to a mesh and one of the engine's strategies."""
    name = getattr(strategy or ShardingStrategy.FULL_SHARD, "name", strategy).lstrip("_")
    if group is not None and mesh is not None:
        raise ValueError("give process_group or device_mesh, not both")
    pair = isinstance(group, (tuple, list))
    if name.startswith("HYBRID") and mesh is None and not pair:
        if group is None and join().hosts > 1:
            return host_mesh(), ShardingStrategy[name]
        name = {"HYBRID_SHARD": "FULL_SHARD"}.get(name, "SHARD_GRAD_OP")
    return mesh if group is None else group, ShardingStrategy[name]


def _materialize(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Allocate and initialise a module's own meta parameters and buffers."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(t.is_meta for t in own):
        return
    if init is not None:
        init(module)
        return
    module.to_empty(device=_device.home(), recurse=False)
    if not callable(getattr(module, "reset_parameters", None)):
        raise ValueError(
            f"{type(module).__name__} has meta parameters and no reset_parameters(): give "
            "param_init_fn"
        )
    module.reset_parameters()  # type: ignore[operator]


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating point buffers; state dicts keep the original dtype."""
    originals = {}
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
            originals[name] = buffer.dtype
            module._buffers[name] = buffer.to(dtype)

    def restore(_: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        for name, original in originals.items():
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to(original)

    if originals:
        module.register_state_dict_post_hook(restore)
