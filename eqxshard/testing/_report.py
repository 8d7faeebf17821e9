"""What a comparison between meshes measured."""

from dataclasses import dataclass

from rich.table import Table

from ._table import rendered


@dataclass(frozen=True)
class MeshComparison:
    """How far training on one mesh under one rule is from training on one device.

    The relative difference of two arrays is `max |a - b| / max |b|`, where `b` is one
    device's.

    - `mesh`, `rule`: their names.
    - `devices`: the number of devices.
    - `split`, `arrays`: how many of the model's arrays the rule splits, of how many.
    - `loss`: the largest relative difference of the loss of any step.
    - `gradients`: the largest of the gradient of any array in any step, where each step
        starts from the state that one device had. Gradients of which `max |b|` is less
        than a tenth of the model's largest are seen relative to that tenth.
    - `parameters`: the largest of any array of the model after the last step of several
        in a row.
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
    """What [`eqxshard.testing.assert_mesh_invariant`][] measured: `print` it.

    - `rows`: one [`eqxshard.testing.MeshComparison`][] for each mesh and rule.
    - `steps`: how many steps each took.
    - `rtol`: the relative difference that was allowed.
    """

    rows: tuple[MeshComparison, ...]
    steps: int
    rtol: float

    def __str__(self) -> str:
        table = Table(
            title=f"Relative difference from one device in {self.steps} steps",
            caption=f"max |a - b| / max |b|; allowed is {self.rtol:.0e}",
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
        return rendered(table)
