"""A GPT that learns to write, letter by letter: python examples/character_gpt.py, which writes character_gpt.png."""

import textwrap
from pydoc_data.topics import topics  # the texts of help(): the language reference of Python

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stratagem as sg

LENGTH, WIDTH = 48, 64


class GPT(sg.Module):
    def __init__(self, letters: str) -> None:
        super().__init__()
        self.letters, self.losses, self.written = letters, [], {}
        self.tokens, self.places = nn.Embedding(len(letters), WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.blocks(self.tokens(text) + self.places.weight[: len(mask)], mask, is_causal=True))

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:  # text: (B, LENGTH + 1)
        if self.global_step in (0, 100, 500):
            self.written[self.global_step] = self.write("The ", 220)
        loss = nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    @torch.no_grad()
    def write(self, start: str, number: int) -> str:
        text = torch.tensor([[self.letters.index(letter) for letter in start]], device=self.device)
        for _ in range(number):
            text = torch.cat([text, (self(text[:, -LENGTH:])[:, -1] / 0.7).softmax(1).multinomial(1)], 1)
        return "".join(self.letters[token] for token in text[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    sg.seed_everything(1)
    text = " ".join(filter(str.isascii, " ".join(topics.values()).split()))
    model = GPT("".join(sorted(set(text))))
    loader = DataLoader(torch.tensor([*map(model.letters.index, text)]).unfold(0, LENGTH + 1, 16), 32, shuffle=True)
    sg.Trainer(max_steps=501, logger=False, enable_checkpointing=False).fit(model, loader)
    figure, (curve, page) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=(1, 2), layout="constrained")
    curve.plot(model.losses)
    curve.set(xlabel="step", ylabel="loss")
    page.set_axis_off()
    pages = [f"after {step} steps:\n{textwrap.fill(text, 78)}" for step, text in model.written.items()]
    page.text(0, 1, "\n\n".join(pages), va="top", family="monospace", size=8)
    figure.savefig("character_gpt.png", dpi=90)
