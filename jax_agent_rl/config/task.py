"""The task: the policy, its rows, how trajectories are scored, and the tools that agents use.

The keys of ``tool_config`` are named as in the ToolClient, so that command lines carry over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_serializer, model_validator

from jax_agent_rl.config.base import (
    NonNegative,
    Positive,
    Section,
    Unless,
    UsedByAgents,
    WhenKey,
    WhenModelHasVision,
)


class ModelPathConfig(Section):
    """Weights and tokenizer to start from."""

    path: str = Field(
        description=(
            "Folder with config.json, model.safetensors and tokenizer files; owner/name[@revision]"
            " on the Hugging Face Hub, downloaded into its cache; or a run folder, whose newest"
            " checkpoint is exported into it."
        )
    )


class ModelConfig(ModelPathConfig):
    """The policy's weights and processor."""

    min_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description=(
            "Minimum number of pixels an image or frame is scaled to; null: from the model's"
            " processor files. Set it together with max_pixels."
        ),
    )
    max_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None, description="Maximum number of pixels an image or frame is scaled to."
    )

    @property
    def pixels(self) -> tuple[int, int] | None:
        """``(min_pixels, max_pixels)``; None leaves both to the model's processor files."""
        if self.min_pixels is None or self.max_pixels is None:
            return None
        return self.min_pixels, self.max_pixels

    @model_validator(mode="after")
    def _pixel_bounds_ascend(self) -> Self:
        low = self.min_pixels
        high = self.max_pixels
        if (low is None) != (high is None):
            raise ValueError(f"min_pixels={low}, max_pixels={high}: set both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels={low} exceeds max_pixels={high}; lower it")
        return self


class DataSource(Section):
    """Files of rows: a file, a glob (`data/*.parquet`), or a dataset of the Hugging Face Hub.

    A dataset of the Hub is `hf://datasets/owner/name[@revision]/GLOB`, or `owner/name[@revision]`,
    whose files `name` and `split` select as in `datasets.load_dataset`.
    """

    path: str = Field(description="The file, glob or dataset.")
    name: str | None = Field(
        default=None, description="Configuration of the Hub dataset; null: its only or default one."
    )
    split: str | None = Field(default=None, description="Split of the Hub dataset; null: train.")
    weight: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Share of the training rows drawn from this source, relative to the other weights;"
            " null: rows of all sources are drawn equally often."
        ),
    )

    def __str__(self) -> str:
        details = []
        if self.name:
            details.append(f"name={self.name}")
        if self.split:
            details.append(f"split={self.split}")
        return f"{self.path} ({', '.join(details)})" if details else self.path

    @model_serializer
    def _serialize(self) -> str | dict[str, Any]:
        """Return the keys that are set; the path alone if it is the only one."""
        keys = {}
        for key in type(self).model_fields:
            value = getattr(self, key)
            if value is not None:
                keys[key] = value
        return keys if len(keys) > 1 else self.path


def _as_list(value: Any) -> Any:
    """Return sources as a list of mappings; a text is a source's path."""
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items or not all(isinstance(item, (str, Mapping, DataSource)) for item in items):
        raise ValueError(
            "give a file, a glob, a Hub dataset, or a list of these and of mappings with a path"
        )
    sources = []
    for item in items:
        sources.append({"path": item} if isinstance(item, str) else item)
    return sources


_ONE_SOURCE = [{"type": "string"}, {"type": "object"}]
_SOURCES = [*_ONE_SOURCE, {"type": "array", "items": {"anyOf": _ONE_SOURCE}}]
DataSources = Annotated[
    tuple[DataSource, ...], BeforeValidator(_as_list), WithJsonSchema({"anyOf": _SOURCES})
]


_WITH_CURRICULUM = WhenKey("data.curriculum.enabled")


class CurriculumConfig(Section):
    """A curriculum: rows that are always solved, or never, are drawn less often."""

    enabled: bool = Field(default=False, description="Keep pass rates, and draw by difficulty.")
    pass_rate_of: Annotated[Literal["row", "data_source"], _WITH_CURRICULUM] = Field(
        default="row",
        description=(
            "What has a pass rate: each row, or all rows of a data_source together, which says"
            " something about rows that were never drawn."
        ),
    )
    easy_threshold: Annotated[float, _WITH_CURRICULUM] = Field(
        default=1.0, gt=0, le=1, description="Rows with at least this pass rate are easy."
    )
    hard_threshold: Annotated[float, _WITH_CURRICULUM] = Field(
        default=0.0, ge=0, lt=1, description="Rows with at most this pass rate are hard."
    )
    easy_fraction: Annotated[float, _WITH_CURRICULUM] = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of the turns of easy rows at which they are drawn.",
    )
    hard_fraction: Annotated[float, _WITH_CURRICULUM] = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of the turns of hard rows at which they are drawn.",
    )
    window: Annotated[Positive, _WITH_CURRICULUM] = Field(
        default=2, description="Number of last groups that a pass rate is the mean of."
    )

    @model_validator(mode="after")
    def _pools_are_apart(self) -> Self:
        if self.hard_threshold >= self.easy_threshold:
            raise ValueError(
                f"data.curriculum.hard_threshold={self.hard_threshold} is not below"
                f" easy_threshold={self.easy_threshold}, so that a row could be both; lower it"
            )
        return self


