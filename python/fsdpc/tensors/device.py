"""Which device this process computes on."""

from __future__ import annotations

from fsdpc import _core
from fsdpc.tensors import cuda

DEVICES = ("cpu", "cuda")


def set_default_device(device: str) -> None:
    """Choose the device on which all tensors of this process live, before the first one is made.

    Parameters
    ----------
    device : {"cpu", "cuda"}
        ``"cuda"`` is the GPU of this process's LOCAL_RANK among ``CUDA_VISIBLE_DEVICES``, the first
        where that says nothing. Without a call it is ``"cpu"``.

    Raises
    ------
    ValueError
        There is no device of that name.
    RuntimeError
        There is no GPU here (the message says why), or tensors live on another device already.

    Notes
    -----
    NumPy arrays are copied to it, and ``numpy()``, ``item()`` and
    printing copy back and wait for what was computed until then. DLPack shares memory with other
    libraries on that GPU, in the order of their streams. Checkpoints pass through host memory.

    A call for the device that was chosen already does nothing.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.set_default_device("cpu")  # or "cuda", before the first tensor
    """
    check_device(device)
    if device == "cuda" and cuda.device_count() == 0:
        raise RuntimeError(f"no device 'cuda': {cuda.describe()}")
    _core.set_device(str(cuda.plugin_path()) if device == "cuda" else None)


def check_device(device: str) -> None:
    """Raise ValueError unless there are devices of that name."""
    if device not in DEVICES:
        raise ValueError(
            f"device must be 'cpu' or 'cuda', got {device!r}: CUDA_VISIBLE_DEVICES says which GPU "
            "is the first"
        )


def get_default_device() -> str:
    """Return the device on which tensors of this process live.

    Returns
    -------
    str
        ``"cpu"`` or ``"cuda"``.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.get_default_device()
    'cpu'
    """
    return _core.device_name()
