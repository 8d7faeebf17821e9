from eqxshard.pages._format import (
    format_count,
    format_flops,
    format_number,
    format_seconds,
    format_value,
)
from eqxshard.sharding._text import format_bytes


def test_bytes_are_written_in_the_unit_that_fits():
    sizes = (0, 14, 999, 1000, 65_536, 999_400, 411e6, 999.6e6, 12_345e6, -3e9)
    assert [*map(format_bytes, sizes)] == [
        *("0 B", "14 B", "999 B", "1.00 kB", "65.5 kB", "999 kB"),
        *("411 MB", "1.00 GB", "12.35 GB", "-3.00 GB"),
    ]


def test_arithmetic_is_written_in_the_unit_that_fits():
    assert [*map(format_flops, (1e9, 1.5e12, 93.62e6, 2e15, 5e3))] == [
        *("1 GFLOP", "1.5 TFLOP", "93.62 MFLOP", "2,000 TFLOP", "0.005 MFLOP")
    ]


def test_metrics_have_four_digits():
    numbers = (0.12345, 0.5, 12.5, 7, 9999.4, 123456.0)
    said = ["0.1235", "0.5000", "12.50", "7", "9,999", "123,456"]
    assert [*map(format_value, numbers)] == said


def test_other_numbers_have_three():
    numbers = (0.012345, 1.0, 12.56, 999.6, 4072.3, 12345.6)
    said = ["0.0123", "1", "12.6", "1,000", "4,070", "12,300"]
    assert [*map(format_number, numbers)] == said
    assert [*map(format_count, (7, 1_250_000))] == ["7", "1.25 M"]


def test_seconds():
    assert [*map(format_seconds, (0, 1.5, 0.0132, 3e-6, 7.08e-8))] == [
        *("0 s", "1.5 s", "13.2 ms", "3 us", "70.8 ns")
    ]
