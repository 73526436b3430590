"""What a file of rows says is what a row holds, whether it is JSON Lines or Parquet; and who reads
rows.
"""

import asyncio
import datetime
import json
import tempfile
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.agents import EnvironmentAgent, InteractionAgent, ToolAgent
from jax_agent_rl.agents.command.task import read_task
from jax_agent_rl.agents.prompt import encode_prompt, openai_prompt
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import build
from jax_agent_rl.config.commands import ConversationsConfig, SftDataConfig
from jax_agent_rl.config.default_agent import report_idle_tools
from jax_agent_rl.config.task import DataSource
from jax_agent_rl.data.dataset import RowsWithoutPrompts, open_dataset
from jax_agent_rl.data.reader import MAX_DEPTH, read_row_file
from jax_agent_rl.data.rows import RowChecks
from jax_agent_rl.environments import Environment, EnvironmentPools, Observation, base
from jax_agent_rl.environments.users import BaseInteraction, InteractionRegistry
from jax_agent_rl.errors import DataError
from jax_agent_rl.evaluate.export import records
from jax_agent_rl.observe.run_dir import RunDir, trajectory_record
from jax_agent_rl.rewards import register_reward, score
from jax_agent_rl.rewards.registry import RewardFunction
from jax_agent_rl.runtime.rollouts import read_rows
from jax_agent_rl.supervised.conversations import Encoder
from jax_agent_rl.tools import BaseTool, ToolRegistry
from jax_agent_rl.types import Group, Trajectory
from jax_agent_rl.utils.files import read_lines
from tests.agent_testbed import AgentHarness
from tests.dataset_rows import load_rows, write_twins
from tests.examples import examples
from tests.messages import raises
from tests.tiny_chat import tokenizer
from tests.trajectories import call, trajectory

GOOD = {"data_source": "x", "prompt": [{"role": "user", "content": "hi"}]}


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_row_file(file)]


@settings(max_examples=30)
@given(data=st.data())
def test_wanted_rows_are_right_wherever_groups_and_batches_end(data):
    count = data.draw(st.integers(0, 200))
    rows = [{"number": number, "text": "x" * (number % 3)} for number in range(count)]
    wanted = data.draw(st.sets(st.integers(0, 220)))
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        parquet = Path(folder) / "rows.parquet"
        blank = data.draw(st.sampled_from(["", "\n", " \n"]))
        lines.write_text("".join(json.dumps(row) + "\n" + blank for row in rows))
        schema = pa.schema([("number", pa.int64()), ("text", pa.string())])
        pq.write_table(
            pa.Table.from_pylist(rows, schema),
            parquet,
            row_group_size=data.draw(st.integers(1, 300)),
        )
        for file in (lines, parquet):
            every = list(read_row_file(file))
            assert [row for _, row in every] == rows
            assert list(read_row_file(file, wanted)) == [
                every[index] for index in sorted(wanted) if index < count
            ]


@given(parts=st.lists(st.binary(max_size=12)), limit=st.integers(1, 8))
def test_a_line_is_read_whole_or_not_at_all(parts, limit):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        file.write_bytes(b"\n".join(parts))
        lines = file.read_bytes().split(b"\n")
        ended = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
        begins = [sum(map(len, ended[:number])) for number in range(len(ended))]
        expected = [
            (begin, line if len(line) <= limit else None)
            for begin, line in zip(begins, ended, strict=True)
        ]
        assert list(read_lines(file, limit)) == expected


def as_text(value: Any) -> str:
    """Values that print alike: 1 and 1.0 are equal, and a prompt shows the difference."""
    return json.dumps(value)


# --- values ---------------------------------------------------------------------------------------


def test_what_other_rows_have_is_absent_and_not_null(tmp_path: Path):
    rows = [
        {"a": {"x": 1, "y": [{"p": 1}, {"q": "t"}]}, "only": "here"},
        {"a": {"z": None}, "b": None},
        {"a": {}, "b": [None, 2]},
        {},
    ]
    expected = [
        {"a": {"x": 1, "y": [{"p": 1}, {"q": "t"}]}, "only": "here"},
        {"a": {}},
        {"a": {}, "b": [None, 2]},
        {},
    ]
    for file in write_twins(tmp_path, rows):
        assert rows_of(file) == expected


