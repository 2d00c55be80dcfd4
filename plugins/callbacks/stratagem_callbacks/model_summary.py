"""Print a summary of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from torch import nn

from stratagem.api import hookimpl
from stratagem_trainer.api import Callback
from stratagem_trainer.api.validators import at_least_or_unlimited

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class ModelSummary(Callback):
    """Print a table of modules on rank 0: class, full number of parameters (also if sharded), trainable or frozen."""

    positional: ClassVar[tuple[str, ...]] = ("max_depth",)

    #: Levels of submodules to show; -1 shows all.
    max_depth: int = field(default=1, validator=at_least_or_unlimited(0))

    @hookimpl
    def on_fit_start(self, trainer: TrainerView, module: nn.Module) -> None:
        if trainer.is_global_zero:
            print_summary(module, self.max_depth, trainer.world_size if trainer.run.shards_parameters else 1)


def layers(module: nn.Module, max_depth: int) -> list[tuple[str, str, int, str]]:
    """Return name, class, number of parameters and ``train``, ``frozen`` or ``partly`` of each submodule."""
    rows = []
    for name, part in module.named_modules():
        depth = name.count(".") + 1 if name else 0
        if not name or (max_depth >= 0 and depth > max_depth):
            continue
        parameters = list(part.parameters())
        trainable = [parameter.requires_grad for parameter in parameters]
        mode = "" if not trainable else "train" if all(trainable) else "partly" if any(trainable) else "frozen"
        rows.append((name, type(part).__name__, sum(map(_size, parameters)), mode))
    return rows


def totals(module: nn.Module) -> dict[str, float]:
    """Return the number of parameters, of trainable ones, and their megabytes."""
    parameters = list(module.parameters())
    return {
        "parameters": sum(map(_size, parameters)),
        "trainable": sum(_size(p) for p in parameters if p.requires_grad),
        "megabytes": sum(_size(p) * p.element_size() for p in parameters) / 1e6,
    }


def _size(parameter: nn.Parameter) -> int:
    """Return the number of elements of the full parameter: with ZeRO stage 3 the module has an empty tensor."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size


def print_summary(module: nn.Module, max_depth: int, shards: int) -> None:
    """Print the table and the totals."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "class", box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("parameters", justify="right")
    table.add_column("")
    for name, kind, count, mode in layers(module, max_depth):
        table.add_row("  " * name.count(".") + name.rpartition(".")[2], kind, f"{count:,}" if count else "", mode)
    numbers: Any = totals(module)
    frozen = numbers["parameters"] - numbers["trainable"]
    text = f"{type(module).__name__}: {numbers['parameters']:,} parameters, {numbers['megabytes']:,.1f} MB"
    text += f", {frozen:,} frozen" if frozen else ""
    text += f", about {numbers['megabytes'] / shards:,.1f} MB on each of {shards} ranks" if shards > 1 else ""
    console = Console()
    console.print(table)
    console.print(text)
