"""TRL's trainers, after ``fsdpc.torch.install()`` and over torch's own FSDP2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import torch.distributed as dist
from transformers import (
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
    "SFT": LlamaForCausalLM, "DPO": LlamaForCausalLM, "Reward": LlamaForSequenceClassification,
}  # fmt: skip


def rows(kind: str) -> Any:
    """Prompts of a few words; the answer is to say them again, and no others."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in torch.randint(3, 7, (80,), generator=generator).tolist():
        words = torch.randint(3, 9, (size,), generator=generator).tolist()
        said, other = (" ".join(f"w{i + more}" for i in words) for more in (0, 6))
        answers = {"completion": said} if kind == "SFT" else {"chosen": said, "rejected": other}
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


def new_model(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind](LlamaConfig(**SIZES, num_labels=1))


def train(kind: str, lora: bool, ours: bool, folder: Path, resume: Path | None = None) -> Any:
    """A trainer of the model in the folder next to this one, after its last step."""
    config = getattr(trl, f"{kind}Config")
    arguments = fsdp2_arguments(folder, config, bf16=False, learning_rate=1e-2 if lora else 3e-3)
    options = {}
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
    assert (reference is not None) == (kind == "DPO" and not lora)
    for model in filter(None, (trainer.model, reference)):
        assert isinstance(model, fsdpc.torch.FSDPModule) == ours
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
    return trainer


@pytest.mark.ranks(2, init=False, timeout=300)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_trainers_agree(
    kind: str, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 20 steps, and where one goes on from the other's checkpoint at the tenth."""
    # TRL reports each run to the Hub otherwise.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    join_gloo(tmp_path)
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        new_model(kind).save_pretrained(tmp_path / "model")
    dist.barrier()
    folders = [tmp_path / "theirs", tmp_path / "ours"]
    trainers = [train(kind, lora, ours, folders[ours]) for ours in (False, True)]
    ends = [{n: whole(p) for n, p in t.model.named_parameters()} for t in trainers]
    theirs, own = map(history, trainers)
    assert len(own) == 40 and sum(own[:5]) > sum(own[15:20])
    torch.testing.assert_close(own, theirs, **EXACT)
    assert_close(ends[1], ends[0])
    if lora:
        for folder, end in zip(folders, ends, strict=True):
            model = peft.PeftModel.from_pretrained(new_model(kind), folder / "checkpoint-20")
            assert_equal(dict(model.named_parameters()), end)
    if (kind, lora) in [("DPO", False), ("Reward", True)]:  # to save time
        for ours in (True, False):
            again = train(kind, lora, ours, tmp_path / "again", folders[not ours] / "checkpoint-10")
            torch.testing.assert_close(history(again, 10), history(trainers[not ours], 10), **EXACT)
    dist.destroy_process_group()
    fsdpc.shutdown()
