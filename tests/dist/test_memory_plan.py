"""memory_plan against the engine's own peaks; estimate against published figures."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn, wrap
from fsdpc.distributed import pretend
from fsdpc.models import GPT2, Llama
from fsdpc.nn.module import Module

from .common import CONFIG, batch, build
from .test_strategies import PRECISIONS, variants

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

CATEGORIES = ("unsharded", "master", "grad", "state", "reduce")


def run(options: dict[str, Any], param: Any, reduce: Any) -> tuple[dict[str, int], Module]:
    """Peaks of the engine's memory over three steps, beyond what was held before."""
    before = fsdpc.memory_stats()
    fsdpc.reset_peak_memory_stats()
    model = build(True, param, reduce, **options)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for step in range(3):
        model(*batch(step, fsdpc.rank())).backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = fsdpc.memory_stats()
    peaks = {c: after[f"{c}_peak_bytes"] - before[f"{c}_bytes"] for c in CATEGORIES}
    return peaks, model


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["f32", "bf16-f32"])
def test_plan_is_the_peak(precision: str) -> None:
    param, reduce = PRECISIONS[precision]
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    for name, options in variants().items():
        peaks, model = run(options, param, reduce)
        mesh, strategy = options.get("mesh"), options.get("strategy")
        plan = fsdpc.memory_plan(model, mesh, strategy=strategy)
        if strategy is None:  # then the model's own mesh says all
            assert plan == fsdpc.memory_plan(model)
        with fsdpc.deferred_init():
            built = Llama(CONFIG)
        blocks = wrap.by_class(type(built.blocks()[0]))
        assert plan == fsdpc.memory_plan(
            built, mesh, strategy=strategy, plan=blocks, mp_policy=policy
        )
        columns = mesh.get_local_rank(1) if mesh is not None else fsdpc.rank()
        counts_unsharded = columns == 0 or strategy == "NO_SHARD"
        for category in CATEGORIES:
            wanted = getattr(plan, category)
            if category == "unsharded" and not counts_unsharded:
                wanted = 0
            assert peaks[category] == wanted, (name, category)
        # A rank that is alone writes fp32 gradients where they stay.
        assert (plan.reduce == 0) == (fsdpc.world_size() == 1)
        del model


