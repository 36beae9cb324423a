"""Exclude functions of a sharded model from ``torch.compile``.

The compiler examines every Python frame that runs. In the frames around a unit's forward, it would
warn about every call into the extension and compile fragments that save no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame


def leave_out(*functions: Callable[..., Any], inside: bool = False) -> None:
    """Make the compiler skip these functions and, if ``inside``, the functions they call."""
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        code = function.__code__  # type: ignore[attr-defined]
        if not hasattr(eval_frame, "set_code_exec_strategy"):  # torch 2.6 and older
            eval_frame.skip_code(code)
            continue
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if inside else default)
        eval_frame.set_code_exec_strategy(code, strategy)
