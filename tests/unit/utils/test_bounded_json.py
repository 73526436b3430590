"""JSON from outside: whatever is read can be written and encoded again, within bounds, by every way
to read it.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.data.reader import read_row_file
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.bounded_json import (
    MAX_NESTING,
    TooDeepError,
    decode_json,
    parse_json,
    parse_json_at,
)
from tests.messages import raises

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
WAYS = {
    "bytes": lambda text: decode_json(text.encode("utf-8", "surrogatepass")),
    "text": parse_json,
    "a place in a text": lambda text: parse_json_at(f"x {text}", 1)[0],
}


@pytest.mark.parametrize("way", WAYS)
@given(value=VALUES)
def test_every_value_is_read_as_it_was_written(way, value):
    assert WAYS[way](json.dumps(value)) == value
    assert WAYS[way](json.dumps(value, ensure_ascii=False, indent=1)) == value


REFUSED = {
    "a constant": '{"a": [NaN]}',
    "infinity": "-Infinity",
    "a large number": '{"a": 1e999}',
    "a long number": "9" * 9000,
    "half of a pair": r'["\ud83d"]',
    "half of a pair in a key": r'{"\udc00": 1}',
    "half of a pair as it is": '"\ud83d"',
    "levels": "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1),
    "more levels than Python has": "[" * 100_000,
    "nothing": "",
    "white space": "\u00a01",
    "half": '{"a": ',
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_than_json_is_refused(way, kind):
    with pytest.raises(ValueError, match="not valid JSON"):
        WAYS[way](REFUSED[kind])


@pytest.mark.parametrize("way", WAYS)
def test_pairs_and_levels_up_to_the_limit_are_read(way):
    assert WAYS[way](r'"\ud83d\ude00"') == "\U0001f600"
    assert WAYS[way]("[" * MAX_NESTING + "]" * MAX_NESTING)


def test_where_a_value_ends_is_told_and_nothing_may_follow_a_whole_text():
    assert parse_json_at("f( [1] , 2)", 2) == ([1], 6)
    for read in (parse_json, lambda text: decode_json(text.encode())):
        assert read(" [1]\n") == [1]
        with pytest.raises(ValueError, match="after it"):
            read("[1] [2]")


def test_what_is_checked_later_can_be_let_in():
    decoded = decode_json(
        rb'{"a": [NaN, 1e999], "b": "\ud83d"}', non_finite=True, lone_surrogates=True
    )
    assert math.isnan(decoded["a"][0])
    assert decoded["a"][1] == math.inf
    assert decoded["b"] == "\ud83d"
    with raises(ValueError, value="3 values"):
        decode_json(b"[1,2,3,4]", max_values=3)
    with pytest.raises(TooDeepError):
        decode_json(b"[[1]]", max_nesting=1)
    assert decode_json(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="'a' twice"):
        decode_json(b'[{"a": 1, "a": 2}]', unique_keys=True)


@pytest.mark.parametrize(
    "kind", [name for name in REFUSED if name not in ("nothing", "white space")]
)
def test_a_row_of_it_is_refused_with_its_file_and_line(kind, tmp_path):
    file = tmp_path / "rows.jsonl"
    line = f'{{"a": {REFUSED[kind]}}}'.encode("utf-8", "surrogatepass")
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2"):
        list(read_row_file(file))
