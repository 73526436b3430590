"""The protocol on the wire: JSON, one object a line, ids as numbers, floats exact (shortest form that reads back).

A request carries the protocol version and, after the handshake, the server's instance: a server that was restarted
has forgotten its weights and is refused instead of served from silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    PromptTooLongError,
    TokenDriftError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, TokenChunk
from jax_agent_rl.sampling_params import MOST_IDS
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput

PROTOCOL_VERSION = 1
PROTOCOL_HEADER = "X-Rollout-Protocol"
INSTANCE_HEADER = "X-Rollout-Instance"
DIGEST_HEADER = "X-Content-SHA256"
HEARTBEAT_SECONDS = 5.0
"""A server that works on an answer sends an empty line at least this often; see ``RemoteBackend.silence_seconds``."""

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        PromptTooLongError,
        BackendError,
        EngineDiedError,
        BackendClosedError,
        TokenDriftError,
        WeightUpdateError,
        NotImplementedError,
    )
}
REMOTE_PAYLOADS = frozenset({"safetensors", "tensorstore", "mesh"})
T = TypeVar("T")


def line(message: Mapping[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: BaseException) -> dict[str, str]:
    """Type and message; a subclass is sent as the nearest type the other side knows."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            return {"type": kind.__name__, "message": str(error)}
    return {"type": "BackendError", "message": f"{type(error).__name__}: {error}"}


def decode_error(data: Mapping[str, Any]) -> Exception:
    return _ERRORS.get(data["type"], BackendError)(data["message"])


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Everything but pictures, which :mod:`~jax_agent_rl.rollout.http.images` adds."""
    data = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "multi_modal"}
    return data | {"sampling": asdict(request.sampling)}


def decode_request(data: Mapping[str, Any]) -> GenerateRequest:
    """Checks names and the types of ids; the dataclasses check the rest.

    Raises:
        BackendError: it is not a request.
    """
    try:
        raw: dict[str, Any] = dict(data["sampling"])
        raw |= {name: tuple(raw[name]) for name in ("stop", "stop_token_ids") if isinstance(raw.get(name), list)}
        ids = tuple(data["prompt_ids"])
        if not all(type(i) is int for i in ids):
            raise TypeError("prompt_ids must be whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < MOST_IDS:
            raise ValueError(f"prompt_ids must be from 0 to {MOST_IDS - 1}, got {min(ids)} to {max(ids)}")
        return GenerateRequest(**{**data, "prompt_ids": ids, "sampling": SamplingParams(**raw)})
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError(f"not a generate request: {type(error).__name__}: {error}") from None


def encode_output(output: TokenOutput) -> dict[str, Any]:
    return asdict(output)


def decode_output(data: Mapping[str, Any]) -> TokenOutput:
    sequences = {name: tuple(data[name]) for name in ("token_ids", "log_probs", "policy_versions")}
    return TokenOutput(**{**data, **sequences, "stop_reason": StopReason(data["stop_reason"])})


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    final = encode_output(chunk.final) if chunk.final else None
    return {"ids": chunk.token_ids, "log_probs": chunk.log_probs, "versions": chunk.policy_versions, "final": final}


def decode_chunk(data: Mapping[str, Any]) -> TokenChunk:
    return TokenChunk(
        token_ids=tuple(data["ids"]),
        log_probs=tuple(data["log_probs"]),
        policy_versions=tuple(data["versions"]),
        final=decode_output(data["final"]) if data["final"] else None,
    )


def encode_capabilities(capabilities: Capabilities, *, has_folder: bool) -> dict[str, Any]:
    """What holds from afar: weights only as files, or where the server has them itself.

    Args:
        has_folder: the server also takes what is in a folder.
    """
    data = asdict(capabilities)
    data["multi_modal"] = sorted(capabilities.multi_modal)
    data["pause_modes"] = sorted(capabilities.pause_modes)
    data["weight_payloads"] = sorted(
        capabilities.weight_payloads & REMOTE_PAYLOADS - (set() if has_folder else {"tensorstore"})
    )
    return data


def decode_capabilities(data: Mapping[str, Any]) -> Capabilities:
    sets = {
        "multi_modal": frozenset(data["multi_modal"]),
        "pause_modes": frozenset(PauseMode(mode) for mode in data["pause_modes"]),
        "weight_payloads": frozenset(data["weight_payloads"]),
    }
    return Capabilities(**{**data, **sets})


def decode_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass of numbers, texts and booleans (``Health``, ``BackendMetrics``)."""
    return kind(**data)
