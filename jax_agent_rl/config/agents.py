"""Settings of the agents that reach tools over HTTP, and of simulated users. Part of :mod:`jax_agent_rl.config`.

The names are those of verl-tool's ``AgentActorConfig`` (``server_tool_agent``) and of the ToolClient
(``text_tool_agent``), so that command lines carry over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import SwitchedOff, Unless, UsedByAgents, WhenKey

Side = Literal["left", "middle", "right"]

_SERVER_TOOL = UsedByAgents("server_tool_agent")
_WITH_TOOLS = _SERVER_TOOL | SwitchedOff("agent.enable_agent")
_TEXT_TOOL = UsedByAgents("text_tool_agent")
_ENVIRONMENT = {"enabled": "ENABLE_TOOLS", "server_url": "TOOL_SERVER_URL", "max_tool_turns": "MAX_TOOL_TURNS"}


class ServerToolConfig(Section):
    """`agent` keys of `server_tool_agent`; `n`, `max_model_len` and `val_max_response_length` hold for every agent."""

    enable_agent: Annotated[bool, _SERVER_TOOL | WhenKey("agent.tool_server_url")] = Field(
        default=True,
        description="With tool_server_url, rows without `agent_name` run as server_tool_agent. false: they run as "
        "plain generation, and server_tool_agent generates once and calls no tool.",
    )
    tool_server_url: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000; /get_observation is added."
    )
    tool_server_token_env: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description="Environment variable with the secret the tool server asks for (Authorization: Bearer).",
    )
    tool_call_timeout: Annotated[float, _WITH_TOOLS] = Field(
        default=30.0, gt=0, description="Seconds the tool server may take for one request."
    )
    tool_call_max_retries: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=3,
        description="Repetitions of a request that did not reach the tool server, or that it was too busy to take.",
    )
    max_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5, description="Most tool calls of a server_tool_agent trajectory."
    )
    min_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=0, description="Turns that are sent to the tool server even if they hold no action stop token."
    )
    action_stop_tokens: Annotated[tuple[str, ...], _WITH_TOOLS] = Field(
        default=(),
        description="Texts that end a turn and make it an action; not in a think block, where the turn goes on. "
        "A list, `a,b`, or a file that holds `a,b`.",
        json_schema_extra={"type": ["array", "string"]},
    )
    max_action_length: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None, description="Most tokens of one turn; null: the budgets alone."
    )
    max_obs_length: Annotated[Positive, _WITH_TOOLS] = Field(
        default=256, description="Most tokens of one observation of the tool server."
    )
    truncate_obs_side: Annotated[Side, _WITH_TOOLS] = Field(
        default="middle", description="The side that is cut when an observation is too long."
    )
    truncate_response_side: Annotated[Literal["left", "right"], _WITH_TOOLS] = Field(
        default="right",
        description="Where a response is cut that an observation would overflow. right: before the observation, and "
        "the trajectory ends. left: in the observation, whose end is given half of the tokens left.",
    )
    mask_observations: Annotated[bool, _WITH_TOOLS] = Field(
        default=True, description="Observations carry no loss; false trains on them, too."
    )
    enable_mtrl: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description="Observations are chat turns of their own; false: they continue the assistant's text.",
    )
    mtrl_role: Annotated[str, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default="user", description="Role of those chat turns."
    )
    mtrl_sep: Annotated[str | None, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default=None,
        description="Text around an observation in the mtrl format, with `{obs}`; null: the chat template's.",
    )
    turn_end_token: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None, description="Ends a turn, besides EOS; inserted where mtrl_sep follows a turn without it."
    )
    additional_eos_token_ids: Annotated[tuple[NonNegative, ...], _WITH_TOOLS] = Field(
        default=(), description="Token ids that end a turn, besides EOS."
    )
    call_tool_first: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="Ask the tool server for an observation before the first turn."
    )
    force_finish_for_last_turn: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="The turn after the last tool call does not stop at action stop tokens."
    )
    mask_overlong_loss: Annotated[bool, _SERVER_TOOL] = Field(
        default=False, description="A trajectory cut by a limit carries no loss; its reward counts in its group."
    )
    mask_void_traj: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="A trajectory with no valid action and no answer carries no loss; its reward counts."
    )
    rollout_mode: Annotated[Literal["async", "sync"], _WITH_TOOLS] = Field(
        default="async", description="sync: tools are called when all trajectories in flight have finished their turn."
    )
    max_concurrent_trajectories: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None, description="Most server_tool_agent trajectories at the same time, besides rollout.max_in_flight."
    )
    max_model_len: Positive | None = Field(
        default=None, description="Most ids of an agent's context; null: the engine's."
    )
    n: Positive | None = Field(default=None, description="Trajectories per row: another name of rollout.group_size.")
    val_max_turns: Annotated[NonNegative | None, _SERVER_TOOL] = Field(
        default=None, description="max_turns in evaluations; null: the same."
    )
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
        """Settings that contradict each other."""
        if self.min_turns > self.max_turns:
            raise ValueError(f"min_turns={self.min_turns} is more than max_turns={self.max_turns}; raise the latter")
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

    enabled: Annotated[bool, Unless("agent.default_agent") & Unless("agent.enable_search")] = Field(
        default=False, description="Rows without agent_name run as text_tool_agent."
    )
    server_url: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000."
    )
    token_env: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Environment variable with the secret the server asks for."
    )
    max_tool_turns: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Most tool calls of one trajectory."
    )
    max_retries: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Repetitions of a request that failed or timed out."
    )
    retry_delay: Annotated[float, _TEXT_TOOL] = Field(default=1.0, ge=0, description="Seconds before each repetition.")
    timeout: Annotated[float, _TEXT_TOOL] = Field(
        default=30.0, gt=0, description="Seconds one request may take; a repetition has as many."
    )
    max_workers: Annotated[Positive, _TEXT_TOOL] = Field(default=10, description="Requests at the same time.")
    request_interval: Annotated[float, _TEXT_TOOL] = Field(
        default=0.1,
        ge=0,
        description="Least seconds between the starts of two requests: 0.1 is at most ten a second. 0 for a server of "
        "one's own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {key: os.environ[name] for key, name in _ENVIRONMENT.items() if os.environ.get(name)} | dict(tree)

    def changed(self, key: str) -> bool:
        """Whether a key has another value than its default, and than the environment's, which is for any run."""
        given = os.environ.get(_ENVIRONMENT.get(key, ""), "")
        return super().changed(key) and str(getattr(self, key)).lower() != given.lower()


class SearchConfig(Section):
    """`search`: the retrieval server of `search_agent`, in which text between <search> and </search> is a query."""

    server_url: str | None = Field(default=None, description="Address that takes {queries, topk, return_scores}.")
    token_env: str | None = Field(default=None, description="Environment variable with the secret the server asks for.")
    topk: Positive = Field(default=3, description="Passages per query.")
    max_turns: NonNegative = Field(default=3, description="Most queries of one trajectory.")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one request may take; a repetition has as many.")
    max_retries: NonNegative = Field(default=3, description="Repetitions of a request that failed or timed out.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each repetition.")


class InteractionsConfig(Section):
    """`interactions`: the simulated users of `interaction_agent`."""

    interaction_config_path: str | None = Field(
        default=None, description="YAML file: interaction: [{name, class_name, config}]."
    )
    timeout: float = Field(default=60.0, gt=0, description="Seconds a simulated user may take for one reply.")
