import os

import pytest

from frameloom.core.errors import DataError
from frameloom.core.paths import clean_name, safe_join
from frameloom.core.random import numpy_stream


@pytest.mark.parametrize(
    "relative", ["../x", "a/../../x", "/etc/passwd", "\\\\server\\x", "http://x/y", "concat:a|b", "data:x", "", "a\0b"]
)
def test_paths_that_leave_the_root_are_refused(tmp_path, relative):
    with pytest.raises(DataError):
        safe_join(tmp_path, relative)


def test_a_symbolic_link_out_of_the_root_is_refused(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(DataError, match="leaves"):
        safe_join(root, "link/clip.mp4")
    assert safe_join(root, "clips/a.mp4") == root / "clips/a.mp4"


PROMPTS = [
    "../../x",
    "",
    "\n",
    "a" * 400,
    "🎈",
    "-rf",
    "CON",
    "$(id)",
    "<script>",
    "\x1b[31mred",
    "a/b\\c",
    "..",
    "nul",
]


def test_any_text_becomes_a_plain_file_name(tmp_path):
    draw = numpy_stream(0, "prompts")
    random_texts = [
        "".join(chr(int(c)) for c in draw.integers(0, 0x2FFF, size=draw.integers(0, 60))) for _ in range(300)
    ]
    for text in PROMPTS + random_texts:
        name = clean_name(text)
        assert name and len(name.encode()) <= 81 and os.sep not in name and not name.startswith((".", "-"))
        assert name.lower() not in {"con", "nul"}
        (tmp_path / f"{name}.txt").write_text("x")
        assert (tmp_path / f"{name}.txt").resolve().parent == tmp_path.resolve()
