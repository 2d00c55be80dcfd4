"""Step time and CPU time of each axis of `parallel`, and of the same thing written by hand in plain torch.

python benchmarks/parallel.py [--cases tensor pipeline ...] [--steps 20] [--rounds 7]
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import stratagem as sg

WIDTH, HIDDEN, BLOCKS, BATCH, MICROBATCHES = 512, 2048, 4, 128, 4
#: Number of processes, and the options of the strategy.
CASES = {
    "replicate": (2, {"replicate": 2}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2, "microbatches": MICROBATCHES, "balance": [2, 2]}),
    "tensor_and_shard": (4, {"tensor": 2, "shard": 2}),
    "pipeline_llama": (2, {"pipeline": 2, "microbatches": MICROBATCHES}),
}
#: Of the model of transformers: words, positions, samples, layers.
WORDS, LENGTH, SAMPLES, LAYERS = 1024, 64, 16, 8


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


class Model(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def parallel_plan(self):
        return {"net.*.0": "colwise", "net.*.2": "rowwise"}

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_start(self):
        self.clock = Clock()

    def on_train_end(self):
        self.took = self.clock.read()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, attn_implementation="sdpa", **sizes))


class Llama(Model):
    """As its users have it: the model of transformers as it is."""

    def __init__(self) -> None:
        sg.Module.__init__(self)
        self.net = llama()

    parallel_plan = None

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch[0], labels=batch[1]).loss


class HalfOfLlama(nn.Module):
    """What is written to cut it by hand."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        whole = llama()
        half = LAYERS // 2
        self.rotary = whole.model.rotary_emb
        self.layers = whole.model.layers[:half] if rank == 0 else whole.model.layers[half:]
        self.before = whole.model.embed_tokens if rank == 0 else nn.Identity()
        self.after = nn.Identity() if rank == 0 else nn.Sequential(whole.model.norm, whole.lm_head)

    def forward(self, x):
        x = self.before(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return self.after(x)


def next_word_loss(logits, words):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def batches_of(case: str, steps: int):
    if case == "pipeline_llama":
        return [(words, words) for words in (torch.randint(WORDS, (SAMPLES, LENGTH)) for _ in range(steps))]
    return [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(steps)]


class Clock:
    """Seconds since it was made, and seconds of CPU of this process."""

    def __init__(self) -> None:
        dist.barrier()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        cpu = time.process_time() - self.cpu
        dist.barrier()
        return time.perf_counter() - self.wall, cpu


def by_hand(case: str, batches) -> tuple[float, float]:
    """Train with torch alone; return seconds of time and of CPU."""
    net, forward_backward = network(), None
    size = dist.get_world_size()
    if case == "replicate":
        net = DistributedDataParallel(net)
    elif case.startswith("pipeline"):
        rank, is_llama = dist.get_rank(), case == "pipeline_llama"
        net = HalfOfLlama(rank) if is_llama else net[:2] if rank == 0 else net[2:]
        stage = PipelineStage(net, rank, 2, torch.device("cpu"))
        loss = next_word_loss if is_llama else nn.functional.mse_loss
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)

        def forward_backward(x, y):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
    else:
        names = ("shard", "tensor") if case == "tensor_and_shard" else ("tensor",)
        mesh = init_device_mesh("cpu", (size // 2, 2) if len(names) == 2 else (size,), mesh_dim_names=names)
        styles = {f"{index}.0": ColwiseParallel() for index in range(BLOCKS)}
        styles |= {f"{index}.2": RowwiseParallel() for index in range(BLOCKS)}
        parallelize_module(net, mesh["tensor"], styles)
        if case == "tensor_and_shard":
            fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    clock = Clock()
    for x, y in batches:
        if forward_backward is None:
            nn.functional.mse_loss(net(x), y).backward()
        else:
            forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
    return clock.read()


def ours(case: str, batches, **more) -> tuple[float, float]:
    """Train with a Trainer; return seconds of time and of CPU."""
    size, options = CASES[case]
    model = Llama() if case == "pipeline_llama" else Model()
    trainer = sg.Trainer(
        max_epochs=1, strategy={"name": "parallel", **options, **more}, devices=size, accelerator="cpu", barebones=True
    )
    trainer.fit(model, batches)
    return model.took


def measure(case: str, steps: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    batches = batches_of(case, steps)
    variants = {"by hand": by_hand, "stratagem": ours, "by hand again": by_hand}
    if case.startswith("pipeline"):  # which compares micro-batches in steps 1, 2, 4, 8 and so on
        variants["stratagem, check_parts=False"] = functools.partial(ours, check_parts=False)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, variant in variants.items():
            wall, cpu = variant(case, batches)
            total = torch.tensor(cpu, dtype=torch.float64)
            dist.all_reduce(total)
            if round_number:  # the first round is a warm-up
                found[name].append((wall / steps, float(total) / steps))
    return found


class Measure:
    """The function of each process; a class, so that it can be pickled."""

    def __init__(self, case: str, steps: int, rounds: int) -> None:
        self.case, self.steps, self.rounds = case, steps, rounds

    def __call__(self, run: sg.Run):
        os.environ["LOCAL_RANK"] = str(run.world.local_rank)  # the measured trainers use this process group
        return measure(self.case, self.steps, self.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in network().parameters())
    print(f"torch {torch.__version__}, {parameters / 1e6:.1f}M parameters, gloo, one thread for each rank\n")
    print("| | | ms a step, median | relative | ms of CPU, all ranks | relative |\n|---|---|---|---|---|---|")
    for case in arguments.cases:
        run = sg.Run(strategy="ddp_fork", devices=CASES[case][0], accelerator="cpu")
        found = run.launch(Measure(case, arguments.steps, arguments.rounds))
        base = [statistics.median(values) for values in zip(*found["by hand"], strict=True)]
        for name, values in found.items():
            wall, cpu = (statistics.median(each) for each in zip(*values, strict=True))
            times = f"{wall * 1e3:.1f} | {wall / base[0]:.3f} | {cpu * 1e3:.1f} | {cpu / base[1]:.3f}"
            print(f"| {case} | {name} | {times} |", flush=True)


if __name__ == "__main__":
    main()
