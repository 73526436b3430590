"""The table: one row for every sequence to train on, exact to the token.

Most trajectories are one sequence. Those that sampled in several contexts (an edited history, a history window) are
several, numbered by ``sequence``; reward and all that follows from the whole trajectory is then repeated. What differs
from row to row in its shape is JSON text: ``ground_truth``, ``extra_info``, ``reward_parts``, ``arguments``, ``media``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_agent_rl.types import Group, Trajectory

if TYPE_CHECKING:
    import pyarrow

CALL_FIELDS = ("name", "arguments", "observation", "error", "reward", "seconds")


def schema() -> pyarrow.Schema:
    """Names and types of the columns."""
    import pyarrow as pa

    ids, bits = pa.list_(pa.int32()), pa.list_(pa.int8())
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    call = pa.struct([(name, pa.float64() if name in ("reward", "seconds") else pa.string()) for name in CALL_FIELDS])
    return pa.schema(
        [
            ("row", pa.int64()),  # number of the prompt in its file, from 0
            ("data_source", pa.string()),
            ("agent_name", pa.string()),
            ("group_id", pa.string()),
            ("trajectory_id", pa.string()),
            ("sequence", pa.int32()),
            ("prompt_ids", ids),
            ("response_ids", ids),
            ("response_mask", bits),  # 1: sampled by the policy
            ("loss_mask", bits),  # 1: carries loss; differs with agent.mask_observations=false
            ("rollout_logprobs", pa.list_(pa.float32())),  # 0 where not sampled
            ("policy_versions", ids),  # -1 where not sampled
            ("num_turns", pa.int32()),
            ("stop_reasons", pa.list_(pa.string())),  # of each turn's generation
            ("finish_reason", pa.string()),
            ("no_loss", pa.string()),  # why none of it carries loss, or null
            ("reward", pa.float64()),
            ("reward_parts", pa.string()),
            ("ground_truth", pa.string()),
            ("extra_info", pa.string()),
            ("messages", pa.list_(message)),
            ("tool_calls", pa.list_(call)),
            ("media", pa.string()),  # number of images and videos in the prompt, by kind; they are not kept
            ("fork_parent", pa.string()),  # of branches in trees: whom they left, and what they took over
            ("fork_turns", pa.int32()),
            ("fork_tokens", pa.int32()),
        ]
    )


def records(group: Group, number: int) -> list[dict[str, Any]]:
    """The rows of the table that a group is.

    Args:
        number: of the prompt in its file.
    """
    return [
        {"row": number, "sequence": position, **_of_trajectory(trajectory), **_of_sequence(sequence)}
        for trajectory in group.trajectories
        for position, sequence in enumerate(trajectory.sequences)
    ]


def _of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    row, fork = trajectory.row, trajectory.fork
    return {
        "data_source": str(row.get("data_source")),
        "agent_name": trajectory.agent_name,
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "no_loss": trajectory.no_loss and str(trajectory.no_loss),
        "reward": trajectory.reward,
        "reward_parts": _json(trajectory.reward_parts),
        "ground_truth": _json((row.get("reward_model") or {}).get("ground_truth")),
        "extra_info": _json(row.get("extra_info") or {}),
        "messages": [_message(message) for message in trajectory.messages],
        "tool_calls": [_call(call) for call in trajectory.tool_calls],
        "fork_parent": fork and fork.parent_id,
        "fork_turns": fork and fork.turns,
        "fork_tokens": fork and fork.tokens,
    }


def _of_sequence(sequence: Trajectory) -> dict[str, Any]:
    return {
        "prompt_ids": list(sequence.prompt_ids),
        "response_ids": list(sequence.response_ids),
        "response_mask": list(sequence.response_mask),
        "loss_mask": list(sequence.loss_mask),
        "rollout_logprobs": list(sequence.rollout_logprobs),
        "policy_versions": list(sequence.policy_versions),
        "num_turns": sequence.num_turns,
        "stop_reasons": [str(turn.output.stop_reason) for turn in sequence.turns],
        "finish_reason": str(sequence.finish_reason),
        "media": _json({kind: len(items) for kind, items in sequence.prompt_media.items()}),
    }


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(message.get("content") or "")}


def _call(call: Any) -> dict[str, Any]:
    return {name: _json(call.arguments) if name == "arguments" else getattr(call, name) for name in CALL_FIELDS}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
