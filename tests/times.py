"""Where the tests' time goes, by file: processor time, which another load does not change, and time
spent waiting.

::

    python -m pytest -p tests.times --times=times.jsonl ...
    python -m tests.times times.jsonl [rows]
"""

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", type=Path, help="append each test's seconds to this file, as JSON lines"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file: Path | None = item.config.getoption("--times")
    if file is None:
        yield
        return
    begin = time.monotonic()
    processor = _processor_seconds()
    yield
    took = {"wall": time.monotonic() - begin, "cpu": _processor_seconds() - processor}
    with file.open("a") as lines:
        lines.write(json.dumps({"test": item.nodeid, **took}) + "\n")


def _processor_seconds() -> float:
    """Return those of this process and of its ended children, with those of :mod:`tests.warm`."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + warm.processor_seconds()


def table(lines: list[str], rows: int) -> str:
    """The files that take longest, with their slowest test."""
    files: dict[str, list[dict]] = defaultdict(list)
    for line in map(json.loads, lines):
        files[line["test"].partition("::")[0]].append(line)
    total = {name: sum(test["cpu"] for test in tests) for name, tests in files.items()}
    wall = {name: sum(test["wall"] for test in tests) for name, tests in files.items()}
    text = [f"{'cpu s':>8} {'wall s':>8} {'tests':>6}  file (slowest test)"]
    text.append(f"{sum(total.values()):8.0f} {sum(wall.values()):8.0f} {len(lines):6}  all")
    for name in sorted(files, key=lambda name: max(total[name], wall[name]), reverse=True)[:rows]:
        slowest = max(files[name], key=lambda test: test["wall"])
        label = f"{name} ({slowest['test'].partition('::')[2]}: {slowest['wall']:.0f} s)"
        text.append(f"{total[name]:8.1f} {wall[name]:8.1f} {len(files[name]):6}  {label}")
    return "\n".join(text)


if __name__ == "__main__":
    print(
        table(
            Path(sys.argv[1]).read_text().splitlines(),
            int(sys.argv[2]) if len(sys.argv) > 2 else 40,
        )
    )
