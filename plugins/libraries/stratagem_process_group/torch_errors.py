"""Sentences for errors of torch and DeepSpeed about models that a strategy cannot take as they are."""

from __future__ import annotations

from traceback import walk_tb

from stratagem.errors import ConfigError

#: By a part of the engine's message: what was found, what is expected, and what to do.
_SENTENCES = {
    "of bounds for storage of size 0": (
        "backward came to a layer whose parameters are not gathered: torch does not see that tensors leave this unit",
        "units that take and return tensors, or tuples, lists, dictionaries and dataclasses of them",
        "return one of these in place of an object of a class of your own, or leave this layer out of the units",
    ),
    "vars() argument must have __dict__ attribute": (
        "a layer returned an object of a class with __slots__, in which DeepSpeed does not find tensors",
        "tensors, or tuples, lists, dictionaries and dataclasses of them", "return one of these",
    ),
    "is not supported on ScriptModules": (
        "the model has a part that torch.jit.script compiled, and this strategy adds hooks to each layer",
        "layers in Python", "script the trained model instead, or choose a strategy with replicas, such as ddp",
    ),
    "trying to differentiate twice a function": (
        "gradients of gradients go through a function that is once_differentiable, or the cross-entropy of a cut head",
        "a penalty of outputs that do not come from it", "leave the head out of the plan",
    ),
    "Attempted to use an uninitialized parameter": (
        "the model has lazy layers, such as LazyLinear, whose parameters have no shape yet",
        "parameters with shapes before ranks share them",
        "call the layers once with a batch in configure_model or in the constructor",
    ),
}  # fmt: skip


def explained(error: BaseException) -> BaseException:
    """Return a sentence in place of `error`, if torch or DeepSpeed raised one that has a sentence."""
    raised_in = ["", *(frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))][-1]
    for part, (found, expected, do) in _SENTENCES.items():
        if part in str(error) and raised_in.startswith(("torch.", "deepspeed.")):
            sentence = ConfigError(found, expected=expected, do=do)
            sentence.__cause__ = error
            return sentence
    return error
