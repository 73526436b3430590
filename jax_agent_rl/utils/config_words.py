"""How a command line names a configuration and its keys: ``[CONFIG] [KEY=VALUE]…``, or ``--config FILE``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from jax_agent_rl.errors import ConfigError


def split_config(words: Iterable[str], option: str | Path | None) -> tuple[Path | None, list[str]]:
    """Tell the configuration from the keys that override it.

    Args:
        words: positional arguments, in any order; a file may have an equals sign in its name.
        option: the value of ``--config``.

    Returns:
        The file, or the name of a recipe; None if none is named. And the keys in their order.

    Raises:
        ConfigError: several files are named.

    >>> split_config(["quickstart", "seed=1"], None)
    (PosixPath('quickstart'), ['seed=1'])
    """
    files: dict[str, None] = {} if option is None else {str(option): None}
    keys = []
    for word in words:
        # Unlike Path.is_file, os.path.isfile is False for a value too long to be the name of a
        # file.
        if "=" in word and not os.path.isfile(word):
            keys.append(word)
        else:
            files[word] = None
    if len(files) > 1:
        named = " and ".join(map(repr, files))
        raise ConfigError(
            f"{named} both stand where the configuration does: give one; keys are written key=value"
        )
    file = next(iter(files), None)
    return (None if file is None else Path(file)), keys
