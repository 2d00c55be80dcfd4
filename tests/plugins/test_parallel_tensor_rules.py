"""Functions of torch on activations that are cut return what they return on whole ones, values and gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_parallel_unchanged.tensor import PartsBackend
from stratagem_parallel_unchanged.tensor.copies import marked
from stratagem_parallel_unchanged.tensor.functions import see_slices
from stratagem_parallel_unchanged.tensor.moves import Line, TracedStep, all_whole, part_of, summed_part, whole_of
from stratagem_parallel_unchanged.tensor.slices import as_slice
from stratagem_testing import run_in_processes


class _Scaled(torch.autograd.Function):
    """Keeps its input and its result, and sums in backward for a parameter."""

    @staticmethod
    def forward(ctx, x, w):
        out = (x * w).tanh()
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, w, out = ctx.saved_tensors
        gradient = gradient * (1 - out**2)
        return gradient * w + gradient.mean(), (gradient * x).sum((0, 1))


class _ScaledByOne(torch.autograd.Function):
    """Takes a parameter without dimensions; its context is set up apart."""

    @staticmethod
    def forward(x, scale):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale / gradient.norm(), (gradient * x).sum()


def _hooked(x):
    x = x * 1
    x.register_hook(lambda gradient: gradient / gradient.norm())
    return x.tanh()


def _recomputed(x, y):
    return checkpoint(lambda x: x.tanh() * y, x, use_reentrant=True)


#: Each takes x (4, 6, 8), another y of its shape, and a replicated w (8, 8) that needs gradients.
FUNCTIONS = {
    "a column of its dtype": lambda x, y, w: (x * w[:6, :1].to(x)).sum() / w[:6, :1].type_as(x).sum(),
    "a number of its dtype": lambda x, y, w: x * w[0, 0].to(x) + torch.arange(8).to(x) * w[0].type_as(x),
    "of another's dtype": lambda x, y, w: x.to(w[:5, :5]) * y.type_as(w[:1, :3]) + x.to(y),
    "a function with a parameter": lambda x, y, w: _Scaled.apply(x, w[0]) * y,
    "a function with a number": lambda x, y, w: _ScaledByOne.apply(x, w[0, 0]),
    "a hook that reduces": lambda x, y, w: _hooked(x) * y,
    "add": lambda x, y, w: x + y * 2 - x / 3,
    "with a scalar": lambda x, y, w: 1 - x**2,
    "with a row": lambda x, y, w: x * w[0],
    "with a column": lambda x, y, w: x + w[:6, :1],
    "with a whole": lambda x, y, w: x * w[:6],
    "unary": lambda x, y, w: F.gelu(x).tanh().sigmoid().exp().abs().sqrt(),
    "rotate": lambda x, y, w: torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * y,
    "heads": lambda x, y, w: x.view(4, 6, 2, 4).transpose(1, 2) @ y.view(4, 6, 2, 4).permute(0, 2, 3, 1),
    "heads, inferred": lambda x, y, w: x.view(4, 6, -1, 2).transpose(1, 2).contiguous().view(4, -1, 12),
    "three heads": lambda x, y, w: x.reshape(4, 3, 2, 8).sum((1, 3)),
    "attention": lambda x, y, w: F.scaled_dot_product_attention(
        *(t.view(4, 6, 2, 4).transpose(1, 2) for t in (x, y, x + y)), is_causal=True
    ),
    "grouped attention": lambda x, y, w: F.scaled_dot_product_attention(
        x.view(4, 6, 4, 2).transpose(1, 2), *(t[..., :4].view(4, 6, 2, 2).transpose(1, 2) for t in (y, x)),
        enable_gqa=True,
    ),
    "attention to whole keys": lambda x, y, w: F.scaled_dot_product_attention(
        x.view(4, 6, 2, 4).transpose(1, 2), *(w[:6].expand(4, 6, 8).view(4, 6, 2, 4).transpose(1, 2) for _ in range(2))
    ),
    "attention with a bias": lambda x, y, w: F.scaled_dot_product_attention(
        *(t.view(4, 6, 2, 4).transpose(1, 2) for t in (x, y, x)), attn_mask=w[:2, :6].view(1, 2, 1, 6)
    ),
    "attention by hand": lambda x, y, w: (
        (x.view(4, 6, 2, 4).transpose(1, 2) @ y.view(4, 6, 2, 4).transpose(1, 2).mT)
        .masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9).softmax(-1)
    ),
    "repeated heads": lambda x, y, w: x.view(4, 6, 4, 2)[:, :, :, None, :].expand(4, 6, 4, 3, 2).reshape(4, 6, 12, 2),
    "repeat_interleave": lambda x, y, w: x.repeat_interleave(2, dim=-1),
    "fused": lambda x, y, w: x.chunk(2, dim=-1)[0] * y.split(4, dim=2)[1],
    "three in one": lambda x, y, w: (
        x.repeat_interleave(3, dim=-1).view(4, 6, 3, 2, 4).unbind(2)[1] * y.view(4, 6, 2, 4)
    ),
    "pieces": lambda x, y, w: x.chunk(3, dim=1)[1] + y.unbind(1)[0][:, None],
    "layer_norm": lambda x, y, w: F.layer_norm(x, (8,), w[0], w[1]),
    "rms by hand": lambda x, y, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[2],
    "linear": lambda x, y, w: F.linear(x, w, w[0]),
    "matmul": lambda x, y, w: x @ w,
    "einsum": lambda x, y, w: torch.einsum("btc,bsc->bts", x, y),
    "sum": lambda x, y, w: x.sum(1) + y.mean(dim=1),
    "whole sum": lambda x, y, w: x.sum() + y.mean(),
    "norm": lambda x, y, w: x.norm(dim=-1) + F.normalize(y, dim=-1).sum(-1),
    "variance": lambda x, y, w: x.var(1, keepdim=True) * x,
    "softmax": lambda x, y, w: x.softmax(-1) + F.softmax(y, dim=1),
    "max": lambda x, y, w: x.max(dim=1).values + x.amax(2, keepdim=True)[:, :1, 0],
    "flatten": lambda x, y, w: x.flatten(1) + y.reshape(4, -1),
    "flatten rows": lambda x, y, w: x.flatten(0, 1),
    "unflatten": lambda x, y, w: x.unflatten(-1, (2, -1)).flatten(2),
    "where": lambda x, y, w: torch.where(x > 0, x, y),
    "where it holds": lambda x, y, w: torch.where(x > 0)[2].double().mean() * x,
    "named tensors": lambda x, y, w: torch.cat(tensors=[x, y], dim=-1) + torch.stack(tensors=(x, y), dim=1).sum(1).repeat(1, 1, 2),
    "named input": lambda x, y, w: torch.sum(input=x, dim=1) + torch.flatten(input=y, start_dim=1).view(4, 6, 8).sum(1),
    "named factors": lambda x, y, w: torch.matmul(input=x, other=w) + torch.matmul(y, other=w),
    "named others": lambda x, y, w: x.view_as(other=y) + x.swapaxes(axis0=1, axis1=2).transpose(dim0=1, dim1=2),
    "axis of cat": lambda x, y, w: torch.cat([x, y], axis=-1) + torch.cat([x, y], axis=2),
    "axis of pieces": lambda x, y, w: x.chunk(2, axis=1)[0] + y.chunk(2, axis=-2)[1] + x.unsqueeze(axis=1)[:, 0, :3],
    "axis of one": lambda x, y, w: x.unbind(axis=1)[0] + y.sum(axis=1),
    "stack": lambda x, y, w: torch.stack([x, y], dim=0).sum(0) + torch.stack([x, y], -1)[..., 0],
    "cat along": lambda x, y, w: torch.cat([x, y], dim=-1) * 2,
    "cat with a whole": lambda x, y, w: torch.cat([x, w.expand(4, 8, 8)], dim=1),
    "squeeze": lambda x, y, w: x.unsqueeze(1).squeeze(1).unsqueeze(-1).expand(-1, -1, -1, 3),
    "index": lambda x, y, w: x[:, 2:5] * y[:, -1:, :] + x[1][2:5] + y[:, 0, None],
    "index by tensor": lambda x, y, w: x[:, torch.tensor([1, 3])] + y[torch.tensor([0])][:, :2],
    "index by number": lambda x, y, w: x[torch.tensor(1)] + y[:, torch.tensor(2)].sum(0),
    "written": lambda x, y, w: _written(x, y),
    "index into": lambda x, y, w: x[..., 1:3],
    "in place": lambda x, y, w: (x * 1).add_(y).mul_(2).relu_(),
    "added to": lambda x, y, w: _added(x, y),
    "cross entropy": lambda x, y, w: F.cross_entropy(x.view(-1, 8), torch.arange(24) % 8),
    "cross entropy, ignoring": lambda x, y, w: F.cross_entropy(
        x.transpose(1, 2), torch.arange(24).view(4, 6) % 8, ignore_index=3, reduction="sum"
    ),
    "cross entropy, each": lambda x, y, w: F.cross_entropy(
        x.view(24, 8).float(), torch.arange(24) % 8, reduction="none"
    ) ** 2,
    "cross entropy, smooth": lambda x, y, w: F.cross_entropy(x.view(-1, 8), torch.arange(24) % 8, label_smoothing=0.1),
    "cross entropy, shifted": lambda x, y, w: F.cross_entropy(
        x[:, :-1].reshape(-1, 8), (torch.arange(20) % 8), weight=torch.arange(1.0, 9.0).double()
    ),
    "log_softmax": lambda x, y, w: F.nll_loss(F.log_softmax(x, -1).view(-1, 8), torch.arange(24) % 8),
    "mse": lambda x, y, w: F.mse_loss(x, y),
    "embedding bag": lambda x, y, w: F.conv1d(x, w[:6, :6, None]),
    "dropout off": lambda x, y, w: F.dropout(x, 0.3, training=False) + F.dropout(y, 0.0),
    "a function of autograd": lambda x, y, w: _Same.apply(x * 2) * y,
    "a function that saves": lambda x, y, w: _Bent.apply(x * 2) * y,
    "gradients": lambda x, y, w: _differentiated(x, y), "a hook": lambda x, y, w: _hooked(x) * y,
    "a tensor": lambda x, y, w: x * 2 if isinstance(x, torch.Tensor) and torch.is_tensor(x) else x[0],
    "checkpointed": lambda x, y, w: torch.utils.checkpoint.checkpoint(lambda t: t.tanh() * y, x, use_reentrant=False),
    "detached": lambda x, y, w: x.detach() * y + x.data,
    "uneven": lambda x, y, w: x[..., :5] * y[..., :5],
}  # fmt: skip


def _added(x, y):
    x = x * 1
    x += y
    x *= 2
    return x


def _written(x, y):
    x = x * 1
    x[...] = y
    x[:] += 1
    return x * y


class _Same(torch.autograd.Function):
    """As FSDP2's: returns what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class _Bent(torch.autograd.Function):
    """Computes its gradient with what it was given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * gradient * x


def _differentiated(x, y):
    (gradient,) = torch.autograd.grad((x * y).sum(), x, retain_graph=True)
    return gradient * y


def _hooked(x):
    x = x * 1
    x.register_hook(lambda gradient: 2 * gradient)
    return x.tanh()


#: torch's compiler refuses a reentrant checkpoint.
NOT_COMPILED = {"recomputed": lambda x, y, w: _recomputed(x, y)}


def _line(world_size):
    trainer = sg.Trainer(
        strategy={"name": "parallel", "tensor": world_size}, devices=world_size, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.run.connect()
    strategy = trainer.run.strategy
    return Line(strategy._groups.over("tensor"), strategy.torch_mesh()["tensor"])


#: What a program asks of a tensor, or takes of it as numbers.
ANSWERS = {
    "type": lambda x: x.type(), "nbytes": lambda x: x.nbytes, "len": len,
    "sizes": lambda x: (x.size(), x.size(-1), x.shape, x.numel(), torch.numel(x), x.ndim, x.dim(), x.nelement()),
    "dtype": lambda x: (x.dtype, x.device, x.is_contiguous(), x.is_floating_point(), x.element_size()),
    "item": lambda x: x.max().item(), "float": lambda x: float(x.sum()), "tolist": lambda x: x.tolist(),
    "other names": lambda x: hasattr(x, "logits"), "in": lambda x: 1.5 in x, "bool": lambda x: bool((x > 30).any()),
    "elements": lambda x: [each.shape for each in x], "real": lambda x: x.real.sum().item(),
}  # fmt: skip


def _wrong_answers(line):
    whole = torch.arange(24.0).view(2, 3, 4)
    cut = as_slice(line.part(whole, 1).clone(), 1, 3, line)
    return [name for name, answer in ANSWERS.items() if answer(cut) != answer(whole)]


def _compare(rank, world_size, cuts, compiled):
    line = _line(world_size)
    missed = _wrong_answers(line)
    for cut in cuts:
        for name, function in (FUNCTIONS if compiled else FUNCTIONS | NOT_COMPILED).items():
            own = _compiled(function, line) if compiled else function
            try:
                with see_slices(traced=compiled):
                    missed += [f"{name}, cut along {cut}: {what}" for what in _missed(function, own, cut, line)]
            except Exception as error:  # the same on all ranks
                missed.append(f"{name}, cut along {cut}: {type(error).__name__}: {error}")
    return missed


def _compiled(function, line):
    from torch._dynamo import lookup_backend, reset

    def within_a_step(*tensors):
        with TracedStep(line):
            return function(*tensors)

    reset()  # else it gives up after eight functions
    return torch.compile(within_a_step, backend=PartsBackend(lookup_backend("eager")))


def _missed(function, own_function, cut, line):
    """Return in what `own_function` of tensors that are cut differs from `function` of whole ones."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    w = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    plain, own = ([each.clone().requires_grad_() for each in (x, y, w)] for _ in range(2))
    expected = function(*plain)
    found = own_function(*(as_slice(part_of(each, cut, line), cut, each.shape[cut], line) for each in own[:2]), own[2])
    if found.shape != expected.shape:
        return [f"shape {tuple(found.shape)}"]
    found = all_whole(found)
    factor = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
    for out in (found, expected):
        (out * factor).sum().backward()
    pairs = {"value": (found, expected)} | {
        f"gradient of {name}": (a.grad, b.grad) for name, a, b in zip("xyw", own, plain, strict=True)
    }
    return [name for name, pair in pairs.items() if not torch.allclose(*map(_number, pair), rtol=1e-6, atol=1e-6)]


