"""Average gradients over replicas in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.errors import ConfigError
from stratagem_process_group.messages import local_tensor
from stratagem_torchft import replica_state
from stratagem_torchft.messages import pack, trained_parameters, unpack, with_layout_of
from stratagem_torchft.replica import TorchFTStrategy

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class TorchFTDDPStrategy(TorchFTStrategy):
    """Average gradients over the replicas that are alive after each backward, and commit the step or repeat it.

    All replicas have equal weights after each step, and train the batch of the same number.
    """

    path: ClassVar[str] = "strategy.torchft_ddp"

    #: The batch that began the accumulation window.
    _window_start: int = field(init=False, default=0)
    _in_window: bool = field(init=False, default=False)
    #: The gradients of this step were averaged.
    _is_averaged: bool = field(init=False, default=False)

    def _begin(self, run: RunContext) -> None:
        self._connect(run)
        self._note_window()
        self._agree_on_start(run)
        if self._received is not None:
            self._apply(starts=True)

    def _note_window(self) -> None:
        self._window_start = 0 if self._trainer is None else self._trainer.position.batches_done

    def _progress(self) -> dict[str, Any]:
        # A replica that joins while a failed exchange is repeated trains the window of which these are the gradients.
        return replica_state.progress_of(self._trainer) | {"batches_done": self._window_start}

    @hookimpl
    def step_context(self, stage: str, run: RunContext) -> None:
        if stage != "train" or self._in_window or run.module is None:
            return
        if self._manager is None:  # a loop of the user's has no on_train_start
            self._begin(run)
        self._in_window, self._is_averaged = True, False
        self._note_window()
        if not self._has_quorum:
            self._start_quorum()
            if self._received is not None:
                self._apply(starts=False)

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        done = yield
        if run.sync_gradients:
            self._average(run)
        return done

    def _average(self, run: RunContext) -> None:
        if not self._has_quorum:  # a loop of the user's calls backward several times for a step
            self._note_window()
            self._start_quorum()
        assert run.module is not None, "set before wrap_model"
        parameters = trained_parameters(run.module)
        gradients = {name: _gradient(parameter) for name, parameter in parameters.items()}
        used = torch.tensor([float(p.grad is not None) for p in parameters.values()], device=run.device)
        averaged = self._exchange(lambda: [*pack(gradients), used.clone()])
        self._in_window, self._is_averaged = False, True
        if averaged is None:  # the others committed this step, and this replica's optimizer steps in vain
            return
        *messages, used = averaged
        anywhere = dict(zip(parameters, used.tolist(), strict=True))
        for name, average in unpack(messages, gradients).items():
            if anywhere[name] == 0:
                continue
            gradients[name].copy_(average)
            if parameters[name].grad is None:
                parameters[name].grad = with_layout_of(gradients[name], parameters[name])

    @hookimpl(wrapper=True)
    def step_optimizers(self, run: RunContext) -> Generator[None, bool, bool]:
        if not self._is_averaged:
            raise ConfigError(
                "an optimizer step began, and no gradients were averaged over the replicas",
                expected="a backward through the run before each step: the other replicas wait for its gradients",
                do="return a loss multiplied by zero to skip a batch; in a loop of your own call run.backward(loss)",
            )
        stepped = yield
        self._is_averaged = False
        if self._received is not None:
            self._apply(starts=False, pending=int(run.owns_loop))
            return False
        return stepped

    @hookimpl
    def teardown(self) -> None:
        super().teardown()
        self._in_window = self._is_averaged = False


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient, sharing its memory; zeros without one."""
    return torch.zeros_like(local_tensor(parameter)) if parameter.grad is None else local_tensor(parameter.grad)
