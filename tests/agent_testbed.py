"""An agent loop over a scripted engine, and the check that its trajectory is token-exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.agents import (
    AgentContext,
    AgentLoop,
    EpisodeRequest,
    Prefix,
    ServerToolAgent,
)
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.agents.session_tree import to_trajectory
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import Fork, SamplingParams, Trajectory
from tests.fakes import FakeCodec, ScriptedBackend
from tests.http_service import ToolServer

ROW: Mapping[str, Any] = {
    "prompt": [{"role": "user", "content": "what is 1 + 2 ?"}],
    "data_source": "calculator",
}


def episode_request(
    row: Mapping[str, Any],
    sampling: SamplingParams,
    *,
    trajectory_id: str = "t",
    group_id: str = "g",
    prefix: Prefix | None = None,
) -> EpisodeRequest:
    """Return the request of a trajectory whose ids do not matter."""
    return EpisodeRequest(
        row=row, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling, prefix=prefix
    )


def branch_request(parent: Trajectory, fork: Fork, sampling: SamplingParams) -> EpisodeRequest:
    """Return the request of trajectory ``b``, which leaves its parent at a fork."""
    prefix = Prefix.of(parent, fork)
    return episode_request(parent.row, sampling, trajectory_id="b", prefix=prefix)


def session_trajectory(recorder: ChatRecorder) -> Trajectory:
    """Return what a session recorded as a trajectory of a row without anything."""
    request = episode_request({}, SamplingParams(max_tokens=1), trajectory_id=recorder.session_id)
    return to_trajectory(
        recorder.turns,
        request,
        agent_name="a",
        refused=recorder.refused,
        metrics=recorder.metrics,
    )


class AgentHarness:
    """Keeps what tests look at: the codec, the engine, the loop.

    Args:
        agent: the loop's class.
        script: what the engine says, see :class:`~tests.fakes.ScriptedBackend`.
        shared: further fields of the agent context (``tools``, ``interactions``, …).
        limits: the ``agent`` section.
    """

    def __init__(
        self,
        agent: type[AgentLoop],
        script: Any,
        *,
        backend: type[ScriptedBackend] = ScriptedBackend,
        codec: FakeCodec | None = None,
        engine_len: int = 1000,
        capabilities: Capabilities | None = None,
        shared: Mapping[str, Any] | None = None,
        **limits: Any,
    ):
        self.codec = codec or FakeCodec()
        self.backend = backend(self.codec, script, capabilities=capabilities)
        self.client = LLMServerClient([AsyncServer(self.backend)])
        self.context = AgentContext(
            client=self.client,
            codec=self.codec,
            limits=AgentConfig(**{"tool_prompt": "none", **limits}),
            max_model_len=engine_len,
            **(shared or {}),
        )
        self.agent = agent(self.context)

    async def run(
        self, row: Mapping[str, Any] = ROW, *, trajectory_id: str = "t", max_tokens: int = 1000
    ) -> Trajectory:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)
        trajectory = await self.agent.play(
            episode_request(row, sampling, trajectory_id=trajectory_id)
        )
        assert isinstance(trajectory, Trajectory), "the agent plays several roles"
        return trajectory

    def text(self, trajectory: Trajectory) -> str:
        """The response as text, special tokens included."""
        return self.codec.decode(trajectory.response_ids, skip_special_tokens=False)


def assert_token_exact(trajectory: Trajectory, requests: Any) -> None:
    """The context of every turn is the prompt, then sampled and inserted ids in order; nothing
    else.

    A turn that a stop in its thoughts did not end has several requests, each from where the one
    before left off.
    """
    context = trajectory.prompt_ids
    remaining = deque(requests)
    for turn in trajectory.turns:
        first = remaining.popleft()
        said = context + turn.output.token_ids
        assert first.prompt_ids == context
        while remaining and remaining[0].request_id == first.request_id:
            further = remaining.popleft().prompt_ids
            assert len(context) < len(further) < len(said)
            assert further == said[: len(further)]
        context = said + turn.appended_ids
    assert not remaining
    assert context == trajectory.prompt_ids + trajectory.response_ids


def assert_forks_are_exact(
    trajectories: Sequence[Trajectory], requests: Sequence[GenerateRequest]
) -> None:
    """A branch begins as its parent, and what it asked of the engine are exactly its turns after
    the fork.
    """
    known = {t.trajectory_id: t for t in trajectories}
    for t in trajectories:
        asked = [r for r in requests if r.request_id.startswith(f"{t.trajectory_id}/")]
        first = t.fork.turns if t.fork else 0
        context = t.prompt_ids
        for number, turn in enumerate(t.turns):
            if number >= first:
                shared_tokens = t.fork.tokens if t.fork and number == first else 0
                assert (
                    asked[number - first].prompt_ids
                    == context + turn.output.token_ids[:shared_tokens]
                )
            context += turn.output.token_ids + turn.appended_ids
        assert len(asked) == len(t.turns) - first
        if t.fork and t.fork.parent_id in known:
            parent = known[t.fork.parent_id]
            for mine, its in zip(t.turns[:first], parent.turns[:first], strict=True):
                assert mine == its
            shared_tokens = t.fork.tokens
            assert (
                t.turns[first].output.token_ids[:shared_tokens]
                == parent.turns[first].output.token_ids[:shared_tokens]
            )
            assert (
                t.turns[first].output.log_probs[:shared_tokens]
                == parent.turns[first].output.log_probs[:shared_tokens]
            )


ACT = "<py> 1 + 2 </py> and more"
ACTION = "<py> 1 + 2 </py>"
"""What an engine that stops at the action's end says of ``ACT``."""
STOP = {"action_stop_tokens": ("</py>",)}


def server_tool_stage(server: ToolServer, script: Any, **limits: Any) -> AgentHarness:
    """The server_tool agent on a tool server."""
    return AgentHarness(
        ServerToolAgent, script, **{"tool_server_url": server.url, **STOP, **limits}
    )
