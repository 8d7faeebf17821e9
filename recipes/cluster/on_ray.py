"""Run a script on Ray, in one actor for each process.

python recipes/cluster/on_ray.py 2 recipes/fashion_mnist.py --resume auto

Each actor is a process of the run: change `num_cpus` to `num_gpus` on GPUs. A process can
join only one run, so another run needs new actors.
"""

import os
import runpy
import socket
import sys

import ray  # pyright: ignore[reportMissingImports]

from eqxshard.distributed import ADDRESS, PROCESS, PROCESSES


@ray.remote(num_cpus=1)  # On GPUs: num_gpus=1.
class Worker:
    def address(self):
        """An address on this host for process 0 to listen on."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, address, processes, process, words):
        """Run a script as a process of the run."""
        place = {ADDRESS: address, PROCESSES: str(processes), PROCESS: str(process)}
        os.environ.update(place)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main(processes, *words):
    words = [os.path.abspath(words[0]), *words[1:]]
    workers = [Worker.remote() for _ in range(processes)]  # pyright: ignore
    address = ray.get(workers[0].address.remote())
    place = address, processes
    ray.get([each.run.remote(*place, i, words) for i, each in enumerate(workers)])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
