"""PyTorch as in its tutorials: eager on the CPU, compiled on a GPU.

Batches come from a `DataLoader` over a `TensorDataset`. With the variant `resident`, the
images are kept on the GPU and batches are gathered there. With `ddp`, each of several
single-threaded processes computes its part of each batch (`DistributedDataParallel` over
gloo, `DistributedSampler`). The last batch of an epoch is smaller.
"""

import importlib
import os
from typing import Any

from _task import (
    B2,
    DEVIATION,
    LEARNING_RATE,
    MEAN,
    SIZES,
    WEIGHT_DECAY,
    Contestant,
    Task,
    features,
)

torch: Any = importlib.import_module("torch")
data: Any = importlib.import_module("torch.utils.data")
dist: Any = importlib.import_module("torch.distributed")
nn, cross_entropy = torch.nn, torch.nn.functional.cross_entropy


def make_model(conv1: int, conv2: int, kernel2: int, hidden: int) -> Any:
    return nn.Sequential(
        nn.Conv2d(1, conv1, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(conv1, conv2, kernel2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(features(conv2, kernel2), hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def make(task: Task) -> Contestant:
    is_ddp = task.variant == "ddp"
    threads = 1 if is_ddp else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if task.gpu else "cpu")
    model = make_model(*SIZES[task.model]).to(device)
    if is_ddp:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if task.gpu:
        # TF32, JAX's default, and PyTorch's for convolutions.
        torch.set_float32_matmul_precision("high")
        # Compiled once per batch size, because code for any size is slower.
        model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, B2), weight_decay=WEIGHT_DECAY
    )
    train_batches = batches(task, "train", shuffle=True)
    test_batches = batches(task, "test", shuffle=False)
    epochs = 0

    def predict(image: Any) -> Any:
        return model((image.to(device)[:, None].float() / 255 - MEAN) / DEVIATION)

    def train() -> None:
        nonlocal epochs
        epochs += 1
        if is_ddp:
            train_batches.sampler.set_epoch(epochs)
        model.train()
        total = torch.zeros((), device=device)
        for image, label in train_batches:
            loss = cross_entropy(predict(image), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()

    @torch.no_grad()
    def evaluate() -> tuple[float, float]:
        model.eval()
        totals = torch.zeros(3, device=device)
        for image, label in test_batches:
            label = label.to(device)
            logits = predict(image)
            loss = cross_entropy(logits, label, reduction="sum")
            correct = (logits.argmax(1) == label).sum()
            count = torch.full_like(loss, len(label))
            totals += torch.stack([correct, loss, count])
        if is_ddp:
            dist.all_reduce(totals)
        correct, loss, count = totals.tolist()
        return correct / count, loss / count

    return Contestant(train, evaluate)


def batches(task: Task, split: str, *, shuffle: bool) -> Any:
    image, label = task.load(split)
    arrays = torch.from_numpy(image), torch.from_numpy(label).long()
    if task.variant == "resident":
        return Resident([x.to("cuda") for x in arrays], task.batch_size, shuffle)
    examples = data.TensorDataset(*arrays)
    if task.variant == "ddp":
        sampler = data.DistributedSampler(examples, shuffle=shuffle)
        return data.DataLoader(examples, task.batch_size // task.devices, sampler=sampler)
    return data.DataLoader(examples, task.batch_size, shuffle=shuffle, pin_memory=task.gpu)


class Resident:
    """Batches of tensors that are already on the device."""

    def __init__(self, arrays: Any, batch_size: int, shuffle: bool):
        self.arrays, self.batch_size, self.shuffle = arrays, batch_size, shuffle

    def __iter__(self) -> Any:
        length, device = len(self.arrays[0]), self.arrays[0].device
        order = torch.randperm if self.shuffle else torch.arange
        for rows in order(length, device=device).split(self.batch_size):
            yield [array[rows] for array in self.arrays]
