"""What a strategy wraps: a module whose forward runs a step of the user's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

#: Attribute of a module that was given as ``torch.compile(module)``: what compiles a function.
COMPILER = "_step_compiler"

#: Steps whose output goes through a method of the same name with ``_end``, if the module has one.
_STEPS = ("training_step", "validation_step", "test_step")


class StepModule(nn.Module):
    """What a strategy wraps: its forward runs a step of the user's module, so hooks on ``forward`` see whole steps."""

    _ends: dict[str, str]
    _compiled: dict[str, Any]

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

        # Plain attributes, looked up once: each step reads them.
        ends = {step: f"{step}_end" for step in _STEPS}
        self.__dict__["_ends"] = {step: end for step, end in ends.items() if callable(getattr(module, end, None))}
        self.__dict__["_compiled"] = {}

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        step = self._compiled.get(method) or self._step(method)  # as `step`, without another call
        output = step(*arguments, **options)
        return self.end(method, output) if method in self._ends else output

    def step(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Run `method` of the user's module, without ``{method}_end``."""
        step = self._compiled.get(method) or self._step(method)
        return step(*arguments, **options)

    def has_end(self, method: str) -> bool:
        """Whether the user's module defines ``{method}_end``."""
        return method in self._ends

    def end(self, method: str, output: Any) -> Any:
        """Return what the user's ``{method}_end`` makes of `output`."""
        return getattr(self.module, self._ends[method])(output)

    @property
    def compiles_steps(self) -> bool:
        """Whether the user's module was given as ``torch.compile(module)``, or `compile_steps` was called."""
        return self._compiler is not None

    def compile_steps(self, compiler: Callable[[Any], Any]) -> None:
        """Replace each step by what `compiler`, such as ``torch.compile(mode=...)``, makes of it at its first call."""
        self.__dict__["_own_compiler"], self.__dict__["_compiled"] = compiler, {}

    @property
    def _compiler(self) -> Callable[[Any], Any] | None:
        compiler: Callable[[Any], Any] | None = self.__dict__.get("_own_compiler")
        return compiler or self._modules["module"].__dict__.get(COMPILER)

    def _step(self, method: str) -> Any:
        step, compiler = getattr(self._modules["module"], method), self._compiler
        if compiler is None:
            return step
        self._compiled[method] = compiler(step)
        return self._compiled[method]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own_compiler"} | {"_compiled": {}}
