"""Plans variants in a process in which torch has computed nothing: it cannot be given another type of device later."""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

from stratagem_plan.variants import Variant, plan_all


def plans(*variants: Variant) -> list:
    """Return the plan of each variant, or why it has none."""
    from programs import scripts

    with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
        asked, answer = Path(folder, "variants"), Path(folder, "plans")
        asked.write_bytes(pickle.dumps(variants))
        scripts.run([sys.executable, __file__, asked, answer], check=True)
        return pickle.loads(answer.read_bytes())


def main(asked: str, answer: str) -> None:
    """Plan what `plans` has written."""
    variants = pickle.loads(Path(asked).read_bytes())
    found = dict(plan_all(variants, quiet=True))
    Path(answer).write_bytes(pickle.dumps([found[position] for position in range(len(variants))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
