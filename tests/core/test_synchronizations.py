"""The recorder sees what would make the host wait for a GPU, wherever it happens, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stratagem_testing import recording, run_in_processes

DEVICE = torch.device("cpu", 0)


def _found(act, *tensors):
    """Return what is recorded while `act` works with `tensors` on the stand-in device."""
    with recording() as recorder:
        moved = [tensor.to(DEVICE, non_blocking=True) for tensor in tensors]
        act(*moved)
    return [each.operation for each in recorder.found]


NUMBERS, ONE = torch.arange(4.0), torch.ones(())
WAITS = {
    "item": ("item", lambda x: x.sum().item(), NUMBERS),
    "float": ("item", lambda x: float(x[0]), NUMBERS),
    "bool": ("item", lambda x: bool((x > 1).any()), NUMBERS),
    "if": ("item", lambda x: 1 if x else 0, ONE),
    "tolist": ("tolist", lambda x: x.tolist(), NUMBERS),
    "numpy": ("numpy", lambda x: x.numpy(), NUMBERS),
    "cpu": ("copy to the host", lambda x: x.cpu(), NUMBERS),
    "to cpu": ("copy to the host", lambda x: x.to("cpu"), NUMBERS),
    "copy_ to the host": ("copy to the host", lambda x: torch.empty(4).copy_(x), NUMBERS),
    "copy_ to the device": ("copy to the device", lambda x: x.copy_(torch.ones(4)), NUMBERS),
    "to the device": ("copy to the device", lambda x: torch.ones(4).to(x.device), NUMBERS),
    "to another's device": ("copy to the device", lambda x: torch.ones(4).to(x), NUMBERS),
    "tensor": ("copy to the device", lambda x: torch.tensor([1, 2], device=x.device), NUMBERS),
    "new_tensor": ("copy to the device", lambda x: x.new_tensor([1.0]), NUMBERS),
    "nonzero": ("nonzero", lambda x: x.nonzero(), NUMBERS),
    "mask": ("nonzero (a mask as index)", lambda x: x[x > 1], NUMBERS),
    "index": ("copy to the device (an index)", lambda x: x[torch.tensor([1, 2])], NUMBERS),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 1), NUMBERS),
    "equal": ("equal", lambda x: torch.equal(x, x + 1), NUMBERS),
    "allclose": ("allclose", lambda x: torch.allclose(x, x + 1), NUMBERS),
}
FINE = {
    "arithmetic": lambda x: (x * 2 + torch.ones((), device=x.device)).sum(),
    "a number of the host's": lambda x: x * float(torch.tensor(2.0)),
    "a control word": lambda x: bool(torch.tensor([0, 1]).any()),
    "a list from the host": lambda x: torch.randperm(4).tolist(),
    "a copy without waiting": lambda x: x.to("cpu", non_blocking=True),
    "a fill by mask": lambda x: x.masked_fill_(x > 1, 0.0).__setitem__(x < 1, 2.0),
    "an index of its own": lambda x: x[torch.arange(2, device=x.device)],
    "to where it is": lambda x: x.to(x.device, torch.float64),
    "a factory there": lambda x: torch.zeros(3, device=x.device) + torch.zeros_like(x)[:3],
    "clipping": lambda x: nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0),
    "a step of Adam": lambda x: torch.optim.Adam([_with_gradient(x)]).step(),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_waits_is_recorded_once(case):
    operation, act, tensor = WAITS[case]

    assert _found(act, tensor) == [operation]


@pytest.mark.parametrize("case", FINE)
def test_what_is_only_queued_is_not_recorded(case):
    assert _found(FINE[case], NUMBERS) == []


def _with_gradient(x):
    parameter = nn.Parameter(x.clone())
    parameter.grad = torch.ones_like(x)
    return parameter


def test_results_follow_their_inputs_through_modules_backward_and_views():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with recording() as recorder:
        model.to(DEVICE)
        recorder.found.clear()  # copies of the parameters
        model(torch.ones(2, 4).to(DEVICE, non_blocking=True)).sum().backward()
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
        seen = [(recorder.on_device(each), recorder.on_device(each.detach().view(-1)), each.device) for each in tensors]

    assert set(seen) == {(True, True, DEVICE)}
    assert not recorder.found


def test_what_a_hook_of_backward_reads_is_recorded_with_its_line():
    with recording() as recorder:
        x = torch.ones(3).to(DEVICE, non_blocking=True).requires_grad_()
        x.register_hook(lambda gradient: float(gradient.sum()) and None)
        recorder.step = 7
        (x * 2).sum().backward()

    (found,) = recorder.found
    assert (found.operation, found.step) == ("item", 7)
    assert "test_what_a_hook_of_backward_reads" in str(found)


def _in_callbacks(rank, world_size):
    torch.distributed.init_process_group("gloo")
    with recording() as recorder:
        x = torch.ones(3).to(DEVICE, non_blocking=True)
        future = torch.distributed.all_reduce(x, async_op=True).get_future()
        made = []
        future.then(lambda _: made.append(x * 2)).then(lambda _: made[0].sum().item()).wait()
    return [each.operation for each in recorder.found]


def test_what_a_callback_of_a_future_reads_is_recorded():
    """It runs in a thread of the process group."""
    assert run_in_processes(_in_callbacks, 2) == [["item"]] * 2


def test_everything_is_put_back():
    before = {name: getattr(torch.Tensor, name) for name in ("device", "to", "cpu", "numpy", "tolist", "new_tensor")}
    before_futures, before_torch = torch._C.Future.then, (torch.tensor, torch.empty)
    with pytest.raises(ZeroDivisionError), recording():
        1 / 0  # noqa: B018

    assert all(getattr(torch.Tensor, name) is value for name, value in before.items())
    assert (torch._C.Future.then, (torch.tensor, torch.empty)) == (before_futures, before_torch)
    assert not {"to", "device", "cpu"} & set(vars(torch.Tensor))
