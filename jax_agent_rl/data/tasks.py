"""The built-in tasks: questions about a small shop (quickstart), and arithmetic with a calculator.

Questions about the shop take one tool call, or two dependent ones.

==========  =====================================  =======================================
kind        question                               calls
==========  =====================================  =======================================
sum         What is 4898 plus 9916?                calculator("4898 + 9916")
difference  What is 8766 minus 740?                calculator("8766 - 740")
product     What is 125 × 72?                      calculator("125 * 72")
price       What is the price of 36 × clock?       price("clock") → 57, calculator("36 * 57")
weight      What is the weight of 62 × ball?       weight("ball") → 82, calculator("62 * 82")
==========  =====================================  =======================================

The prompt shows one addition and one question of each lookup. The policy has to choose among three
tools, to go on after a lookup instead of answering with its result, and to write ``*`` where the
question has ``×``, which the calculator refuses. Held-out questions ask about items that no
training question names.

The calls are written as Python, ``[price(item="clock")]``, a third of the tokens of the same call
as JSON in tags, ``<tool_call>{"name": "price", …}</tool_call>``, which a grammar can constrain
(``agent.constrain_tool_calls``).

The calculator task's prompt shows two worked additions, each with its tool call, result and answer.
Its questions ask for sums, differences and products of larger numbers: the policy has to generalize
the call to other operations, and to make it reliably when sampling.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_agent_rl.data.rows import write_rows
from jax_agent_rl.tools.shop import PRICES, WEIGHTS
from jax_agent_rl.utils.files import make_folder

SYSTEM = "Answer with the tools calculator, price and weight."
TABLES = {"price": PRICES, "weight": WEIGHTS}
EXAMPLE_ITEMS = ("mug", "fan")
"""The items of the prompt's worked questions."""
HELDOUT_SHARE = 0.25
"""Share of the other items that only held-out questions name."""

Message = dict[str, str]


class Call(NamedTuple):
    """A tool call and its result."""

    tool: str
    arguments: dict[str, str]
    result: int


class Question(NamedTuple):
    """A question about the shop, and the calls that answer it: the last result is the answer."""

    kind: str
    text: str
    calls: tuple[Call, ...]


