import io
import logging
import re

from frameloom.core.logging import get_logger, set_up_logging
from frameloom.core.progress import ProgressBar

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def test_a_log_file_gets_plain_lines_with_rate_and_time_left():
    out = io.StringIO()
    with ProgressBar("reading", 4, stream=out, every_s=0) as bar:
        for _ in range(4):
            bar.advance(note="loss 1.5")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("reading: 4/4 (100%)") and "/s" in lines[0] and "s left" in lines[0]
    assert lines[0].endswith("loss 1.5")
    assert not CONTROL.search(out.getvalue().replace("\n", ""))


def test_a_resumed_bar_counts_from_where_it_was():
    out = io.StringIO()
    with ProgressBar("reading", 10, done=9, stream=out, every_s=0) as bar:
        bar.advance()
    assert out.getvalue().startswith("reading: 10/10")


def test_messages_hold_no_control_characters_and_respect_the_level(capsys):
    set_up_logging("warning")
    try:
        get_logger("frameloom.test").warning("clip \x1b[31mred\x07.mp4")
        get_logger("frameloom.test").info("not shown")
        text = capsys.readouterr().err
        assert "clip ?[31mred?.mp4" in text and "not shown" not in text
    finally:
        logging.getLogger("frameloom").handlers.clear()
        logging.getLogger("frameloom").propagate = True
