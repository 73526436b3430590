"""The ``agent.endpoint`` section: limits of the endpoint for agents' clients."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jax_agent_rl.config.base import Positive, Section, WhenCommand, WhenModelHasVision


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint, in training and under `jax-agent-rl serve`."""

    request_timeout: float = Field(
        default=300.0, gt=0, description="Timeout of one request in seconds, queueing included."
    )
    max_body_bytes: Positive = Field(
        default=8_000_000,
        description="Maximum size of a request body; larger ones are answered with 413.",
    )
    max_concurrent_requests: Positive = Field(
        default=1024,
        description="Maximum number of concurrent requests; more are answered with 429.",
    )
    max_choices: Positive = Field(default=16, description="Maximum `n` of a request.")
    max_sessions: Positive = Field(
        default=4096, description="Maximum number of sessions kept; more are answered with 429."
    )
    max_session_tokens: Annotated[Positive, WhenCommand("serve")] = Field(
        default=4_000_000,
        description=(
            "Maximum number of ids that one session of `serve` records, every context counted in"
            " full; further requests are refused."
        ),
    )
    max_session_pixels: Annotated[Positive, WhenModelHasVision()] = Field(
        default=64_000_000,
        description=(
            "Maximum pixels of the images in one session, each image counted once; requests with"
            " more are refused."
        ),
    )
    session_ttl: Annotated[float, WhenCommand("serve")] = Field(
        default=3600.0, gt=0, description="Seconds after which `serve` forgets an idle session."
    )
