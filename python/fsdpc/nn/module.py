"""Modules and parameters as in PyTorch, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.nn._hooks import Hooked
from fsdpc.nn.parameter import Codes, Parameter, deferred_init, full_tensor
from fsdpc.tensors.grad_mode import no_grad

__all__ = ["Module", "Parameter", "deferred_init"]

M = TypeVar("M", bound="Module")
INSIDE = "_fsdpc_inside"  # key in the dictionary of modules whose parameters are in a unit


class Module(Hooked):
    """Base class of all modules, with parameters and submodules as attributes.

    Examples
    --------
    >>> import fsdpc
    >>> class Net(fsdpc.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = fsdpc.nn.Linear(8, 4)
    ...     def forward(self, x):
    ...         return self.fc(x).tanh()
    >>> [name for name, _ in Net().named_parameters()]
    ['fc.weight', 'fc.bias']
    """

    training: bool
    #: States that may be missing in a strict load, as in torch's modules of the same name.
    _may_lack: tuple[str, ...] = ()

    def __init__(self) -> None:
        d = self.__dict__
        d["_parameters"], d["_modules"], d["_buffers"] = {}, {}, {}
        d["training"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        d = self.__dict__
        if "_parameters" not in d:
            if isinstance(value, (Parameter, Module)):
                raise AttributeError(
                    f"{type(self).__name__}: call super().__init__() before assigning '{name}'"
                )
            d[name] = value
            return
        if isinstance(value, Parameter):
            self._refuse_method(name)
            self._enter("_parameters", name, value)
        elif name in self._parameters:
            _check_kind("parameter", name, value, None)
            self._enter("_parameters", name, None)
        elif isinstance(value, Module):
            self._refuse_method(name)
            self._enter("_modules", name, value)
        elif name in self._modules:
            _check_kind("child module", name, value, None)
            self._enter("_modules", name, None)
        elif name in self._buffers:
            _check_kind("buffer", name, value, Tensor)
            if value is not self._buffers[name] and _core.is_capturing():
                raise RuntimeError(
                    f"buffer '{name}' of {type(self).__name__} is replaced inside a captured step, "
                    f"whose replays would begin with the old one each time: {name}.copy_(values)"
                )
            self._buffers[name] = value
        else:
            object.__setattr__(self, name, value)  # through the class's property, if there is one

    def _enter(self, table: str, name: str, value: Any) -> None:
        """Add a parameter or module to its table, and remove its name from the other tables."""
        d = self.__dict__
        known = d["_parameters"].get(name)
        known = d["_modules"].get(name) if known is None else known
        if known is not value:
            check_sharded(self, name, known, value)
        for other in ("_parameters", "_modules", "_buffers"):
            if other != table:
                d[other].pop(name, None)
        d.get("_transient", set()).discard(name)
        d.pop(name, None)
        d[table][name] = value

    def __getattr__(self, name: str) -> Any:
        d = self.__dict__
        for table in ("_parameters", "_modules", "_buffers"):
            if table in d and name in d[table]:
                return d[table][name]
        raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")

    def __delattr__(self, name: str) -> None:
        for table in (self._parameters, self._modules, self._buffers):
            if name in table:
                if table is not self._buffers:
                    check_sharded(self, name, table[name], None)
                del table[name]
                self.__dict__.get("_transient", set()).discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._modules, *self._buffers})

    def _refuse_method(self, name: str) -> None:
        """Raise KeyError if a name would hide a method, as PyTorch does."""
        if callable(getattr(type(self), name, None)):
            raise KeyError(f"attribute '{name}' already exists: a method of {type(self).__name__}")

    def _refuse_name(self, table: str, name: str) -> None:
        """Reject names that state dicts cannot contain, and names of existing attributes."""
        if table not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__}: call super().__init__() before registering '{name}'"
            )
        if not isinstance(name, str):
            raise TypeError(f"a name is a string, not {type(name).__name__}")
        if not name or "." in name:
            raise KeyError(f"the name {name!r} is empty or has a '.': state dicts join names by it")
        self._refuse_method(name)
        if name not in self.__dict__[table] and hasattr(self, name):
            raise KeyError(f"attribute '{name}' already exists: delete it first, or take another")

    def _put(self, name: str, module: Module) -> None:
        """Add a module under a name; used by lists and dictionaries of modules."""
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} holds modules, not {type(module).__name__}")
        self._refuse_name("_modules", name)
        self._enter("_modules", name, module)

    def register_parameter(self, name: str, value: Parameter | None) -> None:
        """Add a parameter under a name; None reserves the name."""
        self._refuse_name("_parameters", name)
        _check_kind("parameter", name, value, Parameter)
        self._enter("_parameters", name, value)

    def register_buffer(self, name: str, value: Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that is not trained; ``state_dict`` contains it if it is persistent."""
        self._refuse_name("_buffers", name)
        _check_kind("buffer", name, value, Tensor)
        self._buffers[name] = value
        transient = self.__dict__.setdefault("_transient", set())
        (transient.discard if persistent else transient.add)(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output; subclasses must define this method."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method()(*args, **kwargs)

    # ---- walking the tree ----

    def named_modules(
        self, prefix: str = "", _seen: set[int] | None = None
    ) -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module), each module once, starting with this one."""
        seen = set() if _seen is None else _seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                yield from child.named_modules(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all submodules, each once."""
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of the direct children."""
        return ((n, m) for n, m in self._modules.items() if m is not None)

    def children(self) -> Iterator[Module]:
        """Yield the direct children."""
        return (module for _, module in self.named_children())

    def named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted name, parameter); tied parameters appear once, under their first name."""
        seen: set[int] = set()
        for path, module in self.named_modules(prefix):
            for name, p in module._parameters.items():
                if p is None or (remove_duplicate and id(p) in seen):
                    continue
                seen.add(id(p))
                yield (f"{path}.{name}" if path else name), p

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters, each once."""
        return (p for _, p in self.named_parameters())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, buffer)."""
        for path, module in self.named_modules(prefix):
            for name, b in module._buffers.items():
                if b is not None:
                    yield (f"{path}.{name}" if path else name), b

    def _persistent(self) -> Iterator[tuple[str, Tensor]]:
        """Yield state dict entries without gathering; a tied parameter appears under each name."""
        for path, module in self.named_modules():
            prefix = f"{path}." if path else ""
            transient = module.__dict__.get("_transient", ())
            for table, left_out in ((module._parameters, ()), (module._buffers, transient)):
                for name, t in table.items():
                    if t is not None and name not in left_out:
                        yield prefix + name, t

    def get_submodule(self, path: str) -> Module:
        """Return the module at a dotted path; raise AttributeError if it does not exist."""
        module: Module | None = self
        for part in filter(None, path.split(".")):
            module = module._modules.get(part) if module is not None else None
        if module is None:
            raise AttributeError(f"{type(self).__name__} has no submodule '{path}'")
        return module

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Call fn on every module, children before parents."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def train(self: M, mode: bool = True) -> M:
        """Enable or disable training behaviour, such as dropout."""
        for module in self.modules():
            module.__dict__["training"] = bool(mode)
        return self

    def eval(self: M) -> M:
        """Switch training behaviour off."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Freeze or unfreeze every parameter."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def to(self: M, dtype: Any) -> M:
        """Convert floating point parameters, gradients and buffers to another dtype, in place.

        Parameters
        ----------
        dtype : dtype or str
            A floating point dtype.

        Returns
        -------
        Module
            This module. Its parameters stay the same objects, unless they are deferred.

        Raises
        ------
        TypeError
            The dtype is not a floating point dtype.
        RuntimeError
            A parameter is sharded.
        """
        target = _core.as_dtype(dtype)
        if not target.is_floating_point:
            raise TypeError(f"a module is converted to a dtype of floats, not {target.name}")
        if any(p._unit is not None for p in self.parameters()):
            raise RuntimeError(
                "parameters are sharded: convert the module before fully_shard, or compute in "
                "another dtype by MixedPrecisionPolicy(param_dtype=...)"
            )
        made: dict[int, Parameter] = {}
        with no_grad():
            for module in self.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        module._parameters[name] = _converted(p, target, made)
                for name, b in module._buffers.items():
                    if b is not None and b.dtype.is_floating_point:
                        module._buffers[name] = b.to(target)
        return self

    def float(self: M) -> M:
        """Convert to float32; see :meth:`to`."""
        return self.to(_core.float32)

    def double(self: M) -> M:
        """Convert to float64; see :meth:`to`."""
        return self.to(_core.float64)

    def half(self: M) -> M:
        """Convert to float16; see :meth:`to`."""
        return self.to(_core.float16)

    def bfloat16(self: M) -> M:
        """Convert to bfloat16; see :meth:`to`."""
        return self.to(_core.bfloat16)

    def zero_grad(self) -> None:
        """Drop every parameter's gradient."""
        for p in self.parameters():
            p.grad = None

    def materialize(self: M) -> M:
        """Allocate and initialise deferred parameters."""
        for name, p in self.named_parameters():
            if p.is_deferred and p._unit is None:
                if p._recipe is None:
                    raise RuntimeError(f"parameter '{name}' was made without an initial value")
                p.materialize_()
                p._recipe.fill(p)
        return self

    def num_parameters(self) -> int:
        """Count the elements of all parameters, counting tied ones once."""
        shapes = [(p.shape[0], p._code.columns) if p._code else p.shape for p in self.parameters()]
        return sum(int(np.prod(shape)) for shape in shapes)

    # ---- state ----

    def state_dict(self) -> dict[str, Tensor]:
        """Return full values by dotted name (collective over the ranks of a sharded module).

        Returns
        -------
        dict of str to Tensor
            Parameters in their original dtype (gathered if sharded, tied ones under every name),
            then persistent buffers.
        """
        known: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, t in self._persistent():
            if isinstance(t, Parameter) and id(t) not in known:
                value = full_tensor(t)
                known[id(t)] = Codes.of(value, t._code) if t._code else value
            state[name] = known.get(id(t), t)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Copy full values into parameters and buffers by name.

        Parameters
        ----------
        state : mapping of str to Tensor or ndarray
            Full values of any real dtype, or codes of the same scheme for a quantised weight. A
            sharded parameter reads only its own rows.
        strict : bool, default True
            Raise on missing and unexpected names.

        Returns
        -------
        missing, unexpected : list of str

        Raises
        ------
        KeyError
            Names are missing or unexpected and ``strict`` is set; the error lists all of them.
        ValueError
            Shapes or schemes of quantised weights differ; the error lists all of them.
        TypeError
            Values are not real numbers; the error lists all of them.

        Notes
        -----
        After an error the module is unchanged.
        """
        own = dict(self._persistent())
        optional = self._optional_states()
        missing = [name for name in own if name not in state and name not in optional]
        unexpected = [name for name in state if name not in own]
        if strict and (missing or unexpected):
            raise KeyError(f"state does not fit: missing {missing}, unexpected {unexpected}")
        given = {name: state[name] for name in own if name in state}
        differ = [
            f"{name}: {code or 'not quantised'} given, {own_code or 'not quantised'} wanted"
            for name, value in given.items()
            for own_code in [getattr(own[name], "_code", None)]
            if (code := _code_of(value, own_code)) != own_code
        ]
        if differ:
            raise ValueError("quantised weights differ: " + "; ".join(differ))
        wrong = [
            f"{name}: {np.shape(value)} given, {own[name].shape} wanted"
            for name, value in given.items()
            if np.shape(value) != own[name].shape
        ]
        if wrong:
            raise ValueError("shapes differ: " + "; ".join(wrong))
        check_real(given)
        with no_grad():
            for name, value in given.items():
                _copy_value(own[name], value)
        return missing, unexpected

    def _optional_states(self) -> set[str]:
        """Return names that a strict load does not require, and whose values the module keeps."""
        return {
            f"{name}.{each}" if name else each
            for name, module in self.named_modules()
            for each in module._may_lack
        }

    # ---- repr ----

    def extra_repr(self) -> str:
        """Return the text to show between the parentheses of the repr."""
        return ""

    def _shown(self, children: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the name and text to show for each child in the repr."""
        return children

    def __repr__(self) -> str:
        rows = self._shown([(name, repr(child)) for name, child in self.named_children()])
        lines = [f"({name}): {text}".replace("\n", "\n  ") for name, text in rows]
        head = type(self).__name__ + "(" + self.extra_repr()
        return head + ("\n  " + "\n  ".join(lines) + "\n" if lines else "") + ")"


def _check_kind(what: str, name: str, value: Any, kind: type | None) -> None:
    """Raise TypeError, as PyTorch does, if assigning the value would unregister a name."""
    if value is None or (kind is not None and isinstance(value, kind)):
        return
    wanted = {"parameter": "Parameter", "child module": "Module", "buffer": "Tensor"}[what]
    cure = {
        "parameter": f"write its values inside no_grad(), {name}.copy_(values), or compute with "
        "another attribute",
        "child module": "del it first, or take another name",
        "buffer": "make it a tensor, or del it first",
    }[what]
    raise TypeError(
        f"cannot assign '{type(value).__name__}' as {what} '{name}' ({wanted} or None expected): "
        f"{cure}"
    )


def _parameters_of(name: str, value: Any) -> list[tuple[str, Parameter]]:
    if isinstance(value, Module):
        return list(value.named_parameters(name))
    return [(name, value)] if isinstance(value, Parameter) else []


def check_sharded(owner: Module, name: str, known: Any, value: Any) -> None:
    """Raise RuntimeError if adding or removing a parameter would bypass the enclosing units.

    A module that is added to a unit's module becomes part of that unit.
    """
    kept = _parameters_of(name, value)
    ids = {id(p) for _, p in kept}
    lost = [p for _, p in _parameters_of(name, known) if p._unit is not None and id(p) not in ids]
    if lost:
        raise RuntimeError(
            f"'{name}' of {type(owner).__name__} holds parameter '{lost[0]._name}' of unit "
            f"'{lost[0]._unit.name}', which would go on without it: change the model before "
            "fully_shard; to change values, use load_state_dict or p.local.copy_()"
        )
    if INSIDE in owner.__dict__:
        refuse_fresh(owner, kept)
        if isinstance(value, Module):
            mark_inside(value.modules())


def mark_inside(modules: Iterable[Module]) -> None:
    """Mark modules whose parameters are in a unit, so that none can be added later."""
    for module in modules:
        module.__dict__[INSIDE] = True


def refuse_fresh(owner: Module, named: Iterable[tuple[str, Parameter]]) -> None:
    """Raise RuntimeError for parameters in a sharded module that are in no unit and not ignored."""
    for name, p in named:
        if p._unit is None and not p._ignored:
            raise RuntimeError(
                f"{type(owner).__name__} is sharded, and '{name}' {p.shape} is a parameter that no "
                "unit holds: each rank would keep its own. Add modules and parameters before "
                "fully_shard, or call fully_shard on a module before it is added"
            )


def _converted(p: Parameter, target: _core.dtype, made: dict[int, Parameter]) -> Parameter:
    """Convert a parameter to a dtype; a deferred parameter is recreated, but only once."""
    if p._code is not None:
        p._plain_dtype = target
    if p.dtype is target or not p.dtype.is_floating_point:
        return p
    if p.is_deferred:
        if id(p) not in made:
            fresh = Parameter(_core.empty_deferred(p.shape, dtype=target))
            fresh._recipe, fresh.requires_grad = p._recipe, p.requires_grad
            made[id(p)] = fresh
        return made[id(p)]
    grad, p.grad = p.grad, None
    p.set_data_(p.detach().to(target))
    if grad is not None:
        p.grad = grad.to(target)
    return p


def _code_of(value: Any, own: Any) -> Any:
    """Return how a value is coded; bytes that do not say are taken for a weight's own codes."""
    dtype = value.dtype if isinstance(value, Tensor) else np.asarray(value).dtype
    return getattr(value, "_code", None) or (own if dtype.name == "uint8" else None)


def check_real(values: Mapping[str, Any]) -> None:
    """Raise TypeError for values that are not numbers or would lose an imaginary part."""
    dtypes = {n: np.asarray(v).dtype for n, v in values.items() if not isinstance(v, Tensor)}
    known = "bfloat16"  # from ml_dtypes
    wrong = [f"{n}: {d}" for n, d in dtypes.items() if d.kind not in "fiub" and d.name != known]
    if wrong:
        raise TypeError(f"values that are no real numbers: {'; '.join(wrong)}; convert them first")


def float_tensor(value: Any) -> Tensor:
    """Convert a parameter or state value to a tensor; integers become float64."""
    source = value if isinstance(value, Tensor) else _core.tensor(np.ascontiguousarray(value))
    return source if source.dtype.is_floating_point else source.double()


def _copy_value(target: Tensor, value: Any) -> None:
    unit = getattr(target, "_unit", None)
    if unit is not None:
        source = value if isinstance(value, Tensor) else _core.tensor(np.ascontiguousarray(value))
        is_float = target.dtype.is_floating_point
        unit.write(target._index, float_tensor(source) if is_float else source.to(target.dtype))
    else:
        if target.is_deferred:
            target.materialize_()
        target.copy_(value)
