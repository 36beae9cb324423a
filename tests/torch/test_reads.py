"""What parameters and gradients answer outside of forward: the whole's answer, or an error."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
    full,
    loss_of,
    shard,
    twin,
)

# ---- reductions and products ----


class Headed(nn.Module):
    """A model whose loss function reads the head's weight, as trainers with chunked losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 4), nn.Linear(4, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_a_loss_function_reads_a_weight_that_is_unsharded(split: bool) -> None:
    torch.manual_seed(0)
    ours: Any = Headed()
    plain = copy.deepcopy(ours)
    if split:
        fully_shard(ours.head)
    fully_shard(ours)
    owner = ours.head if split else ours
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, plain)]
    for step in range(3):
        for model in (ours, plain):
            hidden = model(batch(step, fsdpc.rank()))
            if model is ours:
                with pytest.raises(RuntimeError, match="head.weight'.*between unshard.. and resh"):
                    F.linear(hidden, model.head.weight)
            if model is ours:
                owner.unshard()
            F.linear(hidden, model.head.weight).square().sum().backward()
            if model is ours:
                owner.reshard()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, plain)


def stepped(dim: int = 20) -> tuple[Any, Any]:
    """Return a model with gradients, and its matrix whose rows two ranks share."""
    ours, _ = stepped_twins(dim)
    return ours, ours.first.weight


def stepped_twins(dim: int) -> tuple[Any, Any]:
    """Return a sharded model and a plain one, with the same gradients."""
    model = build(dim=dim)
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    return ours, plain


def values_of(answer: Any) -> list[torch.Tensor]:
    """Return the whole values in an answer; collective."""
    if isinstance(answer, torch.Tensor):
        return [full(answer)]
    if isinstance(answer, (list, tuple)):
        return [value for each in answer for value in values_of(each)]
    return [torch.tensor(answer)]


