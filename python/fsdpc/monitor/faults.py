"""Inject faults for drills: a rank dies, hangs, raises or miscomputes at a chosen point.

    FSDPC_FAULT_ENABLE=1 FSDPC_FAULT="rank 2: kill at backward of layers.3 in step 7" \\
        fsdpc run --ranks 4 train.py

Scripts need no change. If FSDPC_FAULT is not set, nothing is checked. If FSDPC_FAULT is set but
FSDPC_FAULT_ENABLE is not, sharding raises an error, so a forgotten variable cannot end a real run.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpc import distributed
from fsdpc.display.text import say
from fsdpc.sharding.rules import Frontend, units_of

VARIABLE, ENABLE = "FSDPC_FAULT", "FSDPC_FAULT_ENABLE"
LAUNCHER = "FSDPC_LAUNCHER_PID"
DROP = "drop the launcher"
KINDS = ("kill", "stall", "raise", "corrupt", DROP)

_FORM = re.compile(
    r"rank (\d+): (\w+(?: the launcher)?)(?: ([\d.]+) ?s)? at (forward|backward) of (\S+) "
    r"in step (\d+)"
)
_EXAMPLE = "rank 2: kill at backward of layers.3 in step 7"
_STALL_S = 3600.0
_WRONG = 1e4  # added to a gradient


class InjectedFault(RuntimeError):
    """Raised by the injected fault "raise" in drills: docs/troubleshooting.md#exceptions."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: what happens to a rank, and at which point.

    ``kind`` is "kill" (SIGKILL), "stall" (sleeps ``seconds``), "raise" (:class:`InjectedFault`),
    "corrupt" or "drop the launcher". "corrupt" adds 10,000 to the first element of this rank's
    gradient of the unit's first parameter, before it is reduced. "drop the launcher" sends SIGKILL
    to this rank's launcher, and all of its ranks then end. ``step`` counts the unit's forwards with
    gradients, from 1, including micro-steps but not recomputation.
    """

    rank: int
    kind: str
    phase: str
    unit: str
    step: int
    seconds: float = _STALL_S

    def __str__(self) -> str:
        return f"{self.kind} at {self.phase} of {self.unit} in step {self.step}"


def read_faults(environment: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """Parse the semicolon-separated faults in ``FSDPC_FAULT``; return () if it is not set.

    Raises
    ------
    ValueError
        The text is invalid, or ``FSDPC_FAULT_ENABLE`` is not 1.

    Examples
    --------
    >>> found = read_faults({"FSDPC_FAULT": "rank 0: stall 2 s at forward of layers.1 in step 3",
    ...                      "FSDPC_FAULT_ENABLE": "1"})
    >>> print(found[0], "for", found[0].seconds)
    stall at forward of layers.1 in step 3 for 2.0
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return ()
    if environment.get(ENABLE) != "1":
        raise ValueError(
            f"{VARIABLE} is set ('{text}'): a drill needs {ENABLE}=1 too; for a real run unset it"
        )
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        match = _FORM.fullmatch(part)
        if match is None or match[2] not in KINDS or (match[3] and match[2] != "stall"):
            raise ValueError(
                f"{VARIABLE}: '{part}' is not like '{_EXAMPLE}', of {', '.join(KINDS)} (stall 30 s)"
            )
        rank, kind, seconds, phase, unit, step = match.groups()
        if kind == "corrupt" and phase != "backward":
            raise ValueError(f"{VARIABLE}: '{part}': gradients are corrupted at backward")
        found.append(Fault(rank=int(rank), kind=kind, phase=phase, unit=unit, step=int(step),
                           seconds=float(seconds or _STALL_S)))  # fmt: skip
    return tuple(found)


def watch(modules: Iterable[Any], frontend: Frontend) -> None:
    """Install this rank's faults in a unit's modules; called during sharding.

    Ranks that restart after a failure inject no faults, because the drill tests whether they
    continue.
    """
    planned = _planned()
    if any(f.kind == DROP for f in planned):
        _launcher()
    faults = [f for f in planned if f.rank == distributed.rank()]
    for module in modules if faults else ():
        forward = module.forward  # bound; an instance attribute replaces it
        object.__setattr__(module, "forward", _watched(module, forward, faults, frontend))


def _planned() -> tuple[Fault, ...]:
    found = read_faults()
    return () if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else found


def name_missing(module: Any) -> None:
    """On rank 0, report faults whose unit does not exist, and suggest similar unit names.

    Called by the outermost module after its units are named.
    """
    if distributed.rank() != 0:
        return
    units = [unit.name for unit in units_of(module)]
    for fault in _planned():
        if fault.unit not in units:
            say(
                f"{VARIABLE}: '{fault}': {units[0]} has no unit '{fault.unit}', but "
                f"{', '.join(_close(fault.unit, units))}"
            )


def _close(name: str, units: list[str]) -> list[str]:
    """Return up to three unit names similar to this one, or the first three if none is similar."""
    inside = [unit for unit in units if unit.endswith(f".{name}")]
    found = dict.fromkeys([*inside, *difflib.get_close_matches(name, units)])
    return (list(found) or units)[:3]


def _launcher() -> int:
    """Return the process ID of the launcher that started this rank."""
    pid = os.environ.get(LAUNCHER, "")
    if pid != str(os.getppid()):
        raise ValueError(
            f"{VARIABLE}: '{DROP}' is for the ranks of fsdpc run, fsdpc train or launch(): "
            f"{LAUNCHER} is '{pid}', and this rank's parent is {os.getppid()}"
        )
    return int(pid)


def _watched(
    module: Any, forward: Callable[..., Any], faults: list[Fault], frontend: Frontend
) -> Callable[..., Any]:
    count, inner = 0, [forward]

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if not frontend.records():
            return inner[0](*args, **kwargs)
        count += 1
        due = [f for f in faults if f.unit == module._fsdpc_unit.name and f.step == count]
        for fault in due:
            if fault.phase == "forward":
                _strike(fault)
            elif fault.kind == "corrupt":
                _corrupt(module._fsdpc_unit.name, frontend.parameters(module), fault)
        output = inner[0](*args, **kwargs)
        for fault in due:
            if fault.phase == "backward" and fault.kind != "corrupt":
                _first(output).register_hook(lambda grad, fault=fault: _strike(fault))
        return output

    watched.inner = inner  # type: ignore[attr-defined]  # activation.py puts recomputation inside
    return watched


def _first(output: Any) -> Any:
    """Return the first tensor in an output that requires grad."""
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        found = [_first(each) for each in output]
        return next((each for each in found if each is not None), None)
    return output if getattr(output, "requires_grad", False) else None


def _strike(fault: Fault) -> None:
    _say(fault)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == DROP:
        os.kill(_launcher(), signal.SIGKILL)
    elif fault.kind == "stall":
        time.sleep(fault.seconds)
    else:
        raise InjectedFault(f"{VARIABLE}: {fault}, on rank {fault.rank}")


def _corrupt(unit: str, parameters: list[Any], fault: Fault) -> None:
    handles: list[Any] = []
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        raise ValueError(f"{VARIABLE}: unit '{unit}' has no gradient to corrupt")

    def wrong(grad: Any) -> Any:
        handles.pop().remove()
        _say(fault)
        changed = grad.detach().clone()
        changed.reshape(-1)[0] += _WRONG
        return changed

    handles.append(trained[0].register_hook(wrong))


def _say(fault: Fault) -> None:
    say(f"{VARIABLE} on rank {fault.rank}: {fault}")
