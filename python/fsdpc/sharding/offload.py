"""Offload parts of a sharded model to a disk or, with a GPU, to host memory."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from fsdpc import _core
from fsdpc.tensors.device import get_default_device

TIERS = ("device", "host", "disk")
#: Classes of a unit's arrays, named like a policy's fields.
CLASSES = ("params", "masters", "optimizer", "gradients")
FIELDS = (*CLASSES, "activations")


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Where to keep a unit's arrays, by default on the compute device as in FSDP2.

    Parameters
    ----------
    params, gradients, masters, optimizer : {"device", "host", "disk"}, default "device"
        Location of the gathered parameters, the gradient shards, the shards that an optimizer
        updates, and the states of fsdpc's optimizers. On CPUs "host" is the same as "device"; on
        GPUs it is pinned memory.
    activations : {"device", "host", "disk"}, default "device"
        Location of the tensors that a unit's forward saves for its backward. If the unit
        recomputes (:func:`checkpoint_activations`), these are its inputs.
    path : path, optional
        A folder on one of this host's disks, required for "disk". Each rank creates an unnamed file
        there, which disappears when the process ends.
    fraction : float, default 1.0
        Fraction in (0, 1] of each disk class to offload; the first part of every unit stays in
        memory. ``params`` are always offloaded completely. Of activations, it is the fraction of
        the tensors.

    Raises
    ------
    ValueError
        A tier is unknown, ``path`` is missing, or ``fraction`` is out of range.

    Notes
    -----
    ``fully_shard`` raises NotImplementedError for "disk" if ranks compute on GPUs, and for params
    on the "host" if one rank owns all of them. ``fsdpc.torch`` raises it for activations if ranks
    compute on GPUs. Results are bitwise equal to a run without offload.
    If masters and optimizer are both on the "host", the rank's CPU threads update them. With a
    disk, a step reads and writes masters and states once, in unit order and ahead of use, bypassing
    the page cache. Reads are verified by CRC-32C: if a disk returns wrong data, the run ends with
    an error. Parameters and gradients go through the page cache, without checksums. Such a step
    continues during the next forward, unit by unit; the first read of a value or state completes
    it.

    Activations of a unit leave while the next unit's forward runs, and return while the next
    unit's backward runs. Only tensors of at least 4 KiB leave, and only units inside the root that
    enclose no other; the forward's last unit keeps its own.
    Source: ZeRO-Offload (Ren et al. 2021), ZeRO-Infinity (Rajbhandari et al. 2021).

    Examples
    --------
    >>> import fsdpc
    >>> policy = fsdpc.OffloadPolicy(optimizer="disk", path="/var/tmp")
    """

    params: str = "device"
    gradients: str = "device"
    masters: str = "device"
    optimizer: str = "device"
    activations: str = "device"
    path: str | os.PathLike[str] | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in FIELDS:
            tier = getattr(self, name)
            if tier not in TIERS:
                raise ValueError(f"{name}={tier!r}: a tier is one of {', '.join(TIERS)}")
        if self.on_disk and not self.path:
            raise ValueError(
                f"{', '.join(self.on_disk)} on a disk needs a path, of a folder on a disk of this "
                "host"
            )
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction!r} is not in (0, 1]")
        if not self.on_disk and (self.path is not None or self.fraction != 1):
            raise ValueError(
                "a path or a fraction, and nothing is on a disk: say what, as in optimizer='disk'"
            )

    def __str__(self) -> str:
        """Return this policy as the value of ``--offload`` in ``fsdpc train``."""
        tiers = {name: getattr(self, name) for name in FIELDS}
        text = ",".join(f"{name}={tier}" for name, tier in tiers.items() if tier != "device")
        text = text.replace("=disk", f"=disk:{self.path}", 1)  # one folder for all classes
        return text + (f",fraction={self.fraction:g}" if self.fraction != 1 else "")

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The classes that this policy keeps on a disk."""
        return self._of("disk")

    @property
    def on_host(self) -> tuple[str, ...]:
        """The classes that this policy keeps in CPU memory."""
        return self._of("host")

    def _of(self, tier: str) -> tuple[str, ...]:
        return tuple(name for name in FIELDS if getattr(self, name) == tier)


_tiers: weakref.WeakValueDictionary[tuple[str, int], _core.Tier] = weakref.WeakValueDictionary()


def planned(policy: Any, device: str) -> _core.Offload | None:
    """Convert a policy to the form that units expect, without a file; None if it has no effect."""
    on_disk, on_host = (
        set(getattr(policy, where, ())) & set(CLASSES) for where in ("on_disk", "on_host")
    )
    if on_disk:
        return None, *(name in on_disk for name in CLASSES), float(policy.fraction)
    if on_host and device != "cpu":
        return "host", *(name in on_host for name in CLASSES), 1.0
    return None


def opened(policy: Any, comm: _core.Comm) -> _core.Offload | None:
    """Like :func:`planned`, but with this rank's file in the policy's folder, shared by its units.

    The rank comes from the unit's communicator, because a rank that shards nothing may not have
    joined the world.
    """
    device = get_default_device()
    plan = planned(policy, device)
    if device != "cpu" and plan is not None and plan[0] != "host":
        raise NotImplementedError(
            f"offload to 'disk' where ranks compute on {device}: it works only on CPUs"
        )
    if plan is not None and plan[0] == "host" and plan[1] and comm.size == 1:
        raise NotImplementedError(
            "params='host' for shards of one rank: modules read its params where they lie, on "
            f"{device}; leave params out of the policy, or shard over more ranks"
        )
    if plan is None or plan[0] == "host":
        return plan
    return tier_of(policy, comm.world_rank), *plan[1:]


def tier_of(policy: Any, rank: int) -> _core.Tier:
    """Return a rank's file in a policy's folder, creating it at its first use."""
    key = os.path.realpath(policy.path), rank
    tier = _tiers.get(key)
    if tier is None:
        tier = _tiers[key] = _core.Tier(*key)
    return tier


def words(policy: Any) -> str:
    """Return a line that ranks compare to check that their policies agree; folders may differ."""
    on_disk = getattr(policy, "on_disk", ())
    if not on_disk and planned(policy, get_default_device()) is None:
        return ""
    where = f", on disk {on_disk}, fraction={policy.fraction}"
    return where if on_disk else f", on the host {policy.on_host}"


def file_stats() -> dict[str, int]:
    """Return the total size of this rank's files, and the bytes read and written."""
    found = [tier.stats() for tier in _tiers.values()]
    return {
        f"disk_{name}": sum(each[name] for each in found)
        for name in ("file_bytes", "read_bytes", "written_bytes")
    }
