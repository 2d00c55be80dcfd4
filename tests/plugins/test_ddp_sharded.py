"""What ddp_sharded alone promises: each rank keeps its share of gradients and optimizer state, in any launch mode."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

import stratagem as sg
from programs import scripts
from stratagem_ddp_sharded import ShardedDDPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _held(rank, world_size):
    held = []

    class Looks(sg.Callback):
        @sg.hookimpl
        def on_before_optimizer_step(self, module):
            held.append(sum(p.grad.numel() for p in module.parameters() if p.grad is not None))

    trainer = sg.Trainer(max_epochs=1, strategy="ddp_sharded", devices=world_size, callbacks=[Looks()], **QUIET)
    trainer.fit(Net(), share(trainer, joined_batches(2, 24)))
    momentum = sum(state["momentum_buffer"].numel() for state in trainer.run.optimizers[0].state.values())
    return held[0], momentum


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_and_optimizer_state_are_divided(world_size):
    whole = sum(parameter.numel() for parameter in Net().parameters())
    held = run_in_processes(_held, world_size)

    assert sum(gradients for gradients, _ in held) == whole
    assert sum(momentum for _, momentum in held) == whole
    assert max(gradients for gradients, _ in held) < 0.75 * whole


def test_the_cost_of_a_step_does_not_grow_with_the_ranks():
    class Counting(dict):
        asked = 0

        def __getitem__(self, parameter):
            self.asked += 1
            return super().__getitem__(parameter)

    strategy, parameters, sent = ShardedDDPStrategy(), [torch.nn.Parameter(torch.zeros(2)) for _ in range(6)], []
    strategy._owners = Counting(zip(parameters, (3, 1000, 7, 3, 0, 7), strict=True))
    unchecked = SimpleNamespace(broadcast=lambda tensor, owner: sent.append((owner, tensor.numel())) or tensor)
    peers = SimpleNamespace(unchecked=unchecked, world_size=4096, rank=0)
    strategy._broadcast_parameters(parameters, SimpleNamespace(peers=peers))

    assert sent == [(0, 2), (3, 4), (7, 4), (1000, 2)]
    assert strategy._owners.asked == len(parameters)


class Adagrad(Net):
    """Its optimizer makes its state when it is made, for every parameter."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=5e-3)


def _resumed(rank, world_size, path):
    module = Adagrad()
    for epochs, start in ((1, None), (2, path)):
        module = Adagrad()
        trainer = sg.Trainer(max_epochs=epochs, strategy="ddp_sharded", devices=world_size, **QUIET)
        trainer.fit(module, share(trainer, joined_batches(4, 24)), ckpt_path=start)
        trainer.save_checkpoint(path)
        trainer.close()
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.every_push("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizer_state_that_exists_from_the_beginning_is_the_owners(world_size, tmp_path):
    weights = run_in_processes(_resumed, world_size, tmp_path / "first.ckpt")

    reference = train_module_plainly(Adagrad(), joined_batches(4, 24) * 2)[0]
    assert all(relative_difference(each, reference) < 1e-6 for each in weights)


def _twice_before_a_step(rank, world_size, batches):
    with sg.Run(strategy="ddp_sharded", devices=world_size, accelerator="cpu") as run:
        module = Net()
        model, optimizer = run.setup(module, module.configure_optimizers())
        for batch in batches:
            x, y = (tensor.chunk(world_size)[rank] for tensor in batch)
            for _ in range(2):  # both synchronised: the second must not average the first again
                run.backward(module.criterion(model(x), y) / 2)
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        return module.state_dict()


@pytest.mark.slow
def test_two_synchronised_losses_before_a_step_add_up():
    batches = joined_batches(3, 24)

    for weights in run_in_processes(_twice_before_a_step, 2, batches):
        assert relative_difference(weights, train_module_plainly(Net(), batches)[0]) < 1e-6


# --- Messages ----------------------------------------------------------------------------------------------------


def _sent_during_backward(rank, world_size):
    """Return how many messages with gradients had left when backward came to the first layer, and after each step."""
    sent, before_first, after = [], [], []

    class Counts(sg.Callback):
        @sg.hookimpl
        def on_train_start(self, module, run):
            average = run.peers.average_async

            def counting(tensor):
                sent.append(tensor.numel())
                return average(tensor)

            run.peers.average_async = counting
            module.net[0].weight.register_hook(lambda _: before_first.append(len(sent)))

        @sg.hookimpl
        def on_train_batch_end(self):
            after.append(len(sent))

    trainer = sg.Trainer(
        max_epochs=1, strategy={"name": "ddp_sharded", "bucket_cap_mb": 0.002}, devices=world_size,
        callbacks=[Counts()], **QUIET,
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, joined_batches(3, 24)))
    return before_first, after, len(list(trainer.module.parameters()))


