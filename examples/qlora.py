"""Train adapters on a base model of 4 bits: python examples/qlora.py --strategy ddp --devices 2.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs". It needs stratagem-bitsandbytes.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stratagem as sg


class Adapted(sg.Module):
    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)  # the base model; LlamaForCausalLM.from_pretrained(...) for trained weights
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
        self.model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def kilobytes_of_layers(model: Adapted) -> float:
    """Return the size of the frozen weights in the blocks."""
    frozen = [weight for weight in model.model.get_decoder().layers.parameters() if not weight.requires_grad]
    return sum(weight.numel() * weight.element_size() for weight in frozen) / 1000


if __name__ == "__main__":
    tokens = torch.arange(512)[:, None].add(torch.arange(8)) % 32
    # Linear layers of the base model get weights of 4 bits when training starts; adapters and the output layer do not.
    # "dtype": "bf16" computes in bf16, on GPUs.
    precision = {"name": "nf4-dq", "dtype": "32", "ignore_modules": ["*.lora_*", "*.lm_head"]}
    trainer = sg.Trainer.from_cli(max_epochs=4, precision=precision, logger=False, enable_checkpointing=False)
    model = Adapted()
    before = kilobytes_of_layers(model)
    trainer.fit(model, DataLoader(tokens, batch_size=16, shuffle=True))
    trainer.print(f"layers: {before:.0f} kB before, {kilobytes_of_layers(model):.0f} kB in training")
    trainer.save_checkpoint("adapters.ckpt", weights_only=True, trainable_only=True)
    if trainer.is_global_zero:
        again = Adapted.load_from_checkpoint("adapters.ckpt")  # on the base model in full precision
        again.model.save_pretrained("adapters")  # a folder for PeftModel.from_pretrained(base, "adapters")
        loss = again.model(input_ids=tokens, labels=tokens).loss
        print(f"loss {trainer.callback_metrics['loss']:.2f}, on the base in full precision {loss:.2f}")
