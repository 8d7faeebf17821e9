"""Run a contestant in a process of its own: `python benchmarks/_peers MODULE TASK`.

It builds everything, reports that it is ready, and then reads commands from stdin, one per
line: `train`, or `epoch` for training and evaluation. It answers each with one line of
JSON. While it waits it uses no CPU time.
"""

import importlib
import json
import os
import sys
import time

from _task import Contestant, Task

# Keep stdout for the answers, and send all other output to stderr.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

task = Task(**json.loads(sys.argv[2]))
contestant: Contestant = importlib.import_module(sys.argv[1]).make(task)
print(json.dumps({"ready": True}), file=answers)
for command in sys.stdin:
    start = time.perf_counter()
    contestant.train()
    accuracy, loss = (
        contestant.evaluate() if command == "epoch\n" else (float("nan"), float("nan"))
    )
    seconds = time.perf_counter() - start
    results = {"seconds": seconds, "accuracy": accuracy, "loss": loss}
    print(json.dumps(results), file=answers)
