"""Train a model to prefer answers, by DPO: python examples/dpo.py --strategy ddp --devices 2.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", equation 7.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import stratagem as sg

PROMPT, LENGTH = 4, 8  # tokens of a prompt, and of a prompt with an answer


class Preferences(sg.Module):
    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)  # the model before DPO; LlamaForCausalLM.from_pretrained(...) for trained weights
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=LENGTH, **sizes))
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B,): of the answers
        logits = self.model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
        answers = tokens[:, PROMPT:, None]
        return logits.log_softmax(-1).gather(-1, answers).sum((1, 2))

    def margins(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # (B,): reward of chosen minus of rejected
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        with torch.no_grad(), self.model.disable_adapter():  # the reference is the base model
            reference = self.log_probabilities(tokens)
        chosen, rejected = (self.log_probabilities(tokens) - reference).chunk(2)
        return self.hparams.beta * (chosen - rejected)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = -F.logsigmoid(self.margins(batch)).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.margins(batch) > 0).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


def loader(pairs: int) -> DataLoader:
    """Return prompts that count upwards, with answers that go on (chosen) or count downwards (rejected)."""
    start = torch.randint(0, 32, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    steps = torch.arange(LENGTH)
    back = torch.where(steps < PROMPT, steps, 2 * PROMPT - 2 - steps)
    rows = [{"chosen": (s + steps) % 32, "rejected": (s + back) % 32} for s in start]
    return DataLoader(rows, batch_size=16, shuffle=pairs > 128)


if __name__ == "__main__":
    trainer = sg.Trainer.from_cli(max_epochs=3, logger=False, enable_checkpointing=False)
    model = Preferences()
    (before,) = trainer.validate(model, loader(128), verbose=False)
    trainer.fit(model, loader(512), loader(128))
    trainer.save_checkpoint("adapters.ckpt", weights_only=True, trainable_only=True)
    trainer.print(f"accuracy {before['accuracy']:.2f}, then {trainer.callback_metrics['accuracy']:.2f}")
