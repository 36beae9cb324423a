"""Optimizers that update whole flat shards in C, as subclasses of ``torch.optim.Optimizer``.

Schedulers, GradScaler and ``state_dict`` work as with torch's own optimizers. The engine owns the
states; ``state_dict()`` and ``shard_state`` return them as DTensors.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fsdpc import _core
from fsdpc.optim import formats, matrix
from fsdpc.torch import _device, _shards
from fsdpc.torch._unit import ShardInfo, UnitState, take_grads

_DECOUPLED = "decoupled_weight_decay"
#: Groups have what torch's have, so that its checkpoints load here and ours there.
_OF_ADAM = frozenset(inspect.signature(torch.optim.Adam).parameters)


class _States(dict[Any, Any]):
    """``optimizer.state``, read-only: ``[p]`` returns :meth:`FlatOptimizer.shard_state`.

    It is truthy if there are states, but iterating over it yields nothing, because torch's
    functions would move, cast or drop states that the engine owns.
    """

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        found = self._optimizer()
        return found is not None and any(map(found._steps_of, _shards.params_of(found)))

    def __missing__(self, p: Any) -> dict[str, torch.Tensor]:
        found = self._optimizer()
        return {} if found is None else found.shard_state(p)


class FlatOptimizer(torch.optim.Optimizer):
    """Base class of this module's optimizers, which make one pass over memory per step."""

    _kind = "AdamW"
    _hypers: tuple[str, ...] = ()  # options that the engine reads, from the row of its table
    # torch assigns to it at construction and when loading; both assignments are ignored.
    state: _States = property(_States, lambda self, value: None)  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        fields, _ = _core.optimizers()[cls._kind]
        cls._hypers = tuple(fields.replace("beta1 beta2", "betas").split())

    def __init__(self, params: Any, defaults: dict[str, Any], state_dtype: Any = None) -> None:
        if isinstance(state_dtype, torch.dtype):
            state_dtype = str(state_dtype).removeprefix("torch.")
        dtype, min_numel = formats.as_format(state_dtype)
        self._core = _core.Optimizer(self._kind, dtype, 0, min_numel)
        self._units: dict[int, UnitState] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        if group.get("differentiable"):
            raise NotImplementedError("differentiable steps: use torch.optim")
        self._core.check(**self._options(group))
        for p in group["params"]:
            info = getattr(p, "fsdpc", None)
            if not isinstance(info, ShardInfo):
                raise ValueError(
                    f"a parameter {tuple(p.shape)} belongs to no sharded module: call fully_shard "
                    "before making the optimizer; give ignored parameters to one of torch.optim"
                )
            self._units[id(info._state)] = info._state
            info._state.optimizers.add(self)
            self._core.add(info.unit, info._index, index)
        self._pass_hypers()

    def _pass_hypers(self) -> None:
        decoupled = self.defaults.get(_DECOUPLED)
        for i, group in enumerate(self.param_groups):
            if group.get(_DECOUPLED, decoupled) != decoupled:
                raise ValueError(
                    f"{type(self).__name__} with {_DECOUPLED}={group[_DECOUPLED]}, as in a state "
                    "that was loaded: AdamW decouples weight decay, and Adam does not"
                )
            self._core.set_hyper(i, **self._options(group))

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: _plain(group[key]) for key in self._hypers}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update parameters from their gradients; collective.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_hypers()
        for state in self._units.values():
            state.torch_unit.follow()
        take_grads(list(self._units.values()))
        self._core.step()
        return loss

    def _codes(self, p: torch.Tensor) -> list[tuple[str, str]]:
        """Return the name and the code of each state."""
        for i, group in enumerate(self.param_groups):
            if any(q is p for q in group["params"]):
                codes = self._core.state_codes(i)
                return list(zip(self._core.state_names(i), codes, strict=True))
        raise KeyError(f"the optimizer was not given this parameter {tuple(p.shape)}")

    def state_rows(self, p: Any, write: bool = False) -> dict[str, _core.Tensor]:
        """Return this rank's rows of a parameter's states, in the engine's memory.

        A coded state is uint8, and ``"<name>_blockmax"`` has the maxima of its blocks.
        """
        unit, i = p.fsdpc.unit, p.fsdpc._index
        rows: dict[str, _core.Tensor | None] = {}
        for k, (name, _) in enumerate(self._codes(p)):
            rows[name] = self._core.state(unit, i, k, write)
            rows[name + formats.MAXIMA] = self._core.maxima(unit, i, k, write)
        return {name: held for name, held in rows.items() if held is not None}

    def _steps_of(self, p: Any) -> int:
        return self._core.step_count(p.fsdpc.unit, p.fsdpc._index)

    def shard_state(self, p: Any) -> dict[str, torch.Tensor]:
        """Return a parameter's states as DTensors, and ``step``; {} before the first step."""
        steps = self._steps_of(p)
        if steps == 0:
            return {}
        return {"step": torch.tensor(float(steps)), **self.state_tensors(p)}

    def state_tensors(self, p: Any) -> dict[str, torch.Tensor]:
        """Return a parameter's states as DTensors: over the engine's memory, or decoded copies."""
        state, i = p.fsdpc._state, p.fsdpc._index
        shape, show = state.unit.local(i).shape, state.layouts[i].show
        rows, found = self.state_rows(p), {}
        for name, code in self._codes(p):
            if name in rows:
                held, most = rows[name], rows.get(name + formats.MAXIMA)
                held = held if most is None else formats.decoded(code, held, most, shape)
                found[name] = state.wrap(i, show(_device.to_torch(held).reshape(shape)))
        return found

    def set_shard_state(self, p: Any, values: Mapping[str, Any]) -> None:
        """Load ``step`` and this rank's rows of a parameter's states."""
        unit, i = p.fsdpc.unit, p.fsdpc._index
        held = {name: v for name, v in values.items() if name != "step" and v is not None}
        if held:
            self._core.make_states(unit, i)
        layout = p.fsdpc._state.layouts[i]
        views = self.state_rows(p, write=bool(held))
        for name, code in self._codes(p):
            if name not in held or name not in views:
                continue
            given = layout.rows_of(_shards.local(p, held[name]))
            if name + formats.MAXIMA in views:
                floats = _device.to_engine(given.float().reshape(views[name].shape).contiguous())
                formats.write_rows([(name, code)], views, {name: floats}, unit.local(i).shape)
            else:
                _device.to_torch(views[name]).reshape(-1).copy_(given.reshape(-1))
        # Set the step count last, because it marks the states as valid. torch's SGD does not count
        # steps.
        self._core.set_step_count(unit, i, int(values.get("step", bool(held))))

    def state_dict(self) -> dict[str, Any]:
        """Return the options and this rank's rows of the states, in torch's format."""
        result = super().state_dict()
        states = ((i, self.shard_state(p)) for i, p in enumerate(_shards.params_of(self)))
        result["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in states if s}
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a :meth:`state_dict` that this rank saved in a run with the same number of ranks."""
        _shards.check_all(self, state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        for key, p in zip(_shards.keys_of(state_dict), _shards.params_of(self), strict=True):
            self.set_shard_state(p, state_dict["state"].get(key, {}))


class AdamW(FlatOptimizer):
    """``torch.optim.AdamW`` over the parameters of sharded modules.

    Parameters
    ----------
    params : iterable
        Parameters of sharded modules, or groups of them with their own options.
    lr : float or Tensor, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.01
    amsgrad, maximize : bool, default False
    foreach, capturable, differentiable, fused : optional
        Accepted if the value has no effect here; the step is always fused.
    state_dtype : dtype, "int8" or fsdpc.optim.Int8, default float32
        As in :class:`fsdpc.optim.AdamW`. State dicts have coded states as floats.

    Raises
    ------
    ValueError
        An option is out of range, or a parameter belongs to no sharded module.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: Any = None,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize, "foreach": foreach,
            "capturable": capturable, "differentiable": differentiable, "fused": fused,
            **({_DECOUPLED: self._kind == "AdamW"} if _DECOUPLED in _OF_ADAM else {}),
        }, state_dtype)  # fmt: skip


