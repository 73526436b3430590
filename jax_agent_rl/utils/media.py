"""Images and videos in one normal form, whatever a tool returned, a client sent or a dataset holds.

An image is upright and RGB; a video is RGB frames of one size. Engines, the wire format and the
count of ids all start from these, so that they agree.

A message shows them as parts of its ``content``, in the notation of OpenAI or of Qwen
(:func:`media_source`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

KINDS = ("image", "video")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of image files accepted over HTTP, as in OpenAI's API.

To read others (EPS, PDF), Pillow would start programs.
"""
MAX_PIXELS = 16_000_000
"""Limit of one image that came over HTTP."""
MAX_IMAGES = 64
"""Limit of images in one answer."""
MAX_TOTAL_PIXELS = 32_000_000
"""Limit of all images in one answer: a small file can hold many pixels of one colour."""
MAX_FRAMES = 768
"""Limit of frames of one video in a prompt, as in Qwen's processor."""
MAX_VIDEO_PIXELS = 200_000_000
"""Limit of all frames of one video in a prompt: 600 megabytes."""
VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,gif"
"""FFmpeg's names of the containers that are read."""
FRAMES_PER_SECOND = 2.0
"""Frame rate of videos.

Tools return frames without times, and Qwen's models were trained at this rate.
"""


def as_image(item: Any) -> Image:
    """Convert a PIL image, or uint8 [H, W, 3], to upright RGB, transparency on white.

    Raises:
        ValueError: it is neither, or has no pixels.
    """
    import numpy as np
    from PIL import Image, ImageOps

    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] != 3:
            raise ValueError(
                f"an image must be uint8 [height, width, 3], got {item.dtype} {list(item.shape)}"
            )
        item = Image.fromarray(item)
    if not isinstance(item, Image.Image):
        raise ValueError(f"an image must be a PIL image or an array, got {type(item).__name__}")
    if not item.width or not item.height:
        raise ValueError(f"an image must have pixels, got {item.width} x {item.height}")

    item = ImageOps.exif_transpose(item)
    if item.mode == "RGB":
        return item
    if not item.has_transparency_data:
        return item.convert("RGB")
    item = item.convert("RGBA")
    white = Image.new("RGBA", item.size, "white")
    return Image.alpha_composite(white, item).convert("RGB")


def png_bytes(item: Any) -> bytes:
    """Return an image as a PNG file, which loses nothing.

    Args:
        item: as :func:`as_image` takes it.

    Raises:
        ValueError: it is not an image.
    """
    import io

    stream = io.BytesIO()
    as_image(item).save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def media_source(part: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return kind and source of a content part that shows an image or a video.

    It is None for any other part.

    >>> media_source({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}})
    ('image', 'data:image/png;base64,iVBO')
    >>> media_source({"type": "input_image", "image_url": "data:image/png;base64,iVBO"})
    ('image', 'data:image/png;base64,iVBO')
    >>> media_source({"type": "video", "video": ["1.png", "2.png"]})
    ('video', ['1.png', '2.png'])
    >>> media_source({"type": "text", "text": "hi"}) is None
    True
    """
    kind, _, _ = str(part.get("type")).removeprefix("input_").partition("_")
    if kind not in KINDS:
        return None
    source = part.get(kind)
    if source is None:
        source = part.get(f"{kind}_url")
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    return kind, source


def text_content(message: Mapping[str, Any]) -> str:
    """Return the text of a message without what it shows."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return content
    return "".join(part["text"] for part in content if "text" in part)


def text_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as text, with the kinds of what it shows under ``media``."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    kinds = [part["type"] for part in content if part["type"] in KINDS]
    return {**message, "content": text_content(message), "media": kinds}


def without_sources(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose parts say that they show something, but not what.

    A chat template takes such messages.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] in KINDS:
            part = {"type": part["type"]}
        parts.append(part)
    return {**message, "content": parts}


