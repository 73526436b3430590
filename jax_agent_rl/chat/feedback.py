"""The prompt under which a policy teaches itself: the one it had, and what came of its attempt.

::

    prompt          … question <|im_end|> ↵ <|im_start|> assistant ↵
    teacher prompt  … question <|im_end|> ↵ <|im_start|> user ↵ feedback <|im_end|> ↵ <|im_start|> …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from jax_agent_rl.tools.base import Side
from jax_agent_rl.types import Trajectory


class InsertsMessages(Protocol):
    """What is needed of a chat codec."""

    def truncate(self, text: str, limit: int, side: Side) -> str: ...

    def insert_message(self, prompt_ids: Sequence[int], text: str) -> list[int] | None: ...


def feedback_of(trajectory: Trajectory) -> str:
    """Return what tools and reward function said about an attempt, as text; "" for nothing.

    Of the tools, these are the errors.
    """
    lines = []
    for call in trajectory.tool_calls:
        if call.error is not None:
            lines.append(f"{call.name}: {call.observation or call.error}")
    if trajectory.feedback:
        lines.append(trajectory.feedback)
    return "\n".join(dict.fromkeys(lines))  # without repetitions


def with_teacher_prompt(
    trajectory: Trajectory,
    codec: InsertsMessages,
    *,
    template: str,
    max_feedback_length: int,
    max_length: int,
) -> Trajectory:
    """Return a trajectory with the prompt under which the policy teaches it.

    There is none if nothing was said about it, if it has several contexts or images in its prompt,
    if the chat template takes no further message at the end of a prompt, or if it would be longer
    than ``max_length`` then.

    Args:
        codec: of the policy.
        template: the message, with ``{feedback}``.
        max_feedback_length: ids of the feedback.
        max_length: ids of prompt and response.
    """
    prompt_ids = None
    feedback = feedback_of(trajectory)
    has_one_context = not trajectory.segments and trajectory.history_window is None
    if feedback and has_one_context and not trajectory.prompt_media:
        shortened = codec.truncate(feedback, max_feedback_length, "middle")
        text = template.replace("{feedback}", shortened)
        prompt_ids = codec.insert_message(trajectory.prompt_ids, text)
    if prompt_ids is not None and len(prompt_ids) + len(trajectory.response_ids) > max_length:
        prompt_ids = None
    return replace(trajectory, teacher_prompt_ids=tuple(prompt_ids or ()))
