"""The wire protocol: JSON, one object per line, with ids as numbers.

Floats are exact: each is written in the shortest form that reads back as the same number. A request
carries the protocol version and, after the handshake, the server's instance: a server that was
restarted has lost its weights, so its requests fail instead of sampling from the initial ones. Free
of heavy imports: the launcher uses it before anything is installed.

Images travel as PNG (lossless) in base64, a video as its frames. Both sides normalize them with
:mod:`jax_agent_rl.utils.media`, so that a remote engine sees the same pixels as one in the caller's
process.
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
from jax_agent_rl.rollout.protocol import (
    FILES,
    MESH,
    PULL,
    SHARDS,
    Capabilities,
    GenerateRequest,
    TokenChunk,
)
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason, TokenOutput, TokenScores
from jax_agent_rl.types.routed_experts import routed_from_json, routed_to_json
from jax_agent_rl.types.token_ids import ID_BOUND
from jax_agent_rl.utils.media import as_frames, png_bytes
from jax_agent_rl.utils.pull_tickets import OfferedParam, PullTicket

PROTOCOL_VERSION = 9
PROTOCOL_HEADER = "X-Rollout-Protocol"
INSTANCE_HEADER = "X-Rollout-Instance"
DIGEST_HEADER = "X-Content-Digest"
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
REMOTE_PAYLOADS = frozenset({FILES, SHARDS, MESH, PULL})

# What a server needs to be sent of an update in files.
NO_FILES = "none"
DELTAS = "deltas"
WHOLE_FILES = "files"


def line(message: Mapping[str, Any]) -> bytes:
    """Encode one message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: BaseException) -> dict[str, str]:
    """Return type and message; a subclass is sent as the nearest type the other side knows."""
    for error_type in type(error).__mro__:
        if error_type.__name__ in _ERRORS:
            return {"type": error_type.__name__, "message": str(error)}
    return {"type": "BackendError", "message": f"{type(error).__name__}: {error}"}


def decode_error(data: Mapping[str, Any]) -> Exception:
    """Return the error that was encoded."""
    error_type = _ERRORS.get(data["type"], BackendError)
    return error_type(data["message"])


def encode_output(output: TokenOutput) -> dict[str, Any]:
    """Return an output as JSON."""
    # Not asdict(), which copies every id.
    data = {field.name: getattr(output, field.name) for field in fields(output)}
    routed = None
    if output.routed_experts:
        routed = asdict(output.routed_experts)
    data["routed_experts"] = routed_to_json(routed)
    return data


def decode_output(data: Mapping[str, Any]) -> TokenOutput:
    """Return the output that was encoded."""
    arguments = dict(data)
    for name in _SEQUENCES:
        arguments[name] = tuple(data[name])
    arguments["stop_reason"] = StopReason(data["stop_reason"])
    arguments["routed_experts"] = routed_from_json(data["routed_experts"])
    return TokenOutput(**arguments)


def encode_chunk(chunk: TokenChunk) -> dict[str, Any]:
    """Return a chunk as JSON."""
    return {
        "ids": chunk.token_ids,
        "log_probs": chunk.log_probs,
        "versions": chunk.policy_versions,
        "constrained": chunk.constrained,
        "supports": chunk.supports,
        "final": encode_output(chunk.final) if chunk.final else None,
    }


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
    return TokenScores(
        log_probs=tuple(data["log_probs"]),
        top_ids=tuple(map(tuple, data["top_ids"])),
        top_log_probs=tuple(map(tuple, data["top_log_probs"])),
    )


def encode_capabilities(capabilities: Capabilities, *, has_folder: bool) -> dict[str, Any]:
    """Return the capabilities of a remote backend.

    It takes weights in files, or from devices of its client's; or its process has them already.

    Args:
        has_folder: the server also takes the address of a folder.
    """
    payloads = capabilities.weight_payloads & REMOTE_PAYLOADS
    if not has_folder:
        payloads -= {SHARDS}
    data = asdict(capabilities)
    data["multi_modal"] = sorted(capabilities.multi_modal)
    data["pause_modes"] = sorted(capabilities.pause_modes)
    data["weight_payloads"] = sorted(payloads)
    return data


