"""What a simulation assumes about engines, learner, model and tools, and the agent that behaves like it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jax_agent_rl.agents.loop import AgentLoop, register_agent
from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.comparison import AgreementCheck
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.testing.simulate.clock import VirtualLoop
from jax_agent_rl.testing.simulate.draws import Draws
from jax_agent_rl.testing.simulate.engine import ID, EngineSpeed
from jax_agent_rl.types import FinishReason, Group, SamplingParams, Trajectory

Seconds = Annotated[float, Field(ge=0)]
AGENT = "simulated_agent"


class EngineAssumptions(Section):
    """Each engine."""

    count: Positive = Field(default=4, description="Engines (data-parallel replicas).")
    slots: Positive = Field(default=64, description="Requests one engine decodes at the same time.")
    step_ms: float = Field(
        default=10.0, gt=0, description="Milliseconds of a decode step: the time to read the weights."
    )
    slot_us: float = Field(default=0.0, ge=0, description="Microseconds each slot in use adds to a step.")
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
        """Ids all engines sample in a second, every slot in use."""
        return self.count * self.slots / (self.speed.step_seconds + self.speed.slot_seconds * self.slots)


class LearnerAssumptions(Section):
    """The learner."""

    tokens_per_second: float = Field(
        default=20000.0, gt=0, description="Ids of trajectories it learns from in a second."
    )
    publish_seconds: Seconds = Field(default=0.5, description="From its parameters to something engines can load.")


class AgentAssumptions(Section):
    """Trajectories. Lengths and latencies are log-normal: most are short, a few are long."""

    turns: Positive = Field(default=3, description="Generations of a trajectory; between two of them a tool is called.")
    prompt_tokens: Positive = Field(default=256, description="Ids of a prompt.")
    turn_tokens: Positive = Field(default=200, description="Median ids of a generation.")
    turn_sigma: float = Field(default=1.0, ge=0, description="Spread of that: the deviation of its logarithm.")
    turn_tokens_max: Positive = Field(default=2048, description="Longer generations are cut to this.")
    observation_tokens: Positive = Field(default=32, description="Ids of a tool's result.")
    tool_seconds: Seconds = Field(default=1.0, description="Median latency of a tool.")
    tool_sigma: float = Field(default=1.0, ge=0, description="Spread of that.")
    tool_seconds_min: Seconds = Field(default=0.0, description="Shorter latencies are raised to this.")
    tool_seconds_max: Seconds = Field(default=10.0, description="Longer latencies are cut to this.")

    def turn_length(self, *key: int | str) -> int:
        """Ids of the generation of this name."""
        draws = Draws(median=self.turn_tokens, sigma=self.turn_sigma, least=1, most=self.turn_tokens_max)
        return round(draws.at("turn", *key))

    def tool_latency(self, *key: int | str) -> float:
        """Seconds of the tool call of this name."""
        draws = Draws(
            median=self.tool_seconds, sigma=self.tool_sigma, least=self.tool_seconds_min, most=self.tool_seconds_max
        )
        return draws.at("tool", *key)

    @property
    def longest(self) -> int:
        """Most ids of a context."""
        return self.prompt_tokens + self.turns * (self.turn_tokens_max + self.observation_tokens)


class Assumptions(Section):
    """Everything a simulation assumes beside the recipe."""

    engines: EngineAssumptions = Field(default_factory=EngineAssumptions)
    learner: LearnerAssumptions = Field(default_factory=LearnerAssumptions)
    agent: AgentAssumptions = Field(default_factory=AgentAssumptions)
    steps: Positive = Field(default=10, description="Learner steps to simulate.")
    seed: NonNegative = Field(default=0, description="Seeds all lengths and latencies.")


def load_assumptions(path: Path | None, overrides: Sequence[str]) -> Assumptions:
    """Reads a YAML file, if any, and applies overrides; raises :class:`ConfigError` with all problems."""
    return build_tree(Assumptions, read_tree(path) if path else {}, overrides)


class SimulatedCodec:
    """Prompts of the assumed length, which are the row's number throughout; nothing has a text."""

    eos_token_ids: tuple[int, ...] = ()
    modalities: frozenset[str] = frozenset()

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[object] = ()) -> list[int]:
        return [int(messages[0]["content"])] * self._prompt_tokens

    def replaces_end(self, sampled_ids: Sequence[int], appended_ids: Sequence[int]) -> bool:
        return False

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""


@register_agent(AGENT)
class SimulatedAgent(AgentLoop):
    """Generates and waits as the row's assumptions say, by the row's number and the trajectory's in its group."""

    async def run(
        self, row: Mapping[str, Any], *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        agent, key = row["agent"], (row["seed"], row["number"], trajectory_id.rpartition("-")[2])
        episode = self.start(row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling)
        for turn in range(agent.turns):
            last = turn == agent.turns - 1
            await episode.generate(session_ends=last, max_tokens=agent.turn_length(*key, turn))
            if not last:
                await asyncio.sleep(agent.tool_latency(*key, turn))
                episode.append_ids([ID] * agent.observation_tokens, [])
        return episode.finish(FinishReason.ANSWER)


class SimulatedLearner:
    """Takes the time of a learner, and learns nothing. Its attributes are those of a ``Learner``."""

    params = None
    state = None
    programs_compiled = 0

    def __init__(self, speed: LearnerAssumptions) -> None:
        self._speed = speed
        self.busy_seconds = 0.0

    def update(
        self,
        groups: Sequence[Group],
        *,
        masked: Mapping[str, Any],
        tick: Callable[[int, int], None],
        gate: StepCancellation,
        check: AgreementCheck,
    ) -> UpdateResult:
        """Runs in the simulation's "thread", see :meth:`VirtualLoop.run_in_executor`."""
        tokens = sum(len(t.prompt_ids) + len(t.response_ids) for group in groups for t in group.trajectories)
        seconds = tokens / self._speed.tokens_per_second
        with gate.update():
            _spend(seconds)
        self.busy_seconds += seconds
        return UpdateResult(metrics={"learner_tokens_per_second": self._speed.tokens_per_second}, skipped=False)


class SimulatedPublisher:
    """Takes the time of an export."""

    def __init__(self, speed: LearnerAssumptions) -> None:
        self._speed = speed

    def make(self, learner: Any, version: int) -> WeightUpdate:
        _spend(self._speed.publish_seconds)
        return WeightUpdate(version=version, kind="arrays", payload=None)

    def close(self) -> None:
        """There is nothing to close."""


def _spend(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.spend(seconds)
