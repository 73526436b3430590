"""A recorded session's tree of turns, and it as one trajectory: the last turn's path, other paths as its segments."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.agents.conversation import ChatReply, assistant_message
from jax_agent_rl.errors import TrajectoryError
from jax_agent_rl.types import (
    FinishReason,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
    join_media,
    join_routed,
)
from jax_agent_rl.utils.media import text_message

if TYPE_CHECKING:
    from jax_agent_rl.agents.recorder import ChatRecorder


Media = Mapping[str, tuple[Any, ...]]
"""Images by kind, in order of their placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnRequest:
    """A request resolved to ids.

    Attributes:
        parent: the turn it continues, or None for a rendered prompt.
        inserted_ids: ids after the parent's own: the whole prompt of a root.
        replaces_end: ``inserted_ids`` take the place of the parent's stop token, see ``ChatCodec.replaces_end``.
        inserted: plain messages added since the parent, without the data of their images.
        inserted_media: those images, by kind, in order of their placeholders in ``inserted_ids``.
        note: where the request left what was on record, as text; empty if it continued it.
        begun_text: the beginning of the turn, which the request gave; its ids are the last of ``inserted_ids``.
    """

    parent: RecordedTurn | None = None
    inserted_ids: tuple[int, ...]
    replaces_end: bool = False
    inserted: tuple[Mapping[str, Any], ...]
    inserted_media: Media = field(default_factory=dict)
    note: str = ""
    begun_text: str = ""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole context that it is sampled from."""
        before = self.parent.context_ids if self.parent else ()
        return (before[:-1] if self.replaces_end else before) + self.inserted_ids

    @property
    def prompt_length(self) -> int:
        """Ids of its root's prompt."""
        root = self.parent.path()[0] if self.parent else self
        return len(root.inserted_ids)

    @property
    def media(self) -> dict[str, tuple[Any, ...]]:
        """Images of the whole context."""
        before = self.parent.path() if self.parent else ()
        return join_media([*(turn.inserted_media for turn in before), self.inserted_media])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTurn(TurnRequest):
    """One sampled turn: a node of the session's tree.

    Attributes:
        number: order of completion in the session.
        output: the generation.
        context_ids: everything up to and including its own ids.
        reply: what the framework was given.
        text: its ids as text.
        results: results of its calls, by the number of the call, where the agent loop itself ran them.
        cut_by_client: whether the request's own ``max_tokens`` ended it, and no budget of the run.
    """

    number: int
    output: TokenOutput
    context_ids: tuple[int, ...]
    reply: ChatReply
    text: str
    results: dict[int, ToolCallRecord] = field(default_factory=dict)
    cut_by_client: bool = False

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        """The results that there are, in the order of the calls, whichever ended first."""
        return [self.results[number] for number in sorted(self.results)]

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a framework sends it back: from the beginning that the request gave on."""
        return assistant_message(self.begun_text + self.reply.content, self.reply.tool_calls)

    def path(self) -> list[RecordedTurn]:
        """Return the turns from its root to itself."""
        path, turn = [], self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


def to_trajectory(
    recorder: ChatRecorder,
    *,
    row: Mapping[str, Any],
    output: Any = None,
    group_id: str,
    agent_name: str,
    metrics: Mapping[str, float] | None = None,
    tool_scores: Mapping[str, float] | None = None,
) -> Trajectory:
    """Return what a session recorded as a trajectory without scores.

    Args:
        recorder: the session's recorder.
        row: the dataset row.
        output: the agent's result, for the reward function: ``extra_info.agent_output`` unless it is None.
        group_id: shared by the trajectories of one prompt.
        agent_name: name of the loop.
        metrics: numbers to add to the recorder's.
        tool_scores: the result of :meth:`ToolSession.calc_rewards`.

    Raises:
        TrajectoryError: nothing was sampled, or ``output`` is not JSON, so it cannot be saved with the trajectory.
    """
    if not recorder.turns:
        raise TrajectoryError(f"{recorder.session_id}: the agent ended without asking the model anything")
    main, *others = paths_to_train(recorder.turns)
    calls = [call for turn in recorder.turns for call in turn.tool_calls]
    counts = {
        "segments": float(len(others)),
        "malformed_calls": float(sum(len(turn.reply.malformed) for turn in recorder.turns)),
        "tool_calls": float(len(calls)),
        "tool_errors": float(sum(call.error is not None for call in calls)),
    }
    common = {"group_id": group_id, "agent_name": agent_name}
    trained = set(main)
    segments = []
    for number, path in enumerate(others):
        fresh = next(i for i, turn in enumerate(path) if turn not in trained)
        trained.update(path)
        segment = _sequence(path, fresh, trajectory_id=f"{recorder.session_id}#{number + 1}", **common)
        segments.append(replace(segment, finish_reason=_reason(path[-1], None)))
    return replace(
        _sequence(main, 0, trajectory_id=recorder.session_id, **common),
        finish_reason=_reason(main[-1], recorder.refused),
        row=row if output is None else _with_output(row, output),
        metrics={**recorder.metrics, **counts, **(metrics or {})},
        segments=tuple(segments),
        tool_scores=tool_scores or {},
    )


def paths_to_train(turns: Sequence[RecordedTurn]) -> list[list[RecordedTurn]]:
    """Return the paths from roots to leaves, that of the last turn first; every turn is on one of them."""
    parents = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn not in parents]
    last = max(leaves, key=lambda turn: turn.number)
    return [last.path(), *(leaf.path() for leaf in leaves if leaf is not last)]


def path_arrays(turn: RecordedTurn) -> dict[str, list[Any]]:
    """Return the context that ends with ``turn`` as a trajectory's arrays: ids, mask, log-probs, versions."""
    sequence = _sequence(turn.path(), 0, trajectory_id="", group_id="", agent_name="")
    names = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "policy_versions")
    return {name: list(getattr(sequence, name)) for name in names}


