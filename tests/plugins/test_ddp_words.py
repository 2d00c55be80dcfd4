"""What DDP says about parameters with and without gradients: one sentence, on every rank, before anybody hangs."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Gan,
    Net,
    Tied,
    Unused,
    joined_batches,
    part,
    relative_difference,
    train_module_plainly,
    train_plainly,
)

#: Refuses parameters without a gradient.
STRICT = "ddp_find_unused_parameters_false"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class ManyUnused(Net):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))


class FrozenLate(Net):
    """Freezes its first layer when DDP has counted it already."""

    def on_train_start(self):
        self.net[0].requires_grad_(False)


class SkipsTheEnd(Net):
    """From batch `first` to batch `last`, on the ranks `on`, the last layer is left out: parameters 4 and 5."""

    def __init__(self, first=0, last=99, on=(0, 1)):
        super().__init__()
        self.first, self.last, self.on = first, last, on

    def training_step(self, batch, batch_idx):
        if not (self.first <= batch_idx <= self.last and self.global_rank in self.on):
            return super().training_step(batch, batch_idx)
        return 4 * (self.net[:4](batch[0]) - batch[1]).square().mean()


class ReturnsMore(Unused):
    """Returns something that is computed from parameters which the loss does not reach."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "more": self.unused(torch.ones(1, 32))}


class Reentrant(Net):
    """The graph of its loss does not show the parameters within the checkpoint."""

    def training_step(self, batch, batch_idx):
        hidden = checkpoint(self.net[:3], batch[0].requires_grad_(), use_reentrant=True)
        return 4 * (self.net[3:](hidden) - batch[1]).square().mean()


class SkipsByALeaf(Net):
    """Skips a batch on rank 1 with a loss that was computed from nothing."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            return torch.zeros((), requires_grad=True)
        return super().training_step(batch, batch_idx)


def _fit(rank, world_size, model, strategy, num_batches, arguments):
    """Train; return what this rank says: an error, or its warnings and weights."""
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **(QUIET | arguments))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, part(joined_batches(num_batches, 8), rank, world_size))
        except sg.StratagemError as error:
            return str(error)
    ours = [str(each.message) for each in warned if "strategy.ddp" in str(each.message)]
    return ours, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fit(model, strategy="ddp", num_batches=3, **arguments):
    return run_in_processes(_fit, 2, model, strategy, num_batches, arguments)


# --- Without a gradient ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_parameters_without_a_gradient_are_named_with_the_option(debug, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)

    for rank, said in enumerate(fit(Unused(), STRICT)):
        assert said == (
            f"unused.weight, unused.bias got no gradient on rank {rank}, and DDP waits for all of them; expected a loss "
            'that every trainable parameter takes part in; choose strategy="ddp_find_unused_parameters_true" '
            "(strategy.ddp.find_unused_parameters: true), or freeze what is not trained."
        )


def test_of_many_parameters_the_first_are_named_and_the_others_counted_also_after_a_single_step():
    for said in fit(ManyUnused(), STRICT, num_batches=1):
        assert "spare.0.weight, spare.0.bias, spare.1.weight and 3 more got no gradient" in said


def test_the_names_are_right_when_other_parameters_were_frozen_after_wrapping():
    for said in fit(FrozenLate()):
        assert "net.0.weight, net.0.bias got no gradient" in said


#: What the first loss leaves out, which is searched for from then on.
FOUND = {
    "by all": (Unused(), {}, "unused.weight, unused.bias"),
    "windows": (Unused(), {"accumulate_grad_batches": 2}, "unused.weight, unused.bias"),
    "hook": (ManyUnused(), {"comm_hook": "allreduce"}, "spare.0.weight, spare.0.bias, spare.1.weight and 3 more"),
    "by one": (SkipsTheEnd(on=(1,)), {}, "some parameters"),
    "later used": (SkipsTheEnd(last=1), {}, "net.4.weight, net.4.bias"),
    "hidden": (Reentrant(), {}, None),
    "none": (Net(), {}, None),
}


def _fit_all(rank, world_size):
    """Return what a rank says by default, and where it was told to search, which does not find what is hidden."""
    return [
        {
            name: _fit(rank, world_size, copy.deepcopy(model), strategy, 4, arguments)
            for name, (model, arguments, _) in FOUND.items()
            if name != "hidden" or strategy == "ddp"
        }
        for strategy in ("ddp", "ddp_find_unused_parameters_true")
    ]


def test_what_the_first_loss_leaves_out_is_searched_for_and_named_once():
    (found, told), (found_elsewhere, _) = run_in_processes(_fit_all, 2)

    for name, (_, _, names) in FOUND.items():
        said, weights = found[name]
        sentences = [] if names is None else [f"{names} got no gradient in the first step, and DDP looks for"]
        assert [each[: len(sentences[0])] for each in said] == sentences, name
        assert found_elsewhere[name][0] == []
        for weight, value in weights.items():
            assert torch.equal(found_elsewhere[name][1][weight], value), name
            if name in told:
                assert torch.equal(told[name][1][weight], value), name
    for name in "by all", "hidden", "none":
        plain, _ = train_plainly(joined_batches(4, 8))
        assert all(relative_difference({key: found[name][1][key]}, {key: plain[key]}) < 1e-6 for key in plain), name


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_rank_does_not_use_ends_all_ranks_with_its_sentence(first):
    model = SkipsTheEnd(first, on=(1,))

    there, said = fit(model, STRICT if first == 0 else "ddp")
    sentence = "net.4.weight, net.4.bias got no gradient on rank 1, and DDP waits for all of them"
    assert said.startswith(sentence)
    assert f"rank 1 failed with ConfigError: {sentence}" in there


@pytest.mark.slow
def test_of_accumulated_batches_the_one_that_sends_has_to_reach_all():
    for said in fit(SkipsTheEnd(last=0), num_batches=2, accumulate_grad_batches=2):
        assert not isinstance(said, str), said
    for said in fit(SkipsTheEnd(first=1), STRICT, num_batches=2, accumulate_grad_batches=2):
        assert "net.4.weight, net.4.bias got no gradient" in said


def test_a_loss_that_reaches_nothing_ends_all_ranks():
    there, said = fit(SkipsByALeaf())

    assert said.startswith("the loss of rank 1 reaches no trainable parameter")
    assert "rank 1 failed with ConfigError: the loss of rank 1 reaches no trainable parameter" in there


def test_manual_optimization_is_told_of_what_it_said_not_to_search_for():
    for said in fit(Gan(), "ddp_find_unused_parameters_false"):
        assert "generator.0.weight, generator.0.bias, generator.2.weight and 1 more got no gradient" in said


def _by_hand(rank, world_size):
    """A loop of one's own, whose two losses share a step."""
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(4, 1)})
    module.forward = lambda x: (module["a"](x).sum(), module["b"](x).sum())
    model, _ = run.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for one in model(torch.full((2, 4), rank + 1.0)):
        run.backward(one)
    said = [parameter.grad.flatten().tolist() for parameter in module.parameters()]
    first, _ = model(torch.ones(2, 4))
    run.backward(first)
    try:
        model(torch.ones(2, 4))
    except ConfigError as error:
        return said, str(error)


