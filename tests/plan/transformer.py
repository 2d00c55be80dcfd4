"""Plans of transformers by closed formulas: what one rank computes and sends in a step, from the sizes of a published run.

Bytes of elementwise operations follow from the operations that the source's implementation runs: Megatron of 2021 with fused
kernels and attention that stores its scores, torchtitan in eager mode or compiled, or this project's mixed precision.
"""

from __future__ import annotations

from typing import Any

from attrs import define, field


@define
class Items:
    """Work and messages of one rank, collected."""

    dtype: str
    work: list[dict[str, Any]] = field(factory=list)
    collectives: list[dict[str, Any]] = field(factory=list)

    def matmul(self, phase, m, n, k, count, batch=1, dtype=None):
        self.work.append(
            {"phase": phase, "kind": "matmul", "dtype": dtype or self.dtype, "m": int(m), "n": int(n), "k": int(k),
             "batch": int(batch), "count": int(count)}
        )  # fmt: skip

    def vector(self, phase, num_bytes, count=1):
        if num_bytes > 0 and count > 0:
            self.work.append(
                {
                    "phase": phase,
                    "kind": "vector",
                    "dtype": self.dtype,
                    "op": "",
                    "bytes": num_bytes,
                    "count": int(count),
                }
            )

    def attention(self, phase, flops, count):
        self.work.append(
            {"phase": phase, "kind": "attention", "dtype": self.dtype, "flops": flops, "count": int(count)}
        )

    def send(self, phase, op, axis, ranks, within, payload, calls):
        if ranks > 1 and calls > 0:
            self.collectives.append(
                {"phase": phase, "op": op, "axis": axis, "ranks": int(ranks), "within_node": within, "payload": payload,
                 "calls": int(calls)}
            )  # fmt: skip


