"""What a precision must do: use the dtypes of its policy, train within their rounding, and leave no global state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.api.capabilities import LOSS_SCALING, MULTI_PROCESS
from stratagem.api.kinds import PrecisionPolicy
from stratagem_testing.conformance import Conformance
from stratagem_testing.expectations import expect_equal, expect_weights
from stratagem_testing.reference import (
    Batch,
    Gan,
    Halves,
    Net,
    data,
    joined_batches,
    loss_of,
    part,
    train_gan_plainly,
    train_module_plainly,
)
from stratagem_testing.sharing import in_turn
from stratagem_testing.training import outcome, share, train, weights_of, weights_on_all_ranks

_BATCH = 24
_SCALED = "`scale_loss` must scale once, and each gradient be unscaled once before its step; look at `step_context`"
_SKIPPED = "led to a step: the loss scale begins too high, or does not shrink after an overflow"
_UNSCALED = "unscale gradients before `clip_gradients`"


class PrecisionConformance(Conformance):
    """Trains small models on one device and on two ranks, and compares with fp32 within the policy's rounding error.

    class TestMyPrecision(PrecisionConformance):
        plugin = "my-precision"
    """

    kind = "precision"
    #: Largest relative difference of any weight from fp32 after a few steps; by default from the policy's dtypes.
    tolerance: ClassVar[float | None] = None

    # --- The policy ----------------------------------------------------------------------------------------------

    def test_its_policy_is_honest_about_loss_scaling(self) -> None:
        """`loss_scaling` is the same in the policy and in the capabilities."""
        policy, word = self.policy, LOSS_SCALING
        assert isinstance(policy, PrecisionPolicy), f"`policy` returned {policy!r}, expected a PrecisionPolicy"
        expect_equal(f"`policy().loss_scaling`, as {word!r} in `capabilities`", policy.loss_scaling, self.claims(word))

    def test_dtypes_are_those_of_the_policy(self) -> None:
        """The dtypes of parameters and buffers, and of a matrix product in training and in evaluation."""
        seen = self.run_in(_dtypes, 1, self._arguments(1), self.maker(_RecordsDtypes))[0]
        policy = self.policy

        stored, look = policy.param_dtype or torch.float32, "`step_context` must hold in training and in evaluation"
        expect_equal("dtypes of parameters, as in `policy`", seen["parameters"], {str(stored)})
        expect_equal("dtypes of a product, as in `policy`", seen["train"], {str(policy.compute_dtype or stored)}, look)
        expect_equal("dtypes of a product in evaluation", seen["validate"], seen["train"], look)

    def test_batches_keep_what_is_not_floating_point(self) -> None:
        """Integers, booleans, complex numbers, text and types of containers are not converted."""
        moved = self.run_in(_transfer, 1, self._arguments(1))[0]

        stored = str(self.policy.param_dtype or torch.float32)
        others = ["torch.int64", "torch.bool", "torch.complex64", "text", "tuple", "list"]
        expect_equal("a tensor's dtype after `transfer_batch`, as in `policy`", moved["float"], stored)
        expect_equal("what `transfer_batch` must not convert", moved["others"], others)

    # --- The same training as in fp32, except for rounding -------------------------------------------------------

    def test_trains_like_fp32(self, world_size: int) -> None:
        batches = joined_batches(8, _BATCH)

        results = self._train(world_size, Net, batches)

        difference = self._compare(
            results, lambda used: train_module_plainly(self.prepare(Net()), [batches[i] for i in used])[0]
        )
        narrow = {self.policy.compute_dtype, self.policy.param_dtype} & {torch.float16, torch.bfloat16}
        if narrow:
            assert difference > 1e-6, "weights equal those of fp32, as if all were computed in it; see `step_context`"

    def test_clips_the_unscaled_gradients(self, world_size: int) -> None:
        """Clipping by norm and by value gives the weights of plain fp32."""
        batches = joined_batches(8, _BATCH)
        by_value = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}

        chosen = [self._arguments(world_size, **each) for each in ({"gradient_clip_val": 0.5}, by_value)]
        ranks = self.run_in(in_turn, world_size, train, [(self.maker(Net), batches, each) for each in chosen])
        results_by_norm, results_by_value = zip(*ranks, strict=True)

        self._compare(
            results_by_norm,
            lambda used: train_module_plainly(self.prepare(Net()), [batches[i] for i in used], max_norm=0.5)[0],
            _UNSCALED,
        )
        self._compare(
            results_by_value,
            lambda used: train_module_plainly(self.prepare(Net()), [batches[i] for i in used], max_value=0.05)[0],
            _UNSCALED,
        )

    def test_returns_the_norm_before_clipping(self) -> None:
        batches = joined_batches(4, _BATCH)
        _, norms = train_module_plainly(self.prepare(Net()), batches)
        got = self.run_in(_norms, 1, self._arguments(1), self.maker(Net), batches)[0]

        said = f"`run.clip_gradients` returned norms {got}, expected {norms[0]} as in plain PyTorch; {_UNSCALED}"
        assert any(abs(norm / norms[0] - 1) < 0.05 for norm in got), said

    def test_accumulates(self, world_size: int) -> None:
        batches = joined_batches(12, _BATCH)
        results = self._train(world_size, Net, batches, accumulate_grad_batches=2)
        used = results[0]["used"]
        # `used` lacks the last batch of each window whose step was skipped.
        kept = [batch for first in range(0, 12, 2) for batch in batches[first : first + 2] if first + 1 in used]

        self._compare(results, lambda _: train_module_plainly(self.prepare(Net()), kept, accumulate=2)[0])

    def test_two_optimizers_by_hand(self) -> None:
        """A GAN: the precision's state for one optimizer's step must not affect the other's."""
        batches = joined_batches(6, _BATCH)
        results = self._train(1, Gan, batches)
        if len(results[0]["used"]) < len(batches):
            pytest.skip(
                "its first steps overflow, as with loss scaling, and which optimizer's was skipped is not recorded"
            )

        self._compare(results, lambda _: train_gan_plainly(batches, self.prepare(Gan())))

    def test_small_gradients_survive(self) -> None:
        """Gradients around 1e-8 are zero in fp16, unless the loss was scaled and the gradients unscaled."""
        if not self.claims(LOSS_SCALING):
            pytest.skip("it does not scale the loss")
        expected = _tiny_gradients(self.prepare(Net()))
        got = self.run_in(_scaled_gradients, 1, self._arguments(1), self.maker(Net))[0]

        error = float((got - expected).norm() / expected.norm())
        assert error < 0.05, f"gradients of 1e-8 differ by {error:.1e}: `scale_loss` scales too little, or {_UNSCALED}"

    def test_an_overflow_skips_the_step_on_every_rank(self, world_size: int) -> None:
        """One rank's loss is infinite once; also with a strategy that keeps gradients on their rank."""
        if not self.claims(LOSS_SCALING):
            pytest.skip("it does not scale the loss")
        batches = joined_batches(12, _BATCH)
        used_without = self._train(world_size, Net, batches)[0]["used"]
        assert used_without, f"none of {len(batches)} batches {_SKIPPED}"
        bad = used_without[len(used_without) // 2]
        chosen = [(self._arguments(world_size), strategy, batches, bad) for strategy in ("auto", _Local())]
        for results in zip(*self.run_in(in_turn, world_size, _train_overflowing, chosen), strict=True):
            used = [result["used"] for result in results]
            said = f"gradients overflowed on a rank in batch {bad}, and steps were taken in batches {used[0]}"
            assert all(each == used[0] for each in used), f"{said}, on others {used[1:]}; all-reduce what overflowed"
            assert bad not in used[0], f"{said}; `step_optimizers` must skip it"
            assert used[0][-1] == len(batches) - 1, f"{said}, not in the last; reduce the loss scale after an overflow"
            finite = all(torch.isfinite(tensor).all() for tensor in results[0]["weights"].values())
            assert finite, f"{said}; weights are not finite"

    def test_an_overflow_of_one_optimizer_skips_all(self) -> None:
        """Gradients of half of the parameters are infinite once: no parameter moves in that step."""
        if not self.claims(LOSS_SCALING):
            pytest.skip("it does not scale the loss")
        for bad, moved in self.run_in(_moved_by_half_an_overflow, 1, self._arguments(1)):
            said = f"gradients of one of two optimizers overflowed in step {bad}, and parameters moved in it: {moved}"
            assert not moved, f"{said}; answer `step_optimizers`, and decide over all optimizers before any steps"

    # --- State ---------------------------------------------------------------------------------------------------

    def test_save_and_continue(self) -> None:
        """Train half, save, resume in a new process: the weights equal those without interruption."""
        batches = joined_batches(10, _BATCH)
        whole = self._train(1, Net, batches)
        with tempfile.TemporaryDirectory(prefix="stratagem-test-") as folder:
            path = Path(folder) / "half.ckpt"
            self.run_in(_first_half, 1, self._arguments(1), self.maker(Net), batches[:5], path)
            rest = self.run_in(_second_half, 1, self._arguments(1), self.maker(lambda: Net(seed=3)), batches[5:], path)

        look = "`state_dict` must have what training changes, such as the loss scale, and `load_state_dict` restore it"
        expect_weights(rest[0], whole[0]["weights"], "a run without interruption", 1e-6, look)

    def test_leaves_no_trace(self) -> None:
        """torch's default dtype and autocast are restored after a run, and after an error within a step."""
        for after in self.run_in(_global_state, 1, self._arguments(1))[0]:
            expect_equal("what `step_context` must restore", after, {"dtype": "torch.float32", "autocast": False})

    def test_validates_like_fp32(self, world_size: int) -> None:
        samples = data(world_size * 12, seed=8)
        wanted = loss_of(self.prepare(Net())(samples[0]), samples[1]).item()
        limit = 2 * self._tolerance()

        for got in self.run_in(_validate, world_size, self._arguments(world_size), self.maker(Net), samples):
            assert got == pytest.approx(wanted, rel=max(limit, 1e-5)), f"val_loss is {got}, expected {wanted} of fp32"

    # --- Helpers -------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> PrecisionPolicy:
        policy: PrecisionPolicy = self.choice().plugin.policy()
        return policy

    def _tolerance(self) -> float:
        return self.tolerance if self.tolerance is not None else tolerance_of(self.policy)

    def _train(self, world_size: int, make: Callable[[], sg.Module], batches: list[Batch], **arguments: Any) -> Any:
        return self.run_in(train, world_size, self.maker(make), batches, self._arguments(world_size, **arguments))

    def _compare(self, results: Any, reference: Callable[[list[int]], dict[str, Tensor]], look: str = _SCALED) -> float:
        """Assert equal weights on all ranks, close to ``reference(batches used)``; return the difference."""
        __tracebackhide__ = True
        first = weights_on_all_ranks(results, "skip the same steps on all ranks")
        used = results[0]["used"]
        assert len(used) >= 2, f"only batches {used} {_SKIPPED}"
        return expect_weights(first, reference(used), "plain fp32", self._tolerance(), look, "tolerance")


def tolerance_of(policy: PrecisionPolicy) -> float:
    """Return the relative tolerance of weights after a few steps in `policy`, compared with fp32."""
    stored, computed = policy.param_dtype or torch.float32, policy.compute_dtype or torch.float32
    coarse: float = max(torch.finfo(stored).eps * 40, torch.finfo(computed).eps * 8)
    return max(coarse, 1e-6)


# --- In each process ---------------------------------------------------------------------------------------------


class _Local(sg.Strategy):
    """Keeps gradients on their rank, as a sharded strategy does, where an overflow is not seen by other ranks."""

    capabilities = sg.Capabilities(provides={MULTI_PROCESS})

    @sg.hookimpl
    def wrap_model(self, module: nn.Module) -> nn.Module:
        return module


class _Overflowing(Net):
    bad, bad_rank = 0, 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == self.bad and self.global_rank == self.bad_rank else loss


def _train_overflowing(rank: int, size: int, choose: dict[str, Any], strategy: Any, batches: Any, bad: int) -> Any:
    module = _Overflowing()
    module.bad, module.bad_rank = bad, size - 1
    return train(rank, size, lambda: module, batches, choose | {"strategy": strategy})


class _HalfOverflowing(Halves):
    """The gradients of one of two optimizers are infinite in the first step after one that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.moved, self.before = -1, list[str](), dict[str, Tensor]()
        self.get_parameter(next(name for name, _ in self.named_parameters())).register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        position = self.trainer.position
        if self.bad < 0 and position.global_step > position.skipped_steps:
            self.bad = position.global_step
            return torch.full_like(gradient, torch.inf)
        return gradient

    def on_train_batch_start(self) -> None:
        self.before = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def on_train_batch_end(self) -> None:
        if self.bad == self.trainer.position.global_step - 1:
            self.moved += [name for name, each in self.named_parameters() if not torch.equal(each, self.before[name])]


def _moved_by_half_an_overflow(rank: int, size: int, choose: dict[str, Any]) -> tuple[int, list[str]]:
    module = _HalfOverflowing()
    train(rank, size, lambda: module, joined_batches(12, _BATCH), choose)
    assert module.bad >= 0, f"none of 12 batches {_SKIPPED}"
    return module.bad, module.moved


class _RecordsDtypes(Net):
    """Records the dtype of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {"train": set(), "validate": set()}
        self.net[2].register_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.seen["train" if self.training else "validate"].add(str(output.dtype))


def _dtypes(rank: int, size: int, choose: dict[str, Any], make: Any) -> Any:
    trainer, module = sg.Trainer(**choose), make()
    batches = share(trainer, joined_batches(3, _BATCH))
    trainer.fit(module, batches, batches)
    return module.seen | {"parameters": {str(p.dtype) for p in module.parameters() if p.is_floating_point()}}


def _transfer(rank: int, size: int, choose: dict[str, Any]) -> Any:
    with sg.Run(accelerator=choose["accelerator"], precision=choose["precision"]) as run:
        number = torch.ones(2)
        batch = {"f": number, "o": [torch.ones(2).long(), number > 0, torch.ones(2) * 1j, "text", (number,), [number]]}
        moved = run.transfer(batch)
    kinds = [str(each.dtype) if isinstance(each, Tensor) else each for each in moved["o"]]
    return {
        "float": str(moved["f"].dtype),
        "others": [kind if isinstance(kind, str) else type(kind).__name__ for kind in kinds],
    }


def _own_run(choose: dict[str, Any], make: Any) -> tuple[sg.Run, Any, Any]:
    run = sg.Run(accelerator=choose["accelerator"], precision=choose["precision"])
    module = make()
    model, optimizer = run.setup(module, module.configure_optimizers())
    return run, model, optimizer


def _norms(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any) -> list[float]:
    run, model, optimizer = _own_run(choose, make)
    norms = []
    for _ in range(8):  # the same batch, until a loss scale that overflows has been reduced
        for x, y in run.dataloader(part(batches[:1], 0, 1)):
            run.backward(loss_of(model(x), y))
            norms.append(float(run.clip_gradients(optimizer, max_norm=1e-9)))
            if run.optimizer_step(optimizer):
                return norms
            optimizer.zero_grad()
    return norms


def _tiny_gradients(module: sg.Module, run: Any = None, model: Any = None) -> Tensor:
    x, y = data(_BATCH, seed=3)
    loss = loss_of((model or module)(x), y) * 1e-8
    loss.backward() if run is None else run.backward(loss)
    return torch.cat([p.grad.flatten().float() for p in module.parameters() if p.grad is not None])


def _scaled_gradients(rank: int, size: int, choose: dict[str, Any], make: Any) -> Tensor:
    run, model, optimizer = _own_run(choose, make)
    _tiny_gradients(run.module, run, model)  # type: ignore[arg-type]
    run.clip_gradients(optimizer, max_value=1e30)  # unscales
    assert run.module is not None
    return torch.cat([p.grad.flatten().float() for p in run.module.parameters() if p.grad is not None])


def _first_half(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, path: Path) -> None:
    trainer = sg.Trainer(**choose)
    trainer.fit(make(), batches)
    trainer.save_checkpoint(path)


def _second_half(rank: int, size: int, choose: dict[str, Any], make: Any, batches: Any, path: Path) -> Any:
    trainer = sg.Trainer(**(choose | {"max_epochs": 2}))
    trainer.fit(make(), batches, ckpt_path=path)
    return weights_of(trainer)


def _global_state(rank: int, size: int, choose: dict[str, Any]) -> list[dict[str, Any]]:
    class Raises(Net):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            raise ValueError("out of order")

    found = []
    for make in (Net, Raises):
        outcome(lambda make=make: train(rank, size, make, joined_batches(2, _BATCH), choose))  # type: ignore[misc]
        found.append({"dtype": str(torch.get_default_dtype()), "autocast": torch.is_autocast_enabled("cpu")})
    return found


def _validate(rank: int, size: int, choose: dict[str, Any], make: Any, samples: Any) -> float:
    from stratagem_testing.training import loader

    loss: float = sg.Trainer(**choose).validate(make(), loader(samples, 6))[0]["val_loss"]
    return float(loss)
