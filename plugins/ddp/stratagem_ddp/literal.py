"""Convert DDP communication hooks of torch (callables with a state) to comm hook plugins.

A hook of torch that has a plugin becomes that plugin: it works on every device and backend, with any number of buckets,
and its state is saved. Any other callable is called as DDP would call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.errors import ConfigError, PluginError, shown
from stratagem_buckets import Bucket, CommHook

if TYPE_CHECKING:
    from collections.abc import Generator

#: torch's hooks and wrappers, and the plugins with the same algorithm.
_HOOKS = {
    "allreduce_hook": "allreduce",
    "fp16_compress_hook": "fp16_compress",
    "bf16_compress_hook": "bf16_compress",
    "noop_hook": "noop",
    "powerSGD_hook": "powersgd",
    "batched_powerSGD_hook": "batched_powersgd",
    "post_localSGD_hook": "post_localsgd",
}
_WRAPPERS = {"fp16_compress_wrapper": "fp16_compress", "bf16_compress_wrapper": "bf16_compress"}
#: Attributes of torch's states that are options of the plugins.
_POWERSGD = (
    "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start",
    "orthogonalization_epsilon",
)  # fmt: skip
_STATES = {"powersgd": _POWERSGD, "batched_powersgd": _POWERSGD, "post_localsgd": ("start_localSGD_iter",)}

_PATH = "strategy.ddp"
_SIGNATURE = "a callable of (state, bucket) that returns a future of the averaged bucket"


def check(hook: Any, state: Any, wrapper: Any, period: int | None) -> None:
    """Refuse what DDP would refuse later, or ignore.

    Raises:
        ConfigError: a state, wrapper or period without the hook that uses it; a callable with another signature.
    """
    if hook is None:
        for name, value in (
            ("ddp_comm_state", state),
            ("ddp_comm_wrapper", wrapper),
            ("model_averaging_period", period),
        ):
            if value is not None:
                raise ConfigError(
                    f"{_PATH}.{name} is {_name(value)} without a ddp_comm_hook",
                    expected="both, or none",
                    do="drop it, or set ddp_comm_hook",
                )
        return
    _check_signature("ddp_comm_hook", hook, 2, _SIGNATURE)
    if wrapper is not None:
        _check_signature("ddp_comm_wrapper", wrapper, 1, "a callable that takes a hook and returns one")
        if _ours(wrapper, _WRAPPERS) is None:
            _check_signature("ddp_comm_wrapper(ddp_comm_hook)", wrapper(hook), 2, _SIGNATURE)
    averages = _ours(hook, _HOOKS) == "post_localsgd"
    if averages and period is None:
        raise ConfigError(
            f"{_PATH}.ddp_comm_hook is {_name(hook)} without a model_averaging_period",
            expected="the number of steps between two averages of the parameters",
        )
    if period is not None and not averages:
        raise ConfigError(
            f"{_PATH}.model_averaging_period is {period} and ddp_comm_hook is {_name(hook)}",
            expected="torch's post_localSGD_hook, the only one that averages parameters", do="drop it",
        )  # fmt: skip


def plugins(hook: Any, state: Any, wrapper: Any, period: int | None) -> list[Any]:
    """Return the comm hooks that implement these arguments of DDP."""
    if hook is None:
        return []
    name, under = _ours(hook, _HOOKS), _ours(wrapper, _WRAPPERS)
    if name is None or (wrapper is not None and under is None):
        return [TorchHook(hook=hook, state=state, wrapper=wrapper)]
    options = _options(name, state)
    if period is not None:
        options["model_averaging_period"] = period
    if name == "post_localsgd" and under is not None:
        return [{"name": under}, {"name": name, **options}]  # it does not send through another hook
    return [{"name": name, **options}, *([{"name": under}] if under is not None else [])]


def _options(name: str, state: Any) -> dict[str, Any]:
    wanted = _STATES.get(name)
    if wanted is None:
        if state is not None:
            raise ConfigError(
                f"{_PATH}.ddp_comm_state is {_name(state)}, which {name} does not use", expected="None", do="drop it"
            )
        return {}
    missing = [option for option in wanted if not hasattr(state, option)]
    if missing:
        raise ConfigError(
            f"{_PATH}.ddp_comm_state is {_name(state)}", expected=f"torch's state for its hook, with {missing[0]}"
        )
    if getattr(state, "process_group", None) is not None:
        raise ConfigError(
            f"{_PATH}.ddp_comm_state has a process_group", expected="None: the processes of the run", do="leave it out"
        )
    options = {option: getattr(state, option) for option in wanted}
    if getattr(state, "subgroup", None) is not None:
        options["subgroup_size"] = torch.distributed.get_world_size(state.subgroup)
    return options


@define(eq=False, kw_only=True)
class TorchHook(CommHook):
    """Call a hook as `DistributedDataParallel.register_comm_hook` does: with its state and a bucket."""

    outermost = True
    innermost = True

    #: Returns a future of the averaged bucket.
    hook: Callable[[Any, Any], Any]
    #: Its first argument.
    state: Any = None
    #: Wraps `hook`.
    wrapper: Callable[[Any], Any] | None = None

    _wrapped: Any = field(init=False, default=None)

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Generator[Any, Any, torch.Tensor]:
        if self._wrapped is None:
            self._wrapped = self.hook if self.wrapper is None else self.wrapper(self.hook)
        future = self._wrapped(self.state, _GradBucket(bucket))
        if not isinstance(future, torch._C.Future):
            raise PluginError(
                f"{_PATH}.ddp_comm_hook {_name(self.hook)} returned a {type(future).__name__}",
                expected="a torch.futures.Future of the averaged bucket",
            )
        result = yield future
        result = result[0] if isinstance(result, list) else result  # the future of a collective has a list
        fits = isinstance(result, torch.Tensor) and result.shape == bucket.buffer.shape
        return bucket.buffer.copy_(result) if fits else result  # DDP casts, too

    def __getstate__(self) -> dict[str, Any]:
        return {"hook": self.hook, "state": self.state, "wrapper": self.wrapper}  # not `_wrapped`, a closure

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs generates it


class _GradBucket:
    """A bucket with the methods of `torch.distributed.GradBucket`, which has no Python constructor."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._buffer = bucket, bucket.buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._bucket.is_last

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters)

    def gradients(self) -> list[torch.Tensor]:
        if self._buffer.numel() != self._bucket.buffer.numel():
            return []
        sizes = [gradient.numel() for gradient in self._bucket.gradients]
        parts = self._buffer.split(sizes) if sizes else ()
        return [part.view_as(like) for part, like in zip(parts, self._bucket.gradients, strict=True)]


def _ours(function: Any, table: dict[str, str]) -> str | None:
    """Return the entry of `table` for a hook or wrapper of torch; None for any other function."""
    module = getattr(function, "__module__", None) or ""
    if not module.startswith("torch.distributed.algorithms.ddp_comm_hooks"):
        return None
    return table.get(getattr(function, "__name__", ""))


def _check_signature(option: str, function: Any, num_arguments: int, expected: str) -> None:
    try:
        fits = callable(function)
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        title = f"{_name(function)}{inspect.signature(function)}" if inspect.isfunction(function) else _name(function)
        raise ConfigError(f"{_PATH}.{option} is {title}", expected=expected)


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or shown(value)