def read_media(messages: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Read what the parts of messages show, by kind, in order.

    Parts are ``{"type": kind, kind: source}``; a source is bytes, a ``data:`` URL or a path, or for
    videos a list of such frames.

    Raises:
        ValueError: an item cannot be read or is too large; names it.
    """
    media: dict[str, tuple[Any, ...]] = {}
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part["type"]
            if kind == "image":
                item: Any = _read_image(part[kind])
            elif kind == "video":
                item = _read_video(part[kind])
            else:
                continue
            media[kind] = (*media.get(kind, ()), item)
    return media


def data_url_bytes(url: str) -> bytes:
    """Return what a ``data:`` URL holds, or base64 without the URL's head.

    Raises:
        ValueError: it is not base64.
    """
    import base64

    encoded = url
    if url.startswith("data:"):
        _, _, encoded = url.partition(",")
    return base64.b64decode(encoded, validate=True)


def data_url(source: str | bytes) -> str:
    """Return an image's file as a ``data:`` URL.

    Args:
        source: as in :func:`read_media`.

    Raises:
        ValueError: it is not an image.
    """
    import base64

    if isinstance(source, str) and source.startswith("data:"):
        return source
    with _damage_as_value_error():
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        mime_type = _open_image(content).get_format_mimetype()
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"


def _read_image(source: str | bytes) -> Image:
    if isinstance(source, bytes) or source.startswith("data:"):
        return read_images([source])[0]
    try:
        return read_images([Path(source).read_bytes()])[0]
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def _read_video(source: Sequence[str | bytes] | str | bytes) -> np.ndarray:
    # One at a time, so that a video beyond the limits is not decoded to its end.
    if isinstance(source, str | bytes):
        decoded: Iterable[Image] = _decode_video(source)
    else:
        decoded = map(_read_image, source)

    frames = []
    num_pixels = 0
    for frame in decoded:
        frames.append(frame)
        num_pixels += frame.width * frame.height
        if num_pixels > MAX_VIDEO_PIXELS or len(frames) > MAX_FRAMES:
            raise ValueError(
                f"a video has more than {MAX_FRAMES} frames or {MAX_VIDEO_PIXELS} pixels; shorten"
                " or scale it down"
            )
    return as_frames(frames)


def read_images(
    files: Sequence[str | bytes], *, max_total_pixels: int = MAX_TOTAL_PIXELS
) -> tuple[Image, ...]:
    """Read images from untrusted files: their bytes, ``data:`` URLs or base64.

    Raises:
        ValueError: one cannot be read, or they exceed ``MAX_PIXELS`` each or ``max_total_pixels``;
            none is unpacked then.
    """
    if len(files) > MAX_IMAGES:
        raise ValueError(f"{len(files)} images are more than {MAX_IMAGES}")
    with _damage_as_value_error():
        images = [_open_image(file) for file in files]

    total_pixels = sum(image.width * image.height for image in images)
    if total_pixels > max_total_pixels:
        raise ValueError(
            f"the images have {total_pixels} pixels together, more than {max_total_pixels}"
        )
    with _damage_as_value_error():
        for image in images:
            image.load()
    return tuple(map(as_image, images))


def _open_image(file: str | bytes) -> ImageFile:
    """Open an image without reading its pixels."""
    import io

    from PIL import Image

    if isinstance(file, str):
        file = data_url_bytes(file)
    image = Image.open(io.BytesIO(file), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    return image


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    """Turn whatever Pillow raises for damaged files into ValueError."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise ValueError(f"an image cannot be read: it is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from None


def _decode_video(source: str | bytes) -> Iterator[Image]:
    """Yield the frames of a video file, :data:`FRAMES_PER_SECOND`."""
    import io

    import av
    import av.error

    if isinstance(source, bytes):
        content = source
    elif source.startswith("data:"):
        content = data_url_bytes(source)
    else:
        content = Path(source).read_bytes()

    next_time = 0.0
    try:
        # By its bytes, and no playlists: FFmpeg would fetch what a path or a playlist names, from
        # anywhere.
        with av.open(io.BytesIO(content), "r", options={"format_whitelist": VIDEO_FORMATS}) as file:
            for frame in file.decode(video=0):
                if frame.time is None or frame.time >= next_time:
                    yield frame.to_image()
                    next_time = (frame.time or next_time) + 1 / FRAMES_PER_SECOND
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"a video cannot be read: {error}") from None


def as_frames(item: Any) -> np.ndarray:
    """Convert a video to uint8 [T, H, W, 3].

    Args:
        item: an array of that shape, or a sequence of frames of one size, each as
            :func:`as_image` takes them.

    Raises:
        ValueError: it is something else, or has no frames.
    """
    import numpy as np

    if not isinstance(item, Sequence | np.ndarray) or isinstance(item, str | bytes):
        raise ValueError(f"a video must be a sequence of frames, got {type(item).__name__}")
    frames = [np.asarray(as_image(frame)) for frame in item]
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) != 1:
        raise ValueError(
            f"a video must have frames, all of one size, got {len(frames)} of sizes {sizes}"
        )
    return np.stack(frames)


def check_media(media: Mapping[str, Sequence[Any]]) -> None:
    """Check that every item of kinds ``image`` and ``video`` is one.

    Raises:
        ValueError: names the first that is not, and why.
    """
    for kind, items in media.items():
        for number, item in enumerate(items):
            try:
                if kind == "video":
                    as_frames(item)
                else:
                    as_image(item)
            except ValueError as error:
                raise ValueError(f"{kind} {number + 1} of {len(items)}: {error}") from None
