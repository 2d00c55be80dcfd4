"""Fine-tune a model of transformers: python examples/transformers_finetune.py --strategy fsdp --devices 2."""

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DistilBertConfig, DistilBertForSequenceClassification

import stratagem as sg


class Classifier(sg.Module):
    def __init__(self, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # DistilBertForSequenceClassification.from_pretrained("distilbert-base-uncased") for a model that knows words.
        sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
        self.model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=50, **sizes))

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> dict[str, torch.Tensor]:
        return self.model(**batch)  # its `loss` is differentiated

    def validation_step(self, batch: BatchEncoding, batch_idx: int) -> None:
        correct = self.model(**batch).logits.argmax(-1) == batch["labels"]
        self.log("accuracy", correct.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def loader(samples: int) -> DataLoader:
    tokens = torch.randint(1, 50, (samples, 8), generator=torch.Generator().manual_seed(samples))
    rows = [{"input_ids": row, "labels": (row == 7).any().long()} for row in tokens.where(tokens < 25, 7)]
    return DataLoader(rows, batch_size=16, shuffle=samples > 128)


if __name__ == "__main__":
    trainer = sg.Trainer.from_cli(max_epochs=2, logger=False)
    trainer.fit(Classifier(), loader(512), loader(128))
    trainer.print(f"accuracy {trainer.callback_metrics['accuracy']:.2f}")
