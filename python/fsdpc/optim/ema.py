"""Averages of weights: one state per parameter, which steps without a gradient.

The engine has a row "EMA" in its table of optimizers, so averages are created, planned, offloaded,
saved and loaded as any optimizer's states. `Averages` is what both frontends share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

from fsdpc.nn.module import Module, Parameter, float_tensor
from fsdpc.optim.optimizer import Optimizer
from fsdpc.optim.state import full_states

STATE = "average"  # the state's name in the engine's table
Decay = float | Callable[[int], float]


class Averages:
    """Base class of both frontends' EMA: when averages move, and what is refused.

    Parameters
    ----------
    decay : float or callable
    every : int
    """

    #: An optimizer of the frontend over the engine's row "EMA".
    optimizer: Any

    def __init__(self, decay: Decay, every: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: updates are every k-th call, with k from 1")
        self.decay, self.every = decay, every
        self.num_updates: int = 0
        self._calls = 0
        self._inside = False
        if not callable(decay):
            self._decay()

    def __repr__(self) -> str:
        options = f"decay={self.decay!r}, every={self.every}, num_updates={self.num_updates}"
        return f"{type(self).__name__}({options})"

    def _decay(self) -> float:
        """Return the decay of the next update."""
        what = "decay"
        value: Any = self.decay
        if callable(value):
            what, value = f"decay({self.num_updates})", value(self.num_updates)
        if not isinstance(value, Real) or not 0 <= value < 1:
            raise ValueError(f"{what} must be a number in [0, 1), got {value!r}")
        return float(value)

    def update(self) -> None:
        """Move every average towards its parameter; call it after ``optimizer.step()``."""
        self._refuse_inside("update()")
        if (self._calls + 1) % self.every == 0:
            self._move(self._decay(), False)
            self.num_updates += 1
        self._calls += 1

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Exchange parameters and averages inside a ``with`` block; collective if sharded.

        Afterwards, also after an exception, parameters and averages have their bits again. Inside,
        checkpoints of the model have the averages; updates and optimizer steps are refused.
        """
        self._refuse_inside("another swap()")
        if self.num_updates == 0:
            raise RuntimeError("swap() before the first update(), which makes the averages")
        self._move(0.0, True)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._move(0.0, True)

    def _refuse_inside(self, what: str) -> None:
        if self._inside:
            raise RuntimeError(
                f"{what} inside swap(), where parameters and averages are exchanged: leave it first"
            )

    def _move(self, decay: float, swap: bool) -> None:
        raise NotImplementedError

    def _average(self, p: Any) -> Any:
        """Return the full average of a parameter, or None if it has none; collective."""
        raise NotImplementedError

    def _set_average(self, p: Any, value: Any, updates: int) -> None:
        """Write this rank's rows of a full average, or forget it if ``value`` is None."""
        raise NotImplementedError

    def _named(self) -> dict[str, Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name, and the counts; collective if sharded.

        Returns
        -------
        dict
            ``"num_updates"``, ``"calls"`` of :meth:`update`, and ``"averages"``: full values on
            every rank.
        """
        self._refuse_inside("state_dict()")
        found = {name: self._average(p) for name, p in self._named().items()}
        averages = {name: value for name, value in found.items() if value is not None}
        return {"num_updates": self.num_updates, "calls": self._calls, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load averages; each rank keeps its own rows.

        Parameters
        ----------
        state : mapping
            Result of :meth:`state_dict`, saved at any number of ranks.

        Raises
        ------
        KeyError, ValueError
            Names or shapes differ from this model's; nothing has changed then.
        """
        self._refuse_inside("load_state_dict()")
        missing = {"num_updates", "calls", "averages"} - set(state)
        if missing:
            raise KeyError(f"the state of an EMA lacks {sorted(missing)}")
        named, averages, updates = self._named(), state["averages"], int(state["num_updates"])
        unexpected = sorted(set(averages) - set(named))
        absent = sorted(n for n, p in named.items() if p.requires_grad and n not in averages)
        if unexpected or (absent and updates > 0):
            raise KeyError(f"averages do not fit: missing {absent}, unexpected {unexpected}")
        for name, value in averages.items():
            if tuple(value.shape) != tuple(_full_shape(named[name])):
                raise ValueError(
                    f"average of '{name}': {tuple(value.shape)} given, "
                    f"{tuple(_full_shape(named[name]))} wanted"
                )
        for name, p in named.items():
            self._set_average(p, averages.get(name), updates)
        self.set_counts(updates, int(state["calls"]))

    def counts(self) -> dict[str, int]:
        """Return the counts that checkpoints store."""
        self._refuse_inside("a checkpoint of the EMA")
        return {"num_updates": self.num_updates, "calls": self._calls}

    def set_counts(self, num_updates: int, calls: int) -> None:
        """Set the counts after a checkpoint's averages have been read."""
        self.num_updates, self._calls = num_updates, calls


def _full_shape(p: Any) -> tuple[int, ...]:
    return p.shape


def averaged(named: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
    """Return the parameters that have averages; raise if some would be rounded.

    Parameters
    ----------
    named : iterable of (str, parameter, str)
        Names, parameters, and the names of their masters' dtypes.
    """
    named, wide = list(named), ("float32", "float64")
    if narrow := [(n, dtype) for n, p, dtype in named if p.requires_grad and dtype not in wide]:
        raise ValueError(
            f"{len(narrow)} parameters are neither float32 nor float64, the first is "
            f"'{narrow[0][0]}' ({narrow[0][1]}): rounding would hide the steps of an average; "
            "keep float32 parameters and compute in less by MixedPrecisionPolicy(param_dtype=...)"
        )
    found = {n: p for n, p, dtype in named if dtype in wide}
    if not any(p.requires_grad for p in found.values()):
        raise ValueError("the model has no trainable parameters to average")
    return found


class _Optimizer(Optimizer):
    """The averages as an optimizer's states; checkpoints read it like any other."""

    _KIND = "EMA"

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        super().__init__(list(named.items()), {"decay": 0.0, "swap": False})

    def move(self, decay: float, swap: bool) -> None:
        self._refuse_late_sharding()
        self.param_groups[0].update(decay=decay, swap=swap)
        self._set_options()
        self._core.step()
        for p in self._params() if self._plain else ():
            own = self._plain.get(id(p))
            if own is None or not (own.step > 0 or (p.requires_grad and not swap)):
                continue
            states = self._plain_states(p)
            own.step += not swap
            self._core.step_alone(
                0, own.number, own.step, False, p, p.detach(), tuple(states.values()), (), 0
            )
            p._swapped ^= swap


def _master_dtype(p: Parameter) -> str:
    return (p.dtype if p._unit is None else p._unit.params[p._index][1]).name


class EMA(Averages):
    """Averages of a model's parameters over training, for evaluation.

    Parameters
    ----------
    model : Module
        Shard it first.
    decay : float or callable, default 0.999
        The share of an average that an update keeps, in [0, 1); or a function of the number of
        updates so far that returns it.
    every : int, default 1
        Only every k-th call of :meth:`update` does something.

    Attributes
    ----------
    num_updates : int
        Updates so far, without calls that ``every`` skips.

    Raises
    ------
    ValueError
        An option is out of range; or a trainable parameter is neither float32 nor float64, whose
        rounding an average would not survive.

    Notes
    -----
    ``average = decay * average + (1 - decay) * parameter``, with the arithmetic of ``torch.lerp``;
    the first update copies, as in ``torch.optim.swa_utils.AveragedModel``. Every rank updates; an
    update has no communication. A parameter's average begins when it is first trainable at an
    update, and goes on if it is frozen later. Buffers, such as the statistics of BatchNorm, are not
    averaged.

    Averages are sharded like an optimizer's states: 4 bytes per element over all ranks (8 of
    float64), offloaded with the states. Checkpoints take them as ``"ema"``.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.fully_shard(fsdpc.nn.Linear(4, 2))
    >>> optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
    >>> ema = fsdpc.EMA(model, decay=0.99)
    >>> for _ in range(2):
    ...     model(fsdpc.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    ...     ema.update()
    >>> with ema.swap():
    ...     average = model(fsdpc.ones(1, 4)).sum().item()
    >>> average > model(fsdpc.ones(1, 4)).sum().item()
    True
    >>> warm = fsdpc.EMA(model, lambda n: min(0.999, (1 + n) / (10 + n)))
    >>> equal = fsdpc.EMA(model, lambda n: n / (n + 1))  # of SWA: all updates count alike
    """

    def __init__(self, model: Module, decay: Decay = 0.999, *, every: int = 1) -> None:
        super().__init__(decay, every)
        self._params = averaged((n, p, _master_dtype(p)) for n, p in model.named_parameters())
        self.optimizer: Any = _Optimizer(self._params)

    def _named(self) -> dict[str, Any]:
        return self._params

    def _move(self, decay: float, swap: bool) -> None:
        self.optimizer.move(decay, swap)

    def _average(self, p: Any) -> Any:
        if self.optimizer.step_count(p) == 0:
            return None
        return dict(full_states(self.optimizer, p))[STATE]

    def _set_average(self, p: Any, value: Any, updates: int) -> None:
        optimizer = self.optimizer
        optimizer.set_step_count(p, 0)
        if value is None:
            return
        full = float_tensor(value)
        if p._unit is None:
            optimizer._write_rows(p, {STATE: full})
        else:
            optimizer._core.write(p._unit, p._index, 0, full)
        optimizer.set_step_count(p, updates)


__all__ = ["EMA"]
