"""What a dataset's row holds, and its checks.

A row, in verl's schema::

    {"data_source": "calculator", "agent_name": "tool_agent",
     "prompt": [{"role": "user", "content": "What is 12 times 34?"}],
     "reward_model": {"ground_truth": "408"}, "extra_info": {}}

Images and videos of prompts, one form for what datasets hold:

================================================  =================================================
``content``                                       the items
================================================  =================================================
text with ``<image>`` and ``<video>``             the columns ``images`` and ``videos``, in order
                                                  (verl)
parts ``{"type": "image"}``                       likewise
parts ``{"type": "image", "image": …}``           in the part (Qwen)
parts ``{"type": "image_url", "image_url": …}``   in the part (OpenAI)
================================================  =================================================

An item is a path from the dataset file's folder, a ``data:`` URL, bytes, or ``{"bytes": …, "path":
…}`` as Hugging Face datasets store it; a video is one of these, or a list of frames. In the rows
that agents see, every item is a part ``{"type": kind, kind: source}``, the source bytes (also of a
``data:`` URL) or an absolute path, or a list of these. They are read when a trajectory begins
(``utils.media.read_media``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.data.reader import Row, located
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.files import write_atomically
from jax_agent_rl.utils.media import KINDS, MAX_FRAMES, data_url_bytes, media_source
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.packages import install_command, is_installed

Source = str | bytes | list[str | bytes]
_COLUMN_HINTS = {
    "prompt": "; write the messages that the policy gets, [{'role': 'user', 'content': …}]",
    "data_source": "; write the name of the task, by which the reward function is chosen",
}
_MAX_NAMED = 20  # columns
_TOOLS_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """The names that rows may use; None: any.

    Attributes:
        agents: values of ``agent_name``.
        tools: names in ``extra_info.tool_selection`` and ``extra_info.tools_kwargs``.
        adapters: values of ``adapter``.
    """

    agents: Collection[str] | None = None
    tools: Collection[str] | None = None
    adapters: Collection[str] | None = None

    def read(self, row: Row, location: str, folder: Path) -> Row:
        """Return a row with its images and videos as parts of the prompt.

        See :func:`prompt_with_media`.

        Args:
            row: as ``data.reader`` yields it.
            location: for messages.
            folder: the folder of its file, from which it names other files.

        Raises:
            DataError: a field is missing or invalid; names the row and the fix.
        """
        with located(location):
            self._check(row)
            prompt = prompt_with_media(row, folder)
        checked = {key: value for key, value in row.items() if key not in ("images", "videos")}
        checked["prompt"] = prompt
        return checked

    def _check(self, row: Row) -> None:
        require_columns(row, ("prompt", "data_source"))
        extra_info = row.get("extra_info")

        prompt = row.get("prompt")
        # An environment provides a prompt.
        has_environment = isinstance(extra_info, Mapping) and extra_info.get("environment_kwargs")
        if not isinstance(prompt, list) or not (prompt or has_environment):
            raise DataError(f"'prompt' must be a non-empty list of messages, got {prompt!r:.80}")
        for message in prompt:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise DataError(f"every message of 'prompt' needs a 'role', got {message!r:.80}")
            if not isinstance(_content(message), str | list):
                raise DataError(
                    "every message of 'prompt' needs a 'content' of text or of parts, got"
                    f" {message!r:.80}"
                )

        if not isinstance(row.get("data_source"), str):
            raise DataError(
                "'data_source' must name the task (it selects the reward), got"
                f" {row.get('data_source')!r}"
            )
        _check_name(row, "agent_name", self.agents)
        _check_name(row, "adapter", self.adapters)

        _check_object(row, "reward_model")
        _check_object(row, "extra_info")
        _check_tools(extra_info or {}, self.tools)
        _check_object(extra_info or {}, "interaction_kwargs")


def require_columns(row: Row, names: Sequence[str]) -> None:
    """Check that a row has all columns of these names.

    Raises:
        DataError: one is missing; names the columns it has.
    """
    for name in names:
        if row.get(name) is None:
            guess = did_you_mean(name, [column for column in row if column not in names])
            raise DataError(
                f"has no {name!r}; {guess}{describe_columns(row)}{_COLUMN_HINTS.get(name, '')}"
            )


def describe_columns(row: Row) -> str:
    """Return ``it has the columns 'question', 'answer'``."""
    if not row:
        return "it has no columns"
    names = [f"{name!r:.80}" for name in list(row)[:_MAX_NAMED]]
    if len(row) > _MAX_NAMED:
        names.append(f"… ({len(row)} in all)")
    return f"it has the columns {', '.join(names)}"


def _check_tools(extra_info: Mapping[str, Any], tools: Collection[str] | None) -> None:
    _check_object(extra_info, "tools_kwargs")
    for name, kinds in (extra_info.get("tools_kwargs") or {}).items():
        _check_object(extra_info["tools_kwargs"], name)
        if kinds and tools:  # a run without tools may read the same rows
            _check_known("extra_info.tools_kwargs", name, tools)
        for kind in kinds or {}:
            _check_known(f"extra_info.tools_kwargs.{name}", kind, _TOOLS_KWARGS)
            _check_object(kinds, kind)
    selection = extra_info.get("tool_selection")
    if selection is None:
        return
    if not isinstance(selection, list) or not all(isinstance(name, str) for name in selection):
        raise DataError(
            f"'extra_info.tool_selection' must be a list of tool names, got {selection!r:.80}"
        )
    for name in selection:
        _check_known("extra_info.tool_selection", name, tools)


def _check_name(row: Row, field: str, known: Collection[str] | None) -> None:
    name = row.get(field)
    if name is not None and not isinstance(name, str):
        raise DataError(f"{field!r} must be a name or absent, got {name!r:.80}")
    if name:
        _check_known(field, name, known)


def _check_object(fields: Mapping[str, Any], name: str) -> None:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{name!r} must be an object or absent, got {value!r:.80}")


def _check_known(field: str, name: str, known: Collection[str] | None) -> None:
    if known is None or name in known:
        return
    raise DataError(
        f"{field} {name!r} is not known; {did_you_mean(name, known)}there are {sorted(known)}"
    )


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, all or none."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomically(file, "".join(lines))


# --- images and videos of prompts -----------------------------------------------------------------


def prompt_with_media(row: Mapping[str, Any], folder: Path) -> list[Mapping[str, Any]]:
    """Return a row's prompt with its images and videos as parts.

    They are in the columns ``images`` and ``videos``; paths are relative to ``folder``. Messages
    without any keep their content as text.

    Raises:
        DataError: an item cannot be used, or placeholders and columns differ in number.
    """
    columns = _media_columns(row)
    counts = dict.fromkeys(KINDS, 0)  # placeholders so far

    prompt = []
    for index, message in enumerate(row["prompt"]):
        content = _content(message)
        if isinstance(content, str):
            parts = _split(content, columns.keys())
        else:
            parts = [_read_part(part, f"prompt[{index}]") for part in content]

        for number, part in enumerate(parts):
            kind = part["type"]
            if kind == "text":
                continue
            source = part["source"]
            location = f"prompt[{index}].content[{number}]"
            if source is None:
                items = columns.get(kind, [])
                item_index = counts[kind]
                counts[kind] += 1
                if item_index >= len(items):
                    continue  # reported below
                source = items[item_index]
                location = f"{kind}s[{item_index}]"
                if source is None:
                    continue
            try:
                parts[number] = {"type": kind, kind: _read_source(kind, source, folder)}
            except ValueError as error:
                raise DataError(f"{location}: {error}") from None

        if all(part["type"] == "text" for part in parts):
            prompt.append({**message, "content": "".join(part["text"] for part in parts)})
        else:
            prompt.append({**message, "content": parts})

    for kind, count in counts.items():
        item_count = len(columns.get(kind, ()))
        if count != item_count:
            raise DataError(
                f"'prompt' shows {count} of {kind!r} (<{kind}>, or parts of that type without a"
                f" source), but '{kind}s' has {item_count}; write one <{kind}> for each"
            )
    return prompt


def media_kinds(row: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of media that a row's prompt shows."""
    types = set()
    for message in row["prompt"]:
        if isinstance(message["content"], list):
            types.update(part["type"] for part in message["content"])
    return frozenset(types) & frozenset(KINDS)


