"""Note what is refused, in `refused.json` and docs/pairs.md: run `python -m pairs.refusals` in the folder tests."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

from . import features, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "pairs.md"


def main() -> None:
    """Train all pairs, which takes minutes, and write the sentences of those that are refused."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = {features.title(pair): outcomes.outcome(pair) for pair in features.PAIRS}
        for each in [*features.HOOKS, *features.STRATEGIES]:
            pairs = [pair for pair in [*features.HOOK_PAIRS, *features.STRATEGY_PAIRS] if pair[-1] is each]
            found |= outcomes.outcomes(pairs, Path(folder, each.name.replace(",", "").replace(" ", "_")))
        os.chdir(PAGE.parent)
    refused = {title: one.refusal for title, one in found.items() if one.refusal}
    Path(outcomes.__file__).with_name("refused.json").write_text(json.dumps(refused, indent=1) + "\n")
    before = PAGE.read_text().partition("| features |")[0]
    PAGE.write_text(before + outcomes.table(refused))
    for title, one in found.items():
        if one.differences:
            print(f"{title}: {'; '.join(one.differences)}")


if __name__ == "__main__":
    main()
