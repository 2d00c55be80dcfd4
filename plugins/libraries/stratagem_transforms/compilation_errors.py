"""Explain in one sentence what torch's compiler raises at a step."""

from __future__ import annotations

import sys
from typing import Any

from stratagem.errors import ConfigError, shown


def explained(error: BaseException, backend: Any, *, fullgraph: bool) -> BaseException:
    """Return the error to raise in place of `error`: one sentence, caused by it, if torch's compiler raised it."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        return error
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return error
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, BackendCompilerFailed):
        reason = [line.rstrip(".") for line in str(error).splitlines() if line.strip()][1:2]
        new = ConfigError(
            f"compile.backend is {shown(backend)}, which failed ({reason[0] if reason else said})",
            expected="a backend that compiles this model",
            do='use compile={"backend": "aot_eager"} to see whether the model or the backend is the cause',
        )
    elif fullgraph:
        new = ConfigError(
            f"compile.fullgraph is True, and the code cannot be compiled as one graph ({said})",
            expected="code without calls that split the graph, such as self.log or what sends to other ranks",
            do="name layers without such calls in compile.modules, or drop fullgraph",
        )
    else:
        return error  # type: ignore[no-any-return]
    new.__cause__ = error
    return new
