"""Numbers as people read them."""

from __future__ import annotations

from hybridmem._text import age, plural, seconds, size


def test_numbers_as_people_read_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 10 * 1024, 1023 * 1024, 1 << 20)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "1.00 MiB", "1.00 MiB",
    ]  # fmt: skip
    assert [seconds(s) for s in (3e-9, 1.5e-6, 0.02, 61)] == ["3 ns", "1.5 us", "20 ms", "61 s"]
    assert size(3.2 * 2**40) == "3.20 TiB"
    assert size(2.0**80) == "1048576 EiB"
    assert [plural(n, "entry") for n in (0, 1, 1234)] == ["0 entries", "1 entry", "1,234 entries"]
    assert [age(s) for s in (-4, 59, 60, 3600, 86400, 4e8)] == [
        "0 s", "59 s", "1 min", "1 h", "1 d", "12 y",
    ]  # fmt: skip