def test_a_number_without_a_fraction_is_the_same_int_beside_fractions(tmp_path: Path):
    rows = [{"truth": {"values": [1, 2.5, -0.0, 2.0**60]}}, {"truth": {"values": [408]}}]
    for file in write_twins(tmp_path, rows):
        first, second = rows_of(file)
        assert as_text(first) == '{"truth": {"values": [1, 2.5, 0, 1.152921504606847e+18]}}'
        assert str(second["truth"]["values"][0]) == "408"


NOON = datetime.datetime(2026, 2, 3, 12, 0, 0, 250)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (pa.array(["a"]).dictionary_encode(), "a"),
        (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())), {"a": 1}),
        (pa.array([[(7, "x")]], pa.map_(pa.int32(), pa.string())), {"7": "x"}),
        (pa.array([[]], pa.map_(pa.string(), pa.int64())), {}),
        (pa.array([[[("a", Decimal("2.00"))]]],
                  pa.list_(pa.map_(pa.string(), pa.decimal128(9, 2)))), [{"a": 2}]),
        (pa.array([Decimal("0.10")]), 0.1),
        (pa.array([Decimal(10**30)]), 10**30),
        (pa.array([NOON.date()]), "2026-02-03"),
        (pa.array([NOON]), "2026-02-03T12:00:00.000250"),
        (pa.array([NOON], pa.timestamp("us", tz="Asia/Tokyo")), "2026-02-03T21:00:00.000250+09:00"),
        (pa.array([1_000_000_000], pa.timestamp("ns")), "1970-01-01T00:00:01"),
        (pa.array([1], pa.timestamp("ns", tz="UTC")), "1970-01-01T00:00:00.000000001+00:00"),
        (pa.array([[1_500]], pa.list_(pa.time64("ns"))), ["00:00:00.000001500"]),
        (pa.array([NOON.time()]), "12:00:00.000250"),
        (pa.array([1_500], pa.duration("ms")), 1.5),
        (pa.array([2_000_000_000], pa.duration("ns")), 2),
        (pa.array([b"text \xc3\xa4"]), "text ä"),
        (pa.array([b"0123456789abcdef"], pa.binary(16)), "0123456789abcdef"),
        (pa.array([uuid.UUID(int=1).bytes], pa.uuid()), str(uuid.UUID(int=1))),
        (pa.array([1.5], pa.float16()), 1.5),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
        (pa.array(["ä"], pa.large_string()), "ä"),
        (pa.array(["ä"], pa.string_view()), "ä"),
        (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)  # fmt: skip
def test_every_type_of_parquet_becomes_one_that_json_has(
    tmp_path: Path, array: pa.Array, value: Any
):
    file = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"a": array, "b": pa.array([{"c": [None, value]}]) if value == "a" else array}),
        file,
    )
    (row,) = rows_of(file)
    assert row["a"] == value
    assert type(row["a"]) is type(value)
    json.dumps(row)