def encode_ticket(ticket: PullTicket) -> dict[str, Any]:
    """Return a ticket as JSON, without the addresses of both machines."""
    data = asdict(ticket)
    del data["host"]
    del data["interface"]
    return data


def decode_ticket(data: Mapping[str, Any], *, host: str, interface: str) -> PullTicket:
    """Return the ticket that was encoded.

    Args:
        host: the machine that sent it.
        interface: the address of this machine to which it was sent.
    """
    params = {}
    for name, param in data["params"].items():
        params[name] = OfferedParam(
            shape=tuple(param["shape"]),
            dtype=param["dtype"],
            chunk=tuple(param["chunk"]),
            digests=param["digests"],
        )
    return PullTicket(
        host=host,
        interface=interface,
        port=data["port"],
        number=data["number"],
        jaxlib=data["jaxlib"],
        params=params,
    )


def decode_capabilities(data: Mapping[str, Any]) -> Capabilities:
    """Return the capabilities that were encoded."""
    arguments = dict(data)
    arguments["multi_modal"] = frozenset(data["multi_modal"])
    arguments["pause_modes"] = frozenset(PauseMode(mode) for mode in data["pause_modes"])
    arguments["weight_payloads"] = frozenset(data["weight_payloads"])
    return Capabilities(**arguments)


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
    data = {field.name: getattr(request, field.name) for field in fields(request)}
    data["sampling"] = asdict(request.sampling)
    del data["multi_modal"]
    if request.multi_modal:
        try:
            data["multi_modal"] = encode_media(request.multi_modal)
        except ValueError as error:
            raise BackendError(f"request {request.request_id!r}: {error}") from None
    return data


def decode_request(data: Mapping[str, Any]) -> GenerateRequest:
    """Return the request that was encoded, with PIL images and, for videos, lists of them.

    The dataclasses check its values.

    Raises:
        BackendError: it is not a request, or an image is not PNG in base64, damaged, or too large.
    """
    try:
        sampling: dict[str, Any] = dict(data["sampling"])
        for name in ("stop", "stop_token_ids"):
            if isinstance(sampling.get(name), list):
                sampling[name] = tuple(sampling[name])

        prompt_ids = tuple(data["prompt_ids"])
        if not all(type(token_id) is int for token_id in prompt_ids):
            raise TypeError("prompt_ids must be whole numbers")
        if prompt_ids:
            lowest = min(prompt_ids)
            highest = max(prompt_ids)
            if lowest < 0 or highest >= ID_BOUND:
                raise ValueError(
                    f"prompt_ids must be from 0 to {ID_BOUND - 1}, got {lowest} to {highest}"
                )

        arguments = dict(data)
        arguments["prompt_ids"] = prompt_ids
        if data.get("multi_modal"):
            arguments["multi_modal"] = decode_media(data["multi_modal"])
        arguments["sampling"] = SamplingParams(**sampling)
        return GenerateRequest(**arguments)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"not a generate request: {type(error).__name__}: {error}") from None


def encode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return images and videos by kind as JSON.

    Raises:
        ValueError: an item is not an image or a video.
    """
    encoded: dict[str, list[Any]] = {}
    for kind, items in media.items():
        encoded[kind] = []
        for item in items:
            if kind == "video":
                encoded[kind].append([_png(frame) for frame in as_frames(item)])
            else:
                encoded[kind].append(_png(item))
    return encoded


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

    decoded: dict[str, tuple[Any, ...]] = {}
    for kind, items in media.items():
        opened_items: list[Any] = []
        for item in items:
            if kind == "video":
                opened_items.append([open_image(frame) for frame in item])
            else:
                opened_items.append(open_image(item))
        decoded[kind] = tuple(opened_items)

    # Decode the pixels only now that all sizes are known to be allowed.
    for image in opened:
        try:
            image.load()
        except (OSError, SyntaxError) as error:
            raise ValueError(f"not a PNG image in base64: {error}") from None
    return decoded


def _png(item: Any) -> str:
    return base64.b64encode(png_bytes(item)).decode()


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
