"""A recorded session as a tree of turns, and as one trajectory.

The trajectory is the path of the last turn; other paths become its segments.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.agents.conversation import ChatReply, assistant_message
from jax_agent_rl.agents.request import EpisodeRequest
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

Media = Mapping[str, tuple[Any, ...]]
"""Images by kind, in order of their placeholders."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnRequest:
    """A request resolved to ids.

    Attributes:
        parent: the turn it continues, or None for a rendered prompt.
        inserted_ids: ids after the parent's own: the whole prompt of a root.
        replaces_end: ``inserted_ids`` take the place of the parent's stop token, see
            ``ChatCodec.replaces_end``.
        inserted: plain messages added since the parent, without the data of their images.
        inserted_media: those images, by kind, in order of their placeholders in ``inserted_ids``.
        note: where the request left what was on record, as text; empty if it continued it.
        prefill: the beginning of the turn, which the request gave; its ids are the last of
            ``inserted_ids``.
    """

    parent: RecordedTurn | None = None
    inserted_ids: tuple[int, ...]
    replaces_end: bool = False
    inserted: tuple[Mapping[str, Any], ...]
    inserted_media: Media = field(default_factory=dict)
    note: str = ""
    prefill: str = ""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole context that it is sampled from."""
        if self.parent is None:
            return self.inserted_ids
        context_ids = self.parent.context_ids
        if self.replaces_end:
            context_ids = context_ids[:-1]
        return context_ids + self.inserted_ids

    @property
    def prompt_length(self) -> int:
        """Ids of its root's prompt."""
        root = self.parent.path()[0] if self.parent else self
        return len(root.inserted_ids)

    @property
    def media(self) -> dict[str, tuple[Any, ...]]:
        """Images of the whole context."""
        path = self.parent.path() if self.parent else []
        return join_media([*(turn.inserted_media for turn in path), self.inserted_media])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedTurn(TurnRequest):
    """One sampled turn: a node of the session's tree.

    Attributes:
        number: order of completion in the session.
        context_ids: everything up to and including the sampled ids.
        reply: what the framework was given.
        text: the sampled ids as text.
        results: results of its calls, by the number of the call, where the agent loop itself ran
            them.
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
        """The results so far, in the order of the calls, whichever ended first."""
        return [self.results[number] for number in sorted(self.results)]

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a framework sends it back, with the beginning that the request gave."""
        return assistant_message(self.prefill + self.reply.content, self.reply.tool_calls)

    def path(self) -> list[RecordedTurn]:
        """Return the turns from its root to itself."""
        path = []
        turn = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        path.reverse()
        return path


def to_trajectory(
    turns: Sequence[RecordedTurn],
    request: EpisodeRequest,
    *,
    agent_name: str,
    refused: FinishReason | None = None,
    metrics: Mapping[str, float] | None = None,
    output: Any = None,
    tool_scores: Mapping[str, float] | None = None,
) -> Trajectory:
    """Return the turns of a session as a trajectory without scores.

    Args:
        request: the request that the session plays.
        refused: the limit that refused the turn after the last one; None if there was none.
        metrics: numbers for ``Trajectory.metrics``, besides the counts of turns.
        output: the agent's result, for the reward function: ``extra_info.agent_output`` unless it
            is None.
        tool_scores: the result of :meth:`ToolSession.calc_rewards`.

    Raises:
        TrajectoryError: nothing was sampled, or ``output`` is not JSON, so it cannot be saved with
            the trajectory.
    """
    if not turns:
        raise TrajectoryError(
            f"{request.trajectory_id}: the agent ended without asking the model anything"
        )
    main_path, *other_paths = paths_to_train(turns)

    counts = Counter(segments=len(other_paths), malformed_calls=0, tool_calls=0, tool_errors=0)
    for turn in turns:
        counts["malformed_calls"] += len(turn.reply.malformed)
        counts["tool_calls"] += len(turn.tool_calls)
        counts["tool_errors"] += sum(call.error is not None for call in turn.tool_calls)

    # Paths share turns. Each turn is trained on once: in the first sequence that it is in.
    labels = {"group_id": request.group_id, "agent_name": agent_name}
    trained = set(main_path)
    segments = []
    for number, path in enumerate(other_paths, start=1):
        first_new = 0
        while path[first_new] in trained:
            first_new += 1
        trained.update(path)
        segment_id = f"{request.trajectory_id}#{number}"
        segment = _sequence(path, first_new, trajectory_id=segment_id, **labels)
        segments.append(replace(segment, finish_reason=_finish_reason(path[-1], None)))

    row = request.row
    if output is not None:
        row = _with_output(row, output)
    return replace(
        _sequence(main_path, 0, trajectory_id=request.trajectory_id, **labels),
        finish_reason=_finish_reason(main_path[-1], refused),
        row=row,
        metrics={
            **{name: float(count) for name, count in counts.items()},
            **(metrics or {}),
        },
        segments=tuple(segments),
        tool_scores=tool_scores or {},
    )


