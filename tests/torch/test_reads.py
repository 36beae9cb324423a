"""What rows of parameters and gradients answer: the whole's answer, or an error by name."""

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

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
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
            if model is ours and fsdpc.world_size() > 1:
                with pytest.raises(NotImplementedError, match="between unshard.. and reshard.. of"):
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


def stepped() -> tuple[Any, Any]:
    """Return a model with gradients, and its matrix whose rows two ranks share."""
    ours = shard(build())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    return ours, ours.first.weight


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
    "root of a mean": lambda p: (p**2).amax(),
    "(p - q).norm()": lambda p: (p - p.detach()).norm(),
    "p.sum(0)": lambda p: p.sum(0),
    "p.sum((0, 1))": lambda p: p.sum((0, 1)),
    "p.max()": lambda p: p.max(),
    "p.amax(dim=-2)": lambda p: p.amax(dim=-2),
    "p.argmax()": lambda p: p.argmax(),
    "logsumexp": lambda p: torch.logsumexp(p, dim=0),
    "p.sort(0)": lambda p: p.sort(0),
    "p.trace()": lambda p: p.trace(),
    "p @ x": lambda p: p @ torch.ones(7),
    "x @ p": lambda p: torch.ones(3, len(p)) @ p,
    "p.T": lambda p: torch.ones(3, 7) @ p.T,
    "p.transpose": lambda p: p.transpose(-1, -2),
    "mm": lambda p: torch.mm(p, torch.ones(7, 2)),
    "addmm": lambda p: torch.addmm(torch.ones(1), p, torch.ones(7, 2)),
    "linear": lambda p: F.linear(torch.ones(3, 7), p),
    "einsum": lambda p: torch.einsum("oi,bi->bo", p, torch.ones(3, 7)),
    "embedding": lambda p: F.embedding(torch.tensor([0]), p),
    "svd": lambda p: torch.linalg.svd(p),
    "mse_loss": lambda p: F.mse_loss(p, p.detach() * 0),
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
}


@pytest.mark.ranks([1, 2])
def test_rows_do_not_answer_for_the_whole() -> None:
    _, p = stepped()
    for name, call in DIRECT.items():
        if fsdpc.world_size() == 1:  # rows are the whole
            call(p)
            continue
        try:
            call(p)
        except NotImplementedError as error:
            assert re.search(r"this rank has rows \d+:\d+ of .*first.weight'", str(error)), name
        else:
            pytest.fail(f"{name} was answered")


@pytest.mark.ranks([1, 2])
def test_masks_say_the_same_on_all_ranks() -> None:
    """As errors advise: of full_tensor(), or by a norm."""
    _, p = stepped()
    begin, end = p.fsdpc.rows
    whole = p.full_tensor()
    assert torch.isfinite(p.grad).full_tensor().all() and p.grad.norm().isfinite()
    p.grad[-1, 0] += math.nan if end == len(whole) else 0.0
    for mask in (torch.isfinite(p.grad), ~(p.grad.isnan() | (p.grad == math.inf))):
        if fsdpc.world_size() > 1:
            with pytest.raises(NotImplementedError, match="of full_tensor.., which gathers"):
                mask.all()
        with pytest.raises(RuntimeError, match="140 elements|ambiguous"):
            bool(mask)
        assert (~mask.full_tensor()).nonzero().tolist() == [[19, 0]]
    assert not p.grad.norm().isfinite()
    mask = p > 0
    assert torch.equal(mask.full_tensor(), whole > 0)
    torch.testing.assert_close(torch.where(mask, p, 0.0), whole.clamp(min=0)[begin:end])
    torch.testing.assert_close(p.masked_fill(mask, 0.0), whole.clamp(max=0)[begin:end])
    torch.testing.assert_close(p[mask], whole[begin:end][whole[begin:end] > 0])
    torch.testing.assert_close(p[torch.where(mask)], p[mask])
    torch.testing.assert_close(p.grad[torch.where(p.grad > 0)], p.grad[p.grad > 0])
    torch.testing.assert_close(mask.sum(1), (whole > 0).sum(1)[begin:end])
    one = fully_shard(nn.Linear(4, 1))
    assert bool(one.bias == one.bias) and not (one.bias != one.bias).item()


