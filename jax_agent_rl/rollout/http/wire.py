"""The wire protocol: JSON, one object per line, ids as numbers, floats exact (shortest form that reads back).

A request carries the protocol version and, after the handshake, the server's instance: a server that was restarted
has lost its weights, so its requests fail instead of sampling from the initial ones.
Free of heavy imports: the launcher uses it before anything is installed. Requests are in ``requests``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    PromptTooLongError,
    TokenDriftError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.protocol import Capabilities, TokenChunk
from jax_agent_rl.routed_experts import from_json, to_json
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, TokenScores

PROTOCOL_VERSION = 6
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
_SEQUENCES = ("token_ids", "log_probs", "policy_versions", "constrained", "supports")
REMOTE_PAYLOADS = frozenset({"safetensors", "tensorstore", "mesh"})


def line(message: Mapping[str, Any]) -> bytes:
    """Encode one message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: BaseException) -> dict[str, str]:
    """Return type and message; a subclass is sent as the nearest type the other side knows."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            return {"type": kind.__name__, "message": str(error)}
    return {"type": "BackendError", "message": f"{type(error).__name__}: {error}"}


def decode_error(data: Mapping[str, Any]) -> Exception:
    """Return the error that was encoded."""
    return _ERRORS.get(data["type"], BackendError)(data["message"])


def encode_output(output: TokenOutput) -> dict[str, Any]:
    """Return an output as JSON."""
    data = {f.name: getattr(output, f.name) for f in fields(output)}  # not asdict(), which copies every id
    routed = output.routed_experts
    return data | {"routed_experts": to_json(asdict(routed) if routed else None)}


def decode_output(data: Mapping[str, Any]) -> TokenOutput:
    """Return the output that was encoded."""
    sequences = {name: tuple(data[name]) for name in _SEQUENCES}
    restored = {
        "stop_reason": StopReason(data["stop_reason"]),
        "routed_experts": from_json(data["routed_experts"]),
    }
    return TokenOutput(**{**data, **sequences, **restored})


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    """Return a chunk as JSON."""
    final = encode_output(chunk.final) if chunk.final else None
    arrays = {"ids": chunk.token_ids, "log_probs": chunk.log_probs, "versions": chunk.policy_versions}
    return arrays | {"constrained": chunk.constrained, "supports": chunk.supports, "final": final}


def decode_chunk(data: Mapping[str, Any]) -> TokenChunk:
    """Return the chunk that was encoded."""
    return TokenChunk(
        token_ids=tuple(data["ids"]),
        log_probs=tuple(data["log_probs"]),
        policy_versions=tuple(data["versions"]),
        constrained=tuple(data["constrained"]),
        supports=tuple(data["supports"]),
        final=decode_output(data["final"]) if data["final"] else None,
    )


def decode_scores(data: Mapping[str, Any]) -> TokenScores:
    """Return the scores of ids that were encoded."""
    top = {name: tuple(map(tuple, data[name])) for name in ("top_ids", "top_log_probs")}
    return TokenScores(log_probs=tuple(data["log_probs"]), **top)


def encode_capabilities(capabilities: Capabilities, *, has_folder: bool) -> dict[str, Any]:
    """Return the capabilities of a remote backend, which takes weights as files only, or has them itself.

    Args:
        capabilities: of the backend.
        has_folder: the server also takes the address of a folder.
    """
    data = asdict(capabilities)
    data["multi_modal"] = sorted(capabilities.multi_modal)
    data["pause_modes"] = sorted(capabilities.pause_modes)
    data["weight_payloads"] = sorted(
        capabilities.weight_payloads & REMOTE_PAYLOADS - (set() if has_folder else {"tensorstore"})
    )
    return data


def decode_capabilities(data: Mapping[str, Any]) -> Capabilities:
    """Return the capabilities that were encoded."""
    sets = {
        "multi_modal": frozenset(data["multi_modal"]),
        "pause_modes": frozenset(PauseMode(mode) for mode in data["pause_modes"]),
        "weight_payloads": frozenset(data["weight_payloads"]),
    }
    return Capabilities(**{**data, **sets})