class Adam(AdamW):
    """``torch.optim.Adam``: like :class:`AdamW`, but weight decay is added to the gradient.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad
        As in :class:`AdamW`, but ``weight_decay`` is 0 by default.
    options
        Keyword options of :class:`AdamW`.
    """

    _kind = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class SGD(FlatOptimizer):
    """``torch.optim.SGD`` over the parameters of sharded modules.

    Parameters
    ----------
    params : iterable
    lr : float or Tensor, default 1e-3
    momentum, dampening, weight_decay : float, default 0
    nesterov : bool, default False
    options
        ``maximize``; ``foreach``, ``differentiable`` and ``fused`` as in :class:`AdamW`.
    """

    _kind = "SGD"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        state_dtype = options.pop("state_dtype", None)
        unknown = set(options) - {"maximize", "foreach", "differentiable", "fused"}
        if unknown:
            raise TypeError(f"SGD has no options {sorted(unknown)}")
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": False, "foreach": None, "differentiable": False,
            "fused": None, **options,
        }, state_dtype)  # fmt: skip


class Lion(FlatOptimizer):
    """:class:`fsdpc.optim.Lion` over the parameters of sharded modules; torch has none.

    Parameters
    ----------
    params : iterable
    lr : float or Tensor, default 1e-4
    betas : (float, float), default (0.9, 0.99)
    weight_decay : float, default 0
    maximize : bool, default False
    """

    _kind = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize,
        }, state_dtype)  # fmt: skip


