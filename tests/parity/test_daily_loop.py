"""What people write every day trains as one plain PyTorch process does, under every kind of strategy."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Gan,
    Net,
    critic_loss,
    generator_loss,
    joined_batches,
    part,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
STRATEGIES = [("single_device", 1), ("ddp", 2), ("fsdp", 2)]
BATCHES = joined_batches(6, 24)
VALIDATION = joined_batches(2, 24)


def on_all_ranks(function, strategy, world_size, *arguments):
    """Return what `function` returned on each rank; on one rank in this process."""
    if world_size == 1:
        return [function(0, 1, strategy, *arguments)]
    return run_in_processes(function, world_size, strategy, *arguments)


# --- ReduceLROnPlateau -------------------------------------------------------------------------------------------


class Plateau(Net):
    """Learns too fast to improve every epoch, so that the rate falls."""

    def __init__(self):
        super().__init__(lr=4e-2)
        self.rates = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.criterion(self(x), y), sync_dist=True)

    def on_train_epoch_end(self):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def plateau_plainly(epochs=6):
    module = Plateau()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    norms, rates = [], []
    for _ in range(epochs):
        for x, y in BATCHES:
            optimizer.zero_grad()
            module.criterion(module(x), y).backward()
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
            optimizer.step()
        with torch.no_grad():
            scheduler.step(sum(float(module.criterion(module(x), y)) for x, y in VALIDATION) / len(VALIDATION))
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(norms) > 1
    return module.state_dict(), rates


def _plateau(rank, world_size, strategy):
    module = Plateau()
    trainer = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=6, **QUIET)
    trainer.fit(module, share(trainer, BATCHES), share(trainer, VALIDATION))
    return weights_of(trainer), module.rates


@pytest.mark.every_push("single_device-1")
@pytest.mark.parametrize(("strategy", "world_size"), STRATEGIES)
def test_reduce_on_plateau(strategy, world_size):
    weights, rates = plateau_plainly()
    assert len(set(rates)) > 2
    for found, found_rates in on_all_ranks(_plateau, strategy, world_size):
        # The step above happens before the epoch's end is told to the module, below as in `Plateau`.
        assert found_rates[1:] == pytest.approx(rates[:-1])
        assert relative_difference(found, weights) < 1e-5


class Alone(Plateau):
    """Each rank logs its own loss: their learning rates would part."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.global_rank))


def _plateau_alone(rank, world_size):
    trainer = sg.Trainer(strategy="ddp", devices=world_size, max_epochs=2, **QUIET)
    with pytest.raises(ConfigError, match="lr_scheduler.monitor 'val_loss' is 0 on rank 0, 1 on rank 1") as caught:
        trainer.fit(Alone(), share(trainer, BATCHES), share(trainer, VALIDATION))
    return str(caught.value)


def test_a_rate_that_would_differ_between_ranks_is_refused():
    assert len(set(run_in_processes(_plateau_alone, 2))) == 1


# --- A GAN -------------------------------------------------------------------------------------------------------


class Toggling(Gan):
    """While one half learns, nothing flows to the other."""

    def training_step(self, batch, batch_idx):
        real = torch.cat([batch[0], batch[0]], 1)
        for_critic, for_generator = self.optimizers()
        self.toggle_optimizer(for_critic)
        for_critic.zero_grad()
        self.manual_backward(critic_loss(self.critic, real, self.generator(batch[0]).detach()))
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        for_generator.zero_grad()
        self.manual_backward(generator_loss(self.critic, self.generator(batch[0])))
        for_generator.step()
        self.untoggle_optimizer(for_generator)


def gan_plainly():
    module = Gan()
    for_critic, for_generator = module.configure_optimizers()
    for x, _ in BATCHES:
        real = torch.cat([x, x], 1)
        made = module.generator(x)
        for_critic.zero_grad()
        critic_loss(module.critic, real, made.detach()).backward()
        for_critic.step()
        for_generator.zero_grad()
        generator_loss(module.critic, made).backward()
        for_generator.step()
    return module.state_dict()


def _gan(rank, world_size, strategy, toggles):
    module = (Toggling if toggles else Gan)()
    trainer = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=1, **QUIET)
    trainer.fit(module, share(trainer, BATCHES))
    return weights_of(trainer), [parameter.requires_grad for parameter in module.parameters()]


@pytest.mark.every_push("single_device-1-plain", "ddp-2-toggling")
@pytest.mark.parametrize("toggles", [False, True], ids=["plain", "toggling"])
@pytest.mark.parametrize(("strategy", "world_size"), STRATEGIES)
def test_a_gan(strategy, world_size, toggles):
    for found, requires in on_all_ranks(_gan, strategy, world_size, toggles):
        assert relative_difference(found, gan_plainly()) < 1e-5
        assert all(requires)


# --- Data sets without a length ----------------------------------------------------------------------------------


class Stream(IterableDataset):
    """This rank's part of each batch; `extra` more batches on the last rank."""

    def __init__(self, rank, world_size, extra=0):
        self.batches = [part([batch], rank, world_size)[0] for batch in BATCHES]
        if rank == world_size - 1:
            self.batches += self.batches[:extra]

    def __iter__(self):
        return iter(self.batches)


def _stream(rank, world_size, strategy, extra, accumulate):
    module = Net()
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, max_epochs=2, accumulate_grad_batches=accumulate, **QUIET
    )
    trainer.fit(module, DataLoader(Stream(rank, world_size, extra), batch_size=None))
    return weights_of(trainer), trainer.global_step


@pytest.mark.every_push("single_device-1-4-uneven")
@pytest.mark.parametrize("extra", [0, 2], ids=["even", "uneven"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("strategy", "world_size"), STRATEGIES)
def test_an_iterable_data_set(strategy, world_size, accumulate, extra):
    """Four batches to a step: the epoch ends with a short window, on all ranks, though nobody knows its length."""
    batches = BATCHES + (BATCHES[:extra] if world_size == 1 else [])
    module = Net()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for first in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            window = batches[first : first + accumulate]
            for x, y in window:
                (module.criterion(module(x), y) / len(window)).backward()
            optimizer.step()
    for found, steps in on_all_ranks(_stream, strategy, world_size, extra, accumulate):
        assert relative_difference(found, module.state_dict()) < 1e-5
        assert steps == 2 * -(-len(batches) // accumulate)


def _uneven(rank, world_size, strategy):
    """Loaders that know their length, and differ."""
    module = Net()
    trainer = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=1, use_distributed_sampler=False, **QUIET)
    batches = part(BATCHES, rank, world_size)
    trainer.fit(module, batches if rank == 0 else batches[:4])
    return weights_of(trainer), trainer.num_training_batches


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_shortest_loader_ends_the_epoch_for_all(strategy):
    weights, _ = train_module_plainly(Net(), BATCHES[:4])
    for found, batches in run_in_processes(_uneven, 2, strategy):
        assert relative_difference(found, weights) < 1e-5
        assert batches == 4
