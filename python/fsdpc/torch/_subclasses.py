"""Parameters of tensor subclasses: what a unit stores of them, and their unsharded parameters.

A unit stores plain tensors. What it stores of a subclass depends on its kind:

- `Int4Codes`, `Int8Codes`: frozen weights of bitsandbytes. The unit stores the codes; every rank
  keeps the scales.
- `InnerTensors`: frozen subclasses that hold other tensors, such as torchao's quantised weights.
  The unit stores the bytes of these tensors, one after the other. The unsharded parameter is the
  subclass over gathered bytes.
- `GatherHooks`: subclasses with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` around one
  floating point tensor, trained or frozen. The unit stores that tensor; _gather_hooks.py runs the
  hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdpc import _core
from fsdpc.checkpoint.shards import Code
from fsdpc.sharding.rules import Found, Inside
from fsdpc.torch._gather_hooks import Gather
from fsdpc.torch.policies import SHARDED

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Called with a version number before modules see unsharded parameters and after they are freed.
Refresh = Callable[[int], None]
#: An unsharded parameter, and what to call when it is shown.
Bound = tuple[nn.Parameter, Refresh | None]

_LEAVE = "or leave it as it is with ignored_params"


class Kind:
    """How a unit stores parameters of one kind of subclass.

    Parameters
    ----------
    p : Tensor
        The parameter that was given to ``fully_shard``.
    """

    def __init__(self, p: torch.Tensor) -> None:
        self.type: type[torch.Tensor] = type(p)
        self.shape: torch.Size = p.shape

    def __str__(self) -> str:
        """Describe the kind; equal on all ranks of the unit."""
        return f" {self.type.__name__}{tuple(self.shape)}"

    def code(self, p: torch.Tensor) -> Code | None:
        """Return the scheme of a parameter's codes in checkpoints."""
        return None

    def scales(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what every rank keeps of a parameter, by name."""
        return {}

    def adopt(self, p: torch.Tensor, full: torch.Tensor) -> None:
        """Give a parameter, and all that share its scales, the scales of a whole value."""

    def plain(self, p: torch.Tensor) -> torch.Tensor:
        """Return what the unit stores of a whole value; plain tensors are returned unchanged."""
        raise NotImplementedError

    def attributes(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the attributes that sharded and unsharded parameters keep."""
        return {}

    def around(self, stored: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the subclass over the memory of a whole stored value."""
        raise NotImplementedError

    def whole(self, stored: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
        """Return a parameter like the given one, over the memory of a whole stored value."""
        made = nn.Parameter(self.around(stored), requires_grad=False)
        made.__dict__.update(attributes)
        return made

    def bind(self, state: UnitState, i: int, stored: torch.Tensor) -> Bound:
        """Create the unsharded parameter over gathered memory; collective with gather hooks."""
        return self.whole(stored, state.attributes[i]), None

    def take(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what the unit stores of a gradient."""
        return grad


class Codes(Kind):
    """Frozen codes of bitsandbytes, whose scales every rank keeps."""

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__(p)
        self.text: str = self.describe(p)

    def __str__(self) -> str:
        return self.text

    def describe(self, p: torch.Tensor) -> str:
        """Describe everything that ranks keep of a parameter besides its codes."""
        crc = 0
        for t in self.scales(p).values():
            values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            crc = _core.crc32c(crc, values.numpy())
        return f"{super().__str__()} {self.code(p)}, scales crc32c {crc:08x}"

    def whole(self, stored: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
        made: Any = torch.Tensor._make_subclass(self.type, self.around(stored), False)
        made.__dict__.update(attributes)
        return made


class Int4Codes(Codes):
    """bitsandbytes' ``Params4bit``: ``weight.quant_state`` has the scales."""

    def code(self, p: torch.Tensor) -> Code:
        state: Any = p.quant_state  # type: ignore[attr-defined]
        name, nested = f"{state.quant_type} of bitsandbytes", state.state2
        words = f"{name} in {p.dtype} for {state.dtype}, blocks of {state.blocksize}"
        words += "" if nested is None else f", scales in blocks of {nested.blocksize}"
        return Code(words, state.shape[-1])

    def scales(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: Any = p.quant_state  # type: ignore[attr-defined]
        found = {"absmax": state.absmax, "quant_map": state.code}
        if state.nested:
            found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            found["nested_offset"] = state.offset
        return found

    def adopt(self, p: torch.Tensor, full: torch.Tensor) -> None:
        if hasattr(full, "quant_state"):
            p.quant_state.__dict__.update(full.quant_state.__dict__)  # type: ignore[attr-defined]

    def plain(self, p: torch.Tensor) -> torch.Tensor:
        return p.detach().as_subclass(torch.Tensor)

    def attributes(self, p: torch.Tensor) -> dict[str, Any]:
        return p.__dict__

    def around(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


class Int8Codes(Codes):
    """bitsandbytes' ``Int8Params``: the layer reads ``weight.CB`` (codes) and ``SCB`` (scales)."""

    def code(self, p: torch.Tensor) -> Code:
        return Code("int8 of bitsandbytes", p.shape[-1])

    def scales(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"SCB": p.SCB}  # type: ignore[attr-defined]

    def adopt(self, p: torch.Tensor, full: torch.Tensor) -> None:
        if hasattr(full, "SCB"):
            p.SCB.copy_(full.SCB)  # type: ignore[attr-defined]

    def plain(self, p: torch.Tensor) -> torch.Tensor:
        return p.detach().as_subclass(torch.Tensor).view(torch.uint8)

    def attributes(self, p: torch.Tensor) -> dict[str, Any]:
        return {**p.__dict__, "CB": None}  # CB is the whole weight

    def around(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(torch.int8)

    def whole(self, stored: torch.Tensor, attributes: dict[str, Any]) -> nn.Parameter:
        made = super().whole(stored, attributes)
        made.CB = made.detach()  # type: ignore[attr-defined]
        return made

    def bind(self, state: UnitState, i: int, stored: torch.Tensor) -> Bound:
        made = self.whole(stored, state.attributes[i])
        both = {key: made.__dict__[key] for key in ("CB", "SCB")}
        owner = next(owner for owner, _, index in state.slots if index == i)
        biases = [k for held, key, k in state.slots if held is owner and key == "bias"]
        memory: dict[int, torch.Tensor] = {}

        def give(version: int) -> None:
            made.__dict__.update(both)  # the layer takes them away at each forward
            for k in biases:  # and may replace a bias by a copy in the dtype of its input
                bias = state.unsharded[k]
                bias.data = memory.setdefault(k, bias.detach())

        return made, give


class InnerTensors(Kind):
    """A frozen subclass that holds other tensors: their bytes, each aligned to 64."""

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__(p)
        self.form, found = _taken_apart(p)
        self.parts: list[tuple[int, torch.dtype, torch.Size, Any]] = []
        self.n_bytes = 0
        for t in found:
            stride = torch.empty_like(t, device="meta").stride()  # dense, as copies have it
            self.parts.append((self.n_bytes, t.dtype, t.shape, stride))
            self.n_bytes += -(-t.numel() * t.itemsize // 64) * 64

    def code(self, p: torch.Tensor) -> Code:
        held = ", ".join(f"{dtype} {tuple(shape)}" for _, dtype, shape, _ in self.parts)
        return Code(f"{self.type.__name__} of {held}", self.shape[-1] if self.shape else 1)

    def plain(self, p: torch.Tensor) -> torch.Tensor:
        if not isinstance(p, self.type):
            return p
        _, found = _taken_apart(p)
        stored = torch.zeros(self.n_bytes, dtype=torch.uint8, device=found[0].device)
        for t, own in zip(found, self._views(stored), strict=True):
            if (t.dtype, t.shape) != (own.dtype, own.shape):
                raise ValueError(f"a {self.type.__name__} of other tensors than at fully_shard()")
            own.copy_(t)
        return stored

    def fill(self, p: torch.Tensor, stored: torch.Tensor) -> None:
        """Write a stored value into a subclass of this kind."""
        for t, value in zip(_taken_apart(p)[1], self._views(stored), strict=True):
            t.copy_(value)

    def _views(self, stored: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors inside the subclass, over these bytes."""
        return [
            stored[begin : begin + shape.numel() * dtype.itemsize]
            .view(dtype)
            .as_strided(shape, stride)
            for begin, dtype, shape, stride in self.parts
        ]

    def around(self, stored: torch.Tensor) -> torch.Tensor:
        views = iter(self._views(stored))

        def build(form: Any) -> torch.Tensor:
            if form is None:
                return next(views)
            unflatten, inner, *options = form
            made: torch.Tensor = unflatten({n: build(f) for n, f in inner.items()}, *options)
            return made

        return build(self.form)


def _taken_apart(t: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """Return how to build a subclass from its innermost tensors, and these."""
    if not is_traceable_wrapper_subclass(t):
        return None, [t.detach()]
    names, context = t.__tensor_flatten__()
    inner = {name: _taken_apart(getattr(t, name)) for name in names}
    forms = {name: form for name, (form, _) in inner.items()}
    form = type(t).__tensor_unflatten__, forms, context, t.shape, t.stride()
    return form, [each for _, found in inner.values() for each in found]


class GatherHooks(Kind):
    """A subclass with gather hooks around one tensor of its own shape and dtype."""

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__(p)
        self.name: str | None = _only_tensor(p)  # None: the subclass has memory of its own
        self.own: dict[str, Any] = dict(p.__dict__) if self.name is None else {}
        if self.name is not None:
            self.empty: torch.Tensor = p.detach().new_zeros((0, *p.shape[1:]))

    def plain(self, p: torch.Tensor) -> torch.Tensor:
        if not isinstance(p, self.type):
            return p
        p = p.detach()
        inner = p.as_subclass(torch.Tensor) if self.name is None else getattr(p, self.name)
        return inner.detach()

    def around(self, stored: torch.Tensor) -> torch.Tensor:
        if self.name is None:
            made = stored.as_subclass(self.type)  # type: ignore[arg-type]
            made.__dict__.update(self.own)
        else:
            made = self.empty.new_zeros(stored.shape)
            setattr(made, self.name, stored)
        return made

    def bind(self, state: UnitState, i: int, stored: torch.Tensor) -> Bound:
        gather = Gather(state, i, self.around(state.rows[i]))
        return gather.unsharded, gather.refresh

    def take(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient's values, which may be a subclass around one tensor."""
        name = _only_tensor(grad)
        grad = grad if name is None else getattr(grad, name)
        if grad.shape != self.shape or is_traceable_wrapper_subclass(grad):
            raise TypeError(
                f"the gradient of a {self.type.__name__} {tuple(self.shape)} is a "
                f"{type(grad).__name__} {tuple(grad.shape)}"
            )
        return grad


def _only_tensor(p: torch.Tensor) -> str | None:
    """Return the name of the tensor that a subclass wraps, if it wraps one like itself."""
    names = p.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(p) else []
    inner = getattr(p, names[0]) if len(names) == 1 else None
    if type(inner) in (torch.Tensor, nn.Parameter) and inner.dtype is p.dtype:
        return names[0] if inner.shape == p.shape else None
    return None


def kind_of(name: str, p: torch.Tensor) -> Kind | None:
    """Return how units store a parameter, or None for a tensor that they store as it is.

    Raises
    ------
    NotImplementedError, TypeError
        Units cannot store it; the error names the parameter and its type.
    """
    what = f"parameter '{name}' is of type {type(p).__name__}"
    hooks = [hook for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if hasattr(p, hook)]
    wraps = is_traceable_wrapper_subclass(p)
    if len(hooks) == 1 or any(hook in p.__dict__ for hook in hooks):
        raise NotImplementedError(
            f"{what}, whose {hooks[0]} is set on this tensor or has no counterpart: define "
            f"fsdp_pre_all_gather and fsdp_post_all_gather in a subclass, {_LEAVE}"
        )
    if not (hooks or wraps):
        return _codes_of(what, p)
    if p.is_meta:
        raise NotImplementedError(f"{what}, on the meta device: give it values first, {_LEAVE}")
    if hooks and p.dtype in SHARDED and (_only_tensor(p) or not wraps):
        return GatherHooks(p)
    if not wraps or p.requires_grad:
        raise NotImplementedError(
            f"{what}, a subclass that holds other tensors, and is trained: units train subclasses "
            "with fsdp_pre_all_gather and fsdp_post_all_gather around one floating point tensor "
            f"of their shape. Freeze it and train an adapter, make it a plain tensor, {_LEAVE}"
        )
    return InnerTensors(p)


def _codes_of(what: str, p: torch.Tensor) -> Kind | None:
    """Return the kind of bitsandbytes' frozen weights, or None for other tensors."""
    state = getattr(p, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise NotImplementedError(
            f"{what}, whose codes bitsandbytes repacked in evaluation, which rounded their scales "
            "and leaves no gradients: load the model anew, and evaluate it after fully_shard()"
        )
    if state is not None and not p.requires_grad:
        return Int4Codes(p)
    if not hasattr(p, "SCB") or p.has_fp16_weights:  # type: ignore[attr-defined]
        return None
    if p.dtype is not torch.int8 or p.SCB is None:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{what}, which is not quantised yet: bitsandbytes quantises in model.to('cpu') (or "
            f"give the layer has_fp16_weights=True), {_LEAVE}"
        )
    return Int8Codes(p)


def take_codes_back(modules: Iterable[nn.Module]) -> None:
    """Give weights the codes and scales that bitsandbytes' layers took at their first forward."""
    for m in (m for top in modules for m in top.modules()):
        codes = getattr(getattr(m, "state", None), "CB", None)
        weight = m._parameters.get("weight")
        if codes is None or hasattr(weight, "fsdpc"):
            continue
        if getattr(weight, "has_fp16_weights", True) is False:
            weight.CB, weight.SCB = codes, m.state.SCB  # type: ignore[union-attr]
            m.state.CB = m.state.SCB = None  # type: ignore[union-attr]


def keep_codes(inside: Inside) -> None:
    """Keep bitsandbytes' 4-bit layers from repacking their codes in evaluation."""
    for _, m in inside:
        if getattr(m, "support_avx512bf16_for_cpu", False):
            m.support_avx512bf16_for_cpu = False


def as_stored(found: Found) -> tuple[list[Kind | None], Found]:
    """Return the kinds of parameters, and plain parameters of what a unit stores of them."""
    kinds, plain = [], []
    for name, p, at in found:
        kind = None if isinstance(p, DTensor) else kind_of(name, p)
        if kind is not None:
            made = nn.Parameter(kind.plain(p.detach()), p.requires_grad)
            made.__dict__.update(kind.attributes(p))
            p = made
        kinds.append(kind)
        plain.append((name, p, at))
    return kinds, plain
