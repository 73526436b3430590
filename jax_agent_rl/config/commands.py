"""The root sections of ``tool-server``, ``tinker-server``, ``sft`` and ``dpo``.

``sft`` and ``dpo`` train on given conversations and preferences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jax_agent_rl.config.agent import ToolFormatName
from jax_agent_rl.config.base import (
    Condition,
    Distinct,
    NonNegative,
    Positive,
    Section,
    WhenKey,
    unused,
)
from jax_agent_rl.config.learner import LoraConfig, RowsConfig
from jax_agent_rl.config.task import DataSources, ModelPathConfig
from jax_agent_rl.utils.network import token_from

Seconds = Annotated[float, Field(gt=0)]


class LimitSettings(Section):
    """Resource limits of one model-written program."""

    wall_seconds: Seconds = Field(
        default=10.0, description="Wall time of one run, or of one command in a session."
    )
    cpu_seconds: Positive = Field(default=10, description="CPU time of each process of a run.")
    session_cpu_seconds: Positive = Field(
        default=300, description="CPU time of each process of a session, over its whole life."
    )
    memory_mb: Positive = Field(
        default=1024, description="Memory of all processes of a program together, and of each one."
    )
    processes: Positive = Field(
        default=64, description="Maximum number of processes and threads at the same time."
    )
    disk_mb: Positive = Field(
        default=64, description="Size of each writable folder (they are in memory)."
    )
    output_kb: Positive = Field(
        default=256, description="Output limit of one run or command; more ends the program."
    )


class SearchSettings(Section):
    """The search tool."""

    corpus: str | None = Field(
        default=None, description='JSON Lines of {"id", "contents"}; the first line is the title.'
    )
    encoder: str | None = Field(
        default=None,
        description=(
            "Folder of a sentence-transformers model: search by meaning; null: by words (BM25)."
        ),
    )
    query_prompt: Annotated[str, WhenKey("search.encoder")] = Field(
        default="", description="Prefix of a query for the encoder, e.g. 'query: ' (E5)."
    )
    passage_prompt: Annotated[str, WhenKey("search.encoder")] = Field(
        default="", description="Prefix of a passage for the encoder, e.g. 'passage: ' (E5)."
    )
    index: str | None = Field(
        default=None,
        description=(
            "Folder of the index, created if missing; null: CORPUS.bm25s, or CORPUS.dense with an"
            " encoder."
        ),
    )
    topk: Positive = Field(default=3, description="Passages per answer.")


class SqlSettings(Section):
    """The SQL tool."""

    databases: str | None = Field(
        default=None, description="Folder of SQLite files; extra_fields.db_id selects one."
    )
    max_rows: Positive = Field(default=50, description="Maximum number of rows in an answer.")


class PageSettings(Section):
    """The text page tool."""

    root: str | None = Field(
        default=None,
        description="Folder of the .html, .md and .txt pages; nothing else can be opened.",
    )
    page_chars: Positive = Field(default=3000, description="Characters shown at a time.")


class ImageSettings(Section):
    """The image zoom tool."""

    root: str | None = Field(
        default=None, description="Folder of the files that extra_fields.images may name."
    )
    max_pixels: Positive = Field(
        default=16_000_000, description="Maximum number of pixels of an image that is opened."
    )
    max_side: Positive = Field(
        default=1024, description="Maximum side length in pixels of an image that is returned."
    )


class JudgeSettings(Section):
    """The judge tool, which runs tests."""

    max_tests: Positive = Field(
        default=32,
        description="Maximum number of tests of extra_fields that are run, from the first.",
    )


class McpSettings(Section):
    """The MCP gateway. Its servers run outside the sandbox: they are trusted."""

    servers: dict[str, str | list[str]] = Field(
        default_factory=dict,
        description="Name -> URL of a streamable HTTP server, or the command of a stdio one.",
    )
    call_seconds: Seconds = Field(default=30.0, description="Timeout of one call, in seconds.")


def _when_tool(name: str) -> Condition:
    """Return the condition that this tool is served, or custom tools, which may read any key."""
    return WhenKey("tools", name) | WhenKey("tool_path")


class ToolServerSettings(Section):
    """A tool server."""

    host: str = Field(
        default="127.0.0.1", description="Address to listen on; any but loopback needs token_env."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=5000, description="Port to listen on; 0 takes a free one."
    )
    token_env: str | None = Field(
        default=None, description="Environment variable with the token that clients must send."
    )
    workers: Positive = Field(
        default=1, description="Number of worker processes; a trajectory stays with one."
    )
    tools: tuple[str, ...] = Field(
        default=("python",), description="Tools in order; the first that accepts an action runs it."
    )
    tool_path: str | None = Field(
        default=None, description="Python file or module with further ServerTool classes."
    )
    done_if_invalid: bool = Field(
        default=False, description="An action that no tool accepts ends its trajectory."
    )
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        default="bubblewrap",
        description=(
            "bubblewrap, or unsafe_local: models' programs run with this user's rights,"
            " unprotected."
        ),
    )
    python: str | None = Field(
        default=None, description="Python interpreter for programs; default: the server's own."
    )
    max_running: Positive = Field(
        default=16,
        description="Maximum number of concurrent programs per worker; further ones wait.",
    )
    max_environments: Positive = Field(
        default=1024,
        description="Maximum number of open environments per worker; further ones are refused.",
    )
    idle_seconds: Seconds = Field(
        default=1800.0, description="Seconds after which an unused environment is closed."
    )
    step_seconds: Seconds = Field(
        default=120.0,
        description="Timeout of one action in seconds, waiting for its turn included.",
    )
    max_batch: Positive = Field(
        default=1024, description="Maximum number of actions in one request."
    )
    max_request_mb: Positive = Field(default=64, description="Maximum size of a request.")
    stuck_seconds: Seconds = Field(
        default=20.0,
        description="Seconds without a response after which a worker is killed and replaced.",
    )
    max_action_chars: Positive = Field(
        default=262_144,
        description="Maximum length of an action; longer ones are invalid and not parsed.",
    )
    max_observation_chars: Positive = Field(
        default=20_000,
        description="Maximum length of an observation; longer ones lose their middle.",
    )
    limits: LimitSettings = Field(default_factory=LimitSettings)
    search: Annotated[SearchSettings, _when_tool("search")] = Field(default_factory=SearchSettings)
    sql: Annotated[SqlSettings, _when_tool("sql")] = Field(default_factory=SqlSettings)
    page: Annotated[PageSettings, _when_tool("page")] = Field(default_factory=PageSettings)
    image: Annotated[ImageSettings, _when_tool("image_zoom")] = Field(default_factory=ImageSettings)
    judge: Annotated[JudgeSettings, _when_tool("judge")] = Field(default_factory=JudgeSettings)
    mcp: Annotated[McpSettings, _when_tool("mcp")] = Field(default_factory=McpSettings)

    @model_validator(mode="after")
    def _consistent(self) -> ToolServerSettings:
        problems = []
        if len(set(self.tools)) < len(self.tools) or not self.tools:
            problems.append(f"tools={list(self.tools)} must name at least one tool, and each once")
        for tool, key, value in (
            ("search", "search.corpus", self.search.corpus),
            ("sql", "sql.databases", self.sql.databases),
            ("page", "page.root", self.page.root),
            ("mcp", "mcp.servers", self.mcp.servers),
        ):
            if tool in self.tools and not value:
                problems.append(f"tools has {tool!r}, so {key} must be set")
        if self.step_seconds <= self.limits.wall_seconds:
            problems.append(
                f"step_seconds={self.step_seconds:g} must be more than"
                f" limits.wall_seconds={self.limits.wall_seconds:g}"
            )
        problems += unused(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def python_path(self) -> Path | None:
        """``python`` as a path."""
        return Path(self.python) if self.python else None

    @property
    def token(self) -> str | None:
        """Token that clients must send.

        Raises:
            ConfigError: the environment variable is not set.
        """
        return token_from(self.token_env, key="token_env")


class TinkerServerSettings(Section):
    """The base model, what is trained of it, and where it is served."""

    model: ModelPathConfig
    model_name: str | None = Field(
        default=None,
        description=(
            "Name under which clients ask for the model; null: model.path. Clients load the"
            " tokenizer of that name."
        ),
    )
    state_dir: str = Field(
        default="runs/tinker-server",
        description="Folder of the database, checkpoints and training states.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on; others than loopback need token_env.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8000, description="Port; 0 takes a free one."
    )
    token_env: str | None = Field(
        default=None,
        description=(
            "Environment variable with the API key that clients must send (TINKER_API_KEY there; it"
            " begins with tml-); null: none, on loopback only."
        ),
    )
    max_body_mb: Positive = Field(
        default=64, description="Maximum size of a request, in megabytes."
    )
    lora: LoraConfig | None = Field(
        default=LoraConfig(rank=32, alpha=32.0),
        description=(
            "The adapters that clients train, all of this rank; null: clients train the whole"
            " model."
        ),
    )
    pack_length: Positive = Field(
        default=1024, description="Tokens per packed row, and of the longest sequence."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of matrix products and activations in training."
    )
    snapshot_every: Positive = Field(
        default=10,
        description=(
            "Optimizer updates of a model between snapshots of its state. A server that was killed"
            " loads the newest one and repeats the requests since."
        ),
    )
    sampler_ttl_seconds: Positive | None = Field(
        default=3600,
        description=(
            "Seconds that weights without a name (`save_weights_and_get_sampling_client`) are kept"
            " after they were last sampled from; null: until they are deleted. Each is a file of"
            " the size of the adapter."
        ),
    )
    session_ttl_seconds: Positive | None = Field(
        default=30 * 24 * 3600,
        description=(
            "Seconds after which a session whose client is not heard of is removed with the"
            " training states of its models; null: never. Checkpoints that a client named stay."
        ),
    )
    max_model_len: Positive = Field(
        default=1024, description="Maximum tokens of a prompt and its samples."
    )
    max_concurrent_decodes: Positive = Field(
        default=32, description="Maximum number of sequences decoded at a time."
    )
    max_sampled_adapters: Annotated[Positive, WhenKey("lora")] = Field(
        default=8,
        description=(
            "Adapters that the engine holds at a time; others wait until one of them is idle."
        ),
    )


Role = Literal["assistant", "user", "tool"]


class ConversationsConfig(Section):
    """Rows: JSON Lines or Parquet, conversations or files that `jax-agent-rl rollout` wrote."""

    train: DataSources = Field(
        description=(
            "Rows to train on, as in the configuration of `train`: conversations (`messages`, and"
            " `tools`), for dpo preferences (`prompt`, `chosen`, `rejected`), or trajectories that"
            " `jax-agent-rl rollout` wrote."
        )
    )
    eval: DataSources | None = Field(
        default=None, description="Rows to compute the loss on, never trained on."
    )
    max_length: Positive | None = Field(
        default=None,
        description=(
            "Leave out sequences of more tokens; null: one of more than a packed row is an error."
        ),
    )
    min_reward: float | None = Field(
        default=None, description="Leave out trajectories with a lower reward."
    )


class SftDataConfig(ConversationsConfig):
    """Rows of `sft`."""

    train_on: Annotated[tuple[Role, ...], Distinct] = Field(
        default=("assistant",),
        min_length=1,
        description=(
            "Roles whose messages carry loss; of trajectories, what the policy sampled does. An"
            " assistant message with `weight` 0 carries none."
        ),
    )
    best_of: Positive | None = Field(
        default=None,
        description=(
            "Rejection sampling: of each group of trajectories keep this many with the highest"
            " rewards; null: all."
        ),
    )


class TemplateConfig(Section):
    """How conversations become ids, with the keys of the configuration of `train`."""

    tool_format: ToolFormatName = Field(
        default="auto", description="See `train`: how tool calls are written."
    )
    tool_prompt: Literal["template", "none"] = Field(
        default="template",
        description="template: the prompt describes the row's tools. none: it does not.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "See `train`: further arguments of the chat template; a row's column of that name adds"
            " to them."
        ),
    )


class EpochsConfig(Section):
    """The training loop."""

    epochs: Positive = Field(default=1, description="Passes over the rows, each in another order.")
    steps: Positive | None = Field(
        default=None,
        description="Stop after this many steps, unless `epochs` end before; null: no limit.",
    )
    batch_size: Positive = Field(
        default=32, description="Conversations, or pairs of them, per optimizer update."
    )
    eval_every: Annotated[NonNegative, WhenKey("data.eval")] = Field(
        default=0, description="Steps between evaluations; 0: before and after training only."
    )
    checkpoint_every: NonNegative = Field(
        default=0, description="Steps between checkpoints; 0: at the end only."
    )
    keep_checkpoints: Positive = Field(
        default=2, description="Number of checkpoints to keep, the newest ones."
    )


class SftConfig(Section):
    """Supervised fine-tuning: the mean cross-entropy of a batch's tokens."""

    seed: NonNegative = Field(default=0, description="Seed of the order of rows.")
    run_dir: str = Field(description="Run folder: config, metrics, checkpoints.")
    model: ModelPathConfig
    data: SftDataConfig
    agent: TemplateConfig = Field(default_factory=TemplateConfig)
    learner: RowsConfig = Field(default_factory=RowsConfig)
    trainer: EpochsConfig = Field(default_factory=EpochsConfig)

    @model_validator(mode="after")
    def _consistent(self) -> SftConfig:
        problems = [*unused(self), *self.learner.problems("learner")]
        sources = (*self.data.train, *(self.data.eval or ()))
        weighted = [source.path for source in sources if source.weight]
        if weighted:
            problems.append(
                f"data gives a weight to {weighted}, but every row is used once per epoch;"
                " remove it"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


class PreferenceConfig(Section):
    """The preference loss: Rafailov et al. 2023, arXiv 2305.18290."""

    beta: float = Field(
        default=0.1, gt=0, description="Weight of staying close to the initial model."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Probability that a preference is the wrong way round.",
    )


class DpoConfig(SftConfig):
    """Direct preference optimization: the mean loss of a batch's pairs."""

    # Pairs have no roles to choose.
    data: ConversationsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    dpo: PreferenceConfig = Field(default_factory=PreferenceConfig)
