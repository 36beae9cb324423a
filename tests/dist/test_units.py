"""What units live through: any order of calls, freezing, ties, exceptions, adapters, precisions.

Gradients are compared with an unsharded twin that plays all ranks and averages, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

WIDTH = 6
STRATEGIES = ("FULL_SHARD", "RESHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD", "HYBRID_SHARD")
Forward = Callable[[Any, Any], Any]


class Block(nn.Module):
    """Two layers, the inner one a unit of its own inside this unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.outer(self.inner(x).tanh())


class Net(nn.Module):
    """Blocks in an order that is given with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Any, order: tuple[int, ...] = (0, 1, 2)) -> Any:
        for i in order:
            x = self.blocks[i](x).tanh()
        return self.head(x)


def options_of(strategy: str) -> dict[str, Any]:
    if strategy == "RESHARD":
        return {"reshard_after_forward": True}
    if strategy == "HYBRID_SHARD":
        ranks = fsdpc.world_size()
        rows = ranks if ranks % 2 else 2
        mesh = fsdpc.init_device_mesh("cpu", (rows, ranks // rows))
        return {"strategy": strategy, "mesh": mesh}
    return {"strategy": strategy}


def pair(strategy: str) -> tuple[Any, Any]:
    """The same model sharded with nested units, and not."""
    options = options_of(strategy)
    fsdpc.manual_seed(5)
    twin = Net()
    fsdpc.manual_seed(5)
    model = Net()
    for block in model.blocks:
        fsdpc.fully_shard(block.inner, **options)
        fsdpc.fully_shard(block, **options)
    return fsdpc.fully_shard(model, **options), twin


def batch(rank: int, number: int = 0) -> Any:
    rng = np.random.default_rng([rank, number])
    return fsdpc.tensor(rng.normal(size=(3, WIDTH)).astype(np.float32))


def loss_of(y: Any) -> Any:
    return (y * y).mean()


def twin_gradients(twin: Any, work: Callable[[Any, int], None]) -> dict[str, np.ndarray | None]:
    """Run work(twin, rank) for every rank and average what it leaves."""
    sums: dict[str, Any] = {name: None for name, _ in twin.named_parameters()}
    for rank in range(fsdpc.world_size()):
        twin.zero_grad()
        work(twin, rank)
        for name, p in twin.named_parameters():
            if p.grad is not None:
                g = p.grad.double().numpy() / fsdpc.world_size()
                sums[name] = g.copy() if sums[name] is None else sums[name] + g
    return sums


def check(model: Any, twin: Any, work: Callable[[Any, int], None]) -> None:
    """Do the work on both and compare gradients."""
    work(model, fsdpc.rank())
    compare(model, twin_gradients(twin, work))


def compare(model: Any, wanted: dict[str, np.ndarray | None]) -> None:
    for name, p in model.named_parameters():
        got, want = fsdpc.full_grad(p), wanted[name]
        if want is None:
            assert got is None or not got.numpy().any(), name
        else:
            # the order of a few additions differs: some ulp of the largest term
            scale = np.abs(want).max(initial=0.0)
            np.testing.assert_allclose(
                got.double().numpy(), want, rtol=1e-5, atol=1e-6 * scale, err_msg=name
            )


def steps_on(model: Any, twin: Any, count: int = 2) -> None:
    """Ordinary steps after whatever was before; weights to a tolerance."""
    model.zero_grad()
    ours = fsdpc.optim.AdamW(model.parameters(), lr=0.05)
    theirs = fsdpc.optim.AdamW(twin.parameters(), lr=0.05)
    for number in range(count):

        def work(m: Any, rank: int, number: int = number) -> None:
            loss_of(m(batch(rank, number))).backward()

        check(model, twin, work)
        for (_, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            q.grad = fsdpc.full_grad(p)
        ours.step()
        theirs.step()
        ours.zero_grad()
        for (name, p), (_, q) in zip(
            model.named_parameters(), twin.named_parameters(), strict=True
        ):
            assert (fsdpc.full_tensor(p).numpy() == q.detach().numpy()).all(), name


def in_order(*orders: tuple[int, ...]) -> Callable[[Any, int], None]:
    def work(m: Any, rank: int) -> None:
        for number, order in enumerate(orders):
            loss_of(m(batch(rank, number), order)).backward()

    return work


def forwards_first(m: Any, rank: int) -> None:
    losses = [loss_of(m(batch(rank, number))) for number in range(2)]
    for loss in losses:
        loss.backward()


def one_backward(m: Any, rank: int) -> None:
    """Two forwards, their losses added."""
    (loss_of(m(batch(rank, 0))) + loss_of(m(batch(rank, 1), (2, 0)))).backward()


def inner_alone(m: Any, rank: int) -> None:
    """A unit called by itself, after the whole is known."""
    loss_of(m(batch(rank))).backward()
    loss_of(m.blocks[1](batch(rank, 1))).backward()


WORK = {
    "nested": in_order((0, 1, 2)),
    "twice in a forward": in_order((0, 1, 0, 2, 2)),
    "skipped in some steps": in_order((0, 1, 2), (0, 2), (1,), (0, 1, 2)),
    "out of order": in_order((0, 1, 2), (2, 1, 0), (1, 2, 0)),
    "two forwards before two backwards": forwards_first,
    "two forwards before one backward": one_backward,
    "a unit by itself": inner_alone,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks([1, 2, 3])
def test_any_order_of_calls(strategy: str) -> None:
    for name, work in WORK.items():
        model, twin = pair(strategy)
        try:
            check(model, twin, work)
            model.zero_grad()
            check(model, twin, work)  # now there is a record
            steps_on(model, twin)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.ranks(4)
def test_any_order_of_calls_over_a_mesh() -> None:
    for work in WORK.values():
        model, twin = pair("HYBRID_SHARD")
        check(model, twin, work)
        steps_on(model, twin)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks([1, 2])
def test_backward_twice_over_a_retained_graph(strategy: str) -> None:
    def work(m: Any, rank: int) -> None:
        loss = loss_of(m(batch(rank)))
        loss.backward(retain_graph=True)
        loss.backward()

    model, twin = pair(strategy)
    check(model, twin, work)
    steps_on(model, twin)


def freeze(m: Any, names: Callable[[str], bool]) -> None:
    for name, p in m.named_parameters():
        p.requires_grad = not names(name)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_kept_over_zero_grad_stay(strategy: str) -> None:
    """As in PyTorch; and their memory lasts as long as they do."""
    if strategy == "HYBRID_SHARD" and fsdpc.world_size() < 4:
        return
    model, twin = pair(strategy)
    check(model, twin, lambda m, rank: loss_of(m(batch(rank))).backward())
    before = fsdpc.memory_stats()["grad_bytes"]
    kept = [p.grad for p in model.parameters()]
    arrays = [g.numpy() for g in kept]
    values = [a.copy() for a in arrays]
    assert fsdpc.all_reduce(float(any(a.any() for a in arrays))) > 0
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for k in (1, 2):  # other batches, into other memory
        model.zero_grad()
        check(model, twin, lambda m, rank, k=k: loss_of(m(batch(rank, k))).backward())
    assert all((a == v).all() for a, v in zip(arrays, values, strict=True))
    assert fsdpc.memory_stats()["grad_bytes"] > before
    del kept, arrays
    assert fsdpc.memory_stats()["grad_bytes"] == before


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks([1, 2, 3])
def test_frozen_first_and_unfrozen_later(strategy: str) -> None:
    """A frozen first block (no gradient reaches it), then another, then none, then all."""
    model, twin = pair(strategy)
    for prefix in ("blocks.0", "blocks.1", "nothing", "blocks.2.inner.bias", "head"):
        for m in (model, twin):
            freeze(m, lambda name, prefix=prefix: name.startswith(prefix))
        model.zero_grad()
        check(model, twin, in_order((0, 1, 2)))
        for name, p in model.named_parameters():
            assert (fsdpc.full_grad(p) is None) == name.startswith(prefix), name
    for m in (model, twin):
        freeze(m, lambda name: True)
    model.zero_grad()
    assert not loss_of(model(batch(0))).requires_grad
    assert all(p.grad is None for p in model.parameters())
    for m in (model, twin):
        freeze(m, lambda name: False)
    steps_on(model, twin)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks([1, 2])
def test_all_frozen_passes_gradients_to_the_input(strategy: str) -> None:
    """Weights are there again in backward, though nobody wants their gradients."""
    model, twin = pair(strategy)
    grads = []
    for m in (model, twin):
        freeze(m, lambda name: True)
        x = batch(fsdpc.rank())
        x.requires_grad = True
        loss_of(m(x)).backward()
        grads.append(x.grad.numpy().copy())
    assert (grads[0] == grads[1]).all() and grads[0].any()


class Boom(Exception):
    pass


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ranks([1, 2])
def test_an_exception_then_reset_then_a_right_step(where: str, strategy: str) -> None:
    def boom(*_: Any) -> None:
        raise Boom

    model, twin = pair(strategy)
    check(model, twin, in_order((0, 1, 2)))
    model.zero_grad()
    if where == "forward":
        usual = model.blocks[1].inner.forward
        model.blocks[1].inner.forward = boom
        with pytest.raises(Boom):
            model(batch(0))
        model.blocks[1].inner.forward = usual
    else:
        usual = model.blocks[1].outer.forward

        def hooked(v: Any) -> Any:
            v.register_hook(boom)
            return usual(v)

        model.blocks[1].outer.forward = hooked
        loss = loss_of(model(batch(0)))
        with pytest.raises(Boom):
            loss.backward()
        model.blocks[1].outer.forward = usual
    model.reset_iter_state()
    steps_on(model, twin)


@pytest.mark.ranks([1, 2])
def test_tied_across_units_is_refused_and_inside_one_is_fine() -> None:
    model = Net()
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    fsdpc.fully_shard(model.blocks[0])
    with pytest.raises(ValueError, match="'inner.weight' already belongs to unit 'Block'.*tie"):
        fsdpc.fully_shard(model.blocks[1])
    for strategy in ("FULL_SHARD", "SHARD_OPTIM", "NO_SHARD"):
        fsdpc.manual_seed(5)
        tied, twin = Net(), Net()
        for (_, p), q in zip(twin.named_parameters(), tied.parameters(), strict=True):
            p.detach().copy_(q.detach())
        for m in (tied, twin):
            m.blocks[1].inner.weight = m.blocks[0].inner.weight
            m.blocks[2].outer.weight = m.blocks[0].inner.weight
        fsdpc.fully_shard(tied, strategy=strategy)
        check(tied, twin, in_order((0, 1, 2)))
        steps_on(tied, twin)


class Lora(nn.Module):
    """A frozen bf16 base and fp32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH, bias=False).weight.detach().bfloat16()
        self.base = nn.Parameter(base, requires_grad=False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        low = fsdpc.functional.linear(x.to(self.base.dtype), self.base)
        return low.float() + self.b(self.a(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks([1, 2, 3])
def test_lora(strategy: str) -> None:
    """Two dtypes in one unit, one of them frozen: the base keeps its bits, adapters train."""
    options = options_of(strategy)
    made = []
    for _ in range(2):
        fsdpc.manual_seed(3)
        made.append(nn.Sequential(Lora(), Lora()))
    model, twin = made
    for layer in model:
        fsdpc.fully_shard(layer, **options)
    fsdpc.fully_shard(model, **options)
    base = [fsdpc.full_tensor(layer.base).float().numpy().copy() for layer in model]
    steps_on(model, twin, 3)
    for before, layer in zip(base, model, strict=True):
        assert (fsdpc.full_tensor(layer.base).float().numpy() == before).all()
        assert layer.base.grad is None


DTYPES = ("float32", "bfloat16", "float16", "float64")
EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.mark.parametrize("original", DTYPES)
@pytest.mark.ranks(2)
def test_mixed_precision(original: str) -> None:
    """Every param and reduce dtype for an original one, against a twin in the param dtype."""
    for param in DTYPES:
        for reduce in DTYPES:
            fsdpc.manual_seed(2)
            value = nn.Linear(WIDTH, WIDTH).weight.detach()
            model = nn.Linear(WIDTH, WIDTH, bias=False)
            model.weight = nn.Parameter(value.to(original))
            twin = nn.Parameter(value.to(original).to(param))
            policy = fsdpc.MixedPrecisionPolicy(
                param_dtype=param, reduce_dtype=reduce, output_dtype="float32"
            )
            fsdpc.fully_shard(model, mp_policy=policy)
            y = model(batch(fsdpc.rank()))
            assert y.dtype is fsdpc.float32
            loss_of(y).backward()
            total, scale, count = 0.0, 0.0, fsdpc.world_size()
            for rank in range(count):
                twin.grad = None
                z = fsdpc.functional.linear(batch(rank).to(param), twin).float()
                loss_of(z).backward()
                g = twin.grad.double().numpy()
                total, scale = total + g / count, scale + np.abs(g).max()
                if rank == fsdpc.rank():
                    assert (z.numpy() == y.detach().numpy()).all()
            got = fsdpc.full_grad(model.weight)
            assert got.dtype is (fsdpc.float64 if original == "float64" else fsdpc.float32)
            # rounded to the param dtype by the twin, to the reduce dtype and fp32 by the unit
            eps = max(EPS[param], EPS[reduce], EPS[got.dtype.name])
            wrong = np.abs(got.double().numpy() - total).max()
            assert wrong <= 2 * eps * scale, (original, param, reduce, wrong / scale)


@pytest.mark.ranks([1, 2])
def test_units_of_different_policies() -> None:
    """bf16 into fp32 into bf16; inputs are cast to each one's dtype, or not where so asked."""
    seen: list[str] = []

    class Spy(nn.Linear):
        def forward(self, x: Any) -> Any:
            seen.append(x.dtype.name)
            return super().forward(x.to(self.weight.dtype))

    model = nn.Sequential(*[Spy(WIDTH, WIDTH) for _ in range(4)])
    for layer, (param, cast) in zip(
        model,
        [("bfloat16", True), ("float32", True), ("bfloat16", False), ("float16", True)],
        strict=True,
    ):
        policy = fsdpc.MixedPrecisionPolicy(param_dtype=param, cast_forward_inputs=cast)
        fsdpc.fully_shard(layer, mp_policy=policy)
    fsdpc.fully_shard(model, mp_policy=fsdpc.MixedPrecisionPolicy(output_dtype="float64"))
    y = model(batch(fsdpc.rank()))
    assert y.dtype is fsdpc.float64
    assert seen == ["bfloat16", "float32", "float32", "float16"]
    y.sum().backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())


@pytest.mark.ranks(2)
def test_traces_agree_over_ranks() -> None:
    """Whatever order: both ranks do the same communication."""
    model, _ = pair("FULL_SHARD")
    _core.trace_reset()
    in_order((0, 1, 2), (2, 0), (1, 1))(model, fsdpc.rank())
    kinds = ("gather", "reduce", "collective")
    events = [(k, u) for k, u, *_ in _core.trace_events() if k in kinds]
    crc = _core.crc32c(0, repr(events).encode())
    assert (fsdpc.all_gather(crc) == crc).all() and events


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.ranks(2, timeout=20)
def test_requires_grad_that_differs_between_ranks(strategy: str) -> None:
    model, _ = pair(strategy)
    in_order((0, 1, 2))(model, fsdpc.rank())
    if fsdpc.rank() == 1:
        model.blocks[1].inner.bias.requires_grad = False
    errors = (fsdpc.MismatchError, fsdpc.PeerError)
    with pytest.raises(errors, match="inner.bias.requires_grad=False"):
        in_order((0, 1, 2))(model, fsdpc.rank())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        dropout = fsdpc.functional.dropout
        return dropout(self.second(dropout(self.first(x), 0.4).tanh()), 0.3)


def run_with_dropout() -> int:
    """Three steps over the same twelve micro-batches each, however ranks share them."""
    fsdpc.init(deterministic=True)
    fsdpc.manual_seed(4)
    model = Dropped()
    fsdpc.fully_shard(model.first)
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    ranks = fsdpc.world_size()
    for module in (model.first, model):
        module.set_gradient_divide_factor(12)
    for step in range(3):
        for micro in range(12 // ranks):
            x = batch(0, 100 * step + micro * ranks + fsdpc.rank())
            loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    crc = 0
    for p in model.parameters():
        crc = _core.crc32c(crc, fsdpc.full_tensor(p).numpy())
    fsdpc.shutdown()
    return crc


def test_dropout_does_not_see_the_split_in_deterministic_mode() -> None:
    """1 rank x 12 micro-steps = 2 x 6 = 3 x 4 = 4 x 3 = 6 x 2, to the bit."""
    results = [fsdpc.launch(run_with_dropout, n) for n in (1, 2, 3, 4, 6)]
    assert len({crc for per_rank in results for crc in per_rank}) == 1, results


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("reduce", [None, fsdpc.bfloat16])
def test_a_step_takes_all_micro_steps_in_deterministic_mode(reduce: Any) -> None:
    """Three of them, which end as two sums; whether somebody looked before or not."""
    fsdpc.init(deterministic=True)
    found = []
    for looks in (True, False):
        fsdpc.manual_seed(4)
        policy = fsdpc.MixedPrecisionPolicy(reduce_dtype=reduce)
        model = fsdpc.fully_shard(nn.Linear(WIDTH, WIDTH), mp_policy=policy)
        optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(3):
            loss_of(model(batch(0, 2 * micro + fsdpc.rank()))).backward()
        if looks:
            assert fsdpc.full_grad(model.weight) is not None
        optimizer.step()
        found.append(fsdpc.full_tensor(model.weight).numpy().tobytes())
    assert found[0] == found[1]
    fsdpc.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("meanwhile", ["forward", "barrier"])
def test_a_state_dict_of_one_rank_alone(meanwhile: str) -> None:
    model = fsdpc.fully_shard(nn.Linear(4, 4))
    x = fsdpc.tensor(np.ones((2, 4), np.float32))
    model(x).mean().backward()
    errors = (fsdpc.MismatchError, fsdpc.PeerError)
    if fsdpc.rank() == 0:
        words = r"state_dict\(\) and full_tensor\(\) are collective: call them on every rank"
        with pytest.raises(errors, match=words):
            model.state_dict()
        return
    with pytest.raises(errors, match="rank 0 posted all_gather of 'weight'"):
        for _ in range(3):
            model(x) if meanwhile == "forward" else fsdpc.barrier()
