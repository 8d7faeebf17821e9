from eqxshard.pages._html import Markup, join, tag


def test_what_is_not_markup_is_escaped():
    assert tag("p", "<b>", tag("b", "a & b")) == "<p>&lt;b&gt;<b>a &amp; b</b></p>"
    assert join("</script>", Markup("<i></i>")) == "&lt;/script&gt;<i></i>"


def test_attributes():
    element = tag("input", class_="a", data_value=0, title='"', hidden=True, id=None)
    assert element == '<input class="a" data-value="0" title="&quot;" hidden>'
