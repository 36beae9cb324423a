"""What torch's own code finds in a sharded module: FSDP2's class, and a part of its state.

torch asks ``isinstance(module, FSDPModule)`` and then calls FSDP2's methods. Sharded modules
therefore have torch's class last among their base classes, so that none of its methods precedes
ours. ``torch.distributed.pipelining`` and ``share_comm_ctx`` also read FSDP2's state.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import nn

    from fsdpc.torch._unit import Root

#: Modules that hold torch's class and function, also after install(); the second is torch 2.5's.
_HOMES = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")


class TorchState:
    """The part of FSDP2's state that torch's own code uses; a pipeline reduces through it.

    It is its own context and its own, only group of parameters.
    """

    root: Root | None
    _comm_ctx: Any = None  # streams, which all units of a process share

    @property
    def _state_ctx(self) -> TorchState:
        return self

    _fsdp_param_group = _state_ctx  # before torch 2.12

    @property
    def all_states(self) -> tuple[TorchState, ...]:
        """This state, which reduces for all of the root's."""
        return (self,)

    _fsdp_param_groups = all_states

    def post_backward(self) -> None:
        """Reduce the gradients of all units of the root; collective."""
        if self.root is not None:
            self.root.reduce()

    def _root_post_backward_final_callback(self) -> None:
        """Do nothing, as FSDP2 waits here."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"'{name}' of the state of a module that fsdpc has sharded: FSDP2's internals are not "
            "here; call the module's own methods"
        )


@cache
def _torch_home() -> Any:
    """Return the module of torch that has FSDP2, or None."""
    for name in _HOMES:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return None


@cache
def torch_bases(ours: type) -> tuple[type, ...]:
    """Return torch's FSDPModule, with refusals of the public methods that ours lacks."""
    if _torch_home() is None:
        return ()
    theirs = _torch_home().FSDPModule
    if issubclass(theirs, ours):  # someone has put ours in its place
        return ()
    missing = [name for name in vars(theirs) if name[0] != "_" and not hasattr(ours, name)]
    return (type(theirs.__name__, (theirs,), {name: _refusal(name) for name in missing}),)


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: this method of torch's FSDPModule is newer than fsdpc")

    return refuse


def replicated(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of submodules that torch's ``replicate()`` reduces."""
    from torch.distributed._composable.contract import _get_registry

    inner = (m for top in modules for m in top.modules() if "replicate" in (_get_registry(m) or ()))
    return [p for m in inner for p in m.parameters()]


def register(module: nn.Module, state: TorchState) -> None:
    """Let torch's ``fully_shard.state(module)`` find a state, and ``replicate()`` skip a module."""
    theirs = getattr(getattr(_torch_home(), "fully_shard", None), "__wrapped__", None)
    if theirs is not None:
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

        module.__dict__.setdefault(STATE_KEY, {})[theirs] = state
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
