"""Images in the messages of agents' frameworks: encoded in every request, decoded once in a session.

::

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}    as a framework sends it
    {"type": "image", "image": EncodedImage}                                  in a plain message, compared by its bytes
    {"type": "image"}                                                         for the chat template
    {"image": (PIL image, …)}                                                 for engine and learner
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import TemplateError
from jax_agent_rl.utils.media import MAX_TOTAL_PIXELS, read_images, text_message, without_sources

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as it was sent.

    Attributes:
        url: a ``data:`` URL.
        digest: of the URL; equal for the same file.
    """

    url: str = field(repr=False)
    digest: str

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> EncodedImage:
        """Return the image of an ``image_url`` part.

        Raises:
            ValueError: it is not in the request itself, or to be shown in less detail than the model reads.
        """
        shown = part.get("image_url")
        image: Mapping[str, Any] = shown if isinstance(shown, Mapping) else {}
        url = image.get("url")
        if not isinstance(url, str) or not url.startswith("data:image/"):
            raise ValueError(
                f"an image must be in the request, as a URL data:image/…;base64,…; got {url!r:.80}, and nothing is "
                "fetched from other addresses"
            )
        if (detail := image.get("detail")) not in (None, "auto", "high"):
            raise ValueError(f"an image's detail={detail!r} is not supported; model.max_pixels limits its size")
        return cls(url, hashlib.blake2b(url.encode(), digest_size=16).hexdigest())


class SessionImages:
    """The decoded images of one session.

    Args:
        max_pixels: maximum pixels of all of them, ``agent.endpoint.max_session_pixels``.
    """

    def __init__(self, *, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._decoded: dict[str, Image] = {}

    def read(self, messages: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Image, ...]]:
        """Return the images of plain messages, by kind and in order.

        Raises:
            TemplateError: one cannot be read, or they are too many or too large; none is decoded then.
        """
        images = [part["image"] for message in messages for part in _image_parts(message)]
        new = {image.digest: image.url for image in images if image.digest not in self._decoded}
        left = self._max_pixels - sum(image.width * image.height for image in self._decoded.values())
        try:
            decoded = read_images(list(new.values()), max_total_pixels=min(left, MAX_TOTAL_PIXELS))
        except ValueError as error:
            limit = f"agent.endpoint.max_session_pixels={self._max_pixels}"
            raise TemplateError(f"{error} ({limit}, of which {left} are left)") from None
        self._decoded |= zip(new, decoded, strict=True)
        return {"image": tuple(self._decoded[image.digest] for image in images)} if images else {}


def for_template(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return plain messages as the codec takes them; images of a tool result stand before its text."""
    return [text_message(m) if m["role"] == "tool" else without_sources(m) for m in messages]


def without_data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plain message that can still be compared, without the data of its images."""
    if isinstance(message["content"], str):
        return message
    parts = (
        part | {"image": EncodedImage(url="", digest=part["image"].digest)} if part["type"] == "image" else part
        for part in message["content"]
    )
    return {**message, "content": list(parts)}


def _image_parts(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if not isinstance(message["content"], str):
        yield from (part for part in message["content"] if part["type"] == "image")
