"""Which trajectories are on the page where not all can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_agent_rl.observe.sample import sample

MOST_TOKENS = 1_000_000
"""On a page that does not show all: some 25 megabytes, which every browser opens and most mail takes."""


class Fact(NamedTuple):
    """What the choice depends on, of one trajectory.

    Attributes:
        prompt, tokens: lengths; the prompt stands once on the page for a group, everything else for each member.
    """

    split: str
    step: int
    group: str
    reward: float
    prompt: int
    tokens: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Fact:
        """Of a record of ``trajectories.jsonl``."""
        contexts = sum(len(s["prompt_ids"]) + len(s["response_ids"]) for s in record["segments"])
        return cls(
            split=record["split"],
            step=record["step"],
            group=record["group_id"],
            reward=record["reward"],
            prompt=len(record["prompt_ids"]),
            tokens=len(record["response_ids"]) + contexts,
        )


class TrajectorySelection(NamedTuple):
    """What was chosen.

    Attributes:
        places: of the trajectories, from 0.
        is_full: more would be too many tokens, although they were asked for.
    """

    places: set[int]
    is_full: bool


def choose(facts: Sequence[Fact], most: int) -> TrajectorySelection:
    """At most ``most`` trajectories (0: all) of at most :data:`MOST_TOKENS`, but one in any case.

    Every step and split has the same share: its best, its worst, and others by chance. Where that would be less than
    two, some steps have none; those that have are equally far apart.
    """
    if not most:
        return TrajectorySelection(set(range(len(facts))), is_full=False)
    asked = fitting = min(most, len(facts))
    places = _spread(facts, fitting)
    while fitting > 1 and (size := _tokens([facts[place] for place in places])) > MOST_TOKENS:
        fitting = max(1, min(fitting - 1, fitting * MOST_TOKENS // size))
        places = _spread(facts, fitting)
    return TrajectorySelection(places, is_full=fitting < asked)


def _spread(facts: Sequence[Fact], most: int) -> set[int]:
    if len(facts) <= most:
        return set(range(len(facts)))
    parts: dict[tuple[str, int], list[int]] = {}
    for place, fact in enumerate(facts):
        parts.setdefault((fact.split, fact.step), []).append(place)
    names = sorted(parts)
    kept = min(len(names), max(1, most // 2))
    chosen: set[int] = set()
    for name in (names[number * (len(names) - 1) // max(1, kept - 1)] for number in range(kept)):
        chosen.update(
            sample(
                parts[name],
                most // kept,
                reward=lambda place: facts[place].reward,
                group=lambda place: facts[place].group,
                seed=name[1],
            )
        )
    return chosen


def _tokens(facts: Sequence[Fact]) -> int:
    prompts = {(fact.split, fact.step, fact.group): fact.prompt for fact in facts}
    return sum(prompts.values()) + sum(fact.tokens for fact in facts)
