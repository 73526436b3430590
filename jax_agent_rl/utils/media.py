"""Images and videos in one normal form, whatever a tool returned.

An image is upright and RGB; a video is RGB frames of one size. Engines, the wire format and the count of ids all start
from these, so that they agree.
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
"""Formats of image files accepted over HTTP, as in OpenAI's API. Others (EPS, PDF) would start programs."""
MAX_PIXELS = 16_000_000
"""Limit of one image that came over HTTP."""
MAX_IMAGES = 64
"""Limit of images in one answer."""
MAX_TOTAL_PIXELS = 32_000_000
"""Limit of all images in one answer: a small file can hold many pixels of one colour."""
FRAMES_PER_SECOND = 2.0
"""Frame rate of videos: tools return frames without times, and Qwen's models were trained at this rate."""


def as_image(item: Any) -> Image:
    """Convert a PIL image, or uint8 [H, W, 3], to upright RGB, transparency on white.

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
    item = item.convert("RGBA")
    white = Image.new("RGBA", item.size, "white")
    return Image.alpha_composite(white, item).convert("RGB")


def read_images(texts: Sequence[str]) -> tuple[Image, ...]:
    """Read images from untrusted ``data:`` URLs or base64.

    Raises:
        ValueError: one cannot be read, or they exceed ``MAX_PIXELS`` each or ``MAX_TOTAL_PIXELS``; none is
            unpacked then.
    """
    if len(texts) > MAX_IMAGES:
        raise ValueError(f"{len(texts)} images are more than {MAX_IMAGES}")
    with _damage():
        opened = [_open_image(text) for text in texts]
    together = sum(image.width * image.height for image in opened)
    if together > MAX_TOTAL_PIXELS:
        raise ValueError(f"the images have {together} pixels together, more than {MAX_TOTAL_PIXELS}")
    with _damage():
        for image in opened:
            image.load()
    return tuple(map(as_image, opened))


def _open_image(text: str) -> Image:
    """Open an image without reading its pixels."""
    import base64
    import io

    from PIL import Image

    encoded = text.partition(",")[2] if text.startswith("data:") else text
    image = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    return image


@contextmanager
def _damage() -> Iterator[None]:
    """Turn whatever Pillow raises for damaged files into ValueError."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise ValueError(f"an image cannot be read: it is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from None


def as_frames(item: Any) -> np.ndarray:
    """Convert a video to uint8 [T, H, W, 3].

    Args:
        item: frames as :func:`as_image` takes them, all of one size, or an array [T, H, W, 3].

    Raises:
        ValueError: it is something else, or has no frames.
    """
    import numpy as np

    if not isinstance(item, Sequence | np.ndarray) or isinstance(item, str | bytes):
        raise ValueError(f"a video must be a sequence of frames, got {type(item).__name__}")
    frames = [np.asarray(as_image(frame)) for frame in item]
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) != 1:
        raise ValueError(f"a video must have frames, all of one size, got {len(frames)} of sizes {sizes}")
    return np.stack(frames)


def check_media(media: Mapping[str, Sequence[Any]]) -> None:
    """Check that every item of kinds ``image`` and ``video`` is one.

    Raises:
        ValueError: names the first that is not, and why.
    """
    for kind, items in media.items():
        for number, item in enumerate(items):
            try:
                as_frames(item) if kind == "video" else as_image(item)
            except ValueError as error:
                raise ValueError(f"{kind} {number + 1} of {len(items)}: {error}") from None
