"""Optimizers whose step needs whole matrices: the matrix rules of the engine's table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpc.optim.optimizer import Optimizer

#: Options of groups with use_muon=False, which step by AdamW.
ADAMW: dict[str, Any] = {
    "use_muon": False, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01,
}  # fmt: skip
ADJUST_LR = (None, "original", "match_rms_adamw")
NS_DTYPES = ("float32", "bfloat16")


def engine_options(group: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a group's options as the engine reads them, with the row of its table as ``rule``."""
    options = {name: value for name, value in group.items() if name != "use_muon"}
    if not group["use_muon"]:
        return {"rule": "AdamW", **options}
    if "ns_coefficients" in options:
        values = tuple(options.pop("ns_coefficients"))
        if len(values) != 3:
            raise ValueError(f"ns_coefficients are three numbers, got {values}")
        options |= dict(zip(("ns_a", "ns_b", "ns_c"), values, strict=True))
    if "adjust_lr_fn" in options:
        adjust = options.pop("adjust_lr_fn")
        if adjust not in ADJUST_LR:
            raise ValueError(f"adjust_lr_fn is one of {ADJUST_LR}, got {adjust!r}")
        options["match_rms_adamw"] = adjust == "match_rms_adamw"
    if "ns_dtype" in options:
        dtype = str(options.pop("ns_dtype")).removeprefix("torch.")
        if dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype is one of {NS_DTYPES}, got {dtype!r}")
        options["ns_bf16"] = dtype == "bfloat16"
    return {"rule": kind, **options}


