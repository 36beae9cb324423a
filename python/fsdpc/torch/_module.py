"""``fully_shard`` for torch modules, and what it adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc import _core, fsdp_module
from fsdpc.sharding import _check_reshard, _mesh_comms, check_agreement
from fsdpc.strategies import apply_strategy, strategy_name
from fsdpc.torch import _compiled, _convert, _device, _forward, _initialise
from fsdpc.torch._checks import (
    check_apart,
    check_list,
    check_module,
    check_offload,
    check_parameter,
    check_params,
    check_place,
    check_policy,
    check_whole,
    log_once,
    mark_replaced,
    refuse_resizing,
)
from fsdpc.torch._late import watch
from fsdpc.torch._mesh import as_mesh
from fsdpc.torch._plan import groups_of
from fsdpc.torch._recipe import (
    Found,
    Inside,
    Recipe,
    outside_units,
    readers_of,
    values_of,
    widened,
)
from fsdpc.torch._unit import Root, UnitState, make_root
from fsdpc.torch.policies import MixedPrecisionPolicy, OffloadPolicy
from fsdpc.torch.state_dict import module_load_state_dict, module_state_dict, offer_parts


class UnshardHandle:
    """A gather under way; :meth:`wait` ends it and shows the parameters."""

    def __init__(self, state: UnitState) -> None:
        self._state: UnitState | None = state

    def wait(self) -> None:
        """Wait until the parameters can be read."""
        if self._state is not None:
            self._state.unit.unshard_wait()
            self._state.door.hold(True)
            self._state = None


class FSDPModule(fsdp_module.FSDPModule):
    """What :func:`fully_shard` adds to a torch module, with PyTorch FSDP2's names and meaning."""

    _fsdpc_state: UnitState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward.run(self, super(fsdp_module.FSDPModule, self).__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this unit's parameters; collective.

        They stay until :meth:`reshard`, or until the unit's next forward or backward gives them up.

        Parameters
        ----------
        async_op : bool, default False
            Return at once with a handle whose ``wait()`` ends the gather.
        """
        _root_of(self)
        _device.join()
        self._fsdpc_state.door.follow_root()
        self._fsdpc_unit.unshard()
        self._fsdpc_state.door.pin()
        handle = UnshardHandle(self._fsdpc_state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give up the parameters that :meth:`unshard` gathered."""
        if self._fsdpc_state.root is not None:
            self._fsdpc_state.door.hold(False)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Fix the weights: inside, no-grad forwards communicate nothing; see the native module's.

        Entering and leaving are collective; steps and forwards with gradients raise inside.
        """
        root = _root_of(self)
        _device.join()
        root.head.follow_root()
        with super().hold():
            yield
        for door in root.doors:
            door.hide(False)

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: bring every unit back to its sharded state."""
        if self._fsdpc_state.root is not None:
            self._fsdpc_state.root.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the end of backward waits for reductions; pass False between micro-steps."""
        _root_of(self)
        super().set_is_last_backward(is_last_backward)

    def set_modules_to_forward_prefetch(self, modules: Any) -> None:
        """Name the modules to gather while this one's forward computes, instead of the record's."""
        self._when_rooted(lambda: self._set_ahead(False, modules), modules)

    def set_modules_to_backward_prefetch(self, modules: Any) -> None:
        """Name the modules to gather while this one's backward computes."""
        self._when_rooted(lambda: self._set_ahead(True, modules), modules)

    def _when_rooted(self, action: Callable[[], None], modules: Any) -> None:
        for m in modules:
            if not isinstance(m, FSDPModule):
                raise ValueError(f"{type(m).__name__} is not sharded, so it is not gathered")
        if self._fsdpc_state.root is not None:
            action()
        else:
            self._fsdpc_state.when_rooted.append(action)

    def set_prefetch_distance(self, distance: int) -> None:
        """Say how many uses ahead of the recorded order the whole model gathers; 1 at first.

        Said before the first forward, GPUs get memory for the fulls that are gathered then; later,
        they gather no further ahead than they have memory for.
        """
        self._want_prefetch(distance)
        _root_of(self)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``; FSDP2's older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept what is so already: reductions are sums, scaled once, in float32."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept either: the hint that backward needs no parameters saves nothing here.

        Ranks of a host share the gathered memory, so a gather in backward is a look.
        """

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Say whether units may run, forward or backward, on some ranks only: experts.

        Parameters
        ----------
        reduce_scatter_unused_params : bool
            Set before the first forward.
        recurse : bool, default True
            Units inside too.

        Notes
        -----
        Such units are gathered with each outermost forward, have a reduce buffer of their own, and
        are reduced at the end of backward, with zeros from ranks that did not run them. Parameters
        have a gradient afterwards if any rank used them; within a unit that is so in any case.
        """
        self._set("rank_dependent", reduce_scatter_unused_params, recurse)

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Refuse: sums over replicas happen in the engine, with no tensor between to hook."""
        raise NotImplementedError(
            "set_all_reduce_hook: replicas are summed inside the engine; read .grad after backward"
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refuse: gathers are the engine's."""
        raise NotImplementedError("set_custom_all_gather: gathers are looks at shared memory here")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refuse: reductions are the engine's."""
        raise NotImplementedError("set_custom_reduce_scatter: reductions are the engine's")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept False; there is no process group to allocate from."""
        if enable:
            raise NotImplementedError(
                "set_allocate_memory_from_process_group_for_comm: no process group is used"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse: symmetric memory is CUDA's; shared memory of the host is used always."""
        raise NotImplementedError("set_symm_mem_for_comm: there is no NCCL on the CPU")

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accept 2, the number of pooled reduce buffers."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers takes an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers takes 1 or more, got {max_input_buffers}")
        if max_input_buffers != 2:
            raise NotImplementedError(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers}): the pool has 2"
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accept anything: gathers and reductions never wait for each other here."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return full tensors under the plain model's names; collective."""
        method = super(fsdp_module.FSDPModule, self).state_dict
        return module_state_dict(self, method, args, kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take full tensors by name; every rank keeps its own rows.

        Parameters
        ----------
        state_dict : mapping of str to Tensor
            The same on every rank.
        strict : bool, default True
            Raise if names differ.
        assign : bool, default False
            Take over the tensors' dtypes: refused by the copy if they differ.
        """
        return module_load_state_dict(self, state_dict, strict, assign)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a sharded module cannot be copied: copy it before fully_shard()")

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call ``fn`` on every module inside; it sees full parameters; collective.

        Each rank keeps its own rows of what the parameters hold then. Inside forward and backward,
        where full parameters are read-only, nothing is copied.

        Parameters
        ----------
        fn : callable
            Of a module, as for ``nn.Module.apply``; the same on every rank.
        """
        with _initialise.full_values([self._fsdpc_state]):
            return super().apply(fn)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return _convert.convert(self, super()._apply, fn, recurse)  # type: ignore[misc]


# torch.compile of a model compiles what runs inside these.
_compiled.leave_out(FSDPModule.__call__, _forward.run)
# And nothing of what is ours alone.
_compiled.leave_out(
    make_root,
    Root.reset,
    _forward._cast,
    _forward._mark_inputs,
    _forward._mark_outputs,
    inside=True,
)


def _root_of(module: Any) -> Root:
    root = module._fsdpc_state.root
    return root if root is not None else make_root(module)


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync_module_states: bool = False,
    strategy: Any = None,
    plan: Any = None,
    master_dtype: torch.dtype | None = None,
    whole_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """Shard a torch module's parameters over ranks, in place; collective; FSDP2's signature.

    Parameters
    ----------
    module : nn.Module or list of nn.Module
        A list is one unit: gathered when its first module runs.
    mesh : DeviceMesh of torch or fsdpc, optional
        (shard) or (replicate, shard); all ranks where not given. Ranks outside of it take no part.
    reshard_after_forward : bool or int, optional
        Give parameters up after forward and gather them again for backward. None: yes, except for
        the outermost module. A number above 1 means yes, as ranks of a host share the gathered
        memory anyway; 1 means no.
    shard_placement_fn : callable, optional
        May return None or dimension 0, which is how parameters are cut.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of compute and communication.
    offload_policy : OffloadPolicy, optional
        Masters are in host memory on CPUs in any case; on a GPU none but the default is taken.
    ignored_params : iterable of nn.Parameter, optional
        Left alone: neither sharded nor reduced.
    dp_mesh_dims : optional
        Refused: give a mesh of the dimensions to shard over.
    sync_module_states : bool, default False
        Take rank 0's initial values on every rank; else a difference is an error.
    strategy : fsdpc.strategies.ShardingStrategy or str, optional
        A name for a mesh and ``reshard_after_forward`` (NO_SHARD is DDP).
    plan : mapping of str to dict, or callable, optional
        Which submodules to shard first: patterns of dotted names (``{"model.layers.*": {}}``, as
        transformers' FSDP plans have them) with options of their own, or those plans' own values
        (``plan=model.fsdp_plan``).
    master_dtype : torch.dtype, optional
        Parameters narrower than this have pieces, gradients and optimizer states in it and are
        gathered in the dtype that they have: ``torch.float32`` for a model made in bfloat16.
    whole_params : iterable of nn.Parameter, optional
        Not cut: one rank has all rows and steps them, the others have none. For optimizers that
        read whole matrices.

    Returns
    -------
    the same module, or list
        Classes are now subclasses of :class:`FSDPModule` and of what they were.

    Raises
    ------
    MismatchError
        Ranks disagree on names, shapes, dtypes or initial values; the first difference is named.
    TypeError, ValueError, NotImplementedError
        The module or an option cannot be sharded as asked; says why.

    Notes
    -----
    Outside forward and backward parameters are this rank's rows, ordinary ``nn.Parameter`` objects
    with ``full_tensor()``, ``to_local()`` and ``fsdpc`` (name, full shape, rows).
    Source: PyTorch FSDP (Zhao et al. 2023), ``torch.distributed.fsdp.fully_shard``.
    """
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims: give mesh=mesh['replicate', 'shard'] instead")
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for m in modules:
        check_module(m, FSDPModule)
    check_list(modules)
    check_place(modules)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    check_policy(mp_policy)
    ignored_params = check_params("ignored_params", ignored_params)
    whole_params = check_params("whole_params", whole_params)
    if plan is not None:
        _shard_by_plan(
            modules,
            plan,
            {
                "mesh": mesh,
                "reshard_after_forward": reshard_after_forward,
                "mp_policy": mp_policy,
                "ignored_params": ignored_params,
                "strategy": strategy,
                "sync_module_states": sync_module_states,
                "shard_placement_fn": shard_placement_fn,
                "offload_policy": offload_policy,
                "master_dtype": master_dtype,
                "whole_params": whole_params,
            },
        )
    ignored = {id(p) for p in ignored_params}
    inside = _inside_of(modules)
    found = _collect(inside, modules, ignored, shard_placement_fn)
    named = [(name, p) for name, p, _ in found]
    check_apart(named)
    check_whole(whole_params, named, type(modules[0]).__name__)
    _device.choose(named, getattr(mesh, "device_type", None))
    check_offload(offload_policy)
    mesh, reshard_after_forward, keep_grads = apply_strategy(
        strategy, as_mesh(mesh), reshard_after_forward
    )
    comms = [c for c in _mesh_comms(mesh, mesh.comm(0)) if c is not None]
    dtypes, policy = widened(found, mp_policy, master_dtype)
    _agree(
        modules,
        found,
        comms,
        f"{policy} mesh {[c.size for c in comms]} reshard_after_forward={reshard_after_forward}",
        sync_module_states,
    )
    whole = {id(p) for p in whole_params}
    reshard = _check_reshard(reshard_after_forward, comms[0].size)
    replicas = comms[1].size if len(comms) > 1 else 1
    recipe = Recipe(
        name="+".join(type(m).__name__ for m in modules),
        modules=modules,
        names=[name for name, _, _ in found],
        shapes=[p.shape for _, p, _ in found],
        comms=comms,
        policy=policy,
        whole=frozenset(i for i, (_, p, _) in enumerate(found) if id(p) in whole),
        reshard_after_forward=reshard,
        keep_grads=keep_grads,
        synced=sync_module_states,
        strategy=strategy_name(strategy, replicas, comms[0].size, reshard),
    )
    with torch.inference_mode(False):  # pieces are to be trained, whoever shards
        state = UnitState(recipe, found, dtypes, readers_of(found, inside, modules))
    for i, (_, p, _) in enumerate(found):
        if not p.is_meta:
            state.unit.write(i, values_of(p, comms, sync_module_states))
    mark_replaced(named, state)
    for m in modules:
        m.__dict__["_fsdpc_state"] = state
        m.__dict__["_fsdpc_unit"] = state.unit
        m.__class__ = _sharded_class(type(m))
    fsdp_module.enclose(modules)
    if hasattr(offload_policy, "pin_memory"):
        log_once("CPUOffloadPolicy changes nothing: masters are in host memory")
    watch(state, inside)
    _initialise.offer_full(state, [m for _, m in inside])
    refuse_resizing([m for _, m in inside])
    offer_parts(state, [m for _, m in inside])
    return module


def _shard_by_plan(modules: list[nn.Module], plan: Any, options: dict[str, Any]) -> None:
    for outer in modules:
        for inner, own in groups_of(outer, plan):
            if not any(isinstance(m, FSDPModule) for m in inner):
                fully_shard(inner if len(inner) > 1 else inner[0], **{**options, **own})


def _state_of(module: nn.Module) -> UnitState | None:
    """Return what a sharded module knows of its unit; None of one that is not sharded."""
    return module.__dict__.get("_fsdpc_state")


fully_shard.state = _state_of  # type: ignore[attr-defined]

_classes: dict[type, type] = {}


def _new_plain(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make a module of the class that was sharded: ``model[:2]`` of a Sequential is a plain one."""
    ours = fsdp_module.FSDPModule
    plain = next(c for c in cls.__mro__ if issubclass(c, nn.Module) and not issubclass(c, ours))
    return plain(*args, **kwargs)


def _sharded_class(cls: type) -> type:
    if cls not in _classes:
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__new__": _new_plain}
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), names)
    return _classes[cls]


def _inside_of(modules: list[nn.Module]) -> Inside:
    """The modules of a unit that is to be; those of inner units are not among them."""
    seen: set[int] = set()
    many = len(modules) > 1
    return [
        each
        for n, top in enumerate(modules)
        for each in outside_units(top, f"{n}." if many else "", seen)
    ]


def _collect(
    inside: Inside,
    modules: list[nn.Module],
    ignored: set[int],
    placement: Callable[[nn.Parameter], Any] | None,
) -> Found:
    found: dict[int, tuple[str, nn.Parameter, list[tuple[dict[str, Any], str]]]] = {}
    for path, owner in inside:
        for name, p in owner._parameters.items():
            if p is None or id(p) in ignored:
                continue
            if id(p) not in found:
                check_parameter(path + name, p, modules, placement)
                found[id(p)] = (path + name, p, [])
            found[id(p)][2].append((owner._parameters, name))
    return list(found.values())


def _bytes(p: nn.Parameter) -> Any:
    return p.detach().reshape(-1).view(torch.uint8).cpu().numpy()


def _agree(
    modules: list[nn.Module], found: Found, comms: list[_core.Comm], options: str, sync: bool
) -> None:
    lines = [type(m).__name__ for m in modules]
    for name, p, _ in found:
        value = "deferred"
        if not p.is_meta:
            value = "" if sync else f"crc32c {_core.crc32c(0, _bytes(p)):08x}"
        lines.append(
            f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad} {value}".rstrip()
        )
    replicate = comms[1] if len(comms) > 1 else None
    check_agreement([*lines, options], comms[0], replicate, _initialise.CURE)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a module gather its parameters as forward does.

    Parameters
    ----------
    module : nn.Module
        Left as it is unless sharded.
    method_name : str
        Of a method that reads parameters.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method '{method_name}'")

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward.run(self, method, args, kwargs)

    wrapped.__name__ = method_name
    object.__setattr__(module, method_name, wrapped.__get__(module))