SOME: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p[0],
    "slice": lambda p: p[:4],
    "element": lambda p: p[0, 0],
    "rows and columns": lambda p: p[1:, 2],
    "ellipsis": lambda p: p[..., 0, 0],
    "list": lambda p: p[[0, 1]],
    "chunk": lambda p: p.chunk(2)[1],
    "torch.split": lambda p: torch.split(p, 3)[0],
    "index_select": lambda p: p.index_select(0, torch.tensor([0, 2])),
    "gather": lambda p: torch.gather(p, dim=0, index=torch.zeros(1, 7, dtype=torch.long)),
    "narrow": lambda p: p.narrow(0, 0, 2),
    "select": lambda p: p.select(-2, 1),
    "cast": lambda p: p.double()[0],
    "computed": lambda p: (p**2)[0],
    "unbind": lambda p: p.unbind()[0],
    "index_fill": lambda p: p.index_fill(0, torch.tensor([1]), 0.0),
    "slice_scatter": lambda p: p.slice_scatter(torch.zeros(2, 7), 0, 0, 2),
}
ALL: dict[str, Callable[[Any], Any]] = {
    "slice": lambda p: p[:],
    "column": lambda p: p[:, 2],
    "last column": lambda p: p[..., -1],
    "new axis": lambda p: p[None, :, :4],
    "mask": lambda p: p[p > 0],
    "chunk": lambda p: p.chunk(2, dim=1)[1],
    "index_select": lambda p: p.index_select(1, torch.tensor([0, 2])),
    "gather": lambda p: p.gather(-1, torch.zeros(len(p), 1, dtype=torch.long)),
}


@pytest.mark.ranks([1, 2])
def test_a_penalty_on_some_rows_has_no_backward() -> None:
    ours, p = stepped()
    kept = p.grad.full_tensor()
    plain = p.full_tensor().requires_grad_()
    for name, take in SOME.items():
        rows = take(p)  # may be read
        if fsdpc.world_size() == 1:
            continue
        with pytest.raises(NotImplementedError) as caught:
            rows.pow(2).sum().backward()
        assert re.search(
            r"backward through .* of a (copy of a )?parameter: this rank has rows \d+:\d+ of .*"
            r"first.weight' .* unshard\(\) and reshard\(\)",
            str(caught.value),
        ), name
    for name, take in ALL.items():
        p.grad = plain.grad = None
        for each in (p, plain):
            take(each).pow(2).sum().backward()
        assert torch.allclose(p.grad.full_tensor(), plain.grad), name
    ours.zero_grad()
    loss_of(ours, batch(0, fsdpc.rank())).backward()  # nothing of the failed ones is left
    torch.testing.assert_close(p.grad.full_tensor(), kept)


ROW_BY_ROW: dict[str, Callable[[Any], Any]] = {
    "norm": lambda t: t.norm(dim=1),
    "keepdim": lambda t: t.norm(dim=-1, keepdim=True),
    "mean": lambda t: t.mean(dim=tuple(range(1, t.dim()))),
    "amax": lambda t: t.amax(-1),
    "max": lambda t: torch.max(t, t * 0),
    "softmax": lambda t: t.softmax(-1),
    "column": lambda t: t[:, 2],
    "normalize": lambda t: F.normalize(t),
    "flip": lambda t: torch.flip(t, (1,)),
    "roll": lambda t: t.roll(2, -1),
    "diff": lambda t: t.diff(),
}


