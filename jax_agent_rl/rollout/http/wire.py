"""The wire protocol: JSON, one object per line, ids as numbers, floats exact (shortest form that reads back).

A request carries the protocol version and, after the handshake, the server's instance: a server
that was restarted has lost its weights, so its requests fail instead of sampling from the initial
ones. Free of heavy imports: the launcher uses it before anything is installed.

Images travel as PNG (lossless) in base64, a video as its frames. Both sides normalize them with
:mod:`jax_agent_rl.utils.media`, so that a remote engine sees the same pixels as one in the caller's process.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
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
from jax_agent_rl.generation import ID_BOUND, routed_from_json, routed_to_json
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, TokenChunk
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput, TokenScores
from jax_agent_rl.utils.media import as_frames, as_image

PROTOCOL_VERSION = 6
PROTOCOL_HEADER = "X-Rollout-Protocol"
INSTANCE_HEADER = "X-Rollout-Instance"
DIGEST_HEADER = "X-Content-SHA256"
HEARTBEAT_SECONDS = 5.0
"""A server that works on an answer sends an empty line at least this often; see
``RemoteBackend.silence_seconds``."""

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
    data = {
        f.name: getattr(output, f.name) for f in fields(output)
    }  # not asdict(), which copies every id
    routed = output.routed_experts
    return data | {"routed_experts": routed_to_json(asdict(routed) if routed else None)}


def decode_output(data: Mapping[str, Any]) -> TokenOutput:
    """Return the output that was encoded."""
    sequences = {name: tuple(data[name]) for name in _SEQUENCES}
    restored = {
        "stop_reason": StopReason(data["stop_reason"]),
        "routed_experts": routed_from_json(data["routed_experts"]),
    }
    return TokenOutput(**{**data, **sequences, **restored})


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    """Return a chunk as JSON."""
    final = encode_output(chunk.final) if chunk.final else None
    arrays = {
        "ids": chunk.token_ids,
        "log_probs": chunk.log_probs,
        "versions": chunk.policy_versions,
    }
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


MAX_PIXELS = 1 << 26
"""Maximum pixels of one image: more than any model reads, while a small file can claim any number.
"""
MAX_TOTAL_PIXELS = 1 << 27
"""Maximum pixels of all images and frames of a request."""
MAX_IMAGES = 4096
"""Maximum images and frames of a request."""


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """Return a request as JSON, media included.

    Raises:
        BackendError: an image or a video is not one.
    """
    data = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "multi_modal"}
    data["sampling"] = asdict(request.sampling)
    if not request.multi_modal:
        return data
    try:
        return data | {"multi_modal": encode_media(request.multi_modal)}
    except ValueError as error:
        raise BackendError(f"request {request.request_id!r}: {error}") from None


def decode_request(data: Mapping[str, Any]) -> GenerateRequest:
    """Return the request that was encoded, with PIL images and lists of them; the dataclasses check its values.

    Raises:
        BackendError: it is not a request, or an image is not PNG in base64, damaged, or too large.
    """
    try:
        raw: dict[str, Any] = dict(data["sampling"])
        raw |= {
            name: tuple(raw[name])
            for name in ("stop", "stop_token_ids")
            if isinstance(raw.get(name), list)
        }
        ids = tuple(data["prompt_ids"])
        if not all(type(i) is int for i in ids):
            raise TypeError("prompt_ids must be whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < ID_BOUND:
            raise ValueError(
                f"prompt_ids must be from 0 to {ID_BOUND - 1}, got {min(ids)} to {max(ids)}"
            )
        media = (
            {"multi_modal": decode_media(data["multi_modal"])} if data.get("multi_modal") else {}
        )
        return GenerateRequest(
            **{**data, **media, "prompt_ids": ids, "sampling": SamplingParams(**raw)}
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"not a generate request: {type(error).__name__}: {error}") from None


def encode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return images and videos by kind as JSON.

    Raises:
        ValueError: an item is not an image or a video.
    """
    return {
        kind: [
            [_png(frame) for frame in as_frames(item)] if kind == "video" else _png(item)
            for item in items
        ]
        for kind, items in media.items()
    }


def decode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return what :func:`encode_media` encoded, as PIL images and lists of them.

    Raises:
        ValueError: an image is not PNG in base64, damaged, or too large.
    """
    opened: list[Any] = []
    pixels = 0

    def open_image(text: Any) -> Any:
        nonlocal pixels
        image = _open_png(text)
        opened.append(image)
        pixels += image.width * image.height
        if len(opened) > MAX_IMAGES or pixels > MAX_TOTAL_PIXELS:
            raise ValueError(
                f"more than {MAX_IMAGES} images and frames, or {MAX_TOTAL_PIXELS} pixels, in one"
                " request"
            )
        return image

    media = {
        kind: tuple(
            [open_image(frame) for frame in item] if kind == "video" else open_image(item)
            for item in items
        )
        for kind, items in media.items()
    }
    for image in opened:  # only now that all sizes are known to be allowed
        try:
            image.load()
        except (OSError, SyntaxError) as error:
            raise ValueError(f"not a PNG image in base64: {error}") from None
    return media


def _png(item: Any) -> str:
    stream = io.BytesIO()
    as_image(item).save(stream, format="PNG", compress_level=1)
    return base64.b64encode(stream.getvalue()).decode()


def _open_png(text: Any) -> Any:
    """Return an image whose size is checked, and whose pixels are not decoded yet."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
    except (OSError, SyntaxError, TypeError, binascii.Error, Image.DecompressionBombError) as error:
        raise ValueError(f"not a PNG image in base64: {error}") from None
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} are more than {MAX_PIXELS} pixels")
    return image