def assert_same_answers(call: Callable[[Any], Any], rows: Any, whole: Any, name: str) -> None:
    found, wanted = values_of(call(rows)), values_of(call(whole))
    torch.testing.assert_close(
        found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


DIRECT: dict[str, Callable[[Any], Any]] = {
    "p.norm()": lambda p: p.norm(),
    "p.norm(2)": lambda p: p.norm(2),
    "torch.norm(p)": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "p.data.norm()": lambda p: p.data.norm(),
    "p.detach().norm()": lambda p: p.detach().norm(),
    "p.float().norm()": lambda p: p.double().norm(),
    "p.norm(dim=0)": lambda p: p.norm(dim=0),
    "p.std()": lambda p: p.std(),
    "p.var(unbiased)": lambda p: p.var(unbiased=False),
    "p.mean(0)": lambda p: p.mean(0),
    "amax of squares": lambda p: (p**2).amax(),
    "root of a mean": lambda p: (p**2).mean().sqrt(),
    "root of a sum": lambda p: (p**2).sum().sqrt(),
    "power of sums": lambda p: p.sum(0) ** 2,
    "product of sums": lambda p: p.sum(0) * p.sum(0),
    "sums as factors": lambda p: p * p.sum(0),
    "sum + 1": lambda p: p.sum() + 1,
    "sum of norms of columns": lambda p: p.norm(dim=0).sum(),
    "normalized columns": lambda p: F.normalize(p, dim=0),
    "standard scores": lambda p: (p - p.mean(0)) / p.std(0),
    "ones like a sum": lambda p: torch.ones_like(p.sum()),
    "full like sums": lambda p: torch.full_like(p.sum(0), 2.0),
    "cast sums": lambda p: p.sum(0).double().exp(),
    "all of some": lambda p: (p.sum(0) > 0.1).sum(),
    "(p - q).norm()": lambda p: (p - p.detach()).norm(),
    "p.sum(0)": lambda p: p.sum(0),
    "p.sum((0, 1))": lambda p: p.sum((0, 1)),
    "p.max()": lambda p: p.max(),
    "p.amax(dim=-2)": lambda p: p.amax(dim=-2),
    "p.argmax()": lambda p: p.argmax(),
    "logsumexp": lambda p: torch.logsumexp(p, dim=0),
    "p.sort(0)": lambda p: p.sort(0),
    "p.trace()": lambda p: p.trace(),
    "p.transpose": lambda p: p.transpose(-1, -2),
    "svd": lambda p: torch.linalg.svd(p),
    "mse_loss": lambda p: F.mse_loss(p, p.detach() * 0),
    "l1_loss": lambda p: F.l1_loss(p, p.detach() * 0),
    "smooth_l1_loss": lambda p: F.smooth_l1_loss(p, p.detach() * 0),
    "products": lambda p: (p @ p.T).tanh() @ p,
    "p.T @ p": lambda p: torch.exp(p.T @ p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "g.sum()": lambda p: p.grad.sum(),
    "g.mean()": lambda p: p.grad.mean(),
    "g.mean(0)": lambda p: p.grad.mean(0, keepdim=True),
    "g.norm(dim=0)": lambda p: p.grad.norm(dim=0),
    "g.data.std()": lambda p: p.grad.data.std(),
    "g.pow(2).sum()": lambda p: p.grad.pow(2).sum(),
    "g.pow(2).mean()": lambda p: p.grad.pow(2).mean(),
    "g.abs().max()": lambda p: p.grad.abs().max(),
    "(g * g).sum()": lambda p: (p.grad * p.grad).sum(),
    "g @ g.T": lambda p: p.grad.bfloat16() @ p.grad.bfloat16().T,
    "p.isnan().any()": lambda p: p.isnan().any(),
    "(p > 0).all()": lambda p: (p > 0).all(),
    "torch.all": lambda p: torch.all(0 < p),
    "(p == q).sum()": lambda p: (p == p.detach()).sum(),
    "torch.any": lambda p: torch.any(torch.ne(p, p.data)),
    "not finite": lambda p: (~torch.isfinite(p.data)).any(),
    "isfinite(g).all()": lambda p: torch.isfinite(p.grad).all(),
    "g.isfinite().all()": lambda p: p.grad.isfinite().all(),
    "nan or inf": lambda p: (p.grad.isnan() | p.grad.isinf()).any(),
    "count_nonzero": lambda p: torch.count_nonzero(p.grad > 0),
    "sparsity": lambda p: (p.grad > 0).double().mean(),
    "isnan of a log": lambda p: torch.isnan(p.grad.log()).sum(),
    "sign": lambda p: torch.sign(p.detach()).sum(0),
    "triu": lambda p: p.triu(),
    "diagonal": lambda p: p.diagonal(),
    "flip": lambda p: p.flip(0),
    "roll": lambda p: p.roll(1, dims=0),
    "diff": lambda p: p.diff(dim=0),
    "cumsum": lambda p: p.cumsum(0),
    "softmax": lambda p: p.softmax(0),
    "sort": lambda p: p.sort(dim=0, descending=True),
    "topk": lambda p: p.topk(2, dim=0),
    "median": lambda p: p.median(),
    "cat": lambda p: torch.cat([p, p + 1]),
    "stack": lambda p: torch.stack([p, p.detach()]),
    "shape": lambda p: [*p.shape, p.numel(), len(p)],
}


SOME: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p[0],
    "slice": lambda p: p[:4],
    "element": lambda p: p[0, 0],
    "rows and columns": lambda p: p[1:, 2],
    "ellipsis": lambda p: p[..., 0, 0],
    "chunk": lambda p: p.chunk(2)[1],
    "torch.split": lambda p: torch.split(p, 3)[0],
    "narrow": lambda p: p.narrow(0, 0, 2),
    "select": lambda p: p.select(-2, 1),
    "cast": lambda p: p.double()[0],
    "computed": lambda p: (p**2)[0],
}
ROW_BY_ROW: dict[str, Callable[[Any], Any]] = {
    "norm": lambda t: t.norm(dim=1),
    "keepdim": lambda t: t.norm(dim=-1, keepdim=True),
    "mean": lambda t: t.mean(dim=tuple(range(1, t.dim()))),
    "amax": lambda t: t.amax(-1),
    "maximum": lambda t: torch.max(t, t * 0),
    "softmax": lambda t: t.softmax(-1),
    "column": lambda t: t[:, 2],
    "normalize": lambda t: F.normalize(t),
    "flip": lambda t: torch.flip(t, (1,)),
    "roll": lambda t: t.roll(2, -1),
    "diff": lambda t: t.diff(),
}
ALL: dict[str, Callable[[Any], Any]] = {
    "slice": lambda p: p[:],
    "column": lambda p: p[:, 2],
    "new axis": lambda p: p[None, :, :4],
    "chunk": lambda p: p.chunk(2, dim=1)[1],
}
#: With plain tensors, of which every rank has its own.
MIXED: dict[str, Callable[[Any], Any]] = {
    "p @ x": lambda p: p @ torch.ones(7),
    "x @ p": lambda p: torch.ones(3, len(p)) @ p,
    "p.T": lambda p: torch.ones(3, 7) @ p.T,
    "mm": lambda p: torch.mm(p, torch.ones(7, 2)),
    "addmm": lambda p: torch.addmm(torch.ones(1), p, torch.ones(7, 2)),
    "linear": lambda p: F.linear(torch.ones(3, 7), p),
    "einsum": lambda p: torch.einsum("oi,bi->bo", p, torch.ones(3, 7)),
    "embedding": lambda p: F.embedding(torch.tensor([0]), p),
    "index_select of columns": lambda p: p.index_select(1, torch.tensor([0, 2])),
    "gather of columns": lambda p: p.gather(-1, torch.zeros(len(p), 1, dtype=torch.long)),
    "list": lambda p: p[[0, 1]],
    "gather": lambda p: torch.gather(p, dim=0, index=torch.zeros(1, 7, dtype=torch.long)),
    "index_fill": lambda p: p.index_fill(0, torch.tensor([1]), 0.0),
    "slice_scatter": lambda p: p.slice_scatter(torch.zeros(2, 7), 0, 0, 2),
    "index_select": lambda p: p.index_select(0, torch.tensor([0, 2])),
    "sum of both": lambda p: p + torch.ones(p.shape),
    "row": lambda p: p * torch.ones(7),
    "where": lambda p: torch.where(torch.ones(p.shape) > 0, p, 0.0),
    "in place": lambda p: p.detach().mul_(torch.ones(p.shape)),
    "copy": lambda p: p.data.copy_(torch.ones(p.shape)),
    "to a plain tensor": lambda p: torch.zeros(p.shape).copy_(p.detach()),
    "added to a plain tensor": lambda p: torch.zeros(p.shape).add_(p.detach(), alpha=2),
    "foreach": lambda p: torch._foreach_add([p.detach()], [torch.ones(p.shape)]),
    "cat": lambda p: torch.cat([p, torch.ones(1, 7)]),
    "gradient": lambda p: p.grad * torch.ones(7),
    "gradient in place": lambda p: p.grad.add_(torch.ones(p.shape)),
    "out": lambda p: torch.mul(p.detach(), 2.0, out=torch.empty(p.shape)),
}
#: That torch's DTensor does not compute.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "unbind": lambda p: p.unbind()[0],
    "mask": lambda p: p[p > 0],
    "nonzero": lambda p: (p > 0).nonzero(),
    "as_strided": lambda p: p.as_strided((2, 2), (1, 1)),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("dim", [20, 5])
@pytest.mark.parametrize("table", ["direct", "some", "all", "row by row"])
def test_reads_answer_for_the_whole(table: str, dim: int) -> None:
    """Also of rows that do not divide evenly."""
    ours, plain = stepped_twins(dim)
    p, q = ours.first.weight, plain.first.weight
    tables = {"direct": DIRECT, "some": SOME, "all": ALL, "row by row": ROW_BY_ROW}
    wrong = {}
    for name, call in tables[table].items():
        pairs = [(p, q)] if table == "direct" else [(p, q), (p.grad, q.grad), (p.data, q.data)]
        for rows, whole in pairs:
            try:
                assert_same_answers(call, rows, whole, name)
            except (AssertionError, RuntimeError, ValueError) as error:
                wrong[name] = str(error).strip().splitlines()[0]
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())
    assert_same_parameters(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks([1, 2])
def test_plain_tensors_are_not_mixed_in() -> None:
    _, p = stepped()
    before, grad = full(p), full(p.grad)
    for name, call in MIXED.items():
        with pytest.raises(RuntimeError) as caught:
            call(p)
        error = str(caught.value)
        assert re.search(r"got mixed torch.Tensor and DTensor", error), name
        assert re.search(r"rows \d+:\d+ of .*first.weight'", error), name
    assert torch.equal(full(p), before) and torch.equal(full(p.grad), grad)


@pytest.mark.ranks(2)
def test_what_is_not_computed_is_refused_by_name() -> None:
    _, p = stepped()
    for name, call in REFUSED.items():
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            call(p)
        assert re.search(r"rows \d+:\d+ of .*first.weight'", str(caught.value)), name


@pytest.mark.ranks([1, 2])
def test_masks_say_the_same_on_all_ranks() -> None:
    """As errors advise: of full_tensor(), or by a norm."""
    _, p = stepped()
    whole = full(p)
    assert torch.isfinite(p.grad).full_tensor().all() and p.grad.norm().isfinite()
    p.grad.to_local()[-1, 0] += math.nan if fsdpc.rank() == fsdpc.world_size() - 1 else 0.0
    for mask in (torch.isfinite(p.grad), ~(p.grad.isnan() | (p.grad == math.inf))):
        assert not mask.all() and mask.any() and (~mask).sum().item() == 1
        with pytest.raises(RuntimeError, match="140 elements|ambiguous"):
            bool(mask)
        assert (~mask.full_tensor()).nonzero().tolist() == [[19, 0]]
    assert not p.grad.norm().isfinite()
    mask = p > 0
    assert torch.equal(mask.full_tensor(), whole > 0)
    torch.testing.assert_close(full(torch.where(mask, p, 0.0)), whole.clamp(min=0))
    torch.testing.assert_close(full(p.masked_fill(mask, 0.0)), whole.clamp(max=0))
    torch.testing.assert_close(full(mask.sum(1)), (whole > 0).sum(1))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("dim", [20, 5])
def test_penalties_on_some_rows(dim: int) -> None:
    """Their gradients are in the parameter's placement, and optimizers and clipping take them."""
    ours, plain = stepped_twins(dim)
    p, q = ours.first.weight, plain.first.weight
    kept = full(p.grad)
    for name, take in {**SOME, **ALL, **ROW_BY_ROW}.items():
        p.grad = q.grad = None
        for each in (p, q):
            take(each).pow(2).sum().backward()
        torch.testing.assert_close(full(p.grad), q.grad, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(fsdpc.torch.full_grad(p), q.grad)
        torch.testing.assert_close(full(p.grad.norm()), q.grad.norm())
        assert p.grad.placements == p.placements, name
    ours.zero_grad()
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    torch.testing.assert_close(full(p.grad), kept)
    for make in (torch.optim.SGD, fsdpc.torch.optim.SGD):
        optimizers = make(ours.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        for take in (SOME["row"], ALL["column"], DIRECT["softmax"], DIRECT["p.T @ p"]):
            for m, optimizer in zip((ours, plain), optimizers, strict=True):
                m.zero_grad()
                take(m.first.weight).pow(2).sum().backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                optimizer.step()
            assert_same_parameters(ours, plain)


# ---- optimizers and recipes, on two ranks as on one ----


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each parameter; in several spellings."""

    def __init__(self, params: Any, norm: Callable[[Any], Any]) -> None:
        super().__init__(params, {})
        self.norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                square = state.setdefault("square", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                square.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = mean / square.sqrt().add_(1e-8)
                p.add_(update, alpha=-0.01 * float(self.norm(p) / self.norm(update)))


class Centralised(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - p.grad.mean(dim=0, keepdim=True), alpha=0.1)


class Orthogonal(torch.optim.Optimizer):
    """As Muon, by another name."""

    def __init__(self, params: Any) -> None:
        super().__init__([p for p in params if p.ndim == 2], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.bfloat16()
                x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                p.add_((1.5 * x - 0.5 * (x @ x.mT) @ x).to(p.dtype), alpha=-0.1)


STEPS: dict[str, Callable[[Any], Any]] = {
    "Lamb": lambda params: Lamb(params, lambda t: t.norm()),
    "Lamb of squares": lambda params: Lamb(params, lambda t: t.pow(2).sum().sqrt()),
    "Lamb of data": lambda params: Lamb(params, lambda t: t.data.pow(2).sum().sqrt()),
    "Centralised": Centralised,
    "Orthogonal": Orthogonal,
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", sorted(STEPS))
def test_optimizers_that_read_whole_parameters(kind: str) -> None:
    ours, plain = stepped_twins(5)
    for step in range(2):
        for m in (ours, plain):
            STEPS[kind](m.parameters()).step()
            m.zero_grad()
        both(ours, plain, step)
    wide = {"rtol": 0.02, "atol": 2e-3} if kind == "Orthogonal" else {}  # multiplies in bf16
    assert_same_parameters(ours, plain, **wide)


VIEWS: dict[str, Callable[[list[Any]], Any]] = {
    "the norm of a view": lambda ps: ps[0].view(-1).norm(),
    "a flat gradient": lambda ps: torch.cat([p.grad.flatten() for p in ps]).norm(),
    "a mean of rows' norms": lambda ps: ps[0].norm(dim=1).mean(),
    "rows of a view": lambda ps: ps[0].view(-1)[:4],
    "a vector": lambda ps: nn.utils.parameters_to_vector(ps).norm(),
    "a dot product": lambda ps: sum(p.grad.view(-1) @ p.detach().view(-1) for p in ps),
    "a sine": lambda ps: torch.sin(ps[0].detach()).sum(),
    "a product": lambda ps: F.linear(ps[0] * 0 + 1, ps[0].view(-1, 7)).sum(),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("dim", [20, 5])
def test_what_is_computed_from_views(dim: int) -> None:
    """It is right, or refused by name where the rows of a parameter do not divide evenly."""
    ours, plain = stepped_twins(dim)
    even = [p.shape[0] % 2 == 0 for p in plain.parameters()]
    wrong = {}
    for name, view in VIEWS.items():
        for chosen in (even, [True] * len(even)) if any(even) else ([True] * len(even),):
            of = [
                [p for p, c in zip(m.parameters(), chosen, strict=True) if c]
                for m in (ours, plain)
            ]
            try:
                found, wanted = full(view(of[0])), full(view(of[1]))
                torch.testing.assert_close(found, wanted)
            except (RuntimeError, ValueError) as error:
                named = re.search(r"rows \d+:\d+ of '", str(error))
                if chosen is even or fsdpc.world_size() == 1 or not named:
                    wrong[name] = str(error).splitlines()[0]
            except AssertionError as error:
                wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


@pytest.mark.ranks([1, 2])
def test_sharpness_aware_steps_have_norms_of_the_whole() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    for m in (ours, plain):
        norms = [p.grad.norm(p=2) for p in m.parameters()]
        scale = 0.05 / (torch.norm(torch.stack(norms)) + 1e-12)
        with torch.no_grad():
            for p in m.parameters():
                p.add_(p.grad * scale)
    assert_same_parameters(ours, plain)


# ---- a backward without a forward ----


@pytest.mark.ranks([1, 2])
def test_a_penalty_is_differentiated_by_itself() -> None:
    """Its gradients are rows of the whole's, and ranks clip by one norm."""
    for make in (torch.optim.SGD, fsdpc.torch.optim.SGD):
        for clip in (nn.utils.clip_grad_norm_, fsdpc.torch.clip_grad_norm_):
            for after in (False, True):
                penalise(make, clip, after)


def penalise(make: Any, clip: Any, after: bool) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = make(ours.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        if after:
            both(ours, plain, step)
        for m in (ours, plain):
            sum((p**2).sum() for p in m.parameters()).backward()
        norms = [torch.stack([p.grad.norm() for p in m.parameters()]) for m in (ours, plain)]
        torch.testing.assert_close(full(norms[0]), norms[1])
        totals = clip(ours.parameters(), 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(full(totals[0]), totals[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, plain)


# ---- files ----


@pytest.mark.ranks([1, 2])
def test_a_file_of_rows_names_the_rank(tmp_path: Path) -> None:
    """One that rank 0 alone writes would lose the others' rows."""
    ours, p = stepped()
    optimizer = torch.optim.AdamW(ours.parameters())
    optimizer.step()
    states = optimizer.state_dict()
    # As an example of FSDP2's gathers states, which asks whether they are DTensors.
    gathered = {k: {n: t.cpu() for n, t in s.items()} for k, s in states["state"].items()}
    folder = tmp_path / "step-17"
    folder.mkdir(exist_ok=True)
    for rows in (p, [p.detach()], {"w": p.data}, p.grad, states, gathered):
        if fsdpc.world_size() > 1:
            with pytest.raises(
                NotImplementedError,
                match=r"torch.save of .*rows \d+:\d+ of .*\(20, 7\) to 'step-17/rows.pt': rank",
            ):
                torch.save(rows, folder / "rows.pt")
        torch.save(rows, str(folder / f"rank-{fsdpc.rank():02}.pt"))
    torch.save(ours.state_dict(), folder / f"model-of-{fsdpc.rank()}.pt")


@pytest.mark.ranks(2)
def test_parameters_gradients_and_states_are_dtensors() -> None:
    ours, p = stepped()
    optimizer = torch.optim.AdamW(ours.parameters())
    optimizer.step()
    for rows in (p, p.detach(), p.grad, optimizer.state_dict()["state"][0]["exp_avg"]):
        assert isinstance(rows, DTensor) and rows.shape == (20, 7)
        assert rows.placements == (Shard(0),) and rows.device_mesh.size() == 2
        assert rows.to_local().shape == (10, 7) and full(rows).shape == (20, 7)
        assert not hasattr(rows, "no_such_attribute")


# ---- numbers of one element ----


@pytest.mark.ranks([1, 2])
def test_a_parameter_of_one_element_is_a_number() -> None:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    ours = fully_shard(model)
    ours(torch.ones(1, 4)).sum().backward()
    bias = ours.bias
    assert bool(bias == bias) and not (bias != bias).item()
    assert bias.sum().item() == bias.max().item() == bias.mean().item() == 0.25
    assert bias.grad.norm().item() == bias.grad.amax().item() == 1
    assert full(ours.weight.max()) == full(ours.weight.amin()) == 0.5
    assert bias.item() == float(bias) == bias.detach().item() == float(bias.data) == 0.25
    assert bool(bias) and int(bias) == 0
    assert math.isclose(bias.grad.item(), 1)
    with pytest.raises((RuntimeError, ValueError), match="element"):  # torch's, on one rank
        float(ours.weight)


@pytest.mark.ranks(2)
def test_the_only_row_of_a_rank_is_no_number() -> None:
    torch.manual_seed(0)
    ours = fully_shard(nn.Linear(1, 2, bias=False))
    with pytest.raises((RuntimeError, ValueError), match="element"):
        float(ours.weight)