class RMSprop(FlatOptimizer):
    """``torch.optim.RMSprop`` over the parameters of sharded modules.

    Parameters
    ----------
    params : iterable
    lr : float or Tensor, default 1e-2
    alpha : float, default 0.99
    eps : float, default 1e-8
    weight_decay, momentum : float, default 0
    centered : bool, default False
    options
        ``maximize``; ``foreach``, ``capturable`` and ``differentiable`` as in :class:`AdamW`.
    """

    _kind = "RMSprop"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        **options: Any,
    ) -> None:
        state_dtype = options.pop("state_dtype", None)
        unknown = set(options) - {"maximize", "foreach", "capturable", "differentiable"}
        if unknown:
            raise TypeError(f"RMSprop has no options {sorted(unknown)}")
        super().__init__(params, {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay,
            "momentum": momentum, "centered": centered, "maximize": False, "foreach": None,
            "capturable": False, "differentiable": False, **options,
        }, state_dtype)  # fmt: skip


class Muon(FlatOptimizer):
    """``torch.optim.Muon`` over the parameters of sharded modules, and AdamW for the others.

    Parameters
    ----------
    params : iterable
        Groups step by Muon, or by AdamW if they have ``"use_muon": False``; these take ``lr``,
        ``betas``, ``eps`` and ``weight_decay``, with the defaults of :class:`AdamW`.
    lr : float or Tensor, default 1e-3
    weight_decay : float, default 0.1
    momentum : float, default 0.95
    nesterov : bool, default True
    ns_coefficients : (float, float, float), default (3.4445, -4.775, 2.0315)
    eps : float, default 1e-7
    ns_steps : int, default 5
    adjust_lr_fn : str, optional
        "original" or "match_rms_adamw".

    Raises
    ------
    ValueError
        A group of Muon has a parameter that is neither a matrix nor a stack of them.
    NotImplementedError
        Such a parameter is also sharded by tensor parallelism, or along another dimension than 0.
        In the first step: it is on a GPU or offloaded.

    Notes
    -----
    Iterations are in float32, those of ``torch.optim.Muon`` in bfloat16, so the two differ by the
    rounding of bfloat16. Stacks of matrices (three dimensions) are stepped matrix by matrix.
    """

    _kind = "Muon"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        })  # fmt: skip

    def _refuse_params(self, group: dict[str, Any]) -> None:
        if not group.setdefault("use_muon", True):
            for name, value in matrix.ADAMW.items():
                group.setdefault(name, value)
            return
        params = group["params"]
        labels = [(f"'{_label(p)}'", tuple(p.shape)) for p in params]
        matrix.refuse_vectors("Muon", len(self.param_groups), labels)
        for p in params:
            info = getattr(p, "fsdpc", None)
            if isinstance(info, ShardInfo) and not info._state.layouts[info._index].is_plain:
                raise NotImplementedError(
                    f"Muon needs whole rows of '{info.name}', which is sharded by tensor "
                    "parallelism or along another dimension than 0: put it into a group with "
                    "use_muon=False"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of Muon or, with ``"use_muon": False``, of AdamW."""
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        named = bool(params) and isinstance(params[0], tuple)
        group = {**param_group, "params": [p for _, p in params] if named else params}
        self._refuse_params(group)
        super().add_param_group({**group, "params": params})

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        use_muon = group.get("use_muon", True)  # torch.optim.Muon's state has none
        names = [n for n in (self.defaults if use_muon else matrix.ADAMW) if n != "use_muon"]
        options = {name: _plain(group[name]) for name in names}
        return matrix.engine_options({**options, "use_muon": use_muon}, self._kind)


def _label(p: Any) -> str:
    info = getattr(p, "fsdpc", None)
    return info.name if isinstance(info, ShardInfo) else "a parameter"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else value
