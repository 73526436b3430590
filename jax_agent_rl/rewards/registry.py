"""Reward functions, chosen by each row's ``data_source``, and their arguments.

::

    @register_reward("my_task")
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(ground_truth in solution_str)          # or {"score": 1.0, "format": 0.5}; or async def

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
from typing import Any, Literal, TypeVar

from jax_agent_rl.errors import ConfigError, RewardError
from jax_agent_rl.utils.failures import is_user_file, place
from jax_agent_rl.utils.plugins import installed, load_installed, load_user_module
from jax_agent_rl.validation import as_score, did_you_mean, looks_like_number, shown

Score = float | Mapping[str, Any]
ComputeScore = Callable[..., Score | Awaitable[Score]]
Solution = Literal["last_turn", "assistant", "conversation"]
"""Text that a reward function reads: the last assistant turn, all assistant turns, or tool results
as well."""

_Function = TypeVar("_Function", bound=ComputeScore)
CLASSIC = ("data_source", "solution_str", "ground_truth", "extra_info")
FROM_TRAJECTORY = (
    "trajectory", "role", "messages", "finish_reason", "num_turns", "tool_rewards", "tool_scores", "turn_scores",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A registered function.

    Attributes:
        compute_score: the function.
        solution: the text it reads.
        path: the ``reward.path`` that registered it.
        required: names of parameters without a default.
        optional: names of those with a default; omitted if nothing has the name.
        positional: whether it takes ``*args``.
        open: whether it takes ``**kwargs``, and so gets all of :data:`CLASSIC`.
    """

    compute_score: ComputeScore
    solution: Solution
    path: str | None
    required: tuple[str, ...]
    optional: tuple[str, ...]
    positional: bool
    open: bool

    @classmethod
    def of(
        cls, compute_score: ComputeScore, solution: Solution, path: str | None = None
    ) -> RewardFunction:
        """Read a signature; raise ``ValueError`` or ``TypeError`` if there is none (as for some built-ins)."""
        parameters = inspect.signature(compute_score).parameters.values()
        kinds = {p.kind for p in parameters}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            compute_score=compute_score,
            solution=solution,
            path=path,
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            positional=inspect.Parameter.VAR_POSITIONAL in kinds
            or inspect.Parameter.POSITIONAL_ONLY in kinds,
            open=inspect.Parameter.VAR_KEYWORD in kinds,
        )

    @property
    def is_async(self) -> bool:
        function = self.compute_score
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    @property
    def place(self) -> str:
        """File and line of a function of the user's; empty for those of this or an installed package."""
        file, line = _definition(self.compute_score)
        return place(file, line) if is_user_file(file) else ""

    def describe(self, data_source: str) -> str:
        """Return ``the reward function of 'shop' (my_rewards.py:3)``."""
        where = self.place
        return f"the reward function of {data_source!r}" + (f" ({where})" if where else "")

    def bind(self, available: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of one call.

        Raises:
            KeyError: ``available`` lacks a required name.
        """
        if self.positional:
            return tuple(available[name] for name in CLASSIC), {}
        wanted = [*self.required, *(name for name in self.optional if name in available)]
        if self.open:
            wanted += [name for name in CLASSIC if name not in wanted]
        return (), {name: available[name] for name in wanted}

    def missing_in(self, row: Mapping[str, Any], services: Collection[str]) -> list[str]:
        """Return the required names that neither a trajectory of this row nor the run provides.

        Args:
            row: may be without its prompt.
            services: names of what the run has.
        """
        if self.positional:
            return []
        known = {
            *CLASSIC,
            *FROM_TRAJECTORY,
            *services,
            "prompt",
            *row_fields(row),
        }  # every row has a prompt
        return [name for name in self.required if name not in known]


def row_fields(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a row by name: its own, then those of ``extra_info``, then those of ``reward_model``."""
    return ChainMap(
        dict(row), dict(row.get("extra_info") or {}), dict(row.get("reward_model") or {})
    )


_MAX_NAMED = 20
_REWARDS: dict[str, RewardFunction] = {}
_ALL_ROWS = ""
"""Data source of a function that scores every row: that of a file written for verl, see
:func:`load_rewards`."""
_FROM_FILES: dict[str, dict[str, RewardFunction]] = {}
"""What each imported file registered: a later run of the process imports it no second time."""


def register_reward(
    *data_sources: str, solution: Solution = "last_turn", override: bool = False
) -> Callable[[_Function], _Function]:
    """Register a reward function for rows of these sources.

    It may be async, and returns a number or a dict with ``"score"``; other numbers of the dict
    become ``Trajectory.reward_parts`` and metrics of the run. A synchronous function may block:
    those of ``reward.path`` run in worker processes (``reward.workers``), others in threads.

    Args:
        *data_sources: values of the row field ``data_source``, or patterns such as ``aime*`` for those without a
            function of their own.
        solution: see :data:`Solution`.
        override: replace registered functions, e.g. built-in ones.

    Raises:
        ConfigError: a data source already has a function, and ``override`` is not set.
    """

    def register(function: _Function) -> _Function:
        entry = RewardFunction.of(function, solution)
        for data_source in data_sources:
            known = _REWARDS.get(data_source)
            if known is not None and not override:
                raise ConfigError(
                    f"two reward functions for data_source {data_source!r}:"
                    f" {_place(known.compute_score)} and {_place(function)}; rename one, or set"
                    " override=True"
                )
            _REWARDS[data_source] = entry
        return function

    return register


def find_reward(data_source: str) -> RewardFunction | None:
    """Return the function of a data source: by name (of an installed package, too), else by the first pattern."""
    if every := _REWARDS.get(_ALL_ROWS):
        return every
    if (
        data_source not in _REWARDS
        and (function := load_installed("rewards", data_source)) is not None
    ):
        if data_source not in _REWARDS:  # its module may have registered it
            register_reward(data_source)(function)
    if exact := _REWARDS.get(data_source):
        return exact
    return next(
        (entry for pattern, entry in _REWARDS.items() if fnmatchcase(data_source, pattern)), None
    )


def known_data_sources() -> list[str]:
    """Return all registered names and patterns, for messages."""
    return sorted({*_REWARDS, *installed("rewards")} - {_ALL_ROWS})


def split_score(
    result: Any, reward: RewardFunction, data_source: str
) -> tuple[float, dict[str, float]]:
    """Split the result of a reward function into its score and its named parts.

    Parts are the numbers beside ``score``; texts and collections are left out.

    Raises:
        RewardError: there is no score, or it or a part is a number that is not finite or that
            float32 cannot hold.
    """
    named = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in named:
        raise reward_failure(
            RewardError, reward, data_source, f'returned no "score": {shown(result)}'
        )
    parts: dict[str, float] = {}
    try:
        score = as_score(named["score"], "its score")
        for key, part in named.items():
            if key != "score" and looks_like_number(part):
                parts[key] = as_score(part, f"its part {key!r}")
    except ValueError as error:
        raise reward_failure(
            RewardError, reward, data_source, f"returned what is no reward: {error}"
        ) from None
    return score, parts


def reward_failure(
    make: type[RewardError], reward: RewardFunction, data_source: str, how: str
) -> RewardError:
    """Return the error of a function that did not raise one, but did not give a score either; names its definition."""
    error = make(f"{reward.describe(data_source)} {how}")
    error.failed_at = reward.place
    return error


def load_rewards(path: str | None) -> None:
    """Import ``reward.path``, a Python file or module that registers more functions; None does nothing.

    A later run of one process that names the file again gets the same functions, whatever other
    files registered since. A file that registers none and has a ``compute_score`` was written for
    verl: that function scores every row, and reads the whole conversation, as there.

    Raises:
        ConfigError: it cannot be imported or registers a data source twice.
    """
    _REWARDS.pop(_ALL_ROWS, None)
    if path is None:
        return
    before = dict(_REWARDS)
    module = load_user_module(path, key="reward.path")
    own = _FROM_FILES.setdefault(module.__name__, {})
    for data_source, entry in _REWARDS.items():
        # agent.module may be the same file, which has registered its functions already
        if (
            before.get(data_source) is not entry
            or entry.compute_score.__module__ == module.__name__
        ):
            own[data_source] = replace(entry, path=path)
    _REWARDS.update(own)
    function: ComputeScore | None = getattr(module, "compute_score", None)
    if callable(function) and not own:
        _REWARDS[_ALL_ROWS] = RewardFunction.of(function, "conversation", path)


def require_rewards(
    rows: Iterable[Mapping[str, Any]], *, services: Collection[str] = ()
) -> set[str]:
    """Check before a run that every row can be scored, and return those of the run's services that are requested.

    Args:
        rows: of the run.
        services: names of what the run has, e.g. ``judge``.

    Raises:
        ConfigError: names all unknown data sources, and all missing fields that reward functions
            request.
    """
    unknown: set[str] = set()
    lacking: set[tuple[str, str]] = set()
    requested: set[str] = set()
    for row in rows:
        data_source = str(row.get("data_source"))
        reward = find_reward(data_source)
        if reward is None:
            unknown.add(data_source)
        else:
            lacking |= {(data_source, name) for name in reward.missing_in(row, services)}
            requested.update(reward.required, reward.optional)
    problems = [_describe_missing(data_source, name) for data_source, name in sorted(lacking)]
    if unknown:
        problems.insert(0, describe_unknown(unknown))
    if problems:
        raise ConfigError(problems)
    return requested.intersection(services)


def describe_unknown(data_sources: Collection[str]) -> str:
    """Say that no function scores rows of these data sources, with the ones that may have been meant."""
    known = known_data_sources()
    named = []
    for data_source in sorted(data_sources)[:_MAX_NAMED]:
        guess = did_you_mean(data_source, known).strip()
        name = f"{data_source!r:.80}"
        named.append(f"{name} ({guess})" if guess else name)
    if len(data_sources) > _MAX_NAMED:
        named.append("…")
    return (
        f"no reward function for data_source {', '.join(named)}; there are {known}; register one"
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
    """Return file and line of a function's definition; ``<unknown>`` where there is none, as for an object's call."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _definition(function.func)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return ("<unknown>", 0) if code is None else (code.co_filename, code.co_firstlineno)


def _place(function: Callable[..., Any]) -> str:
    file, line = _definition(function)
    return repr(function) if file == "<unknown>" else f"{file}:{line}"