def _with_output(row: Mapping[str, Any], output: Any) -> Mapping[str, Any]:
    try:
        json.dumps(output)
    except (TypeError, ValueError) as error:
        raise TrajectoryError(f"the agent returned {type(output).__name__}, which is not JSON: {error}") from None
    return {**row, "extra_info": {**(row.get("extra_info") or {}), "agent_output": output}}


def _sequence(path: Sequence[RecordedTurn], fresh: int, **fields: Any) -> Trajectory:
    """Return a path from its turn ``fresh`` on; earlier turns are prompt, as another sequence trains on them."""
    following = [*path[fresh + 1 :], None]
    turns = [
        Turn(
            output=turn.output.first(len(turn.output.token_ids) - 1) if after and after.replaces_end else turn.output,
            appended_ids=after.inserted_ids if after else (),
            appended_media=after.inserted_media if after else {},
            tool_calls=tuple(turn.tool_calls),
            number=turn.number,
            note=turn.note,
        )
        for turn, after in zip(path[fresh:], following, strict=True)
    ]
    # Earlier outputs hold the experts of the prompt's positions.
    routed = functools.reduce(join_routed, (turn.output.routed_experts for turn in path[:fresh]), None)
    output = replace(turns[0].output, routed_experts=join_routed(routed, turns[0].output.routed_experts))
    turns[0] = replace(turns[0], output=output)
    messages: list[Mapping[str, Any]] = []
    for turn in path:
        messages += map(text_message, turn.inserted)
        messages.append({"role": "assistant", "content": turn.begun_text + turn.text})
    return Trajectory.from_turns(
        prompt_ids=path[fresh].prompt_ids,
        prompt_media=join_media(turn.inserted_media for turn in path[: fresh + 1]),
        turns=turns,
        messages=tuple(messages),
        finish_reason=FinishReason.ANSWER,
        **fields,
    )


def _reason(last: RecordedTurn, refused: FinishReason | None) -> FinishReason:
    if refused is not None:
        return refused
    if last.output.stop_reason is StopReason.LENGTH and not last.cut_by_client:
        return FinishReason.RESPONSE_LENGTH
    return FinishReason.ANSWER  # the agent asked for no more of it