class DataConfig(Section):
    """Rows in JSON Lines or Parquet.

    Columns are `prompt`, `agent_name`, `data_source` and `reward_model.ground_truth`.
    """

    train: DataSources = Field(
        description=(
            "Rows to train on: a .jsonl or .parquet file, a glob, a Hub dataset (`owner/name`), or"
            " a list of these. A mapping `{path, name, split, weight}` chooses a Hub dataset's"
            " files, and each source's share."
        ),
    )
    eval: Annotated[
        DataSources | None, WithJsonSchema({"anyOf": [*_SOURCES, {"type": "null"}]})
    ] = Field(
        default=None,
        description="Rows to evaluate on, likewise but without weights; never trained on.",
    )
    eval_limit: Annotated[Positive | None, WhenKey("data.eval")] = Field(
        default=None, description="Evaluate on this many rows, from the first."
    )
    shuffle: bool = Field(
        default=True,
        description=(
            "Draw the rows of each source in random order, a new one each epoch; false: in their"
            " order."
        ),
    )
    shuffle_row_groups: Positive = Field(
        default=8,
        description=(
            "Number of a source's Parquet row groups that are in memory at a time, and whose rows"
            " are shuffled together; a source with no more is shuffled as a whole."
        ),
    )
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)

    @model_validator(mode="after")
    def _weights_are_complete(self) -> Self:
        unweighted = [source.path for source in self.train if source.weight is None]
        if unweighted and len(unweighted) < len(self.train):
            raise ValueError(
                f"data.train gives a weight to some sources, but not to {unweighted}; set it"
                " there as well"
            )
        if any(source.weight is not None for source in self.eval or ()):
            raise ValueError(
                "data.eval has a weight, but is read as a whole; remove it, or set data.eval_limit"
            )
        return self


class RemoteRewardConfig(Section):
    """A reward server for some data sources."""

    url: str = Field(
        description=(
            "URL to which each trajectory is POSTed as JSON; the answer is a number or {score: …}."
        )
    )
    data_sources: tuple[str, ...] = Field(
        min_length=1, description="Data sources of the rows it scores (* matches)."
    )
    timeout: float = Field(default=30.0, gt=0, description="Timeout of one attempt, in seconds.")
    max_retries: NonNegative = Field(
        default=3, description="Retries after connection errors, 429 and 5xx."
    )
    retry_delay: float = Field(
        default=1.0, ge=0, description="Seconds before the first retry; doubled each time."
    )
    max_concurrency: Positive = Field(
        default=16, description="Maximum number of concurrent requests."
    )
    requests_per_second: float | None = Field(
        default=None, gt=0, description="Maximum number of requests per second; null: no limit."
    )


class JudgeConfig(Section):
    """The model of the `judge` that reward functions may request."""

    model: str = Field(
        description="Folder of a frozen model (Hugging Face), or `policy`: the model in training."
    )
    max_tokens: Positive = Field(default=256, description="Maximum number of tokens per judgement.")
    temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature; 0 is deterministic."
    )
    max_model_len: Annotated[Positive, Unless("reward.judge.model", "policy")] = Field(
        default=2048,
        description="Maximum number of tokens of prompt and judgement (a frozen model's engine).",
    )
    max_in_flight: Positive = Field(
        default=16, description="Maximum number of concurrent judgements."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Further arguments of the judge's chat template, such as `enable_thinking: false`."
        ),
    )


class RewardConfig(Section):
    """Scoring of trajectories; each row's `data_source` selects the reward function."""

    path: str | None = Field(
        default=None, description="Python file or module that registers more reward functions."
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        description="Timeout of scoring in seconds; then the trajectory is dropped.",
    )
    workers: NonNegative = Field(
        default=4,
        description=(
            "Number of processes that run synchronous functions of `path` and are killed on"
            " timeout; 0: one thread per call, which cannot be killed."
        ),
    )
    remote: RemoteRewardConfig | None = Field(default=None, description="A reward server.")
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        default="bubblewrap",
        description="Sandbox of programs that are scored by tests; unsafe_local: none.",
    )
    judge: JudgeConfig | None = Field(default=None, description="Judge model for reward functions.")


# --- what agents use ------------------------------------------------------------------------------

_TEXT_TOOL = UsedByAgents("text_tool_agent")
_ENVIRONMENT_VARIABLES = {
    "enabled": "ENABLE_TOOLS",
    "server_url": "TOOL_SERVER_URL",
    "max_tool_turns": "MAX_TOOL_TURNS",
}