#: Each gets x, which it does not write to without being told.
WRITES = {
    "elements": lambda x: x[1:, 1:3, 1:4].fill_(0), "moved": lambda x: x.movedim(0, 2).mul_(2),
    "a diagonal": lambda x: x.diagonal(dim1=1, dim2=2).add_(1), "a view of a view": lambda x: x[1:, 1:, 1:].T[0].zero_(),
    "pieces that are cut again": lambda x: [each.sub_(1) for each in x.chunk(2, -1)],
    "a view of a piece": lambda x: x.split(2, 1)[1].transpose(0, 1).add_(1),
    "elements of a piece": lambda x: x.chunk(2, 0)[1].__setitem__(..., 1.0),
    "pieces": lambda x: [each[..., 0].sub_(1) for each in x.tensor_split(2, -1)],
    "another shape": lambda x: x.view(2, 96)[:, 5:7].exp_(), "another size": lambda x: x + torch.ones(4),
}  # fmt: skip


def _refused(rank, world_size):
    line, said = _line(world_size), {}
    for cut, (name, write) in itertools.product(range(3), WRITES.items()):
        whole = torch.zeros(4, 6, 8)
        with torch.no_grad():
            made = as_slice(line.part(whole, cut).clone(), cut, whole.shape[cut], line)
            try:
                write(made)
                write(whole)
                said[cut, name] = torch.equal(all_whole(made), whole)
            except (ConfigError, RuntimeError) as error:
                said[cut, name] = str(error)
    return said


