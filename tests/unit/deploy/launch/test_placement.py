"""Which GPUs are whose: the rule of the help text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.deploy.launch.hosts import Host
from jax_agent_rl.deploy.launch.plan import ServerPlacement, place, place_on_cpus, report_idle
from jax_agent_rl.deploy.launch.settings import Settings
from jax_agent_rl.errors import LaunchError

HERE = Host(name="a", address="10.0.0.1", local=True)
THERE = Host(name="b", address="10.0.0.2", local=False)


def settings(learner: int = 1, group: int = 1, utilization: float | None = None) -> Settings:
    return Settings(
        run_dir="runs/x", learner_devices=learner, tensor_parallel_size=group, gpu_memory_utilization=utilization
    )


def place_on(*counts: int, wanted: Settings | None = None, **options) -> ServerPlacement:
    gpus = dict(zip((HERE, THERE), (list(range(count)) for count in counts), strict=False))
    return place(gpus, wanted or settings(), port=8100, **options)


def groups(placement: ServerPlacement) -> list[tuple[str, tuple[int, ...], int]]:
    return [(server.host.name, server.gpus, server.port) for server in placement.servers]


def test_the_learner_takes_the_first_gpus_and_the_others_serve():
    placement = place_on(8, wanted=settings(learner=4, group=2))
    assert placement.learner_gpus == (0, 1, 2, 3)
    assert groups(placement) == [("a", (4, 5), 8100), ("a", (6, 7), 8101)]
    assert placement.utilization == 0.9 and placement.learner_memory is None


def test_one_gpu_is_shared_and_its_memory_divided():
    placement = place_on(1)
    assert placement.learner_gpus == (0,) and groups(placement) == [("a", (0,), 8100)]
    assert (placement.utilization, placement.learner_memory) == (0.45, 0.45)


def test_a_host_with_too_few_gpus_for_both_is_shared_as_a_whole():
    placement = place_on(4, wanted=settings(learner=4, group=2))
    assert groups(placement) == [("a", (0, 1), 8100), ("a", (2, 3), 8101)] and placement.learner_memory


def test_further_hosts_serve_with_all_of_their_gpus_and_ports_count_per_host():
    placement = place_on(2, 4, wanted=settings(learner=2, group=2))
    assert groups(placement) == [("b", (0, 1), 8100), ("b", (2, 3), 8101)]
    assert [server.name for server in placement.servers] == ["server-0", "server-1"]


def test_gpus_that_neither_learn_nor_serve_are_named_with_what_to_change():
    gpus = {HERE: list(range(8)), THERE: list(range(6))}
    wanted = settings(learner=1, group=4)
    here, there = report_idle(gpus, place(gpus, wanted, port=8100), wanted)
    assert here == (
        "a: GPUs 5, 6, 7 idle, too few for a server of 4: set rollout.vllm.tensor_parallel_size to a divisor of 7, or "
        "the product of learner.mesh to 4"
    )
    assert there.startswith("b: GPUs 4, 5 idle") and there.endswith("to a divisor of 6")
    assert not report_idle(gpus, place(gpus, settings(learner=2, group=2), port=8100), settings(learner=2, group=2))


def test_the_users_utilization_is_kept():
    assert place_on(2, wanted=settings(utilization=0.7)).utilization == 0.7
    placement = place_on(1, wanted=settings(utilization=0.3))
    assert (placement.utilization, placement.learner_memory) == (0.3, 0.6)


def test_named_gpus_replace_the_rule():
    placement = place_on(4, learner_gpus=[3], server_gpus=[1, 2])
    assert placement.learner_gpus == (3,) and groups(placement) == [("a", (1,), 8100), ("a", (2,), 8101)]
    assert place_on(2, 1, server_gpus=[]).servers[0].host is THERE
    assert place_on(2, learner_gpus=[0], server_gpus=[0, 1]).learner_memory


@pytest.mark.parametrize(
    "counts, options, message",
    [
        ((2,), {"wanted": settings(learner=4)}, r"a: learner.mesh has 4 device\(s\) and the learner 2 GPU"),
        ((2,), {"wanted": settings(group=4)}, "tensor_parallel_size=4, but no host has 4"),
        ((2,), {"learner_gpus": [5]}, r"a: there is no usable GPU \[5\]; it has \[0, 1\]"),
        ((2,), {"learner_gpus": [0, 1]}, r"learner.mesh has 1 device\(s\) and the learner 2"),
        ((1,), {"wanted": settings(utilization=0.95)}, "leaves nothing for the learner"),
    ],
)
def test_what_does_not_fit_is_said(counts, options, message):
    with pytest.raises(LaunchError, match=message):
        place_on(*counts, **options)


def test_every_host_serves_on_cpus():
    placement = place_on_cpus([HERE, THERE], port=8100)
    assert groups(placement) == [("a", (), 8100), ("b", (), 8100)] and placement.utilization is None


@given(
    counts=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    learner=st.integers(1, 16),
    group=st.sampled_from([1, 2, 4]),
)
def test_no_gpu_is_given_twice_unless_it_is_shared_on_purpose(counts, learner, group):
    try:
        placement = place_on(*counts, wanted=settings(learner=learner, group=group))
    except LaunchError:
        return
    taken = [(server.host.name, gpu) for server in placement.servers for gpu in server.gpus]
    assert len(taken) == len(set(taken)) and all(len(server.gpus) == group for server in placement.servers)
    assert not {("a", gpu) for gpu in placement.learner_gpus} & set(taken)
    ports = [(server.host.name, server.port) for server in placement.servers]
    assert len(ports) == len(set(ports))
