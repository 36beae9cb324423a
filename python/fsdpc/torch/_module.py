"""``fully_shard`` for torch modules, and the methods that it adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc.distributed.agree import check_agreement
from fsdpc.sharding import fsdp_module, offload, rules
from fsdpc.sharding.compression import Compression, check_compression, words
from fsdpc.sharding.strategies import replicated_mesh
from fsdpc.torch import _compiled, _convert, _device, _forward, _fsdp2, _initialise
from fsdpc.torch._checks import (
    as_offload,
    check_apart,
    check_module,
    check_parameter,
    check_place,
    check_policy,
    check_sync_norms,
    dimension_of,
    left_whole,
    log_once,
    mark_replaced,
    placement_on,
    refuse_resizing,
    warn_of_slow_products,
)
from fsdpc.torch._generate import keep_ranks_together
from fsdpc.torch._late import watch
from fsdpc.torch._mesh import as_mesh
from fsdpc.torch._param_layout import ParamLayout, check_mesh, local_of
from fsdpc.torch._plan import groups_of
from fsdpc.torch._recipe import Recipe, readers_of, values_of, widened
from fsdpc.torch._subclasses import as_stored, keep_codes, take_codes_back
from fsdpc.torch._torch_mesh import data_mesh, mesh_of
from fsdpc.torch._unit import Root, UnitState, make_root, states_of
from fsdpc.torch.policies import MixedPrecisionPolicy, OffloadPolicy
from fsdpc.torch.state_dict import accept_full


class FSDPModule(fsdp_module.FSDPModule):
    """The methods that :func:`fully_shard` adds to a torch module, as in PyTorch FSDP2.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import FSDPModule, fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> isinstance(model, FSDPModule)
    True
    >>> model.unshard()
    >>> model.reshard()
    """

    _fsdpc_state: UnitState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward.run(self, super(fsdp_module.FSDPModule, self).__call__, args, kwargs)

    _fsdpc_run = _forward.run

    def _fsdpc_join(self) -> None:
        _root_of(self)

    def _fsdpc_gather(self) -> Callable[[], None]:
        unit, torch_unit = self._fsdpc_unit, self._fsdpc_state.torch_unit
        _device.join()
        torch_unit.follow_root()
        unit.unshard()
        torch_unit.pin()

        def end() -> None:
            unit.unshard_wait()
            torch_unit.hold(True)

        return end

    def reshard(self) -> None:
        """Free the parameters that :meth:`unshard` gathered."""
        if self._fsdpc_state.root is not None:
            self._fsdpc_state.torch_unit.hold(False)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Freeze the weights: inside, no-grad forwards do not communicate, as with native modules.

        Entering and leaving are collective. Inside the block, optimizer steps and forwards with
        gradients raise an error.
        """
        root = _root_of(self)
        _device.join()
        root.head.follow_root()
        with super().hold():
            for state in root.states:
                for refresh in state.refreshes:
                    refresh(state.torch_unit.generation)
            yield
        for torch_unit in root.torch_units:
            torch_unit.hide(False)

    def reset_iter_state(self) -> None:
        """Reshard every unit after an exception in forward or backward."""
        if self._fsdpc_state.root is not None:
            self._fsdpc_state.root.reset()

    def _get_fsdp_state(self) -> UnitState:
        return self._fsdpc_state

    def _when_rooted(self, action: Callable[[], None]) -> None:
        if self._fsdpc_state.root is not None:
            action()
        else:
            self._fsdpc_state.when_rooted.append(action)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, under FSDP2's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept but ignore the option: reductions already sum in float32 and scale only once."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accept but ignore the option, as skipping the all-gather in backward saves nothing here.

        Ranks on the same host share the gathered memory, so an all-gather in backward copies
        nothing.
        """

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether units such as experts may run on only some ranks, in forward or backward.

        Parameters
        ----------
        reduce_scatter_unused_params : bool
            Set this before the first forward.
        recurse : bool, default True
            Apply to nested units too.

        Notes
        -----
        Such units are gathered in each outermost forward and have their own reduce buffer. They are
        reduced at the end of backward, with zeros from ranks that did not run them. Afterwards a
        parameter has a gradient if any rank used it, as always holds within a unit.
        """
        self._set("rank_dependent", reduce_scatter_unused_params, recurse)

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Raise an error, because the engine's all-reduces provide no tensor to pass to a hook."""
        raise NotImplementedError(
            "set_all_reduce_hook: the engine sums replicas. For a sum of your own, shard over a "
            "mesh without them, and reduce p.grad.to_local() after backward"
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise an error, because the engine implements all-gathers."""
        raise NotImplementedError("set_custom_all_gather: the engine gathers")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise an error, because the engine implements reductions."""
        raise NotImplementedError("set_custom_reduce_scatter: the engine reduces")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept but ignore the option: gathers are always asynchronous."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accept but ignore the option, and log that communication uses the engine's memory."""
        if enable:
            log_once(
                "set_allocate_memory_from_process_group_for_comm changes nothing: communication "
                "uses the engine's memory"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise an error: symmetric memory needs CUDA, and ranks on a host share memory anyway."""
        raise NotImplementedError("set_symm_mem_for_comm: there is no NCCL on the CPU")

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accept 1 or more, and log that the pool always has 2 buffers if the number is not 2."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers takes an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers takes 1 or more, got {max_input_buffers}")
        if max_input_buffers != 2:
            log_once("set_reduce_scatter_max_input_buffers changes nothing: a pool of 2 is shared")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accept but ignore the option, as all-gathers and reductions never wait for each other."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters' DTensors and the buffers, under the plain model's names."""
        for state in states_of(self):  # type: ignore[arg-type]
            state.check_slots()
            state.torch_unit.follow()
        return super(fsdp_module.FSDPModule, self).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors or DTensors by name; each rank keeps its own rows.

        Parameters
        ----------
        state_dict : mapping of str to Tensor
            Full tensors are the same on every rank.
        strict : bool, default True
            Raise if names differ.
        assign : bool, default False
            Use the tensors' dtypes; values are copied, so different dtypes raise.
        """
        for state in states_of(self):  # type: ignore[arg-type]
            state.check_slots()
        parent: Any = super(fsdp_module.FSDPModule, self)
        return parent.load_state_dict(state_dict, strict=strict, assign=assign)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call ``fn`` on every submodule and on this module, with full parameters; collective.

        Each rank keeps its own rows of the values that ``fn`` assigns. In a forward or backward,
        the full parameters are read-only and not copied.

        Parameters
        ----------
        fn : callable
            Accepts a module, as for ``nn.Module.apply``; the same on every rank.
        """
        with _initialise.full_values([self._fsdpc_state]):
            return super().apply(fn)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return _convert.convert(self, super()._apply, fn, recurse)  # type: ignore[misc]


# torch.compile of a model compiles the user code that these call.
_compiled.leave_out(FSDPModule.__call__, _forward.run)
# The compiler must skip these functions and everything they call.
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


def _write(state: UnitState, named: list[tuple[str, Any]]) -> None:
    """Give a unit the values of its parameters (collective if they are rank 0's)."""
    recipe = state.recipe
    for i, (_, p) in enumerate(named):
        if not p.is_meta:
            values = recipe.layouts[i].store(p.detach())
            state.unit.write(i, values_of(values, recipe.where.comms, recipe.synced))


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    compression: Compression | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sync_module_states: bool = False,
    strategy: Any = None,
    plan: Any = None,
    master_dtype: torch.dtype | None = None,
    dtensor: bool = True,
) -> Any:
    """Shard a torch module's parameters over ranks, in place, as FSDP2 does; collective.

    Parameters
    ----------
    module : nn.Module or list of nn.Module
        A list is one unit, gathered when its first module runs.
    mesh : DeviceMesh of torch or fsdpc, optional
        (shard) or (replicate, shard); default: all ranks. Ranks outside the mesh do not take part.
    reshard_after_forward : bool or int, optional
        Free parameters after forward and gather them again for backward. None means yes, except for
        the outermost module. Integers above 1 mean yes, since ranks of a host share the gathered
        memory anyway; 1 means no.
    shard_placement_fn : callable, optional
        May return None or ``Shard(dim)``: the dimension to shard, by default 0. A
        ``ShardPlacementResult`` names this mesh: parameters on another one are a module's own.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes for compute and communication.
    offload_policy : OffloadPolicy, optional
        Which arrays to keep on a disk or, with a GPU, in host memory: ``CPUOffloadPolicy()`` puts
        masters, gradients and optimizer states there. On CPUs, they always are.
    compression : Compression, optional
        How parameters and gradients travel between hosts; as they are by default.
    ignored_params : iterable of nn.Parameter, optional
        Parameters that are neither sharded nor reduced. Frozen ones of dtypes other than float32,
        bfloat16, float16 and float64 are also not sharded, but their values must be equal.
    dp_mesh_dims : DataParallelMeshDims of torch, optional
        Which dimensions of ``mesh`` to shard and to replicate over; without the former, nothing is
        sharded. Parameters are DTensors on the whole mesh, or plain if it has no further dimensions
        (torch 2.13 accepts only DTensors).
    sync_module_states : bool, default False
        Copy rank 0's initial parameters to every rank; otherwise, differences are an error. Buffers
        are left unchanged.
    strategy : fsdpc.sharding.strategies.ShardingStrategy or str, optional
        Selects a mesh and ``reshard_after_forward`` by name (NO_SHARD is DDP).
    plan : mapping of str to dict, or callable, optional
        Which submodules to shard first: dotted-name patterns with their options
        (``{"model.layers.*": {}}``), or a transformers model's plan (``plan=model.fsdp_plan``).
    master_dtype : torch.dtype, optional
        If parameters have a narrower dtype, keep shards, gradients and optimizer states in this
        dtype and gather in the original: ``torch.float32`` for a model created in bfloat16.
    dtensor : bool, default True
        If False, parameters are plain tensors, as in DDP; possible only if nothing is sharded
        (``strategy="NO_SHARD"``, or one rank).

    Returns
    -------
    the same module, or list
        The modules' classes become subclasses of :class:`FSDPModule` and of their previous classes.

    Raises
    ------
    MismatchError
        Names, shapes, dtypes or initial values differ between ranks; the error names the first one.
    TypeError, ValueError, NotImplementedError
        The module or an option is not supported; the error says why.

    Notes
    -----
    Outside forward and backward, parameters are DTensors, placed as ``Shard(0)`` over the mesh.
    Their attribute ``fsdpc`` has the name, the full shape and this rank's rows.

    Units of one model may be on different meshes. For expert parallelism, each rank keeps some
    experts, whose forward exchanges tokens over ``mesh["ep"]``. Experts need names of their own (by
    number) for ``torch.distributed.checkpoint``::

        fully_shard(experts, mesh=mesh["efsdp"])
        experts.set_gradient_divide_factor(mesh.size())  # the tokens of all ranks
        fully_shard(model, mesh=mesh["efsdp", "ep"]._flatten("dp"))

    Source: PyTorch FSDP (Zhao et al. 2023), ``torch.distributed.fsdp.fully_shard``.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> for layer in model:
    ...     unit = fully_shard(layer)
    >>> model = fully_shard(model)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model[1].bias.grad.full_tensor().tolist()
    [1.0, 1.0]
    """
    modules = rules.as_modules(
        module, nn.Module, "a torch.nn.Module", "for fsdpc.nn modules use fsdpc.fully_shard"
    )
    for m in modules:
        check_module(m)
    check_place(modules)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    check_policy(mp_policy)
    check_compression(compression)
    ignored = rules.as_params("ignored_params", ignored_params, torch.Tensor)
    ignored += _fsdp2.replicated(modules)
    if plan is not None:
        options = {
            "mesh": mesh,
            "dp_mesh_dims": dp_mesh_dims,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "ignored_params": ignored,
            "strategy": strategy,
            "sync_module_states": sync_module_states,
            "shard_placement_fn": shard_placement_fn,
            "offload_policy": offload_policy,
            "compression": compression,
            "master_dtype": master_dtype,
        }
        rules.shard_by_plan(groups_of(modules, plan), options, fully_shard)
    spmd, data = None, ()
    if dp_mesh_dims is not None:
        spmd, (mesh, data) = mesh, data_mesh(mesh, dp_mesh_dims)
    inside = rules.inside_of(modules)
    take_codes_back(modules)
    placement = placement_on(mesh, shard_placement_fn, modules)
    left = left_whole(inside, ignored)
    ignored += [p for _, p in left]
    found = rules.collect(inside, ignored, partial(check_parameter, modules=modules))
    whole = [(name, p) for name, p, _ in found]
    kinds, found = as_stored(found)
    named = [(name, p) for name, p, _ in found]
    check_apart(named)
    for name, p in named:
        check_mesh(name, p, mesh, spmd, data)
    layouts = [
        ParamLayout.of(p, dimension_of(*pair, placement), data, kind)
        for (_, p), pair, kind in zip(named, whole, kinds, strict=True)
    ]
    _device.choose(named, getattr(mesh, "device_type", None))
    offload_policy = as_offload(offload_policy)
    given = as_mesh(mesh)  # joins the other ranks
    if dp_mesh_dims is not None and not dp_mesh_dims.shard_names:
        given = replicated_mesh(given)
    where = rules.place(None if mesh is None else given, strategy, reshard_after_forward)
    check_sync_norms(inside, where.comms)
    dtypes, policy = widened(found, mp_policy, master_dtype)
    title = "+".join(type(m).__name__ for m in modules)
    compared = [*zip(named, layouts, strict=True), *((each, "") for each in left)]
    lines = [_line(*each, layout, sync_module_states) for each, layout in compared]
    lines.append(f"{policy}, {where}{offload.words(offload_policy)}{words(compression)}")
    check_agreement([title, *lines], where.comms, _initialise.CURE)
    if _device.on_cpu():
        warn_of_slow_products(modules, {policy.param_dtype or d for d in dtypes})
    if not dtensor and where.comms[0].size > 1:
        raise ValueError(f"dtensor=False, and {where} shards over {where.comms[0].size} ranks")
    torch_mesh, placements = mesh_of(mesh, where) if dtensor else (None, ())
    recipe = Recipe(
        name=title,
        modules=modules,
        names=[name for name, _ in named],
        layouts=layouts,
        where=where,
        policy=policy,
        frozen=frozenset(i for i, (_, p) in enumerate(named) if not p.requires_grad),
        synced=sync_module_states,
        offload=offload_policy,
        compression=compression,
        mesh=torch_mesh,
        placements=placements,
    )
    with torch.inference_mode(False):  # sharded parameters must be trainable in either mode
        state = UnitState(recipe, found, dtypes, readers_of(found, inside, modules))
    _write(state, named)
    _keep_whole(left, where.comms, sync_module_states)
    keep_codes(inside)
    mark_replaced(whole, state)
    for m in modules:
        m.__dict__["_fsdpc_state"] = state
        m.__dict__["_fsdpc_unit"] = state.unit
        m.__class__ = rules.sharded_class(FSDPModule, type(m), *_fsdp2.torch_bases(FSDPModule))
        _fsdp2.register(m, state)
    rules.enclose(modules, _FRONTEND)
    if hasattr(offload_policy, "pin_memory") and not offload_policy.on_disk and _device.on_cpu():
        log_once("CPUOffloadPolicy changes nothing: masters are in host memory")
    watch(state, inside)
    keep_ranks_together(state, inside)
    _initialise.offer_full(state, [m for _, m in inside])
    refuse_resizing([m for _, m in inside])
    for _, m in inside:
        if isinstance(m, nn.TransformerEncoderLayer):  # its fast path reads its linears' weights
            m.register_forward_pre_hook(_nothing)
    accept_full(state, [m for _, m in inside])
    return module


def share_comm_ctx(modules: Iterable[Any]) -> None:
    """Accept sharded modules, as FSDP2 does for the stages of a pipeline, and change nothing.

    All units of a process already share the engine's streams.

    Parameters
    ----------
    modules : iterable of FSDPModule

    Raises
    ------
    ValueError
        One of them is not sharded.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, share_comm_ctx
    >>> share_comm_ctx([fully_shard(torch.nn.Linear(4, 2))])
    """
    for m in modules:
        if not isinstance(m, FSDPModule):
            raise ValueError(f"share_comm_ctx takes sharded modules, got a {type(m).__name__}")


_FRONTEND = rules.Frontend(
    records=lambda: torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1,
    parameters=lambda module: module._fsdpc_state.unsharded,
)


def _nothing(module: nn.Module, args: Any) -> None:
    """Hook a forward, so that torch does not take the path without hooks."""


def _keep_whole(left: list[tuple[str, nn.Parameter]], comms: list[Any], synced: bool) -> None:
    for name, p in left:
        log_once(f"every rank keeps all of '{name}': units have no parameters of {p.dtype}")
        if synced and not p.is_meta:
            values = p.detach().reshape(-1).view(torch.uint8)
            values.copy_(_device.to_torch(values_of(values, comms, True)))


def _line(name: str, p: nn.Parameter, layout: Any, synced: bool) -> str:
    """Return a line about a parameter that ranks compare."""
    value = "deferred" if p.is_meta else ""
    if not (synced or p.is_meta):
        value = f"crc32c {_initialise.checksum(local_of(p)):08x}"
    return f"{rules.describe(name, p, value)}{layout}"


def _state_of(module: nn.Module) -> UnitState | None:
    """Return the unit state of a module, or None if it is not sharded."""
    return module.__dict__.get("_fsdpc_state")


fully_shard.state = _state_of  # type: ignore[attr-defined]
