"""Filters and samples of trajectories."""

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
        min_step, max_step: bounds of the training step, inclusive.
        min_reward, max_reward: bounds of the reward, inclusive.
        tool_error: kind of error of a tool call (``malformed``, ``timeout``, …); ``any`` matches
            any kind, ``none`` trajectories without an error.
        finish_reason: why the trajectory ended.
        stop_reason: why one of its generations ended.
        text: part of the trajectory's id or of its response, in upper or lower case.

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
            value = getattr(self, name)
            if value is not None and value not in values:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value!r}: choose one of {', '.join(values)}")

    def __call__(self, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return whether a record of ``trajectories.jsonl`` matches.

        Args:
            decode: turns token ids into text.
        """
        if self.split not in (None, record["split"]):
            return False
        if self.step not in (None, record["step"]):
            return False
        if not _within(self.min_step, record["step"], self.max_step):
            return False
        if not _within(self.min_reward, record["reward"], self.max_reward):
            return False
        if self.finish_reason not in (None, record["finish_reason"]):
            return False
        if self.stop_reason is not None and self.stop_reason not in stop_reasons(record):
            return False
        if not self._matches_tool_error(tool_errors(record)):
            return False
        # The text comes last: decoding takes longest.
        return self.text is None or self._matches_text(self.text, record, decode)

    def _matches_text(
        self, text: str, record: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        text = text.lower()
        if text in record["trajectory_id"].lower():
            return True
        for context in contexts(record):
            if text in decode(context["response_ids"]).lower():
                return True
        return False

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

        Args:
            kinds: the kinds that the run has.

        Raises:
            ConfigError: it has none.
        """
        known = ("any", "none", *sorted(set(kinds)))
        if self.tool_error is not None and self.tool_error not in known:
            raise ConfigError(
                f"--tool-error {self.tool_error!r}: no call of the run had it; choose"
                f" {', '.join(known)}"
            )

    def describe(self) -> str:
        """Return the conditions, for a message."""
        conditions = []
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None:
                conditions.append(f"{name}={value}")
        return ", ".join(conditions) or "no filter"


def _within(low: float | None, value: float, high: float | None) -> bool:
    """Return whether a value is in a range; NaN is in none that has a bound."""
    is_high_enough = low is None or value >= low
    is_low_enough = high is None or value <= high
    return is_high_enough and is_low_enough


def group_of(record: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return what identifies a record's group: split, step and the group's id."""
    return record["split"], record["step"], record["group_id"]


def contexts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of a trajectory's segments, and last the trajectory's record itself."""
    return [*record["segments"], record]


def turns(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of a record and of its segments."""
    all_turns: list[Mapping[str, Any]] = []
    for context in contexts(record):
        all_turns += context["turns"]
    return all_turns


def tool_errors(record: Mapping[str, Any]) -> list[str]:
    """Return the error kinds of a record's tool calls, in order."""
    errors = []
    for turn in turns(record):
        for call in turn["tool_calls"]:
            if call["error"]:
                errors.append(call["error"])
    return errors


def truth(record: Mapping[str, Any]) -> Any:
    """Return the ground truth of a record's row; None if it has none."""
    reward_model = record["row"].get("reward_model")
    if not isinstance(reward_model, Mapping):
        return None
    return reward_model.get("ground_truth")


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

    The best and the worst are preferred, then the other members of their groups (a reward means
    something beside the group's others), then random complete groups.

    Args:
        items: trajectories or their records.
        limit: largest number of items; None keeps all.
        seed: seed of the random order of groups.
    """
    if limit is None or len(items) <= limit:
        return list(items)

    indices = range(len(items))
    best = max(indices, key=lambda index: reward(items[index]))
    worst = min(indices, key=lambda index: reward(items[index]))
    groups = list(dict.fromkeys(group(item) for item in items))
    random.Random(seed).shuffle(groups)

    preferred = dict.fromkeys([best, worst])  # a set in order
    for name in (group(items[best]), group(items[worst]), *groups):
        if len(preferred) >= limit:
            break
        for index in indices:
            if group(items[index]) == name:
                preferred[index] = None
    chosen = sorted(list(preferred)[:limit])
    return [items[index] for index in chosen]


class Fact(NamedTuple):
    """The properties of a trajectory on which the choice for the report depends.

    Attributes:
        prompt: tokens of the prompt, which the page holds once per group.
        tokens: all other tokens, which the page holds for each member.
    """

    split: str
    step: int
    group: str
    reward: float
    prompt: int
    tokens: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Fact:
        """Return the facts of a record of ``trajectories.jsonl``."""
        tokens = len(record["response_ids"])
        for segment in record["segments"]:
            tokens += len(segment["prompt_ids"]) + len(segment["response_ids"])
        split, step, group = group_of(record)
        return cls(
            split=split,
            step=step,
            group=group,
            reward=record["reward"],
            prompt=len(record["prompt_ids"]),
            tokens=tokens,
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
        self._group_numbers: dict[tuple[str, int, str], int] = {}
        # Columns, with a row for each fact.
        self._group = array("q")
        self._prompt = array("q")
        self._tokens = array("q")
        self._reward = array("d")
        for fact in facts:
            self._append(fact)

    def _append(self, fact: Fact) -> None:
        group = (fact.split, fact.step, fact.group)
        if group not in self._group_numbers:
            self._group_numbers[group] = len(self._groups)
            self._groups.append(group)
        self._group.append(self._group_numbers[group])
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
    """Choose trajectories for a page that holds at most :data:`MAX_TOKENS`, but at least one.

    Every step and split has the same share: its best, its worst, and random others. Where that
    would be fewer than two, only equally spaced steps have any.

    Args:
        limit: largest number of trajectories; 0 chooses all, whatever they hold.

    Returns:
        Numbers of trajectories, from 0, and whether requested ones were left out because of
        :data:`MAX_TOKENS`.
    """
    if not limit:
        return set(range(len(facts))), False

    requested = min(limit, len(facts))
    count = requested
    chosen = _spread(facts, count)
    while count > 1:
        tokens = _page_tokens([facts[number] for number in chosen])
        if tokens <= MAX_TOKENS:
            break
        count = max(1, min(count - 1, count * MAX_TOKENS // tokens))
        chosen = _spread(facts, count)
    return chosen, count < requested


def _spread(facts: FactSequence, limit: int) -> set[int]:
    """Choose up to ``limit`` trajectories, the same share of each step and split."""
    if len(facts) <= limit:
        return set(range(len(facts)))

    by_step: dict[tuple[str, int], list[int]] = {}
    for number, fact in enumerate(facts):
        by_step.setdefault((fact.split, fact.step), []).append(number)
    steps = sorted(by_step)

    step_count = min(len(steps), max(1, limit // 2))
    chosen: set[int] = set()
    for index in range(step_count):
        split, step = steps[index * (len(steps) - 1) // max(1, step_count - 1)]
        chosen.update(
            sample(
                by_step[split, step],
                limit // step_count,
                reward=lambda number: facts[number].reward,
                group=lambda number: facts[number].group,
                seed=step,
            )
        )
    return chosen


def _page_tokens(facts: Sequence[Fact]) -> int:
    """Return how many tokens a page with these trajectories holds."""
    prompts = {(fact.split, fact.step, fact.group): fact.prompt for fact in facts}
    return sum(prompts.values()) + sum(fact.tokens for fact in facts)
