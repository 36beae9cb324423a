"""Random programs with torch's memory lent and given back, as on a GPU, and without, as on a CPU.

Both do the same, to the bit: values, gradients after each action, and errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, _device, clip_grad_norm_, optim
from tests.torch.common import batch, build, full, loss_of, shard
from tests.torch.test_gradient_memory import as_list, fails

SEEDS, ACTIONS = 20, 25


class Program:
    """One model, what has been done to it, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        options: dict[str, Any] = {"reshard_after_forward": self.chance(0.7)}
        if self.chance(0.5):
            reduce = torch.float32 if self.chance(0.5) else None
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce)
        model = build()
        model.first.weight.requires_grad_(self.chance(0.7))
        self.model = shard(model, **options)
        kind = optim.AdamW if self.chance(0.5) else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.kept: list[Any] = []
        self.seen: list[Any] = []

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def batch(self) -> torch.Tensor:
        return batch(self.random.randrange(20), fsdpc.rank())

    # ---- actions, each by its name

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.accumulate()
        self.optimizer.step()

    def accumulate(self) -> None:
        loss_of(self.model, self.batch()).backward()

    def accumulate_unsynced(self) -> None:
        self.model.set_requires_gradient_sync(False)
        try:
            self.accumulate()
        finally:
            self.model.set_requires_gradient_sync(True)

    def zero_between(self) -> None:
        loss = loss_of(self.model, self.batch()) + loss_of(self.model, self.batch())
        self.optimizer.zero_grad()
        loss.backward()

    def use_one(self) -> None:
        self.optimizer.zero_grad()
        self.model.blocks[0](torch.ones(2, 20)).float().sum().backward()

    def fail(self) -> None:
        fails(self.model, self.batch())

    def keep(self) -> None:
        ways = [lambda g: g, lambda g: g.detach(), lambda g: g.to_local().view(-1)]
        how = self.random.choice(ways)
        self.kept += [how(p.grad) for p in self.model.parameters() if p.grad is not None]

    def let_go(self) -> None:
        self.kept.clear()

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.chance(0.8))

    def drop_some(self) -> None:
        for p in self.model.parameters():
            if self.chance(0.5):
                p.grad = None

    def give_some(self) -> None:
        for p in self.model.parameters():
            if self.chance(0.3) and p.requires_grad:
                p.grad = torch.full_like(p, 0.1)

    def clip(self) -> None:
        self.seen.append(float(clip_grad_norm_(self.model.parameters(), 0.05)))

    def measure(self) -> None:
        self.seen += [float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None]

    def evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(loss_of(self.model, self.batch()).item())

    def hold(self) -> None:
        with self.model.hold():
            self.evaluate()
            self.evaluate()

    def unshard(self) -> None:
        block = self.model.blocks[0]
        block.unshard()
        self.seen.append(block.linear.weight.float().sum().item())
        block.reshard()

    def set_reshard(self) -> None:
        self.model.set_reshard_after_backward(self.chance(0.5))

    def write(self) -> None:
        self.model.last.weight.data.mul_(1.01)
        with fsdpc.torch.summon_full_params(self.model), torch.no_grad():
            self.model.first.bias.add_(0.1)

    def run(self) -> list[Any]:
        """Do what comes, and return what was seen."""
        actions: list[Callable[[], None]] = [
            self.step, self.step, self.accumulate, self.accumulate_unsynced, self.zero_between,
            self.fail, self.keep, self.let_go, self.zero, self.drop_some, self.give_some, self.clip,
            self.measure, self.evaluate, self.hold, self.unshard, self.set_reshard, self.write,
            self.use_one,
        ]  # fmt: skip
        for _ in range(ACTIONS):
            action = self.random.choice(actions)
            self.seen.append(action.__name__)
            try:
                action()
            except RuntimeError as error:
                self.seen.append(str(error))
            grads = [p.grad for p in self.model.parameters()]
            self.seen.append([None if g is None else g.to_local().tolist() for g in grads])
        self.seen += [as_list(k) for k in self.kept]
        self.seen += [full(v).tolist() for v in self.model.state_dict().values()]
        return self.seen


@pytest.mark.ranks([1, 2])
def test_programs_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        monkeypatch.setattr(_device, "takes_back", lambda: False)
        usual = Program(seed).run()
        monkeypatch.setattr(_device, "takes_back", lambda: True)
        for i, (ours, wanted) in enumerate(zip(Program(seed).run(), usual, strict=True)):
            assert repr(ours) == repr(wanted), (seed, [s for s in usual[:i] if type(s) is str])
