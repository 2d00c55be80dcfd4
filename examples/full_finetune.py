"""Fine-tune all weights, and write a folder of Hugging Face: python examples/full_finetune.py --devices 2."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stratagem as sg


class Finetune(sg.Module):
    def __init__(self, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # LlamaForCausalLM.from_pretrained("a/folder") for trained weights
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    tokens = torch.arange(640)[:, None].add(torch.arange(8)) % 32
    # Each block is a unit of fsdp, gathered while it computes. --precision bf16-mixed computes in bf16.
    trainer = sg.Trainer.from_cli(
        max_epochs=4,
        strategy={"name": "fsdp", "auto_wrap_policy": {"LlamaDecoderLayer"}},
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Finetune(), DataLoader(tokens[:512], batch_size=16, shuffle=True), DataLoader(tokens[512:], 16))
    trainer.save_checkpoint("whole.ckpt", weights_only=True)  # all ranks call it: rank 0 writes the gathered weights
    if trainer.is_global_zero:
        Finetune.load_from_checkpoint("whole.ckpt").model.save_pretrained("finetuned")
        again = LlamaForCausalLM.from_pretrained("finetuned")
        loss = again(input_ids=tokens[:16], labels=tokens[:16]).loss
        print(f"val_loss {trainer.callback_metrics['val_loss']:.3f}, of the folder {loss:.3f}")
