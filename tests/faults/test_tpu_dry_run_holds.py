"""``--dry-run`` and a launch in a made-up Google Cloud: what is printed is what is run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cloud import Cloud

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
# No second look at a slice that is ready: how many there are depends on how long the run takes.
KEPT = ["--bucket", "gs://b", "--config", CONFIG, "--poll", 1000]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


def printed(cloud: Cloud, *arguments: object) -> list[str]:
    lines = cloud.launch(*arguments, "--dry-run").stdout.splitlines()
    return [comparable(" ".join(shlex.split(line)[2:])) for line in lines if line.startswith("+ ")]


def made(cloud: Cloud, *arguments: object) -> list[str]:
    """The calls of a launch, without those of the hosts."""
    result = cloud.launch(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return [comparable(call) for call in cloud.calls() if not call.startswith("storage ")]


def comparable(call: str) -> str:
    """Return the call without what only a launch knows: the folder of the archive."""
    return re.sub(r" scp \S+", " scp", call)


@pytest.mark.parametrize(
    "how", [[], ["--spot", "--env", "A=b", "--prepare", "true"], ["--keep", "--resume"]]
)
def test_a_dry_run_prints_the_calls_of_a_launch_in_their_order(cloud: Cloud, how: list[str]):
    expected = printed(cloud, *KEPT, *how)
    assert cloud.calls() == []
    assert any(" create " in call for call in expected)
    assert made(cloud, *KEPT, *how) == expected
