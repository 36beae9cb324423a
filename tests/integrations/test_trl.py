"""TRL's trainers, after ``fsdpc.torch.install()`` and over torch's own FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import torch.distributed as dist
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

import fsdpc
from tests.torch.common import join_gloo

from .install_runs import SIZES, fsdp2_arguments, history, sharded_by, whole
from .test_install import EXACT, assert_close, assert_equal

if "CI" not in os.environ:
    pytest.importorskip("trl", reason="needs trl, of the extra 'test'")

import datasets  # noqa: E402
import trl  # noqa: E402

MODELS = {
    "SFT": LlamaForCausalLM, "DPO": LlamaForCausalLM, "KTO": LlamaForCausalLM,
    "GRPO": LlamaForCausalLM, "Reward": LlamaForSequenceClassification,
}  # fmt: skip
NEAR_ZERO = {"rtol": 1e-6, "atol": 1e-7}  # GRPO's loss is a difference of nearly equal numbers


def rows(kind: str) -> Any:
    """Prompts of a few words; the answer is to say them again, and no others."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in torch.randint(3, 7, (80,), generator=generator).tolist():
        words = torch.randint(3, 9, (size,), generator=generator).tolist()
        said, other = (" ".join(f"w{i + more}" for i in words) for more in (0, 6))
        good = len(found) % 3 < 2
        answers: dict[str, Any] = {
            "SFT": {"completion": said}, "GRPO": {},
            "KTO": {"completion": said if good else other, "label": good},
        }.get(kind, {"chosen": said, "rejected": other})  # fmt: skip
        found.append({"prompt": said + " ", **answers})
    return datasets.Dataset.from_list(found)


def tokenizer() -> Any:
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, SIZES["vocab_size"]))]
    words = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, "<pad>")
    found = tokenizers.Tokenizer(words)
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def low_words(completions: list[str], **_: Any) -> list[float]:
    """How many of the words have names in the first third."""
    return [sum(w < "w3" for w in said.split()) / 8 for said in completions]


def rewards(trainer: Any) -> list[float]:
    """What GRPO has logged of its reward; nothing of other trainers."""
    return [r["reward"] for r in trainer.state.log_history if "reward" in r]


def new_model(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind](LlamaConfig(**SIZES, num_labels=1))


def quantized(storage: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=storage if storage is torch.bfloat16 else torch.float32,
        bnb_4bit_quant_storage=storage,
    )  # fmt: skip


