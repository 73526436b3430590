"""Reward functions, chosen by each row's ``data_source``, and their arguments.

::

    @register_reward("my_task")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)      # or {"score": 1.0, "format": 0.5}

A function may be ``async def``.
Arguments are passed by parameter name, looked up in this order:

1. ``data_source, solution_str, ground_truth, extra_info`` (verl's four);
2. the trajectory: ``trajectory, role, messages, finish_reason, num_turns, tool_rewards,
   tool_scores, turn_scores``;
3. services of the run, e.g. ``judge``;
4. fields of the row, of its ``extra_info``, of its ``reward_model``.

A function with ``*args`` gets verl's four by position.
"""

from __future__ import annotations

import functools
import inspect
from collections import ChainMap
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

from jax_agent_rl.checks import as_score, brief_repr, looks_like_number
from jax_agent_rl.errors import ConfigError, RewardError
from jax_agent_rl.outcomes import PROGRESS
from jax_agent_rl.tools.base import truncate_characters
from jax_agent_rl.utils.failures import is_user_file, place
from jax_agent_rl.utils.near_names import did_you_mean
from jax_agent_rl.utils.plugins import installed, load_installed, load_user_module

Score = float | Mapping[str, Any]
ComputeScore = Callable[..., Score | Awaitable[Score]]
Solution = Literal["last_turn", "assistant", "conversation"]
"""Text that a reward function reads: the last assistant turn, all assistant turns, or tool results
as well."""

