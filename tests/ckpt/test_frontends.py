"""Torch modules and optimizers in checkpoints, and from one frontend to the other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.models import GPT2, Llama
from fsdpc.torch import (
    MixedPrecisionPolicy,
    fully_shard,
    get_optimizer_state_dict,
    optim,
    summon_full_params,
)
from tests.faults.common import run
from tests.torch.common import batch, full, loss_of

from .common import CONFIG, by_blocks

OPTIMIZERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "Adam": optim.Adam,
    "SGD": lambda params, lr: optim.SGD(params, lr, momentum=0.9),
    "Muon": lambda groups, lr: optim.Muon([groups[0], {**groups[1], "use_muon": False}], lr),
    "torch AdamW": torch.optim.AdamW,
    "torch SGD": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "torch RMSprop": torch.optim.RMSprop,
    "torch Adagrad": torch.optim.Adagrad,
}


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by name; collective."""
    return {name: full(value) for name, value in model.state_dict().items()}


class Net(nn.Module):
    """Odd shapes, dropout, a buffer that forwards change, tied weights, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 20)
        self.blocks = nn.ModuleList([nn.Linear(20, 20) for _ in range(2)])
        self.norm = nn.LayerNorm(20)
        self.register_buffer("seen", torch.zeros(2))
        self.twin = nn.Linear(20, 20, bias=False)
        self.twin.weight = self.blocks[0].weight
        self.last = nn.Linear(20, 5, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().float().mean()
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = nn.functional.dropout(block(x).relu(), 0.2, self.training)
        return self.last(x + self.twin(x)) + self.frozen.sum()


class Run:
    """A small training run with everything that has a state."""

    def __init__(self, how: str, optimizer: str = "AdamW", seed: int = 5) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = Net()
        if how != "plain":
            options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if how == "bf16" else None)}  # fmt: skip
            if how == "replicas":
                options["mesh"] = fsdpc.init_device_mesh("cpu", (fsdpc.world_size(), 1))
            elif how == "SHARD_GRAD_OP":
                options["strategy"] = how
            fully_shard(self.model.blocks[1], **options)
            fully_shard(self.model, **options)
        torch.manual_seed(seed + fsdpc.rank())  # every rank its own dropout
        matrices = [p for p in self.model.parameters() if p.requires_grad and p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.requires_grad and p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        self.optimizer = OPTIMIZERS[optimizer](groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 12])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
                "scaler": self.scaler}  # fmt: skip

    def train(self, begin: int, end: int) -> Run:
        for step in range(begin, end):
            loss = loss_of(self.model, batch(step, fsdpc.rank()))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self

    def everything(self) -> Any:
        """Parameters, rank 0's buffer, states and the rest, as bytes and numbers; collective."""
        tensors = {n: t.numpy().tobytes() for n, t in full_values(self.model).items()
                   if fsdpc.rank() == 0 or n != "seen"}  # fmt: skip
        found = get_optimizer_state_dict(self.model, self.optimizer)
        states = {
            name: {k: v.numpy().tobytes() for k, v in each.items() if v is not None}
            for name, each in found["state"].items()
        }
        others = self.scheduler.state_dict(), self.scaler.state_dict()
        fsdpc.barrier()
        return tensors, states, found["param_groups"], others


@pytest.mark.ranks([1, 2], timeout=300)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_is_bitwise(optimizer: str, tmp_path: Path) -> None:
    whole = Run("sharded", optimizer).train(0, 12)
    first = Run("sharded", optimizer).train(0, 6)
    before = first.everything()
    checkpoint.save(tmp_path / "c", first.state)
    resumed = Run("sharded", optimizer, seed=6)  # other values and other random numbers
    checkpoint.load(tmp_path / "c", resumed.state)
    assert resumed.everything() == before
    assert resumed.train(6, 12).losses == whole.losses[6:]
    assert resumed.everything() == whole.everything()


@pytest.mark.ranks([1, 2], timeout=300)
@pytest.mark.parametrize("how", ["plain", "bf16", "replicas", "SHARD_GRAD_OP"])
def test_resume_otherwise(how: str, tmp_path: Path) -> None:
    if how == "plain" and fsdpc.world_size() > 1:
        return
    optimizer = "torch AdamW" if how == "plain" else "AdamW"
    whole = Run(how, optimizer).train(0, 6)
    first = Run(how, optimizer).train(0, 3)
    handle = checkpoint.save(tmp_path / "c", first.state, async_=True)
    first.train(3, 4)  # meanwhile
    handle.wait()
    resumed = Run(how, optimizer, seed=6)
    checkpoint.load(tmp_path / "c", resumed.state)
    assert resumed.train(3, 6).losses == whole.losses[3:]
    assert resumed.everything() == whole.everything()


