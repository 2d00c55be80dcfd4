"""Train adapters of peft, and save them alone: python examples/peft_lora.py --strategy fsdp --devices 2."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stratagem as sg


class Adapted(sg.Module):
    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)  # the base model; LlamaForCausalLM.from_pretrained(...) for trained weights
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
        lora = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(base, lora)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


if __name__ == "__main__":
    tokens = torch.arange(512)[:, None].add(torch.arange(8)) % 32
    trainer = sg.Trainer.from_cli(max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Adapted(), DataLoader(tokens, batch_size=16, shuffle=True))
    trainer.save_checkpoint("adapters.ckpt", weights_only=True, trainable_only=True)
    again = Adapted.load_from_checkpoint("adapters.ckpt")  # builds the base model, then loads the adapters
    trainer.print(
        f"loss {trainer.callback_metrics['loss']:.2f}, {sum(p.requires_grad for p in again.parameters())} tensors"
    )