def train(
    kind: str, lora: bool, ours: bool, folder: Path, resume: Path | None = None,
    storage: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """A trainer of the model in the folder next to this one, after its last step.

    With a storage dtype, its codes of 4 bits are stored as such.
    """
    config = getattr(trl, f"{kind}Config")
    low = storage is torch.bfloat16
    more: dict[str, Any] = {"model_init_kwargs": {"dtype": storage if low else torch.float32}}
    options: dict[str, Any] = {"quantization_config": quantized(storage)} if storage else {}
    if kind == "GRPO":  # ranks generate different lengths, and train on each twice
        more |= {"max_completion_length": 4 + 2 * dist.get_rank(), "num_generations": 2}
        more |= {"beta": 0.1, "num_iterations": 2}
        options["reward_funcs"] = low_words
    arguments = fsdp2_arguments(
        folder, config, bf16=low, learning_rate=1e-2 if lora else 3e-3, **more
    )
    if lora:
        task, head = ("SEQ_CLS", ["score"]) if kind == "Reward" else ("CAUSAL_LM", None)
        options["peft_config"] = peft.LoraConfig(
            task, r=4, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=head
        )
    with sharded_by(ours):
        trainer = getattr(trl, f"{kind}Trainer")(
            str(folder.parent / "model"), args=arguments, train_dataset=rows(kind),
            processing_class=tokenizer(), **options,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume and str(resume))
    reference = getattr(trainer, "ref_model", None)
    assert (reference is not None) == (kind in ("DPO", "KTO", "GRPO") and not lora)
    for model in filter(None, (trainer.model, reference)):
        assert isinstance(model, fsdpc.torch.FSDPModule) == ours
        sharded = (p for p in model.parameters() if p.dtype is not torch.uint8)
        assert all(hasattr(p, "full_tensor") for p in sharded)
    return trainer


def assert_alike(kind: str, one: Any, other: Any, first: int = 0) -> None:
    """Losses are close from a step on; norms, too, which adapters to codes have in bfloat16."""
    some, others = (history(trainer, first) for trainer in (one, other))
    steps = 20 - first
    assert len(some) == 2 * steps
    close = NEAR_ZERO if kind == "GRPO" else EXACT
    torch.testing.assert_close(some[:steps], others[:steps], **close)
    if getattr(one.model, "is_loaded_in_4bit", False):
        close = {"rtol": 0.01, "atol": 0}
    torch.testing.assert_close(some[steps:], others[steps:], **close)


@contextmanager
def two_trainers(
    kind: str, lora: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[list[Any]]:
    """Trainers over torch's FSDP2 and after install(), whose logs of 20 steps agree."""
    # TRL reports each run to the Hub otherwise.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    join_gloo(folder)
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        new_model(kind).save_pretrained(folder / "model")
    dist.barrier()
    trainers = [train(kind, lora, ours, folder / str(ours), **options) for ours in (False, True)]
    assert_alike(kind, *trainers)
    assert rewards(trainers[1]) == rewards(trainers[0])
    falls = [-r for r in rewards(trainers[1])] or history(trainers[1])[:20]
    assert sum(falls[:5]) > sum(falls[-5:])
    yield trainers
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_trainers_agree(
    kind: str, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 20 steps, and where one goes on from the other's checkpoint at the tenth."""
    with two_trainers(kind, lora, tmp_path, monkeypatch) as trainers:
        ends = [{n: whole(p) for n, p in t.model.named_parameters()} for t in trainers]
        assert_close(ends[1], ends[0])
        for ours, end in enumerate(ends):
            saved = tmp_path / str(bool(ours)) / "checkpoint-20"
            if lora:
                model = peft.PeftModel.from_pretrained(new_model(kind), saved)
            else:
                model = MODELS[kind].from_pretrained(saved)
            assert_equal(dict(model.named_parameters()), end)
        if (kind, lora) in [("DPO", False), ("Reward", True)]:  # to save time
            for ours in (True, False):
                again = train(kind, lora, ours, tmp_path / "again", half_of(tmp_path, not ours))
                assert_alike(kind, again, trainers[not ours], 10)


def half_of(folder: Path, ours: bool) -> Path:
    return folder / str(ours) / "checkpoint-10"


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        ("SFT", "uint8"), ("DPO", "bfloat16"), ("KTO", "float32"), ("Reward", "bfloat16"),
        ("GRPO", "float32"),
    ],  # fmt: skip
)
def test_quantized_bases(
    kind: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes in floats are sharded, and Accelerate leaves bytes whole. Adapters are saved alike."""
    dtype = getattr(torch, storage)
    with two_trainers(kind, True, tmp_path, monkeypatch, storage=dtype) as trainers:
        for ours, trainer in enumerate(trainers):
            base = MODELS[kind].from_pretrained(
                tmp_path / "model", quantization_config=quantized(dtype), device_map="cpu",
                num_labels=1, dtype=dtype if storage == "bfloat16" else torch.float32,
            )  # fmt: skip
            saved = tmp_path / str(bool(ours)) / "checkpoint-20"
            model = peft.PeftModel.from_pretrained(base, saved)
            parameters = dict(trainer.model.named_parameters())
            for name, p in model.named_parameters():
                end = whole(parameters[name])
                assert torch.equal(bits(p.detach().to(end.dtype)), bits(end)), name
        codes = parameters["base_model.model.model.layers.0.mlp.up_proj.weight"]
        assert codes.dtype is dtype and hasattr(codes, "full_tensor") == (storage != "uint8")
        for first in (False, True) if kind == "DPO" else ():
            half = half_of(tmp_path, first)
            again = train(kind, True, True, tmp_path / "again", half, storage=dtype)
            assert_alike(kind, again, trainers[first], 10)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)