def test_line_ends_inside_text_and_a_byte_order_mark_change_nothing(tmp_path: Path):
    rows = [{"text": "a\u2028b\x85c\x0cd"}, {"text": "e"}]
    file = tmp_path / "rows.jsonl"
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\n\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=1)
    assert rows_of(file) == rows_of(tmp_path / "rows.parquet") == rows


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            '{"a": {"b c": [1, "\\ud83d"]}}',
            {"value": ("a['b c'][1]", r"'\ud83d'", "surrogate pair")},
        ),
        ('{"a": {"\\udc00": 1}}', {"value": (r"a['\udc00']", "surrogate pair")}),
        ('{"a": {"b": NaN}}', {"value": ("a.b", "nan"), "fix": "JSON"}),
        ('{"a": [1e999]}', {"value": ("a[0]", "inf"), "fix": "JSON"}),
        ('{"a": {"b": 1, "b": 2}}', {"value": ("'b'", "twice")}),
        (
            '{"a": ' + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1) + "}",
            {"value": MAX_DEPTH},
        ),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", {"value": MAX_DEPTH}),
        ("[1]", {"value": "list", "fix": "an object"}),
        ("null", {"value": "NoneType", "fix": "an object"}),
    ],
)
def test_a_line_that_no_row_can_hold_is_named_with_its_column_and_value(
    tmp_path: Path, line: str, named: dict
):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"a": 1}}\n\n{line}\n')
    with raises(DataError, key=f"{file}, line 3", **named):
        rows_of(file)


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (pa.array([{"b": 1.0}, {"b": float("nan")}]), {"value": ("a.b", "nan"), "fix": "JSON"}),
        (
            pa.array([{"b": b"x"}, {"b": b"\x89PNG\xff"}]),
            {"value": ("a.b", r"b'\x89PNG\xff'"), "fix": "UTF-8 text"},
        ),
        (
            pa.array([[], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
            {"value": ("'k'", "twice")},
        ),
        (
            pa.StructArray.from_arrays(
                [pa.array([1, 2]), pa.array([3, 4])], names=["k", "k"]
            ).slice(0, 2),
            {"value": ("'k'", "twice")},
        ),
        (
            pa.array([0, 1], pa.timestamp("us", tz="Mars/Phobos")),
            {"value": ("a = 0", "timestamp[us, tz=Mars/Phobos]")},
        ),
        (
            pa.array([0, 2**62], pa.timestamp("us")),
            {"value": (f"a = {2**62}", "timestamp[us]")},
        ),
        (
            pa.StringArray.from_buffers(
                2, pa.array([0, 1, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff\xfe")
            ),
            {"value": r"a = b'\xff\xfe'", "fix": "UTF-8 text"},
        ),
    ],
    ids=["nan", "bytes", "map", "struct", "time zone", "year", "text"],
)
def test_a_parquet_value_that_no_row_can_hold_is_named_with_its_column(
    tmp_path: Path, array: pa.Array, named: dict
):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": array}), file, row_group_size=1)
    with raises(DataError, key=f"{file}, row", **named):
        rows_of(file)


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    pq.write_table(
        pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "rows.parquet"
    )
    with raises(DataError, key=("rows.parquet", "'a'"), value="two columns"):
        rows_of(tmp_path / "rows.parquet")


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from jax_agent_rl.data import reader

    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 100)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + "x" * 1000)
    with raises(DataError, key="line 2", value="100 bytes"):
        rows_of(file)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str):
    with raises(DataError, key=name):
        rows_of(tmp_path / name)


def test_row_groups_without_rows_change_nothing(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    full = [{**GOOD, "n": n} for n in range(5)]
    schema = pa.Table.from_pylist(full).schema
    with pq.ParquetWriter(file, schema) as writer:
        for part in ([], full[:2], [], full[2:], []):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
    rows = open_dataset([file])
    assert list(rows) == full
    assert [row["n"] for row in RowsWithoutPrompts(rows)] == list(range(5))


def test_null_and_absent_content_of_a_tool_call_are_the_same(tmp_path: Path):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    rows = [{**GOOD, "prompt": [*GOOD["prompt"], message, *GOOD["prompt"]]} for message in said]
    expected = {"role": "assistant", "content": "", "tool_calls": [call]}
    for file in write_twins(tmp_path, rows):
        assert [row["prompt"][1] for row in load_rows(file)] == [expected, expected]


@pytest.mark.parametrize("index", [0, 1], ids=["jsonl", "parquet"])
def test_a_check_of_the_whole_file_names_the_row_too(tmp_path: Path, index: int):
    rows = [
        GOOD,
        {
            **GOOD,
            "agent_name": "environment_agent",
            "extra_info": {"environment_kwargs": {"name": "textworld"}},
        },
    ]
    file = write_twins(tmp_path, rows)[index]
    config = build({"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": str(file)}}, [])
    place = f"{file}, {['line', 'row'][index]} 2: "
    with raises(DataError, key=(place.rstrip(": "), "environment 'textworld'"), value="{}"):
        read_rows(config, None, ((DataSource(path=str(file)),), None))


