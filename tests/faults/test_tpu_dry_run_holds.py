"""``--dry-run`` and a launch in a made-up Google Cloud: what is printed is what is run."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cloud import Cloud
from tests.ports import free_port

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
    before = len(cloud.calls())
    result = cloud.launch(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return [comparable(call) for call in cloud.calls()[before:] if not call.startswith("storage ")]


def comparable(call: str) -> str:
    """Without what only a launch knows: the folder of the archive, addresses."""
    return re.sub(r"ADDRESS-OF-[-\w]+", "127.0.0.1", re.sub(r" scp \S+", " scp", call))


def are_among(some: Sequence[str], all_of_them: Sequence[str]) -> bool:
    """In this order."""
    left = iter(all_of_them)
    return all(call in left for call in some)


@pytest.mark.parametrize("how", [[], ["--queued", "--spot"]])
def test_a_dry_run_prints_the_calls_of_a_launch_in_their_order(cloud: Cloud, how: list[str]):
    expected = printed(cloud, *KEPT, *how)
    assert cloud.calls() == []
    first = made(cloud, *KEPT, *how, "--keep")
    again = made(cloud, *KEPT, *how)
    assert are_among(first, expected), first
    assert are_among(again, expected), again
    assert any(" create " in call for call in first) and any(" running " in call for call in again)


def test_a_dry_run_prints_the_calls_of_a_launch_with_hosts_that_sample(cloud: Cloud):
    arguments = [*KEPT, "--rollout-hosts", 1, "--rollout-port", free_port()]
    expected = printed(cloud, *arguments)
    unknown = Counter(made(cloud, *arguments)) - Counter(expected)
    assert not unknown, unknown
