"""Interface of a tool: a name, a schema the model reads, and ``create / execute / release``.

Life of a tool in one trajectory (``instance_id`` is the trajectory's id)::

    create(id, **create_kwargs) ──► execute(id, arguments, **execute_kwargs) …
        ──► calc_reward(id, **calc_reward_kwargs) ──► release(id, **release_kwargs)

``create`` and ``release`` are called exactly once, ``release`` also when the trajectory fails or is
cancelled, so a tool may keep per-trajectory state under ``instance_id``. The keyword arguments come
from the dataset row: ``extra_info.tools_kwargs[tool name] = {"create_kwargs": …, "execute_kwargs":
…, "calc_reward_kwargs": …, "release_kwargs": …}``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, SupportsFloat

from jax_agent_rl.checks import as_float, as_score
from jax_agent_rl.errors import ToolDefinitionError
from jax_agent_rl.tools.schema import function_tool
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.surrogates import replace_lone_surrogates


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """Result of a tool call.

    Attributes:
        text: what the model reads.
        image: images (PIL) for a multi-modal model, which reads them in this order, before the
            text. If the model or engine accepts none, the call fails with a message.
        video: videos, likewise (each a sequence of frames, or whatever the engine accepts).
        reward: reward of the call, for the reward function, never shown to the model. Any number
            that float32 holds, NumPy's included; a bool is 1 or 0. Stored as a float.
        metrics: numbers to sum over the trajectory, by name; stored as floats.
    """

    text: str = ""
    _: KW_ONLY
    image: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def media(self) -> dict[str, tuple[Any, ...]]:
        """Images and videos by kind, without empty kinds."""
        media: dict[str, tuple[Any, ...]] = {}
        if self.image:
            media["image"] = tuple(self.image)
        if self.video:
            media["video"] = tuple(self.video)
        return media

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"ToolResponse.text must be str, got {type(self.text).__name__}")
        for kind, items in (("image", self.image), ("video", self.video)):
            if not isinstance(items, tuple | list):
                raise TypeError(
                    f"ToolResponse.{kind} must be a tuple or list, got {type(items).__name__}"
                )

        # Normalize here, so that all readers get plain floats.
        object.__setattr__(self, "reward", as_score(self.reward, "a tool's reward"))
        if not isinstance(self.metrics, Mapping):
            raise ValueError(
                f"a tool's metrics must be a mapping of finite numbers, got {self.metrics!r}"
            )
        metrics = {}
        for key, value in self.metrics.items():
            metrics[key] = as_float(value, f"a tool's metric {key!r}")
        object.__setattr__(self, "metrics", metrics)


ToolResult = str | float | Mapping[str, Any] | list[Any] | ToolResponse | tuple[Any, ...]
"""Return value of a tool::

    "text"                          as it is
    3, 2.5, True                    as Python writes it
    {...}, [...]                    as JSON
    ToolResponse(...)
    (one of these,)
    (one of these, reward)          reward None: the default
    (one of these, reward, metrics)

