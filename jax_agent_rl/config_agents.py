"""Settings of the agents that reach tools over HTTP, and of simulated users. Part of :mod:`jax_agent_rl.config`.

The names are those of verl-tool's ``AgentActorConfig`` (``server_tool_agent``) and of the ToolClient
(``text_tool_agent``), so that command lines carry over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config_base import NonNegative, Positive, Section

Side = Literal["left", "middle", "right"]


class ServerToolConfig(Section):
    """`agent` keys of `server_tool_agent`; `n`, `max_model_len` and the `val_` keys hold for every agent."""

    enable_agent: bool = Field(default=True, description="server_tool_agent: off, it generates once and calls no tool.")
    tool_server_url: str | None = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000; /get_observation is added."
    )
    tool_server_token_env: str | None = Field(
        default=None,
        description="Environment variable with the secret the tool server asks for (Authorization: Bearer).",
    )
    tool_call_timeout: float = Field(
        default=30.0, gt=0, description="Seconds the tool server may take for one request."
    )
    tool_call_max_retries: NonNegative = Field(
        default=3,
        description="Repetitions of a request that did not reach the tool server, or that it was too busy to take.",
    )
    max_turns: NonNegative = Field(default=5, description="Most tool calls of a server_tool_agent trajectory.")
    min_turns: NonNegative = Field(
        default=0, description="Turns that are sent to the tool server even if they hold no action stop token."
    )
    action_stop_tokens: tuple[str, ...] = Field(
        default=(),
        description="Texts that end a turn and make it an action. A list, `a,b`, or a file that holds `a,b`.",
        json_schema_extra={"type": ["array", "string"]},
    )
    max_action_length: Positive | None = Field(
        default=None, description="Most tokens of one turn; null: the budgets alone."
    )
    max_obs_length: Positive = Field(default=256, description="Most tokens of one observation of the tool server.")
    truncate_obs_side: Side = Field(
        default="middle", description="The side that is cut when an observation is too long."
    )
    truncate_response_side: Literal["left", "right"] = Field(
        default="right",
        description="Where a response is cut that an observation would overflow. right: before the observation, and "
        "the trajectory ends. left: in the observation, whose end is given half of the tokens left.",
    )
    mask_observations: bool = Field(default=True, description="Observations carry no loss; false trains on them, too.")
    enable_mtrl: bool = Field(
        default=False,
        description="Observations are chat turns of their own; false: they continue the assistant's text.",
    )
    mtrl_role: str = Field(default="user", description="Role of those chat turns.")
    mtrl_sep: str | None = Field(
        default=None,
        description="Text around an observation in the mtrl format, with `{obs}`; null: the chat template's.",
    )
    turn_end_token: str | None = Field(
        default=None, description="Ends a turn, besides EOS; inserted where mtrl_sep follows a turn without it."
    )
    additional_eos_token_ids: tuple[NonNegative, ...] = Field(
        default=(), description="Token ids that end a turn, besides EOS."
    )
    call_tool_first: bool = Field(
        default=False, description="Ask the tool server for an observation before the first turn."
    )
    force_finish_for_last_turn: bool = Field(
        default=False, description="The turn after the last tool call does not stop at action stop tokens."
    )
    mask_overlong_loss: bool = Field(
        default=False, description="A trajectory cut by a limit carries no loss; its reward counts in its group."
    )
    mask_void_traj: bool = Field(
        default=False, description="A trajectory with no valid action and no answer carries no loss; its reward counts."
    )
    rollout_mode: Literal["async", "sync"] = Field(
        default="async", description="sync: tools are called when all trajectories in flight have finished their turn."
    )
    max_concurrent_trajectories: Positive | None = Field(
        default=None, description="Most server_tool_agent trajectories at the same time, besides rollout.max_in_flight."
    )
    max_model_len: Positive | None = Field(
        default=None, description="Most ids of an agent's context; null: the engine's."
    )
    n: Positive | None = Field(default=None, description="Trajectories per row: another name of rollout.group_size.")
    val_max_turns: NonNegative | None = Field(default=None, description="max_turns in evaluations; null: the same.")
    val_max_response_length: Positive | None = Field(
        default=None, description="max_response_length in evaluations; null: the same."
    )

    @field_validator("action_stop_tokens", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Commas separate the tokens of a text, and of a file that the text names."""
        if not isinstance(value, str):
            return value
        path = Path(value).expanduser()
        text = path.read_text(encoding="utf-8") if value and path.is_file() else value
        return tuple(token for part in text.split(",") if (token := part.strip()))

    @field_validator("mtrl_sep")
    @classmethod
    def _one_place(cls, value: str | None) -> str | None:
        if value is not None and value.count("{obs}") != 1:
            raise ValueError("must hold {obs} exactly once")
        return value

    @model_validator(mode="after")
    def _turns(self) -> Self:
        """Settings that contradict each other, or that would do nothing."""
        if self.min_turns > self.max_turns:
            raise ValueError(f"min_turns={self.min_turns} is more than max_turns={self.max_turns}; raise the latter")
        if self.mtrl_sep is not None and not self.enable_mtrl:
            raise ValueError("mtrl_sep is used with enable_mtrl=true only; set that, or leave mtrl_sep out")
        return self

    def for_validation(self) -> Self:
        """These settings as evaluations use them."""
        named = {"max_turns": self.val_max_turns, "max_response_length": self.val_max_response_length}
        changed = {key: value for key, value in named.items() if value is not None}
        if "max_turns" in changed:
            changed["min_turns"] = min(self.min_turns, changed["max_turns"])
        return self.model_copy(update=changed)


