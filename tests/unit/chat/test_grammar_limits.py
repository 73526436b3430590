"""Grammars that are too much work: refused by what is in them, or by a process that tries them
first, and only they.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.agents.endpoint.requests import ApiError, grammar_of, read_chat
from jax_agent_rl.chat import grammar_limits
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.grammar import GrammarCompiler
from jax_agent_rl.chat.grammar_limits import (
    CHECK_BYTES,
    MAX_DEPTH,
    MAX_PATTERN,
    GrammarBusyError,
    GrammarChild,
    GrammarError,
    check_grammar,
    weigh_grammar,
)
from jax_agent_rl.utils.worker_pool import JsonWorkers, WorkerTimeoutError
from tests.examples import examples
from tests.messages import raises
from tests.tiny_chat import tokenizer

SLEEPER = """
import json, sys
for number, line in enumerate(sys.stdin):
    if number:  # the first is only the greeting
        sys.stdin.read()
    print(json.dumps({"bytes": 0}), flush=True)
"""


def grammar(schema: object) -> str:
    return f"start: %json {json.dumps(schema)}"


def product(parts: int) -> dict:
    """A schema of few words whose alternatives are 4**parts."""
    all_of = []
    for part in range(parts):
        alternatives = []
        for number in range(4):
            properties = {f"x{part}{number}": {"type": "integer"}}
            alternatives.append({"type": "object", "properties": properties})
        all_of.append({"anyOf": alternatives})
    return {"allOf": all_of}


def nested(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), eos_ids=(2,))


TOO_LARGE = {
    "maxItems=10000000": {"type": "array", "maxItems": 10**7},
    "minItems=10000000": {"type": "array", "minItems": 10**7},
    "minProperties=10000000": {"type": "object", "minProperties": 10**7},
    "maxProperties=10000000": {"type": "object", "maxProperties": 10**7},
    "maxLength=10000000": {"type": "string", "maxLength": 10**7},
    "multipleOf=9999991": {"type": "integer", "multipleOf": 9999991},
    "multipleOf=1234567": {"type": "number", "multipleOf": 0.1234567},
    "maxItems=1e+300": {"type": "array", "maxItems": 1e300},
    "properties has 20000": {"properties": {f"p{number}": {} for number in range(20_000)}},
    "$defs has 20000": {"$defs": {f"p{number}": {} for number in range(20_000)}},
    "repeats too much": {"type": "string", "pattern": "(a{1,1000}b){1,1000}"},
    f"a pattern has {MAX_PATTERN + 1}": {"type": "string", "pattern": "a" * (MAX_PATTERN + 1)},
    f"more than {MAX_DEPTH} levels": nested(MAX_DEPTH),
    "too large": {"enum": list(range(100_000))},
}


@pytest.mark.parametrize("reason", TOO_LARGE)
def test_a_schema_that_is_too_large_is_refused_by_its_keyword_before_any_work(reason):
    with pytest.raises(GrammarError) as caught:
        weigh_grammar(grammar(TOO_LARGE[reason]))
    assert reason in str(caught.value)


WRAPPERS = {
    "items": lambda schema: {"items": schema},
    "prefixItems": lambda schema: {"prefixItems": [schema]},
    "anyOf": lambda schema: {"anyOf": [{}, schema]},
    "allOf": lambda schema: {"allOf": [schema]},
    "oneOf": lambda schema: {"oneOf": [schema]},
    "additionalProperties": lambda schema: {"additionalProperties": schema},
    "$defs": lambda schema: {"$defs": {"a": schema}},
    "patternProperties": lambda schema: {"patternProperties": {"a": schema}},
    **{
        f"property {name}": lambda schema, name=name: {"properties": {name: schema}}
        for name in ("a", "enum", "const", "default", "examples", "required", "properties", "$defs")
    },
}


@given(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=8))
def test_it_is_found_wherever_it_is(names):
    schema: dict = {"type": "array", "maxItems": 10**7}
    for name in names:
        schema = WRAPPERS[name](schema)
    with raises(GrammarError, key="maxItems", value=10000000):
        weigh_grammar(grammar(schema))


def test_values_are_no_keywords():
    assert weigh_grammar(grammar({"const": {"maxItems": 10**7}})) < 10
    assert (
        weigh_grammar(grammar({"properties": {"maxItems": {"type": "integer"}, "pattern": {}}}))
        < 10
    )


def test_repetitions_outside_of_schemas_count():
    for text in (
        "start: /a{1,99999}/",
        "start: X{99999}\nX: /a/",
        'start: "a"~99999',
        'start: "%json {" /(a{999}){999}/',
    ):
        with pytest.raises(GrammarError):
            weigh_grammar(text)


# --- what looks small -----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [8, 12])
def test_alternatives_that_multiply_are_refused(compiler, parts):
    text = grammar(product(parts))
    assert weigh_grammar(text) < grammar_limits.LIGHT_WEIGHT
    initial_bytes = resident_bytes()
    with pytest.raises(GrammarError):
        compiler.start(text)
    assert resident_bytes() - initial_bytes < CHECK_BYTES


def test_what_would_take_gigabytes_ends_a_child_and_nothing_else(compiler, monkeypatch):
    monkeypatch.setattr(grammar_limits, "MAX_WEIGHT", 10**9)  # as if the weight had been wrong
    initial_bytes = resident_bytes()
    with raises(GrammarError, fix="simplify"):
        compiler.start(grammar({"type": "array", "items": {"type": "integer"}, "maxItems": 10**7}))
    assert resident_bytes() - initial_bytes < CHECK_BYTES
    compiler.start(
        grammar({"type": "array", "items": {"type": "boolean"}, "maxItems": 9000})
    )  # by a new one


PATTERNS = ["^[a-z]{1,9}$", "a|b", "^(ab?){2,5}c*$", r"^\d+$", "(", "^(.*a){3}.{4}$"]


def schemas() -> st.SearchStrategy[dict]:
    leaves = st.one_of(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["integer", "string", "boolean", "null", "objekt"])}
        ),
        st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(PATTERNS)}),
        st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.integers(1, 50)}),
        st.fixed_dictionaries(
            {
                "enum": st.lists(
                    st.one_of(st.integers(), st.text(max_size=3)), min_size=1, max_size=3
                )
            }
        ),
    )
    names = st.sampled_from(["a", "b", "<c>", 'd"', "/e/", "%json"])

    def larger(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
        some = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(
                lambda items, limit: {"type": "array", "items": items, "maxItems": limit},
                inner,
                st.integers(0, 9),
            ),
            st.builds(
                lambda known: {"type": "object", "properties": known},
                st.dictionaries(names, inner, max_size=3),
            ),
            st.builds(lambda several: {"anyOf": several}, some),
            st.builds(lambda several: {"allOf": several}, some),
        )

    return st.recursive(leaves, larger, max_leaves=8)


@settings(max_examples=examples(150))
@given(schemas())
def test_child_and_compiler_are_of_one_opinion(schema):
    codec = ChatCodec(tokenizer(), tool_format="hermes", tool_prompt="none")
    text = grammar(schema)
    try:
        check_grammar(text)
    except GrammarError as problem:
        with pytest.raises(GrammarError) as caught:
            codec.turn_grammar(answer=schema)
        assert str(problem).split(":")[-1] == str(caught.value).split(":")[-1]
    else:
        codec.turn_grammar(answer=schema)


# --- one child ------------------------------------------------------------------------------------


def test_a_grammar_that_takes_too_long_kills_its_child_alone():
    child = GrammarChild(seconds=0.1, max_waiting=1, program=SLEEPER)
    for _ in range(2):
        with pytest.raises(WorkerTimeoutError):
            child.check('start: "a"')


def test_more_than_may_wait_are_told_to_come_back(monkeypatch):
    child = GrammarChild(seconds=60.0, max_waiting=1, program=SLEEPER)
    asked = threading.Event()
    exchange = JsonWorkers.ask

    def ask(*arguments, **options):
        asked.set()
        return exchange(*arguments, **options)

    monkeypatch.setattr(JsonWorkers, "ask", ask)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            child.check('start: "a"')
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    asked.wait()
    try:
        with pytest.raises(GrammarBusyError):
            child.check('start: "b"')
    finally:
        while thread.is_alive():
            child.close()
            thread.join(0.05)
    assert len(failures) == 1


def test_a_client_whose_grammar_found_no_place_may_ask_again(monkeypatch):
    def busy(text: str) -> int:
        raise GrammarBusyError("others are being compiled")

    monkeypatch.setattr("jax_agent_rl.chat.grammar.check_grammar", busy)
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "of this test"}}}
    asked = read_chat(
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": schema}
    )
    codec = ChatCodec(tokenizer(), tool_format="hermes", tool_prompt="none")
    with pytest.raises(ApiError) as caught:
        grammar_of(asked, codec)
    assert (caught.value.status, caught.value.retry) == (429, True)
    monkeypatch.undo()
    assert grammar_of(asked, codec)


# --- what is remembered ---------------------------------------------------------------------------


def test_many_threads_have_one_grammar_compiled_once(compiler, monkeypatch):
    counted = []

    def check(text: str) -> int:
        counted.append(text)
        return check_grammar(text)

    monkeypatch.setattr("jax_agent_rl.chat.grammar.check_grammar", check)
    errors: list[BaseException | None] = []

    def start(text: str) -> None:
        try:
            compiler.start(text)
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    for text, fails in ((grammar({"const": "once"}), False), (grammar({"type": "objekt"}), True)):
        threads = [threading.Thread(target=start, args=(text,)) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counted.count(text) == 1
        assert [isinstance(error, GrammarError) for error in errors] == [fails] * 40
        errors.clear()
