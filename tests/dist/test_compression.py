"""Compression: of gathers, one rank's values on any number of ranks and hosts; of reductions, the
values of the definition, alike on all replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, _core, nn
from fsdpc.distributed import pretend

FORMS = ("bf16", "fp16", "int8", "fp8", "int4")
NARROW = {"bf16": fsdpc.bfloat16, "fp16": fsdpc.float16}


def rounded(w: np.ndarray, form: str, dtype: str = "float32") -> np.ndarray:
    """What a matrix's rows are sent as, by the definition: encoded and decoded as a whole."""
    t = fsdpc.tensor(w).to(getattr(fsdpc, dtype)).to(fsdpc.float32)
    if form in NARROW:
        t = t.to(NARROW[form]).to(fsdpc.float32) if dtype == "float32" else t
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
    with fsdpc.summon_full_params(model):  # and write them back
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            np.testing.assert_array_equal(p.detach().numpy(), fsdpc.full_tensor(q).numpy())
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


# ---- reductions ----

ROWS = 17  # of 66, on each of four ranks


def sent(sums: np.ndarray, form: str) -> np.ndarray:
    """What a host's sums for one rank become on their way."""
    t = fsdpc.tensor(sums.reshape(1, -1))
    if form in NARROW:
        return t.to(NARROW[form]).to(fsdpc.float32).numpy().reshape(sums.shape)
    codes, scales = _core.encode_blocks(form, t, sums.size)
    return _core.decode_blocks(form, codes, scales, sums.size).numpy().reshape(sums.shape)


def gradient(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """An input and a gradient of the output, whose outer product is the weight's gradient."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal((1, 320)).astype(np.float32),
            rng.standard_normal((1, 66)).astype(np.float32))  # fmt: skip


def reduced(strategy: str, form: str | None, spoil: float | None = None) -> Any:
    """A model after one backward."""
    fsdpc.manual_seed(0)
    hybrid = strategy == "HYBRID_SHARD"
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if hybrid else None
    model = fsdpc.fully_shard(
        nn.Linear(320, 66, bias=False), strategy=strategy, mesh=mesh,
        compression=fsdpc.Compression(reduce=form),
    )  # fmt: skip
    x, dy = gradient(fsdpc.rank())
    if spoil is not None and fsdpc.rank() == 3:
        x[0, 5] = spoil
    (model(fsdpc.tensor(x)) * fsdpc.tensor(dy)).sum().backward()
    return model


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_host_sends_its_exact_sums_once(hosts: int, form: str) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    pairs = [gradient(rank) for rank in range(4)]
    each = [np.pad(dy.T @ x, ((0, 2), (0, 0))) for x, dy in pairs]
    of_hosts = [sum(part) for part in np.array_split(np.array(each), hosts)]
    want = np.empty_like(each[0])
    for rank in range(4):
        own, rows = rank * hosts // 4, slice(rank * ROWS, (rank + 1) * ROWS)
        want[rows] = sum(
            part[rows] if host == own else sent(part[rows], form)
            for host, part in enumerate(of_hosts)
        )
    got = fsdpc.full_grad(reduced("FULL_SHARD", form).weight).numpy()
    np.testing.assert_allclose(got, want[:66] / 4, rtol=2e-6, atol=2e-6)
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_replicas_get_the_same_sums(hosts: int, strategy: str) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    exact = fsdpc.full_grad(reduced(strategy, None).weight).numpy()
    errors = {"bf16": 0.004, "fp16": 0.0005, "int8": 0.02, "fp8": 0.04, "int4": 0.2}
    for form, error in errors.items():
        got = fsdpc.full_grad(reduced(strategy, form).weight).numpy()
        ratio = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 0 < ratio < error, (form, ratio)
        of_ranks = fsdpc.all_gather(got.reshape(1, -1)).reshape(4, -1)
        assert (of_ranks == of_ranks[0]).all(), form
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_no_form_hides_what_is_not_finite(strategy: str) -> None:
    pretend.on_hosts(2)
    fsdpc.init()
    for form in FORMS:
        for spoil in (np.inf, -np.inf, np.nan):
            model = reduced(strategy, form, spoil)
            with pytest.raises(FloatingPointError, match="global gradient norm is"):
                fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
            found = fsdpc.full_grad(model.weight).numpy()
            assert not np.isfinite(found[:, 5]).any(), (form, spoil)
    fsdpc.shutdown()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_sums_in_transit_are_planned(hosts: int, strategy: str) -> None:
    pretend.on_hosts(hosts)
    fsdpc.init()
    for form in (None, *FORMS):
        fsdpc.reset_peak_memory_stats()
        before = fsdpc.memory_stats()["reduce_bytes"]
        model = reduced(strategy, form)
        peak = fsdpc.memory_stats()["reduce_peak_bytes"] - before
        assert peak == fsdpc.memory_plan(model, strategy=strategy).reduce, form
        if hosts == 4 and strategy == "FULL_SHARD" and form is None:  # sent from the buffer
            whole, theirs = 4 * ROWS * 320 * 4, 3 * ROWS * 320 * 4
            assert whole + theirs <= peak < 1.1 * (whole + theirs)
        del model
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_ranks_must_agree() -> None:
    form = FORMS[fsdpc.rank()]
    with pytest.raises(MismatchError, match="gather=bf16.*gather=fp16"):
        fsdpc.fully_shard(nn.Linear(64, 4), compression=fsdpc.Compression(gather=form))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="gather='int7': choose from bf16, fp16, int8, fp8, int4"):
        fsdpc.Compression(gather="int7")
    with pytest.raises(TypeError, match="compression must be a Compression, got 'int8'"):
        fsdpc.fully_shard(nn.Linear(4, 4), compression="int8")
    for form in (None, *FORMS):
        compression = fsdpc.Compression(gather=form)
        assert fsdpc.Compression.parse(str(compression)) == compression
    both = fsdpc.Compression(gather="bf16", reduce="int8")
    assert fsdpc.Compression.parse("reduce=int8,gather=bf16") == both
    with pytest.raises(ValueError, match="'send=int8': say gather=FORM, reduce=FORM or both"):
        fsdpc.Compression.parse("send=int8")