class ToolClientConfig(Section):
    """`tool_config`: the ToolClient of `text_tool_agent`, in which text between <tool> and </tool> is code.

    The environment variables ENABLE_TOOLS, TOOL_SERVER_URL and MAX_TOOL_TURNS give ``enabled``, ``server_url`` and
    ``max_tool_turns`` where the configuration does not.
    """

    enabled: bool = Field(default=False, description="Rows without agent_name run as text_tool_agent.")
    server_url: str | None = Field(default=None, description="Address of the tool server, e.g. http://localhost:5000.")
    token_env: str | None = Field(default=None, description="Environment variable with the secret the server asks for.")
    max_tool_turns: NonNegative = Field(default=3, description="Most tool calls of one trajectory.")
    max_retries: NonNegative = Field(default=3, description="Repetitions of a request that failed.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each repetition.")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one request may take.")
    max_workers: Positive = Field(default=10, description="Requests at the same time.")
    request_interval: float = Field(default=0.1, ge=0, description="Least seconds between the starts of two requests.")

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, tree: Any) -> Any:
        names = {"ENABLE_TOOLS": "enabled", "TOOL_SERVER_URL": "server_url", "MAX_TOOL_TURNS": "max_tool_turns"}
        if not isinstance(tree, Mapping):
            return tree
        return {key: os.environ[name] for name, key in names.items() if os.environ.get(name)} | dict(tree)


class SearchConfig(Section):
    """`search`: the retrieval server of `search_agent`, in which text between <search> and </search> is a query."""

    server_url: str | None = Field(default=None, description="Address that takes {queries, topk, return_scores}.")
    token_env: str | None = Field(default=None, description="Environment variable with the secret the server asks for.")
    topk: Positive = Field(default=3, description="Passages per query.")
    max_turns: NonNegative = Field(default=3, description="Most queries of one trajectory.")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one request may take.")
    max_retries: NonNegative = Field(default=3, description="Repetitions of a request that failed.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each repetition.")


class InteractionsConfig(Section):
    """`interactions`: the simulated users of `interaction_agent`."""

    interaction_config_path: str | None = Field(
        default=None, description="YAML file: interaction: [{name, class_name, config}]."
    )
    timeout: float = Field(default=60.0, gt=0, description="Seconds a simulated user may take for one reply.")
