"""What clients ask of a rollout server, one schema for each route, checked before anything is done.

``POST /v1/generate`` has the fields of :class:`~jax_agent_rl.rollout.protocol.GenerateRequest`,
which check themselves.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jax_agent_rl.rollout.http.weight_files import MAX_FILES
from jax_agent_rl.rollout.http.wire import REMOTE_PAYLOADS
from jax_agent_rl.types import PauseMode
from jax_agent_rl.types.token_ids import ID_BOUND
from jax_agent_rl.utils.network import LAST_PORT

MAX_PATH = 4096
MAX_ALTERNATIVES = 1024
"""Maximum likeliest ids that a client may ask for at each position."""
Path = Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
Digest = Annotated[str, Field(max_length=128)]
Digests = Annotated[
    dict[Annotated[str, Field(max_length=256)], Digest], Field(max_length=MAX_FILES)
]


_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=ID_BOUND)]], Field(fail_fast=True)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class NoArguments(_Request):
    """``resume``, ``reset_prefix_cache``, ``sleep``, ``wake``."""


class ScoreRequest(_Request):
    """``score``."""

    token_ids: Annotated[_Ids, Field(min_length=2)]
    start: Annotated[int, Field(ge=1, lt=ID_BOUND)]
    top_k: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]

    @model_validator(mode="after")
    def _starts_within(self) -> ScoreRequest:
        if self.start >= len(self.token_ids):
            raise ValueError(f"start={self.start} is beyond the {len(self.token_ids)} ids")
        return self


class AbortRequest(_Request):
    """``abort``."""

    request_id: Annotated[str, Field(max_length=1024)]


class PauseRequest(_Request):
    """``pause``."""

    mode: Literal[tuple(mode.value for mode in PauseMode)]  # pyright: ignore[reportInvalidTypeForm]


class _File(_Request):
    path: Path
    size: Annotated[int, Field(ge=0, lt=2**63)]


class NeededFilesRequest(_Request):
    """``needed_files``: what a client could avoid to upload.

    Attributes:
        files: the files of the update, if the server may see them.
        bases: digests of the files that the client has deltas to.
    """

    files: Annotated[list[_File], Field(max_length=MAX_FILES, fail_fast=True)]
    bases: Annotated[list[Digest], Field(max_length=MAX_FILES, fail_fast=True)]


class _Probe(_Request):
    ids: Annotated[list[_Ids], Field(max_length=1024, fail_fast=True)]
    log_probs: Annotated[
        list[Annotated[list[float], Field(fail_fast=True)]], Field(max_length=1024, fail_fast=True)
    ]


_Sizes = Annotated[list[Annotated[int, Field(ge=0, lt=2**53)]], Field(max_length=16)]


class _OfferedParam(_Request):
    shape: _Sizes
    dtype: Annotated[str, Field(max_length=32)]
    chunk: _Sizes
    digests: Digests


class _Ticket(_Request):
    """A :class:`~jax_agent_rl.utils.pull_tickets.PullTicket` for a pull from the client."""

    port: Annotated[int, Field(ge=1, le=LAST_PORT)]
    number: Annotated[int, Field(ge=0, lt=2**63)]
    jaxlib: Annotated[str, Field(max_length=64)]
    params: Annotated[
        dict[Annotated[str, Field(max_length=256)], _OfferedParam], Field(max_length=MAX_FILES)
    ]


class UpdateRequest(_Request):
    """``update_weights``: where the weights are.

    They are in ``paths``, a ``folder`` or an ``upload``, or pulled with a ``ticket``.

    Attributes:
        keep: whether the files of the upload are kept for deltas.
    """

    version: Annotated[int, Field(ge=0, lt=2**53)]
    kind: Literal[tuple(sorted(REMOTE_PAYLOADS))]  # pyright: ignore[reportInvalidTypeForm]
    partial: bool = False
    digests: Digests = {}
    paths: Annotated[list[Path], Field(max_length=MAX_FILES, fail_fast=True)] | None = None
    folder: Path | None = None
    upload: Digest | None = None
    keep: bool = False
    ticket: _Ticket | None = None
    probe: _Probe | None = None
