"""``ShardedGradScaler``, under the module name from which FSDP1's scripts import it.

``torch.amp.GradScaler`` itself works on sharded gradients: infinities on one rank count on every
rank.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdpc.torch import _device


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with FSDP1's signature.

    Parameters
    ----------
    device : str, optional
        The units' device by default.
    init_scale : float, default 65536
    backoff_factor : float, default 0.5
    growth_factor : float, default 2
    growth_interval : int, default 2000
    enabled : bool, default True
    process_group : optional
        Ignored: the ranks that share the gradients agree.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            device or _device.home().type,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