def plan(items: Items, row, stages=None, classes=None) -> dict[str, Any]:
    per_node = min(8, row["devices"])
    tokens = row["global_batch"] * row["seq"] // row["dp"]
    bubble = stages and {"stages": stages[0], "microbatches": stages[1], "interleave": stages[2]}
    return {
        "schema": 1, "script": row["model"], "device": row["device"], "data_ranks": row["dp"], "accumulate": 1,
        "world": {"devices_per_node": per_node, "nodes": max(1, row["devices"] // per_node), "world_size": row["devices"]},
        "inputs": {"samples": row["global_batch"] // row["dp"], "tokens": tokens},
        "classes": [{"rank": 0, "ranks": row["devices"], "work": items.work, "collectives": items.collectives, "bubble": bubble}],
    }  # fmt: skip


# --- Megatron: tensor, pipeline and data parallel ------------------------------------------------------------------


def megatron(row) -> dict[str, Any]:
    """fp16 with fused kernels; scores are stored and masked, softmax and dropout run over them; the first stage's rank.

    Activations are recomputed in full ("full"), of the attention's core ("attention"), or not at all. Gradients are reduced
    after the last backward, and parameters of a stage are in one message.
    """
    h, layers, f, v, s, heads = (row[key] for key in ("hidden", "layers", "ffn", "vocab", "seq", "heads"))
    tp, pp, dp, b = row["tp"], row["pp"], row["dp"], row["micro_batch"]
    micro = max(1, row["global_batch"] // (dp * b))
    items, tokens, mine, d = Items("float16"), b * s, layers / pp, h // heads
    times = micro * mine
    full, core = row["recompute"] == "full", row["recompute"] in ("full", "attention")
    flash = row.get("flash", False)
    cut = tp if row["sequence_parallel"] else 1
    # Matrix multiplications: forward, with respect to inputs and to weights, and again.
    for m, n, k in ((tokens, 3 * h / tp, h), (tokens, h, h / tp), (tokens, f / tp, h), (tokens, h, f / tp)):
        items.matmul("forward", m, n, k, times)
        items.matmul("backward", m, k, n, times)
        items.matmul("backward", k, n, m, times)
        if full:
            items.matmul("backward", m, n, k, times)
    scores = b * heads / tp
    if flash:
        items.attention("forward", 4 * scores * s * s * d, times)
        items.attention("backward", 10 * scores * s * s * d, times)
    else:
        for m, n, k in ((s, s, d), (s, d, s)):
            items.matmul("forward", m, n, k, times, batch=scores)
            items.matmul("backward", m, k, n, times, batch=scores)
            items.matmul("backward", k, n, m, times, batch=scores)
            if core:
                items.matmul("backward", m, n, k, times, batch=scores)
    # Elementwise: softmax and dropout over scores; normalization, bias with dropout and residual; bias with GeLU.
    over_scores, over_hidden, over_ffn = scores * s * s, tokens * h, tokens * f / tp
    core_forward = [] if flash else [4 * over_scores, 5 * over_scores]
    rest_forward = (
        [4 * over_hidden / cut] * 2 + [7 * over_hidden / cut] * 2 + [4 * over_ffn] + [4 * over_hidden / tp] * 4
    )
    backward = (
        ([] if flash else [6 * over_scores, 5 * over_scores])
        + [10 * over_hidden / cut] * 2
        + [5 * over_hidden / cut] * 2
    )
    backward += (
        [6 * over_hidden / cut] * 2 + [6 * over_ffn] + [4 * over_hidden / tp] * 4 + [2 * over_ffn, 6 * over_hidden / tp]
    )
    for num_bytes in core_forward + rest_forward:
        items.vector("forward", num_bytes, times)
    for num_bytes in backward + (core_forward if core else []) + (rest_forward if full else []):
        items.vector("backward", num_bytes, times)
    if pp == 1 or not row.get("interleave_head", False):
        _head(items, tokens, h, v / tp, micro / pp, "float16")
    # Messages: two all-reduces of a layer's activations each way, with sequence parallelism as gathers and scatters.
    for phase, passes in (("forward", 1), ("backward", 2 if full else 1)):
        items.send(phase, "all_reduce", "tensor", tp, tp <= 8, 2 * over_hidden, 2 * times * passes)
    if pp > 1:
        for phase in ("forward", "backward"):
            items.send(phase, "send", "pipeline", 2, False, 2 * over_hidden / tp, micro * row["interleave"])
            items.send(phase, "all_gather", "tensor", tp, tp <= 8, 2 * over_hidden, micro * row["interleave"])
    parameters = (mine * (4 * h * h + 2 * h * f) + h * v / pp) / tp
    overlap = bool(row.get("dp_overlap"))
    items.send("backward" if overlap else "optimizer", "all_reduce", "data", dp, dp * tp <= 8, 2 * parameters, 1)
    items.vector("optimizer", 48 * parameters)
    return plan(items, row, (pp, micro, row["interleave"]) if pp > 1 else None)


def _head(items, tokens, h, v, micro, dtype):
    """The output layer and the loss: logits in 16 bits, the loss in fp32."""
    if micro < 1:  # of a pipeline, only one stage has it: its share
        tokens, micro = tokens * micro, 1
    items.matmul("forward", tokens, v, h, micro, dtype=dtype)
    items.matmul("backward", tokens, h, v, micro, dtype=dtype)
    items.matmul("backward", h, v, tokens, micro, dtype=dtype)
    for num_bytes in (6, 8):
        items.vector("forward", num_bytes * tokens * v, micro)
    for num_bytes in (4, 12, 6):
        items.vector("backward", num_bytes * tokens * v, micro)


# --- torchtitan: FSDP2, with tensor parallelism; gated layers ---------------------------------------------------------


def torchtitan(row) -> dict[str, Any]:
    """bf16 or fp8 with SDPA's flash kernel; parameters gathered in each pass, gradients reduced in fp32."""
    h, layers, f, v, s, heads = (row[key] for key in ("hidden", "layers", "ffn", "vocab", "seq", "heads"))
    tp, pp, dp, b, shard = row["tp"], row["pp"], row["dp"], row["micro_batch"], row["shard"]
    fp8 = row["precision"] == "fp8"
    micro = max(1, row["global_batch"] // (dp * b))
    items, tokens, d = Items("bfloat16"), b * s, h // heads
    times, mine = micro * layers / pp, layers / pp
    kv, dtype = (row["kv_heads"] or heads) * d, "float8_e4m3fn" if fp8 else "bfloat16"
    full, selective = row["recompute"] == "full", str(row["recompute"]).startswith("selective")
    shapes = [(h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)]
    for i, (n, k) in enumerate(shapes):
        column = i not in (3, 6)
        n, k = (n / tp, k) if column else (n, k / tp)
        items.matmul("forward", tokens, n, k, times, dtype=dtype)
        items.matmul("backward", tokens, k, n, times, dtype=dtype)
        items.matmul("backward", k, n, tokens, times, dtype=dtype)
        if full or (selective and i % 2):  # every second multiplication is recomputed
            items.matmul("backward", tokens, n, k, times, dtype=dtype)
        if fp8:  # the largest value of each operand, then the cast: inputs, weights, gradients
            for phase in ("forward", "backward"):
                items.vector(phase, 5 * (tokens * k + n * k), times)
            items.vector("backward", 5 * tokens * n, times)
    scores = b * heads / tp * s * s * d
    items.attention("forward", 4 * scores, times)
    items.attention("backward", 10 * scores, times)
    if full:
        items.attention("backward", 4 * scores, times)
    # Elementwise, in bf16: fused by the compiler, or one kernel for each operation, with rotary positions in fp32.
    hid, ffn, rot = tokens * h / (tp if row["sequence_parallel"] else 1), tokens * f / tp, tokens * (h + kv) / tp
    if row["compile"]:
        forward = [4 * hid, 4 * hid, 6 * hid, 4 * rot, 6 * ffn]
        backward = [8 * hid, 8 * hid, 6 * hid, 4 * rot, 10 * ffn]
    else:
        forward = (
            [6 * hid, 6 * hid, 10 * hid, 6 * hid, 4 * hid] * 2
            + [6 * hid] * 2
            + [6 * rot, 12 * rot, 6 * rot, 4 * ffn, 6 * ffn]
        )
        backward = (
            [6 * hid, 12 * hid, 12 * hid, 6 * hid, 6 * hid] * 2
            + [6 * hid] * 2
            + [6 * rot, 12 * rot, 6 * rot, 10 * ffn, 6 * ffn]
        )
    for num_bytes in forward:
        items.vector("forward", num_bytes, times)
    for num_bytes in backward + (forward if full or selective else []):
        items.vector("backward", num_bytes, times)
    _head(items, tokens, h, v / tp, micro / pp, "bfloat16")
    parameters = mine * sum(n * k for n, k in shapes) / tp + 2 * h * v / tp / pp
    for phase, passes in (("forward", 1), ("backward", 2 if full else 1)):
        for op in ("all_gather", "reduce_scatter"):
            items.send(phase, op, "tensor", tp, tp <= 8, 2 * tokens * h, 2 * times * passes)
    if pp > 1:
        for phase in ("forward", "backward"):
            items.send(phase, "send", "pipeline", 2, False, 2 * tokens * h / tp, micro * row["interleave"])
    within, per_layer = shard * tp <= 8, parameters / mine
    gathered = (1 if fp8 else 2) * per_layer
    for phase in ("forward", "backward"):
        items.send(phase, "all_gather", "shard", shard, within, gathered, mine)
        items.vector(phase, 2 * gathered, mine)
    items.send("backward", "reduce_scatter", "shard", shard, within, 4 * per_layer, mine)
    items.vector("backward", 8 * per_layer, mine)
    if dp > shard:
        items.send("backward", "all_reduce", "replicate", dp / shard, False, 4 * per_layer / shard, mine)
    items.vector("optimizer", 32 * parameters / shard)
    return plan(items, row, (pp, micro, row["interleave"]) if pp > 1 else None)


# --- DeepSpeed's ZeRO-3 around Megatron's layers -----------------------------------------------------------------------


def zero3(row) -> dict[str, Any]:
    """Megatron's layers on each rank; parameters gathered for each pass of each micro-batch, gradients scattered."""
    base = megatron({**row, "dp": 1, "global_batch": row["global_batch"] // row["dp"], "devices": 8})
    (ranks,) = base["classes"]
    items = Items("float16", ranks["work"][:-1])
    h, layers, f, dp = row["hidden"], row["layers"], row["ffn"], row["dp"]
    micro, per_layer = row["global_batch"] // (dp * row["micro_batch"]), 4 * h * h + 2 * h * f
    for size in (3 * h * h, h * h, h * f, h * f):  # each parameter in a message of its own
        for phase, op in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
            items.send(phase, op, "shard", dp, False, 2 * size, layers * micro)
    items.vector("optimizer", 48 * layers * per_layer / dp)
    return plan(items, row)


# --- Measured: a GPT in this project ------------------------------------------------------------------------------------


def measured(row) -> dict[str, Any]:
    """A GPT with biases and an output layer of its own, with autocast or in one number format, on one device."""
    layers, h, heads = row["shape"]
    b, s, v = row["micro"], 1024, 50304
    mixed, dtype = row["precision"] == "bf16-mixed", "float32" if row["precision"] == "32-true" else "bfloat16"
    items, tokens, e = Items(dtype), row["micro"] * s, 4 if row["precision"] == "32-true" else 2
    wide = 4 if mixed else e  # bytes of what autocast keeps in fp32
    hid, weight = tokens * h, h * h
    linears = [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)]

    def forward(phase, linears):
        for n, k in linears:
            items.matmul(phase, tokens, n, k, layers)
            if mixed:
                items.vector(phase, 6 * n * k, layers)
                items.vector(phase, 6 * n, layers)
        for num_bytes in [2 * wide * hid] * 2 + [(2 * wide + e) * hid] * 2 + [8 * e * hid] + [6 * hid] * 2 * mixed:
            items.vector(phase, num_bytes, layers)
        items.attention(phase, 4 * tokens * s * h, layers)

    forward("forward", linears)
    if row["ck"]:  # it stops before the layer's last multiplication, of which backward needs no output
        forward("backward", linears[:-1])
    for n, k in linears:
        items.matmul("backward", tokens, k, n, layers)
        items.matmul("backward", k, n, tokens, layers)
        items.vector("backward", e * tokens * n, layers)
        if mixed:
            items.vector("backward", 6 * n * k, layers)
            items.vector("backward", 6 * n, layers)
    for num_bytes in (
        [3 * wide * hid] * 2
        + [2 * wide * hid] * 2
        + [3 * wide * hid] * 2
        + [12 * e * hid, 6 * e * hid]
        + [6 * hid] * 4 * mixed
    ):
        items.vector("backward", num_bytes, layers)
    items.attention("backward", 10 * tokens * s * h, layers)
    logits = tokens * v
    items.matmul("forward", tokens, v, h, 1)
    items.matmul("backward", tokens, h, v, 1)
    items.matmul("backward", h, v, tokens, 1)
    for num_bytes in ([6] if mixed else []) + [2 * wide]:
        items.vector("forward", num_bytes * logits)
    for num_bytes in [wide, 3 * wide] + ([6] if mixed else []):
        items.vector("backward", num_bytes * logits)
    stored = 2 if row["precision"] == "bf16-true" else 4
    parameters, tensors = row["parameters"], 12 * layers + 5
    items.vector("backward", 2 * stored * h * v)
    for passes in (2, 3, 2, 4, 2, 2, 2, 4):  # AdamW on lists of tensors: 8 passes, a kernel for some dozen tensors each
        items.vector("optimizer", passes * stored * parameters, 1)
    del weight, tensors, b
    small = {
        **row,
        "model": "GPT",
        "device": "h200-sxm-141gb",
        "dp": 1,
        "devices": 1,
        "global_batch": row["micro"],
        "seq": s,
    }
    if row["strategy"] == "fsdp":
        for phase in ("forward", "backward"):
            items.vector(phase, (6 + 4 + 4) * parameters / layers, layers)
        items.vector("backward", 12 * parameters / layers, layers)
    if row["strategy"] == "ddp":
        items.vector("backward", 16 * parameters / 25, 25)
    return plan(items, small)
