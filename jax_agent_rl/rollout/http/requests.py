"""Generate requests on the wire, media included.

Images travel as PNG (lossless) in base64, a video as its frames. Both sides normalize them with
:mod:`jax_agent_rl.utils.media`, so that a remote engine sees the same pixels as one in the caller's process.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.sampling_params import ID_BOUND
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.media import as_frames, as_image

MAX_PIXELS = 1 << 26
"""Maximum pixels of one image: more than any model reads, while a small file can claim any number."""
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
        raw |= {name: tuple(raw[name]) for name in ("stop", "stop_token_ids") if isinstance(raw.get(name), list)}
        ids = tuple(data["prompt_ids"])
        if not all(type(i) is int for i in ids):
            raise TypeError("prompt_ids must be whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < ID_BOUND:
            raise ValueError(f"prompt_ids must be from 0 to {ID_BOUND - 1}, got {min(ids)} to {max(ids)}")
        media = {"multi_modal": decode_media(data["multi_modal"])} if data.get("multi_modal") else {}
        return GenerateRequest(**{**data, **media, "prompt_ids": ids, "sampling": SamplingParams(**raw)})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BackendError(f"not a generate request: {type(error).__name__}: {error}") from None


def encode_media(media: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return images and videos by kind as JSON.

    Raises:
        ValueError: an item is not an image or a video.
    """
    return {
        kind: [[_png(frame) for frame in as_frames(item)] if kind == "video" else _png(item) for item in items]
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
            raise ValueError(f"more than {MAX_IMAGES} images and frames, or {MAX_TOTAL_PIXELS} pixels, in one request")
        return image

    media = {
        kind: tuple([open_image(frame) for frame in item] if kind == "video" else open_image(item) for item in items)
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