def hf(how: str = "sharded", seed: int = 1) -> LlamaForCausalLM:
    """The model that ``Llama(CONFIG)`` is, as transformers has it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.dim, num_hidden_layers=CONFIG.layers,
            num_attention_heads=CONFIG.heads, intermediate_size=CONFIG.inner, use_cache=False,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    if how == "sharded":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def hf_gpt2(how: str) -> GPT2LMHeadModel:
    """The model that ``GPT2(CONFIG)`` is, as transformers has it."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=CONFIG.vocab_size, n_positions=CONFIG.max_seq, n_embd=CONFIG.dim,
            n_layer=CONFIG.layers, n_head=CONFIG.heads, n_inner=CONFIG.inner, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    )  # fmt: skip
    if how == "sharded":
        for layer in model.transformer.h:
            fully_shard(layer)
        fully_shard(model)
    return model


def door(which: str, family: str = "llama") -> tuple[dict[str, Any], Any]:
    """A model with an optimizer of a frontend, and what computes its loss."""
    rng = np.random.default_rng(fsdpc.rank())
    x, y = (rng.integers(0, CONFIG.vocab_size, (2, 16)) for _ in "xy")
    if which == "native":
        fsdpc.manual_seed(3)
        model: Any = by_blocks((GPT2 if family == "gpt2" else Llama)(CONFIG))
        return {"model": model, "optimizer": fsdpc.optim.AdamW(model.parameters(), lr=1e-2)}, (
            lambda: model(x, y)
        )
    make_model = hf_gpt2 if family == "gpt2" else hf
    model = make_model("plain" if which == "plain torch" else "sharded")
    make = optim.AdamW if which == "torch" else torch.optim.AdamW
    ids, labels = torch.from_numpy(x), torch.from_numpy(y)
    return {"model": model, "optimizer": make(model.parameters(), lr=1e-2)}, (
        lambda: nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    )


def contents(state: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Full parameters and full states by name, whatever the door; collective."""
    model, optimizer = state["model"], state["optimizer"]
    get = fsdpc.optim.get_optimizer_state_dict
    if isinstance(model, nn.Module):
        get = get_optimizer_state_dict
    states = {
        name: {k: int(v) if k == "step" else v.numpy().tobytes() for k, v in each.items()}
        for name, each in get(model, optimizer)["state"].items()
    }
    full = full_values(model)
    values = {n: t.numpy().tobytes() for n, t in full.items() if n in states}  # tied ones once
    fsdpc.barrier()
    return values, states


@pytest.mark.parametrize(
    ("family", "source", "ranks"),
    [
        *[("llama", source, n) for source in ("native", "torch", "torch.optim") for n in (1, 2)],
        ("gpt2", "native", 2),
        ("gpt2", "torch", 1),
    ],
)
@pytest.mark.ranks(1, init=False, timeout=240)
def test_from_door_to_door(family: str, source: str, ranks: int, tmp_path: Path) -> None:
    """Either reads what the other wrote, at any world size, and writes the same files."""

    def save(rank: int) -> Any:
        fsdpc.init()
        state, loss = door(source, family)
        for _ in range(3):
            loss().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        checkpoint.save(tmp_path / "c", state)
        return contents(state)

    before = run(save, ranks)[0]
    assert len(before[0]) == len(before[1]) > 10

    def load(rank: int, target: str, to: Path) -> Any:
        fsdpc.init()
        state, loss = door(target, family)
        checkpoint.load(tmp_path / "c", state)
        checkpoint.save(to, state)
        after = contents(state)
        loss().backward()
        state["optimizer"].step()
        fsdpc.barrier()
        return after

    turns = [("native", 2), ("torch", 2), ("torch.optim", 2), ("native", 1), ("torch", 1),
             ("plain torch", 1)]  # fmt: skip
    for target, n in turns:
        to = tmp_path / f"{target}-{n}"
        assert run(lambda rank, to=to, t=target: load(rank, t, to), n) == [before] * n, (target, n)
        for name in ("model.safetensors", "optimizer-00001-of-00001.safetensors"):
            assert (to / name).read_bytes() == (tmp_path / "c" / name).read_bytes(), (target, n)


@pytest.mark.ranks([1, 2], timeout=300)
def test_adam_goes_on_where_it_was(tmp_path: Path) -> None:
    """As accelerate's tests have it: all random numbers are scrambled, then restored."""

    def train(state: dict[str, Any], begin: int, end: int) -> list[tuple[float, float]]:
        found = []
        for step in range(begin, end):
            torch.manual_seed(0) if step == 0 else None
            noise = torch.rand(()) + random.random() + float(np.random.rand())
            generator = torch.Generator().manual_seed(100 * step + fsdpc.rank())
            ids = torch.randint(0, CONFIG.vocab_size, (2, 17), generator=generator)
            logits = state["model"](ids[:, :-1]).logits.flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) * noise
            loss.backward()
            norm = nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            found.append((float(loss.detach()), float(norm)))
        return found

    def made(seed: int) -> dict[str, Any]:
        model = hf(seed=seed)
        return {"model": model, "optimizer": optim.Adam(model.parameters(), lr=1e-3)}

    def scramble(seed: int) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    scramble(4)
    state = made(1)
    whole = train(state, 0, 10)
    checkpoint.save(tmp_path / "c", state)
    whole += train(state, 10, 20)
    want = full_values(state["model"])
    resumed = made(2)
    scramble(99 + fsdpc.rank())
    checkpoint.load(tmp_path / "c", resumed)
    again = train(resumed, 10, 20)
    np.testing.assert_allclose(again, whole[10:], rtol=1e-5, atol=0)
    for name, value in full_values(resumed["model"]).items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5)
    assert again == whole[10:]  # and indeed to the bit


