"""Parameters as models in the wild have them, under every strategy: trained as in one process, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, part
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Odd(Net):
    """A net with one more thing in it, whose first layer stays what it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.add()

    def add(self):
        raise NotImplementedError

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=5e-3, momentum=0.9)


class WithoutElements(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.net(x) + self.odd.sum()


class WithoutElementsUnused(Odd):
    def add(self):
        self.odd = nn.ParameterList(
            [nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.zeros(0), requires_grad=False)]
        )


class WithoutDimensions(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x):
        return self.net(x) * self.odd + self.fixed


class OneElement(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.full((1, 1), 1.5))

    def forward(self, x):
        return self.net(x) * self.odd


class Complex(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.odd, n=16))


class ComplexWithoutDimensions(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.tensor(1.5 + 0.5j))

    def forward(self, x):
        return self.net(x) * (self.odd * self.odd.conj()).real


class ComplexFrozen(Complex):
    def add(self):
        super().add()
        self.odd.requires_grad_(False)


class TwoDtypes(Odd):
    def add(self):
        self.odd = nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def forward(self, x):
        return self.net(torch.tanh(self.odd(x.double())).float())


class TwoDtypesFrozen(TwoDtypes):
    def add(self):
        super().add()
        self.odd.requires_grad_(False)


class Integers(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.arange(15, -1, -1), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True] * 15 + [False]), requires_grad=False)

    def forward(self, x):
        return self.net(x[:, self.odd] * self.mask)


class Tied(Odd):
    def add(self):
        self.odd, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.odd.weight

    def forward(self, x):
        return self.net(torch.tanh(self.again(torch.tanh(self.odd(x)))))


class WeightNorm(Odd):
    def add(self):
        self.odd = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def forward(self, x):
        return self.net(torch.tanh(self.odd(x)))


class OldWeightNorm(WeightNorm):
    def add(self):
        self.odd = nn.utils.weight_norm(nn.Linear(16, 16))


class SpectralNorm(WeightNorm):
    def add(self):
        self.odd = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))


class Transposed(Odd):
    """The memory of the parameter runs the other way."""

    def add(self):
        self.odd = nn.Parameter(torch.randn(16, 5).t())

    def forward(self, x):
        return self.net(x) + (x @ self.odd.t()).sum(1, keepdim=True)


class ChannelsLast(Odd):
    def add(self):
        self.odd = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.net(torch.tanh(self.odd(x.view(-1, 4, 2, 2))).flatten(1))


class Expanded(Odd):
    """All rows of a frozen parameter are one."""

    def add(self):
        self.odd = nn.Parameter(torch.randn(1, 16).expand(8, 16), requires_grad=False)

    def forward(self, x):
        return self.net(x) + (x @ self.odd.t()).sum(1, keepdim=True)


class ViewOfAnother(Odd):
    """Two parameters in one memory, one behind the other."""

    def add(self):
        memory = torch.randn(32)
        self.odd, self.even = nn.Parameter(memory[:16]), nn.Parameter(memory[16:])

    def forward(self, x):
        return self.net(x * self.odd + self.even)


class FewerRowsThanRanks(Odd):
    def add(self):
        self.odd = nn.Parameter(torch.randn(1, 16))

    def forward(self, x):
        return self.net(x * self.odd)


class OddBuffers(Odd):
    def add(self):
        self.register_buffer("odd", torch.zeros(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("wave", torch.ones(3, dtype=torch.cfloat))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("none", None)
        self.register_buffer("expanded", torch.ones(1, 2).expand(3, 2))

    def forward(self, x):
        self.count += 1
        return self.net(x) + self.expanded.sum()


ZOO = [
    WithoutElements, WithoutElementsUnused, WithoutDimensions, OneElement, Complex, ComplexWithoutDimensions,
    ComplexFrozen, TwoDtypes, TwoDtypesFrozen, Integers, Tied, WeightNorm, OldWeightNorm, SpectralNorm, Transposed,
    ChannelsLast, Expanded, ViewOfAnother, FewerRowsThanRanks, OddBuffers,
]  # fmt: skip

STRATEGIES = {
    "ddp": {"name": "ddp", "find_unused_parameters": True},
    "ddp, buckets as gradients": {"name": "ddp", "find_unused_parameters": True, "gradient_as_bucket_view": True},
    "ddp_sharded": "ddp_sharded",
    "fsdp": "fsdp",
    "fsdp, units": {"name": "fsdp", "auto_wrap_policy": {nn.Linear}},
    "fsdp, replicas": {"name": "fsdp", "sharding_strategy": "NO_SHARD"},
    "local_sgd": {"name": "local_sgd", "period": 1},
    "diloco": {"name": "diloco", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
}
#: What fsdp refuses, and with which words.
REFUSED = {
    "Complex": "'odd' is complex and trained",
    "TwoDtypes": "'net.0.weight' is float32 and 'odd.weight' is float64, outside of all units",
}
REFUSED_IN_UNITS = {"Complex": REFUSED["Complex"], "Tied": "are one parameter in two units, 'odd' and 'again'"}
SAID = {"fsdp": REFUSED, "fsdp, replicas": REFUSED, "fsdp, units": REFUSED_IN_UNITS}


def plainly(make, batches, world_size):
    """Train in one process; buffers are those of the first rank."""
    module = make()
    optimizer = module.configure_optimizers()
    for batch in batches:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for rank in reversed(range(world_size)):
            for name, buffer in module.named_buffers():
                if name != "expanded":
                    buffer.copy_(buffers[name])
            ((x, y),) = part([batch], rank, world_size)
            (loss_of(module(x), y) / world_size).backward()
        assert torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm() > 1
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def _fit(rank, size, strategy, folder):
    """Train each model, save, load elsewhere and train on; return weights, or what was said."""
    results = {}
    for make in ZOO:
        module, found = make(), {}

        def both(make=make, module=module, found=found):
            batches, path = joined_batches(6, 24), folder / f"{make.__name__}.ckpt"
            trainer = sg.Trainer(strategy=strategy, devices=size, max_epochs=1, **QUIET)
            trainer.fit(module, share(trainer, batches[:3]))
            trainer.save_checkpoint(path)
            again = sg.Trainer(strategy=strategy, devices=size, max_epochs=2, **QUIET)
            again.fit(make(), share(again, batches[3:]), ckpt_path=path)
            found.update(weights_of(again))

        said = outcome(both)
        results[make.__name__] = found if said == "nothing" else said
    return results


@pytest.mark.when_changed(
    "plugins/fsdp/",
    "plugins/libraries/",
    "plugins/checkpoints/",
    guard="tests/conformance/test_strategies.py::TestFSDPInUnits::test_unusual_models",
)
@pytest.mark.every_push("fsdp")
@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_odd_parameters(name, tmp_path):
    batches = joined_batches(6, 24)

    first, second = run_in_processes(_fit, 2, STRATEGIES[name], tmp_path, limit_s=300)

    problems = []
    for make in ZOO:
        words, plain = SAID.get(name, {}).get(make.__name__), plainly(make, batches, 2)
        for rank, result in enumerate((first[make.__name__], second[make.__name__])):
            if isinstance(result, str) or words is not None:
                if words is None or not result.startswith("refused: ") or words not in result:
                    problems.append(f"{make.__name__} on rank {rank}: {str(result)[:300]}, expected {words}")
                continue
            differing = [key for key, value in plain.items() if not equal(result[key], value)]
            if differing:
                problems.append(f"{make.__name__} on rank {rank} differs in {differing}")
    assert not problems, "\n".join(problems)


def equal(found, expected):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if expected.numel() == 0 or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    return float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