class ToolsConfig(Section):
    """Sources of tools."""

    function_tool_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None, description="Python file or module with @function_tool functions."
    )
    tool_config_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None,
        description=(
            "YAML file with `tools: [{class_name, config, tool_schema}]`, native and MCP; may be"
            " set together with function_tool_path."
        ),
    )


class ToolClientConfig(Section):
    """`tool_config`: the ToolClient of `text_tool_agent`.

    Text between <tool> and </tool> is code, which a tool server runs.

    The environment variables ENABLE_TOOLS, TOOL_SERVER_URL and MAX_TOOL_TURNS set ``enabled``,
    ``server_url`` and ``max_tool_turns`` unless the configuration does.
    """

    enabled: Annotated[bool, Unless("agent.default_agent") & Unless("agent.enable_search")] = Field(
        default=False, description="Run rows without `agent_name` as text_tool_agent."
    )
    server_url: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000."
    )
    token_env: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Environment variable with the token of the server."
    )
    max_tool_turns: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Maximum number of tool calls in one trajectory."
    )
    max_retries: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Retries of a request that failed or timed out."
    )
    retry_delay: Annotated[float, _TEXT_TOOL] = Field(
        default=1.0, ge=0, description="Seconds before each retry."
    )
    timeout: Annotated[float, _TEXT_TOOL] = Field(
        default=30.0, gt=0, description="Timeout of a request in seconds; each retry has its own."
    )
    max_workers: Annotated[Positive, _TEXT_TOOL] = Field(
        default=10, description="Maximum number of concurrent requests."
    )
    request_interval: Annotated[float, _TEXT_TOOL] = Field(
        default=0.1,
        ge=0,
        description=(
            "Minimum number of seconds between the starts of two requests: 0.1 is at most ten per"
            " second. Use 0 for a server of your own."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        from_environment = {}
        for key, variable in _ENVIRONMENT_VARIABLES.items():
            value = os.environ.get(variable)
            if value:
                from_environment[key] = value
        return from_environment | dict(tree)

    def changed(self, key: str) -> bool:
        """Return whether a key differs from its default and from its environment variable.

        The environment is the same for all runs, also for those that do not use the key.
        """
        if not super().changed(key):
            return False
        variable = _ENVIRONMENT_VARIABLES.get(key)
        if variable is None:
            return True
        return str(getattr(self, key)).lower() != os.environ.get(variable, "").lower()


class SearchConfig(Section):
    """`search`: the retrieval server of `search_agent`.

    Text between <search> and </search> is a query.
    """

    server_url: str | None = Field(
        default=None, description="Address of a server that accepts {queries, topk, return_scores}."
    )
    token_env: str | None = Field(
        default=None, description="Environment variable with the token of the server."
    )
    topk: Positive = Field(default=3, description="Passages per query.")
    max_turns: NonNegative = Field(
        default=3, description="Maximum number of queries in one trajectory."
    )
    timeout: float = Field(
        default=30.0, gt=0, description="Timeout of a request in seconds; each retry has its own."
    )
    max_retries: NonNegative = Field(
        default=3, description="Retries of a request that failed or timed out."
    )
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each retry.")


class InteractionsConfig(Section):
    """`interactions`: the simulated users of `interaction_agent`."""

    interaction_config_path: str | None = Field(
        default=None, description="YAML file: interaction: [{name, class_name, config}]."
    )
    timeout: float = Field(
        default=60.0, gt=0, description="Timeout of one reply of a simulated user, in seconds."
    )


class EnvironmentsConfig(Section):
    """Environments of rows with agent_name `environment_agent`.

    `extra_info.environment_kwargs.name` selects one.
    """

    path: str | None = Field(
        default=None, description="Python file or module with @register_environment classes."
    )
    scope: Literal["rollout", "global"] = Field(
        default="rollout",
        description=(
            "rollout: a new instance for each rollout. global: instances are reset and reused."
        ),
    )
    max_instances: Positive = Field(
        default=64,
        description=(
            "Maximum number of concurrent instances of one environment; further rollouts wait."
        ),
    )
    timeout: float = Field(
        default=30.0, gt=0, description="Timeout of one reset, step, score or close, in seconds."
    )
    warm_instances: Annotated[NonNegative, WhenKey("environments.scope", "rollout")] = Field(
        default=0,
        description=(
            "Instances of each environment that are prepared ahead, besides those in use: instances"
            " like those that were used last. Each serves one rollout."
        ),
    )
    start_timeout: float = Field(
        default=120.0, gt=0, description="Timeout of preparing an instance, in seconds."
    )
    snapshot_mb: NonNegative = Field(
        default=256,
        description=(
            "Maximum size of all snapshots of environments together, in MiB, in memory and in a"
            " checkpoint; the oldest make room. 0: none."
        ),
    )
