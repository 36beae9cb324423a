"""fsdpc under Hugging Face's Trainer: the same class and arguments, on top of the engine.

    from fsdpc.integrations.transformers import Trainer  # was: from transformers import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()

The model is sharded when ``train()`` or ``evaluate()`` first needs it, using its ``fsdp_plan`` or
the classes that transformers does not split. Checkpoints have the format of transformers' Trainer
on one process: ``model.safetensors``, and an ``optimizer.pt`` with unsharded states. Either Trainer
can resume from the other's checkpoints, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import transformers
from torch import nn

from fsdpc.integrations._fsdp_config import from_fsdp_config
from fsdpc.integrations._fused_loss import fuse_loss as fuse_loss
from fsdpc.integrations.accelerate import WholeStateOptimizer, check, prepare
from fsdpc.sharding.rules import is_sharded
from fsdpc.torch import get_model_state_dict

#: Arguments that would train differently, or fail on only some ranks.
_REFUSED = {
    "auto_find_batch_size": "a single rank that runs out of memory would leave the others waiting",
    "ddp_broadcast_buffers": "units send no buffers; each rank keeps its own",
    "torch_compile": "compile the layers of the model before it is given to the Trainer",
    "save_on_each_node": "checkpoints lie in one folder that all hosts see",
}


class ShardedTrainer:
    """A sharding mixin; list it before ``transformers.Trainer`` or a subclass, such as TRL's.

    Parameters
    ----------
    *args, **kwargs
        The Trainer's arguments. ``args.fsdp`` and ``args.fsdp_config`` are converted to options.
    shard_options : mapping, optional
        Options of :func:`fsdpc.torch.shard_by_plan`: ``classes``, ``mesh``, ``strategy``,
        ``mp_policy``, ``offload_policy`` and ``fully_shard``'s other options. They override
        ``args.fsdp_config``.

    Raises
    ------
    ValueError
        An argument is not supported (``auto_find_batch_size``, ``torch_compile``,
        ``ddp_broadcast_buffers``, ``save_on_each_node``, some keys of ``fsdp_config``), or the
        launch is for FSDP or DeepSpeed.

    Examples
    --------
    ::

        class MyTrainer(ShardedTrainer, trl.SFTTrainer):
            pass
    """

    # transformers.Trainer defines these.
    args: Any
    accelerator: Any
    model: Any
    optimizer: Any

    def __init__(
        self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._shard_options = dict(shard_options or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create a plain data-parallel accelerator, because fsdpc handles the FSDP settings."""
        for name, why in _REFUSED.items():
            if getattr(self.args, name, False):
                raise ValueError(f"{type(self).__name__} with args.{name}: {why}")
        if self.args.fsdp:
            options, checkpointing = from_fsdp_config(self.args.fsdp_config)
            self._shard_options = {**options, **self._shard_options}
            self.args.activation_checkpointing = checkpointing or self.args.activation_checkpointing
        theirs, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            self.args.fsdp_plugin_args = theirs
        check(self.accelerator)

    def create_optimizer(self, model: Any = None) -> Any:
        """Shard the model and create an optimizer for its sharded parameters (collective)."""
        self._shard()
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if not isinstance(optimizer, WholeStateOptimizer):
            _, self.optimizer = prepare(self.accelerator, self.model, optimizer)
        return self.optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the model if necessary, then evaluate or predict (collective)."""
        self._shard()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the value that transformers computes for the unsharded model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return 6 * inputs[name].numel() * self._numel if name in inputs else 0

    def _shard(self) -> None:
        if not is_sharded(self.model):
            given = [self.optimizer] if self.optimizer is not None else []
            found = prepare(self.accelerator, self.model, *given, **self._shard_options)
            if given:
                self.optimizer = found[1]
        elif not getattr(self.model, "_is_accelerate_prepared", False):
            prepare(self.accelerator, self.model)  # already sharded
        self._numel = _numel(self.model)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = get_model_state_dict(self.model, rank0_only=True)  # collective
        if self.args.should_save:
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.optimizer.gathered():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def _numel(model: nn.Module) -> int:
    """Count the elements of unsharded parameters, excluding embeddings as transformers does."""
    looked_up = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    found = [p for p in model.parameters() if id(p) not in looked_up]
    return sum(prod(getattr(getattr(p, "fsdpc", p), "shape", p.shape)) for p in found)


class Trainer(ShardedTrainer, transformers.Trainer):
    """``transformers.Trainer`` over fsdpc; see :class:`ShardedTrainer` for the differences.

    Examples
    --------
    ::

        trainer = Trainer(model, args, train_dataset=data, shard_options={"strategy": "FULL_SHARD"})
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model("out")  # AutoModelForCausalLM.from_pretrained("out") reads it
    """


class Seq2SeqTrainer(ShardedTrainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over fsdpc: ``predict_with_generate`` works.

    Examples
    --------
    ::

        args = Seq2SeqTrainingArguments("out", predict_with_generate=True)
        Seq2SeqTrainer(model, args, eval_dataset=data, compute_metrics=score).evaluate()
    """


_OVERRIDDEN = ("_save", "_save_optimizer_and_scheduler")
_gone = [name for name in _OVERRIDDEN if not hasattr(transformers.Trainer, name)]
if _gone:
    raise ImportError(
        f"transformers {transformers.__version__} has no Trainer.{_gone[0]}, which fsdpc's Trainer "
        "overrides to gather: use the version that fsdpc was tested with (5.23)"
    )
