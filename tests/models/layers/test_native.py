"""Which kernels are taken: by processor, or by a word in the environment."""

import pytest

from frameloom.core import host_cpu
from frameloom.core.errors import ConfigError
from frameloom.models.layers import native

INTEL, AMD = frozenset({"vendor_id", "GenuineIntel"}), frozenset({"vendor_id", "AuthenticAMD"})
AVX2, OLD = frozenset({"avx", "avx2"}), frozenset({"avx"})


@pytest.fixture
def no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.CHOICE, raising=False)


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        (AMD, AVX2, (True, True)),
        (INTEL, AVX2, (False, True)),
        (AMD, OLD, (False, False)),
        (frozenset(), frozenset(), (False, False)),
    ],
    ids=["AMD", "Intel", "without AVX2", "not x86"],
)
def test_products_are_for_processors_that_mkl_is_not_made_for(
    no_word: None,
    monkeypatch: pytest.MonkeyPatch,
    vendor: frozenset[str],
    flags: frozenset[str],
    expected: tuple[bool, bool],
) -> None:
    monkeypatch.setattr(host_cpu, "_read_line", {"vendor_id": vendor, "flags": flags}.__getitem__)
    assert native.choose_kernels() == expected


@pytest.mark.parametrize(("word", "expected"), [("all", (True, True)), ("torch", (False, False))])
def test_a_word_in_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, word: str, expected: tuple[bool, bool]
) -> None:
    monkeypatch.setenv(native.CHOICE, word)
    assert native.choose_kernels() == expected


def test_an_empty_word_is_none(no_word: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = native.choose_kernels()
    for word in ("", "auto"):
        monkeypatch.setenv(native.CHOICE, word)
        assert native.choose_kernels() == usual


def test_an_unknown_word_is_refused_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.CHOICE, "fast")
    with pytest.raises(
        ConfigError, match="FRAMELOOM_KERNELS is 'fast' in the environment; it must be auto, all or torch"
    ):
        native.choose_kernels()
