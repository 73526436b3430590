"""Assumptions of a simulation, and parts that behave as assumed in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.agents.request import EpisodeRequest, derive_seed
from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.loading import load_tree
from jax_agent_rl.environments import Environment, Observation, register_environment
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.transport import WeightTransport
from jax_agent_rl.testing.fakes import FakeLearner
from jax_agent_rl.types import FinishReason, Group, Trajectory

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply


class SimulationStuckError(RuntimeError):
    """A deadlock in the simulation: nothing is ready and no timer is set."""


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits, and advances virtual time by the timeout instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise SimulationStuckError(
                    "nothing is left to happen in the simulation, but it has not ended"
                )
            # Just past the timer: asyncio fires only timers that lie before the current time.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for coroutines that wait only for timers and for each other.

    Functions that would run in a thread run at once; their results arrive after the time they
    :meth:`spend`.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self._spent = 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._jumping.now

    def spend(self, seconds: float) -> None:
        """Add to the duration of the function that is running "in a thread"."""
        self._spent += seconds

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function at once and return a future that is done after its virtual duration."""
        future = self.create_future()
        self._spent = 0.0
        try:
            result = func(*args)
        except Exception as error:
            self.call_later(self._spent, _settle, future, None, error)
        else:
            self.call_later(self._spent, _settle, future, result, None)
        return future


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # the waiter was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


Seconds = Annotated[float, Field(ge=0)]
AGENT = "simulated_agent"
ENVIRONMENT = "simulated_environment"


@dataclass(frozen=True, kw_only=True)
class Draws:
    """A truncated log-normal distribution: most draws are short, a few are long.

    A draw depends on its key alone, so that all policies that are compared do the same work.

    Attributes:
        median: median before truncation; 0 makes all draws 0 before truncation.
        sigma: standard deviation of the logarithm.
        least: lower bound.
        most: upper bound.
    """

    median: float
    sigma: float = 1.0
    least: float = 0.0
    most: float

    def at(self, *key: int | str) -> float:
        """Return the draw of this key."""
        scale = random.Random(derive_seed(*key)).lognormvariate(0.0, self.sigma)
        return min(self.most, max(self.least, self.median * scale))


