"""Whatever earns a trajectory something is a number that float32 holds, wherever it enters; else
that one is lost.
"""

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response

from jax_agent_rl import rewards
from jax_agent_rl.checks import FLOAT32_MAX, as_score
from jax_agent_rl.environments import Environment, EnvironmentPool, Observation
from jax_agent_rl.environments.users import BaseInteraction
from jax_agent_rl.environments.users.base import InteractionSession
from jax_agent_rl.errors import (
    DataError,
    EnvironmentFailedError,
    InteractionError,
    RewardError,
    ToolServerError,
)
from jax_agent_rl.evaluate.export import Target, read_table, records, write
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.rewards import RemoteReward, registry
from jax_agent_rl.rewards.workers import FunctionWorkers
from jax_agent_rl.tool_server.plugins import ToolObservation
from jax_agent_rl.tools import BaseTool, ToolResponse, ToolSession
from jax_agent_rl.tools.client import ServerAction, ToolServerClient, observation_url
from jax_agent_rl.types import FinishReason, Group, ToolCallRecord, Trajectory, Turn
from jax_agent_rl.utils.network import JsonService
from tests.fakes import FakeCodec
from tests.http_service import ToolServer
from tests.trajectories import call, trajectory

TOO_LARGE: list[Any] = [
    1e300,
    -1e300,
    3.5e38,
    10**400,
    10**5000,
    np.float64(1e39),
    Decimal("1e300"),
    Fraction(10**99),
]
NOT_FINITE: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    Decimal("inf"),
    Decimal("sNaN"),
]
NO_NUMBER: list[Any] = [
    "1.0",
    b"1",
    [1.0],
    {},
    1j,
    np.complex64(1),
    np.zeros(1),
    np.zeros((2, 2)),
    np.str_("1"),
]
BAD = [*TOO_LARGE, *NOT_FINITE, *NO_NUMBER]
GOOD: list[tuple[Any, float]] = [
    (True, 1.0),
    (np.bool_(False), 0.0),
    (3, 3.0),
    (-0.5, -0.5),
    (np.float32(0.5), 0.5),
    (np.asarray(0.25), 0.25),
    (np.int64(7), 7.0),
    (Decimal("0.5"), 0.5),
    (Fraction(1, 4), 0.25),
    (float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    (-FLOAT32_MAX, -FLOAT32_MAX),
]
JSON = [value for value in BAD if type(value) in (int, float) and value not in (10**5000,)]
"""What a server can send as JSON, or Python's reading of it."""


def name(value: object) -> str:
    return type(value).__name__ + (f"-{value}" if isinstance(value, float) else "")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Registrations of one test do not reach another."""
    monkeypatch.setattr(registry, "REWARDS", dict(registry.REWARDS))


# --- the one check --------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "number"), GOOD, ids=lambda value: name(value))
def test_numbers_of_all_kinds_are_scores(value: Any, number: float):
    got = as_score(value, "x")
    assert got == number and type(got) is float


@pytest.mark.parametrize("value", [*BAD, None], ids=name)
def test_what_float32_cannot_hold_is_no_score(value: Any):
    with pytest.raises(ValueError, match="^the reward must"):
        as_score(value, "the reward")


@given(st.floats() | st.integers() | st.decimals() | st.booleans())
def test_a_score_is_what_numpys_float32_finds_finite(value: Any):
    """Golden: NumPy's cast, but for what it rounds down to its largest number."""
    with np.errstate(over="ignore"):
        try:
            held = bool(np.isfinite(np.float32(float(value))))
        except (OverflowError, ValueError):
            held = False
    try:
        assert as_score(value, "x") == float(value) and held
    except ValueError:
        assert not held or abs(float(value)) > FLOAT32_MAX


# --- everything that enters -----------------------------------------------------------------------


def scored_row(data_source: str = "mine", **fields: Any) -> Trajectory:
    row = {"data_source": data_source, "reward_model": {"ground_truth": "1"}, "extra_info": fields}
    return replace(
        trajectory([1], [5, 2]), row=row, messages=({"role": "assistant", "content": "1"},)
    )


async def from_a_function(value: Any) -> float:
    rewards.register_reward("mine")(lambda *_: value)
    return (await rewards.score(scored_row())).reward


async def from_a_dict(value: Any) -> float:
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": value, "text": "left out"}

    rewards.register_reward("mine")(compute_score)
    return (await rewards.score(scored_row())).reward


async def from_a_verifier(value: Any) -> float:
    """``agent_output`` is what the agent ``command`` read from the reward file of the tests."""
    return (await rewards.score(scored_row("command", agent_output={"reward": value}))).reward


class Room(Environment):
    """Gives the score it is told to, with a step or at the end."""

    def __init__(self, of_step: Any = 0.0, of_end: Any = 0.0) -> None:
        self._of_step = of_step
        self._of_end = of_end

    async def reset(self) -> Observation:
        return Observation.say("a room")

    async def step(self, reply):
        return Observation(score=self._of_step)

    async def conclude(self, messages, reason):
        return {"score": self._of_end}


async def from_a_step(value: Any) -> float:
    pool = EnvironmentPool(
        lambda: Room(of_step=value), name="room", scope="rollout", max_instances=1, timeout=5.0
    )
    async with pool.lease() as leased:
        reply: Any = None  # it is not read
        return (await leased.step(reply)).score


async def from_an_end(value: Any) -> float:
    pool = EnvironmentPool(
        lambda: Room(of_end=value), name="room", scope="rollout", max_instances=1, timeout=5.0
    )
    async with pool.lease() as leased:
        return (await leased.conclude((), FinishReason.ANSWER))["score"]


class Scorer(BaseInteraction):
    """A user that gives the score it is told to."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return (True, "", self.config["score"], {})


async def from_a_user(value: Any) -> float:
    user = Scorer({"score": value})
    async with InteractionSession(
        user, name="u", instance_id="t", kwargs={}, timeout=5.0
    ) as session:
        return (await session.reply([{"role": "assistant", "content": "x"}])).score


ENTRANCES: dict[str, tuple[Callable[[Any], Awaitable[float]], type[Exception]]] = {
    "function": (from_a_function, RewardError),
    "dict": (from_a_dict, RewardError),
    "environment step": (from_a_step, EnvironmentFailedError),
    "environment end": (from_an_end, EnvironmentFailedError),
    "simulated user": (from_a_user, InteractionError),
}


@pytest.mark.parametrize("value", BAD, ids=name)
@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_a_bad_score_is_an_error_of_its_trajectory(entrance: str, value: Any):
    enter, error = ENTRANCES[entrance]
    with pytest.raises(error):
        await enter(value)


@pytest.mark.parametrize(("value", "number"), GOOD, ids=lambda value: name(value))
@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_a_good_score_arrives_as_a_float(entrance: str, value: Any, number: float):
    got = await ENTRANCES[entrance][0](value)
    assert got == number and type(got) is float


@pytest.mark.parametrize("value", [1e300, math.nan, math.inf])
async def test_a_verifiers_number_that_no_score_is_loses_its_trajectory(value: float):
    assert await from_a_verifier(0.5) == 0.5
    with pytest.raises(RewardError):
        await from_a_verifier(value)


@pytest.mark.parametrize("value", [*TOO_LARGE, *NOT_FINITE], ids=name)
async def test_a_part_of_a_reward_is_checked_like_the_reward(value: Any):
    """Estimators (gdpo), filters and metrics read parts; texts and lists are no parts."""
    rewards.register_reward("mine")(
        lambda *_: {"score": 1.0, "style": value, "note": "1e300", "all": [1e300]}
    )
    with pytest.raises(RewardError, match="style"):
        await rewards.score(scored_row())


@pytest.mark.parametrize("value", ["1e300", "-inf", "10**400", "{'score': 1.0, 'style': 1e300}"])
async def test_a_worker_process_checks_what_its_function_returns(tmp_path: Path, value: str):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from jax_agent_rl.rewards import register_reward\n\n"
        '@register_reward("mine")\ndef compute(solution_str):\n'
        f"    from math import inf\n    return {value}\n"
    )
    rewards.load_rewards(str(file))
    workers = FunctionWorkers(str(file), size=1)
    try:
        with pytest.raises(RewardError, match="mine"):
            await rewards.score(scored_row(), workers=workers)
    finally:
        workers.close()


@pytest.mark.parametrize("value", JSON, ids=name)
async def test_a_reward_server_cannot_send_a_bad_score(value: Any):
    def handler(request):
        return httpx.Response(200, content=json.dumps({"score": value}))

    remote = RemoteReward(
        "http://rewards.test/score", transport=httpx.MockTransport(handler), retry_delay=0.0
    )
    rewards.register_reward("mine")(remote)
    with pytest.raises(RewardError):
        await rewards.score(scored_row())
    await remote.close()


# --- tools: a failure is the tool's, the model reads it -------------------------------------------


class Payer(BaseTool):
    """Pays what it is told to."""

    def __init__(self, of_call: Any, of_whole: Any = None) -> None:
        super().__init__(
            name="payer", description="", parameters={"type": "object", "properties": {}}
        )
        self._of_call = of_call
        self._of_whole = of_whole

    async def execute(self, instance_id, arguments, **execute_kwargs):
        return ToolResponse("done", reward=self._of_call)

    async def calc_reward(self, instance_id, **calc_reward_kwargs):
        return self._of_whole


def session(tool: BaseTool) -> ToolSession:
    return ToolSession(
        {tool.name: tool},
        "t-1",
        kwargs={},
        timeout=5.0,
        shorten=lambda text: FakeCodec().truncate(text, 200, "middle"),
    )


@pytest.mark.parametrize("value", BAD, ids=name)
async def test_a_call_that_pays_no_number_fails_and_earns_nothing(value: Any):
    async with session(Payer(value, value)) as tools:
        record = await tools.call("payer", {})
        assert (record.error, record.reward) == ("raised", 0.0)
        assert await tools.calc_rewards() == {}


@pytest.mark.parametrize("value", JSON, ids=name)
async def test_a_tool_server_cannot_send_a_bad_reward(value: Any):
    async with ToolServer() as server:

        async def answer(payload):
            observation = {"obs": "x", "reward": value}
            return Response(
                json.dumps({"observations": [observation], "dones": [False], "valids": [True]})
            )

        server.respond = answer
        service = JsonService(
            url=observation_url(server.url),
            url_key="agent.tool_server_url",
            timeout=5.0,
            timeout_key="agent.tool_call_timeout",
            error=ToolServerError,
        )
        client = ToolServerClient(service)
        try:
            (outcome,) = await client.get_observation([ServerAction(trajectory_id="t", text="a")])
        except ToolServerError as error:  # not even JSON
            outcome = error
        await client.close()
    assert isinstance(outcome, ToolServerError)


@pytest.mark.parametrize("value", BAD, ids=name)
def test_records_hold_no_bad_score(value: Any):
    for make in (
        lambda: ToolObservation(text="x", reward=value),
        lambda: ToolCallRecord(name="add", arguments={}, observation="", reward=value),
        lambda: Turn(output=trajectory([1], [5, 2]).turns[0].output, score=value),
    ):
        with pytest.raises(ValueError):
            make()


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_calls", "of_turns", "score"),
    [
        ((3e38, 3e38), (), 0.0),
        ((3e38, -3e38), (), 0.0),
        ((3e38,), (), 1e38),
        ((), (3e38, 3e38), 0.0),
    ],
)
async def test_what_adds_up_to_more_than_float32_holds_is_an_error(
    of_calls, of_turns, score: float
):
    rewards.register_reward("mine")(lambda *_: score)
    row = scored_row()
    calls = tuple(replace(call(), reward=reward) for reward in of_calls)
    turns = [replace(row.turns[0], tool_calls=calls)]
    turns += [replace(row.turns[0], score=turn_score) for turn_score in of_turns]
    sequence = Trajectory.from_turns(
        prompt_ids=[1],
        turns=turns,
        trajectory_id="t",
        group_id="g",
        agent_name="a",
        finish_reason=FinishReason.ANSWER,
        row=row.row,
        messages=row.messages,
    )
    with pytest.raises(RewardError, match="float32"):
        await rewards.score(sequence)


# --- a table of trajectories ----------------------------------------------------------------------


@pytest.mark.parametrize("column", ["reward", "reward_parts"])
def test_a_table_with_a_reward_that_none_is_cannot_be_read(tmp_path: Path, column: str):
    target = Target.from_path(tmp_path / "out.jsonl")
    member = scored_row()
    with Journal(target.journal, {"seed": 0}) as journal:
        journal.add(0, records(Group(group_id="g", trajectories=(member,)), 0), {})
        write(target, journal, {"policy": "p", "data": "d", "kept": 1, "started": 1})
    assert len(list(read_table(tmp_path / "out.jsonl").trajectories)) == 1
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    bad = {"reward": 1e300, "reward_parts": '{"accuracy": 1e300}'}[column]
    (tmp_path / "out.jsonl").write_text(json.dumps(json.loads(line) | {column: bad}) + "\n")
    with pytest.raises(DataError, match="float32"):
        list(read_table(tmp_path / "out.jsonl").trajectories)
