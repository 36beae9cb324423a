"""``fuse_loss`` against transformers' own loss, on one rank and on two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from fsdpc.integrations.transformers import Trainer, fuse_loss
from fsdpc.torch import fully_shard
from tests.torch.common import assert_same_grads, average_grads

from .test_transformers import SIZES, Words, arguments, history, llama

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    rows = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(seed))
    labels = rows.clone()
    labels[0, :4] = -100
    return {"input_ids": rows, "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 11}, {"shift": True}], ids=str)
def test_losses_and_gradients_are_the_models_own(family: str, options: dict[str, Any]) -> None:
    kind, model_class = FAMILIES[family]
    more = {"num_local_experts": 2, "output_router_logits": True} if family == "mixtral" else {}
    config = kind(**SIZES, **more)
    plain, ours = model_class(config), model_class(config)
    ours.load_state_dict(plain.state_dict())
    fuse_loss(ours)
    inputs = batch()
    if options.pop("shift", False):
        options["shift_labels"] = inputs["labels"].roll(-1, dims=1)
    for model in (plain, ours):
        model.train()
        out = model(**inputs, **options)
        out.loss.backward()
        assert (out.logits is None) == (model is ours)
        if model is plain:
            want = out.loss
    torch.testing.assert_close(out.loss, want)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits)
    torch.testing.assert_close(ours(**inputs).loss, plain(**inputs).loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("before", [True, False], ids=["fused before", "fused after"])
def test_a_sharded_head(before: bool, tied: bool) -> None:
    """Tied to the embedding, or in a unit of its own, which one step gathers twice."""
    def build() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
        )

    plain, ours = build(), build()
    ours = fuse_loss(ours) if before else ours
    for layer in ours.model.layers:
        fully_shard(layer)
    if not tied:
        fully_shard(ours.lm_head)
    fully_shard(ours)
    ours = ours if before else fuse_loss(ours)
    for step in range(2):
        for model in (plain, ours):
            model.zero_grad()
            loss = model(**batch(step)).loss
            loss.backward()
            if model is plain:
                want = loss
        torch.testing.assert_close(loss, want)
        average_grads(plain)
        assert_same_grads(ours, plain)


@pytest.mark.ranks(2, init=False, timeout=200)
def test_the_trainer_takes_it(tmp_path: Any) -> None:
    losses = []
    for fused in (False, True):
        model = fuse_loss(llama()) if fused else llama()
        trainer = Trainer(model, arguments(tmp_path / str(fused), max_steps=4),
                          train_dataset=Words(16), eval_dataset=Words(4, 1))  # fmt: skip
        trainer.train()
        losses.append([*history(trainer, ("loss",)), trainer.evaluate()["eval_loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_adapters_over_a_frozen_head() -> None:
    peft = pytest.importorskip("peft")
    plain, ours = llama(), llama()
    wrapped = []
    for model in (plain, ours):
        torch.manual_seed(1)
        wrapped.append(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    fuse_loss(wrapped[1])
    for model in wrapped:
        model(**batch()).loss.backward()
    for (name, p), q in zip(wrapped[0].named_parameters(), wrapped[1].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad)


def test_a_copy_is_a_model_of_its_own(tmp_path: Any) -> None:
    ours = fuse_loss(llama())
    other = copy.deepcopy(ours)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    ours(**batch()).loss.backward()
    assert all(p.grad is None for p in other.parameters())
    loss = other(**batch()).loss
    torch.testing.assert_close(loss, torch.tensor(61.0).log())
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**batch()).loss, ours(**batch()).loss)


class Halved(transformers.LlamaForCausalLM):
    """A model whose forward changes its logits."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state) / 2
        return {"loss": self.loss_function(logits, labels, self.config.vocab_size)}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma2ForCausalLM .*final_logit_softcapping is 30"):
        fuse_loss(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8)))
    model = llama()
    model.lm_head = torch.nn.Linear(32, 61, bias=True)
    with pytest.raises(ValueError, match="without a bias"):
        fuse_loss(model)
    halved = fuse_loss(Halved(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(RuntimeError, match="Halved changes its logits"):
        halved(**batch())
