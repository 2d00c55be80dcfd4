"""Checks of modules that step optimizers themselves, and of optimizers that evaluate a closure."""

from __future__ import annotations

from stratagem.api.capabilities import CLOSURE_OPTIMIZERS, CUSTOM_STEP, MANUAL_OPTIMIZATION, MULTIPLE_OPTIMIZERS
from stratagem_testing.reference import (
    ByHand,
    CustomStep,
    Gan,
    Halves,
    Lbfgs,
    Net,
    train_gan_plainly,
    train_lbfgs_plainly,
    train_module_plainly,
)
from stratagem_testing.strategy.base import StrategyChecks


class OptimizationChecks(StrategyChecks):
    """Manual optimization, several optimizers, closures, and a step of the module's own."""

    def test_manual_optimization(self, world_size: int) -> None:
        batches = self.batches(6)
        self._require(MANUAL_OPTIMIZATION, world_size, ByHand)

        self._compare(self._train(world_size, ByHand, batches), train_module_plainly(self.maker(Net)(), batches)[0])

    def test_several_optimizers(self, world_size: int) -> None:
        """A GAN: two optimizers stepped by the module, each loss with gradients for a part of the model."""
        batches = self.batches(6)
        self._require(MANUAL_OPTIMIZATION, world_size, ByHand)
        self._require(MULTIPLE_OPTIMIZERS, world_size, Gan)

        self._compare(self._train(world_size, Gan, batches), train_gan_plainly(batches, self.maker(Gan)()))

    def test_several_optimizers_in_one_step(self, world_size: int) -> None:
        """What happens once a step must not happen once for each optimizer."""
        batches = self.batches(6)
        self._require(MULTIPLE_OPTIMIZERS, world_size, Halves)

        self._compare(self._train(world_size, Halves, batches), train_module_plainly(self.maker(Net)(), batches)[0])

    def test_closure_optimizers(self, world_size: int) -> None:
        """LBFGS in double precision: it evaluates the model several times in a step."""
        batches = [tuple(tensor.double() for tensor in batch) for batch in self.batches(3)]
        self._require(CLOSURE_OPTIMIZERS, world_size, Lbfgs)

        self._compare(self._train(world_size, Lbfgs, batches), train_lbfgs_plainly(batches))

    def test_custom_step(self, world_size: int) -> None:
        """A module's own `backward` and `optimizer_step` are called, once each."""
        batches = self.batches(6)
        self._require(CUSTOM_STEP, world_size, CustomStep)

        reference, _ = train_module_plainly(self.maker(lambda: Net(lr=Net().lr / 2))(), batches)
        self._compare(self._train(world_size, CustomStep, batches), reference)
