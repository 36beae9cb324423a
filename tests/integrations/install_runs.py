"""Runs of frameworks over FSDP2 on CPUs, of torch's ``fully_shard`` or of fsdpc's in its place.

Accelerate offers FSDP on accelerators only. ``accelerate_on_cpus`` lets it take ranks on CPUs for
such: everything after that one decision is its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fsdpc.torch

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@contextmanager
def sharded_by(ours: bool) -> Iterator[None]:
    """Let fsdpc's ``fully_shard`` take the place of torch's, or not."""
    if ours:
        fsdpc.torch.install()
    try:
        yield
    finally:
        fsdpc.torch.uninstall()


def llama(tied: bool = False, seed: int = 0) -> Any:
    """The same tiny model on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


class Words(torch.utils.data.Dataset):
    """Sequences of a few of the tokens, each said twice."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(3, 9, (count, 6), generator=generator).repeat(1, 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor; collective."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def accelerate_on_cpus() -> None:
    """Begin with a new Accelerate, which takes the ranks for such with an accelerator each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class Accelerated:
    """A model that Accelerate has sharded, its optimizer and its batches."""

    def __init__(
        self,
        ours: bool,
        *,
        tied: bool = False,
        kind: str = "FULL_STATE_DICT",
        efficient: bool = False,
        accumulate: int = 1,
        precision: str = "no",
        seed: int = 0,
    ) -> None:
        accelerate_on_cpus()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
            state_dict_type=kind,
            cpu_ram_efficient_loading=efficient,
        )
        self.accelerator = Accelerator(
            fsdp_plugin=plugin, gradient_accumulation_steps=accumulate, mixed_precision=precision
        )
        # To load efficiently is to take the values from rank 0.
        model = llama(tied, seed + efficient * dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
        batches = torch.utils.data.DataLoader(Words(160), batch_size=2)
        with sharded_by(ours):
            self.model, self.optimizer, self.batches = self.accelerator.prepare(
                model, optimizer, batches
            )
        kind_of_model = isinstance(self.model, fsdpc.torch.FSDPModule)
        assert kind_of_model == ours and self.accelerator.is_fsdp2

    def train(self, first: int, last: int) -> list[float]:
        """Mean losses over the ranks, and norms of the gradients, of some of the batches."""
        losses, norms = [], []
        for i, batch in enumerate(self.batches):
            if not first <= i < last:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    norms.append(float(whole(norm)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        return losses + norms

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters and optimizer states, whole, on each rank."""
        found = {name: whole(p) for name, p in self.model.named_parameters()}
        states = get_optimizer_state_dict(
            self.model, self.optimizer.optimizer, options=StateDictOptions()
        )["state"]
        for name, state in states.items():
            found |= {f"{name} {key}": whole(value) for key, value in state.items()}
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What ``get_state_dict`` returns, on rank 0."""
        found = self.accelerator.get_state_dict(self.model)
        assert not any(hasattr(value, "full_tensor") for value in found.values())
        return found

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


def fsdp2_arguments(
    folder: Path, config: Any = TrainingArguments, *, accumulate: int = 1, efficient: bool = False,
    kind: str = "FULL_STATE_DICT", **options: Any,
) -> Any:  # fmt: skip
    """What lets a Trainer make 20 steps over FSDP2, and save a checkpoint at the tenth."""
    GradientState._reset_state()
    arguments = config(
        str(folder), use_cpu=True, per_device_train_batch_size=2, max_steps=20, save_steps=10,
        logging_steps=1, report_to=[], disable_tqdm=True, seed=3, adam_epsilon=1e-4,
        gradient_accumulation_steps=accumulate, max_grad_norm=0.5, fsdp=True,
        fsdp_config={
            "fsdp_version": 2, "state_dict_type": kind, "cpu_ram_efficient_loading": efficient,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        **{"learning_rate": 3e-3} | options,
    )  # fmt: skip
    assert arguments.device.type == "cpu"  # makes the state of Accelerate
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


def words_trainer(
    ours: bool, folder: Path, seed: int = 0, *, efficient: bool = False, tied: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """A transformers Trainer with such arguments."""
    sources = folder.parent / f"model{seed}"
    arguments = fsdp2_arguments(folder, efficient=efficient, **options)
    model = llama(tied, seed)
    if efficient:
        if dist.get_rank() == 0:
            model.save_pretrained(sources)
        dist.barrier()
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # accelerate launch sets it
        model = LlamaForCausalLM.from_pretrained(sources)
    trainer = Trainer(model, arguments, train_dataset=Words(160))
    assert trainer.is_fsdp_enabled
    return trainer


def history(trainer: Any, first: int = 0) -> list[float]:
    """The logged losses and norms of gradients of the steps after the first so many."""
    rows = [r for r in trainer.state.log_history if "loss" in r and r["step"] > first]
    return [r[name] for name in ("loss", "grad_norm") for r in rows]
