"""The prompt of a row: its messages, their ids, and the images and videos they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.media import data_url, read_media, without_sources

if TYPE_CHECKING:
    from jax_agent_rl.chat.codec import ChatCodec


def encode_prompt(
    codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[tuple[int, ...], Mapping[str, tuple[Any, ...]]]:
    """Return the ids of a prompt, and the images and videos it shows by kind.

    Args:
        codec: of the model.
        messages: as in a dataset's rows (:mod:`jax_agent_rl.data.media`).
        tools: schemas described in the prompt.

    Raises:
        DataError: an image or a video cannot be read.
        TemplateError: the chat template, or the model, cannot show the messages.
    """
    try:
        media = read_media(messages)
    except ValueError as error:
        raise DataError(f"the prompt shows what cannot be read: {error}") from None
    ids = codec.encode_prompt([without_sources(message) for message in messages], tools=tools)
    return tuple(codec.expand_media(ids, media) if media else ids), media


def openai_prompt(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a row's prompt as clients of OpenAI's API send it: with images as ``data:`` URLs.

    Raises:
        DataError: the prompt is not a list of messages, or shows a video or what cannot be read.
    """
    return [
        {**message, "content": [_openai_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in row_prompt(row)
    ]


def _openai_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] == "text":
        return part
    if part["type"] == "video":
        raise DataError("the prompt shows a video, which OpenAI's API has no part for; show its frames as images")
    try:
        return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
    except ValueError as error:
        raise DataError(f"the prompt shows what cannot be read: {error}") from None


def row_prompt(row: Mapping[str, Any], opening: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """Return the row's conversation and ``opening``; raise DataError if the prompt is not a list of messages."""
    prompt = row.get("prompt")
    messages = [] if prompt is None or isinstance(prompt, str | Mapping) else [*prompt, *opening]
    if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise DataError(
            f"a row's prompt must be a list of messages like [{{'role': 'user', 'content': …}}], got {prompt!r:.200}"
        )
    return messages
