"""The same promises on a CUDA device; skipped, with a reason, where there is none."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem.testing.reference import Net, joined_batches, relative_difference, train_plainly

pytestmark = pytest.mark.gpu
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_one_gpu_trains_as_plain_pytorch_on_a_cpu(strategy):
    batches, model = joined_batches(10, 16), Net()
    trainer = sg.Trainer(max_epochs=1, accelerator="cuda", devices=1, strategy=strategy, gradient_clip_val=1.0, **QUIET)
    trainer.fit(model, batches)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    assert next(model.parameters()).is_cuda
    assert relative_difference(weights, train_plainly(batches, max_norm=1.0)[0]) < 1e-4


@pytest.mark.parametrize(("precision", "tolerance"), [("16-mixed", 1e-2), ("bf16-mixed", 5e-2)])
def test_mixed_precision_on_a_gpu(precision, tolerance):
    batches, model = joined_batches(10, 16), Net()
    trainer = sg.Trainer(max_epochs=1, accelerator="gpu", devices=1, precision=precision, **QUIET)
    trainer.fit(model, batches)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    assert trainer.position.skipped_steps < 10
    assert relative_difference(weights, train_plainly(batches)[0]) < max(
        tolerance, 1.0 * trainer.position.skipped_steps
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("comm_hook", [None, "bf16_compress"])
def test_two_gpus_over_nccl(comm_hook):
    batches, model = joined_batches(10, 16), Net()
    trainer = sg.Trainer(
        max_epochs=1, accelerator="cuda", devices=2, strategy="ddp_spawn", comm_hook=comm_hook, **QUIET
    )
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8)
    trainer.fit(model, loader)

    assert relative_difference(model.state_dict(), train_plainly(batches)[0]) < 1e-2
