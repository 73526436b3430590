"""The commands of a launch, word by word. ``golden/`` holds what a dry run prints; look at it before you update it."""

from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.hosts import Host
from jax_agent_rl.deploy.launch.plan import (
    LaunchPlan,
    Options,
    format_dry_run,
    make_plan,
    place,
    place_on_cpus,
    prepare,
)
from jax_agent_rl.deploy.launch.settings import Settings

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path("/opt/jax_agent_rl")
HERE = Host(name="gpu-1", address="10.0.0.1", local=True)
THERE = Host(name="me@gpu-2", address="10.0.0.2", local=False)
ALONE = Host(name="localhost", address="127.0.0.1", local=True)
SETTINGS = Settings(run_dir="runs/x", learner_devices=2, tensor_parallel_size=2, gpu_memory_utilization=None)


def options(**fields) -> Options:
    return Options(**{"device": "cuda", "root": ROOT, "venv": ROOT / ".venv-gpu"} | fields)


def plan_of(hosts: list[Host], gpus: int, wanted: Options) -> LaunchPlan:
    if wanted.device == "cpu":
        return make_plan(hosts, place_on_cpus(hosts, port=8100), SETTINGS, wanted)
    indices = {host: list(range(gpus)) for host in hosts}
    return make_plan(hosts, place(indices, SETTINGS, port=8100), SETTINGS, wanted)


@pytest.mark.parametrize(
    "name, hosts, gpus, wanted",
    [
        ("one_host", [ALONE], 4, options(config=Path("/home/me/my.yaml"), overrides=("seed=1",), resume=True)),
        ("two_hosts", [HERE, THERE], 4, options()),
        ("cpu", [ALONE], 0, options(device="cpu", venv=ROOT / ".venv-vllm")),
    ],
)
def test_a_dry_run_prints_these_commands(name: str, hosts: list[Host], gpus: int, wanted: Options):
    lines = format_dry_run(prepare(hosts, wanted), plan_of(hosts, gpus, wanted), ROOT)
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_an_environment_that_is_there_is_left_alone():
    assert prepare([HERE, THERE], options(install=False)).environment == ()


def test_a_users_own_configuration_needs_no_quickstart_data():
    assert prepare([HERE], options(config=Path("/c.yaml"))).data == ()


def test_servers_listen_on_loopback_on_one_host_and_in_the_network_on_several():
    alone, several = plan_of([ALONE], 4, options()), plan_of([HERE, THERE], 4, options())
    assert set(alone.urls.values()) == {"http://127.0.0.1:8100"}
    assert set(several.urls.values()) == {"http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://10.0.0.2:8101"}


def test_no_secret_stands_in_a_command():
    for plan in (plan_of([ALONE], 4, options()), plan_of([HERE, THERE], 4, options())):
        for command in (*plan.cluster, *plan.servers, plan.learner):
            assert "jax_agent_rl.deploy.launch.watchdog" in command.argv  # secrets go through its standard input
            assert not {"JAX_AGENT_RL_TOKEN", "RAY_AUTH_TOKEN"} & command.env.keys()
