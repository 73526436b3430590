"""The journal of a collection while it runs, from which a later process continues.

It is a JSON Lines file that only grows::

    {"settings": {…}}                                  of the collection; no other may write here
    {"served": {…}}                                    which weights rollout servers had
    {"row": 3, "records": [{…}, …], "dropped": {…}}    a finished prompt, in order of completion
    {"lost": {"cancelled": 5}}                         started, but lost when a process ended

A last line cut off by a crash is removed. A prompt without any trajectory is tried again; its
losses stay counted. Halves of surrogate pairs become question marks, because no output format can
hold them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.types import DropReason
from jax_agent_rl.utils.files import make_folder, writing
from jax_agent_rl.utils.surrogates import json_line


class Journal:
    """The journal of a collection; a context manager.

    Args:
        file: created if it does not exist.
        settings: everything on which the trajectories depend.

    Attributes:
        num_trajectories: number of trajectories in it.
        dropped: numbers of trajectories that were started and lost, by reason.
        sizes: bytes of each finished prompt's line, by the prompt's number.

    Raises:
        ConfigError: it belongs to another collection, or another process writes it.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file = file
        self.num_trajectories = 0
        self.dropped: Counter[str] = Counter()
        self.sizes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._served: dict[str, Any] | None = None

        make_folder(file.parent)
        self._stream = file.open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(settings)
        except BlockingIOError:
            self._stream.close()
            raise ConfigError(
                f"{file}: another process writes to it; choose another --out"
            ) from None
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @property
    def started(self) -> int:
        """Trajectories started, in all processes that ended by themselves."""
        return self.num_trajectories + self.dropped.total()

    def add(
        self, number: int, records: Sequence[Mapping[str, Any]], dropped: Mapping[DropReason, int]
    ) -> None:
        """Record a finished prompt.

        Args:
            number: number of the prompt in its file.
            records: its rows; empty if every trajectory was lost.
            dropped: numbers of lost trajectories, by reason.
        """
        line = {
            "row": number,
            "records": records,
            "dropped": {str(reason): count for reason, count in dropped.items()},
        }
        offset = self._stream.seek(0, os.SEEK_END)
        self._append(line)
        self._count(line, offset, self._stream.tell() - offset)

    def lose(self, lost: Mapping[DropReason, int]) -> None:
        """Record trajectories that were started, but will not be added."""
        counts = {str(reason): count for reason, count in lost.items() if count}
        if counts:
            self._append({"lost": counts})
            self.dropped.update(counts)

    def require_served(self, served: Mapping[str, Any]) -> None:
        """Record which weights rollout servers have; a later process has to find the same ones.

        Raises:
            ConfigError: the recorded trajectories were sampled from other weights.
        """
        if self._served is not None and self.sizes:
            require_same(served, self._served, self.file)
        if self._served != served:
            self._served = dict(served)
            self._append({"served": self._served})

    def lines(self, numbers: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of each of these prompts."""
        for number in numbers:
            self._stream.seek(self._offsets[number])
            yield json.loads(self._stream.readline())["records"]

    def _append(self, line: Mapping[str, Any]) -> None:
        with writing(self.file):
            self._stream.write(json_line(line).encode())
            self._stream.flush()

    def _read(self, settings: Mapping[str, Any]) -> None:
        self._stream.seek(0)
        offset = 0
        recorded_settings = None
        for raw in self._stream:
            if not raw.endswith(b"\n"):  # cut off by a crash
                break
            line = json.loads(raw)
            if "settings" in line:
                recorded_settings = line["settings"]
            elif "served" in line:
                self._served = line["served"]
            elif "lost" in line:
                self.dropped.update(line["lost"])
            else:
                self._count(line, offset, len(raw))
            offset += len(raw)

        if recorded_settings is not None and self.sizes:
            require_same(settings, recorded_settings, self.file)
        elif recorded_settings != _as_json(settings):
            # Nothing was collected with the other settings: start over.
            offset = 0
            self.dropped.clear()
        self._stream.truncate(offset)
        if not offset:
            self._append({"settings": settings})

    def _count(self, line: Mapping[str, Any], offset: int, size: int) -> None:
        self.dropped.update(line["dropped"])
        self.num_trajectories += len({record["trajectory_id"] for record in line["records"]})
        if line["records"]:
            number = line["row"]
            self._offsets[number] = offset
            self.sizes[number] = size


def require_same(settings: Mapping[str, Any], recorded: Mapping[str, Any], where: Path) -> None:
    """Compare the settings of two collections as JSON, key by key.

    Args:
        settings: settings of this collection.
        recorded: settings of an earlier one.
        where: file in which they are recorded.

    Raises:
        ConfigError: they differ; names the keys and both values.
    """
    current = _flat(_as_json(settings))
    previous = _flat(recorded)
    differences = []
    for key in sorted(current.keys() | previous.keys()):
        if current.get(key) != previous.get(key):
            differences.append(f"{key} was {previous.get(key)!r}, is {current.get(key)!r}")
    if differences:
        raise ConfigError(
            f"{where} contains trajectories collected with other settings"
            f" ({'; '.join(differences[:5])}); choose another --out, or use the same settings to"
            " continue"
        )


def _as_json(settings: Mapping[str, Any]) -> Any:
    """Return settings as they are read back from a file."""
    return json.loads(json.dumps(settings))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their paths, such as ``rollout.strategy``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}.")
        else:
            flat[path] = value
    return flat
