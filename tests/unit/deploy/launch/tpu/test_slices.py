"""Names of slices. Chips, hosts and accelerator types are those of Google's tables for each
generation.
"""

import pytest

from jax_agent_rl.deploy.launch.tpu.gcloud import SHAPES, parse_topology
from jax_agent_rl.errors import LaunchError
from tests.messages import raises


@pytest.mark.parametrize(
    ("name", "accelerator_type", "hosts", "chips_per_host"),
    [
        ("v5e:1x1", "v5litepod-1", 1, 1),
        ("v5e:2x4", "v5litepod-8", 1, 8),
        ("v5e:4x4", "v5litepod-16", 4, 4),
        ("V6E:16x16", "v6e-256", 64, 4),
        ("v5p:2x2x1", "v5p-8", 1, 4),
        ("v5p:4x4x4", "v5p-128", 16, 4),
        ("v4:2x2x4", "v4-32", 4, 4),
    ],
)
def test_a_name_gives_gclouds_type_and_the_hosts(
    name: str, accelerator_type: str, hosts: int, chips_per_host: int
):
    topology = parse_topology(name)
    assert (topology.accelerator_type, topology.hosts, topology.chips // topology.hosts) == (
        accelerator_type,
        hosts,
        chips_per_host,
    )


def test_no_accelerator_type_stands_for_two_shapes():
    for generation, shapes in SHAPES.items():
        types = [parse_topology(f"{generation}:{shape}").accelerator_type for shape in shapes]
        assert len(set(types)) == len(types)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("v5e", {"fix": "GENERATION:SHAPE"}),
        ("v5e:3x3", {"key": "v5e", "fix": "1x1, 2x2"}),
        ("v5p:4x4", {"key": "v5p", "fix": "2x2x1"}),
        ("v5:4x4", {"value": "'v5'", "fix": "did you mean"}),
        ("tpu7x:2x2x1", {"value": "GKE only"}),
        ("2*v5e:4x4", {"value": "more than one slice", "fix": "--topology v5e:4x4 --slices 2"}),
    ],
)
def test_what_is_no_slice_is_refused_with_what_there_is(name: str, named: dict):
    with raises(LaunchError, **named):
        parse_topology(name)


def test_every_generation_has_a_slice_of_four_chips_on_one_host():
    for generation, shapes in SHAPES.items():
        topology = parse_topology(f"{generation}:{shapes[-1]}").one_host
        assert (topology.chips, topology.hosts) == (4, 1)
        assert parse_topology(str(topology)) == topology
