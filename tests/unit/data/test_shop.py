"""The quickstart's task: its questions, their answers, and the calls its prompt shows."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from jax_agent_rl.chat.formats import ToolFormat, get_format
from jax_agent_rl.config import load
from jax_agent_rl.data.tasks import EXAMPLE_ITEMS, TABLES, prepare_shop
from jax_agent_rl.rewards.registry import find_reward
from jax_agent_rl.tools.calculator import evaluate
from tests.dataset_rows import load_rows

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[list[dict]]:
    return [
        load_rows(file)
        for file in prepare_shop(tmp_path_factory.mktemp("shop"), train=300, heldout=60)[:2]
    ]


def question(row: dict) -> str:
    return row["prompt"][-1]["content"]


def items(rows: list[dict]) -> set[str]:
    names = set()
    for row in rows:
        match = re.fullmatch(r"What is the \w+ of \d+ × (\w+)\?", question(row))
        if match:
            names.add(match[1])
    return names


def test_answers_are_right_and_no_prompt_gives_them_away(files: list[list[dict]]):
    operators = {"plus": "+", "minus": "-", "×": "*"}
    for row in files[0] + files[1]:
        words = question(row).rstrip("?").split()
        if words[2] == "the":
            expression = f"{words[-3]} * {TABLES[words[3]][words[-1]]}"
        else:
            expression = f"{words[2]} {operators[words[3]]} {words[4]}"
        assert row["reward_model"]["ground_truth"] == str(evaluate(expression))
        assert find_reward(row["data_source"]) is not None


def test_heldout_questions_ask_about_items_that_training_never_names(files: list[list[dict]]):
    train, heldout = map(items, files)
    assert train
    assert heldout
    assert not train & heldout
    assert not (train | heldout) & set(EXAMPLE_ITEMS)
    assert len({question(row) for row in files[0] + files[1]}) == 360


def test_difficulty_is_mixed_half_of_the_questions_need_two_calls(files: list[list[dict]]):
    kinds = Counter(row["data_source"] for row in files[0])
    assert kinds["shop/price"] == kinds["shop/weight"] == kinds["shop/product"] == 75
    assert kinds["shop/sum"] + kinds["shop/difference"] == 75
    assert kinds["shop/sum"] > 20 < kinds["shop/difference"]


async def test_the_prompts_calls_are_read_as_written_and_give_the_results_shown(
    files: list[list[dict]],
):
    from jax_agent_rl.tools import shop

    config = load(QUICKSTART)
    assert (config.agent.tool_format, config.tools.function_tool_path) == (
        "pythonic",
        shop.__name__,
    )
    messages = files[0][0]["prompt"]
    shown_results = [
        (m["content"], next_message["content"])
        for m, next_message in zip(messages, messages[1:], strict=False)
        if m["content"][0] == "["
    ]
    assert len(shown_results) == 5
    for text, result in shown_results:
        (call,) = get_format("pythonic").parse(text, ()).tool_calls
        assert await getattr(shop, call.name).execute("", call.arguments) == result


def test_the_same_seed_writes_the_same_rows_and_another_one_others(tmp_path: Path):
    def text(name: str, seed: int) -> list[str]:
        return [
            file.read_text()
            for file in prepare_shop(tmp_path / name, train=8, heldout=4, seed=seed)
        ]

    assert text("a", 0) == text("b", 0) != text("c", 1)
    assert json.loads(text("a", 0)[0].splitlines()[0])["agent_name"] == "tool_agent"


async def test_demonstrations_answer_training_questions_with_calls_that_work(tmp_path: Path):
    from jax_agent_rl.tools import shop

    train, _, demonstrations = prepare_shop(tmp_path, train=40, heldout=4)
    lines = [json.loads(line) for line in demonstrations.read_text().splitlines()]
    for row, line in zip(load_rows(train), lines, strict=True):
        assert line["prompt"] == row["prompt"]
        *calls, answer = line["completion"]
        results = [message["content"] for message in calls if message["role"] == "tool"]
        assert results == row["extra_info"]["results"]
        assert answer["content"] == f"= {row['reward_model']['ground_truth']}"
        for message, result in zip(calls[::2], results, strict=True):
            (call,) = get_format("pythonic").parse(message["content"], ()).tool_calls
            assert await getattr(shop, call.name).execute("", call.arguments) == result


@pytest.mark.parametrize(("calls", "tool_format"), [("python", "pythonic"), ("json", "hermes")])
def test_worked_calls_are_written_in_the_format_that_is_asked_for(
    tmp_path: Path, calls: str, tool_format: str
):
    rows = [
        load_rows(file)
        for file in prepare_shop(tmp_path / calls, train=8, heldout=4, calls=calls)[:2]
    ]
    plain = [load_rows(file) for file in prepare_shop(tmp_path / "plain", train=8, heldout=4)[:2]]
    reader = get_format(tool_format)
    for row, as_python in zip(rows[0] + rows[1], plain[0] + plain[1], strict=True):
        said = [m["content"] for m in row["prompt"] if m["role"] == "assistant"]
        expected = [m["content"] for m in as_python["prompt"] if m["role"] == "assistant"]
        read = [calls_in(reader, text) for text in said]
        assert read == [calls_in(get_format("pythonic"), text) for text in expected]
        assert sum(map(len, read)) == 5
        assert question(row) == question(as_python)


def calls_in(reader: ToolFormat, text: str) -> list[tuple[str, dict]]:
    return [(call.name, dict(call.arguments)) for call in reader.parse(text, ()).tool_calls]
