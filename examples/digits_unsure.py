"""The digits that a network is least sure of: python examples/digits_unsure.py, which writes digits_unsure.png."""

from typing import Any

import matplotlib.pyplot as plt
import torch
from digits import Digits, DigitsData
from torch import Tensor

import stratagem as sg


class Predicting(Digits):
    def predict_step(self, batch: Any, batch_idx: int) -> tuple[Tensor, ...]:
        images, labels = batch
        confidence, digit = self(images).softmax(1).max(1)
        return images[:, 0].cpu(), labels.cpu(), digit.cpu(), confidence.cpu()


if __name__ == "__main__":
    sg.seed_everything(1)
    model, data = Predicting(), DigitsData()
    trainer = sg.Trainer(max_epochs=12, logger=False, enable_checkpointing=False)
    trainer.fit(model, datamodule=data)
    images, labels, digits, confidence = map(
        torch.cat, zip(*trainer.predict(model, data.test_dataloader()), strict=True)
    )
    figure, panels = plt.subplots(2, 10, figsize=(9, 2.3), layout="constrained")
    for panel, index in zip(panels.flat, confidence.argsort(), strict=False):
        panel.imshow(images[index], cmap="gray_r")
        panel.set_title(
            f"{digits[index]}, {confidence[index]:.0%}", size=9, color="k" if digits[index] == labels[index] else "C3"
        )
        panel.axis("off")
    figure.savefig("digits_unsure.png", dpi=90)
    print(f"{(digits == labels).float().mean():.1%} of {len(labels)} test images are right")