Only a tuple is unpacked. A list is a result like any other: ``["Paris", 2]`` has no reward.
"""


def as_response(result: ToolResult) -> ToolResponse:
    """Convert a tool's return value.

    Raises:
        TypeError: it is not a :data:`ToolResult`, e.g. None.
        ValueError: its reward is not a number that float32 holds, or a metric is not finite.
    """
    if not isinstance(result, tuple) or not 1 <= len(result) <= 3:
        return _single_response(result)

    response = _single_response(result[0])
    if len(result) >= 2 and result[1] is not None:
        response = replace(response, reward=result[1])
    if len(result) == 3 and result[2] is not None:
        response = replace(response, metrics=result[2])
    return response


def _single_response(result: object) -> ToolResponse:
    match result:
        case ToolResponse():
            return result
        case str():
            return ToolResponse(text=result)
        case Mapping() | list():
            return ToolResponse(text=json.dumps(result, ensure_ascii=False))
        case SupportsFloat():
            return ToolResponse(text=str(result))
    raise TypeError(
        "a tool must return str, a number, dict, list, ToolResponse, (response, reward) or"
        f" (response, reward, metrics), got {type(result).__name__}"
    )


class BaseTool(ABC):
    """Base class of tools; ``@function_tool`` makes one from a function.

    Args:
        name: name that the model calls it by.
        description: what the model reads about it.
        parameters: JSON Schema of the arguments, an ``object``. Arguments it does not name are
            refused unless it sets ``additionalProperties``.

    Raises:
        ToolDefinitionError: no name, or ``parameters`` is not an object schema.
    """

    stateful: bool = True
    """Whether the result of a call may depend on the trajectory's earlier calls. When a trajectory
    branches (tree rollouts), the earlier calls are then repeated for the branch. Set it to False
    where repeating them would be wasteful or wrong: for a search, or a server whose state all
    trajectories share.
    """

    def __init__(self, *, name: str, description: str, parameters: Mapping[str, Any]):
        if not name:
            raise ToolDefinitionError(f"{type(self).__name__} has no name")
        if parameters.get("type") != "object":
            raise ToolDefinitionError(
                f"tool {name!r}: parameters must be a schema of type object, got {parameters!r}"
            )
        self.name = name
        self.description = description
        self.parameters = parameters

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format, as chat templates expect it."""
        return function_tool(self.name, self.description, self.parameters)

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Prepare the tool for one trajectory. The default takes no arguments and does nothing."""
        if create_kwargs:
            raise TypeError(
                f"tool {self.name!r} takes no create_kwargs, got {sorted(create_kwargs)}"
            )

    @abstractmethod
    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Run one call.

        Args:
            instance_id: id of the trajectory.
            arguments: the model's arguments, already valid under ``parameters``.
            execute_kwargs: arguments from the dataset row, unseen by the model.

        Raises:
            ToolError: the call failed; the model reads the message. Any other exception is shown
                with its type.
        """

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float | None:
        """Score the whole trajectory at its end, from the state that the tool keeps of it.

        Returns:
            A finite number, passed to the reward function as ``extra_info["tool_scores"][name]``;
            None (the default): no score.
        """
        if calc_reward_kwargs:
            raise TypeError(
                f"tool {self.name!r} takes no calc_reward_kwargs, got {sorted(calc_reward_kwargs)}"
            )
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> BaseTool:
        """Build the tool of an entry of ``tools.tool_config_path``.

        Args:
            config: the entry's ``config``: keyword arguments of the constructor.
            schema: the entry's ``tool_schema["function"]``, whose parts are keyword arguments as
                well; None: the class defines its own schema.
        """
        return cls(**config, **(schema or {}))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Free the resources of ``create`` and ``execute``.

        The default takes no arguments and does nothing.
        """
        if release_kwargs:
            raise TypeError(
                f"tool {self.name!r} takes no release_kwargs, got {sorted(release_kwargs)}"
            )

    def waits_for(self, instance_id: str) -> str | None:
        """Return what a call is waiting for, to explain its timeout.

        None, the default, says that it is running.
        """
        return None

    async def close(self) -> None:
        """Free what the tool holds for all trajectories, at the end of the run.

        The default does nothing.
        """
        return None


def refuse_unseen(
    media: Mapping[str, Sequence[Any]],
    modalities: Collection[str],
    *,
    source: str,
    logged_as: str,
    reason: str,
    failures: FailureLog,
) -> str | None:
    """Report media that the model cannot be shown, and return the text that it reads instead.

    Args:
        media: images and videos by kind.
        modalities: the kinds that can be shown.
        source: what returned the media, as the model reads it.
        logged_as: the same, as the user reads it.
        reason: why other kinds cannot be shown.

    Returns:
        The text; None if everything can be shown.
    """
    unseen = sorted(media.keys() - set(modalities))
    if not unseen:
        return None
    kinds = " and ".join(unseen)
    problem = f"{logged_as} returned {kinds}"
    failures.report(problem, f"{problem}, which cannot be shown: {reason}")
    return f"{source} returned {kinds} data, which cannot be shown here"


Side = Literal["left", "middle", "right"]
Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

MARKER = "...(truncated)..."
CHARS_PER_TOKEN = 64
"""No realistic text has longer tokens on average, so cutting at this many characters first loses
nothing."""


def truncate_text(text: str, limit: int, side: Side, *, encode: Encode, decode: Decode) -> str:
    """Return ``text`` if it has at most ``limit`` tokens, else what fits of it and a marker.

    Lone surrogates, which no tokenizer accepts, become question marks.

    Args:
        text: the tool result.
        limit: maximum number of returned tokens, including the marker, which is left out if the
            limit is too small for it.
        side: the side that is cut: ``left`` keeps the end, ``right`` the beginning, ``middle``
            both.
        encode: text to ids, without special tokens added.
        decode: ids to text.
    """
    text = replace_lone_surrogates(text)
    max_chars = limit * CHARS_PER_TOKEN
    is_cut = len(text) > max_chars
    ids = encode(_cut_text(text, max_chars, side) if is_cut else text)
    if len(ids) <= limit and not is_cut:
        return text

    marker = MARKER
    marker_tokens = len(encode(MARKER))
    if 2 * marker_tokens > limit:
        marker = ""
        marker_tokens = 0
    num_kept = min(len(ids), limit - marker_tokens)
    while True:
        num_head, num_tail = _split(num_kept, side)
        # A cut through a multi-byte character decodes to replacement characters, which are removed.
        head = decode(ids[:num_head]).rstrip("\ufffd")
        tail = decode(ids[len(ids) - num_tail :]).lstrip("\ufffd")
        result = head + marker + tail
        # The pieces may have more tokens apart than together.
        excess = len(encode(result)) - limit
        if excess <= 0:
            return result
        num_kept = max(0, num_kept - excess)


def truncate_characters(text: str, limit: int, side: Side) -> str:
    """Return ``text`` if it has at most ``limit`` characters, else what fits of it and a marker.

    For texts that are kept before anybody encodes them.

    Args:
        limit: maximum number of returned characters, at least as many as the marker has.
        side: see :func:`truncate_text`.
    """
    if len(text) <= limit:
        return text
    num_head, num_tail = _split(limit - len(MARKER), side)
    return text[:num_head] + MARKER + text[len(text) - num_tail :]


def _split(count: int, side: Side) -> tuple[int, int]:
    """Return how many of so many units stay at the beginning, and how many at the end."""
    if side == "left":
        return 0, count
    if side == "right":
        return count, 0
    return count - count // 2, count // 2


def _cut_text(text: str, max_chars: int, side: Side) -> str:
    num_head, num_tail = _split(max_chars, side)
    return text[:num_head] + text[len(text) - num_tail :]