@pytest.mark.ranks([1, 2])
def test_what_is_row_by_row_is_right() -> None:
    _, p = stepped()
    begin, end = p.fsdpc.rows
    for name, call in ROW_BY_ROW.items():
        for whole, rows in ((p.full_tensor(), p), (p.grad.full_tensor(), p.grad)):
            assert torch.allclose(call(rows), call(whole)[begin:end]), name
            assert torch.allclose(call(rows.data), call(whole)[begin:end]), name
    mask = p.detach() > 0
    p.data[mask] = 0
    assert p.full_tensor().max() <= 0


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


@pytest.mark.ranks(2)
def test_optimizers_are_refused_by_what_they_do() -> None:
    for make in STEPS.values():
        ours, _ = stepped()
        optimizer = make(ours.parameters())
        name = type(optimizer).__name__
        with pytest.raises(
            NotImplementedError, match=rf", in {name}.step\(\): this rank has rows .*whole_params="
        ):
            optimizer.step()


@pytest.mark.ranks([1, 2])
def test_whole_parameters_may_be_read_by_their_rank() -> None:
    """So optimizers that are refused step them."""
    model = build()
    plain = twin(model)
    for m in (model, plain):
        for p in m.parameters():
            p.requires_grad_(p.ndim == 2)
    ours = shard(model, whole_params=[p for p in model.parameters() if p.ndim == 2])
    for step in range(2):
        both(ours, plain, step)
        for m in (ours, plain):
            Lamb(
                [p for p in m.parameters() if p.ndim == 2 and p.numel()],
                lambda t: t.pow(2).sum().sqrt(),
            ).step()
            m.zero_grad()
    assert_same_parameters(ours, plain)


#: Computed from rows that are not watched any more: parameters that are DTensors will have these
#: right.
SILENT: dict[str, Callable[[list[Any]], Any]] = {
    "the norm of a view": lambda ps: ps[0].view(-1).norm(),
    "a flat gradient": lambda ps: torch.cat([p.grad.flatten() for p in ps]).norm(),
    "a mean of rows' norms": lambda ps: ps[0].norm(dim=1).mean(),
    "rows of a view": lambda ps: ps[0].view(-1)[:4],
    "a vector": lambda ps: nn.utils.parameters_to_vector(ps).norm(),
    "a dot product": lambda ps: sum(p.grad.view(-1) @ p.detach().view(-1) for p in ps),
    "a sine": lambda ps: torch.sin(ps[0].detach()).sum(),
    "a product": lambda ps: F.linear(torch.ones(3, 7), ps[0].view(-1, 7)).sum(),
}


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="parameters that are DTensors will have it right")
@pytest.mark.parametrize("what", sorted(SILENT))
def test_what_is_computed_from_rows(what: str) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    found, wanted = (SILENT[what](list(m.parameters())).detach() for m in (ours, plain))
    torch.testing.assert_close(found, wanted)


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
        torch.testing.assert_close(*norms)
        totals = clip(ours.parameters(), 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(totals[0].full_tensor(), totals[1])
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
def test_what_asks_for_a_dtensor_hears_what_to_call() -> None:
    ours, p = stepped()
    optimizer = torch.optim.AdamW(ours.parameters())
    optimizer.step()
    for rows in (p, p.detach(), p.grad, optimizer.state_dict()["state"][0]["exp_avg"]):
        for name in ("device_mesh", "placements"):
            assert not hasattr(rows, name)
            with pytest.raises(AttributeError, match=f"'{name}'.*get_optimizer_state_dict"):
                getattr(rows, name)
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
    assert bias.item() == float(bias) == bias.detach().item() == float(bias.data) == 0.25
    assert bool(bias) and int(bias) == 0
    assert math.isclose(bias.grad.item(), 1)
    with pytest.raises((RuntimeError, ValueError), match="element"):  # torch's, on one rank
        float(ours.weight)


@pytest.mark.ranks(2)
def test_the_only_row_of_a_rank_is_no_number() -> None:
    torch.manual_seed(0)
    ours = fully_shard(nn.Linear(1, 2, bias=False))
    with pytest.raises(RuntimeError, match="2 elements cannot be converted to Scalar"):
        float(ours.weight)
