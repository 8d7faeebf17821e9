"""A GPT in plain PyTorch, in the manner of nanoGPT, with all that makes it fast.

One product for queries, keys and values, `scaled_dot_product_attention`, fused AdamW, no
synchronisation but one at the end of a turn; on a GPU also `torch.compile`, batches from
pinned memory and, for bfloat16, autocast. Biases, LayerNorm, positions and GELU (its
approximation by tanh) are those of GPT-2.
"""

import importlib
import os
from typing import Any

import numpy as np
import safetensors.numpy
from _gpt_task import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Contestant,
    Sequences,
    Task,
)

torch: Any = importlib.import_module("torch")
nn: Any = torch.nn
F: Any = torch.nn.functional


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self, heads: int, embed: int, mlp: int, bias: bool, **_: Any):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(embed, bias=bias)
        self.qkv = nn.Linear(embed, 3 * embed, bias=bias)
        self.out = nn.Linear(embed, embed, bias=bias)
        self.norm2 = nn.LayerNorm(embed, bias=bias)
        self.up = nn.Linear(embed, mlp, bias=bias)
        self.down = nn.Linear(mlp, embed, bias=bias)

    def forward(self, x: Any) -> Any:
        batch, seq, embed = x.shape
        split = (batch, seq, self.heads, embed // self.heads)
        query, key, value = (
            y.view(split).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(embed, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, embed))
        y = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(y)


class GPT(nn.Module):
    """A GPT, which returns the mean loss of some tokens."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        embed = sizes["embed"]
        self.embedding = nn.Embedding(sizes["vocab_size"], embed)
        self.position = nn.Embedding(sizes["seq_len"], embed)
        self.blocks = nn.ModuleList(Block(**sizes) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(embed, bias=sizes["bias"])

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def load_weights(model: Any, path: str) -> None:
    """Start from the weights of `recipes/gpt_model.py`, by its names."""
    file = safetensors.numpy.load_file(path)
    arrays = {name: torch.from_numpy(array) for name, array in file.items()}
    state = {
        "embedding.weight": arrays["embedding"],
        "position.weight": arrays["position"],
        "norm.weight": arrays["norm.weight"],
        "norm.bias": arrays.get("norm.bias"),
    }
    names = {"norm1": "norm1", "norm2": "norm2", "up": "mlp.up", "down": "mlp.down"}
    names |= {"qkv": "attention.qkv", "out": "attention.out"}
    for name, ours in names.items():
        suffix = (".weight", ".bias") if name.startswith("norm") else ("", "_bias")
        for kind, end in zip(("weight", "bias"), suffix):
            stacked = arrays.get(f"blocks.{ours}{end}")
            for layer, array in enumerate([] if stacked is None else stacked):
                if name == "qkv":
                    # From heads of (query, key, value) to (queries, keys, values).
                    array = array.transpose(0, 1)
                target = model.get_parameter(f"blocks.{layer}.{name}.{kind}")
                state[f"blocks.{layer}.{name}.{kind}"] = array.reshape(target.shape)
    state = {name: array for name, array in state.items() if array is not None}
    model.load_state_dict(state)


def make(task: Task) -> Contestant:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    # TF32, JAX's default.
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if task.gpu else "cpu")
    plain = GPT(task.sizes)
    load_weights(plain, task.weights)
    plain.to(device)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    model = torch.compile(plain) if task.gpu else plain
    dtype = getattr(torch, task.precision)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    data, done = Sequences(task), 0

    def batch(step: int) -> list[Any]:
        rows = step * task.batch_size + np.arange(task.batch_size)
        arrays = data.gather(rows % len(data)).values()
        tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
        if not task.gpu:
            return tensors
        return [each.pin_memory().to(device, non_blocking=True) for each in tensors]

    def train() -> dict[str, float]:
        nonlocal done
        total = torch.zeros((), device=device)
        tokens, targets = batch(done)
        for _ in range(task.steps):
            for group in optimizer.param_groups:
                group["lr"] = task.learning_rate(done)
            with autocast:
                loss = model(tokens, targets)
            # The next batch is made while the GPU computes.
            done += 1
            tokens, targets = batch(done)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        return {"loss": total.item() / task.steps}

    return Contestant(train)