def test_preferences_and_what_rollout_wrote_are_the_same_from_both(tmp_path: Path):
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    }
    rejected = {"role": "assistant", "content": "no", "tool_calls": None}
    prompt = [{"role": "user", "content": "hi", "name": None}]
    pairs = [
        {"prompt": prompt, "chosen": [said], "rejected": [rejected]},
        {"chosen": [*prompt, rejected], "rejected": [*prompt, said], "tools": None},
    ]
    ids = {"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "group_id": "g"}
    sampled = [
        {**ids, "trajectory_id": "a", "reward": 1, "no_loss": None},
        {**ids, "trajectory_id": "b", "reward": 0.5, "no_loss": None},
        {**ids, "trajectory_id": "c", "reward": 0.5, "no_loss": "timeout"},
    ]
    encoded = []
    for file in write_twins(tmp_path, [*pairs, *sampled]):
        encoder = Encoder(
            codec=ChatCodec(tokenizer()),
            config=ConversationsConfig.model_validate({"train": str(file)}),
            pack_length=1000,
        )
        preferences = encoder.pairs([DataSource(path=str(file))])
        encoded.append(
            [[s.token_ids.tolist() for s in (*pair.chosen, *pair.rejected)] for pair in preferences]
        )
    assert encoded[0] == encoded[1]
    assert len(encoded[0]) == 3


def test_a_run_records_what_sft_can_read_whatever_the_model_wrote(tmp_path: Path):
    """Models write halves of surrogate pairs as JSON; no row can hold one."""
    run = RunDir(tmp_path / "run")
    half = trajectory(
        [1], [10], messages=[{"role": "assistant", "content": "\ud83d"}], calls=[[call()]]
    )
    run.add_trajectories(1, "train", [half])
    assert encoded(SftDataConfig, run.trajectories) == [[[1, 10, False, True]]]
    (row,) = rows_of(run.trajectories)
    assert row["messages"] == [{"role": "assistant", "content": "?"}]


# --- who reads rows -------------------------------------------------------------------------------

LEAVES = {
    "text": (st.text(st.characters(exclude_categories=["Cs"]), max_size=5), pa.string()),
    "int": (st.integers(-(2**63), 2**63 - 1), pa.int64()),
    "number": (
        st.integers(-9, 9) | st.floats(-9, 9) | st.sampled_from([1e300, 2.0**53]),
        pa.float64(),
    ),
    "flag": (st.booleans(), pa.bool_()),
}
NAMES = ["a", "b", "with space", "ä"]


@st.composite
def kinds(draw: st.DrawFn, depth: int = 2) -> tuple[st.SearchStrategy[Any], pa.DataType]:
    """Values of one type: a strategy, and the type in Parquet."""
    shape = draw(st.sampled_from(["leaf", "leaf", "list", "object", "map"] if depth else ["leaf"]))
    if shape == "object":
        return draw(objects(depth))
    if shape == "list":
        values, kind = draw(kinds(depth=depth - 1))
        return st.lists(st.none() | values, max_size=3), pa.list_(kind)
    if shape == "map":
        values, kind = draw(kinds(depth=depth - 1))
        return st.dictionaries(st.sampled_from(NAMES), st.none() | values), pa.map_(
            pa.string(), kind
        )
    values, kind = LEAVES[draw(st.sampled_from(sorted(LEAVES)))]
    return values, draw(st.sampled_from([kind, pa.large_string()])) if kind == pa.string() else kind


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> tuple[st.SearchStrategy[Any], pa.DataType]:
    """Objects, each with some of the fields; some of those null."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    fields = {name: draw(kinds(depth=depth - 1)) for name in names}
    values = st.fixed_dictionaries(
        {}, optional={name: st.none() | value for name, (value, _) in fields.items()}
    )
    return values, pa.struct([(name, kind) for name, (_, kind) in fields.items()])


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


def or_null(values: st.SearchStrategy[Any], **named: Any) -> st.SearchStrategy[Any]:
    """Objects with some of the fields, or null."""
    return st.none() | values.map(lambda value: {**named, **value})


@st.composite
def twins(draw: st.DrawFn) -> tuple[list[dict[str, Any]], pa.Schema]:
    """Rows for every consumer, and their schema."""
    mappings, given_kind = draw(objects())
    call, call_kind = draw(objects())
    free, free_kind = draw(kinds())
    truth, truth_kind = draw(kinds())
    text = st.text("ab ", min_size=1, max_size=5)
    named = struct(name=pa.string(), **{field.name: field.type for field in given_kind})
    of_tool = struct(create_kwargs=given_kind, execute_kwargs=given_kind, release_kwargs=given_kind)
    calls = pa.list_(struct(id=pa.string(), function=struct(name=pa.string(), arguments=call_kind)))
    schema = pa.schema(
        {
            "data_source": pa.string(),
            "agent_name": pa.string(),
            "prompt": pa.list_(struct(role=pa.string(), content=pa.string(), tool_calls=calls)),
            "messages": pa.list_(struct(role=pa.string(), content=pa.string(), weight=pa.int64())),
            "reward_model": struct(ground_truth=truth_kind, style=pa.string()),
            "extra_info": struct(
                tool_selection=pa.list_(pa.string()),
                tools_kwargs=struct(keep=of_tool, other=of_tool),
                environment_kwargs=named,
                interaction_kwargs=named,
                files=struct(one=pa.string(), two=pa.string()),
                free=free_kind,
            ),
            "free": free_kind,
        }
    )
    kwargs = st.none() | st.fixed_dictionaries(
        {},
        optional={
            "create_kwargs": or_null(mappings),
            "execute_kwargs": or_null(mappings),
            "release_kwargs": st.none(),
        },
    )
    tool_call = call.map(lambda arguments: {"function": {"name": "f", "arguments": arguments}})
    said = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": text},
        optional={"tool_calls": st.lists(tool_call, max_size=1)},
    )
    silent = call.map(
        lambda a: {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": a}}],
        }
    )
    user = st.fixed_dictionaries(
        {"role": st.just("user"), "content": text}, optional={"tool_calls": st.none()}
    )
    row = st.fixed_dictionaries(
        {
            "data_source": st.just("twins"),
            "prompt": st.tuples(user, said | silent, user).map(list),
            "messages": text.map(
                lambda said: [
                    {"role": "user", "content": said},
                    {"role": "assistant", "content": said, "weight": None},
                ]
            ),
            "extra_info": st.fixed_dictionaries(
                {
                    "environment_kwargs": mappings.map(lambda value: {"name": "twins", **value}),
                    "interaction_kwargs": mappings.map(lambda value: {"name": "keeper", **value}),
                },
                optional={
                    "tool_selection": st.sampled_from([None, ["keep"]]),
                    "tools_kwargs": (
                        st.none()
                        | st.fixed_dictionaries({}, optional={"keep": kwargs, "other": kwargs})
                    ),
                    "files": (
                        st.none()
                        | st.fixed_dictionaries({}, optional={"one": st.none() | text, "two": text})
                    ),
                    "free": st.none() | free,
                },
            ),
        },
        optional={
            "agent_name": st.sampled_from([None, "tool_agent"]),
            "reward_model": (
                st.none() | st.fixed_dictionaries({}, optional={"ground_truth": st.none() | truth})
            ),
            "free": st.none() | free,
        },
    )
    rows = draw(st.lists(row, min_size=1, max_size=4))
    return [in_order(row, pa.struct(list(schema))) for row in rows], schema


def in_order(value: Any, kind: pa.DataType) -> Any:
    """Return a value with the keys of its objects in the order of their type, as a Parquet file has
    them.
    """
    if isinstance(value, dict) and pa.types.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        return {
            name: in_order(value[name], kind.field(name).type) for name in names if name in value
        }
    if isinstance(value, list):
        return [in_order(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {key: in_order(item, kind.item_type) for key, item in value.items()}
    return value


class Keeper(BaseTool):
    """A tool, and a list of what it was given."""

    def __init__(self, seen: list[Any], name: str) -> None:
        super().__init__(
            name=name, description="Keeps.", parameters={"type": "object", "properties": {}}
        )
        self.kept = seen

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.kept.append(["create", kwargs])

    async def execute(self, instance_id: str, arguments: Any, **kwargs: Any) -> str:
        self.kept.append(["execute", kwargs])
        return "kept"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.kept.append(["release", kwargs])


class User(BaseInteraction):
    """A simulated user that ends the conversation, and keeps what it was given."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__({})
        self.kept = seen

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.kept.append(["user", kwargs])

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        self.kept.append(["user", kwargs])
        return True, "done", 1.0, {}


@register_reward("twins")
def keep_arguments(data_source, solution_str, ground_truth, extra_info, free="absent", prompt=None):
    REWARDED.append([ground_truth, extra_info, free, prompt])
    return 1.0


REWARDED: list[Any] = []


def played(row: dict[str, Any]) -> list[Any]:
    """What tools, environment, simulated user, reward and records get of a row."""
    seen: list[Any] = []

    class World(Environment):
        async def reset(self, **environment_kwargs: Any) -> Observation:
            seen.append(["environment", environment_kwargs])
            return Observation.say("go")

        async def step(self, reply: Any) -> Observation:
            return Observation(done=True)

    tools = ToolRegistry([Keeper(seen, "keep"), Keeper(seen, "other")])
    users = InteractionRegistry({"keeper": User(seen)}, timeout=10.0)
    known = base.ENVIRONMENTS
    base.ENVIRONMENTS = {**known, "twins": World}
    try:
        for agent in (ToolAgent, InteractionAgent, EnvironmentAgent):
            shared = {
                "tools": tools,
                "interactions": users,
                "environments": EnvironmentPools(timeout=10.0),
            }
            harness = AgentHarness(
                agent, ["<call>keep {}</call>", "done"], shared=shared, tool_prompt="template"
            )
            trajectory = asyncio.run(harness.run(row))
            scored = asyncio.run(score(trajectory, timeout=10.0))
            seen.append(harness.text(trajectory))
            seen.append(recorded(scored))
    finally:
        base.ENVIRONMENTS = known
    seen += REWARDED
    REWARDED.clear()
    return seen


def recorded(trajectory: Trajectory) -> list[Any]:
    """What ``view`` and ``rollout`` write of a trajectory, without times."""
    record = trajectory_record(trajectory, step=0, split="train")
    (table_row,) = records(Group(group_id="g", trajectories=(trajectory,)), 0)
    return [
        record["row"],
        record["messages"],
        table_row["ground_truth"],
        table_row["extra_info"],
        table_row["messages"],
    ]


@settings(max_examples=examples(40))
@given(twins())
def test_whoever_reads_a_row_gets_the_same_from_json_lines_and_parquet(
    data: tuple[list[dict[str, Any]], pa.Schema],
):
    rows, schema = data
    with tempfile.TemporaryDirectory() as folder:
        results = [
            results_of(file) for file in write_twins(Path(folder), rows, schema=schema, group=2)
        ]
    for name, expected in results[0].items():
        assert as_text(results[1][name]) == as_text(expected), name


def results_of(file: Path) -> dict[str, Any]:
    """What every consumer makes of a file."""
    dataset = open_dataset([file], RowChecks(agents=["tool_agent"], tools=["keep", "other"]))
    rows = list(dataset)
    row_infos = list(RowsWithoutPrompts(dataset))
    config = build({"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}, [])
    asks = RewardFunction.of(lambda prompt, free, ground_truth: 0.0, "last_turn")
    return {
        "reader": rows_of(file),
        "fingerprint": dataset.fingerprint,
        "rows": rows,
        "outlines": row_infos,
        "played": [played(row) for row in rows],
        "idle tools": report_idle_tools(config, row_infos),
        "missing for the reward": [sorted(asks.missing_in(row, ())) for row in row_infos],
        "tasks": [str(read_task(row)) for row in rows],
        "clients": [openai_prompt(row) for row in rows],
        "prompts": [encode_prompt(ChatCodec(tokenizer()), row["prompt"], ())[0] for row in rows],
        "sft": encoded(SftDataConfig, file),
    }


def encoded(kind: type[ConversationsConfig], file: Path) -> list[list[list[int]]]:
    encoder = Encoder(
        codec=ChatCodec(tokenizer()),
        config=kind.model_validate({"train": str(file)}),
        pack_length=10_000,
    )
    examples = encoder.examples([DataSource(path=str(file))])
    return [[s.token_ids.tolist() + s.loss_mask.tolist() for s in example] for example in examples]


def test_replaced_pictures_and_videos_make_other_rows_and_moved_ones_do_not(tmp_path: Path):
    def fingerprint(name: str, **changed: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        files = {"one.png": b"first", "frame.png": b"f" * 200_000, "shown.png": b"p"} | changed
        for file, data in files.items():
            (folder / file).write_bytes(data)
        prompt = [
            {"role": "user", "content": "<image> and <video>"},
            {"role": "user", "content": [{"type": "image", "image": "shown.png"}]},
        ]
        row = {
            "prompt": prompt,
            "data_source": "x",
            "images": ["one.png"],
            "videos": [["frame.png", "frame.png"]],
        }
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return open_dataset([folder / "rows.jsonl"]).fingerprint

    first_fingerprint = fingerprint("a")
    assert fingerprint("b") == first_fingerprint
    for name, data in (
        ("one.png", b"other"),
        ("shown.png", b"q"),
        ("frame.png", b"f" * 199_999 + b"g"),
    ):
        assert fingerprint("a", **{name: data}) != first_fingerprint, name


@pytest.mark.parametrize("agent", ["command", "an_agent_of_a_user"])
def test_a_task_whose_files_change_makes_other_rows(tmp_path: Path, agent: str):
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("")
    (task / "tests" / "test.sh").write_text("true")
    row = {
        "prompt": [{"role": "user", "content": "Do it."}],
        "data_source": "x",
        "agent_name": agent,
        "extra_info": {"task": str(task)},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row | {"number": number}) for number in range(3)) + "\n")
    first_fingerprint = open_dataset([file]).fingerprint
    assert open_dataset([file]).fingerprint == first_fingerprint
    (task / "tests" / "test.sh").write_text("false")
    assert open_dataset([file]).fingerprint != first_fingerprint
