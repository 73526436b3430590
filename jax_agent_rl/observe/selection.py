"""Filters and samples of trajectories: which are shown, and which are kept if not all can be."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.types import FinishReason, StopReason

T = TypeVar("T")
Split = Literal["train", "heldout"]
Sort = Literal["time", "best", "worst"]
Colour = Literal["mask", "logprob", "advantage", "version", "gap"]
"""Meaning of the colour of sampled tokens, see :data:`jax_agent_rl.observe.view.COLOURS`."""
MAX_TOKENS = 1_000_000
"""Limit of a page: about 25 megabytes, which every browser opens and most mail servers accept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryFilter:
    """The trajectories that a user wants to see: every condition that is not None must hold.

    The page of ``jax-agent-rl report`` has the same filters.

    Attributes:
        split: ``train`` or ``heldout``.
        step: training step. min_step, max_step: bounds of the step, inclusive. min_reward,
        max_reward: bounds of the reward, inclusive. tool_error: kind of error of a tool call
        (``malformed``, ``timeout``, …); ``any``: any kind; ``none``: no error. finish_reason: why
        the trajectory ended. stop_reason: why one of its generations ended. text: part of the
        trajectory's id or of its response, in any case.

    Raises:
        ConfigError: an unknown name.
    """

    split: str | None = None
    step: int | None = None
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tool_error: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        known = {
            "split": get_args(Split),
            "finish_reason": tuple(FinishReason),
            "stop_reason": tuple(StopReason),
        }
        for name, values in known.items():
            if (given := getattr(self, name)) is not None and given not in values:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {given!r}: choose one of {', '.join(values)}")

    def __call__(self, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return whether a record of ``trajectories.jsonl`` matches; ``decode`` turns ids into text."""
        return (
            self.split in (None, record["split"])
            and self.step in (None, record["step"])
            and _within(self.min_step, record["step"], self.max_step)
            and _within(self.min_reward, record["reward"], self.max_reward)
            and self.finish_reason in (None, record["finish_reason"])
            and (self.stop_reason is None or self.stop_reason in stop_reasons(record))
            and self._matches_tool_error(tool_errors(record))
            and (self.text is None or self._matches_text(record, decode))
        )

    def _matches_text(
        self, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        sought = (self.text or "").lower()
        texts = (decode(part["response_ids"]) for part in contexts(record))
        return sought in record["trajectory_id"].lower() or any(
            sought in text.lower() for text in texts
        )

    def _matches_tool_error(self, errors: list[str]) -> bool:
        match self.tool_error:
            case None:
                return True
            case "none":
                return not errors
            case "any":
                return bool(errors)
            case kind:
                return kind in errors

    def require_tool_error_among(self, kinds: Iterable[str]) -> None:
        """Check that the run has errors of the requested kind.

        Raises:
            ConfigError: it has none; names the kinds it has.
        """
        known = ("any", "none", *sorted(set(kinds)))
        if self.tool_error is not None and self.tool_error not in known:
            raise ConfigError(
                f"--tool-error {self.tool_error!r}: no call of the run had it; choose"
                f" {', '.join(known)}"
            )

    def describe(self) -> str:
        """Return the conditions, for a message."""
        given = ((name, getattr(self, name)) for name in self.__slots__)
        return (
            ", ".join(f"{name}={value}" for name, value in given if value is not None)
            or "no filter"
        )


def _within(low: float | None, value: float, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def group_of(record: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return what the members of a group share: split, step and the group's id."""
    return record["split"], record["step"], record["group_id"]


def contexts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of a trajectory's segments, and its own."""
    return [*record["segments"], record]


def turns(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of a record and of its segments."""
    return [turn for part in contexts(record) for turn in part["turns"]]


def tool_errors(record: Mapping[str, Any]) -> list[str]:
    """Return the error kinds of a record's tool calls, in order."""
    return [call["error"] for turn in turns(record) for call in turn["tool_calls"] if call["error"]]


def truth(record: Mapping[str, Any]) -> Any:
    """Return the ground truth of a record's row; None if it has none."""
    graded_by = record["row"].get("reward_model")
    return graded_by.get("ground_truth") if isinstance(graded_by, Mapping) else None


def stop_reasons(record: Mapping[str, Any]) -> list[str]:
    """Return why a record's generations ended, each reason once."""
    return list(dict.fromkeys(turn["stop_reason"] for turn in turns(record)))


def sample(
    items: Sequence[T],
    limit: int | None,
    *,
    reward: Callable[[T], float],
    group: Callable[[T], str],
    seed: int,
) -> list[T]:
    """Return up to ``limit`` trajectories of one step, in their order.

    The best and the worst come first, then the rest of their groups (rewards mean something beside
    each other), then random whole groups.

    Args:
        items: trajectories or their records.
        limit: None keeps all.
        reward: returns an item's reward.
        group: returns an item's group.
        seed: draws the groups.
    """
    if limit is None or len(items) <= limit:
        return list(items)
    places = range(len(items))
    best = max(places, key=lambda i: reward(items[i]))
    worst = min(places, key=lambda i: reward(items[i]))
    others = list(dict.fromkeys(group(item) for item in items))
    random.Random(seed).shuffle(others)
    order = [best, worst]
    for name in (group(items[best]), group(items[worst]), *others):
        order += [i for i in places if group(items[i]) == name] if len(set(order)) < limit else []
    return [items[i] for i in sorted(list(dict.fromkeys(order))[:limit])]


class Fact(NamedTuple):
    """The properties of a trajectory on which the choice for the report depends.

    Attributes:
        prompt, tokens: lengths; the page holds the prompt once per group, everything else for each
            member.
    """

    split: str
    step: int
    group: str
    reward: float
    prompt: int
    tokens: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Fact:
        """Read them from a record of ``trajectories.jsonl``."""
        contexts = sum(len(s["prompt_ids"]) + len(s["response_ids"]) for s in record["segments"])
        split, step, group = group_of(record)
        return cls(
            split=split,
            step=step,
            group=group,
            reward=record["reward"],
            prompt=len(record["prompt_ids"]),
            tokens=len(record["response_ids"]) + contexts,
        )


class FactSequence(Protocol):
    """Facts by the number of their trajectory, from 0."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Fact]: ...

    def __getitem__(self, number: int, /) -> Fact: ...


class FactTable(FactSequence):
    """The facts of many trajectories, in about 40 bytes each."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self._groups: list[tuple[str, int, str]] = []
        self._places: dict[tuple[str, int, str], int] = {}
        self._group, self._prompt, self._tokens = array("q"), array("q"), array("q")
        self._reward = array("d")
        for fact in facts:
            self._append(fact)

    def _append(self, fact: Fact) -> None:
        group = (fact.split, fact.step, fact.group)
        if group not in self._places:
            self._places[group] = len(self._groups)
            self._groups.append(group)
        self._group.append(self._places[group])
        self._reward.append(fact.reward)
        self._prompt.append(fact.prompt)
        self._tokens.append(fact.tokens)

    def __len__(self) -> int:
        return len(self._group)

    def __iter__(self) -> Iterator[Fact]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int, /) -> Fact:
        split, step, group = self._groups[self._group[number]]
        return Fact(
            split=split,
            step=step,
            group=group,
            reward=self._reward[number],
            prompt=self._prompt[number],
            tokens=self._tokens[number],
        )


def choose(facts: FactSequence, limit: int) -> tuple[set[int], bool]:
    """Choose at most ``limit`` trajectories (0: all) of at most :data:`MAX_TOKENS`, but at least one.

    Every step and split has the same share: its best, its worst, and random others. Where that
    would be fewer than two, only equally spaced steps have any.

    Returns:
        Positions, from 0, and whether requested trajectories were left out because of
        :data:`MAX_TOKENS`.
    """
    if not limit:
        return set(range(len(facts))), False
    asked = fitting = min(limit, len(facts))
    places = _spread(facts, fitting)
    while fitting > 1 and (size := _tokens([facts[place] for place in places])) > MAX_TOKENS:
        fitting = max(1, min(fitting - 1, fitting * MAX_TOKENS // size))
        places = _spread(facts, fitting)
    return places, fitting < asked


def _spread(facts: FactSequence, limit: int) -> set[int]:
    if len(facts) <= limit:
        return set(range(len(facts)))
    parts: dict[tuple[str, int], list[int]] = {}
    for place, fact in enumerate(facts):
        parts.setdefault((fact.split, fact.step), []).append(place)
    names = sorted(parts)
    kept = min(len(names), max(1, limit // 2))
    chosen: set[int] = set()
    for name in (names[number * (len(names) - 1) // max(1, kept - 1)] for number in range(kept)):
        chosen.update(
            sample(
                parts[name],
                limit // kept,
                reward=lambda place: facts[place].reward,
                group=lambda place: facts[place].group,
                seed=name[1],
            )
        )
    return chosen


def _tokens(facts: Sequence[Fact]) -> int:
    prompts = {(fact.split, fact.step, fact.group): fact.prompt for fact in facts}
    return sum(prompts.values()) + sum(fact.tokens for fact in facts)
