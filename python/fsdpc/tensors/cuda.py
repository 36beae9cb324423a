"""Report the GPU support of this installation and the GPUs of this machine.

The plugin ``libfsdpc_cuda.so`` is at ``FSDPC_CUDA_PLUGIN``, next to the extension if fsdpc was
built with ``FSDPC_CUDA=1``, or in a ``fsdpc-cuda13`` package of the same version. ``import fsdpc``
does not open it; the first call here does. The plugin provides a device, its kernels and a
transport, which :func:`fsdpc.set_default_device` selects for this process.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdpc import _core
from fsdpc._version import __version__

_PACKAGE = "fsdpc_cuda13"
_PLUGIN = Path(
    os.environ.get("FSDPC_CUDA_PLUGIN") or Path(_core.__file__).with_name("libfsdpc_cuda.so")
)


def plugin_path() -> Path:
    """Return the plugin's path, whether it exists or not.

    Returns
    -------
    Path
        The path in ``FSDPC_CUDA_PLUGIN``, otherwise next to the extension, otherwise in the
        installed package ``fsdpc-cuda13``.

    Raises
    ------
    RuntimeError
        That package and fsdpc have different versions; the message names both.
    """
    if os.environ.get("FSDPC_CUDA_PLUGIN") or _PLUGIN.exists():
        return _PLUGIN
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return _PLUGIN
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        there = version(_PACKAGE)
    except PackageNotFoundError:
        there = "of no known version"
    if there != __version__:
        raise RuntimeError(
            f"fsdpc-cuda13 is {there} and fsdpc is {__version__}: install the fsdpc-cuda13 of "
            f"version {__version__}, or uninstall it"
        )
    return Path(spec.origin).with_name(_PLUGIN.name)


@cache
def _found() -> dict[str, Any]:
    """Return the plugin's description of itself, or the reason that there is no plugin."""
    try:
        path = plugin_path()
    except RuntimeError as error:
        return {"description": f"does not load: {error}", "devices": 0}
    if not path.exists():
        note = path.with_suffix(".txt")
        reason = "the build left no reason"
        if note.exists():
            reason = note.read_text(encoding="utf-8").strip()
        return {"description": f"not built: {reason}", "devices": 0}
    try:
        return _core.plugin_config(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        return {"description": f"does not load: {error}", "devices": 0}


def device_count() -> int:
    """Return the number of GPUs this process can see; if it is 0, :func:`describe` explains why.

    Returns
    -------
    int
        The plugin's count, subject to ``CUDA_VISIBLE_DEVICES``.

    Notes
    -----
    The first call starts NVIDIA's driver if it is installed. Ranks forked afterwards cannot use it,
    so :func:`fsdpc.launch` refuses to fork them.
    """
    return _found()["devices"]


def describe() -> str:
    """Return one line about the plugin's build and the GPUs it found, or why there is no GPU.

    Returns
    -------
    str
        For example ``CUDA 13.0, driver for 13.0, 1 GPU(s), products by cuBLASLt 13.1.0, for
        attention by cuDNN 9.28.1``, or ``not built: install again ...``.

    Notes
    -----
    Starts the driver, like :func:`device_count`.
    """
    return _found()["description"]


def describe_nccl() -> str:
    """Return one line about the NCCL library that was found, or why none was found.

    Returns
    -------
    str
        For example ``NCCL 2.28.9 at /usr/lib/libnccl.so.2``, or ``none: no NCCL: ...``.

    Notes
    -----
    Opens the library, which needs no GPU. It is the copy that the process already uses (torch's),
    otherwise ``FSDPC_NCCL_LIB``, otherwise the one in pip's ``nvidia-nccl-cu13`` or the system's.
    A second copy is never opened. Ranks communicate over NCCL if each has its own GPU.
    """
    try:
        path = plugin_path()
        if not path.exists():
            return "none: there is no plugin to open it"
        return _core.plugin_library(str(path), os.environ.get("FSDPC_NCCL_LIB") or None)
    except (OSError, RuntimeError, ValueError) as error:
        return f"none: {error}"


def _driver_runs() -> bool:
    """Return whether the plugin has already started the GPU driver in this process."""
    return _found.cache_info().currsize > 0 and device_count() > 0