ID = 1
"""The id that tools return. Simulated engines sample another one for each session."""


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Speed of an engine.

    Attributes:
        slots: requests decoded concurrently.
        step_seconds: duration of a decode step of an empty batch: the time to read the weights.
        slot_seconds: time that each slot in use adds to a step.
        prefill_tokens_per_step: prompt ids that a slot computes in the time of a step.
        load_seconds: time to load new weights.
    """

    slots: int
    step_seconds: float
    slot_seconds: float = 0.0
    prefill_tokens_per_step: int = 512
    load_seconds: float = 0.0


KVPolicy = Literal["lru", "expected_return"]


@dataclass(frozen=True, kw_only=True)
class KVCacheSize:
    """A KV cache of limited size.

    Attributes:
        tokens: positions on the device.
        offloading_tokens: positions on the host.
        policy: order of eviction. ``expected_return`` is the JAX engine's; it also makes requests
            wait for space.
        prefill_seconds: duration of computing an id of a prompt, during which no slot decodes.
        restore_seconds: duration of copying an id's KV back from the host, likewise.
    """

    tokens: int
    offloading_tokens: int = 0
    policy: KVPolicy = "expected_return"
    prefill_seconds: float = 0.0
    restore_seconds: float = 0.0


class EngineAssumptions(Section):
    """Assumptions about each engine."""

    count: Positive = Field(default=4, description="Engines (data-parallel replicas).")
    slots: Positive = Field(default=64, description="Requests one engine decodes at the same time.")
    step_ms: float = Field(
        default=10.0,
        gt=0,
        description="Milliseconds of a decode step: the time to read the weights.",
    )
    slot_us: float = Field(
        default=0.0, ge=0, description="Microseconds each slot in use adds to a step."
    )
    prefill_tokens_per_step: Positive = Field(
        default=512, description="Prompt ids a slot computes in the time of a step."
    )
    load_seconds: Seconds = Field(default=0.5, description="To take new weights.")

    @property
    def speed(self) -> EngineSpeed:
        return EngineSpeed(
            slots=self.slots,
            step_seconds=self.step_ms / 1e3,
            slot_seconds=self.slot_us / 1e6,
            prefill_tokens_per_step=self.prefill_tokens_per_step,
            load_seconds=self.load_seconds,
        )

    @property
    def tokens_per_second(self) -> float:
        """Ids per second that all engines sample with every slot in use."""
        step_seconds = self.speed.step_seconds + self.speed.slot_seconds * self.slots
        return self.count * self.slots / step_seconds


class KVCacheAssumptions(Section):
    """Assumptions about the KV cache of each engine.

    With ``tokens``, the simulation compares ways to manage it.
    """

    tokens: Positive | None = Field(
        default=None, description="Positions on the device; null: no limit."
    )
    offloading_tokens: Positive | None = Field(
        default=None,
        description="Positions in host memory; null: as many as trajectories in flight may take.",
    )
    prefill_us: float = Field(
        default=50.0,
        ge=0,
        description="Microseconds in which an id of a prompt is computed while no slot decodes.",
    )
    restore_us: float = Field(
        default=5.0,
        ge=0,
        description="Microseconds in which an id's KV is copied back from the host, likewise.",
    )

    def size(self, *, policy: KVPolicy, offloading_tokens: int) -> KVCacheSize | None:
        """Return the cache with a policy; None if it has no limit."""
        if self.tokens is None:
            return None
        return KVCacheSize(
            tokens=self.tokens,
            offloading_tokens=offloading_tokens,
            policy=policy,
            prefill_seconds=self.prefill_us / 1e6,
            restore_seconds=self.restore_us / 1e6,
        )


class LearnerAssumptions(Section):
    """Assumptions about the learner."""

    tokens_per_second: float = Field(
        default=20000.0, gt=0, description="Ids of trajectories it learns from in a second."
    )
    publish_seconds: Seconds = Field(
        default=0.5, description="From its parameters to something engines can load."
    )


class AgentAssumptions(Section):
    """Assumptions about trajectories.

    Lengths and latencies are log-normal: most are short, a few are long.
    """

    turns: Positive = Field(
        default=3, description="Generations of a trajectory; between two of them a tool is called."
    )
    prompt_tokens: Positive = Field(default=256, description="Ids of a prompt.")
    turn_tokens: Positive = Field(default=200, description="Median ids of a generation.")
    turn_sigma: float = Field(
        default=1.0, ge=0, description="Spread of that: the deviation of its logarithm."
    )
    turn_tokens_max: Positive = Field(
        default=2048, description="Longer generations are cut to this."
    )
    observation_tokens: Positive = Field(default=32, description="Ids of a tool's result.")
    tool_seconds: Seconds = Field(default=1.0, description="Median latency of a tool.")
    tool_sigma: float = Field(default=1.0, ge=0, description="Spread of that.")
    tool_seconds_min: Seconds = Field(
        default=0.0, description="Shorter latencies are raised to this."
    )
    tool_seconds_max: Seconds = Field(default=10.0, description="Longer latencies are cut to this.")
    environment_start_seconds: Seconds = Field(
        default=0.0,
        description=(
            "To start the environment that each trajectory has to itself, such as a sandbox; 0: it"
            " has none."
        ),
    )

    def turn_length(self, *key: int | str) -> int:
        """Return the length of the generation with this key, in ids."""
        draws = Draws(
            median=self.turn_tokens, sigma=self.turn_sigma, least=1, most=self.turn_tokens_max
        )
        return round(draws.at("turn", *key))

    def tool_latency(self, *key: int | str) -> float:
        """Return the latency of the tool call with this key, in seconds."""
        draws = Draws(
            median=self.tool_seconds,
            sigma=self.tool_sigma,
            least=self.tool_seconds_min,
            most=self.tool_seconds_max,
        )
        return draws.at("tool", *key)

    @property
    def longest(self) -> int:
        """Longest context, in ids."""
        return self.prompt_tokens + self.turns * (self.turn_tokens_max + self.observation_tokens)


class Assumptions(Section):
    """All assumptions of a simulation beside the recipe."""

    engines: EngineAssumptions = Field(default_factory=EngineAssumptions)
    kv_cache: KVCacheAssumptions = Field(default_factory=KVCacheAssumptions)
    learner: LearnerAssumptions = Field(default_factory=LearnerAssumptions)
    agent: AgentAssumptions = Field(default_factory=AgentAssumptions)
    steps: Positive = Field(default=10, description="Learner steps to simulate.")
    seed: NonNegative = Field(default=0, description="Seeds all lengths and latencies.")


def load_assumptions(path: Path | None, overrides: Sequence[str]) -> Assumptions:
    """Read a YAML file, if given, and apply overrides.

    Raises:
        ConfigError: values are wrong; names them all.
    """
    return load_tree(Assumptions, path, overrides)


class SimulatedCodec:
    """A codec whose prompts repeat the row's number to the assumed length; ids have no text."""

    eos_token_ids: tuple[int, ...] = ()
    modalities: frozenset[str] = frozenset()

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[object] = ()
    ) -> list[int]:
        return [int(messages[0]["content"])] * self._prompt_tokens

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        return False

    def thinking_after(self, context_ids: Sequence[int]) -> str:
        return ""

    def turn_text(self, sampled_ids: Sequence[int], context_ids: Sequence[int]) -> str:
        return self.decode(sampled_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""


@register_environment(ENVIRONMENT)
class SimulatedEnvironment(Environment):
    """An environment that takes its time to start, and then does nothing."""

    prepared_by = ("start_seconds",)

    async def prepare(self, *, start_seconds: float) -> None:
        await asyncio.sleep(start_seconds)

    async def reset(self, *, start_seconds: float) -> Observation:
        return Observation()

    async def step(self, reply: Reply) -> Observation:
        return Observation()


@register_agent(AGENT)
class SimulatedAgent(AgentLoop):
    """An agent that generates and waits as assumed for its row and its place in the group."""

    async def play(self, request: EpisodeRequest) -> Trajectory:
        row = request.row
        agent = row["agent"]
        _, _, member = request.trajectory_id.rpartition("-")
        key = (row["seed"], row["number"], member)
        async with AsyncExitStack() as stack:
            start_metrics: Mapping[str, float] = {}
            if agent.environment_start_seconds:
                kwargs = {"start_seconds": agent.environment_start_seconds}
                pool = self.context.environments.pool(ENVIRONMENT)
                environment = await stack.enter_async_context(pool.lease(kwargs))
                start_metrics = environment.start_metrics

            episode = self.start(request)
            episode.add_metrics(start_metrics)
            for turn in range(agent.turns):
                is_last = turn == agent.turns - 1
                max_tokens = agent.turn_length(*key, turn)
                await episode.generate(session_ends=is_last, max_tokens=max_tokens)
                if not is_last:
                    await asyncio.sleep(agent.tool_latency(*key, turn))
                    episode.append_ids([ID] * agent.observation_tokens, [])
        return episode.finish(FinishReason.ANSWER)


class SimulatedLearner(FakeLearner):
    """Takes the time of a learner, and learns nothing."""

    def __init__(self, speed: LearnerAssumptions) -> None:
        self._speed = speed
        self.busy_seconds = 0.0

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        tokens = 0
        for group in groups:
            for trajectory in group.trajectories:
                tokens += len(trajectory.prompt_ids) + len(trajectory.response_ids)
        seconds = tokens / self._speed.tokens_per_second
        _spend(seconds)
        self.busy_seconds += seconds
        return {"learner_tokens_per_second": self._speed.tokens_per_second}


class SimulatedTransport(WeightTransport):
    """Takes the time of an export to the engines."""

    def __init__(self, speed: LearnerAssumptions) -> None:
        self._speed = speed

    def offer(self, learner: Any, version: int) -> WeightUpdate:
        _spend(self._speed.publish_seconds)
        return WeightUpdate(version=version, kind="arrays", payload=None)

    def release(self) -> None:
        """Do nothing."""


def _spend(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.spend(seconds)