def media_files(row: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of images and videos that a checked row's prompt names, in order."""
    for message in row["prompt"]:
        if not isinstance(message["content"], list):
            continue
        for part in message["content"]:
            if part["type"] not in KINDS:
                continue
            source = part.get(part["type"])
            frames = source if isinstance(source, list) else [source]
            for frame in frames:
                if isinstance(frame, str):
                    yield Path(frame)


def _media_columns(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the items of the columns ``images`` and ``videos`` by kind, without empty ones."""
    columns = {}
    for kind in KINDS:
        items = row.get(f"{kind}s")
        if items is not None and not isinstance(items, list):
            raise DataError(f"'{kind}s' must be a list of {kind}s, got {items!r:.80}")
        if items:
            columns[kind] = items
    return columns


def _content(message: Mapping[str, Any]) -> Any:
    """Return a message's content; that of a message that only calls tools may be absent."""
    if "content" not in message and message.get("role") == "assistant":
        # OpenAI writes null there, which rows leave out.
        return "" if message.get("tool_calls") else None
    return message.get("content")


def _split(text: str, kinds: Collection[str]) -> list[dict[str, Any]]:
    """Split text at the placeholders of these kinds, those that the row has columns for."""
    if not kinds:
        return [{"type": "text", "text": text}]

    first_text, *pieces = re.split(f"<({'|'.join(kinds)})>", text)
    parts: list[dict[str, Any]] = []
    if first_text:
        parts.append({"type": "text", "text": first_text})
    for kind, following_text in zip(pieces[::2], pieces[1::2], strict=True):
        parts.append({"type": kind, "source": None})
        if following_text:
            parts.append({"type": "text", "text": following_text})
    return parts or [{"type": "text", "text": ""}]


def _read_part(part: Any, location: str) -> dict[str, Any]:
    """Return a part of a content as text, or as media with their source (None: in a column)."""
    if not isinstance(part, Mapping):
        raise DataError(
            f"{location}: a part of 'content' must be an object with a 'type', got {part!r:.80}"
        )
    media = media_source(part)
    if media:
        kind, source = media
        return {"type": kind, "source": source}
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            f"{location}: a part of 'content' must be {{'type': 'text', 'text': …}}, or of type"
            f" image or video, got {part!r:.80}"
        )
    return {"type": "text", "text": part["text"]}


def _read_source(kind: str, item: Any, folder: Path) -> Source:
    """Return the source of an item: bytes, an absolute path, or a list of frames.

    Raises:
        ValueError: it has another form, or there is no such file.
    """
    if isinstance(item, Mapping):
        return _read_source(kind, _item_of(kind, item), folder)
    if isinstance(item, list) and kind == "video":
        if not 0 < len(item) <= MAX_FRAMES:
            raise ValueError(f"a video must have 1 to {MAX_FRAMES} frames, got {len(item)}")
        frames = []
        for frame_item in item:
            frame = _read_source("image", frame_item, folder)
            if isinstance(frame, str | bytes):  # of an image, it always is
                frames.append(frame)
        return frames
    if kind == "video" and item and isinstance(item, str | bytes) and not is_installed("av"):
        raise ValueError(
            f"a video file needs PyAV: {install_command('video')}, or give a list of its frames"
        )
    if isinstance(item, bytes) and item:
        return item
    if not isinstance(item, str) or not item:
        raise ValueError(f"must be a path, a data: URL or bytes, got {item!r:.80}")
    if item.startswith("data:"):
        return data_url_bytes(item)

    scheme, separator, url_path = item.partition("://")
    if separator and scheme != "file":
        raise ValueError(
            f"{item[:200]!r} is not downloaded in a run; download it and name the file"
        )
    path = folder / Path(url_path if separator else item).expanduser()
    if not path.is_file():
        raise ValueError(
            f"there is no file {str(path)!r}; paths are relative to the dataset file's folder"
        )
    return str(path)


def _item_of(kind: str, item: Mapping[str, Any]) -> Any:
    """Return the bytes, path or URL of an object that describes an image or a video."""
    keys = ("bytes", "path", kind, f"{kind}_url", "url")
    unknown = []
    for key, value in item.items():
        if value is not None and key not in keys and key != "type":
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"{sorted(unknown)} have no effect here; remove them (model.max_pixels limits sizes)"
        )
    for key in keys:
        if item.get(key) is not None:
            return item[key]
    return None
