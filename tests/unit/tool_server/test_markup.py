"""How models write actions, and how results are written back."""

import pytest

from jax_agent_rl.tool_server.plugins.markup import (
    extract_code,
    last_tag,
    parse_tool_call,
    result_block,
)


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("I think <python>print(1)</python>", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("```py\na\n```\nthen\n```python\nb\n```", "a\nb"),
        ("<python>a</python> and <python>\nb\n</python>", "a\nb"),
        ("<python>wins</python>```python\nloses\n```", "wins"),
        ("<python>never closed", None),
        ("```javascript\nx\n```", None),
        ("``` python\nx = '''```'''\n```", "x = '''```'''"),
        ("````python\n```\n````", "```"),
        ("```bash\nls\n```\nthen\n```python\nprint(1)\n```", "print(1)"),
        ("", None),
        ("```python print(3)```", "print(3)"),
        ("```python\r\nprint(3)\r\n```", "print(3)"),
        ("```python```", ""),
        ("```pythonic\nx\n```", None),
        ("```text\nx\n```\npython is not opened by a closing fence```", None),
        ("<python> print(1)\nprint(2)</python>", "print(1)\nprint(2)"),
        ("<python>\n  if 1:\n\n    print(2)\n</python>", "if 1:\n\n  print(2)"),
        ("```python\nok\n```\n```python\nnever closed", "ok"),
    ],
)
def test_code_is_found_in_tags_then_in_fences(action, code):
    assert extract_code(action, "python", "python", "py") == code


def test_the_last_tag_counts():
    assert last_tag("<sql>a</sql> no: <sql> b </sql>", "sql") == "b"
    assert last_tag("<sql>a</sql> <sql>b", "sql") is None


def test_arguments_may_be_json_text_or_missing_and_a_server_named():
    assert parse_tool_call('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>') == (
        "f",
        {"a": 1},
    )
    assert parse_tool_call('<tool_call>{"name": "f", "arguments": null}</tool_call>') == ("f", {})
    assert parse_tool_call('<tool_call>{"name": "f", "arguments": ""}</tool_call>') == ("f", {})
    assert parse_tool_call('<tool_call>{"name": "f", "server": "s"}</tool_call>') == ("s.f", {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '{"name": 1}',
        '{"name": "x", "arguments": []}',
        '{"name": "x", "arguments": {"a": 1e999}}',
        "[" * 100_000,
        '{"arguments": {}}',
    ],
)
def test_what_is_no_tool_call_is_none(text):
    assert parse_tool_call(f"<tool_call>{text}</tool_call>") is None


def test_results_are_written_as_the_action_was():
    assert result_block("<python>1</python>", "1") == "\n<result>\n1\n</result>\n"
    assert result_block("```python\n1\n```", "1") == "\n```result\n1\n```\n"
    assert result_block("```python\n1\n", "1") == "\n```\n```result\n1\n```\n"
    assert result_block("~~~~python\n```\n", "1") == "\n~~~~\n```result\n1\n```\n"
    call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    assert result_block(call, "1") == "\n<tool_response>\n```result\n1\n```\n</tool_response>\n"


def test_no_result_ends_its_own_block():
    assert result_block("```python\n1\n```", "a\n```\nb") == "\n````result\na\n```\nb\n````\n"


def test_a_result_that_the_action_opened_is_only_closed():
    assert result_block("```python\n1\n```\n```output", "1") == "\n1\n```\n"
    assert result_block("```python\n1\n```\n```result\n", "1") == "\n1\n```\n"
    assert result_block("<python>1</python>\n<result>", "1") == "\n1\n</result>\n"
    assert result_block("<python>1</python>\n<output>", "1") == "\n1\n</output>\n"
