"""The collectives of a step on GPUs, guessed from its partitioned text on CPUs.

XLA's compiler for CPUs changes what is sent: it widens bfloat16, and has no
reduce-scatters. So the text is taken right after the partitioner, where it is the same on
all platforms, and the later passes of the compiler for GPUs are imitated here: equal
collectives are merged, unused ones are dropped, an all-reduce of which each device keeps a
part becomes a reduce-scatter, and the sum of two all-reduces becomes one of the sum.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from ..compiled._communication import Operation
from ..compiled._hlo import VIEWS, Instruction, Module, Shape
from ._schedule import key_of

_Key = tuple[str, str]


def rewrite_collectives(module: Module, operations: Iterable[Operation]) -> list[Operation]:
    """The collectives that a compiler for GPUs would leave."""
    used, users = _find_used(module)
    kept: dict[object, Operation] = {}
    for operation in operations:
        start = operation.start
        if key_of(operation) in used:
            groups = None if operation.groups is None else operation.groups.tolist()
            same = (
                *(start.computation, start.opcode, start.type, start.operands),
                *(start.attribute("dimensions"), str(groups)),
                _reduction(module, operation),
            )
            kept.setdefault(same, operation)
    found = {key_of(op): op for op in kept.values()}
    scattered = {key: _scatter(op, users) for key, op in found.items()}
    merged = _merge_sums(module, scattered, users)
    return [op for key, op in scattered.items() if key not in merged]


def _find_used(module: Module) -> tuple[set[_Key], Mapping[_Key, list[Instruction]]]:
    """The instructions that a result depends on, and the users of each among them."""
    used: set[_Key] = set()
    users: dict[_Key, list[Instruction]] = {}
    queue = [module.computations[module.entry][-1]] if module.entry else []
    while queue:
        instruction = queue.pop()
        key = instruction.computation, instruction.name
        if key in used:
            continue
        used.add(key)
        for name in instruction.operands:
            operand = instruction.computation, name
            users.setdefault(operand, []).append(instruction)
            if operand in module.by_name:
                queue.append(module.by_name[operand])
        for _, name in instruction.called():
            if module.computations.get(name):
                queue.append(module.computations[name][-1])
    return used, users


def _reduction(module: Module, operation: Operation) -> tuple[str, ...]:
    """What a reduction computes of two values, whatever its computation is called."""
    name = dict(operation.start.called()).get("to_apply", "")
    return tuple(x.opcode for x in module.computations.get(name, ()))


def _scatter(operation: Operation, users: Mapping[_Key, list[Instruction]]) -> Operation:
    """The reduce-scatter that an all-reduce is, if each device keeps only its part."""
    if operation.kind != "all-reduce" or operation.groups is None:
        return operation
    (whole, *more), devices = operation.shapes, operation.groups.shape[1]
    uses = list(_uses(operation.start, users))
    if more or not uses or any(x.opcode != "dynamic-slice" for x in uses):
        return operation
    parts = {x.shapes[0].bytes * whole.bytes // _source_bytes(x, whole) for x in uses}
    if parts != {whole.bytes // devices}:
        return operation
    part = Shape(whole.dtype, uses[0].shapes[0].dims)
    return dataclasses.replace(operation, kind="reduce-scatter", shapes=(part,))


def _source_bytes(use: Instruction, whole: Shape) -> int:
    """The bytes of the whole, in the dtype that it is sliced in."""
    each = Shape(use.shapes[0].dtype, (8,)).bytes
    return whole.bytes * each // Shape(whole.dtype, (8,)).bytes


def _merge_sums(
    module: Module,
    operations: Mapping[_Key, Operation],
    users: Mapping[_Key, list[Instruction]],
) -> set[_Key]:
    """The sums that are added to another one of the same kind and groups."""
    merged: set[_Key] = set()
    for key, operation in operations.items():
        uses = list(_uses(operation.start, users, ("dynamic-slice",)))
        if len(uses) != 1 or uses[0].opcode != "add" or operation.groups is None:
            continue
        if _reduction(module, operation)[-1:] != ("add",):
            continue
        others = [
            other
            for name in uses[0].operands
            if (other := _reduced_value(module, (key[0], name), operations)) is not None
        ]
        for other in others:
            twin = operations[other]
            same = (
                (twin.kind, twin.shapes) == (operation.kind, operation.shapes)
                and _reduction(module, twin) == _reduction(module, operation)
                and twin.groups is not None
                and np.array_equal(twin.groups, operation.groups)
                # If something else needs it, both are sent.
                and list(_uses(twin.start, users, ("dynamic-slice",))) == uses
            )
            if other != key and other not in merged and same:
                merged.add(key)
    return merged


def _reduced_value(
    module: Module, key: _Key, operations: Mapping[_Key, Operation]
) -> _Key | None:
    """The reduction that a value is a view or a part of."""
    while key in module.by_name:
        if key in operations:
            return key if "reduce" in operations[key].kind else None
        instruction = module.by_name[key]
        if instruction.opcode not in (*VIEWS, "dynamic-slice") or not instruction.operands:
            return None
        key = key[0], instruction.operands[0]
    return None


def _uses(
    instruction: Instruction,
    users: Mapping[_Key, list[Instruction]],
    through: tuple[str, ...] = (),
) -> Iterable[Instruction]:
    """The users of a value, and of its views."""
    for user in users.get((instruction.computation, instruction.name), ()):
        if user.opcode in (*VIEWS, *through):
            yield from _uses(user, users, through)
        else:
            yield user