def test_a_loop_of_ones_own_may_differentiate_in_parts_and_is_told_at_the_next_forward():
    for gradients, said in run_in_processes(_by_hand, 2):
        assert gradients == [[3.0] * 4, [2.0]] * 2
        assert said.startswith("b.weight, b.bias got no gradient on rank")


# --- A graph that changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_static_graph_that_loses_parameters_is_told_which(on):
    there, said = fit(SkipsTheEnd(first=1, on=on), {"name": "ddp", "static_graph": True})

    assert said == (
        "net.4.weight, net.4.bias got no gradient on rank 1, while strategy.ddp.static_graph is true; expected every "
        "step to use the same parameters; set strategy.ddp.find_unused_parameters to true instead."
    )
    assert "net.4.weight, net.4.bias got no gradient on rank" in there


def test_a_static_graph_that_wins_parameters_is_told_which():
    for rank, said in enumerate(fit(SkipsTheEnd(last=0), {"name": "ddp", "static_graph": True})):
        assert f"net.4.weight, net.4.bias got a gradient on rank {rank}, and none in the first step" in said
        assert "while strategy.ddp.static_graph is true" in said


@pytest.mark.every_push("Unused-views of buckets")
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}],
    ids=["defaults", "views of buckets", "small buckets"],
)
@pytest.mark.parametrize("make", [Net, Unused])
def test_a_static_graph_may_accumulate_from_the_first_window_on(options, make):
    """torch learns the graph in a backward that sends, and asserts if the first one does not."""
    batches = joined_batches(7, 8)
    plain, norms = train_module_plainly(make(), batches, 3)
    assert max(norms) > 1

    strategy = {"name": "ddp", "static_graph": True, **options}
    for _, weights in fit(make(), strategy, num_batches=7, accumulate_grad_batches=3):
        assert relative_difference(weights, plain) < 1e-6


def test_a_static_graph_and_a_search_exclude_each_other():
    with pytest.raises(ConfigError, match="drop find_unused_parameters"):
        DDPStrategy(static_graph=True, find_unused_parameters=True)


# --- Advice ------------------------------------------------------------------------------------------------------


@pytest.mark.every_push("none unused")
@pytest.mark.parametrize(
    ("model", "num_batches", "advice"),
    [
        (Net(), 12, "no parameter was unused in 12 steps"),
        (Unused(), 12, "the same parameters were unused in all 12 steps"),
        (SkipsTheEnd(first=6), 12, None),
        (SkipsTheEnd(on=(1,)), 12, "the same parameters were unused in all 12 steps"),
        (Net(), 3, None),
    ],
    ids=["none unused", "the same unused", "changing", "unused on one rank", "too short to tell"],
)
def test_a_search_that_was_not_needed_is_mentioned_once_at_the_end(model, num_batches, advice):
    (said, weights), (others, _) = fit(model, "ddp_find_unused_parameters_true", num_batches)

    told = [each for each in said if "find_unused_parameters" in each]
    if advice:
        assert [advice in each for each in told] == [True], said
    else:
        assert told == [], said
    assert [each for each in others if "find_unused_parameters" in each] == []
    if type(model) is Net:
        assert relative_difference(weights, train_plainly(joined_batches(num_batches, 8))[0]) < 1e-6


def _fit_again(rank, world_size, *arguments):
    _fit(rank, world_size, *arguments)
    gc.collect()  # torch notes something for the first replica of a process that ends, and for no other
    return _fit(rank, world_size, *arguments)


@pytest.mark.slow
def test_a_later_fit_in_the_process_is_advised_on_its_own_steps():
    model = SkipsTheEnd(first=6)
    for said, _ in run_in_processes(_fit_again, 2, model, "ddp_find_unused_parameters_true", 12, {}):
        assert said == []


def test_manual_optimization_hears_nothing_of_the_search_it_needs():
    (said, _), _ = fit(Gan(), num_batches=12)

    assert said == []


@pytest.mark.slow
def test_outputs_that_the_loss_does_not_use_do_not_end_training():
    for said in fit(ReturnsMore(), "ddp_find_unused_parameters_true", 12):
        assert not isinstance(said, str), said


def test_a_layer_that_is_used_twice_does_not_end_training():
    for said in fit(Tied(), "ddp"):
        assert not isinstance(said, str), said
