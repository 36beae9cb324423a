"""The recipe of docs/torch.md for scripts of Hugging Face's accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fsdpc
from fsdpc import checkpoint

from .common import assert_same_parameters, average_grads, build, join_gloo, shard, twin

accelerate = pytest.importorskip("accelerate")


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_prepared_trains_as_by_hand(precision: str, tmp_path: Any) -> None:
    join_gloo(tmp_path)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
    )
    model = build()
    plain = twin(model)
    model = shard(model)
    torch.manual_seed(0)
    x, y = torch.randn(32, 7), torch.randn(32, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    by_hand = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    slower = torch.optim.lr_scheduler.StepLR(by_hand, 4)
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = torch.nn.functional.mse_loss(plain(inputs).float(), targets) / 2
        loss.backward()
        if step % 2:
            average_grads(plain)
            own = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(norm.full_tensor(), own, rtol=1e-3, atol=1e-4)
            by_hand.step()
            by_hand.zero_grad()
            slower.step()
            slower.step()  # accelerate's counts batches of all ranks
    assert step == 3
    tolerance = 1e-5 if precision == "no" else 1e-2
    assert_same_parameters(model, plain, rtol=tolerance, atol=tolerance)
    with pytest.raises(RuntimeError, match="DTensor without a storage.*fsdpc.checkpoint"):
        accelerator.save_state(str(tmp_path / "refused"))
    state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer.optimizer}
    checkpoint.save(tmp_path / "saved", state)
    checkpoint.load(tmp_path / "saved", state)
    torch.distributed.destroy_process_group()
    fsdpc.shutdown()
