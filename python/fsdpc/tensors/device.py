"""The device that this process computes on."""

from __future__ import annotations

from fsdpc import _core
from fsdpc.tensors import cuda

DEVICES = ("cpu", "cuda")


def set_default_device(device: str) -> None:
    """Choose the device for all tensors of this process, before creating the first one.

    Parameters
    ----------
    device : {"cpu", "cuda"}
        ``"cuda"`` is the GPU of this process's LOCAL_RANK in ``CUDA_VISIBLE_DEVICES``, or the first
        GPU if that variable is not set. The default is ``"cpu"``.

    Raises
    ------
    ValueError
        The device name is unknown.
    RuntimeError
        There is no GPU (the message explains why), or tensors already exist on another device.

    Notes
    -----
    NumPy arrays are copied to the device. ``numpy()``, ``item()`` and printing wait for earlier
    computations and copy back. DLPack shares memory with other libraries on the same GPU, in
    stream order. Checkpoints are staged in host memory.

    Choosing the current device again has no effect.

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
    """Raise ValueError if the device name is unknown."""
    if device not in DEVICES:
        raise ValueError(
            f"device must be 'cpu' or 'cuda', got {device!r}: CUDA_VISIBLE_DEVICES says which GPU "
            "is the first"
        )


def get_default_device() -> str:
    """Return the device that holds this process's tensors.

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
