"""Keys of `server_tool_agent` in the ``agent`` section.

They are named as in verl-tool's ``AgentActorConfig``, so that command lines can be reused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config.base import (
    NonNegative,
    Positive,
    Section,
    SwitchedOff,
    UsedByAgents,
    WhenKey,
)
from jax_agent_rl.utils.files import read_regular_file

Side = Literal["left", "middle", "right"]

_SERVER_TOOL = UsedByAgents("server_tool_agent")
_WITH_TOOLS = _SERVER_TOOL | SwitchedOff("agent.enable_agent")
_MAX_TEXT_BYTES = 2**20


def _text_or_file(value: str) -> str:
    """Return the text of the file that a value names, or the value itself if it names none.

    Raises:
        ValueError: the file cannot be read as text.
    """
    try:
        path = Path(value).expanduser()
        if not value or not path.is_file():
            return value
    except (OSError, ValueError, RuntimeError):  # the value cannot be the name of a file
        return value

    try:
        return read_regular_file(path, _MAX_TEXT_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"names the file {value!r}, which cannot be read as text in UTF-8: {error}"
        ) from None


class ServerToolConfig(Section):
    """Keys of `server_tool_agent`.

    `n`, `max_model_len` and `val_max_response_length` apply to every agent.
    """

    enable_agent: Annotated[bool, _SERVER_TOOL | WhenKey("agent.tool_server_url")] = Field(
        default=True,
        description=(
            "With tool_server_url, rows without `agent_name` run as server_tool_agent. false: they"
            " run as plain generation, and server_tool_agent generates once and calls no tool."
        ),
    )
    tool_server_url: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Address of the tool server, e.g. http://localhost:5000; /get_observation is appended."
        ),
    )
    tool_server_token_env: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Environment variable with the token of the tool server (Authorization: Bearer)."
        ),
    )
    tool_call_timeout: Annotated[float, _WITH_TOOLS] = Field(
        default=30.0, gt=0, description="Timeout of a request to the tool server, in seconds."
    )
    tool_call_max_retries: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5,
        description=(
            "Retries of a request that did not reach the tool server, or that it was too busy to"
            " accept, after 1, 2, 4, … s: five outlast a restart of the server."
        ),
    )
    max_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5, description="Maximum number of tool calls in a server_tool_agent trajectory."
    )
    min_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=0,
        description=(
            "Number of turns that are sent to the tool server even without an action stop token."
        ),
    )
    action_stop_tokens: Annotated[tuple[str, ...], _WITH_TOOLS] = Field(
        default=(),
        description=(
            "Texts that end a turn and make it an action, except in a think block. A list, `a,b`,"
            " or a file that contains `a,b`."
        ),
        json_schema_extra={"type": ["array", "string"]},
    )
    max_action_length: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None,
        description="Maximum number of tokens per turn; null: limited by the other budgets only.",
    )
    max_obs_length: Annotated[Positive, _WITH_TOOLS] = Field(
        default=256, description="Maximum number of tokens per observation of the tool server."
    )
    truncate_obs_side: Annotated[Side, _WITH_TOOLS] = Field(
        default="middle", description="Side that is cut from an observation that is too long."
    )
    truncate_response_side: Annotated[Literal["left", "right"], _WITH_TOOLS] = Field(
        default="right",
        description=(
            "Where to cut a response that an observation would overflow. right: before the"
            " observation, and the trajectory ends. left: in the observation, which keeps its end,"
            " up to half of the tokens left."
        ),
    )
    mask_observations: Annotated[bool, _WITH_TOOLS] = Field(
        default=True, description="Exclude observations from the loss; false trains on them."
    )
    enable_mtrl: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description=(
            "Make observations separate chat turns; false: they continue the assistant's text."
        ),
    )
    mtrl_role: Annotated[str, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default="user", description="Role of those chat turns."
    )
    mtrl_sep: Annotated[str | None, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default=None,
        description=(
            "Text around an observation in the mtrl format, with `{obs}`; null: from the chat"
            " template."
        ),
    )
    turn_end_token: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Token that ends a turn, besides EOS; inserted where mtrl_sep follows a turn"
            " without it."
        ),
    )
    additional_eos_token_ids: Annotated[tuple[NonNegative, ...], _WITH_TOOLS] = Field(
        default=(), description="Token ids that end a turn, besides EOS."
    )
    call_tool_first: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="Ask the tool server for an observation before the first turn."
    )
    force_finish_for_last_turn: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description="The turn after the last tool call does not stop at action stop tokens.",
    )
    mask_overlong_loss: Annotated[bool, _SERVER_TOOL] = Field(
        default=False,
        description=(
            "Exclude trajectories cut by a limit from the loss; their rewards still count in their"
            " groups."
        ),
    )
    mask_void_traj: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description=(
            "Exclude trajectories without a valid action or an answer from the loss; their rewards"
            " still count."
        ),
    )
    rollout_mode: Annotated[Literal["async", "sync"], _WITH_TOOLS] = Field(
        default="async",
        description=(
            "async: call a tool as soon as a turn asks for it. sync: call tools when all"
            " trajectories in flight have finished their turn."
        ),
    )
    max_concurrent_trajectories: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None,
        description=(
            "Maximum number of concurrent server_tool_agent trajectories, besides"
            " rollout.max_in_flight."
        ),
    )
    max_model_len: Positive | None = Field(
        default=None,
        description="Maximum context length of an agent in tokens; null: the engine's.",
    )
    n: Positive | None = Field(
        default=None, description="Trajectories per row: an alias of rollout.group_size."
    )
    val_max_turns: Annotated[NonNegative | None, _SERVER_TOOL] = Field(
        default=None, description="max_turns in evaluations; null: the same as in training."
    )
    val_max_response_length: Positive | None = Field(
        default=None,
        description="max_response_length in evaluations; null: the same as in training.",
    )

    @field_validator("action_stop_tokens", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Split a text, or the file it names, at commas."""
        if not isinstance(value, str):
            return value
        tokens = [part.strip() for part in _text_or_file(value).split(",")]
        return tuple(filter(None, tokens))

    @field_validator("mtrl_sep")
    @classmethod
    def _one_placeholder(cls, value: str | None) -> str | None:
        if value is not None and value.count("{obs}") != 1:
            raise ValueError("must hold {obs} exactly once")
        return value

    @model_validator(mode="after")
    def _turn_limits_ascend(self) -> Self:
        if self.min_turns > self.max_turns:
            raise ValueError(
                f"min_turns={self.min_turns} is more than max_turns={self.max_turns}; raise the"
                " latter"
            )
        return self

    def for_validation(self) -> Self:
        """Return these settings with the overrides for evaluations applied."""
        update = {}
        if self.val_max_response_length is not None:
            update["max_response_length"] = self.val_max_response_length
        if self.val_max_turns is not None:
            update["max_turns"] = self.val_max_turns
            update["min_turns"] = min(self.min_turns, self.val_max_turns)
        return self.model_copy(update=update)
