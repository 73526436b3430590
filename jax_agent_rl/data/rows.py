"""What a dataset's row holds, and its checks.

A row, in verl's schema::

    {"data_source": "calculator", "agent_name": "tool_agent",
     "prompt": [{"role": "user", "content": "What is 12 times 34?"}],
     "reward_model": {"ground_truth": "408"}, "extra_info": {}}

Images and videos of prompts, one form for what datasets hold:

==============================================  =====================================================================
``content``                                     the items
==============================================  =====================================================================
text with ``<image>`` and ``<video>``           the columns ``images`` and ``videos``, in order
(verl) parts ``{"type": "image"}``                     likewise parts ``{"type": "image", "image":
…}``         in the part (Qwen) parts ``{"type": "image_url", "image_url": …}``  in the part
(OpenAI)
==============================================  =====================================================================

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
from jax_agent_rl.utils.packages import is_installed
from jax_agent_rl.validation import did_you_mean

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

    def read(self, row: Row, place: str, folder: Path) -> Row:
        """Return a row with its images and videos as parts of the prompt (:func:`prompt_with_media`).

        Args:
            row: as ``data.reader`` yields it.
            place: where it stands, for messages.
            folder: the folder of its file, from which it names other files.

        Raises:
            DataError: a field is missing or invalid; names the row and the fix.
        """
        with located(place):
            self._check(row)
            prompt = prompt_with_media(row, folder)
        return {key: row[key] for key in row if key not in ("images", "videos")} | {
            "prompt": prompt
        }

    def _check(self, row: Row) -> None:
        require_columns(row, ("prompt", "data_source"))
        prompt = row.get("prompt")
        extra_info = row.get("extra_info")
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
        for field, known in (("agent_name", self.agents), ("adapter", self.adapters)):
            name = row.get(field)
            if name is not None and not isinstance(name, str):
                raise DataError(f"{field!r} must be a name or absent, got {name!r:.80}")
            if name:
                _check_known(field, name, known)
        for section in ("reward_model", "extra_info"):
            _check_object(row, section)
        _check_tools(extra_info or {}, self.tools)
        _check_object(extra_info or {}, "interaction_kwargs")


def require_columns(row: Row, names: Sequence[str]) -> None:
    """Check that a row has all columns of these names; raise DataError, which names those it has."""
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


def _check_object(holder: Mapping[str, Any], name: str) -> None:
    value = holder.get(name)
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
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# --- images and videos of prompts -----------------------------------------------------------------


def prompt_with_media(row: Mapping[str, Any], folder: Path) -> list[Mapping[str, Any]]:
    """Return a row's prompt with its images and videos as parts; messages without any keep their content as text.

    They are in the columns ``images`` and ``videos``; paths are relative to ``folder``.

    Raises:
        DataError: an item cannot be used, or placeholders and columns differ in number.
    """
    columns = {kind: row.get(f"{kind}s") for kind in KINDS}
    for kind, items in columns.items():
        if items is not None and not isinstance(items, list):
            raise DataError(f"'{kind}s' must be a list of {kind}s, got {items!r:.80}")
    given = {kind: list(items) for kind, items in columns.items() if items}
    left = {kind: iter(items) for kind, items in given.items()}
    shown = dict.fromkeys(KINDS, 0)
    prompt = []
    for index, message in enumerate(row["prompt"]):
        content = _content(message)
        parts = (
            _split(content, given)
            if isinstance(content, str)
            else [_part(p, f"prompt[{index}]") for p in content]
        )
        for number, part in enumerate(parts):
            if part["type"] == "text":
                continue
            kind, source = part["type"], part["source"]
            if source is None:
                shown[kind] += 1
                source = next(left.get(kind, iter(())), None)
                where = f"{kind}s[{shown[kind] - 1}]"
            else:
                where = f"prompt[{index}].content[{number}]"
            if source is None:
                continue  # counted below
            try:
                parts[number] = {"type": kind, kind: _usable(kind, source, folder)}
            except ValueError as error:
                raise DataError(f"{where}: {error}") from None
        if all(part["type"] == "text" for part in parts):
            prompt.append({**message, "content": "".join(part["text"] for part in parts)})
        else:
            prompt.append({**message, "content": parts})
    for kind, count in shown.items():
        if count != len(given.get(kind, ())):
            raise DataError(
                f"'prompt' shows {count} of {kind!r} (<{kind}>, or parts of that type without a"
                f" source), but '{kind}s' has {len(given.get(kind, ()))}; write one <{kind}> for"
                " each"
            )
    return prompt


def media_kinds(row: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of media that a row's prompt shows."""
    contents = (message["content"] for message in row["prompt"])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return frozenset(part["type"] for part in parts) & frozenset(KINDS)


