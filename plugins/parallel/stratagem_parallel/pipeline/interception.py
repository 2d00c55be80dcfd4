"""Take the place of the pipelined module's forward, so that the user's step runs unchanged.

[Note: the step of a micro-batch]
Each rank runs `training_step` up to the call of the pipelined module, with whose arguments its stage computes. The rank
of the last stage runs `training_step` as a whole, with the output of its stage as what that call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stratagem.errors import ConfigError


class Captured(BaseException):
    """The pipelined module was called; no `except Exception` of a step may catch it."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.options = arguments, options


class Interception:
    """What the pipelined module does when it is called.

    Args:
        module: the pipelined module.
        name: of it in the user's module.
        otherwise: what to call outside the steps of micro-batches.
    """

    def __init__(self, module: nn.Module, name: str, otherwise: Callable[..., Any]) -> None:
        self.module, self.name, self.otherwise = module, name or type(module).__name__, otherwise
        self._answer: list[Callable[..., Any]] | None = None
        self._captures = False
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._captures:
            raise Captured(arguments, options)
        if self._answer is None:
            return self.otherwise(*arguments, **options)
        if not self._answer:
            raise ConfigError(
                f"training_step called {self.name} twice under a pipeline", expected="one call, to which the schedule "
                "gives the output", do="call it once and use its output twice",
            )  # fmt: skip
        return self._answer.pop()(*arguments, **options)

    def __deepcopy__(self, memo: Any) -> Any:
        return _Copied()

    def __reduce__(self) -> Any:
        return _Copied, ()

    def close(self) -> None:
        """Let the module have its own forward again."""
        self.module.__dict__.pop("forward", None)
        if self._before is not None:
            self.module.__dict__["forward"] = self._before

    def captured(self, step: Callable[[], Any]) -> Captured:
        """Return the arguments with which `step` calls the module, without what follows."""
        self._captures = True
        try:
            step()
        except Captured as captured:
            return captured
        finally:
            self._captures = False
        raise self._not_called()

    def answered(self, step: Callable[[], Any], answer: Callable[..., Any]) -> Any:
        """Return what `step` returns when `answer` takes the module's place in it."""
        before, self._answer = self._answer, [answer]
        try:
            result = step()
            if self._answer:
                raise self._not_called()
            return result
        finally:
            self._answer = before

    def _not_called(self) -> ConfigError:
        return ConfigError(
            f"training_step did not call {self.name}, whose layers are the stages of the pipeline",
            expected="one call of it",
            do=f"call self.{self.name}(...) rather than its layers, or set strategy.parallel.pipeline to 1",
        )


class _Copied:
    """The forward of a copy of a pipelined module, of which every rank has a part."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "a copy of a module was called whose layers are the stages of a pipeline",
            expected="a call of the original",
            do="load its state (Trainer.save_checkpoint) into a new model",
        )  # fmt: skip