_Function = TypeVar("_Function", bound=ComputeScore)
CLASSIC = ("data_source", "solution_str", "ground_truth", "extra_info")
FROM_TRAJECTORY = (
    "trajectory",
    "role",
    "messages",
    "finish_reason",
    "num_turns",
    "tool_rewards",
    "tool_scores",
    "turn_scores",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A registered function.

    Attributes:
        path: the ``reward.path`` that registered it; None for other functions.
        required: names of parameters without a default.
        optional: names of parameters with a default, omitted if nothing has the name.
        takes_args: whether it takes arguments by position, as ``*args`` does: it gets
            :data:`CLASSIC`.
        takes_kwargs: whether it takes ``**kwargs``, and so gets all of :data:`CLASSIC`.
    """

    compute_score: ComputeScore
    solution: Solution
    path: str | None
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_args: bool
    takes_kwargs: bool

    @classmethod
    def of(
        cls, compute_score: ComputeScore, solution: Solution, path: str | None = None
    ) -> RewardFunction:
        """Read a function's signature.

        Raises:
            TypeError, ValueError: it has none, as some built-in functions.
        """
        required = []
        optional = []
        takes_args = False
        takes_kwargs = False

        for parameter in inspect.signature(compute_score).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                takes_args = True
            elif parameter.kind is parameter.VAR_KEYWORD:
                takes_kwargs = True
            elif parameter.default is parameter.empty:
                required.append(parameter.name)
            else:
                optional.append(parameter.name)

        return cls(
            compute_score=compute_score,
            solution=solution,
            path=path,
            required=tuple(required),
            optional=tuple(optional),
            takes_args=takes_args,
            takes_kwargs=takes_kwargs,
        )

    @property
    def is_async(self) -> bool:
        """Whether it is an async function, or an object whose call is one."""
        function = self.compute_score
        if inspect.iscoroutinefunction(function):
            return True
        return inspect.iscoroutinefunction(type(function).__call__)

    @property
    def place(self) -> str:
        """File and line of a function that a user wrote; empty for functions of packages."""
        file, line = _definition(self.compute_score)
        if not is_user_file(file):
            return ""
        return place(file, line)

    def describe(self, data_source: str) -> str:
        """Return ``the reward function of 'shop' (my_rewards.py:3)``."""
        description = f"the reward function of {data_source!r}"
        if self.place:
            description += f" ({self.place})"
        return description

    def bind(self, available: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of one call.

        Raises:
            KeyError: ``available`` lacks a required name.
        """
        if self.takes_args:
            return tuple(available[name] for name in CLASSIC), {}

        names = list(self.required)
        for name in self.optional:
            if name in available:
                names.append(name)
        if self.takes_kwargs:
            for name in CLASSIC:
                if name not in names:
                    names.append(name)
        return (), {name: available[name] for name in names}

    def missing_in(self, row: Mapping[str, Any], services: Collection[str]) -> list[str]:
        """Return the required names that neither a trajectory of this row nor the run provides.

        Args:
            row: may be without its prompt.
            services: names of what the run has.
        """
        if self.takes_args:
            return []
        available = {*CLASSIC, *FROM_TRAJECTORY, *services, *row_fields(row)}
        available.add("prompt")  # every row has one in the end
        return [name for name in self.required if name not in available]


def row_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's fields by name, then the fields of its ``extra_info`` and ``reward_model``."""
    return ChainMap(
        dict(row), dict(row.get("extra_info") or {}), dict(row.get("reward_model") or {})
    )


MAX_FEEDBACK_CHARACTERS = 2**16
"""Characters of a feedback; every record and checkpoint with the trajectory holds them."""
_MAX_NAMED = 20
REWARDS: dict[str, RewardFunction] = {}
"""The registered functions, by data source or pattern."""
_ALL_ROWS = ""
"""Data source of a function that scores every row, as in a file written for verl, see
:func:`load_rewards`."""
_FROM_FILES: dict[str, dict[str, RewardFunction]] = {}
"""What each imported file registered, since a later run in the same process does not import it
again."""


def register_reward(
    *data_sources: str, solution: Solution = "last_turn", override: bool = False
) -> Callable[[_Function], _Function]:
    """Register a reward function for rows of these sources.

    It may be async, and returns a number or a dict with ``"score"``; other numbers of the dict
    become ``Trajectory.reward_parts`` and metrics of the run, as do those of a list ``"progress"``:
    one partial score after each turn, in the order in which turns were sampled. A text
    ``"feedback"`` says what was wrong, see ``algorithm.kl.reference``; one of more than 65,536
    characters loses its middle.

    A synchronous function may block: functions of ``reward.path`` run in worker processes
    (``reward.workers``), others in threads.

    Args:
        *data_sources: values of the row field ``data_source``, or patterns such as ``aime*`` for
            values without a function of their own.
        solution: see :data:`Solution`.
        override: replace registered functions, e.g. built-in ones.

    Raises:
        ConfigError: a data source already has a function, and ``override`` is not set.
    """

    def register(function: _Function) -> _Function:
        entry = RewardFunction.of(function, solution)
        for data_source in data_sources:
            known = REWARDS.get(data_source)
            if known is not None and not override:
                raise ConfigError(
                    f"two reward functions for data_source {data_source!r}:"
                    f" {_place(known.compute_score)} and {_place(function)}; rename one, or set"
                    " override=True"
                )
            REWARDS[data_source] = entry
        return function

    return register


def find_reward(data_source: str) -> RewardFunction | None:
    """Return the function of a data source, or None if there is none.

    A function registered under the name itself comes first, one of an installed package next, and
    then the first pattern that fits.
    """
    if _ALL_ROWS in REWARDS:
        return REWARDS[_ALL_ROWS]

    if data_source not in REWARDS:
        function = load_installed("rewards", data_source)
        is_registered = data_source in REWARDS  # its module may have done so when it was imported
        if function is not None and not is_registered:
            register_reward(data_source)(function)
    if data_source in REWARDS:
        return REWARDS[data_source]

    for pattern, entry in REWARDS.items():
        if fnmatchcase(data_source, pattern):
            return entry
    return None


def known_data_sources() -> list[str]:
    """Return all registered names and patterns, for messages."""
    return sorted({*REWARDS, *installed("rewards")} - {_ALL_ROWS})


class SplitScore(NamedTuple):
    """The result of a reward function, checked.

    Attributes:
        feedback: what it says about the trajectory, at most :data:`MAX_FEEDBACK_CHARACTERS`
            characters; "" for nothing.
    """

    score: float
    parts: dict[str, float]
    feedback: str


def split_score(result: Any, reward: RewardFunction, data_source: str) -> SplitScore:
    """Split the result of a reward function into its score, its named parts and its feedback.

    Parts are the numbers beside ``score``, and the numbers of the list ``progress`` as
    ``progress/1``, ``progress/2``, …; texts but ``feedback``, and other collections, are left
    out.

    Raises:
        RewardError: there is no score, or it or a part is a number that is not finite or that
            float32 cannot hold; or the feedback is neither a text nor None.
    """
    fields = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in fields:
        raise reward_failure(
            RewardError, reward, data_source, f'returned no "score": {brief_repr(result)}'
        )

    feedback = fields.get("feedback")
    if feedback is None:
        feedback = ""
    if not isinstance(feedback, str):
        raise reward_failure(
            RewardError,
            reward,
            data_source,
            f'returned a "feedback" that is not a text: {brief_repr(feedback)}; write it as one'
            " text, or give a part of the reward another name",
        )

    parts: dict[str, float] = {}
    try:
        score = as_score(fields["score"], "its score")
        for key, part in fields.items():
            if key != "score" and looks_like_number(part):
                parts[key] = as_score(part, f"its part {key!r}")
            elif key == PROGRESS and _is_collection(part):
                for number, partial_score in enumerate(part, start=1):
                    name = f"{PROGRESS}/{number}"
                    parts[name] = as_score(partial_score, f"its part {name!r}")
    except ValueError as error:
        raise reward_failure(
            RewardError, reward, data_source, f"returned what is not a reward: {error}"
        ) from None
    return SplitScore(
        score, parts, truncate_characters(feedback, MAX_FEEDBACK_CHARACTERS, "middle")
    )


def _is_collection(part: Any) -> bool:
    """Return whether a part is a list or an array, as of NumPy, not a text or a dict."""
    return isinstance(part, Iterable) and not isinstance(part, str | bytes | Mapping)


def reward_failure(
    error_type: type[RewardError], reward: RewardFunction, data_source: str, problem: str
) -> RewardError:
    """Return the error of a function that gave no score without raising one.

    Args:
        problem: what it did; completes a sentence whose subject is the function.
    """
    error = error_type(f"{reward.describe(data_source)} {problem}")
    error.failed_at = reward.place
    return error


def load_rewards(path: str | None) -> None:
    """Import ``reward.path``, a Python file or module that registers more functions.

    None only forgets what an earlier run's file registered for every row. A later run of the same
    process that names the file again gets the same functions, whatever other files registered
    since. A file that registers none and has a ``compute_score`` was written for verl: that
    function scores every row, and reads the whole conversation, as it does in verl.

    Raises:
        ConfigError: it cannot be imported or registers a data source twice.
    """
    REWARDS.pop(_ALL_ROWS, None)
    if path is None:
        return

    previous = dict(REWARDS)
    module = load_user_module(path, key="reward.path")
    from_file = _FROM_FILES.setdefault(module.__name__, {})
    for data_source, entry in REWARDS.items():
        is_new = previous.get(data_source) is not entry
        # agent.module may be the same file, which has registered its functions already.
        is_defined_there = entry.compute_score.__module__ == module.__name__
        if is_new or is_defined_there:
            from_file[data_source] = replace(entry, path=path)
    REWARDS.update(from_file)

    function: ComputeScore | None = getattr(module, "compute_score", None)
    if callable(function) and not from_file:
        REWARDS[_ALL_ROWS] = RewardFunction.of(function, "conversation", path)


def require_rewards(
    rows: Iterable[Mapping[str, Any]], *, services: Collection[str] = ()
) -> set[str]:
    """Check before a run that every row can be scored; return the services that are requested.

    Args:
        services: names of the services that the run has, e.g. ``judge``.

    Raises:
        ConfigError: names all unknown data sources, and all missing fields that reward functions
            request.
    """
    unknown: set[str] = set()
    missing: set[tuple[str, str]] = set()  # data source, field
    requested: set[str] = set()
    for row in rows:
        data_source = str(row.get("data_source"))
        reward = find_reward(data_source)
        if reward is None:
            unknown.add(data_source)
            continue
        for name in reward.missing_in(row, services):
            missing.add((data_source, name))
        requested.update(reward.required, reward.optional)

    problems = []
    if unknown:
        problems.append(describe_unknown(unknown))
    for data_source, name in sorted(missing):
        problems.append(_describe_missing(data_source, name))
    if problems:
        raise ConfigError(problems)
    return requested.intersection(services)


def describe_unknown(data_sources: Collection[str]) -> str:
    """Say that no function scores rows of these data sources, and which ones may be meant."""
    known = known_data_sources()
    names = []
    for data_source in sorted(data_sources)[:_MAX_NAMED]:
        name = f"{data_source!r:.80}"
        guess = did_you_mean(data_source, known).strip()
        if guess:
            name += f" ({guess})"
        names.append(name)
    if len(data_sources) > _MAX_NAMED:
        names.append("…")
    return (
        f"no reward function for data_source {', '.join(names)}; there are {known}; register one"
        " with @register_reward in the file named by reward.path"
    )


def _describe_missing(data_source: str, name: str) -> str:
    if name == "judge":
        return (
            f"the reward function of {data_source!r} asks for a judge, and none is configured; set"
            " reward.judge.model"
        )
    return (
        f"the reward function of {data_source!r} asks for {name!r}, which some of its rows have"
        " neither as a field nor in extra_info or reward_model; add it to the rows or give the"
        " parameter a default"
    )


def _definition(function: Callable[..., Any]) -> tuple[str, int]:
    """Return file and line of a function's definition; ``<unknown>`` if it has no Python code."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _definition(function.func)

    code = getattr(function, "__code__", None)
    if code is None:  # an object with a call
        code = getattr(type(function).__call__, "__code__", None)
    if code is None:
        return "<unknown>", 0
    return code.co_filename, code.co_firstlineno


def _place(function: Callable[..., Any]) -> str:
    file, line = _definition(function)
    if file == "<unknown>":
        return repr(function)
    return f"{file}:{line}"
