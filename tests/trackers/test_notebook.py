import sys
import types

import pytest
from page_parser import parse
from rich.console import Console

from eqxshard.trackers import ProgressBar


@pytest.fixture
def shown(monkeypatch):
    """What a cell displays, each thing in its place, as IPython has it."""
    things: list = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, thing):
            things[self.place] = (thing._repr_html_(), repr(thing))

    def display(thing, *, display_id=False):
        if not display_id:  # A line, by rich.
            return things.append(thing._repr_mimebundle_((), ())["text/plain"])
        things.append((thing._repr_html_(), repr(thing)))
        return Handle(len(things) - 1)

    module = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=module))
    return things


def test_the_bar_moves_in_its_place_and_lines_come_below(shown):
    bar = ProgressBar(20, title="<b>", console=Console(force_jupyter=True, width=80))
    bar.log(5, {"epoch": 0.25, "train/loss": 1.25, "train/examples_per_second": 99.0})
    bar.log(10, {"epoch": 0.5, "train/<i>": 1.0, "eval/accuracy": 0.75})
    title, (html, text), line = shown
    assert (title, line) == ("<b>\n", "epoch 0.5  step 10/20  eval accuracy 0.7500\n")
    assert text.startswith("10/20  epoch 0.5  <i> 1.000  0:00:0") and text.endswith(" left")
    page = parse(html)
    assert page.find("progress").attributes == {"value": "10", "max": "20"}
    assert page.find("div").text.strip() == text
    bar.log(20, {"epoch": 1.0, "train/loss": 0.5})
    bar.close()
    assert shown[1][1] == "20/20  epoch 1  loss 0.5000" and len(shown) == 3
