"""Import of others' code (tools, rewards, …) from files, modules and installed packages.

A package registers names in entry-point groups, ``jax_agent_rl.<kind>`` for each of :data:`KINDS`::

    [project.entry-points."jax_agent_rl.agents"]
    second_look = "my_package.agents:SecondLook"

Nothing of it is imported before a configuration or a row uses the name. Names of this package, and
those that a run's own files register, come first. A package that fails to import fails only the
runs that use it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.utils.failures import describe_error, error_place
from jax_agent_rl.utils.near_names import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal[
    "agents",
    "tools",
    "rewards",
    "environments",
    "interactions",
    "losses",
    "advantages",
    "backends",
    "metric_sinks",
    "trace_sinks",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class InstalledName(str):
    """A name in the configuration that an installed package registers."""

    __slots__ = ()


@functools.cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return what installed packages register of a kind, by name. Nothing is imported.

    Raises:
        ConfigError: two packages register one name.
    """
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"jax_agent_rl.{kind}"):
        first_entry = entries.setdefault(entry.name, entry)
        if first_entry.value != entry.value:
            raise ConfigError(
                f"two packages register {entry.name!r} in {entry.group}: {_origin(first_entry)} and"
                f" {_origin(entry)}; uninstall one"
            )
    return entries


def load_installed(
    kind: Kind, name: str, *, fits: Callable[[Any], bool] = callable, expected: str = "callable"
) -> Any:
    """Import and return what an installed package registers under a name; None if none does.

    Args:
        kind: one of :data:`KINDS`.
        fits: returns whether an object is of this kind.
        expected: what it must be, for messages.

    Raises:
        ConfigError: it cannot be imported or is something else; names the package.
    """
    entry = installed(kind).get(name)
    if entry is None:
        return None
    try:
        plugin = entry.load()
    except Exception as error:  # whatever a package raises when it is imported
        raise ConfigError(
            f"{_origin(entry)} cannot be imported ({describe_error(error)}); repair or uninstall it"
        ) from error
    if not fits(plugin):
        raise ConfigError(
            f"{_origin(entry)} must be {expected}, got {plugin!r:.100}; repair or uninstall it"
        )
    return plugin


def _origin(entry: EntryPoint) -> str:
    """Return an entry point with its package, for messages."""
    package = "an unknown package"
    if entry.dist is not None:
        package = f"the package {entry.dist.name} {entry.dist.version}"
    return f"{entry.name} = {entry.value} of {package} ({entry.group})"


def split_class(path: str) -> tuple[str, str]:
    """Return the module or the file of a ``class_name``, and the name in it.

    The module is empty for the name of an entry point.
    """
    separator = ":" if ".py:" in path else "."
    module, _, name = path.rpartition(separator)
    return module, name


def find_class(path: str, kind: Kind, *, where: str) -> Any:
    """Return the class that a ``class_name`` of the configuration names.

    Args:
        path: ``package.module.Class``, ``file.py:Class``, or a name that an installed package
            registers.
        kind: of the names that installed packages register.
        where: the entry that has this ``class_name``, for messages.

    Returns:
        None if the module has no such name.

    Raises:
        ConfigError: the module cannot be imported, or no package registers the name.
    """
    module_name, name = split_class(path)
    if module_name:
        module = load_user_module(module_name, key=f"{where}.class_name")
        return getattr(module, name, None)

    plugin = load_installed(kind, name, fits=lambda _: True)
    if plugin is None:
        known = sorted(installed(kind))
        raise ConfigError(
            f"{where}: class_name={path!r} must be package.module.Class, file.py:Class, or a name"
            f" that an installed package registers; {did_you_mean(name, known)}there are {known}"
        )
    return plugin


def read_entries(path: Path, *, key: str, name: str) -> list[Any]:
    """Return the list called ``name`` in the YAML file that ``key`` of the configuration names.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    import yaml

    from jax_agent_rl.utils.yaml_text import load_yaml

    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{key}={str(path)!r}: no such file (relative to {os.getcwd()})"
        ) from None
    except OSError as error:
        raise ConfigError(f"{key}={str(path)!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={str(path)!r} is not valid YAML: {error}") from None

    entries = tree.get(name) if isinstance(tree, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{key}={str(path)!r} must hold `{name}:` with a list of entries, got {tree!r:.100}"
        )
    return entries


def load_user_module(where: str, *, key: str) -> ModuleType:
    """Import ``my_tools.py``, ``path/to/my_tools.py`` or ``package.my_tools``, once per process.

    Modules beside the file, and those in the working directory, are found from then on, after all
    others.

    Args:
        where: a path (ends with ``.py`` or has a path separator) or a dotted module name.
        key: the config key that names it, for error messages.

    Raises:
        ConfigError: there is no such file or module, or importing it raised. This package's own
            errors (a wrongly declared tool, say) pass through.
    """
    is_path = where.endswith(".py") or os.sep in where
    setting = f"{key}={where!r}"
    path = Path(where).expanduser()
    if is_path and not path.is_file():
        raise ConfigError(f"{setting}: no such file (relative to {os.getcwd()})")
    if not is_path:
        _refuse_standard_module(where, setting)

    if is_path:
        _append_to_path(str(path.resolve().parent))
    _append_to_path(os.getcwd())

    try:
        if is_path:
            module = _import_file(path)
        else:
            module = importlib.import_module(where)
    except JaxAgentRLError:
        raise
    except ModuleNotFoundError as error:
        # The module itself may be missing, or one that it imports.
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise ConfigError(
                f"{setting}: no such module in {os.getcwd()} or the environment; a file must end"
                " with .py"
            ) from error
        raise ConfigError(
            f"{setting}: it imports {error.name!r}, which is not installed"
        ) from error
    except SystemExit as error:
        raise ConfigError(
            f"{setting}: importing it exits, with {error.code!r}; remove that"
            f" ({error_place(error)})"
        ) from None
    except Exception as error:
        raise ConfigError(f"{setting}: importing it raised {describe_error(error)}") from error

    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        folder = next(iter(module.__path__), "")
        raise ConfigError(
            f"{setting}: {folder} is a folder without __init__.py, so nothing is imported; name a"
            " file in it"
        )
    return module


def _append_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _refuse_standard_module(where: str, setting: str) -> None:
    """Refuse a module of Python's own if the working directory has one of that name.

    The user meant that one.
    """
    name, _, _ = where.partition(".")
    if name not in sys.stdlib_module_names:
        return
    for user_path in (Path(f"{name}.py"), Path(name)):
        if user_path.exists():
            raise ConfigError(
                f"{setting}: a module of Python's own has this name; name the file, {user_path}"
            )


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve(strict=True)
    path_digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    name = f"_user_{path.stem}_{path_digest}"
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
