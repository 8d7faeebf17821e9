"""Run a contestant in a process of its own: `python benchmarks/_peers MODULE TASK`.

It builds everything, reports that it is ready, and then reads commands from stdin, one per
line: `train`, or `epoch` for training and evaluation. It answers each with one line of
JSON: the seconds, the seconds of all its threads on the CPU, and what the contestant
returned. While it waits it uses no CPU time.
"""

import importlib
import json
import os
import sys
import time

# Keep stdout for the answers, and send all other output to stderr.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

module = importlib.import_module(sys.argv[1])
contestant = module.make(module.Task(**json.loads(sys.argv[2])))
print(json.dumps({"ready": True}), file=answers)
for command in sys.stdin:
    start, cpu_start = time.perf_counter(), time.process_time()
    results = contestant.train() or {}
    if command == "epoch\n":
        results["accuracy"], results["loss"] = contestant.evaluate()
    results["seconds"] = time.perf_counter() - start
    results["cpu_seconds"] = time.process_time() - cpu_start
    print(json.dumps(results), file=answers)
