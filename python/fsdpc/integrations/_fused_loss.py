"""The loss of transformers' causal language models, computed by their head.

In training, a forward with labels makes the head return the loss instead of logits, and the model's
``loss_function`` passes it on. The head's forward, in which its unit gathers the weight, uses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdpc.torch.loss import linear_cross_entropy

#: Entries of a config that change logits between the head and the loss, and values that do not.
_CHANGES = {
    "final_logit_softcapping": (None,), "logit_scale": (None, 1), "logits_scaling": (None, 1),
    "lm_head_multiplier": (None, 1), "output_multiplier": (None, 1),
}  # fmt: skip


def fuse_loss(model: nn.Module) -> nn.Module:
    """Make a causal language model of transformers train without its logits.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model with a linear head, sharded or not, or PEFT's wrapper of one.

    Returns
    -------
    nn.Module
        The model. In training, a call with ``labels`` returns ``logits=None``, and the loss comes
        from :func:`fsdpc.torch.linear_cross_entropy`; other calls do not change.

    Raises
    ------
    ValueError
        The head has a bias or is another kind of layer, or the config changes logits after the
        head (soft caps, scales).
    RuntimeError
        At a call: the model's forward changes what its head returns.

    Examples
    --------
    ::

        model = fuse_loss(AutoModelForCausalLM.from_pretrained("model"))
    """
    base = getattr(model, "get_base_model", lambda: model)()
    name, head = type(base).__name__, base.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"fuse_loss: the head of {name} is {head}; only linear layers without a bias can be "
            "fused"
        )
    config = base.config.get_text_config()
    for key, harmless in _CHANGES.items():
        if getattr(config, key, None) not in harmless:
            raise ValueError(
                f"fuse_loss: {name} changes its logits ({key} is {getattr(config, key)}) before "
                "the loss; call fsdpc.torch.linear_cross_entropy in a forward of its own"
            )
    call = _Call(base, head)
    base.forward = _Forward(base.forward, call.forward)
    head.forward = _Forward(head.forward, call.head)
    base.loss_function = call.loss_function
    return model


class _Forward:
    """A forward with the signature of another, by which trainers choose what they pass.

    It is an object, which copies of the model copy: a function would still call the original.
    """

    def __init__(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self.__signature__ = inspect.signature(theirs)
        self.ours = ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ours(*args, **kwargs)


class _Call:
    """What one forward hands from the model to its head and back."""

    def __init__(self, base: Any, head: nn.Linear) -> None:
        self.base, self.linear = base, head
        self.theirs = base.forward, head.forward, base.loss_function
        self.labels: torch.Tensor | None = None
        self.ignore_index = -100
        self.items: Any = None
        self.loss: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None or not self.base.training:
            return self.theirs[0](*args, **kwargs)
        self.ignore_index = kwargs.get("ignore_index", -100)
        shifted = kwargs.get("shift_labels")
        if shifted is None:  # token n predicts label n + 1
            shifted = nn.functional.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        self.labels, self.items = shifted, kwargs.get("num_items_in_batch")
        try:
            outputs = self.theirs[0](*args, **kwargs)
        finally:
            self.labels = self.loss = None
        if isinstance(outputs, tuple):
            return outputs[0], None, *outputs[2:]
        outputs.logits = None
        return outputs

    def head(self, x: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return self.theirs[1](x)
        self.loss = linear_cross_entropy(
            x, self.linear.weight, self.labels, ignore_index=self.ignore_index,
            reduction="mean" if self.items is None else "sum",
        )  # fmt: skip
        if self.items is not None:
            items = self.items
            self.loss = self.loss / (items.to(x.device) if torch.is_tensor(items) else items)
        return self.loss

    def loss_function(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.labels is None:
            return self.theirs[2](logits, *args, **kwargs)
        if logits is not self.loss:
            raise RuntimeError(
                f"fuse_loss: {type(self.base).__name__} changes its logits before the loss; call "
                "fsdpc.torch.linear_cross_entropy in a forward of its own"
            )
        return logits
