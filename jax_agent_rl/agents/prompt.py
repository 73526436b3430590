"""The prompt of a row, its images and videos; and images in the messages of agents' frameworks.

Frameworks send an image in every request; a session decodes it once::

    as a framework sends it    {"type": "image_url",
                                "image_url": {"url": "data:image/png;base64,…"}}
    in a plain message         {"type": "image", "image": EncodedImage}, compared by its bytes
    for the chat template      {"type": "image"}
    for engine and learner     {"image": (PIL image, …)}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax_agent_rl.chat.messages import normalize_messages, openai_message
from jax_agent_rl.errors import DataError, TemplateError
from jax_agent_rl.utils.media import (
    MAX_TOTAL_PIXELS,
    data_url,
    read_images,
    read_media,
    text_message,
    without_sources,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from jax_agent_rl.chat.codec import ChatCodec


def encode_prompt(
    codec: ChatCodec,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    continue_last: bool = False,
) -> tuple[tuple[int, ...], Mapping[str, tuple[Any, ...]]]:
    """Return the ids of a prompt, and the images and videos it shows by kind.

    Args:
        messages: as in a dataset's rows (:mod:`jax_agent_rl.data.rows`).
        tools: schemas described in the prompt.
        continue_last: the last message, of the assistant, is the beginning of the turn to sample (a
            row's ``continue_final_message``).

    Raises:
        DataError: an image or a video cannot be read.
        TemplateError: the chat template, or the model, cannot show the messages.
    """
    try:
        media = read_media(messages)
    except ValueError as error:
        raise DataError(f"the prompt shows what cannot be read: {error}") from None

    options = {}
    if continue_last:  # the codecs of simulations do not know it
        options["continue_last"] = True
    ids = codec.encode_prompt(for_template(messages), tools=tools, **options)
    if media:
        ids = codec.expand_media(ids, media)
    return tuple(ids), media


def codec_of_row(codec: ChatCodec, row: Mapping[str, Any]) -> ChatCodec:
    """Return the codec of a row's trajectories.

    The chat template gets the row's ``chat_template_kwargs``.

    Raises:
        DataError: the template cannot be given them.
    """
    kwargs = row.get("chat_template_kwargs")
    if not kwargs:
        return codec
    try:
        return codec.with_template_kwargs(kwargs)
    except ValueError as error:
        raise DataError(f"a row's chat_template_kwargs {error}") from None


def openai_prompt(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a row's prompt as clients of OpenAI's API send it.

    Images are ``data:`` URLs, arguments of calls are JSON text.

    Raises:
        DataError: the prompt is not a list of messages, or shows a video or what cannot be read.
        TemplateError: a message is none.
    """
    messages = []
    for message in normalize_messages(row_prompt(row)):
        if isinstance(message["content"], list):
            message["content"] = [_openai_part(part) for part in message["content"]]
        messages.append(openai_message(message))
    return messages


def _openai_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] == "text":
        return part
    if part["type"] == "video":
        raise DataError(
            "the prompt shows a video, which OpenAI's API has no part for;"
            " show its frames as images"
        )
    try:
        return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
    except ValueError as error:
        raise DataError(f"the prompt shows what cannot be read: {error}") from None


def row_prompt(
    row: Mapping[str, Any], opening: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """Return the row's conversation and ``opening``.

    Raises:
        DataError: the prompt is not a list of messages.
    """
    prompt = row.get("prompt")
    messages = []
    if prompt is not None and not isinstance(prompt, str | Mapping):
        messages = [*prompt, *opening]
    if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise DataError(
            "a row's prompt must be a list of messages like [{'role': 'user', 'content': …}],"
            f" got {prompt!r:.200}"
        )
    return messages


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
            ValueError: it is not in the request itself, or to be shown in less detail than the
                model reads.
        """
        image = part.get("image_url")
        if not isinstance(image, Mapping):
            image = {}
        url = image.get("url")
        if not isinstance(url, str) or not url.startswith("data:image/"):
            raise ValueError(
                f"an image must be in the request, as a URL data:image/…;base64,…; got {url!r:.80},"
                " and nothing is fetched from other addresses"
            )
        detail = image.get("detail")
        if detail not in (None, "auto", "high"):
            raise ValueError(
                f"an image's detail={detail!r} is not supported; model.max_pixels limits its size"
            )
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
            TemplateError: one cannot be read, or they are too many or too large; none is decoded
                then.
        """
        digests: list[str] = []
        new_urls: dict[str, str] = {}
        for message in messages:
            for part in _image_parts(message):
                image: EncodedImage = part["image"]
                digests.append(image.digest)
                if image.digest not in self._decoded:
                    new_urls[image.digest] = image.url

        used_pixels = sum(image.width * image.height for image in self._decoded.values())
        pixels_left = self._max_pixels - used_pixels
        try:
            decoded = read_images(
                list(new_urls.values()), max_total_pixels=min(pixels_left, MAX_TOTAL_PIXELS)
            )
        except ValueError as error:
            limit = f"agent.endpoint.max_session_pixels={self._max_pixels}"
            raise TemplateError(f"{error} ({limit}, of which {pixels_left} are left)") from None
        self._decoded |= zip(new_urls, decoded, strict=True)

        if not digests:
            return {}
        return {"image": tuple(self._decoded[digest] for digest in digests)}


def for_template(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return plain messages as the codec takes them; a tool result's images precede its text."""
    template_messages: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            template_messages.append(text_message(message))
        else:
            template_messages.append(without_sources(message))
    return template_messages


def without_data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plain message that can still be compared, without the data of its images."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            part = part | {"image": replace(part["image"], url="")}
        parts.append(part)
    return {**message, "content": parts}


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if isinstance(message["content"], str):
        return []
    return [part for part in message["content"] if part["type"] == "image"]
