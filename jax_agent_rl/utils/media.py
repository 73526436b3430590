"""Images and videos in the one form that everything here agrees on, whatever a tool made of them.

An image is an upright RGB picture; a video is RGB frames of one size. Engines, the wire and the count of ids all start
from these, so that none of them sees a picture that another does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

KINDS = ("image", "video")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of image files that come over HTTP, as OpenAI's API takes them. Others (EPS, PDF) run programs to be read."""
MOST_PIXELS = 16_000_000
"""Of an image that came over HTTP."""
MOST_PICTURES = 64
"""That come with one answer,"""
MOST_PIXELS_TOGETHER = 32_000_000
"""and of all of them: a small file can hold many pixels of one colour."""
FRAMES_PER_SECOND = 2.0
"""At which videos are shown: tools give frames without times, and this is what Qwen's models were trained on."""


def as_picture(item: Any) -> Image:
    """An image upright, in RGB, what is transparent on white.

    Args:
        item: a PIL image, or uint8 [H, W, 3].

    Raises:
        ValueError: it is neither, or has no pixels.
    """
    import numpy as np
    from PIL import Image, ImageOps

    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] != 3:
            raise ValueError(f"an image must be uint8 [height, width, 3], got {item.dtype} {list(item.shape)}")
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
    picture = item.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def read_pictures(texts: Sequence[str]) -> tuple[Image, ...]:
    """Image files from ``data:`` URLs, or from base64 alone; their sender need not be trusted.

    Raises:
        ValueError: one is no image that can be read, or they have more than ``MOST_PIXELS`` pixels each or
            ``MOST_PIXELS_TOGETHER``; none is unpacked then.
    """
    if len(texts) > MOST_PICTURES:
        raise ValueError(f"{len(texts)} images are more than {MOST_PICTURES}")
    with _damage():
        opened = [_open_picture(text) for text in texts]
    together = sum(image.width * image.height for image in opened)
    if together > MOST_PIXELS_TOGETHER:
        raise ValueError(f"the images have {together} pixels together, more than {MOST_PIXELS_TOGETHER}")
    with _damage():
        for image in opened:
            image.load()
    return tuple(map(as_picture, opened))


def _open_picture(text: str) -> Image:
    """The image with its head read, and not its pixels."""
    import base64
    import io

    from PIL import Image

    encoded = text.partition(",")[2] if text.startswith("data:") else text
    image = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MOST_PIXELS}")
    return image


@contextmanager
def _damage() -> Iterator[None]:
    """Whatever Pillow's readers raise for damaged files, as one error."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise ValueError(f"an image cannot be read: it is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from None


def as_frames(item: Any) -> np.ndarray:
    """A video as uint8 [T, H, W, 3].

    Args:
        item: frames as :func:`as_picture` takes them, all of one size, or an array [T, H, W, 3].

    Raises:
        ValueError: it is something else, or has no frames.
    """
    import numpy as np

    if not isinstance(item, Sequence | np.ndarray) or isinstance(item, str | bytes):
        raise ValueError(f"a video must be a sequence of frames, got {type(item).__name__}")
    frames = [np.asarray(as_picture(frame)) for frame in item]
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) != 1:
        raise ValueError(f"a video must have frames, all of one size, got {len(frames)} of sizes {sizes}")
    return np.stack(frames)


def check_media(media: Mapping[str, Sequence[Any]]) -> None:
    """Whether every item of kinds ``image`` and ``video`` is one.

    Raises:
        ValueError: one is not; says which and why.
    """
    for kind, items in media.items():
        for number, item in enumerate(items):
            try:
                as_frames(item) if kind == "video" else as_picture(item)
            except ValueError as error:
                raise ValueError(f"{kind} {number + 1} of {len(items)}: {error}") from None
