"""Lists, dictionaries and sequences of modules and parameters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fsdpc.nn.module import Module, Parameter, check_sharded

L = TypeVar("L", bound="ModuleList")


class ModuleList(Module):
    """A list of modules.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    >>> len(layers), len(list(layers.parameters()))
    (3, 6)
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self: L, module: Module) -> L:
        """Append a module."""
        names = (str(i) for i in itertools.count(len(self)))
        self._put(next(name for name in names if name not in self._modules), module)
        return self

    def insert(self: L, index: int, module: Module) -> L:
        """Insert a module before an index; the names of later modules shift by one."""
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} holds modules, not {type(module).__name__}")
        modules, index = list(self), operator.index(index)
        if not -len(modules) <= index <= len(modules):
            raise IndexError(f"insert at {index} into {len(modules)} modules")
        modules.insert(index, module)
        self._renumber(modules)
        return self

    def pop(self, index: int | slice) -> Any:
        """Remove a module; the names of later modules shift."""
        module = self[index]
        del self[index]
        return module

    def extend(self: L, modules: Iterable[Module]) -> L:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def _shown(self, children: list[tuple[str, str]]) -> list[tuple[str, str]]:
        runs = [list(run) for _, run in itertools.groupby(children, lambda child: child[1])]
        return [
            run[0] if len(run) == 1 else (f"{run[0][0]}-{run[-1][0]}", f"{len(run)} x {run[0][1]}")
            for run in runs
        ]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(list(self)[index])
        return list(self)[index]

    def __setitem__(self, index: int, module: Module) -> None:
        self._put(list(self._modules)[index], module)

    def __delitem__(self, index: int | slice) -> None:
        modules = list(self)
        del modules[index]
        self._renumber(modules)

    def _renumber(self, modules: list[Module]) -> None:
        """Store these modules by index, after checking that no unit would lose a module."""
        after = {str(i): module for i, module in enumerate(modules)}
        for name in dict.fromkeys([*self._modules, *after]):
            if self._modules.get(name) is not after.get(name):
                check_sharded(self, name, self._modules.get(name), after.get(name))
        self._modules.clear()
        self._modules.update(after)


class Sequential(ModuleList):
    """Modules that are applied in order.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> model(fsdpc.ones(5, 4)).shape
    (5, 1)
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        kept = dict(list(self._modules.items())[index])
        part = type(self)(*kept.values())
        part.__dict__["_modules"] = kept  # names are kept, as in PyTorch
        return part

    def forward(self, x: Any) -> Any:
        """Apply each module to the previous module's output."""
        for module in self._modules.values():
            x = module(x)
        return x


class ModuleDict(Module):
    """Modules by name.

    Parameters
    ----------
    modules : mapping of str to Module, optional
        Added in this order.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 3)})
    >>> heads["b"](fsdpc.ones(1, 2)).shape
    (1, 3)
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> None:
        """Add modules, or replace those with the same names."""
        for name, module in modules.items():
            self[name] = module

    def keys(self) -> Iterable[str]:
        """Return the names."""
        return self._modules.keys()

    def values(self) -> Iterable[Module]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Module]]:
        """Return names and modules."""
        return self._modules.items()

    def pop(self, name: str) -> Module:
        """Remove a module."""
        module = self._modules[name]
        del self[name]
        return module

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(module, Module) or "." in name:
            raise TypeError(f"ModuleDict: '{name}' of {type(module).__name__}; modules by names")
        self._put(name, module)

    def __delitem__(self, name: str) -> None:
        self._modules[name]  # KeyError if it does not exist
        delattr(self, name)


class ParameterList(Module):
    """A list of parameters.

    Parameters
    ----------
    parameters : iterable of Parameter or Tensor
        Tensors become parameters that share their memory.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> scales = nn.ParameterList([fsdpc.ones(2), fsdpc.ones(3)])
    >>> [p.shape for p in scales]
    [(2,), (3,)]
    """

    def __init__(self, parameters: Iterable[Any] = ()) -> None:
        super().__init__()
        self.extend(parameters)

    def append(self, parameter: Any) -> ParameterList:
        """Append a parameter."""
        p = parameter if isinstance(parameter, Parameter) else Parameter(parameter)
        self.register_parameter(str(len(self)), p)
        return self

    def extend(self, parameters: Iterable[Any]) -> ParameterList:
        """Add parameters at the end."""
        for p in parameters:
            self.append(p)
        return self

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters.values())

    def __getitem__(self, index: int | slice) -> Any:
        return list(self._parameters.values())[index]

    def __setitem__(self, index: int, parameter: Parameter) -> None:
        self.register_parameter(str(range(len(self))[index]), parameter)

    def extra_repr(self) -> str:
        return ", ".join(f"{p.dtype.name} {p.shape}" for p in self)
