"""``gpu.sh`` on two "hosts" that are two Ray nodes of this machine: Ray is real, ssh, servers and learner are fakes."""

import importlib.util
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.launching import Machines, ended_after, is_running, read_until, wait_for_end
from tests.ports import free_ports, is_free

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    machines = Machines(tmp_path)
    machines.use_real_ray()
    return machines


def arguments(port: int) -> list[str]:
    hosts = ["--hosts", "127.0.0.2,127.0.0.3", "--ray-port", str(port + 1)]
    return ["--device", "cpu", "--no-install", "--config", str(CONFIG), "--port", str(port), *hosts]


def test_servers_run_on_their_nodes_and_the_learner_is_given_their_addresses(machines: Machines):
    port = free_ports(2)
    machines.variables["FAKE_LEARNER"] = "ends 0"
    result = machines.launch(*arguments(port))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"rollout.urls=[http://127.0.0.2:{port},http://127.0.0.3:{port}]" in result.stdout
    assert result.stdout.count("closed the engine") == 2
    servers = machines.processes("rollout-server")
    assert len(servers) == 2 and not any(map(is_running, servers))
    assert all(is_free(p, host) for p in (port, port + 1) for host in ("127.0.0.2", "127.0.0.3"))


def test_ctrl_c_ends_learner_servers_and_both_nodes(machines: Machines):
    port = free_ports(2)
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*arguments(port))
    read_until(process, "[learner] training")
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "saved a checkpoint" in rest, rest
    assert not any(map(is_running, machines.processes("rollout-server") + machines.processes("train")))
    assert is_free(port + 1, "127.0.0.2")


def test_a_killed_launcher_leaves_nothing_on_any_node(machines: Machines):
    port = free_ports(2)
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*arguments(port))
    read_until(process, "[learner] training")
    process.kill()
    for pid in machines.processes("rollout-server") + machines.processes("train"):
        wait_for_end(pid)
    process.wait()


def test_a_server_that_dies_on_its_node_ends_the_launch_and_is_named(machines: Machines):
    port = free_ports(2)
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*arguments(port))
    read_until(process, "[learner] training")
    victim, other = machines.processes("rollout-server")

    os.kill(victim, signal.SIGKILL)
    rest = "".join(process.stdout)
    assert process.wait() == 1 and "saved a checkpoint" in rest, rest
    assert "ended on 127.0.0." in rest and "(exit status 137)" in rest and "servers on 127.0.0.2 ended" in rest
    wait_for_end(other)


def test_a_port_that_is_taken_on_a_node_is_named(machines: Machines):

    port = free_ports(2)
    with socket.create_server(("127.0.0.3", port)):
        result = machines.launch(*arguments(port))
    assert result.returncode == 1
    assert f"server-1: cannot listen on 127.0.0.3:{port}: Address already in use" in result.stdout, result.stdout
