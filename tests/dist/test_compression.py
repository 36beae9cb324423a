"""Compressed gathers: one rank's values on any number of ranks and hosts, exact masters, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, _core, nn
from fsdpc.distributed import pretend

FORMS = ("bf16", "int8", "fp8", "int4")
BLOCK = {"int8": 256, "fp8": 256, "int4": 64}


def rounded(w: np.ndarray, form: str, dtype: str = "float32") -> np.ndarray:
    """What a matrix's rows are sent as, by the definition: encoded and decoded as a whole."""
    t = fsdpc.tensor(w).to(getattr(fsdpc, dtype)).to(fsdpc.float32)
    if form == "bf16":
        t = t.to(fsdpc.bfloat16).to(fsdpc.float32) if dtype == "float32" else t
    elif w.ndim > 1 and w.shape[1] >= 64:
        codes, scales = _core.encode_blocks(form, t, w.shape[1])
        t = _core.decode_blocks(form, codes, scales, w.shape[1])
    return t.to(getattr(fsdpc, dtype)).to(fsdpc.float32).numpy()


def build(form: str | None, dtype: str = "float32", **options: Any) -> Any:
    fsdpc.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 66), nn.Linear(66, 96), nn.Linear(96, 5))
    options["mp_policy"] = fsdpc.MixedPrecisionPolicy(param_dtype=getattr(fsdpc, dtype))
    options["compression"] = fsdpc.Compression(gather=form)
    for layer in list(model)[:2]:
        fsdpc.fully_shard(layer, **options)
    return fsdpc.fully_shard(model, **options)


def weight_in_use(layer: Any) -> np.ndarray:
    """A layer's weight as its module multiplies with it."""
    zeros = fsdpc.tensor(np.zeros((1, layer.weight.shape[1]), np.float32))
    eye = fsdpc.tensor(np.eye(layer.weight.shape[1], dtype=np.float32))
    with fsdpc.no_grad():
        return (layer(eye) - layer(zeros)).to(fsdpc.float32).numpy().T


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_rank_computes_with_the_rounded_masters(form: str, dtype: str) -> None:
    fsdpc.manual_seed(1)
    model = nn.Linear(320, 66, bias=False)
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=getattr(fsdpc, dtype))
    fsdpc.fully_shard(model, mp_policy=policy, compression=fsdpc.Compression(gather=form))
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        master = fsdpc.full_tensor(model.weight).numpy()
        np.testing.assert_array_equal(weight_in_use(model), rounded(master, form, dtype))
        x = np.random.default_rng(step).standard_normal((4, 320)).astype(np.float32)
        (model(fsdpc.tensor(x)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (rounded(master, form) != master).any()


def trained(form: str | None, dtype: str, strategy: str, mesh: Any = None) -> list[np.ndarray]:
    """Losses, then all masters, after steps of two micro-steps."""
    model = build(form, dtype, strategy=strategy, mesh=mesh)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(fsdpc.rank())
    losses = []
    for _ in range(3):
        for _ in range(2):
            x = fsdpc.tensor(rng.standard_normal((8, 320)).astype(np.float32))
            loss = (model(x) ** 2).mean()
            loss.backward()
            losses.append(loss.detach().to(fsdpc.float32).numpy())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(fsdpc.full_tensor(p).numpy() for p in model.parameters())]


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_one_host(dtype: str) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        for form in FORMS:
            found = []
            for hosts in (1, 2, 4):
                pretend.on_hosts(hosts)
                fsdpc.init()
                hybrid = strategy == "HYBRID_SHARD"
                mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if hybrid else None
                found.append(trained(form, dtype, strategy, mesh))
                fsdpc.shutdown()
            for hosts, values in zip((2, 4), found[1:], strict=True):
                for ours, theirs in zip(values, found[0], strict=True):
                    np.testing.assert_array_equal(ours, theirs, f"{form} {strategy} {hosts}")


@pytest.mark.ranks(2)
def test_only_the_parameters_in_use_are_rounded(tmp_path: Any) -> None:
    model, exact = build("int4"), build(None)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        np.testing.assert_array_equal(fsdpc.full_tensor(p).numpy(), fsdpc.full_tensor(q).numpy())
    fsdpc.checkpoint.save(tmp_path / "saved", {"model": model})
    fsdpc.checkpoint.load(tmp_path / "saved", {"model": exact})
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        np.testing.assert_array_equal(fsdpc.full_tensor(p).numpy(), fsdpc.full_tensor(q).numpy())


@pytest.mark.ranks(2)
def test_written_masters_are_seen_and_others_are_not_copied_again() -> None:
    """Each forward compares masters that users may write with what they were rounded to."""
    model = fsdpc.fully_shard(
        nn.Linear(64, 8, bias=False), compression=fsdpc.Compression(gather="int8")
    )
    local = model._fsdpc_unit.local(0)
    before = weight_in_use(model)
    _core.trace_reset()
    weight_in_use(model)
    assert not [kind for kind, *_ in _core.trace_events() if kind == "copy_in"]
    with fsdpc.no_grad():
        local.fill_(3.0)
    np.testing.assert_array_equal(weight_in_use(model), np.full((8, 64), 3.0, np.float32))
    assert (before != 3).all()


@pytest.mark.ranks(2)
def test_ranks_must_agree() -> None:
    form = FORMS[fsdpc.rank()]
    with pytest.raises(MismatchError, match="gather=bf16.*gather=int8"):
        fsdpc.fully_shard(nn.Linear(64, 4), compression=fsdpc.Compression(gather=form))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="gather='int7': choose from bf16, int8, fp8, int4"):
        fsdpc.Compression(gather="int7")
    with pytest.raises(TypeError, match="compression must be a Compression, got 'int8'"):
        fsdpc.fully_shard(nn.Linear(4, 4), compression="int8")
    for form in (None, *FORMS):
        compression = fsdpc.Compression(gather=form)
        assert fsdpc.Compression.parse(str(compression)) == compression
    with pytest.raises(ValueError, match="'reduce=int8': say gather=FORM"):
        fsdpc.Compression.parse("reduce=int8")
