"""``fsdpc.integrations.transformers`` beside transformers' own Trainer, under DDP on two ranks."""

from __future__ import annotations

import gc
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdpc
from fsdpc.integrations._fsdp_config import from_fsdp_config
from fsdpc.torch import fully_shard
from tests.torch.common import assert_same_grads, average_grads, join_gloo

from .scripts import script_of

pytest.importorskip("accelerate")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Words(torch.utils.data.Dataset):
    """Sequences of several lengths: ranks have different numbers of tokens."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, 61, (count, 10), generator=generator)
        self.lengths = torch.randint(4, 11, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        labels = self.rows[i].clone()
        labels[self.lengths[i] :] = -100
        return {"input_ids": self.rows[i], "labels": labels}


def llama(**options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, **options)
    return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, kind: Any = transformers.TrainingArguments, **options: Any) -> Any:
    return kind(
        str(folder), use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, seed=3,
        adam_epsilon=1e-4, **options,
    )  # fmt: skip


def full(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def assert_same(model: Any, other: Any) -> None:
    theirs = full(other)
    for name, value in full(model).items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def history(trainer: Any, names: tuple[str, ...]) -> list[float]:
    return [float(line[n]) for line in trainer.state.log_history for n in names if n in line]


@pytest.mark.ranks(2, init=False, timeout=200)
def test_fit_evaluate_save_and_resume_as_transformers(tmp_path: Any) -> None:
    from fsdpc.integrations.transformers import Trainer
    from fsdpc.torch import shard_by_plan

    join_gloo(tmp_path)
    options = {
        "max_steps": 6, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "weight_decay": 0.1,
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True,
        "save_strategy": "steps", "metric_for_best_model": "eval_loss",
        "dataloader_drop_last": True,
    }  # fmt: skip
    data = {"train_dataset": Words(20), "eval_dataset": Words(7, seed=1)}
    runs = {}
    for kind in (Trainer, transformers.Trainer):
        name = "ours" if kind is Trainer else "theirs"
        if kind is Trainer:  # what FSDP's arguments ask for
            config = {"activation_checkpointing": True, "reshard_after_forward": False}
            how = {"fsdp": True, "fsdp_config": config}
        else:
            how = {"activation_checkpointing": True}
        runs[name] = kind(llama(), arguments(tmp_path / name, **options, **how), **data)
        runs[name].train()
    ours, theirs = runs["ours"], runs["theirs"]
    assert not ours.model.model.layers[0]._fsdpc_unit.reshard_after_forward
    assert ours.model.is_activation_checkpointing
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "total_flos")
    assert history(ours, names) == pytest.approx(history(theirs, names), rel=1e-4)
    assert_same(ours.model, theirs.model)  # of the best checkpoint

    ours.save_model(str(tmp_path / "out"))
    torch.distributed.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = Words(2, seed=5).rows
    with torch.no_grad():
        torch.testing.assert_close(ours.model.eval()(ids).logits, loaded(ids).logits)

    # Each goes on from the other's checkpoint, ours on a model that is sharded already.
    again = Trainer(shard_by_plan(llama()), arguments(tmp_path / "again", **options), **data)
    again.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-2"))
    assert_same(again.model, theirs.model)
    ours.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert_same(ours.model, theirs.model)
    theirs = transformers.Trainer(llama(), arguments(tmp_path / "back", **options), **data)
    theirs.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same(ours.model, theirs.model)
    del runs, ours, theirs, again
    leave()


def leave() -> None:
    """End the process group, which what is left of a DDP would end later, without its peers."""
    gc.collect()
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()


def bart() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
        max_position_embeddings=32, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=None, dropout=0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def adapted() -> Any:
    import peft

    model = llama()
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


@pytest.mark.ranks(2, init=False, timeout=200)
def test_generation_adapters_and_own_optimizers(tmp_path: Any) -> None:
    from fsdpc.integrations.transformers import Seq2SeqTrainer, Trainer

    join_gloo(tmp_path)
    data = {"train_dataset": Words(12), "eval_dataset": Words(7, seed=1)}
    collate = {"data_collator": lambda rows: transformers.default_data_collator(rows)}
    found: dict[str, Any] = {}

    def keep(prediction: Any) -> dict[str, float]:
        found["tokens"] = prediction.predictions
        return {}

    # Evaluation comes first: it shards. The labels of -100 are not to be embedded.
    whole = [{k: v.clamp(min=3) for k, v in row.items()} for row in Words(7, seed=1)]
    results = []
    for kind in (Seq2SeqTrainer, transformers.Seq2SeqTrainer):
        args = arguments(
            tmp_path / "bart", transformers.Seq2SeqTrainingArguments, max_steps=3,
            predict_with_generate=True, generation_max_length=9, save_strategy="no",
        )  # fmt: skip
        both = {"train_dataset": whole, "eval_dataset": whole, "compute_metrics": keep, **collate}
        trainer = kind(bart(), args, **both)
        seen = [trainer.evaluate()["eval_loss"]]
        if kind is not Seq2SeqTrainer:  # leaves DDP out of training after an evaluation (5.23)
            trainer = kind(bart(), args, **both)
        transformers.set_seed(3)
        seen += [trainer.train().training_loss, trainer.evaluate()["eval_loss"]]
        results.append((seen, found["tokens"]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert (results[0][1] == results[1][1]).all() and (results[0][1] > 2).any()

    # An optimizer that was made over the unsharded model; GPT2 has no plan.
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    trained = []
    for kind in (Trainer, transformers.Trainer):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        slower = torch.optim.lr_scheduler.StepLR(own, 1)
        args = arguments(tmp_path / "gpt2", max_steps=3, save_strategy="no", bf16=True)
        kind(model, args, optimizers=(own, slower), **data).train()
        trained.append(model)
    assert hasattr(trained[0].transformer.h[0], "_fsdpc_unit")
    assert_same(*trained)

    if importlib.util.find_spec("peft"):
        trained = []
        for kind in (Trainer, transformers.Trainer):
            folder = tmp_path / f"peft-{kind is Trainer}"
            args = arguments(folder, max_steps=4, save_steps=2)
            kind(adapted(), args, **data).train()
            trainer = kind(adapted(), arguments(folder, max_steps=4, save_strategy="no"), **data)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            trained.append(trainer.model)
            names = {path.name for path in (folder / "checkpoint-2").iterdir()}
            assert "adapter_model.safetensors" in names and "model.safetensors" not in names
        assert_same(*trained)
    del trainer, model, trained
    leave()


@pytest.mark.ranks(2, timeout=200)
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_a_reference_without_its_adapters(checkpointing: bool | None) -> None:
    """DPO: PEFT freezes the adapters for the reference, between policy and backward."""
    pytest.importorskip("peft")
    ours, plain = adapted(), adapted()
    if checkpointing is not None:
        for m in (ours, plain):
            m.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            m.enable_input_require_grads()
    for layer in ours.model.model.layers:
        fully_shard(layer)
    fully_shard(ours)
    x = Words(4, seed=fsdpc.rank())
    ids = torch.stack([row["input_ids"] for row in x])
    for m in (ours, plain):
        policy = m(ids).logits.log_softmax(-1)
        with torch.no_grad(), m.disable_adapter():
            reference = m(ids).logits.log_softmax(-1)
        ratio = (policy - reference).gather(-1, ids[..., None]).sum((1, 2))
        (-torch.nn.functional.logsigmoid(ratio[:2] - ratio[2:])).mean().backward()
    average_grads(plain)
    assert any(p.grad.any() for n, p in plain.named_parameters() if "lora_B" in n)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(1, init=False, timeout=300)
def test_what_is_refused(tmp_path: Any) -> None:
    from fsdpc.integrations.transformers import Trainer

    args = arguments(tmp_path, auto_find_batch_size=True)
    with pytest.raises(ValueError, match=r"Trainer with args.auto_find_batch_size: a single rank"):
        Trainer(llama(), args)
    args = arguments(tmp_path, ddp_broadcast_buffers=True)
    with pytest.raises(ValueError, match=r"ddp_broadcast_buffers: units send no buffers"):
        Trainer(llama(), args)
    fsdpc.shutdown()


def test_options_of_fsdp_become_ours() -> None:
    assert from_fsdp_config({"version": 2, "reshard_after_forward": True}) == ({}, False)
    config = {
        "reshard_after_forward": "false", "transformer_layer_cls_to_wrap": ["Block"],
        "activation_checkpointing": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT", "cpu_offload": True, "xla": False,
    }  # fmt: skip
    options = {"reshard_after_forward": False, "classes": ["Block"]}
    assert from_fsdp_config(config) == (options, True)
    config = {"reshard_after_forward": "hybrid_shard", "auto_wrap_policy": "NO_WRAP"}
    assert from_fsdp_config(config) == ({"strategy": "HYBRID_SHARD", "classes": []}, False)
    for key, value in {
        "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "SIZE_BASED_WRAP",
        "cpu_ram_efficient_loading": "true", "xla": True, "wrap": 1,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"fsdp_config\['{key}'\]"):
            from_fsdp_config({key: value})


def test_the_script_of_the_page_under_accelerate_launch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script_of("transformers.md", "transformers' Trainer"))
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--main_process_port=0"]  # a free one: other tests run beside
    command = [*launch, "--mixed_precision=no", "--dynamo_backend=no", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(found) for found in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    evaluated = {float(found) for found in re.findall(r"evaluated: ([\d.]+)", done.stdout)}
    assert len(losses) == 4 and losses[-1] < losses[0] and len(evaluated) == 1  # alike on ranks
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = (torch.arange(1, 33) % 60).view(1, -1)
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss) == pytest.approx(evaluated.pop(), rel=0.2)
