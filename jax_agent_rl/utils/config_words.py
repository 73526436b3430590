"""How a command line names a configuration and its keys.

It is ``[CONFIG] [KEY=VALUE]…``, or ``--config FILE [KEY=VALUE]…``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from jax_agent_rl.errors import ConfigError


def split_config(words: Iterable[str], option: str | Path | None) -> tuple[Path | None, list[str]]:
    """Separate the configuration from the keys that override it.

    Args:
        words: positional arguments, in any order; a file may have an equals sign in its name.
        option: the value of ``--config``.

    Returns:
        The file or the name of a recipe, None if none is named; and the keys in their order.

    Raises:
        ConfigError: several files are named.

    >>> split_config(["quickstart", "seed=1"], None)
    (PosixPath('quickstart'), ['seed=1'])
    """
    files: list[str] = []
    if option is not None:
        files.append(str(option))

    keys = []
    for word in words:
        # Unlike Path.is_file, os.path.isfile is False for a value too long to be the name of a
        # file.
        if "=" in word and not os.path.isfile(word):
            keys.append(word)
        elif word not in files:
            files.append(word)

    if len(files) > 1:
        names = " and ".join(map(repr, files))
        raise ConfigError(
            f"{names} both stand where the configuration does: give one; keys are written key=value"
        )
    file = Path(files[0]) if files else None
    return file, keys
