"""The report of a comparison between meshes."""

from dataclasses import dataclass

from rich.table import Table

from ..inspect._tables import render


@dataclass(frozen=True)
class MeshComparison:
    """How much training on one mesh under one rule differs from training on one device.

    The relative difference of two arrays is `max |a - b| / max |b|`, where `b` is one
    device's.

    - `mesh`, `rule`: their names.
    - `devices`: the number of devices.
    - `split`, `arrays`: the number of the model's arrays that the rule splits, and of all
        its arrays.
    - `loss`: the largest relative difference of the loss in any step.
    - `gradients`: the largest relative difference of any gradient in any step, where each
        step starts from the state that one device had. A gradient whose `max |b|` is less
        than a tenth of the model's largest is compared relative to that tenth.
    - `parameters`: the largest relative difference of any array of the model after all
        steps in a row.
    """

    mesh: str
    rule: str
    devices: int
    split: int
    arrays: int
    loss: float
    gradients: float
    parameters: float


@dataclass(frozen=True)
class MeshReport:
    """The measurements of [`eqxshard.testing.assert_mesh_invariant`][]: `print` it.

    - `rows`: one [`eqxshard.testing.MeshComparison`][] for each mesh and rule.
    - `steps`: the number of steps on each.
    - `rtol`: the relative difference that was accepted.
    """

    rows: tuple[MeshComparison, ...]
    steps: int
    rtol: float

    def __str__(self) -> str:
        table = Table(
            title=f"Relative difference from one device in {self.steps} steps",
            caption=f"max |a - b| / max |b|; accepted up to {self.rtol:.0e}",
        )
        table.add_column("mesh")
        table.add_column("rule", overflow="fold")
        for column in ("devices", "split", "loss", "gradients", "final parameters"):
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(
                row.mesh,
                row.rule,
                str(row.devices),
                f"{row.split} of {row.arrays}",
                *(f"{x:.1e}" for x in (row.loss, row.gradients, row.parameters)),
            )
        return render(table)

    __repr__ = __str__  # A notebook shows it.
