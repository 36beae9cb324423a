"""Attention on one GPU: our kernels, cuDNN's through the plugin, and torch's, in one run.

    python benchmarks/bench_gpu_attention.py [--tokens 8192] [--heads 16] [--dims 128 64]

bf16, causal, one sequence. Every way runs in a process of its own, as $FSDPC_CUDNN is read when it
starts: 0 is our kernels, 1 cuDNN with a backward that adds up in a fixed order, 2 cuDNN with the
backward that is fast. A row is the median of stretches, each with one wait at its end; FLOPs are
4 T^2 H D / 2 forward and 2.5 times as many backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

WAYS = {"ours": "0", "cudnn": "1", "cudnn any order": "2", "torch": "0"}  # $FSDPC_CUDNN of each
CALLS, STRETCHES = 10, 5
LIMIT_S = 120


def ours(tokens: int, heads: int, dim: int, device: str) -> tuple[Callable[..., Any], ...]:
    """A forward, a forward with its backward, and a wait."""
    import fsdpc
    import fsdpc.functional as F

    fsdpc.set_default_device(device)
    q, k, v = (fsdpc.randn(1, tokens, heads, dim).to(fsdpc.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    dout = fsdpc.randn(1, tokens, heads, dim).to(fsdpc.bfloat16)
    last: list[Any] = [None]

    def forward() -> Any:
        last[0] = F.scaled_dot_product_attention(q, k, v, causal=True, layout="bthd")
        return last[0]

    def both() -> None:
        forward().backward(dout)
        q.grad = k.grad = v.grad = None

    return forward, both, lambda: last[0][0, 0, 0, 0].item()


def torchs(tokens: int, heads: int, dim: int, device: str) -> tuple[Callable[..., Any], ...]:
    """The same of torch's own choice."""
    import torch
    import torch.nn.functional as F

    q, k, v = (torch.randn(1, heads, tokens, dim, device=device, dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))  # fmt: skip
    dout = torch.randn_like(q)

    def forward() -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().backward(dout)
        q.grad = k.grad = v.grad = None

    return forward, both, torch.cuda.synchronize if device == "cuda" else lambda: None


def milliseconds(call: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Of one call, in the median stretch; the first warms up."""
    found = common.stretches(call, wait, CALLS, STRETCHES + 1)
    return statistics.median(found[1:]) * 1e3


def main() -> None:
    """Measure, each way in a process of its own."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.way:
        make = torchs if o.way == "torch" else ours
        forward, both, wait = make(o.tokens, o.heads, o.dims[0], o.device)
        once = milliseconds(forward, wait)
        print(once, milliseconds(both, wait) - once)
        return
    common.header()
    common.table(["head", "attention", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"], [])
    failed = 0
    for dim in o.dims:
        flops = 2.0 * o.tokens**2 * o.heads * dim
        for way, cudnn in WAYS.items():
            done = subprocess.run(
                [sys.executable, __file__, "--way", way, "--tokens", str(o.tokens), "--heads",
                 str(o.heads), "--dims", str(dim), "--device", o.device],
                env={**os.environ, "FSDPC_CUDNN": cudnn}, capture_output=True, text=True,
                timeout=LIMIT_S)  # fmt: skip
            if done.returncode != 0:
                failed += 1
                error = (done.stderr.splitlines() or ["?"])[-1][:200]
                common.row([dim, way, error.replace("|", "/"), "", "", ""])
                continue
            forward_ms, backward_ms = map(float, done.stdout.split())
            common.row([dim, way, f"{forward_ms:.3f}", f"{flops / forward_ms / 1e9:.0f}",
                        f"{backward_ms:.3f}", f"{2.5 * flops / backward_ms / 1e9:.0f}"])
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
