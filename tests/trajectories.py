"""Builders of trajectories, groups and traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_agent_rl.tracing import Span, Trace
from jax_agent_rl.types import (
    FinishReason,
    Group,
    RoutedExperts,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.types.supports import encode_supports


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """The trajectories of all groups, in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def trajectory(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    index: int = 0,
    group: str = "g",
    calls: Sequence[Sequence[ToolCallRecord]] = (),
    finish: FinishReason = FinishReason.ANSWER,
    messages: Sequence[dict] = (),
) -> Trajectory:
    """A trajectory of one turn per run of sampled ids (mask 1) and what follows it (mask 0).

    ``calls`` are the tool calls of the first turns.
    """
    mask = mask or [1] * len(response)
    logprobs = logprobs or [-1.0] * len(response)
    turns = []
    at = 0
    while at < len(response):
        sampled_end = next((i for i in range(at, len(mask)) if not mask[i]), len(mask))
        end = next((i for i in range(sampled_end, len(mask)) if mask[i]), len(mask))
        count = sampled_end - at
        output = TokenOutput(
            token_ids=tuple(response[at:sampled_end]),
            log_probs=tuple(logprobs[at:sampled_end]),
            policy_versions=(0,) * count,
            stop_reason=StopReason.EOS,
            context_digest="",
        )
        turn_calls = tuple(calls[len(turns)]) if len(turns) < len(calls) else ()
        turns.append(
            Turn(
                output=output, appended_ids=tuple(response[sampled_end:end]), tool_calls=turn_calls
            )
        )
        at = end
    return Trajectory.from_turns(
        prompt_ids=prompt,
        turns=turns,
        trajectory_id=f"{group}-{index}",
        group_id=group,
        agent_name="tool_agent",
        finish_reason=finish,
        reward=reward,
        messages=tuple(messages),
    )


def numbered(original: Trajectory, *numbers: int, note: str = "") -> Trajectory:
    """The same, its turns sampled by those calls of a session; ``note`` is the first one's."""
    turns = [replace(turn, number=n) for turn, n in zip(original.turns, numbers, strict=True)]
    return replace(original, turns=(replace(turns[0], note=note), *turns[1:]))


def session(*, reward: float = 1.0, group: str = "g", index: int = 0) -> Trajectory:
    """A session of three segments and five calls: call 2 goes on after call 1, as 5 does; 3 and 4
    are a sub-agent's.
    """
    note = "message 1 of 1 (user) has 'help' where the recorded one (user) has 'question'"
    again = numbered(trajectory([1, 3, 4, 2, 6], [8, 2], group=group, index=index), 1)
    sub_agent = numbered(
        trajectory([1, 9], [20, 7, 21], mask=[1, 0, 1], group=group, index=index), 2, 3, note=note
    )
    main = numbered(
        trajectory(
            [1, 3], [4, 2, 7, 5], mask=[1, 1, 0, 1], group=group, index=index, reward=reward
        ),
        0,
        4,
    )
    return replace(main, segments=(again, sub_agent))


def call(*, error: str | None = None, reward: float = 0.0) -> ToolCallRecord:
    """A tool call."""
    return ToolCallRecord(name="tool", arguments={}, observation="", error=error, reward=reward)


def group_of(trajectories: Iterable[Trajectory], **fields: Any) -> Group:
    """A group of trajectories that name it already."""
    members = tuple(trajectories)
    return Group(group_id=members[0].group_id, trajectories=members, **fields)