@pytest.mark.slow
def test_no_write_is_lost_and_no_shape_fits_that_would_not_fit_the_whole():
    for said in run_in_processes(_refused, 2):
        size = [said.pop((cut, "another size")) for cut in range(3)]
        assert all("must match the size of tensor b (4)" in each for each in size)
        assert {
            key: each for key, each in said.items() if each is not True and "writes to an activation" not in each
        } == {}
        assert sum(each is not True for each in said.values()) > 10


def test_a_copy_may_be_written_to_and_answers_as_what_it_stands_for():
    copy = marked(torch.arange(6.0).view(2, 3))

    copy.requires_grad_().retain_grad()
    (copy * 2).sum().backward()
    assert copy.grad.tolist() == [[2.0] * 3] * 2
    copy = copy.detach()
    assert type(copy * 2) is type(copy[torch.tensor([1])]) is torch.Tensor
    assert copy.T.contiguous().add_(1).tolist() == [[1, 4], [2, 5], [3, 6]]
    for write in (lambda: copy.T.add_(1), lambda: copy.split(1)[0].zero_(), lambda: copy.__setitem__(0, 1)):
        with pytest.raises(ConfigError, match="writes to an activation that tensor parallelism cuts"):
            write()


def _messages(rank, world_size):
    """Return which moves of whole tensors differ, of sizes that do and do not divide; lists of tensors are not sent."""
    line, wrong = _line(world_size), []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter"):
            patch.delattr(torch.distributed, name)
        for dim, size in itertools.product(range(3), (4, 5)):
            shape = [2, 3, 4]
            shape[dim] = size
            x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape).requires_grad_()
            whole, part = whole_of(part_of(x, dim, line), dim, size, line), summed_part(x, dim, line)
            wrong += [f"gather {dim} {size}"] * (not torch.equal(whole, x))
            wrong += [f"sum {dim} {size}"] * (not torch.equal(part, world_size * line.part(x, dim)))
            part.sum().backward()
            wrong += [f"gradient {dim} {size}"] * (not torch.equal(x.grad, torch.ones_like(x)))
    return wrong


@pytest.mark.slow
def test_whole_tensors_are_sent_as_one():
    """NCCL copies the tensors of a list into one and back."""
    assert run_in_processes(_messages, 2) == [[], []]


def _number(tensor):
    return torch.zeros((), dtype=torch.float64) if tensor is None else tensor.double()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_functions_of_parts_return_what_those_of_wholes_do(world_size):
    for missed in run_in_processes(_compare, world_size, (0, 1, 2), False):
        assert missed == []


@pytest.mark.when_changed(
    "plugins/parallel_unchanged/stratagem_parallel_unchanged/tensor/",
    guard="tests/parity/test_parallel_compiled.py::test_trains_as_without_compile",
)
@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_compiled_functions_of_parts_return_what_those_of_wholes_do(cut):
    for missed in run_in_processes(_compare, 2, (cut,), True, limit_s=400):
        assert missed == []
