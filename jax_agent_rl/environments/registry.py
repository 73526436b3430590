"""Environments by name, and which one a row lives in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jax_agent_rl.environments.base import Environment
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.utils.plugins import load_user_module
from jax_agent_rl.utils.text import did_you_mean

_ENVIRONMENTS: dict[str, type[Environment]] = {}
_Class = TypeVar("_Class", bound=type[Environment])


def register_environment(name: str) -> Callable[[_Class], _Class]:
    """Register an :class:`Environment` class, constructed without arguments, under the name that rows give.

    Raises:
        ConfigError: the name is taken.
    """

    def register(cls: _Class) -> _Class:
        if name in _ENVIRONMENTS:
            raise ConfigError(f"two environments are called {name!r}: {_ENVIRONMENTS[name]!r} and {cls!r}; rename one")
        cls.name = name
        _ENVIRONMENTS[name] = cls
        return cls

    return register


def get_environment(name: str) -> type[Environment]:
    """Return the class registered as ``name``.

    Raises:
        ConfigError: there is none; the message lists the nearest name and all names.
    """
    if name not in _ENVIRONMENTS:
        guess = did_you_mean(name, _ENVIRONMENTS)
        raise ConfigError(
            f"no environment is called {name!r}; {guess}there are {sorted(_ENVIRONMENTS)} (see @register_environment)"
        )
    return _ENVIRONMENTS[name]


def load_environments(path: str | None) -> None:
    """Import ``environments.path``, a Python file or module that registers more; None does nothing.

    Raises:
        ConfigError: it cannot be imported or registers a name twice.
    """
    if path is not None:
        load_user_module(path, key="environments.path")


def environment_of(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's environment and the arguments of its ``reset``.

    Nulls are left out: Parquet writes one wherever another row has the argument.

    Raises:
        DataError: the row names none.
    """
    given = (row.get("extra_info") or {}).get("environment_kwargs")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise DataError(
            "extra_info.environment_kwargs must be an object with the environment's 'name', like "
            f"{{'name': 'textworld', 'game': …}}, got {given!r:.100}"
        )
    return given["name"], {key: value for key, value in given.items() if key != "name" and value is not None}


def require_environments(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuses rows whose environment does not exist or does not take their arguments; call it before a run.

    Args:
        rows: those whose agent lives in an environment.

    Raises:
        ConfigError, DataError: the first problem.
    """
    for row in rows:
        name, kwargs = environment_of(row)
        reset = inspect.signature(get_environment(name).reset)
        try:
            reset.bind(None, **kwargs)
        except TypeError as error:
            raise DataError(
                f"environment {name!r} cannot be reset with {kwargs!r:.200}: {error}; correct "
                "extra_info.environment_kwargs"
            ) from None
