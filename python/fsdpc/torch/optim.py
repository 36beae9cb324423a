"""Optimizers that update whole flat shards in C, as subclasses of ``torch.optim.Optimizer``.

Schedulers, GradScaler and ``state_dict`` work as with torch's own optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdpc import _core
from fsdpc.optim import factored, matrix
from fsdpc.torch import _device, _shards
from fsdpc.torch._flat_optimizer import DECOUPLED, FlatOptimizer, plain
from fsdpc.torch._unit import ShardInfo

#: Groups have what torch's have, so that its checkpoints load here and ours there.
_OF_ADAM = frozenset(inspect.signature(torch.optim.Adam).parameters)


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
            **({DECOUPLED: self._kind == "AdamW"} if DECOUPLED in _OF_ADAM else {}),
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
    ns_dtype : str or dtype, default "float32"
        Of the factors of products; "bfloat16" rounds where ``torch.optim.Muon`` does.

    Raises
    ------
    ValueError
        A group of Muon has a parameter that is neither a matrix nor a stack of them.
    NotImplementedError
        Such a parameter is also sharded by tensor parallelism, or along another dimension than 0.
        In the first step: it is offloaded.

    Notes
    -----
    With ``ns_dtype="float32"``, steps differ from those of ``torch.optim.Muon`` by the rounding of
    its bfloat16. Stacks of matrices (three dimensions) are stepped matrix by matrix.
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
        ns_dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__(params, {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "ns_dtype": str(ns_dtype).removeprefix("torch."),
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
            _refuse_cut_rows(p, "Muon", "put it into a group with use_muon=False")

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        use_muon = group.get("use_muon", True)  # groups of torch.optim.Muon have not all options
        own = self.defaults if use_muon else matrix.ADAMW
        names = [name for name in own if name != "use_muon"]
        options = {name: plain(group.get(name, own[name])) for name in names}
        return matrix.engine_options({**options, "use_muon": use_muon}, self._kind)


class Adafactor(FlatOptimizer):
    """``torch.optim.Adafactor`` over the parameters of sharded modules.

    Parameters
    ----------
    params : iterable
    lr : float or Tensor, default 1e-2
    beta2_decay : float, default -0.8
    eps : (float or None, float), default (None, 1e-3)
    d : float, default 1.0
    weight_decay : float, default 0
    foreach : bool, optional
        Has no effect.
    maximize : bool, default False

    Raises
    ------
    ValueError
        An option is out of range, or a parameter belongs to no sharded module.
    NotImplementedError
        A parameter is also sharded by tensor parallelism, or along another dimension than 0. In the
        first step: it is offloaded.

    Notes
    -----
    ``row_var`` is sharded like the parameter's rows. ``col_var`` is replicated, or sharded too if
    there are more than two dimensions.
    """

    _kind = "Adafactor"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
            "foreach": foreach, "maximize": maximize,
        })  # fmt: skip

    def _refuse_params(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            _refuse_cut_rows(p, "Adafactor", "give it to another optimizer")

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("lr", "beta2_decay", "d", "weight_decay", "maximize")
        options = {name: plain(group[name]) for name in names}
        return factored.engine_options({**options, "eps": group["eps"]})

    def _codes(self, p: torch.Tensor) -> list[tuple[str, str]]:
        return [(name, "") for name in factored.state_names(tuple(p.shape))]

    def state_rows(self, p: Any, write: bool = False) -> dict[str, _core.Tensor]:
        """Return the part of a parameter's states that this rank has, in the engine's memory."""
        unit, i = p.fsdpc.unit, p.fsdpc._index
        if p.dim() < 2:
            variance = self._core.state(unit, i, 0, write)
            return {} if variance is None else {"variance": variance}
        if p.numel() == 0 or (not write and self._steps_of(p) == 0):
            return {}
        return dict(zip(factored.MEANS, self._core.factors(unit, i), strict=True))

    def state_tensors(self, p: Any) -> dict[str, torch.Tensor]:
        """Return a parameter's states as DTensors over the engine's memory."""
        if p.dim() < 2:
            return super().state_tensors(p)
        rows = self.state_rows(p).items()
        return {name: _means(p, name, _device.to_torch(held)) for name, held in rows}

    def set_shard_state(self, p: Any, values: Mapping[str, Any]) -> None:
        """Load ``step`` and this rank's part of a parameter's states."""
        shape, info = tuple(p.shape), p.fsdpc
        names = {"step", *factored.state_names(shape)}
        if values and not names <= set(values):
            raise KeyError(
                f"Adafactor needs {sorted(names)} of '{info.name}', and the state has "
                f"{sorted(values)}"
            )
        if p.dim() < 2 or not values:
            super().set_shard_state(p, values)
            return
        _, begin, _, _ = _core.master_shard(info.unit, info._index, False)
        for name, held in self.state_rows(p, write=True).items():
            given, own = values[name], _device.to_torch(held)
            if isinstance(given, DTensor):
                _shards.check(p, name, given)
                placed = (p.device_mesh, _placements(p, name)) if isinstance(p, DTensor) else ()
                same = placed == (given.device_mesh, given.placements)
                given = given._local_tensor if same else given.full_tensor()
            if given.shape == factored.shape_of(name, shape):
                _, first = factored.place_of(name, shape, begin)
                given = given.reshape(-1)[first : first + own.numel()]
            own.reshape(-1).copy_(given.reshape(-1))
        self._core.set_step_count(info.unit, info._index, int(values["step"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the options and this rank's part of the states, in torch's format."""
        result = super().state_dict()
        for i, p in enumerate(_shards.params_of(self)):
            for name, value in result["state"].get(i, {}).items():
                if factored.is_mean(name) and isinstance(value, DTensor) and p.fsdpc.is_spread:
                    if not factored.is_whole(name, tuple(p.shape)):
                        value.fsdpc_rows = p.fsdpc.extent  # type: ignore[attr-defined]
        return result


def _placements(p: Any, name: str) -> tuple[Any, ...]:
    """Return the placements of means of a DTensor."""
    whole = factored.is_whole(name, tuple(p.shape))
    return tuple([Replicate()] * len(p.placements)) if whole else tuple(p.placements)


def _means(p: Any, name: str, own: torch.Tensor) -> torch.Tensor:
    """Return means that this rank has as a DTensor, or unchanged if parameters are plain."""
    if not isinstance(p, DTensor):
        return own
    shape = torch.Size(factored.shape_of(name, tuple(p.shape)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own, p.device_mesh, _placements(p, name), run_check=False, shape=shape, stride=stride
    )


def _refuse_cut_rows(p: Any, kind: str, cure: str) -> None:
    info = getattr(p, "fsdpc", None)
    if isinstance(info, ShardInfo) and not info._state.layouts[info._index].is_plain:
        raise NotImplementedError(
            f"{kind} needs whole rows of '{info.name}', which is sharded by tensor parallelism or "
            f"along another dimension than 0: {cure}"
        )


def _label(p: Any) -> str:
    info = getattr(p, "fsdpc", None)
    return info.name if isinstance(info, ShardInfo) else "a parameter"
