"""Pack documents of different lengths into rows of a fixed number of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen, validators
from torch import Tensor

from stratagem.errors import ConfigError

#: The label that losses of torch and transformers ignore.
IGNORED = -100


@frozen(kw_only=True)
class PackingCollator:
    """A ``collate_fn`` that packs samples ``{"input_ids": (n,), "labels": (n,)}`` into rows; see `best_fit`.

    Labels are the tokens themselves where a sample has none. Other keys of a sample are left out. A batch is a dict:

    * ``input_ids`` (rows, width): `pad_token_id` after the last document of a row.
    * ``labels`` (rows, width), not shifted: -100 for padding and for the first token of each document, which no token
      before it predicts.
    * ``position_ids`` (rows, width): from 0 in each document; 0 for padding.
    * ``document_ids`` (rows, width): from 0 in each row; the padding of a row counts as one more document.
    * ``cu_seqlens`` (documents + 1,), int32: borders of these documents in the flattened rows, for varlen kernels.

    Raises:
        ConfigError: a sample is longer than a row, padded, not one sequence, or has labels of another length.
    """

    #: Tokens of a row.
    max_tokens: int = field(validator=validators.ge(1))
    #: Rows of a batch, all of them `max_tokens` wide, so that shapes stay the same for compilation. A batch that needs
    #: more rows gets more. None: as many rows as the samples need, as wide as the fullest.
    rows: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    #: Token in places without a document.
    pad_token_id: int = 0

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the packed batch."""
        documents = [_document(sample) for sample in samples]
        lengths = [len(tokens) for tokens, _ in documents]
        if max(lengths) > self.max_tokens:
            raise ConfigError(
                f"a sample has {max(lengths)} tokens, and PackingCollator.max_tokens is {self.max_tokens}",
                expected="samples that fit into a row", do="cut long samples in the data set, or raise max_tokens",
            )  # fmt: skip
        rows = best_fit(lengths, self.max_tokens)
        width = max(sum(lengths[index] for index in row) for row in rows) if self.rows is None else self.max_tokens
        rows += [[] for _ in range((self.rows or 0) - len(rows))]
        packed = [self._row([documents[index] for index in row], width) for row in rows]
        batch = {name: torch.stack([row[name] for row in packed]) for name in packed[0]}
        return {**batch, "cu_seqlens": cu_seqlens(batch["document_ids"])}

    def _row(self, documents: list[tuple[Tensor, Tensor]], width: int) -> dict[str, Tensor]:
        lengths = [len(tokens) for tokens, _ in documents]
        left = width - sum(lengths)
        padding = torch.full((left,), self.pad_token_id), torch.full((left,), IGNORED)
        tokens, labels = zip(*documents, padding, strict=True)
        return {
            "input_ids": torch.cat(tokens),
            "labels": torch.cat(labels),
            # padding might be longer than the longest document, and a table of positions has an end
            "position_ids": torch.cat([*map(torch.arange, lengths), torch.zeros(left, dtype=torch.long)]),
            "document_ids": torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, left])),
        }


def _document(sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    tokens = torch.as_tensor(sample["input_ids"], dtype=torch.long)
    given = sample.get("labels")
    labels = torch.as_tensor(tokens if given is None else given, dtype=torch.long).clone()
    if tokens.dim() != 1 or labels.shape != tokens.shape or 0 in sample.get("attention_mask", ()):
        raise ConfigError(
            f"a sample has input_ids of shape {tuple(tokens.shape)} and labels of shape {tuple(labels.shape)}",
            expected="one dimension, as many labels, and no padding", do="tokenize without return_tensors and padding",
        )  # fmt: skip
    labels[:1] = IGNORED
    return tokens, labels


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of `lengths` in rows with sums of at most `size`, by best fit decreasing.

    The longest comes first; each goes to the row with the least space that still holds it. This needs at most 11/9 of
    the fewest rows possible, and 4 more (D. S. Johnson and others, SIAM Journal on Computing 3, 1974).
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect_left(spaces, (lengths[index], -1))
        if place == len(spaces):
            spaces.append((size, len(rows)))
            rows.append([])
        space, row = spaces.pop(place)
        rows[row].append(index)
        insort(spaces, (space - lengths[index], row))
    return rows


def cu_seqlens(document_ids: Tensor) -> Tensor:
    """Return the borders of documents in flattened rows: their first places, and the number of all places.

    Args:
        document_ids: (rows, width), different on both sides of a border.

    Returns:
        int32, of shape (documents + 1,), on the same device, whose name is that of FlashAttention's argument.
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    borders = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.cat([borders, borders.new_tensor([document_ids.numel()])])