def paths_to_train(turns: Sequence[RecordedTurn]) -> list[list[RecordedTurn]]:
    """Return the paths from roots to leaves, the last turn's first; every turn is on one."""
    parents = {turn.parent for turn in turns}
    leaves = [turn for turn in turns if turn not in parents]
    last_turn = max(leaves, key=lambda turn: turn.number)
    paths = [last_turn.path()]
    for leaf in leaves:
        if leaf is not last_turn:
            paths.append(leaf.path())
    return paths


def path_arrays(turn: RecordedTurn) -> dict[str, list[Any]]:
    """Return the context that ends with ``turn`` as a trajectory's arrays.

    They are ids, mask, log-probs and versions.
    """
    sequence = _sequence(turn.path(), 0, trajectory_id="", group_id="", agent_name="")
    names = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "policy_versions")
    return {name: list(getattr(sequence, name)) for name in names}


def _with_output(row: Mapping[str, Any], output: Any) -> Mapping[str, Any]:
    try:
        json.dumps(output)
    except (TypeError, ValueError) as error:
        raise TrajectoryError(
            f"the agent returned {type(output).__name__}, which is not JSON: {error}"
        ) from None
    extra_info = row.get("extra_info") or {}
    return {**row, "extra_info": {**extra_info, "agent_output": output}}


def _sequence(path: Sequence[RecordedTurn], first: int, **fields: Any) -> Trajectory:
    """Return a path from its turn ``first`` on.

    Earlier turns are prompt, as another sequence trains on them.
    """
    turns = []
    for index in range(first, len(path)):
        turn = path[index]
        output = turn.output
        appended_ids: tuple[int, ...] = ()
        appended_media: Media = {}
        if index + 1 < len(path):
            next_turn = path[index + 1]
            appended_ids = next_turn.inserted_ids
            appended_media = next_turn.inserted_media
            if next_turn.replaces_end:
                output = output.first(len(output.token_ids) - 1)
        turns.append(
            Turn(
                output=output,
                appended_ids=appended_ids,
                appended_media=appended_media,
                tool_calls=tuple(turn.tool_calls),
                number=turn.number,
                note=turn.note,
            )
        )

    # Earlier outputs hold the experts of the prompt's positions.
    routed_experts = None
    for turn in path[:first]:
        routed_experts = join_routed(routed_experts, turn.output.routed_experts)
    output = turns[0].output
    output = replace(output, routed_experts=join_routed(routed_experts, output.routed_experts))
    turns[0] = replace(turns[0], output=output)

    messages: list[Mapping[str, Any]] = []
    for turn in path:
        messages += [text_message(message) for message in turn.inserted]
        messages.append({"role": "assistant", "content": turn.prefill + turn.text})

    return Trajectory.from_turns(
        prompt_ids=path[first].prompt_ids,
        prompt_media=join_media(turn.inserted_media for turn in path[: first + 1]),
        turns=turns,
        messages=tuple(messages),
        finish_reason=FinishReason.ANSWER,
        **fields,
    )


def _finish_reason(last_turn: RecordedTurn, refused: FinishReason | None) -> FinishReason:
    """Return why a path ends; ``refused`` is the limit that refused its next turn, if one did."""
    if refused is not None:
        return refused
    if last_turn.output.stop_reason is StopReason.LENGTH and not last_turn.cut_by_client:
        return FinishReason.RESPONSE_LENGTH
    return FinishReason.ANSWER  # the agent asked for no further turn