def prepare_shop(
    out: Path,
    *,
    train: int = 2000,
    heldout: int = 200,
    seed: int = 0,
    agent_name: str = "tool_agent",
    calls: str = "python",
) -> tuple[Path, Path, Path]:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``demonstrations.jsonl``; return their paths.

    Training and held-out questions are disjoint. Demonstrations are the training questions with
    their answers, rows of ``jax-agent-rl sft``.

    Args:
        out: folder to write to.
        train: number of training rows.
        heldout: number of held-out rows.
        seed: seeds the questions.
        agent_name: agent loop of the rows.
        calls: how prompts and demonstrations write calls, a name in :data:`CALL_FORMATS`.
    """
    write_call = CALL_FORMATS[calls]
    make_folder(out)
    rng = random.Random(seed)
    items = [item for item in PRICES if item not in EXAMPLE_ITEMS]
    rng.shuffle(items)
    heldout_items = round(len(items) * HELDOUT_SHARE)
    seen: set[str] = set()
    # Held-out questions come first: training questions are drawn from what they leave.
    heldout_stream = _questions(rng, items[:heldout_items], seen)
    heldout_questions = list(itertools.islice(heldout_stream, heldout))
    training_stream = _questions(rng, items[heldout_items:], seen)
    training_questions = list(itertools.islice(training_stream, train))

    heldout_file = out / "heldout.jsonl"
    write_rows(heldout_file, [_row(q, agent_name, write_call) for q in heldout_questions])
    training_file = out / "train.jsonl"
    write_rows(training_file, [_row(q, agent_name, write_call) for q in training_questions])

    demonstrations = []
    for question in training_questions:
        prompt = _prompt(question, write_call)
        completion = _answer_messages(question, write_call)
        demonstrations.append({"prompt": prompt, "completion": completion})
    demonstrations_file = out / "demonstrations.jsonl"
    write_rows(demonstrations_file, demonstrations)
    return training_file, heldout_file, demonstrations_file


def _questions(rng: random.Random, items: Sequence[str], seen: set[str]) -> Iterator[Question]:
    """Yield distinct questions without end: a sum or a difference, then one of each other kind."""
    while True:
        for kind in (rng.choice(("sum", "difference")), "product", "price", "weight"):
            question = _question(rng, kind, items)
            while question.text in seen:
                question = _question(rng, kind, items)
            seen.add(question.text)
            yield question


def _question(rng: random.Random, kind: str, items: Sequence[str]) -> Question:
    match kind:
        case "sum":
            a = rng.randint(1000, 9999)
            b = rng.randint(1000, 9999)
            return _arithmetic(kind, f"What is {a} plus {b}?", f"{a} + {b}", a + b)
        case "difference":
            a = rng.randint(1000, 9999)
            b = rng.randint(100, 999)
            return _arithmetic(kind, f"What is {a} minus {b}?", f"{a} - {b}", a - b)
        case "product":
            a = rng.randint(112, 999)
            b = rng.randint(12, 98)
            return _arithmetic(kind, f"What is {a} × {b}?", f"{a} * {b}", a * b)
        case _:
            return _lookup(kind, rng.randint(12, 98), rng.choice(items))


def _arithmetic(kind: str, text: str, expression: str, result: int) -> Question:
    return Question(kind, text, (Call("calculator", {"expression": expression}, result),))


def _lookup(kind: str, count: int, item: str) -> Question:
    value = TABLES[kind][item]
    lookup = Call(kind, {"item": item}, value)
    product = Call("calculator", {"expression": f"{count} * {value}"}, count * value)
    return Question(kind, f"What is the {kind} of {count} × {item}?", (lookup, product))


def _python_call(call: Call) -> str:
    """Format a call in agent.tool_format ``pythonic``."""
    arguments = [f"{key}={json.dumps(value)}" for key, value in call.arguments.items()]
    return f"[{call.tool}({', '.join(arguments)})]"


def _json_call(call: Call) -> str:
    """Format a call in agent.tool_format ``hermes``."""
    text = json.dumps({"name": call.tool, "arguments": call.arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


WriteCall = Callable[[Call], str]
CALL_FORMATS: dict[str, WriteCall] = {"python": _python_call, "json": _json_call}


_EXAMPLES = (
    _lookup("weight", 12, "fan"),
    _arithmetic("sum", "What is 46 plus 27?", "46 + 27", 73),
    _lookup("price", 64, "mug"),
)


def _row(question: Question, agent_name: str, write_call: WriteCall) -> dict[str, Any]:
    results = [str(call.result) for call in question.calls]
    return {
        "data_source": f"shop/{question.kind}",
        "agent_name": agent_name,
        "prompt": _prompt(question, write_call),
        "reward_model": {"ground_truth": results[-1]},
        "extra_info": {"results": results},
    }


def _prompt(question: Question, write_call: WriteCall) -> list[Message]:
    messages = [{"role": "system", "content": SYSTEM}]
    for example in _EXAMPLES:
        messages.append({"role": "user", "content": example.text})
        messages += _answer_messages(example, write_call)
    messages.append({"role": "user", "content": question.text})
    return messages


def _answer_messages(question: Question, write_call: WriteCall) -> list[Message]:
    """Return what the policy should say to a question: calls, each with its result, and answer."""
    messages = []
    for call in question.calls:
        messages.append({"role": "assistant", "content": write_call(call)})
        messages.append({"role": "tool", "content": str(call.result)})
    messages.append({"role": "assistant", "content": f"= {question.calls[-1].result}"})
    return messages


# --- calculator -----------------------------------------------------------------------------------

CALCULATOR_SYSTEM = (
    "You answer questions with a calculator. First write a <tool_call>, then read the"
    " <tool_response>, then answer."
)


class Operation(NamedTuple):
    """An operation on two numbers: how it is asked for, ranges of the numbers, and the result."""

    phrasings: tuple[str, ...]
    first_range: tuple[int, int]
    second_range: tuple[int, int]
    compute: Callable[[int, int], int]


OPERATIONS = (
    Operation(
        phrasings=("What is {a} times {b}?", "What is {a} multiplied by {b}?"),
        first_range=(112, 999),
        second_range=(12, 99),
        compute=operator.mul,
    ),
    Operation(
        phrasings=("What is {a} minus {b}?",),
        first_range=(1000, 9999),
        second_range=(100, 999),
        compute=operator.sub,
    ),
    Operation(
        phrasings=("What is {a} plus {b}?",),
        first_range=(1000, 9999),
        second_range=(1000, 9999),
        compute=operator.add,
    ),
)


def prepare_calculator(
    out: Path,
    *,
    train: int = 2000,
    heldout: int = 200,
    seed: int = 0,
    agent_name: str = "tool_agent",
) -> tuple[Path, Path]:
    """Write the rows of the calculator task, as :func:`prepare_shop` does."""
    make_folder(out)
    questions = _operations(random.Random(seed))
    rows = []
    for question, answer in itertools.islice(questions, heldout + train):
        rows.append(_calculator_row(question, answer, agent_name))
    training_file = out / "train.jsonl"
    write_rows(training_file, rows[heldout:])
    heldout_file = out / "heldout.jsonl"
    write_rows(heldout_file, rows[:heldout])
    return training_file, heldout_file


def _operations(rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield distinct questions without end, operations in turn."""
    seen = set()
    while True:
        for operation in OPERATIONS:
            a = rng.randint(*operation.first_range)
            b = rng.randint(*operation.second_range)
            question = rng.choice(operation.phrasings).format(a=a, b=b)
            if (a, b) not in seen:
                seen.add((a, b))
                yield question, operation.compute(a, b)


def _calculator_row(question: str, answer: int, agent_name: str) -> dict[str, Any]:
    return {
        "data_source": "calculator",
        "agent_name": agent_name,
        "prompt": [
            {"role": "system", "content": CALCULATOR_SYSTEM},
            *_worked_operation("What is 23 plus 45?", "23 + 45", 68),
            *_worked_operation("What is 310 plus 27?", "310 + 27", 337),
            {"role": "user", "content": question},
        ],
        "reward_model": {"ground_truth": str(answer)},
        "extra_info": {},
    }


def _worked_operation(question: str, expression: str, result: int) -> list[dict[str, str]]:
    """Return a question answered with the tool, as the policy should."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
