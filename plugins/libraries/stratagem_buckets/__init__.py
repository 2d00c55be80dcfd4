"""Comm hooks: how buckets of gradients are averaged over the ranks.

The author of a comm hook imports this module. A strategy that sends buckets calls `stratagem_buckets.reducer`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import define, frozen

from stratagem.api.capabilities import GRADIENT_BUCKETS, Capabilities
from stratagem.api.kinds import Kind, Plugin
from stratagem.api.markers import hookimpl, hookspec
from stratagem.api.per_run import PerRun
from stratagem.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch
    from torch import Tensor, nn

    from stratagem.api.context import RunContext
    from stratagem.api.world import Collectives
    from stratagem.stack.plugins import Choice, Stack


@frozen(eq=False, kw_only=True)
class Bucket:
    """A flat buffer of gradients to average over the ranks; the argument of a comm hook.

    For a hook that is stacked under another one, `buffer` is what the hook above sends, and `parameters` is empty.
    Exactly one bucket per backward must set `is_last`; without it training hangs.
    """

    #: 1-D, any floating dtype; a hook may overwrite it.
    buffer: torch.Tensor
    #: The same index is the same bucket on every rank. DDP lays its buckets out once more after the first step of a
    #: process: an index may then have other parameters, or the same in another order. Below another hook an index may
    #: come several times in a step, with messages of different sizes.
    index: int = 0
    #: The last bucket of this backward.
    is_last: bool = True
    #: The parameters whose gradients lie in `buffer`, in that order.
    parameters: tuple[torch.Tensor, ...] = ()
    #: Views into `buffer`, one for each parameter.
    gradients: tuple[torch.Tensor, ...] = ()


@hookspec
def reduce_bucket(bucket: Bucket, collectives: Collectives, run: RunContext) -> Generator[Any, Any, Tensor]:
    """Comm hooks, outermost first: a generator that returns ``bucket.buffer`` averaged over the ranks.

    If it yields a tensor, the value of the ``yield`` is the tensor averaged by the next hook of the stack, after the
    last hook by an all-reduce over the ranks of `collectives`. If it yields a future, such as that of
    ``collectives.all_to_all_async``, the value is the future's result. It may yield several times, equally often on all
    ranks. A plain function, without ``yield``, returns its result at once. The strategy composes the stack once
    (`stratagem_buckets.reducer.bucket_reducer`) and calls the implementations directly, not through pluggy.
    """


class Outcome:
    """What became of the buckets that one reducer averages."""

    #: The first error of a hook, for the strategy's caller: an engine may raise another one.
    failure: BaseException | None = None


#: One for each reducer that the strategy of a run has made for its module.
OUTCOMES: Final[PerRun[list[Outcome]]] = PerRun(list)


@define(eq=False, repr=False, kw_only=True)
class CommHook(Plugin):
    """Averages gradient buckets. Must implement `reduce_bucket`. Several can be combined; the first is outermost.

    A subclass that wraps `backward` itself gets the answer by ``yield from super().backward(run)``, `wrap_model` alike.
    """

    kind: ClassVar[str] = "comm_hook"
    identified_by_options: ClassVar[bool] = True
    #: It needs the gradients' shapes, which only the first hook gets.
    outermost: ClassVar[bool] = False
    #: It calls collectives itself, not through the next hook: it must be the last hook.
    innermost: ClassVar[bool] = False
    #: It yields exactly once for each bucket. It is then resumed while backward still computes, in another thread, for
    #: several buckets at the same time.
    single_message: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(requires={GRADIENT_BUCKETS})

    def statistics(self, run: Any) -> dict[str, float]:
        """Return metrics of this rank; called between two steps. No collectives.

        `run` is a `stratagem.api.context.RunContext`.
        """
        return {}

    @hookimpl(wrapper=True)
    def wrap_model(self, run: RunContext) -> Generator[None, nn.Module, nn.Module]:
        """Forget what became of the buckets of an earlier model."""
        OUTCOMES.of(run).clear()
        return (yield)

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        """Raise the error of a hook that ran in a thread of the backend, and refuse a strategy that calls none."""
        outcomes = OUTCOMES.of(run)
        try:
            answer = yield
        except Exception:
            _raise_failure(outcomes)
            raise
        if not outcomes and run.sync_gradients and run.stage == "train" and _is_trained(run.module):
            raise PluginError(
                f"{run.title_of(run.plugins_of(self.kind)[0])} was never applied: {run.title_of(run.strategy)} did not "
                "call bucket_reducer(run)",
                expected="every strategy that provides 'gradient-buckets' to call it",
                do="drop the comm hook, and report it to the strategy's author",
            )
        return answer


def _raise_failure(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        failure, outcome.failure = outcome.failure, None  # its traceback holds the run, which would stay
        if failure is not None:
            raise failure


def _is_trained(module: nn.Module | None) -> bool:
    return module is not None and any(parameter.requires_grad for parameter in module.parameters())


def _check_order(hooks: Sequence[Choice], _: Stack) -> None:
    """Refuse comm hooks in an order that cannot work."""
    names = [choice.name for choice in hooks]
    for word in ("outermost", "innermost"):
        rivals = [choice for choice in hooks if getattr(choice.plugin, word)]
        if len(rivals) > 1:
            end = "first" if word == "outermost" else "last"
            raise ConfigError(
                f"comm_hook is {names}, and {rivals[0]} and {rivals[1]} must both be the {end} of a stack",
                expected="one of the two",
            )
    for place, choice in enumerate(hooks):
        others = [name for name in names if name != choice.name]
        if choice.plugin.outermost and place > 0:
            raise ConfigError(
                f"comm_hook is {names}, and {choice} needs the shapes of the gradients, which only the first hook gets",
                expected=f"{[choice.name, *others]}",
            )
        if choice.plugin.innermost and place + 1 < len(names):
            raise ConfigError(
                f"comm_hook is {names}, and {choice} calls its own collectives, so {hooks[place + 1]} would get "
                "nothing",
                expected=f"{[*others, choice.name]}",
            )


COMM_HOOK: Final = Kind(
    "comm_hook", CommHook, duties=("reduce_bucket",), hooks=sys.modules[__name__], check=_check_order,
    conformance="stratagem_testing:CommHookConformance", module="comm_hooks", place=30,
    doc="How gradients are sent; a list stacks hooks, outermost first.",
)  # fmt: skip
