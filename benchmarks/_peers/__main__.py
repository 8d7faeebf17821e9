"""A contestant, in a process of its own: `python benchmarks/_peers MODULE TASK`.

It builds everything, says that it is ready, and then waits for orders, one a line:
`train`, or `epoch`, which is training and evaluation. Each is answered by one line of
JSON. While it waits it takes no time of the processor, which others need.
"""

import importlib
import json
import os
import sys
import time

from _task import Contestant, Task

# Whatever else is printed goes elsewhere.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

task = Task(**json.loads(sys.argv[2]))
contestant: Contestant = importlib.import_module(sys.argv[1]).make(task)
print(json.dumps({"ready": True}), file=answers)
for order in sys.stdin:
    start = time.perf_counter()
    contestant.train()
    accuracy, loss = (
        contestant.evaluate() if order == "epoch\n" else (float("nan"), float("nan"))
    )
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "accuracy": accuracy, "loss": loss}
    print(json.dumps(found), file=answers)