@pytest.mark.ranks([1, 2, 3])
def test_plan_of_muon() -> None:
    """One state for matrices in blocks, two for the others, and work on the largest matrix."""
    before = fsdpc.memory_stats()
    model = build(True, None, None)
    plan = fsdpc.memory_plan(model, optimizer="muon")
    optimizer = fsdpc.optim.Muon(fsdpc.optim.muon_groups(model))
    allocs = []
    for step in range(4):
        model(*batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        allocs.append(fsdpc.memory_stats()["system_allocs"])
    after = fsdpc.memory_stats()
    for category in ("state", "staging"):
        assert after[f"{category}_bytes"] - before[f"{category}_bytes"] == getattr(plan, category)
    side, length = CONFIG.dim, CONFIG.inner
    assert plan.staging == 4 * (2 * side * length + 2 * side**2)
    assert plan.state < 0.75 * fsdpc.memory_plan(model).state
    assert allocs[-1] == allocs[-2]
    with fsdpc.deferred_init():
        built = Llama(CONFIG)
    blocks = wrap.by_class(type(built.blocks()[0]))
    assert plan == fsdpc.memory_plan(built, plan=blocks, optimizer="muon")


@pytest.mark.ranks([1, 2, 3])
def test_plan_of_adafactor() -> None:
    """Means of rows and columns instead of states as large as the parameters, and work on them."""
    before = fsdpc.memory_stats()
    model = build(True, None, None)
    plan = fsdpc.memory_plan(model, optimizer="adafactor")
    optimizer = fsdpc.optim.Adafactor(model.parameters())
    for step in range(2):
        model(*batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = fsdpc.memory_stats()
    for category in ("state", "staging"):
        assert after[f"{category}_bytes"] - before[f"{category}_bytes"] == getattr(plan, category)
    assert plan.state < 0.1 * fsdpc.memory_plan(model).state
    with fsdpc.deferred_init():
        built = Llama(CONFIG)
    blocks = wrap.by_class(type(built.blocks()[0]))
    assert plan == fsdpc.memory_plan(built, plan=blocks, optimizer="adafactor")


@pytest.mark.ranks([1, 2])
def test_plan_of_states_in_bf16() -> None:
    before = fsdpc.memory_stats()["state_bytes"]
    model = build(True, None, None)
    optimizer = fsdpc.optim.AdamW(model.parameters(), state_dtype="bfloat16")
    model(*batch(0, fsdpc.rank())).backward()
    optimizer.step()
    plan = fsdpc.memory_plan(model, state_dtype="bfloat16")
    assert fsdpc.memory_stats()["state_bytes"] - before == plan.state
    assert plan.state < 0.6 * fsdpc.memory_plan(model).state
    assert plan.grad == fsdpc.memory_plan(model).grad


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("precision", ["f32", "bf16-bf16"])
def test_plan_is_the_peak_on_hosts(precision: str, hosts: int) -> None:
    """Rank by rank; on each host one copy of the unsharded parameters per shard group."""
    pretend.on_hosts(hosts)
    fsdpc.init()
    local_size = fsdpc.world_size() // hosts
    for name, options in variants().items():
        peaks, model = run(options, *PRECISIONS[precision])
        plan = fsdpc.memory_plan(model, options.get("mesh"), strategy=options.get("strategy"))
        assert plan.hosts == hosts
        for category in ("master", "grad", "state", "reduce"):
            assert peaks[category] == getattr(plan, category), (name, category)
        shards = model._fsdpc_unit.mesh_shape[1]
        unsharded = fsdpc.all_gather(peaks["unsharded"])
        for first in range(0, fsdpc.world_size(), local_size):
            copies = local_size // min(shards, local_size)
            assert sum(unsharded[first : first + local_size]) == copies * plan.unsharded, name
        del model
    fsdpc.shutdown()


@pytest.mark.ranks(4, hosts=2)
def test_plan_of_uneven_units_on_hosts() -> None:
    """Whichever of them takes which of the pooled buffers."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 640))
            self.small = nn.Linear(64, 8)

        def forward(self, x: Any, uses: int) -> Any:
            for layer in self.inner[:uses]:
                x = layer(x)
            return self.small(x).sum()

    before = fsdpc.memory_stats()["reduce_bytes"]
    model = Uneven()
    for layer in [*model.inner, model.small]:
        fsdpc.fully_shard(layer)
    fsdpc.fully_shard(model)
    plan = fsdpc.memory_plan(model)
    x = np.ones((2, 64), np.float32)
    for uses in (1, 3, 2):
        model(fsdpc.tensor(x), uses).backward()
    assert fsdpc.memory_stats()["reduce_peak_bytes"] - before == plan.reduce


@pytest.mark.ranks(2)
def test_plan_of_units_that_run_on_some_ranks() -> None:
    """Each has a buffer of its own."""
    before = fsdpc.memory_stats()["reduce_bytes"]
    model = nn.Sequential(*(fsdpc.fully_shard(nn.Linear(64, 64)) for _ in range(4)))
    for layer in model[1:]:
        layer._fsdpc_unit.rank_dependent = True
    fsdpc.fully_shard(model)(fsdpc.tensor(np.ones((2, 64), np.float32))).sum().backward()
    peak = fsdpc.memory_stats()["reduce_peak_bytes"]
    assert peak - before == fsdpc.memory_plan(model).reduce


def test_hosts_cost_what_the_docs_say() -> None:
    """docs/hosts.md, What does it cost in memory?"""
    layer = nn.Linear(1024, 1024, bias=False)
    half = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)
    r = 4 * 1024 * 1024
    for h, local_size in ((2, 1), (2, 4), (8, 4)):
        ranks = h * local_size

        def beside(mesh: Any, policy: Any = None, h: int = h) -> int:
            plan = fsdpc.memory_plan(layer, mesh, mp_policy=policy)
            assert plan.for_hosts(h).for_device("cuda") == plan.for_device("cuda").for_hosts(h)
            return plan.for_hosts(h).reduce - plan.reduce

        copy = r if local_size == 1 else 0  # float32 sums of one rank are sent from its buffer
        of_shards = r // local_size * (2 * h - 1) // h
        assert beside((1, ranks)) + copy == beside((1, ranks), half) == of_shards
        there = r // local_size * 2 - (r // local_size // h if h > 2 else 0)
        of_replicas = there + (r if local_size == 1 else 2 * r)
        assert beside((ranks, 1)) + copy == beside((ranks, 1), half) == of_replicas
        if local_size > 1:  # shards inside a host: partials alone cross
            assert beside((h, local_size)) == there
    with fsdpc.deferred_init():
        model = Llama(fsdpc.models.preset("7B"))
    for strategy, gibs in (("FULL_SHARD", ("1.24", "2.17")), ("NO_SHARD", ("1.24", "7.45"))):
        plan = fsdpc.memory_plan(model, 8, strategy=strategy, mp_policy=half)
        assert tuple(f"{plan.for_hosts(n).reduce / 2**30:.2f}" for n in (1, 2)) == gibs
    plan = fsdpc.memory_plan(layer, 8)
    assert str(plan.for_hosts(4)).endswith("on cpu, 4 hosts")
    with pytest.raises(ValueError, match="8 ranks on 3 hosts"):
        plan.for_hosts(3)
    with pytest.raises(ValueError, match="inside a host, or be whole hosts"):
        fsdpc.memory_plan(layer, (4, 3)).for_hosts(3)


def test_plan_of_another_world() -> None:
    """Seven billion parameters over 64 ranks, on this one: nothing is built."""
    with fsdpc.deferred_init():
        model = Llama(fsdpc.models.preset("7B"))
    blocks = wrap.by_class(type(model.blocks()[0]))
    one = fsdpc.memory_plan(model, 1, plan=blocks)
    many = fsdpc.memory_plan(model, 64, plan=blocks)
    hybrid = fsdpc.memory_plan(model, (8, 8), plan=blocks)
    n = model.num_parameters()
    assert one.master == 4 * n
    assert 4 * n / 64 <= many.master < 1.02 * 4 * n / 64
    assert 4 * n / 8 <= hybrid.master < 1.02 * 4 * n / 8
    assert hybrid.reduce > many.reduce  # partials
    narrow = fsdpc.MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
    assert one.reduce == 0 < fsdpc.memory_plan(model, 1, plan=blocks, mp_policy=narrow).reduce
    assert "total" in str(many)
    with pytest.raises(ValueError, match="a mesh is"):
        fsdpc.memory_plan(model, (0, 8))


def _received() -> int:
    fsdpc.init(deterministic=True)
    plan = fsdpc.memory_plan(fsdpc.nn.Linear(64, 64, bias=False), 4)
    return plan.for_device("cuda").reduce - plan.reduce


def test_plan_for_gpus() -> None:
    """70 billion parameters in bf16 over 2,048 GPUs; no GPU is here, and nothing is built."""
    with fsdpc.deferred_init():
        model = Llama(fsdpc.models.preset("70B"))
    half = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)
    here = fsdpc.memory_plan(model, 2048, mp_policy=half)
    there = here.for_device("cuda")
    assert here.device == "cpu" and here.for_device("cpu") == here != there
    n, granule = model.num_parameters(), 2**21
    block = 2 * sum(prod(p.shape) for p in model.blocks()[0].parameters())
    rest = 2 * n - block * len(model.blocks())  # embedding and head, which stay whole
    slots = 2 * -(-block // granule) * granule  # the block in use and the one gathered ahead
    assert there.unsharded == pytest.approx(2 * n / 2048 + rest + slots, rel=0.01)
    assert here.unsharded == pytest.approx(2 * n, rel=0.01)
    assert (there.master, there.state, there.reduce) == (here.master, here.state, here.reduce)
    assert there.total < 0.1 * here.total
    assert str(there).endswith("as no plan was given, on cuda")
    # Each of three peers sends the rows of this rank's slice: 64 / 4 of 64 elements in fp32.
    assert fsdpc.launch(_received, 1) == [3 * 16 * 64 * 4]
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'gpu'"):
        here.for_device("gpu")


def test_blocks_are_the_default_plan() -> None:
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    one = fsdpc.memory_plan(model, 64)
    assert one == fsdpc.memory_plan(model, 64, plan=wrap.by_class(type(model.blocks()[0])))
    assert "of 3 blocks and the rest, as no plan was given" in str(one)
    assert "one unit" in str(fsdpc.memory_plan(fsdpc.nn.Linear(4, 4), 64))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", [Llama, GPT2])
def test_head_and_embedding_as_units(kind: Any) -> None:
    """Whatever a policy by size selects, the head's weight is read inside of its own unit."""
    fsdpc.manual_seed(7)
    plain = kind(CONFIG)
    fsdpc.manual_seed(7)
    model = fsdpc.fully_shard(kind(CONFIG), plan=wrap.by_size(2900))
    own = {type(m).__name__ for m in model.modules()}
    assert own & {"FSDPHead", "FSDPTiedEmbedding"}
    x, y = batch(0, 0)
    loss, expected = model(x, y), plain(x, y)
    assert float(loss) == float(expected)
    loss.backward()
    expected.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(fsdpc.full_grad(p).numpy(), q.grad.numpy(), rtol=1e-5, atol=1e-7)
    with fsdpc.no_grad():
        np.testing.assert_array_equal(model(x).numpy(), plain(x).numpy())


def test_estimate_has_the_published_figures() -> None:
    def gigabytes(strategy: str, **options: Any) -> float:
        return fsdpc.estimate(params=7e9, world=8, strategy=strategy, **options).published / 1e9

    assert gigabytes("NO_SHARD") == pytest.approx(112)
    assert gigabytes("SHARD_OPTIM") == pytest.approx(63)
    assert gigabytes("SHARD_GRAD_OP") == pytest.approx(38.5)
    assert gigabytes("FULL_SHARD") == pytest.approx(14)
    assert gigabytes("NO_SHARD", dtype=fsdpc.bfloat16) == pytest.approx(84)
    assert gigabytes("FULL_SHARD", dtype=fsdpc.bfloat16) == pytest.approx(10.5)
    full = fsdpc.estimate(params=7e9, world=8)
    assert full.sent == pytest.approx(3 * 28e9 * 7 / 8)
    for strategy in ("NO_SHARD", "SHARD_GRAD_OP"):
        sent = fsdpc.estimate(params=7e9, world=8, strategy=strategy).sent
        assert sent == pytest.approx(2 * 28e9 * 7 / 8), strategy
    assert full.held_total > full.published
    assert "held" in str(full) and "published 14 GB" in str(full)


def test_estimate_of_gpus() -> None:
    def unsharded(strategy: str, device: str) -> float:
        return fsdpc.estimate(
            params=64e9,
            world=1000,
            dtype=fsdpc.bfloat16,
            strategy=strategy,
            units=64,
            device=device,
        ).held["unsharded"]

    unit = 2e9  # of 64
    assert {unsharded(name, "cpu") for name in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")} == {
        64 * unit
    }
    assert unsharded("NO_SHARD", "cuda") == 64 * unit
    # The own slices of all, and what is whole: all, or the root and two that take turns.
    kept = 64 * unit / 1000 + 64 * unit
    assert unsharded("SHARD_GRAD_OP", "cuda") == pytest.approx(kept, rel=1e-3)
    assert unsharded("FULL_SHARD", "cuda") == pytest.approx(64 * unit / 1000 + 3 * unit, rel=1e-3)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        unsharded("FULL_SHARD", "tpu")


def _peak_of_micro_steps(n: int) -> tuple[int, int, int]:
    fsdpc.init(deterministic=True)
    model = build(True)
    fsdpc.reset_peak_memory_stats()
    for micro in range(n):
        model(*batch(0, fsdpc.rank(), micro)).backward()
    plan = fsdpc.memory_plan(model)
    fsdpc.shutdown()
    return plan.for_micro_steps(n).grad, plan.grad, fsdpc.memory_stats()["grad_peak_bytes"]


@pytest.mark.parametrize(
    ("ranks", "n"),
    [*((2, n) for n in (1, 2, 3, 5, 7, 8)), *((3, n) for n in (1, 4, 5)), (5, 2), (6, 2)],
)
def test_plan_of_micro_steps(ranks: int, n: int) -> None:
    for planned, plain, peak in fsdpc.launch(_peak_of_micro_steps, ranks, n):
        assert planned == peak
        assert plain == peak or n > 1


@pytest.mark.ranks(2)
def test_schedule_is_data() -> None:
    model = build(sharded=True)
    with pytest.raises(ValueError, match="is not sharded"):
        fsdpc.schedule(fsdpc.nn.Linear(2, 2))
    assert fsdpc.schedule(model) is None
    model(*batch(0, fsdpc.rank())).backward()
    first = fsdpc.schedule(model)
    assert first is not None
    names = [""] + [f"model.layers.{i}" for i in range(CONFIG.layers)]
    forward = [u.unit for u in first.uses if u.phase == "forward"]
    backward = [u.unit for u in first.uses if u.phase == "backward"]
    assert forward[1:] == names[1:]
    assert backward[1:] == names[:0:-1]
    assert first.ahead(1) == (("model.layers.1", "forward"),)
    assert "gathers model.layers.1 (forward)" in str(first)
    model(*batch(1, fsdpc.rank())).backward()
    assert fsdpc.schedule(model) == first
    model.set_prefetch_distance(2)
    second = fsdpc.schedule(model)
    assert second is not None and first.diff(second) == "prefetch 1 and 2"
    assert len(second.ahead(1)) == 2
    assert first.diff(first) == ""


#: What is done with a block, by strategy: in forward, and in backward.
ACTS = {
    "FULL_SHARD": (["gather", "forward", "reshard"], ["gather", "backward", "reduce", "reshard"]),
    "SHARD_GRAD_OP": (["gather", "forward"], ["backward", "reduce", "reshard"]),
    "NO_SHARD": (["forward"], ["backward", "all_reduce"]),
    "HYBRID_SHARD": (
        ["gather", "forward", "reshard"],
        ["gather", "backward", "reduce", "reshard", "all_reduce"],
    ),
}


def schedule_of(strategy: str) -> Any:
    """Of the second step, which follows what the first one recorded."""
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    model = build(sharded=True, strategy=strategy, **({"mesh": mesh} if mesh else {}))
    model(*batch(0, fsdpc.rank())).backward()
    recorded = fsdpc.schedule(model)
    loss = model(*batch(1, fsdpc.rank()))
    assert fsdpc.schedule(model) == recorded  # of the last whole step, while one is under way
    loss.backward()
    followed = fsdpc.schedule(model)
    assert recorded is not None and followed is not None
    assert followed == recorded, followed.diff(recorded)
    return followed


@pytest.mark.ranks([2, 4])
def test_schedule_shows_what_a_strategy_does() -> None:
    found = {}
    for name, (forward, backward) in ACTS.items():
        if name == "HYBRID_SHARD" and fsdpc.world_size() < 4:
            continue
        found[name] = schedule_of(name)
        block = "model.layers.0"
        assert list(found[name].of((block, "forward"))) == forward, name
        ended = list(found[name].of((block, "backward")))
        # A sum over replicas begins once the shard group's is there, before resharding or after.
        assert sorted(ended) == sorted(backward) and ended[:-2] == backward[:-2], name
    assert len({str(each) for each in found.values()}) == len(found)
    differs = found["FULL_SHARD"].diff(found["NO_SHARD"])
    assert "gather" in differs and found["FULL_SHARD"] != found["NO_SHARD"]
    acts = [(act.unit, act.what) for act in found["FULL_SHARD"].acts]
    second = acts.index(("model.layers.1", "gather"))
    assert second < acts.index(("model.layers.0", "forward")), "gathered one ahead"


@pytest.mark.ranks(2)
def test_schedule_of_a_micro_step_shows_no_reduction() -> None:
    model = build(sharded=True)
    with model.no_sync():
        model(*batch(0, fsdpc.rank())).backward()
        inside = fsdpc.schedule(model)
    model(*batch(0, fsdpc.rank())).backward()
    after = fsdpc.schedule(model)
    assert inside is not None and after is not None
    assert "reduce" not in [act.what for act in inside.acts]
    assert "reduce" in [act.what for act in after.acts]


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("precision", ["f32", "bf16-f32"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [Llama, GPT2])
def test_activations_are_the_peak(kind: Any, precision: str, recompute: bool) -> None:
    """A dry run of a sharded model holds what the run holds; unsharded, casts are not known."""
    param, reduce = PRECISIONS[precision]
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    with fsdpc.deferred_init():
        model = kind(CONFIG)
    if recompute:
        fsdpc.checkpoint_activations(model.blocks(), "all")
    x, y = batch(0, fsdpc.rank())
    early = fsdpc.memory_plan(model, 8, x.shape, mp_policy=policy).activation
    assert all(p.is_deferred for p in model.parameters())
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy)
    fsdpc.fully_shard(model, mp_policy=policy)
    for _ in range(2):
        before = fsdpc.memory_stats()["activation_bytes"]
        fsdpc.reset_peak_memory_stats()
        model(x, y).backward()
    peak = fsdpc.memory_stats()["activation_peak_bytes"] - before
    assert fsdpc.memory_plan(model, None, x.shape).activation == peak
    assert early == pytest.approx(peak, rel=0.05)
    other = model(x, y)  # nothing of the dry run is left behind
    other.backward()


def test_activations_of_other_modules() -> None:
    layers = fsdpc.nn.Sequential(fsdpc.nn.Linear(64, 256), fsdpc.nn.Linear(256, 8))
    plan = fsdpc.memory_plan(layers, 4, (32, 64))
    assert plan.activation is not None
    assert 32 * (256 + 8) * 4 <= plan.activation <= 32 * (64 + 2 * 256 + 8) * 4 + 4096
    assert layers(fsdpc.tensor([[1.0] * 64])).shape == (1, 8)
    with pytest.raises(ValueError):
        fsdpc.memory_plan(layers, 4, (32, 63))


class Keeping(Module):
    """Keeps what its forward computed, in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = fsdpc.nn.Linear(8, 8)
        self.register_buffer("table", fsdpc.tensor([[1.0] * 8]))
        self.cache: Any = {"inner": []}
        self.calls = 0
        self.generator = np.random.default_rng(0)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        scale = self.generator.random() + np.random.random()
        if not self.cache["inner"]:
            self.cache["inner"].append((self.table * 2.0).detach())
        self.last = y = self.fc(x) * self.cache["inner"][0] * float(scale)
        self.table = self.table + 1.0
        return y


def test_a_plan_leaves_the_model_as_it_was() -> None:
    fsdpc.manual_seed(0)
    model = Keeping()
    table, state = model.table, model.generator.bit_generator.state
    np.random.seed(1)
    for _ in range(2):
        assert fsdpc.memory_plan(model, 2, (4, 8)).activation
        assert model.cache == {"inner": []} and model.calls == 0 and not hasattr(model, "last")
        assert model.table is table and model.generator.bit_generator.state == state
    assert np.random.random() == np.random.RandomState(1).random()
    kept: list[Any] = []

    class Telling(Keeping):
        def forward(self, x: Any) -> Any:
            kept.append(super().forward(x))
            return kept[-1]

    model = Telling()
    with pytest.raises(RuntimeError, match="forward of Telling keeps .* outside of the model"):
        fsdpc.memory_plan(model, 2, (4, 8))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Llama, GPT2])
def test_a_plan_at_any_time(kind: Any) -> None:
    """Before the first forward, by one rank alone, between steps: losses have the same bits."""

    def losses(planning: bool) -> list[float]:
        fsdpc.manual_seed(0)
        model = kind(CONFIG)
        for block in model.blocks():
            fsdpc.fully_shard(block)
        fsdpc.fully_shard(model)
        optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            x, y = batch(step, fsdpc.rank())
            if planning and fsdpc.rank() == step % 2:
                fsdpc.memory_plan(model, None, x.shape)
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    assert losses(True) == losses(False)
