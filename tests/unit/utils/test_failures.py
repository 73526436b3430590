"""Failures that repeat are told of once and counted; where code of others failed is found."""

import importlib.util
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import RewardError
from jax_agent_rl.utils.failures import FailureLog, describe_error, error_place, user_code_error


class Told:
    """A log with a clock that the test moves, and what it told."""

    def __init__(self, interval=300.0):
        self.now = 0.0
        self.lines = []
        self.log = FailureLog(interval=interval, clock=lambda: self.now, emit=self.lines.append)

    def report(self, kind, message="m", *, at=None, **fields):
        self.now = self.now if at is None else at
        self.log.report(kind, message, **fields)


def test_the_first_of_a_kind_is_told_and_the_others_counted():
    told = Told()
    for at in range(100):
        told.report("a reward", f"reward of row {at} raised", at=at, hint="mend it")
    told.report("a tool", "tool raised", at=100)
    assert told.lines == ["reward of row 0 raised; mend it", "tool raised"]
    told.report("a tool", "tool raised again", at=302)
    (summary,) = told.lines[2:]
    assert "99 x a reward" in summary
    assert "1 x a tool" in summary
    assert "row 99" in summary
    told.report("a reward", at=303)
    assert len(told.lines) == 3, "the next interval has begun"
    told.log.flush()
    told.log.flush()
    assert len(told.lines) == 4 and "1 x a reward" in told.lines[-1]


@given(
    reports=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 200)), max_size=60),
    interval=st.floats(1, 400),
)
def test_every_report_is_told_of_or_counted_exactly_once(reports, interval):
    told = Told(interval)
    for kind, wait in reports:
        told.report(kind, "full", at=told.now + wait)
    told.log.flush()
    counted = sum(int(count) for line in told.lines for count in re.findall(r"(\d+) x [abc]", line))
    assert told.lines.count("full") == len({kind for kind, _ in reports})
    assert told.lines.count("full") + counted == len(reports)
    summaries = len(told.lines) - told.lines.count("full")
    assert summaries <= told.now / interval + 1


def test_kinds_that_never_end_do_not_fill_the_console():
    told = Told()
    for number in range(1000):
        told.report(f"kind {number}")
    told.log.flush()
    assert len(told.lines) < 100 and "other failures" in told.lines[-1]


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\r", "\u202e", "\ud83d"])
def test_what_a_model_wrote_is_shown_escaped_and_short(hostile):
    told = Told()
    told.report("k", f"call {hostile}{'x' * 5000}", error=_raised(lambda: int(f"no{hostile}")))
    (line,) = told.lines
    assert hostile not in line and len(line) < 2500


def _raised(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_the_place_of_an_error_is_the_users_innermost_line(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\n"
        "def read(text):\n"
        "    return inner(text)\n"
        "def inner(text):\n"
        "    return json.loads(text)\n"
    )
    spec = importlib.util.spec_from_file_location("mine", file)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    error = _raised(lambda: mine.read("{"))
    assert error_place(error) == f"{file}:5", "json's own lines say nothing to the user"
    monkeypatch.chdir(tmp_path)
    assert error_place(error) == "mine.py:5"
    assert describe_error(error).startswith("JSONDecodeError: ")
    assert describe_error(error).endswith("(mine.py:5)")
    explained = user_code_error(RewardError, "the reward", error)
    assert explained.failed_at == "mine.py:5"
    assert "the reward raised JSONDecodeError" in str(explained)


def test_an_error_in_libraries_has_their_line_and_an_unraised_one_has_none():
    error = _raised(lambda: json.loads("{"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # without this file
    assert re.fullmatch(r".*json.*\.py:\d+", error_place(error))
    assert error_place(ValueError("x")) == ""
    assert describe_error(ValueError("x")) == "ValueError: x"
