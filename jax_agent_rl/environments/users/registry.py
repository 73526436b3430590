"""The simulated users of a run, by name, from a YAML file.

::

    interaction:
      - name: gsm8k
        class_name: jax_agent_rl.environments.users.Gsm8kInteraction
        config: {answer_format: flexible}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.environments.users.base import BaseInteraction
from jax_agent_rl.environments.users.chat_model import UserModel
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.plugins import load_user_module

KEY = "interactions.interaction_config_path"
_FIELDS = {"name", "class_name", "config"}


class InteractionRegistry(Mapping[str, BaseInteraction]):
    """Users by name.

    Args:
        users: users to begin with.
        timeout: seconds a user may take for one reply, ``interactions.timeout``.
    """

    def __init__(self, users: Mapping[str, BaseInteraction] | None = None, *, timeout: float = 60.0):
        self.timeout = timeout
        self._users = dict(users or {})

    @classmethod
    def from_path(cls, path: str | None, *, timeout: float = 60.0) -> InteractionRegistry:
        """Load the users of ``interactions.interaction_config_path``; None gives none.

        Raises:
            ConfigError: the file is missing or malformed, a class cannot be found or refuses its ``config``, or two
                users have one name.
        """
        users: dict[str, BaseInteraction] = {}
        for number, entry in enumerate(_entries(path) if path is not None else []):
            where = f"{KEY}={path!r}, interaction[{number}]"
            name, user = _build(entry, where)
            if name in users:
                raise ConfigError(f"{where}: two interactions are called {name!r}; rename one")
            users[name] = user
        return cls(users, timeout=timeout)

    def attach(self, engine: UserModel) -> None:
        """Give every user the run's own engine."""
        for user in self._users.values():
            user.attach(engine)

    async def close(self) -> None:
        """Close all users."""
        for user in self._users.values():
            await user.close()

    def __getitem__(self, name: str) -> BaseInteraction:
        return self._users[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def __len__(self) -> int:
        return len(self._users)


def _entries(path: str) -> list[Any]:
    file = Path(path).expanduser()
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{KEY}={path!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}={path!r} is not valid YAML: {error}") from None
    entries = tree.get("interaction") if isinstance(tree, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{KEY}={path!r} must hold `interaction:` with a list of {{name, class_name, config}}")
    return entries


def _build(entry: Any, where: str) -> tuple[str, BaseInteraction]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: must be {{name, class_name, config}}, got {entry!r:.200}")
    if unknown := sorted(map(str, entry.keys() - _FIELDS)):
        raise ConfigError(f"{where}: unknown fields {unknown}; there are {sorted(_FIELDS)}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: config must be a mapping, got {config!r:.80}")
    cls = _find_class(entry["class_name"], where)
    try:
        user = cls(config)
    except ConfigError as error:
        raise ConfigError([f"{where}.config.{problem}" for problem in error.problems]) from None
    return str(entry.get("name") or _name_of(cls)), user


def _find_class(path: str, where: str) -> type[BaseInteraction]:
    """``package.module.Class`` or ``file.py:Class``."""
    module, _, name = path.rpartition(":") if ".py:" in path else path.rpartition(".")
    if not module:
        raise ConfigError(f"{where}: class_name={path!r} must be package.module.Class or file.py:Class")
    found = getattr(load_user_module(module, key=f"{where}.class_name"), name, None)
    if not isinstance(found, type) or not issubclass(found, BaseInteraction):
        raise ConfigError(f"{where}: class_name={path!r} is not a subclass of BaseInteraction")
    return found


def _name_of(cls: type[BaseInteraction]) -> str:
    """``Gsm8kInteraction`` is called ``gsm8k``."""
    return cls.__name__.removesuffix("Interaction").lower() or cls.__name__
