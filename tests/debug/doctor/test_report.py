import subprocess
import sys
from pathlib import Path

from eqxshard.debug._doctor._checks import Finding
from eqxshard.debug._doctor._facts import Cache, Devices, Disk, Facts
from eqxshard.debug._doctor._report import describe, doctor, find

HEALTHY = Facts(
    packages={"jax": "0.10.2", "jaxlib": "0.10.2"},
    devices=Devices("gpu", {"NVIDIA H200": 8}),
    driver="580.65.06",
    gpus=("NVIDIA H200",) * 8,
    links="     GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n",
    environment={"XLA_FLAGS": "--xla_dump_to=/tmp/a"},
    disks=(Disk("current folder", "/a", 10**12, 10**12),),
    cache=Cache(str(Path.home() / "cache")),
)


def test_a_healthy_machine():
    text = describe(HEALTHY, find(HEALTHY))
    assert text.endswith("Nothing is wrong.")
    assert "8 x NVIDIA H200 (gpu)" in text and "GPU1 NV18 X" in text
    # A home folder has somebody's name in it.
    assert "~/cache" in text and str(Path.home()) not in text.replace("/a", "")


def test_findings_are_listed_with_their_commands():
    findings = [
        Finding("This is so.", "look", is_wrong=False),
        Finding("That cannot be.", "mend that"),
    ]
    text = describe(Facts(failure="ImportError: no"), findings)
    assert text.endswith(
        "What is wrong:\n1. That cannot be.\n     mend that\n\n"
        "Worth knowing:\n1. This is so.\n     look"
    )
    assert "jax            nothing: ImportError: no" in text


def test_the_status_says_whether_something_is_wrong(monkeypatch, capsys):
    bad = Facts(python="3.9.1")
    for facts, status in ((HEALTHY, 0), (bad, 1)):
        monkeypatch.setattr(
            "eqxshard.debug._doctor._report.gather", lambda facts=facts: facts
        )
        assert doctor() == status
    assert "Python 3.9.1 is older" in capsys.readouterr().out


def test_it_works_where_jax_cannot_be_imported(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('jaxlib is too old')")
    code = "import sys; from eqxshard.__main__ import main; sys.exit(main(['doctor']))"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "JAX does not start: ImportError: jaxlib is too old" in done.stdout
