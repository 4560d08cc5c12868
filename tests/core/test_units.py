from __future__ import annotations

import pytest

from frameloom.core.errors import ConfigError
from frameloom.core.units import format_bytes, format_duration, parse_bytes


def test_amounts_are_read_as_people_write_them() -> None:
    texts = ("80GB", "500 MB", "1.5 GiB", "512mb", "1.5kb", "3 TB")
    wanted = [80 * 10**9, 500 * 10**6, 3 * 2**29, 512 * 10**6, 1500, 3 * 10**12]
    assert [parse_bytes(text, where="--memory") for text in texts] == wanted
    assert parse_bytes("77", where="--shard-size", needs_unit=False) == 77


@pytest.mark.parametrize("text", ["", "80", "GB", "80 GBs", "eighty GB", "0GB", "-1GB", "1e9"])
def test_what_is_no_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory.*80GB or 75GiB"):
        parse_bytes(text, where="--memory")


def test_amounts_and_durations_are_shown_in_the_unit_that_fits() -> None:
    shown = [format_bytes(amount) for amount in (80e9, 1.5e9, 60e6, 9e5, 12)]
    assert shown == ["80 GB", "1.5 GB", "60 MB", "900 kB", "0.012 kB"]
    assert [format_bytes(amount, binary=True) for amount in (50 * 2**30, 2**29, 2**20)] == [
        "50.0 GiB",
        "0.5 GiB",
        "1.0 MiB",
    ]
    assert [format_duration(seconds) for seconds in (1.53, 190, 18360)] == ["1.53 s", "3.2 min", "5.1 h"]
