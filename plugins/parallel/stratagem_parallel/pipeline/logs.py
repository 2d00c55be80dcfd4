"""What the last stage logs for each micro-batch, combined for the batch and published on all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem.errors import ConfigError
from stratagem_microbatches import Entry


@define
class MicrobatchLog:
    """Replaces a module's `log` during the step of one micro-batch, and keeps the calls."""

    entries: list[Entry] = field(factory=list)

    def __call__(self, name: str, value: Any, **options: Any) -> None:
        if all(callable(getattr(value, each, None)) for each in ("update", "compute", "reset")):
            raise ConfigError(
                f"log({name!r}) got a {type(value).__name__} in training_step under a pipeline, where only the last "
                "stage has outputs",
                expected="a number", do="log what it computes for the batch, or use it in validation_step",
            )  # fmt: skip
        reduce_fx = options.get("reduce_fx", "mean")
        if callable(reduce_fx) and "<" in getattr(reduce_fx, "__qualname__", ""):
            raise ConfigError(
                f"log({name!r}) got a reduce_fx that is defined within a function, and the ranks of a pipeline send it",
                expected="mean, sum, max, min, or a function at the top of a module",
            )
        self.entries.append((name, value.detach() if isinstance(value, Tensor) else value, options))

    @contextmanager
    def of(self, module: Any) -> Iterator[None]:
        """Within, `module` logs here."""
        replaces = callable(getattr(type(module), "log", None))
        before = module.__dict__.get("log")
        if replaces:
            module.__dict__["log"] = self
        try:
            yield
        finally:
            if replaces:
                module.__dict__.pop("log", None)
                if before is not None:
                    module.__dict__["log"] = before


#: Dtypes of losses.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@define
class StepResults:
    """What the last stage tells the other ranks at the end of each step, in one message of a fixed size."""

    #: The names and options of the values of the last step, and whether the output has more than the loss.
    _known: list[tuple[str, dict[str, Any]]] = field(factory=list)

    def exchange(
        self, loss: Tensor | None, entries: list[Entry], extras: Any, among: Any, last: int, device: torch.device
    ) -> tuple[Tensor, list[Entry], Any]:
        """Return the loss, the logged values and the rest of the output, which rank `last` gives. Collective.

        A message of floats has the loss and the values, while their names and options are those of the step before;
        else an object follows. An int64 passes through a float64 in it: exact below 2 to the power of 53. No host waits
        for its GPU: the loss arrives there.
        """
        is_last = among.rank == last
        flags = torch.zeros(2, dtype=torch.float64)
        values = torch.zeros(1 + len(self._known), dtype=torch.float64, device=device)
        names = [(name, options) for name, _, options in entries]
        if is_last:
            assert loss is not None, "the last stage has it"
            changed = names != self._known or extras is not None
            flags = torch.tensor([float(changed), _DTYPES.index(loss.dtype)], dtype=torch.float64)
            logged = [] if changed else [_double(value, device) for _, value, _ in entries]
            values[: 1 + len(logged)] = torch.stack([_double(loss.detach(), device), *logged])
        flags, values = send_both(flags, values, lambda message: among.unchecked.broadcast(message, last))
        if flags[0]:
            sent = among.broadcast_object((entries, extras) if is_last else None, last)
            entries, extras = (entries, extras) if is_last else sent
            self._known = [(name, options) for name, _, options in entries]
        elif not is_last:
            entries = [(n, v.clone(), o) for (n, o), v in zip(self._known, values[1:], strict=True)]
        if loss is None:
            loss = values[0].to(_DTYPES[int(flags[1])])
        return loss, entries, extras


def _double(value: Any, device: torch.device) -> Tensor:
    """Return a number on `device`, without a wait."""
    if isinstance(value, Tensor) and value.device == device:
        return value.double().reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)


def send_both(host: Tensor, values: Tensor, send: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Send numbers that the `host` reads, and `values` of a device: in one message where both are on the CPU."""
    if host.device != values.device:
        return send(host), send(values)
    whole = send(torch.cat([host.to(values.dtype), values]))
    return whole[: len(host)], whole[len(host) :]
