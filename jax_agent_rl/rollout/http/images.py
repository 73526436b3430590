"""Images and videos on the wire: PNG, which loses nothing, in base64; a video is its frames.

Both sides go through the one form of :mod:`jax_agent_rl.utils.media`, so that an engine sees the same pixels from
afar as it would in the caller's own process.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.utils.media import as_frames, as_image

MAX_PIXELS = 1 << 26
"""Of one image: 64 million are more than any model looks at, and a small file can claim any number."""
MAX_PIXELS_TOGETHER = 1 << 27
"""Of all images and frames of a request."""
MAX_PICTURES = 4096
"""Images and frames of a request."""


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    """A request as JSON, pictures included.

    Raises:
        BackendError: an image or a video is none.
    """
    data = wire.encode_request(request)
    if not request.multi_modal:
        return data
    try:
        return data | {"multi_modal": encode_media(request.multi_modal)}
    except ValueError as error:
        raise BackendError(f"request {request.request_id!r}: {error}") from None


def decode_request(data: Mapping[str, Any]) -> GenerateRequest:
    """What :func:`encode_request` was given, with PIL images and lists of them.

    Raises:
        BackendError: it is not a request, or a picture is not PNG in base64, damaged, or too large.
    """
    if not data.get("multi_modal"):
        return wire.decode_request(data)
    try:
        media = decode_media(data["multi_modal"])
    except (AttributeError, TypeError, ValueError) as error:
        raise BackendError(f"not a generate request: {type(error).__name__}: {error}") from None
    return wire.decode_request({**data, "multi_modal": media})


def encode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Images and videos by kind as JSON.

    Raises:
        ValueError: one is none.
    """
    return {
        kind: [[_png(frame) for frame in as_frames(item)] if kind == "video" else _png(item) for item in items]
        for kind, items in media.items()
    }


def decode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """What :func:`encode_media` was given, with PIL images and lists of them.

    Raises:
        ValueError: a picture is not PNG in base64, damaged, or too large.
    """
    opened: list[Any] = []
    pixels = 0

    def look(text: Any) -> Any:
        nonlocal pixels
        picture = _head(text)
        opened.append(picture)
        pixels += picture.width * picture.height
        if len(opened) > MAX_PICTURES or pixels > MAX_PIXELS_TOGETHER:
            raise ValueError(
                f"more than {MAX_PICTURES} images and frames, or {MAX_PIXELS_TOGETHER} pixels, in one request"
            )
        return picture

    media = {
        kind: tuple([look(frame) for frame in item] if kind == "video" else look(item) for item in items)
        for kind, items in media.items()
    }
    for picture in opened:  # now that all heads were seen
        _unpack(picture)
    return media


def _png(item: Any) -> str:
    stream = io.BytesIO()
    as_image(item).save(stream, format="PNG", compress_level=1)
    return base64.b64encode(stream.getvalue()).decode()


def _head(text: Any) -> Any:
    """An image whose size is known and whose pixels were not looked at."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
    except (OSError, SyntaxError, TypeError, binascii.Error, Image.DecompressionBombError) as error:
        raise ValueError(f"not a PNG image in base64: {error}") from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} x {picture.height} are more than {MAX_PIXELS} pixels")
    return picture


def _unpack(picture: Any) -> None:
    try:
        picture.load()
    except (OSError, SyntaxError) as error:
        raise ValueError(f"not a PNG image in base64: {error}") from None
