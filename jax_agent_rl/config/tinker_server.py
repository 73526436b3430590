"""Settings of ``jax-agent-rl tinker-server``: one frozen tree, from YAML and ``a.b=c`` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jax_agent_rl.config.base import Positive, Section
from jax_agent_rl.config.conditions import WhenKey
from jax_agent_rl.config.learner import LoraConfig
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.config.task import ModelPathConfig


class TinkerServerSettings(Section):
    """The base model, what is trained of it, and where it is served."""

    model: ModelPathConfig
    model_name: str | None = Field(
        default=None,
        description="Name under which clients ask for the model; null: model.path. Clients load the tokenizer of that "
        "name.",
    )
    state_dir: str = Field(
        default="runs/tinker-server", description="Folder of the database, checkpoints and training states."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; others than loopback need token_env.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port; 0 takes a free one.")
    token_env: str | None = Field(
        default=None,
        description="Environment variable with the API key that clients must send (TINKER_API_KEY there; it begins "
        "with tml-); null: none, on loopback only.",
    )
    max_body_mb: Positive = Field(default=64, description="Maximum size of a request, in megabytes.")
    lora: LoraConfig | None = Field(
        default=LoraConfig(rank=32, alpha=32.0),
        description="The adapters that clients train, all of this rank; null: clients train the whole model.",
    )
    pack_length: Positive = Field(default=1024, description="Tokens per packed row, and of the longest sequence.")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision of matrix products and activations in training."
    )
    snapshot_every: Positive = Field(
        default=10,
        description="Optimizer updates of a model between snapshots of its state. A server that was killed loads the "
        "newest one and repeats the requests since.",
    )
    max_model_len: Positive = Field(default=1024, description="Maximum tokens of a prompt and its samples.")
    max_concurrent_decodes: Positive = Field(default=32, description="Maximum number of sequences decoded at a time.")
    max_sampled_adapters: Annotated[Positive, WhenKey("lora")] = Field(
        default=8, description="Adapters that the engine holds at a time; others wait until one of them is idle."
    )


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> TinkerServerSettings:
    """Read a YAML file (if any), apply ``a.b=c`` overrides and validate; raise ConfigError with all problems."""
    return build_tree(TinkerServerSettings, read_tree(path) if path else {}, overrides)