@pytest.mark.ranks([1, 2])
def test_meta_models_get_their_values(tmp_path: Path) -> None:
    """Hugging Face's files fill a model that never had values; without a name it still has none."""
    plain = hf("plain")
    if fsdpc.rank() == 0:
        plain.save_pretrained(tmp_path / "c")
    fsdpc.barrier()

    def meta() -> Any:
        with torch.device("meta"):
            model = LlamaForCausalLM(plain.config)
        for layer in model.model.layers:
            fully_shard(layer)
        model.model.rotary_emb = plain.model.rotary_emb  # buffers that no file has
        return fully_shard(model)

    model = meta()
    with pytest.raises(RuntimeError, match="no values to save"):
        checkpoint.save(tmp_path / "none", {"model": model})
    checkpoint.load(tmp_path / "c", {"model": model})
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    fsdpc.barrier()
    few = {n: t for n, t in load_file(tmp_path / "c" / "model.safetensors").items()
           if "q_proj" not in n}  # fmt: skip
    if fsdpc.rank() == 0:
        save_file(few, tmp_path / "few.safetensors")
    fsdpc.barrier()
    model = meta()
    report = checkpoint.load(tmp_path / "few.safetensors", {"model": model}, strict=False)
    assert len(report.missing) == CONFIG.layers
    with pytest.raises(RuntimeError, match="q_proj.weight.*has no values yet"):
        model(ids)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_it(tied: bool, tmp_path: Path) -> None:
    """As it stands beside a config, in several files; tied weights are there once."""
    config = LlamaConfig(
        vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.dim, num_hidden_layers=CONFIG.layers,
        num_attention_heads=CONFIG.heads, intermediate_size=CONFIG.inner, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(1)
    plain = LlamaForCausalLM(config)
    want = {name: t.clone() for name, t in plain.state_dict().items()}
    model = fully_shard(plain)
    checkpoint.save(tmp_path / "c", {"model": model}, max_shard_bytes=60_000)
    if fsdpc.rank() == 0:
        config.save_pretrained(tmp_path / "c")
        found = LlamaForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
        assert found.state_dict().keys() == want.keys()
        for name, t in found.state_dict().items():
            assert torch.equal(t, want[name]), name
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
        files = sorted((tmp_path / "c").glob("model-*.safetensors"))
        names = [name for path in files for name in load_file(path)]
        assert len(files) > 2 and len(names) == len(want) - tied


@pytest.mark.ranks([1, 2])
def test_names_are_those_of_state_dict(tmp_path: Path) -> None:
    """Modules in two places, parametrizations, wrappers; bf16 values into fp32 ones."""

    def make(dtype: torch.dtype) -> Any:
        inner = nn.Linear(3, 3)
        model = nn.Sequential(
            inner, inner, nn.BatchNorm1d(3), checkpoint_wrapper(nn.Linear(3, 3)),
            nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        )  # fmt: skip
        return model.to(dtype)

    torch.manual_seed(1)
    model = make(torch.bfloat16)
    checkpoint.save(tmp_path / "c", {"model": model})
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert set(found) == set(model.state_dict()) - {"1.weight", "1.bias"}
    other = make(torch.float32)
    checkpoint.load(tmp_path / "c", {"model": other})
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name


@pytest.mark.ranks([1, 2])
def test_fsdp1_classes(tmp_path: Path) -> None:
    from fsdpc.torch import FullyShardedDataParallel

    torch.manual_seed(1)
    model = FullyShardedDataParallel(Net(), use_orig_params=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(0, fsdpc.rank())).backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    full = full_values(model)
    fsdpc.barrier()
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert set(found) == set(full) - {"twin.weight"}
    for name in found:
        if fsdpc.rank() == 0 or name != "seen":
            assert torch.equal(found[name], full[name]), name


def refused(state: dict[str, Any], to: Path, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        checkpoint.save(to, state)


@pytest.mark.ranks(1)
def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    refused({"model": Extra(2, 2)}, tmp_path / "c", "'_extra_state' of state_dict")
    model = nn.Linear(4, 4)
    fully_shard(nn.Sequential(model))
    refused({"model": model}, tmp_path / "c", "'weight' is a DTensor of no unit of this Linear")
    model = nn.Linear(4, 4)
    model.register_buffer("odd", torch.zeros(3, dtype=torch.complex64))
    refused({"model": model}, tmp_path / "c", "'odd' is torch.complex64")
    model = nn.Linear(4, 4)
    model.weight.data = model.weight.data.t()
    refused({"model": model}, tmp_path / "c", "'weight' is not contiguous")
    model = nn.Linear(4, 4)
    nadam = torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    nadam.step()
    words = "NAdam keeps 'mu_product' of 'weight'"
    refused({"model": model, "optimizer": nadam}, tmp_path / "c", words)
    refused({"model": model, "optimizer": 3}, tmp_path / "c", "'optimizer' must be an optimizer")
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    refused({"model": model, "optimizer": other}, tmp_path / "c", "is none of the model's")
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks([1, 2])
def test_whatever_stands_in_a_parameters_place(tmp_path: Path) -> None:
    """Unsharded parameters, replaced data and new values are seen; private copies are not."""
    made = Run("sharded").train(0, 1)
    model = made.model
    model(batch(0, 0))
    model.unshard()
    with torch.no_grad():  # by optimizers and users: it is out of sight, not out of date
        weight = made.optimizer.param_groups[0]["params"][0]
        weight.data = torch.full_like(weight, 2.0)
    checkpoint.save(tmp_path / "c", made.state)
    model.reshard()
    assert (load_file(tmp_path / "c" / "model.safetensors")["first.weight"] == 2.0).all()
    with summon_full_params(model), pytest.raises(RuntimeError, match="inside summon_full_params"):
        checkpoint.save(tmp_path / "d", made.state)


@pytest.mark.ranks(1)
def test_optimizers_of_other_classes_do_not_fit(tmp_path: Path) -> None:
    made = Run("sharded").train(0, 1)
    checkpoint.save(tmp_path / "c", made.state)
    other = Run("sharded", "torch SGD")
    with pytest.raises(CheckpointError, match="its optimizer is AdamW, this one SGD"):
        checkpoint.load(tmp_path / "c", other.state)
    assert not other.optimizer.state


@pytest.mark.ranks(1)
def test_schedulers_come_back_as_they_were(tmp_path: Path) -> None:
    """Milestones counted by number, infinities and tuples are no JSON; they survive it."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    for scheduler in (plateau, steps):
        before = scheduler.state_dict()
        name = type(scheduler).__name__
        extra = {"a": (1, [2.5, None]), 7: float("-inf"), "$b": {"$tuple": "x"}}
        checkpoint.save(tmp_path / name, {"scheduler": scheduler, "extra": extra})
        scheduler.__dict__.update({key: None for key in before})
        report = checkpoint.load(tmp_path / name, {"scheduler": scheduler})
        assert scheduler.state_dict() == before and report.extra == extra
        assert type(report.extra["a"]) is tuple
        assert type(before.get("milestones")) is type(scheduler.state_dict().get("milestones"))


@pytest.mark.ranks(1)
def test_the_numbers_of_a_gpu_come_back(tmp_path: Path, monkeypatch: Any) -> None:
    """Where there is one when they are saved, and one when they are loaded."""
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    numbers = torch.arange(16, dtype=torch.uint8)
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: numbers)
    monkeypatch.setattr(torch.cuda, "set_rng_state", taken.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint.save(tmp_path / "without", state)
    checkpoint.load(tmp_path / "without", state)
    assert not taken
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    checkpoint.save(tmp_path / "with", state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint.load(tmp_path / "with", state)
    assert not taken
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint.load(tmp_path / "with", state)
    assert len(taken) == 1 and torch.equal(taken[0], numbers)
