from eqxshard.planning._format import format_bytes, format_mega, format_seconds, join_axes


def test_bytes_are_written_in_the_unit_that_fits():
    sizes = (0, 14, 999, 1000, 65_536, 999_400, 411e6, 999.6e6, 12_345e6, -3e9)
    assert [*map(format_bytes, sizes)] == [
        *("0 B", "14 B", "999 B", "1.00 kB", "65.5 kB", "999 kB"),
        *("411 MB", "1.00 GB", "12.35 GB", "-3.00 GB"),
    ]


def test_megabytes_have_no_exponent_where_they_are_many():
    assert [*map(format_mega, (411e6, 999.9e6, 13_153e6))] == ["411", "1,000", "13,153"]


def test_seconds():
    assert [*map(format_seconds, (0, 1.5, 0.0132, 3e-6))] == [
        *("0 s", "1.5 s", "13.2 ms", "3 us")
    ]


def test_axes():
    assert (join_axes(("data", "fsdp")), join_axes(None)) == ("data,fsdp", "unknown")