def test_gradients_leave_in_buckets_while_backward_runs():
    for before_first, after, num_parameters in run_in_processes(_sent_during_backward, 2):
        per_step = after[0]
        assert after == [per_step, 2 * per_step, 3 * per_step]
        assert per_step < num_parameters
        assert [count - step * per_step for step, count in enumerate(before_first)] == [per_step - 1] * 3


class Recomputed(Net):
    """Uses its middle layer in two parts that are computed again in backward: its gradient comes in two pieces."""

    def forward(self, x):
        first, act, middle, _, last = self.net
        hidden = act(first(x))
        for _ in range(2):
            hidden = torch.utils.checkpoint.checkpoint(lambda h: act(middle(h)), hidden, use_reentrant=True)
        return last(hidden)


class Decayed(Net):
    """Has a layer that nothing uses: it has no gradient, so weight decay leaves it alone."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(4, 4)
        for parameter in self.unused.parameters():
            torch.nn.init.ones_(parameter)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3, weight_decay=0.5)


def _trained(rank, world_size, makes):
    weights = []
    for make in makes:
        for cap in (0.001, 25.0):
            strategy = {"name": "ddp_sharded", "bucket_cap_mb": cap}
            trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
            trainer.fit(make(), share(trainer, joined_batches(4, 24)))
            weights.append(weights_of(trainer))
            trainer.close()
    return weights


@pytest.mark.slow
def test_gradients_that_come_in_pieces_or_not_at_all_train_as_in_one_process():
    makes = (Recomputed, Decayed)
    for weights in run_in_processes(_trained, 2, makes):
        for index, each in enumerate(weights):
            make = makes[index // 2]
            reference, norms = train_module_plainly(make(), joined_batches(4, 24))
            assert max(norms) > 1
            assert relative_difference(each, reference) < 1e-6, make


class Thawed(sg.Callback):
    """Trains the first layer from batch 2 on, and the last one until then."""

    @sg.hookimpl
    def on_train_batch_start(self, module, batch_idx):
        module.net[0].requires_grad_(batch_idx >= 2)
        module.net[4].requires_grad_(batch_idx < 2)


def _thawed(rank, world_size):
    strategy = {"name": "ddp_sharded", "bucket_cap_mb": 0.002}
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, callbacks=[Thawed()], **QUIET)
    trainer.fit(Net(), share(trainer, joined_batches(5, 24)))
    return weights_of(trainer)


def test_buckets_follow_the_parameters_that_are_trained():
    module, thawed = Net(), Thawed()
    optimizer = module.configure_optimizers()
    for index, (x, y) in enumerate(joined_batches(5, 24)):
        thawed.on_train_batch_start(module, index)
        optimizer.zero_grad()
        module.criterion(module(x), y).backward()
        optimizer.step()

    for weights in run_in_processes(_thawed, 2):
        assert relative_difference(weights, module.state_dict()) < 1e-6


def _sparse(rank, world_size):
    module = Net()
    module.words = torch.nn.Embedding(5, 3, sparse=True)
    trainer = sg.Trainer(max_epochs=1, strategy="ddp_sharded", devices=world_size, **QUIET)
    return outcome(lambda: trainer.fit(module, share(trainer, joined_batches(1, 8))))


def test_sparse_gradients_are_refused_by_name():
    for said in run_in_processes(_sparse, 2):
        assert said.startswith("refused: 'words' has sparse gradients, and strategy ddp_sharded sends dense ones")


SCRIPT = """
    import torch
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches
    from stratagem_testing.training import outcome, share, weights_of

    class Shared(Net):
        def train_dataloader(self):
            return share(self.trainer, joined_batches(4, 24))

    if __name__ == "__main__":
        trainer = sg.Trainer(strategy="ddp_sharded", launcher="{launcher}", devices=2, accelerator="cpu", max_epochs=1,
                             logger=False, enable_progress_bar=False, enable_checkpointing=False)
        model = Shared()
        trainer.fit(model)
        if trainer.is_global_zero:
            torch.save(model.state_dict(), "weights.pt")
"""


@pytest.mark.every_push("subprocess")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["subprocess", "spawn", "fork"])
def test_every_launch_mode_trains_as_one_process(launcher, tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("{launcher}", launcher))
    done = scripts.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=360
    )

    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert relative_difference(weights, train_module_plainly(Net(), joined_batches(4, 24))[0]) < 1e-6
