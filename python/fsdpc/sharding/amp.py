"""Training in float16, with an adaptive loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.nn.module import Module, Parameter
from fsdpc.sharding import overflow
from fsdpc.sharding.clip import on_same_ranks

FACTOR = 2.0  # factor by which a dynamic scale grows and shrinks


class LossScaler:
    """Scale the loss so that float16 gradients neither vanish nor overflow.

    The loss is multiplied by a power of two, and gradients are later divided by it. If a gradient
    contains NaN or infinity on any rank, all ranks skip the step. Overflows shrink the scale;
    ``loss_scale_window`` steps without overflow double it.

    Parameters
    ----------
    initial_scale_power : int, default 16
        The initial scale is 2 raised to this power.
    loss_scale_window : int, default 1000
        Number of steps without overflow after which the scale doubles and the hysteresis restarts.
    hysteresis : int, default 2
        The scale is halved from this overflow onwards; earlier overflows are tolerated.
    min_loss_scale : float, default 1
        Lower limit of the scale.
    consecutive_hysteresis : bool, default False
        Whether to restart the hysteresis after every step without overflow, not only after a whole
        window.
    loss_scale : float, default 0
        A fixed scale; 0 means a dynamic one.

    Raises
    ------
    ValueError
        An option is out of range.

    Notes
    -----
    Fields and rules follow DeepSpeed's dynamic loss scaler; methods follow PyTorch's GradScaler.
    Unscaling sharded gradients needs no pass over memory: the optimizer applies the factor as it
    reads them. The overflow check costs a small all-reduce in :meth:`step`, or nothing if
    :func:`fsdpc.clip_grad_norm_` was called between :meth:`unscale_` and :meth:`step`. On a GPU,
    the check waits for the device. The loss itself should be float32, like the losses of
    ``fsdpc.models``.
    Source: Mixed Precision Training (Micikevicius et al. 2018).

    Examples
    --------
    ::

        scaler = fsdpc.amp.LossScaler()
        for x, y in batches:
            scaler.scale(model(x, y)).backward()
            scaler.unscale_(optimizer)
            fsdpc.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        min_loss_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
        loss_scale: float = 0.0,
    ) -> None:
        _check_int("initial_scale_power", initial_scale_power, -126, 126)
        _check_int("loss_scale_window", loss_scale_window, 1)
        _check_int("hysteresis", hysteresis, 1)
        if not 0 < min_loss_scale < math.inf:
            raise ValueError(f"min_loss_scale must be above 0 and finite, got {min_loss_scale}")
        if not 0 <= loss_scale < math.inf:
            raise ValueError(f"loss_scale must be 0 (dynamic) or above and finite: {loss_scale}")
        first = FACTOR**initial_scale_power
        if not loss_scale and first < min_loss_scale:
            raise ValueError(
                f"initial_scale_power {initial_scale_power} begins at {first:g}, below "
                f"min_loss_scale {min_loss_scale}"
            )
        self.loss_scale_window = loss_scale_window
        self.hysteresis = hysteresis
        self.min_loss_scale: float = float(min_loss_scale)
        self.consecutive_hysteresis: bool = bool(consecutive_hysteresis)
        self.dynamic: bool = loss_scale == 0
        self._scale = float(loss_scale) or first
        self._good_steps = 0  # since the last overflow
        self._forgiving = hysteresis  # overflows until the scale shrinks, including the last
        self._begin_step()

    def _begin_step(self) -> None:
        self._notes: dict[int, bool] = {}  # id of a measured unit -> whether it overflowed
        self._unscaled: list[Any] = []  # units
        self._asked: list[Any] = []  # arguments of unscale_
        self._stepped: list[Any] = []  # optimizers
        self._plain: dict[int, bool] = {}  # id of a parameter without unit -> whether it overflowed
        self._found = False

    def get_scale(self) -> float:
        """Return the factor to multiply the next loss by."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; call ``backward`` on the result."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"scale takes the loss as a Tensor, got {type(loss).__name__}")
        if _core.is_capturing():
            raise NotImplementedError(
                "a loss scaler inside graph_step(): whether a step is skipped is decided on the "
                "host; train in bfloat16, which needs none, or without a graph"
            )
        return loss * self._scale

    def unscale_(self, target: Any) -> None:
        """Divide gradients by the scale, before anything clips or reads them.

        Parameters
        ----------
        target : optimizer or Module
            Its gradients are unscaled, for sharded units as a whole. Unnecessary if gradients are
            not read between backward and :meth:`step`.

        Raises
        ------
        RuntimeError
            The gradients were already unscaled since the last :meth:`update`.
        """
        if any(target is each for each in self._asked + self._stepped):
            raise RuntimeError(
                f"gradients of this {type(target).__name__} were unscaled since the last update(): "
                "call unscale_() once, between backward() and step()"
            )
        self._asked.append(target)
        self._unscale(_parameters(target))

    def _unscale(self, params: list[Parameter]) -> None:
        units = [u for u in _units(params) if u not in self._unscaled]
        self._unscaled += units
        _core.multiply_grads(units, [], 1 / self._scale)
        for unit in units:
            overflow.watch(unit, self._notes)
        for p in params:
            if p._unit is None and p.grad is not None and id(p) not in self._plain:
                self._plain[id(p)] = _core.multiply_grads([], [p.grad], 1 / self._scale)

    def step(self, optimizer: Any) -> bool:
        """Step the optimizer unless a gradient overflowed on any rank; collective.

        Parameters
        ----------
        optimizer : optimizer
            Its gradients are unscaled if :meth:`unscale_` has not been called.

        Returns
        -------
        bool
            Whether the step was taken; equal on all ranks.

        Raises
        ------
        RuntimeError
            The optimizer has already stepped since the last :meth:`update`.
        """
        if any(optimizer is each for each in self._stepped):
            raise RuntimeError("step() was called since the last update(): call update() first")
        params = _parameters(optimizer)
        units = _units(params)
        unknown = [u for u in units if id(u) not in self._notes]
        if unknown:  # before unscaling: the check works on scaled gradients
            overflowed = not math.isfinite(_core.grad_norm(unknown, [], math.inf))
            if not on_same_ranks(unknown):
                overflowed = bool(distributed.all_reduce(int(overflowed), "max"))
            self._notes.update((id(u), overflowed) for u in unknown)
        self._unscale(params)
        found = any(self._notes[id(u)] for u in units)
        apart = any(self._plain.get(id(p), False) for p in params)
        if units and any(p._unit is None and p.requires_grad for p in params):
            apart = bool(distributed.all_reduce(int(apart), "max"))  # ignored ones may differ
        found = found or apart
        if any(u.apart for u in units):  # replicas skip steps together
            found = bool(distributed.all_reduce(int(found), "max"))
        self._found = self._found or found
        self._stepped.append(optimizer)
        if not found:
            optimizer.step()
        return not found

    def update(self) -> None:
        """Grow or shrink the scale according to the steps since the last update.

        Raises
        ------
        RuntimeError
            No step was taken since the last update.
        FloatingPointError
            Gradients overflowed more often than tolerated, but the scale is already at its minimum.
        """
        if not self._stepped:
            raise RuntimeError("update() without a step since the last one: call step(optimizer)")
        found = self._found
        overflow.forget(self._unscaled)
        self._begin_step()
        self._adjust(found)

    def _adjust(self, found: bool) -> None:
        """Grow or shrink the scale after a step, depending on whether it overflowed."""
        if not self.dynamic:
            return
        if found:
            self._good_steps = 0
            if self._forgiving > 1:
                self._forgiving -= 1
            else:
                self._shrink()
            return
        self._good_steps += 1
        grown = self._good_steps % self.loss_scale_window == 0
        if grown or self.consecutive_hysteresis:
            self._forgiving = self.hysteresis
        if grown:
            self._scale *= FACTOR

    def _shrink(self) -> None:
        if self._scale == self.min_loss_scale:
            raise FloatingPointError(
                f"gradients overflow at the smallest loss scale, {self._scale:g}: the loss or the "
                "model is not finite; lower the learning rate, clip gradients, use bfloat16, or "
                "set a smaller min_loss_scale"
            )
        self._scale = max(self._scale / FACTOR, self.min_loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters as plain numbers."""
        return {
            "scale": self._scale,
            "good_steps": self._good_steps,
            "forgiving": self._forgiving,
            "dynamic": self.dynamic,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`, but keep the constructor's options.

        Raises
        ------
        KeyError, ValueError
            Entries are missing, unknown or out of range, or only one of the two scales is dynamic.
            In this case nothing changes.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise KeyError(f"a scaler's state has {sorted(mine)}, got {sorted(state)}")
        if bool(state["dynamic"]) != self.dynamic:
            raise ValueError(f"the state's scale has dynamic={state['dynamic']}, this scaler's not")
        if not 0 < state["scale"] < math.inf:
            raise ValueError(f"scale must be above 0 and finite, got {state['scale']}")
        _check_int("good_steps", state["good_steps"], 0)
        _check_int("forgiving", state["forgiving"], 1)
        self._scale = float(state["scale"])
        self._good_steps = state["good_steps"]
        self._forgiving = min(state["forgiving"], self.hysteresis)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {limits}, got {value}")


def _parameters(target: Any) -> list[Parameter]:
    if isinstance(target, Module):
        return list(target.parameters())
    groups = getattr(target, "param_groups", None)
    if groups is None:
        raise TypeError(f"give an optimizer or a Module, got {type(target).__name__}")
    return [p for group in groups for p in group["params"]]


def _units(params: list[Parameter]) -> list[Any]:
    return list(dict.fromkeys(p._unit for p in params if p._unit is not None))
