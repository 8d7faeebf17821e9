"""How long a collective takes over the links of a target."""

import numpy as np

from ..compiled._communication import Operation
from ._targets import Target


def link_seconds(operation: Operation, target: Target) -> float | None:
    """The seconds of one run of a collective, if nothing else uses the links.

    All devices of a host send at once, each through its own port. Between hosts, a
    collective over groups of several devices of each host sends every part over the
    network once: the slower of the two, links or network, decides.

    **Returns:**

    The seconds; `None` if the links that it goes over, or the groups, are not known.
    """
    groups = operation.groups
    if groups is None or target.link is None:
        return None
    link = target.link * target.efficiency
    hosts = groups // target.per_host
    crossing = bool((hosts != hosts[:, :1]).any())
    if not crossing:
        return operation.sent / link
    if target.network is None:
        return None
    network = target.network * target.efficiency
    devices = groups.shape[1]
    if operation.kind == "collective-permute":
        return operation.sent / network
    across = len(np.unique(hosts[0]))
    each = devices / across
    if "all-to-all" in operation.kind:
        beyond = operation.bytes * (devices - each) / devices
        return max(operation.sent / link, beyond / network)
    # The whole that is gathered or reduced, of which each host sends all but its part.
    whole = operation.sent * devices / max(devices - 1, 1)
    beyond = whole * (across - 1) / across / each
    return max(operation.sent / link, beyond / network)
