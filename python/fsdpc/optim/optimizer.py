"""The base class of all optimizers: parameter groups, steps and states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdpc import _core
from fsdpc.nn.module import Parameter
from fsdpc.optim import formats
from fsdpc.optim import state as _state

ADD_LATER = (
    "add_param_group() of an optimizer that steps inside backward: call step_in_backward(False), "
    "and step_in_backward() again"
)


class Optimizer:
    """Base class of all optimizers; use one of its subclasses.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    defaults : dict
        Default options of groups.
    state_dtype : dtype, "int8" or Int8, default float32
    seed : int, default 0

    Attributes
    ----------
    param_groups : list of dict
        Each group's ``"params"`` and options; changed options apply from the next step on.

    Examples
    --------
    >>> from fsdpc import nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    >>> isinstance(optimizer, optim.Optimizer), optimizer.param_groups[0]["lr"]
    (True, 0.1)
    """

    _KIND = ""  # the row of the engine's table
    _USUAL: dict[str, Any] = {}  # options of `fsdpc train` other than the defaults
    _steps_in_backward = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        if isinstance(params, _core.Tensor):  # iterating over a tensor would yield its rows
            raise TypeError("optimizers take an iterable of parameters: put the one into a list")
        groups = list(params)
        if not groups:
            raise ValueError("the optimizer got no parameters")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.param_groups: list[dict[str, Any]] = []
        self._defaults = defaults
        self._format = formats.as_format(state_dtype)
        self._core = _core.Optimizer(self._KIND, self._format[0], seed, self._format[1])
        self._group_of: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._plain: dict[int, _Plain] = {}
        self._units: list[Any] = []
        for group in groups:
            self._add_group(group)
        self._refuse_strays()
        self._set_options()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for i, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {i}")
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name != "params"]
        return "\n".join([*lines, ")"])

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options.

        Parameters
        ----------
        group : dict
            ``{"params": [...], "lr": ..., ...}``; missing options get default values.
        """
        if self._steps_in_backward:
            raise NotImplementedError(ADD_LATER)
        self._add_group(group)
        self._refuse_strays()
        self._set_options()

    def _add_group(self, given: dict[str, Any]) -> None:
        index = len(self.param_groups)
        defaults = self._defaults_of(given)
        unknown = set(given) - set(defaults) - {"params"}
        if unknown:
            raise ValueError(f"group {index} has unknown options {sorted(unknown)}")
        params = given["params"]
        params = [params] if isinstance(params, _core.Tensor) else list(params)
        group = {**defaults, **given, "params": params}
        self._core.check(**self._options(group))
        names = [entry[0] if isinstance(entry, tuple) else None for entry in params]
        labels = []
        for i, (entry, name) in enumerate(zip(list(params), names, strict=True)):
            p = params[i] = entry[1] if isinstance(entry, tuple) else entry
            if not isinstance(p, Parameter):
                raise TypeError(
                    f"optimizers take Parameters, got {type(p).__name__} (group {index}, place {i})"
                )
            name = name or (p._unit and p._name)
            labels.append(f"'{name}'" if name else f"number {i} of group {index}")
        self._refuse_params(index, group, labels)
        for p, name, label in zip(params, names, labels, strict=True):
            label = f"{label} {p.shape} {p.dtype.name}"
            if p._unit is not None:
                self._core.add(p._unit, p._index, index)
                if p._unit not in self._units:
                    self._units.append(p._unit)
            elif id(p) in self._plain:
                raise ValueError(f"parameter {label} was given before: {self._plain[id(p)].label}")
            else:
                self._plain[id(p)] = _Plain(label, self._core.take_number())
            self._group_of[id(p)] = index
            if name:
                self._names[id(p)] = name
        self.param_groups.append(group)

    def _defaults_of(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the default options of a group."""
        return self._defaults

    def _refuse_params(self, index: int, group: dict[str, Any], labels: list[str]) -> None:
        """Raise if the optimizer cannot step some of a group's parameters."""

    def _params(self) -> Iterator[Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._defaults}

    def _refuse_strays(self) -> None:
        """Raise if ranks would train their own copies of some parameters next to sharded ones."""
        strays = [
            self._plain[id(p)].label
            for p in self._params()
            if p._unit is None and p.requires_grad and not getattr(p, "_ignored", False)
        ]
        if self._units and strays:
            raise ValueError(
                f"{len(strays)} trainable parameters belong to no unit, so their gradients would "
                f"differ between ranks: {'; '.join(strays)}; call fully_shard() on the module "
                "around them first, or give them as its ignored_params, or freeze them"
            )

    def _refuse_late_sharding(self) -> None:
        for p in self._params() if self._plain else ():
            if p._unit is not None and id(p) in self._plain:
                raise RuntimeError(
                    f"parameter '{p._name}' of unit '{p._unit.name}' was sharded after the "
                    "optimizer was made: call fully_shard() first, then make the optimizer"
                )

    def _set_options(self) -> None:
        for i, group in enumerate(self.param_groups):
            self._core.set_hyper(i, **self._options(group))

    # ---- training ----

    def step(self) -> None:
        """Update every parameter that has a gradient; collective if any is sharded."""
        self._refuse_late_sharding()
        self._set_options()
        for i, group in enumerate(self.param_groups if self._plain else ()):
            for p in group["params"]:
                if id(p) in self._plain and p.grad is not None:
                    self._step_plain(i, p, self._plain[id(p)])
        self._core.step()

    def step_in_backward(self, enabled: bool = True) -> None:
        """Step each unit inside backward, as soon as its gradients are reduced.

        Gradients then need memory for the two largest units instead of all. Parameters get the bits
        of :meth:`step` after backward, which has nothing left to do. Learning rates are those at
        the first step of a backward.

        Parameters
        ----------
        enabled : bool, default True
            False returns to steps after backward.

        Raises
        ------
        NotImplementedError
            Muon and Adafactor, offloaded units, replicas of shards, deterministic mode, GPUs, and
            units with parameters of another optimizer.

        Notes
        -----
        Gradients do not exist after backward: fsdpc refuses to clip and to unscale them. Do not
        scale losses. Every backward that synchronises steps; under ``no_sync`` none does. A
        gradient that comes after a unit was stepped, and parameters that only some ranks use,
        raise in backward. A backward that fails leaves some units stepped: load a checkpoint then.

        Examples
        --------
        >>> import fsdpc
        >>> model = fsdpc.fully_shard(fsdpc.nn.Linear(4, 2, bias=False))
        >>> optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer.step_in_backward()
        >>> before = fsdpc.full_tensor(model.weight).clone()
        >>> model(fsdpc.ones(1, 4)).sum().backward()
        >>> round((before - fsdpc.full_tensor(model.weight)).max().item(), 4), model.weight.grad
        (0.1, None)
        """
        if enabled and self._plain:
            raise NotImplementedError(
                f"step_in_backward() with parameters outside of units: "
                f"{next(iter(self._plain.values())).label}: shard the model first"
            )
        if enabled == self._steps_in_backward:
            return
        set_options = weakref.WeakMethod(self._set_options)
        self._core.step_in_backward((lambda: set_options()()) if enabled else None)
        self._steps_in_backward = enabled

    def _step_plain(self, group: int, p: Parameter, own: _Plain) -> None:
        if p._swapped:
            raise RuntimeError(
                f"parameter {own.label} is exchanged for its average: leave the EMA's swap() "
                "before an optimizer steps it"
            )
        states = self._plain_states(p)
        own.step += 1
        self._core.step_alone(
            group, own.number, own.step, not own.momentum, p, p.grad, tuple(states.values()),
            tuple(own.maxima.values()), own.code_row,
        )  # fmt: skip
        own.momentum = own.momentum or "momentum_buffer" in states

    def _plain_states(self, p: Parameter) -> dict[str, _core.Tensor]:
        """Return an unsharded parameter's states, creating any that are missing."""
        own = self._plain[id(p)]
        names = self._state_names(p)
        for name in names:
            if name not in own.states:
                self._make_plain_state(p, own, name)
        return {name: own.states[name] for name in names}

    def _make_plain_state(self, p: Parameter, own: _Plain, name: str) -> None:
        dtype = _core.float64 if p.dtype is _core.float64 else self._format[0]
        own.code_row = formats.code_row(self._format, p.dtype, p.shape)
        if own.code_row:
            own.maxima[name] = _core.zeros((formats.blocks_in(p.numel(), p.shape),))
        elif dtype is _core.uint8:
            dtype = _core.float32
        own.states[name] = _core.zeros(self._state_shape(p, name), dtype=dtype)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, without writing to their memory.

        Parameters
        ----------
        set_to_none : bool, default True
            False is refused: with zero gradients, momentum and weight decay would change parameters
            that the next backward does not reach.
        """
        if not set_to_none:
            raise NotImplementedError(
                "zero_grad(set_to_none=False): gradients are dropped, so that a parameter without "
                "a new one is not stepped; leave the argument out"
            )
        for unit in self._units:
            unit.zero_grad()
        for p in self._params():
            if p._unit is None:
                p.grad = None

    # ---- states ----

    def state(self, p: Parameter) -> dict[str, Any]:
        """Return the step count and copies of this rank's state rows (None before the first step).

        Parameters
        ----------
        p : Parameter
        """
        states: dict[str, Any] = {"step": self.step_count(p)}
        for k, name in enumerate(self._state_names(p)):
            states[name] = self._decoded(p, k, name)
        return states

    def _decoded(self, p: Parameter, which: int, name: str) -> _core.Tensor | None:
        """Return a copy of this rank's rows of a state as floats; None before the first step."""
        view = self._view(p, which, name)
        if view is None:
            return None
        _, code = self._codes(p)[which]
        return formats.decoded(code, view, self._maxima(p, which, name), view.shape)

    def _codes(self, p: Parameter) -> list[tuple[str, str]]:
        """Return the name and the code of each state."""
        group = self._group_of[id(p)]
        return list(
            zip(self._core.state_names(group), self._core.state_codes(group), strict=True)
        )

    def state_views(self, p: Parameter, write: bool = True) -> dict[str, _core.Tensor]:
        """Return views of this rank's state rows; see set_step_count.

        Parameters
        ----------
        p : Parameter
        write : bool, default True
            Whether you will write the rows before the next step; if so, states on a disk are not
            verified.

        Returns
        -------
        dict of str to Tensor
            States with the shape of ``p.local``. Missing states are created as zeros. A state that
            is coded is uint8, and ``"<name>_blockmax"`` has the maxima of its blocks.
        """
        self.step_count(p)
        if p._unit is None:
            self._plain_states(p)
        else:
            self._core.make_states(p._unit, p._index)
        views = {}
        for k, name in enumerate(self._state_names(p)):
            views[name] = self._view(p, k, name, write)
            views[name + formats.MAXIMA] = self._maxima(p, k, name, write)
        return {name: view for name, view in views.items() if view is not None}

    def _write_rows(self, p: Parameter, values: Mapping[str, _core.Tensor]) -> None:
        """Write this rank's rows of the states, floats or codes."""
        shape = p.shape if p._unit is None else p.local.shape
        formats.write_rows(self._codes(p), self.state_views(p), values, shape)

    def step_count(self, p: Parameter) -> int:
        """Return a parameter's step count.

        Parameters
        ----------
        p : Parameter
        """
        if p._unit is not None:
            return self._core.step_count(p._unit, p._index)
        return self._plain_of(p).step

    def set_step_count(self, p: Parameter, steps: int) -> None:
        """Set a parameter's step count, after its states have been written.

        Parameters
        ----------
        p : Parameter
        steps : int
            0 sets the states to zeros, as before the first step.
        """
        if p._unit is not None:
            self._core.set_step_count(p._unit, p._index, steps)
            return
        own = self._plain_of(p)
        if steps < 0:
            raise ValueError(f"parameter {own.label} cannot have made {steps} steps")
        own.step = steps
        if steps == 0:
            own.states.clear()
            own.maxima.clear()
        own.momentum = "momentum_buffer" in own.states

    def state_dict(self) -> dict[str, Any]:
        """Return states and options by parameter name; collective if any parameter is sharded.

        Returns
        -------
        dict
            ``"state"`` maps stepped parameters by name to ``{"step": int, "exp_avg": Tensor, ...}``
            with full values, on every rank; ``"param_groups"`` contains options, with names as
            ``"params"``.

        Raises
        ------
        ValueError
            The optimizer has no names: pass it ``model.named_parameters()``, or use
            :func:`get_optimizer_state_dict`, which finds them in the model.
        """
        return _state.gather(self, self._names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states and options; each rank keeps its own rows of sharded states.

        Parameters
        ----------
        state : mapping
            Result of :meth:`state_dict`, saved at any number of ranks: full values as Tensors or
            arrays of any float dtype.

        Raises
        ------
        KeyError, ValueError
            Names, groups, states or shapes differ from this optimizer's; nothing has changed then.
        """
        _state.load(self, state, self._names)

    def _plain_of(self, p: Parameter) -> _Plain:
        own = self._plain.get(id(p))
        if own is None:
            raise KeyError(f"the optimizer was not given this parameter {p.shape} {p.dtype.name}")
        return own

    def _state_names(self, p: Parameter) -> tuple[str, ...]:
        return self._core.state_names(self._group_of[id(p)])

    def _state_shape(self, p: Parameter, name: str) -> tuple[int, ...]:
        """Return the shape of a full state."""
        return tuple(p.shape)

    def _collect(self, p: Parameter, which: int) -> _core.Tensor:
        """Return the full state of a sharded parameter; collective."""
        return self._core.collect(p._unit, p._index, which)

    def _write_full(self, p: Parameter, which: int, value: _core.Tensor) -> None:
        """Write this rank's rows of the full state of a sharded parameter."""
        self._core.write(p._unit, p._index, which, value)

    def _view(
        self, p: Parameter, which: int, name: str, write: bool = False
    ) -> _core.Tensor | None:
        if p._unit is not None:
            return self._core.state(p._unit, p._index, which, write)
        return self._plain_of(p).states.get(name)

    def _maxima(
        self, p: Parameter, which: int, name: str, write: bool = False
    ) -> _core.Tensor | None:
        if p._unit is not None:
            return self._core.maxima(p._unit, p._index, which, write)
        return self._plain_of(p).maxima.get(name)


class _Plain:
    """States of an unsharded parameter."""

    def __init__(self, label: str, number: int) -> None:
        self.label, self.number = label, number
        self.step = 0
        self.momentum = False
        self.states: dict[str, _core.Tensor] = {}
        self.maxima: dict[str, _core.Tensor] = {}
        self.code_row = 0
