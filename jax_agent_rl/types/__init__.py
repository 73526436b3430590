"""Data types of rollouts: frozen, keyword-only, validated at construction.

A worked example, two turns (ids invented, one id per word)::

    prompt_ids        = [10, 11, 12]              the rendered conversation, ends with "assistant:"
    turn 1 sampled    = [20, 21, 2]               a tool call; 2 is the end-of-turn token, kept
    turn 1 appended   = [30, 31, 32]              boundary + tool result + next "assistant:"
    turn 2 sampled    = [40, 2]                   the answer

    context of turn 2 = [10, 11, 12] + [20, 21, 2] + [30, 31, 32]      joined, never re-rendered

    response_ids      = [20, 21, 2, 30, 31, 32, 40, 2]
    response_mask     = [ 1,  1, 1,  0,  0,  0,  1, 1]     1 = sampled by the policy
    rollout_logprobs  = [-.1,-.2,-.1, 0,  0,  0,-.3,-.1]   of the distribution sampled from
    policy_versions   = [ 4,  4, 4, -1, -1, -1,  5, 5]     the weights that produced each token

Where the mask is 0, the log-prob is 0 and the version is -1.

Import the types from here. ``trajectory`` and ``group`` are made of ``token_output``;
``sampling_params`` asks for one. ``routed_experts`` and ``supports`` are what an engine reports of
its draws, so that the learner can replay them. ``sequences`` compares sequences of ids.
"""

from jax_agent_rl.errors import DropReason, FinishReason
from jax_agent_rl.types.group import Group
from jax_agent_rl.types.pause_mode import PauseMode
from jax_agent_rl.types.routed_experts import RoutedExperts, join_routed
from jax_agent_rl.types.sampling_params import SamplingParams
from jax_agent_rl.types.supports import Support
from jax_agent_rl.types.token_ids import digest_ids
from jax_agent_rl.types.token_output import StopReason, TokenOutput, TokenScores
from jax_agent_rl.types.trajectory import Fork, ToolCallRecord, Trajectory, Turn, join_media

__all__ = [
    "DropReason",
    "FinishReason",
    "Fork",
    "Group",
    "PauseMode",
    "RoutedExperts",
    "SamplingParams",
    "StopReason",
    "Support",
    "TokenOutput",
    "TokenScores",
    "ToolCallRecord",
    "Trajectory",
    "Turn",
    "digest_ids",
    "join_media",
    "join_routed",
]
