"""Import of a user's code (tools, reward functions) from a Python file or a module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from jax_agent_rl.errors import ConfigError, JaxAgentRLError


def load_user_module(where: str, *, key: str) -> ModuleType:
    """Import ``my_tools.py``, ``path/to/my_tools.py`` or ``package.my_tools``, once per process.

    Args:
        where: a path (ends with ``.py`` or has a path separator) or a dotted module name.
        key: the config key that names it, for error messages.

    Raises:
        ConfigError: there is no such file or module, or importing it raised. This package's own errors (a wrongly
            declared tool, say) pass through.
    """
    is_path = where.endswith(".py") or os.sep in where
    try:
        return _import_file(Path(where)) if is_path else importlib.import_module(where)
    except JaxAgentRLError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{key}={where!r}: no such file (relative to {os.getcwd()})") from None
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise ConfigError(f"{key}={where!r}: no such module; a file must end with .py") from None
        raise ConfigError(f"{key}={where!r}: it imports {error.name!r}, which is not installed") from error
    except Exception as error:
        raise ConfigError(f"{key}={where!r}: importing it raised {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve(strict=True)
    name = f"_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before exec: dataclasses and type hints look up their own module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
