"""How long a collective keeps the links inside hosts, and the network between them."""

import math

import numpy as np

from ..compiled._communication import Operation
from ._efficiency import AT_PEAKS, Efficiency
from ._targets import Target

#: The names of the links inside hosts, and of the network between them.
LINKS = ("link", "network")


def link_seconds(operation: Operation, target: Target) -> float | None:
    """The seconds of one run of a collective at the peaks, if nothing else uses the links.

    **Arguments:**

    - `operation`: the collective.
    - `target`: the devices.

    **Returns:**

    The seconds; `None` if the links that it goes over, or the groups, are not known.
    """
    seconds = seconds_by_link(operation, target, AT_PEAKS)
    return None if seconds is None else max(seconds.values())


def seconds_by_link(
    operation: Operation, target: Target, efficiency: Efficiency
) -> dict[str, float] | None:
    """The seconds that one run of a collective takes on each of `LINKS` that it uses.

    All devices of a host send at once, each through its own port. Between hosts, a
    collective over groups of several devices of each host sends every part over the
    network once: the slower of the two, links or network, decides.

    **Arguments:**

    - `operation`: the collective.
    - `target`: the devices.
    - `efficiency`: how much of their peaks they reach.

    **Returns:**

    The seconds, not empty; `None` if the links that it goes over, or the groups, are not
    known.
    """
    groups = operation.groups
    if groups is None or target.link is None:
        return None
    hosts = groups // target.per_host
    devices, across = groups.shape[1], len(np.unique(hosts[0]))
    permutes = operation.kind == "collective-permute"
    link, each = target.link, 2 if permutes else devices / across
    if not target.switched and each > 1:
        link *= (each - 1) / max(target.per_host - 1, 1)
    steps, hops = _ring(operation.kind, devices, across)
    within = efficiency.sending(operation.sent / link, efficiency.link, steps, hops)
    if (hosts == hosts[:, :1]).all():
        return {"link": within}
    if target.network is None:
        return None
    if permutes:
        alone = (hosts[:, 0] != hosts[:, 1]).all()
        beyond = float(operation.sent)
    elif "all-to-all" in operation.kind:
        alone = each == 1
        beyond = operation.bytes * (devices - each) / devices
    else:
        alone = each == 1
        # The whole array is gathered or reduced; each host sends all of it but its part.
        whole = operation.sent * devices / max(devices - 1, 1)
        beyond = whole * (across - 1) / across / each
    peak = beyond / target.network
    between = {"network": efficiency.sending(peak, efficiency.network, steps, hops)}
    if not alone:  # Some bytes go to other devices of the same host.
        between["link"] = within
    return between


def _ring(kind: str, devices: int, hosts: int) -> tuple[int, int]:
    """How often a collective passes data on, one after the other: inside and between hosts.

    Data go around a ring, from each device to the next. Those of an all-reduce go around it
    twice, but up and down a tree between hosts. All pairs of an all-to-all or a permutation
    send at the same time.
    """
    if kind == "all-reduce":
        return 2 * (devices - hosts), 2 * math.ceil(math.log2(hosts))
    if kind in ("all-gather", "reduce-scatter", "collective-broadcast"):
        return devices - hosts, hosts - 1
    return int(hosts == 1), int(hosts > 1)