def random_groups(
    seed: int, *, groups: int = 3, members: int = 4, vocabulary: int = 97
) -> list[Group]:
    """Groups with a shared prompt, masked spans, and rewards of both kinds."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, vocabulary, 4).tolist()
    result = []
    for g in range(groups):
        prompt = common + rng.integers(3, vocabulary, 3 + g).tolist()
        ts = []
        for m in range(members):
            length = int(rng.integers(4, 14))
            mask = [1] * length
            mask[2:4] = [0, 0]
            response = rng.integers(3, 8 if m % 2 else vocabulary, length).tolist()
            logprobs = (-rng.random(length) * 3).tolist()
            ts.append(
                trajectory(
                    prompt,
                    response,
                    mask=mask,
                    logprobs=logprobs,
                    reward=float(m % 2),
                    index=m,
                    group=f"g{g}",
                )
            )
        result.append(Group(group_id=f"g{g}", trajectories=tuple(ts)))
    return result


def with_routed_experts(
    groups: Iterable[Group], *, layers: int, experts: int, per_token: int
) -> list[Group]:
    """The groups with random experts for all positions that every second trajectory fed; the others
    know none.
    """
    rng = np.random.default_rng(5)

    def routed(original: Trajectory) -> Trajectory:
        at = len(original.prompt_ids)
        turns = []
        for turn in original.turns:
            start = at - 1 if turns else 0
            at += len(turn.output.token_ids)
            chosen = rng.random((at - 1 - start, layers, experts)).argsort(axis=-1)[..., :per_token]
            output = replace(
                turn.output, routed_experts=RoutedExperts.of(start, chosen.astype(np.uint8))
            )
            turns.append(replace(turn, output=output))
            at += len(turn.appended_ids)
        return replace(original, turns=tuple(turns))

    routed_groups = []
    for group in groups:
        members = list(group.trajectories)
        members[::2] = map(routed, members[::2])
        routed_groups.append(replace(group, trajectories=tuple(members)))
    return routed_groups


def with_supports(
    groups: Iterable[Group], *, vocabulary: int = 97, share: float = 0.2
) -> list[Group]:
    """The groups with random supports, which hold the sampled ids; every third trajectory was
    sampled freely.
    """
    rng = np.random.default_rng(6)

    def drawn(output: TokenOutput) -> TokenOutput:
        support = rng.random((len(output.token_ids), vocabulary + -vocabulary % 32)) < share
        support[:, vocabulary:] = False
        support[np.arange(len(support)), list(output.token_ids)] = True
        masks = np.packbits(support, axis=1, bitorder="little").view(np.uint32)
        return replace(output, supports=tuple(encode_supports(masks)))

    def restricted(original: Trajectory) -> Trajectory:
        return replace(
            original,
            turns=tuple(replace(turn, output=drawn(turn.output)) for turn in original.turns),
        )

    restricted_groups = []
    for group in groups:
        members = list(group.trajectories)
        for i, member in enumerate(members):
            if i % 3:
                members[i] = restricted(member)
        restricted_groups.append(replace(group, trajectories=tuple(members)))
    return restricted_groups


SECOND = 1_000_000_000
EPOCH = 1_700_000_000 * SECOND


def a_span(
    name: str,
    about: str,
    parent: int,
    begin: float,
    end: float,
    *,
    error: str | None = None,
    **facts: Any,
):
    """A span from ``begin`` to ``end`` seconds after the epoch of these tests."""
    times = {"start_ns": EPOCH + round(begin * SECOND), "end_ns": EPOCH + round(end * SECOND)}
    return Span(name=name, about=about, parent=parent, attributes=facts, error=error, **times)


def a_trace(trajectory_id: str = "train-3-1-2", *, step: int = 3, validate: bool = False) -> Trace:
    """Waits, calls a tool that fails, answers, is rewarded; four seconds."""
    messages = [{"role": "user", "content": "1 + 2 ?"}, {"role": "assistant", "content": "3"}]
    return Trace(
        trajectory_id=trajectory_id,
        group_id="train-3-1",
        step=step,
        sample=1,
        rollout=2,
        validate=validate,
        spans=(
            a_span(
                "run",
                trajectory_id,
                -1,
                0,
                4,
                messages=messages,
                reward=1.0,
                finish_reason="answer",
            ),
            a_span("wait", "slot", 0, 0, 1),
            a_span("generate", "", 0, 1, 2, text="<call>", context_tokens=7, stop_reason="eos"),
            a_span(
                "tool",
                "add",
                0,
                2,
                3,
                arguments={"a": 1},
                observation="Error",
                tool_error="timeout",
            ),
            a_span("reward", "sums", 0, 3, 4, error="ValueError: no", reward=1.0),
        ),
    )
