"""Gradients that are NaN or infinite on the GPU: skipped with a loss scaler, told without."""

from __future__ import annotations

import json
from typing import Any

from processes import printed

PROGRAM = """
import json, sys
import numpy as np, fsdpc
from fsdpc.sharding.amp import LossScaler
from training import Weighted

fsdpc.set_default_device(sys.argv[1])
dtype = getattr(fsdpc, sys.argv[2])
model = Weighted()
fsdpc.fully_shard(model, mp_policy=fsdpc.MixedPrecisionPolicy(param_dtype=dtype))
optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
scaler = LossScaler(initial_scale_power=10, hysteresis=1) if dtype is fsdpc.float16 else None
rng, steps = np.random.default_rng(0), []
for bad in (0, np.inf, np.nan, 0):
    x = rng.standard_normal(1000, dtype=np.float32)
    x[7] += bad
    loss = model(x, None)
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    try:
        norm = float(fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=not scaler))
    except (RuntimeError, FloatingPointError) as error:
        norm = f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
    taken = isinstance(norm, float)
    if scaler:
        taken = scaler.step(optimizer)
        scaler.update()
    elif taken:
        optimizer.step()
    optimizer.zero_grad()
    weights = fsdpc.full_tensor(model.w).numpy()
    steps.append([norm, taken, scaler and scaler.get_scale(), weights.tobytes().hex()])
print(json.dumps(steps))
"""


def steps(environment: dict[str, str], device: str, dtype: str) -> list[list[Any]]:
    """Return norm, whether it was taken, scale and weights of each step."""
    return json.loads(printed(environment, "-c", PROGRAM, device, dtype))


def test_the_scaler_skips_them(environment: dict[str, str]) -> None:
    run = steps(environment, "cuda", "float16")
    assert [taken for _, taken, *_ in run] == [True, False, False, True]
    assert [scale for *_, scale, _ in run] == [1024, 512, 256, 256]
    assert run[0][3] == run[1][3] == run[2][3] != run[3][3]
    assert repr(run) == repr(steps(environment, "cpu", "float16"))


def test_without_it_they_are_told(environment: dict[str, str]) -> None:
    run = steps(environment, "cuda", "float32")
    assert [taken for _, taken, *_ in run] == [True, False, False, True]
    for norm, word in ((run[1][0], "inf"), (run[2][0], "nan")):
        assert "norm" in norm and word in norm, norm
    assert run[0][3] == run[1][3] == run[2][3] != run[3][3]
    assert run == steps(environment, "cpu", "float32")
