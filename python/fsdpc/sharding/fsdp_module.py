"""The methods of a sharded module, as in PyTorch FSDP2, on top of the engine's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from fsdpc import _core
from fsdpc.display import html
from fsdpc.nn.module import refuse_fresh
from fsdpc.sharding.rules import ShardedError, enclosing, name_units, outermost, units_of
from fsdpc.sharding.saved import SavedTensors, refuse_outer


class UnshardHandle:
    """An all-gather in progress; :meth:`wait` completes it.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> model = fsdpc.fully_shard(nn.Linear(4, 2))
    >>> y = model(fsdpc.ones(1, 4))  # the first call makes it the root
    >>> handle = model.unshard(async_op=True)
    >>> handle.wait()
    >>> model.reshard()
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def wait(self) -> None:
        """Wait until the parameters can be read."""
        if self._end is not None:
            self._end()
            self._end = None


class FSDPModule:
    """The methods that :func:`fsdpc.fully_shard` adds to a module, as in PyTorch FSDP2.

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1))
    >>> isinstance(layer, fsdpc.FSDPModule), isinstance(layer, fsdpc.nn.Linear)
    (True, True)
    >>> with layer.no_sync():  # a micro-step that is not reduced
    ...     layer(fsdpc.ones(1, 2)).sum().backward()
    """

    _fsdpc_unit: _core.Unit
    _fsdpc_strategy: str
    _fsdpc_summoned = False
    _fsdpc_held = False
    _fsdpc_saved: SavedTensors | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the plain class, so a slice of a sharded Sequential is plain."""
        return plain_class(cls)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdpc_run(self._method(), args, kwargs)  # type: ignore[attr-defined]

    def _fsdpc_run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        unit = self._fsdpc_unit
        if not unit.has_root and not _core.in_dry_run():
            make_root(self)
        if self._fsdpc_summoned:
            raise RuntimeError(
                f"{type(self).__name__} was called inside summon_full_params(): its parameters "
                "stand on private copies there; call it after"
            )
        if self._fsdpc_saved is not None:
            method = partial(self._fsdpc_leave, method)
        return unit.call(method, args, kwargs)

    def _fsdpc_leave(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._fsdpc_saved.call(self._fsdpc_unit.name, method, args, kwargs)  # type: ignore[union-attr]

    def _repr_html_(self) -> str:
        """Return a picture of the parts that each rank owns, for display in notebooks."""
        return html.drawn("sharded module", self)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters and keep them until :meth:`reshard`; collective.

        With torch modules, the unit's next forward or backward also frees the parameters.

        Parameters
        ----------
        async_op : bool, default False
            Return immediately with a handle whose ``wait()`` completes the all-gather. Outside a
            forward, the ranks always synchronize first.
        """
        self._fsdpc_join()
        handle = UnshardHandle(self._fsdpc_gather())
        if async_op:
            return handle
        handle.wait()
        return None

    def _fsdpc_join(self) -> None:
        """Find the model's units and root, unless a forward has already done so."""
        if not self._fsdpc_unit.has_root:
            make_root(self)

    def _fsdpc_gather(self) -> Callable[[], None]:
        """Start the all-gather and return a function that waits for it."""
        self._fsdpc_unit.unshard()
        return self._fsdpc_unit.unshard_wait

    def reshard(self) -> None:
        """Free the parameters that :meth:`unshard` gathered."""
        self._fsdpc_unit.reshard()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Freeze the whole model's weights; entering and leaving are collective.

        Inside the block, forwards under ``no_grad()`` do not communicate, so each rank may run a
        different number of them, for example to evaluate or to generate text. Optimizer steps and
        forwards with gradients raise an error.
        """
        self._fsdpc_join()
        self._fsdpc_unit.hold(True)
        self.__dict__["_fsdpc_held"] = True
        try:
            yield
        finally:
            self.__dict__.pop("_fsdpc_held", None)
            self._fsdpc_unit.hold(False)

    @contextmanager
    def no_sync(self, recurse: bool = True) -> Iterator[None]:
        """Accumulate gradients locally, in the reduce dtype, without reducing them."""
        before = [(unit, unit.requires_sync) for unit in self._units(recurse)]
        for unit, _ in before:
            unit.requires_sync = False
        try:
            yield
        finally:
            for unit, flag in before:
                unit.requires_sync = flag

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether subsequent backwards reduce gradients or accumulate them locally."""
        self._set("requires_sync", requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether subsequent backwards also sum over replicas, or only over the shard group."""
        self._set("requires_all_reduce", requires_all_reduce, recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of backward waits for reductions; pass False between micro-steps."""
        self._fsdpc_join()
        self._fsdpc_unit.set_is_last_backward(bool(is_last_backward))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are resharded between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"pass True or False, got {reshard_after_forward!r}")
        self._set("reshard_after_forward", reshard_after_forward, recurse)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to reshard parameters after backward, or only when the weights change."""
        self._set("reshard_after_backward", reshard_after_backward, recurse)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set modules to prefetch in this module's forward, instead of in the recorded order."""
        self._set_ahead(False, modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to prefetch during this module's backward."""
        self._set_ahead(True, modules)

    def set_prefetch_distance(self, distance: int) -> None:
        """Set how many uses ahead the whole model prefetches in the recorded order.

        The default is 1, or 2 if CPU ranks on several hosts share a model.

        Call it before the first forward, in which GPUs allocate memory for prefetched units. If
        called later, GPUs prefetch only as far as that memory allows.
        """
        if int(distance) < 0:
            raise ValueError(f"the prefetch distance is 0 or more, got {distance}")
        self._fsdpc_unit.prefetch = int(distance)
        self._fsdpc_join()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks.

        Deterministic mode divides the sum over all micro-steps once; otherwise each micro-step's
        sum is divided.
        """
        if not factor > 0:
            raise ValueError(f"the divide factor must be above 0, got {factor}")
        self._fsdpc_unit.divide_factor = float(factor)

    def set_post_optim_event(self, event: Any) -> None:
        """Accept but ignore the event, as epochs already order gathers after steps."""

    def reset_iter_state(self) -> None:
        """Reshard every unit after an exception in forward or backward."""
        self._fsdpc_unit.reset()

    def _set(self, flag: str, value: bool, recurse: bool) -> None:
        for unit in self._units(recurse):
            setattr(unit, flag, bool(value))

    def _set_ahead(self, backward: bool, modules: Sequence[FSDPModule]) -> None:
        modules = list(modules)
        for m in modules:
            if not isinstance(m, FSDPModule):
                raise ShardedError(f"{type(m).__name__} is not sharded, so it is not gathered")
        self._when_rooted(
            lambda: self._fsdpc_unit.set_ahead(backward, [m._fsdpc_unit for m in modules])
        )

    def _when_rooted(self, action: Callable[[], None]) -> None:
        if not self._fsdpc_unit.has_root:
            raise RuntimeError(
                "prefetch lists are set after the first forward of the outermost module, which "
                "finds out which units belong together"
            )
        action()

    def _units(self, recurse: bool) -> list[_core.Unit]:
        return units_of(self) if recurse else [self._fsdpc_unit]

    def __reduce__(self) -> Any:
        raise TypeError("a sharded module is not pickled: save its state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedError(
            "FSDP does not support deepcopy: copy a module before fully_shard(); to average the "
            "weights of a sharded one, use the frontend's EMA instead of AveragedModel"
        )


def plain_class(cls: type) -> type:
    """Return the class that ``fully_shard`` derived this one from, or the class itself if plain."""
    return next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))


def make_root(module: Any) -> None:
    """Join all units of the outermost enclosing module; runs when any unit is first called."""
    module = outermost(module)
    refuse_fresh(module, module.named_parameters())
    name_units(module)
    encloses = enclosing(module)
    if module._fsdpc_saved is not None:
        refuse_outer(module._fsdpc_unit.name, module)
    try:
        _core.make_root(list(encloses), list(encloses.values()))
    except MemoryError as error:
        plan = html.drawn("memory of a model", module)
        raise MemoryError(f"{error}\nA rank is to hold, before optimizer states:\n{plan}") from None


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Make a method of a sharded module gather its parameters, as ``forward`` does.

    Parameters
    ----------
    module : Module
        The module; the call has no effect if it is not sharded.
    method_name : str
        Name of the method, which then runs inside the unit; gradients are reduced after backward.

    Raises
    ------
    AttributeError
        The module has no such method.

    Examples
    --------
    >>> import fsdpc
    >>> class Scorer(fsdpc.nn.Linear):
    ...     def score(self, x):
    ...         return self(x).mean()
    >>> scorer = fsdpc.fully_shard(Scorer(2, 1))
    >>> fsdpc.register_fsdp_forward_method(scorer, "score")
    >>> scorer.score(fsdpc.zeros(3, 2)).shape
    ()
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method '{method_name}'")

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return module._fsdpc_run(method, args, kwargs)

    module.__dict__[method_name] = run