def refuse_vectors(kind: str, index: int, labels: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise if a group of a matrix rule has parameters that are neither matrices nor stacks."""
    bad = [f"{label} {shape}" for label, shape in labels if len(shape) not in (2, 3)]
    if bad:
        raise ValueError(
            f"{kind} steps matrices (two dimensions) and stacks of them (three), but group {index} "
            f"has {', '.join(bad)}: give those in a group with use_muon=False, which steps by "
            "AdamW, or to another optimizer"
        )


class Muon(Optimizer):
    """Momentum that is orthogonalised matrix by matrix, as in torch.optim.Muon.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`. Groups take Muon's options, or ``"use_muon": False`` and AdamW's
        ``lr``, ``betas``, ``eps`` and ``weight_decay`` (default 0.01). :func:`muon_groups` makes
        both kinds.
    lr : float, default 1e-3
    weight_decay : float, default 0.1
        Decoupled, as in :class:`AdamW`.
    momentum : float, default 0.95
    nesterov : bool, default True
    ns_coefficients : (float, float, float), default (3.4445, -4.775, 2.0315)
        Of the polynomial that each iteration applies to the singular values.
    eps : float, default 1e-7
        Smallest Frobenius norm by which a momentum is divided.
    ns_steps : int, default 5
        Number of iterations.
    adjust_lr_fn : str, optional
        "original", the default, multiplies ``lr`` by sqrt(max(1, rows / columns));
        "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), so that AdamW's ``lr`` fits.
    ns_dtype : str, default "float32"
        Of the factors of products. "bfloat16" rounds where ``torch.optim.Muon`` does, and is faster
        on processors with bf16 products.

    Raises
    ------
    ValueError
        As for :class:`AdamW`, or a group of Muon has a parameter that is neither a matrix nor a
        stack of them.
    NotImplementedError
        In the first step: masters, gradients or states are offloaded.

    Notes
    -----
    The momentum, Muon's only state, is sharded by rows, in float32. In a step, one rank collects
    each matrix, computes its update, and returns the rows. Parameters and states have
    the same bits for any number of ranks.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([[2.0, 0.0], [0.0, 1.0]]))
    >>> optimizer = optim.Muon([p], lr=0.1, weight_decay=0.0)
    >>> (3 * p).sum().backward()
    >>> optimizer.step()
    >>> [round(x, 2) for x in p.numpy().ravel().tolist()]
    [1.97, -0.03, -0.03, 0.97]
    """

    _KIND = "Muon"
    _USUAL = {"lr": 1.5e-3, "betas": (0.9, 0.95)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "float32",
    ) -> None:
        super().__init__(params, dict(
            use_muon=True, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
        ))  # fmt: skip

    def _defaults_of(self, given: dict[str, Any]) -> dict[str, Any]:
        return self._defaults if given.get("use_muon", True) else ADAMW

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        own = self._defaults_of(group)
        return engine_options({name: group[name] for name in own}, self._KIND)

    def _refuse_params(self, index: int, group: dict[str, Any], labels: list[str]) -> None:
        if group["use_muon"]:
            shapes = [p.shape for p in group["params"]]
            refuse_vectors(self._KIND, index, zip(labels, shapes, strict=True))


class OrthogonalSGD(Muon):
    """Momentum that is replaced by the nearest matrix with orthonormal rows or columns.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`Muon`.
    lr : float, default 1e-2
    momentum : float, default 0.95
    weight_decay : float, default 0
    nesterov : bool, default False
    eps : float, default 1e-7
    ns_steps : int, default 15
        Iterations of X = 1.5 X - 0.5 X X' X, each of which multiplies singular values near 0 by
        1.5.

    Notes
    -----
    Like Muon with another polynomial, whose singular values converge to 1; slower, and meant for
    comparison. The update is scaled by sqrt(max(1, rows / columns)).

    Source: Tuddenham et al., Orthogonalising gradients to speed up neural network optimisation,
    2022.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([[2.0, 0.0]]))
    >>> optimizer = optim.OrthogonalSGD([p], lr=0.1)
    >>> (p * tensor([[3.0, 4.0]])).sum().backward()
    >>> optimizer.step()
    >>> [round(x, 4) for x in p.numpy().ravel().tolist()]
    [1.94, -0.08]
    """

    _KIND = "OrthogonalSGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        eps: float = 1e-7,
        ns_steps: int = 15,
    ) -> None:
        Optimizer.__init__(self, params, dict(
            use_muon=True, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            eps=eps, ns_steps=ns_steps,
        ))  # fmt: skip


def takes_muon(model: Any) -> set[int]:
    """Return the ids of a model's parameters that :func:`muon_groups` gives to Muon."""
    blocks = model.blocks() if callable(getattr(model, "blocks", None)) else []
    if not blocks:
        raise TypeError(
            f"{type(model).__name__} has no blocks(), so nothing says which matrices are inside "
            "hidden layers: make the two groups yourself, the second with use_muon=False"
        )
    params = (p for block in blocks for p in block.parameters())
    return {id(p) for p in params if len(p.shape) in (2, 3)}


def muon_groups(model: Any, **adamw: Any) -> list[dict[str, Any]]:
    """Return a model's parameters as two groups: matrices for Muon, the others for AdamW.

    Parameters
    ----------
    model : Module
        A model with a method ``blocks()``, as those of :mod:`fsdpc.models`. Matrices and stacks of
        them inside blocks go to Muon; embeddings, the head, norms and biases go to AdamW.
    adamw : optional
        Options of the second group, such as ``lr``.

    Returns
    -------
    list of dict
        Groups of (name, parameter) pairs for :class:`Muon`.

    Raises
    ------
    TypeError
        The model has no ``blocks()``.

    Examples
    --------
    >>> from fsdpc import models, optim
    >>> model = models.Llama(models.PRESETS["2M"])
    >>> groups = optim.muon_groups(model, lr=3e-4)
    >>> optimizer = optim.Muon(groups, lr=0.02)
    >>> groups[0]["params"][0][0], [group["use_muon"] for group in optimizer.param_groups]
    ('model.layers.0.self_attn.q_proj.weight', [True, False])
    """
    chosen = takes_muon(model)
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if id(p) in chosen]},
        {"params": [(n, p) for n, p in named if id(p) not in chosen], "use_muon": False, **adamw},
    ]


__all__ = ["Muon", "OrthogonalSGD", "muon_groups"]
