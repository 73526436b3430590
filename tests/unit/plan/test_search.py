"""Which layouts are worth compiling; nothing is compiled here."""

import dataclasses

import pytest

from jax_agent_rl.config import load
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.plan.search import AXES, candidates, search
from jax_agent_rl.plan.topology import Slice
from tests.unit.plan.recipe import recipe


class Device:
    """As much of a device as a mesh looks at."""

    platform = device_kind = "cpu"

    def __init__(self, number: int, host: int = 0) -> None:
        self.id = number
        self.process_index = host


@pytest.fixture
def found(tmp_path):
    def run(topology="v5e:2x2", *overrides, hosts=1):
        file = recipe(tmp_path / f"of-{hosts}")
        slice = Slice.parse(topology)
        configured = lambda more: load(file, [*overrides, *more])  # noqa: E731
        devices = [Device(number, number * hosts // slice.chips) for number in range(slice.chips)]
        return candidates(configured, load_config(file.parent / "model"), slice, devices)

    return run


def test_every_layout_takes_all_chips_and_divides_the_model(found):
    made = found()
    meshes = {tuple(getattr(one.config.learner.mesh, axis) for axis in AXES) for one in made}
    # 4 = 4 x 1 = 2 x 2 over fsdp, context and tensor; no experts. Of 4 heads with 2 for keys 4 chips take one each.
    assert meshes == {(4, 1, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 1, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2)}
    assert {one.config.rollout.jetstream.mesh.tensor for one in made} == {1, 2, 4}
    assert {one.config.learner.rows_per_micro_batch for one in made} == {1, 2, 4, 8}


def test_the_estimated_best_come_first(found):
    seconds = [one.estimate.seconds for one in found()]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_every_host_samples(found):
    alone, both = ({one.overrides: one.estimate.seconds for one in found("v5e:2x4", hosts=n)} for n in (1, 2))
    assert all(both[layout] < alone[layout] for layout in both)


def test_what_cannot_fit_is_not_compiled_and_if_nothing_fits_it_is_said(found):
    with pytest.raises(ConfigError, match=r"what stays on a chip takes \S+ \wiB of 15.8 GiB.*a smaller .*cache_tokens"):
        found("v5e:2x2", "rollout.max_in_flight=2000000")


@dataclasses.dataclass
class Planned:
    """A plan that compiled nothing."""

    fits: bool
    step: object


@dataclasses.dataclass
class Step:
    seconds: float


def test_of_those_compiled_the_fastest_that_fits_is_first(found):
    results = iter([Planned(False, Step(1.0)), Planned(True, Step(3.0)), Planned(True, Step(2.0))])
    made = search(found(), lambda config: next(results), budget=3)
    assert [(one.plan.fits, one.plan.step.seconds) for one in made] == [(True, 2.0), (True, 3.0), (False, 1.0)]
