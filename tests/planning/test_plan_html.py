import dataclasses

from page_parser import parse


def shown(plan):
    """The headline, and the rows."""
    page = parse(plan._repr_html_())
    assert not [x for x in page if x.tag in ("script", "style", "img")]
    rows = [[x.text for x in row.children] for row in page.find_all("tr")]
    return page.find("p").text, rows


def test_a_plan_in_short(plan):
    title, rows = shown(plan)
    assert title == "Plan for 8 x NVIDIA H200 141GB HBM3e (data=2, fsdp=4)"
    found = dict(map(tuple, rows))
    assert found["memory of a device"].endswith(" at the peak, of 151.40 GB: it fits")
    assert found[""].startswith("parameters ") and "temporaries" in found[""]
    assert found["a step"].startswith("at least ")
    assert found["a step"].endswith(", bound by fsdp links")
    assert found["all devices"].endswith(" tokens/s")
    assert "all-gather " in found["sent over fsdp"]
    assert "temporaries are an upper estimate" in found["note"]


def test_what_is_not_known_is_left_out_and_text_is_escaped(plan):
    memory = dataclasses.replace(plan.memory, device=None)
    other = dataclasses.replace(
        plan, time=None, memory=memory, notes=("<b>n",), tokens=None
    )
    _, rows = shown(other)
    names = [name for name, _ in rows]
    assert "a step" not in names and rows[0][1].endswith(" at the peak")
    assert rows[-1] == ["note", "<b>n."]
    full = dataclasses.replace(plan, memory=dataclasses.replace(memory, device=1))
    assert shown(full)[1][0][1].endswith(", of 1 B: it does not fit")
    assert shown(dataclasses.replace(plan, tokens=None))[1][3][1].endswith(" examples/s")
