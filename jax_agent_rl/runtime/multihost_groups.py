"""Groups of trajectories as JSON from process 0 to the other processes of a learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from jax_agent_rl.rollout.http.requests import decode_media, encode_media
from jax_agent_rl.routed_experts import from_json, to_json
from jax_agent_rl.types import Group, Trajectory, Turn

_GROUPS = TypeAdapter(list[Group])


def encode_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return what the learner reads of groups, for JSON; floats are exact."""
    lean = [replace(group, trajectories=tuple(map(_lean, group.trajectories))) for group in groups]
    # Encoded media are not of the types that are declared, which pydantic would warn of.
    return [_map_routed(group, to_json) for group in _GROUPS.dump_python(lean, warnings=False)]


def decode_groups(encoded: list[dict[str, Any]]) -> list[Group]:
    """Invert :func:`encode_groups`."""
    groups = _GROUPS.validate_python([_map_routed(group, from_json) for group in encoded])
    return [replace(group, trajectories=tuple(map(_with_images, group.trajectories))) for group in groups]


def _map_routed(group: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a group with the ``routed_experts`` of all its outputs converted."""

    def turn_of(turn: Mapping[str, Any]) -> dict[str, Any]:
        output = turn["output"]
        return {**turn, "output": {**output, "routed_experts": convert(output["routed_experts"])}}

    def trajectory_of(trajectory: Mapping[str, Any]) -> dict[str, Any]:
        segments = [trajectory_of(segment) for segment in trajectory["segments"]]
        return {**trajectory, "turns": [turn_of(turn) for turn in trajectory["turns"]], "segments": segments}

    return {**group, "trajectories": [trajectory_of(trajectory) for trajectory in group["trajectories"]]}


def _lean(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without texts and records, which only users and rewards read; its data source stays."""

    def lean(turn: Turn) -> Turn:
        calls = tuple(replace(c, arguments=None, observation="", media={}) for c in turn.tool_calls)
        return replace(turn, tool_calls=calls, note="", appended_media=encode_media(turn.appended_media))

    turns = tuple(map(lean, trajectory.turns))
    segments = tuple(map(_lean, trajectory.segments))
    media = encode_media(trajectory.prompt_media)
    row = {key: value for key, value in trajectory.row.items() if key == "data_source"}
    return replace(trajectory, turns=turns, segments=segments, row=row, messages=(), metrics={}, prompt_media=media)


def _with_images(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with its PNG decoded."""
    turns = tuple(replace(turn, appended_media=decode_media(turn.appended_media)) for turn in trajectory.turns)
    segments = tuple(map(_with_images, trajectory.segments))
    return replace(trajectory, turns=turns, segments=segments, prompt_media=decode_media(trajectory.prompt_media))
