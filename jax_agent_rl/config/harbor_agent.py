"""The ``agent.harbor`` section: trials of Harbor as agents."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jax_agent_rl.config.base import Positive, Section, Unless, WhenKey
from jax_agent_rl.config.command_agent import Mounts, ProgramLimits

LOCAL = "local"
"""The environment that is this project's sandbox."""


class HarborEndpoint(Section):
    """How an environment that is not on this machine reaches the policy."""

    host: str = Field(
        default="127.0.0.1",
        description=(
            "Address that the endpoint listens on, such as 0.0.0.0; each request has to send the"
            " key of its trial. Without TLS: for networks that are trusted, or behind a tunnel."
        ),
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0, description="Its port, for tunnels and firewalls; 0: a free one."
    )
    url: str | None = Field(
        default=None,
        description=(
            "Address by which the environment reaches it, `{port}` being its port, such as"
            " `http://host.docker.internal:{port}`; null: loopback."
        ),
    )


class HarborConfig(Section):
    """The agent `harbor`: a trial of Harbor per trajectory, with the endpoint as its model.

    In texts of `agent_options` and `agent_env`, `{base_url}` is the endpoint's address with `/v1`,
    `{host_url}` without it, and `{api_key}` the key of the trial's session.
    """

    agent: str | None = Field(
        default=None,
        description=(
            "Harness: one of Harbor's names, such as `terminus-2`, or `module:Class`, an agent of"
            " your own."
        ),
    )
    agent_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the harness, as Harbor calls them."
    )
    agent_env: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Variables of the harness, besides those that lead clients of OpenAI, Anthropic and"
            " Google to the policy (OPENAI_BASE_URL, OPENAI_API_KEY and so on)."
        ),
    )
    model: str = Field(
        default="openai/policy",
        description=(
            "Name of the model that the harness is told, with the provider whose API it speaks,"
            " such as `anthropic/policy`; the policy answers to any."
        ),
    )
    environment: str = Field(
        default=LOCAL,
        description=(
            "Where trials run: local, this project's sandbox; one of Harbor's names, such as"
            " `docker`; or `module:Class`."
        ),
    )
    environment_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the environment, as Harbor calls them."
    )
    reward_key: str = Field(
        default="reward",
        description="Name of the reward, where the verifier gives several.",
    )
    endpoint: Annotated[HarborEndpoint, Unless("agent.harbor.environment", LOCAL)] = Field(
        default_factory=HarborEndpoint
    )
    mounts: Annotated[Mounts, WhenKey("agent.harbor.environment", LOCAL)] = Field(
        default_factory=dict,
        description=(
            "Folders of this machine that the harness sees, read-only, by their names below /tmp,"
            " with their `bin` on its path: `{mini: ~/mini-swe-agent}`. The tests do not see them."
        ),
    )
    trials_dir: str | None = Field(
        default=None,
        description="Folder that keeps what Harbor writes of each trial; null: it is removed.",
    )
    start_attempts: Positive = Field(
        default=1,
        description=(
            "How often a trial is begun whose environment fails before the harness has asked the"
            " model anything."
        ),
    )
    max_running: Positive = Field(
        default=16, description="Maximum number of concurrent trials; further ones wait."
    )
    local: Annotated[ProgramLimits, WhenKey("agent.harbor.environment", LOCAL)] = Field(
        default_factory=ProgramLimits
    )