def media_files(row: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of images and videos that a checked row's prompt names, in order."""
    for message in row["prompt"]:
        parts = message["content"] if isinstance(message["content"], list) else []
        for part in parts:
            source = part.get(part["type"])
            frames = source if isinstance(source, list) else [source]
            yield from (
                Path(frame) for frame in frames if isinstance(frame, str) and part["type"] in KINDS
            )


def _content(message: Mapping[str, Any]) -> Any:
    """Return a message's content; a message that only calls tools, whose content OpenAI has as null, says nothing."""
    says_nothing = message.get("role") == "assistant" and message.get("tool_calls")
    return message.get("content", "" if says_nothing else None)


def _split(text: str, given: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Split text at the placeholders of the kinds that the row has columns for."""
    if not given:
        return [{"type": "text", "text": text}]
    pieces = re.split(f"<({'|'.join(given)})>", text)
    kinds = pieces[1::2]
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
    for kind, after in zip(kinds, pieces[2::2], strict=True):
        parts += [
            {"type": kind, "source": None},
            *([{"type": "text", "text": after}] if after else []),
        ]
    return parts or [{"type": "text", "text": ""}]


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise DataError(
            f"{where}: a part of 'content' must be an object with a 'type', got {part!r:.80}"
        )
    if found := media_source(part):
        return {"type": found[0], "source": found[1]}
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            f"{where}: a part of 'content' must be {{'type': 'text', 'text': …}}, or of type image"
            f" or video, got {part!r:.80}"
        )
    return {"type": "text", "text": part["text"]}


def _usable(kind: str, item: Any, folder: Path) -> Source:
    """Return the source of an item in one of three forms; raise ValueError if it has none of them."""
    if isinstance(item, Mapping):
        keys = ("bytes", "path", kind, f"{kind}_url", "url")
        if unknown := sorted(
            key for key, value in item.items() if value is not None and key not in (*keys, "type")
        ):
            raise ValueError(
                f"{unknown} have no effect here; remove them (model.max_pixels limits sizes)"
            )
        return _usable(
            kind, next((item[key] for key in keys if item.get(key) is not None), None), folder
        )
    if isinstance(item, list) and kind == "video":
        if not 0 < len(item) <= MAX_FRAMES:
            raise ValueError(f"a video must have 1 to {MAX_FRAMES} frames, got {len(item)}")
        return [
            frame for one in item if isinstance(frame := _usable("image", one, folder), str | bytes)
        ]
    if kind == "video" and item and isinstance(item, str | bytes) and not is_installed("av"):
        raise ValueError(
            "a video file needs PyAV: pip install 'jax_agent_rl[video]', or give a list of its"
            " frames"
        )
    if isinstance(item, bytes) and item:
        return item
    if not isinstance(item, str) or not item:
        raise ValueError(f"must be a path, a data: URL or bytes, got {item!r:.80}")
    if item.startswith("data:"):
        return data_url_bytes(item)
    scheme, separator, rest = item.partition("://")
    if separator and scheme != "file":
        raise ValueError(
            f"{item[:200]!r} is not downloaded in a run; download it and name the file"
        )
    path = folder / Path(rest if separator else item).expanduser()
    if not path.is_file():
        raise ValueError(
            f"there is no file {str(path)!r}; paths are relative to the dataset file's folder"
        )
    return str(path)
