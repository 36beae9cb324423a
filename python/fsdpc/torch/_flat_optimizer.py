"""The base class of the engine's optimizers under torch.

The engine owns the states; ``state_dict()`` and ``shard_state`` return them as DTensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from fsdpc import _core
from fsdpc.optim import formats
from fsdpc.optim.optimizer import ADD_LATER
from fsdpc.torch import _device, _shards
from fsdpc.torch._dtensor import LOST_CODES, ShardedTensor
from fsdpc.torch._unit import ShardInfo, UnitState, take_grads

DECOUPLED = "decoupled_weight_decay"


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
    """Base class of the engine's optimizers, which update shards in C."""

    _kind = "AdamW"
    _hypers: tuple[str, ...] = ()  # options that the engine reads, from the row of its table
    _steps_in_backward = False
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
        if self._steps_in_backward:
            raise NotImplementedError(ADD_LATER)
        given = param_group["params"]
        if not isinstance(given, (torch.Tensor, set)):  # torch takes the one and refuses the other
            given = list(given)
        entries = [given] if isinstance(given, torch.Tensor) else given
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        group = {**param_group, "params": params}
        self._refuse_params(group)
        super().add_param_group({**group, "params": given})
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

    def _refuse_params(self, group: dict[str, Any]) -> None:
        """Raise if the optimizer cannot step some of a group's parameters; may add defaults."""

    def _pass_hypers(self) -> None:
        decoupled = self.defaults.get(DECOUPLED)
        for i, group in enumerate(self.param_groups):
            if group.get(DECOUPLED, decoupled) != decoupled:
                raise ValueError(
                    f"{type(self).__name__} with {DECOUPLED}={group[DECOUPLED]}, as in a state "
                    "that was loaded: AdamW decouples weight decay, and Adam does not"
                )
            self._core.set_hyper(i, **self._options(group))

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: plain(group[key]) for key in self._hypers}

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

    def step_in_backward(self, enabled: bool = True) -> None:
        """Step each unit inside backward, as soon as its gradients are reduced.

        See :meth:`fsdpc.optim.Optimizer.step_in_backward`. After backward ``p.grad`` is None, and
        torch's own ``clip_grad_norm_`` finds nothing to clip. Hooks for accumulated gradients are
        refused if they exist, and not called if they come later. Load states before:
        ``torch.distributed.checkpoint`` steps an optimizer without states once.
        """
        if enabled == self._steps_in_backward:
            return
        states = list(self._units.values())
        for state in states if enabled else ():
            state.torch_unit.follow()
            for p in state.params:
                if p._post_accumulate_grad_hooks:
                    raise NotImplementedError(
                        f"step_in_backward(): '{p.fsdpc.name}' has hooks that wait for its gradient"
                    )
        take_grads(states)
        pass_hypers = weakref.WeakMethod(self._pass_hypers)
        self._core.step_in_backward((lambda: pass_hypers()()) if enabled else None)
        self._steps_in_backward = enabled
        for state in states if enabled else ():
            state.pool_grads()

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
                if most is not None and isinstance(found[name], ShardedTensor):
                    found[name]._fsdpc_lost = LOST_CODES
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


def plain(value: Any) -> Any:
    """Return a number or a tuple of numbers in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else value
