"""What goes wrong in a launch is said with the host's name, and nothing is left running. All machines are made up."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.launching import Machines, ended_after, is_running, read_until, wait_for_end
from tests.ports import free_ports, is_free

TWO_HOSTS = "127.0.0.2,127.0.0.3"
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    """This machine and 127.0.0.3 have two GPUs each."""
    machines = Machines(tmp_path)
    machines.gpus(2)
    machines.gpus(2, host="127.0.0.3")
    return machines


@pytest.fixture
def port() -> int:
    """The first of three ports that are free."""
    return free_ports(3)


def ready(port: int, *more: str) -> list[str]:
    """Arguments of a launch whose environment is there."""
    return ["--no-install", "--config", str(CONFIG), "--port", str(port), *more]


def test_a_dry_run_runs_nothing(machines: Machines):
    result = machines.launch("--dry-run", "--hosts", "gpu-1,gpu-2", "trainer.steps=3")
    assert result.returncode == 0, result.stderr
    commands = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    assert commands[-1].endswith("rollout.token_env=JAX_AGENT_RL_TOKEN") and " train " in commands[-1]
    assert machines.calls() == []


def test_a_dry_run_needs_no_environment(machines: Machines):
    machines.variables["JAX_AGENT_RL_VENV"] = str(machines.folder / "not-there")
    assert machines.launch("--dry-run").returncode == 0
    assert not (machines.folder / "not-there").exists()


def test_the_environment_is_made_once_and_the_quickstart_brings_its_model_and_data(machines: Machines, port: int):
    first = machines.launch("--port", port)
    assert first.returncode == 0, first.stdout + first.stderr
    installs = [call for call in machines.calls() if "-m pip install" in call]
    assert any("constraints-gpu.txt" in call and call.endswith("[gpu]") for call in installs)
    assert len(machines.processes("fetch-model")) == len(machines.processes("prepare")) == 1
    assert machines.launch("--port", port).returncode == 0
    assert [call for call in machines.calls() if "-m pip install" in call] == installs


def test_an_environment_that_cannot_be_made_is_named_with_its_host(machines: Machines):
    # It has pip, so that the two hosts, which share a disk here, do not both create it.
    machines.write(
        "venv/bin/python",
        """#!/usr/bin/env bash
        [ "$2" = "import pip" ] && exit 0
        echo "no space left" >&2; exit 1
        """,
    )
    result = machines.launch("--hosts", TWO_HOSTS)
    assert result.returncode == 1 and "[127.0.0.3] no space left" in result.stdout
    for host in ("127.0.0.2", "127.0.0.3"):
        assert f"{host}: {CONFIG.parents[1] / 'launch' / 'gpu_environment.sh'} cuda failed, see above" in result.stderr


def test_the_exit_status_is_the_learners_and_everything_has_ended(machines: Machines, port: int):
    machines.variables["FAKE_LEARNER"] = "ends 7"
    result = machines.launch(*ready(port))
    assert result.returncode == 7, result.stdout + result.stderr
    assert f"rollout.urls=[http://127.0.0.1:{port}]" in result.stdout
    assert "[server-0] closed the engine" in result.stdout
    assert not any(map(is_running, machines.processes("rollout-server"))) and is_free(port)


def test_ctrl_c_lets_the_learner_save_and_leaves_nothing(machines: Machines, port: int):
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*ready(port, "--learner-gpus", "0", "--server-gpus", "0,1"))
    read_until(process, "[learner] training")
    rest = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "[learner] saved a checkpoint" in rest, rest
    assert rest.index("saved a checkpoint") < rest.index("closed the engine")
    servers = machines.processes("rollout-server")
    assert len(servers) == 2 and not any(map(is_running, servers + machines.processes("train")))
    assert is_free(port) and is_free(port + 1)


def test_a_server_that_dies_ends_the_launch_after_the_learner_has_saved(machines: Machines, port: int):
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*ready(port))
    read_until(process, "[learner] training")
    (server,) = machines.processes("rollout-server")
    os.kill(server, signal.SIGKILL)
    rest = "".join(process.stdout)
    assert process.wait() == 1 and "saved a checkpoint" in rest
    assert "server-0 on localhost ended (exit status 137)" in rest
    assert not any(map(is_running, machines.processes("train")))


def test_a_killed_launcher_leaves_nothing(machines: Machines, port: int):
    machines.variables["FAKE_LEARNER"] = "waits"
    process = machines.start(*ready(port))
    read_until(process, "[learner] training")
    process.kill()
    for pid in machines.processes("rollout-server") + machines.processes("train"):
        wait_for_end(pid)
    process.wait()
    assert is_free(port)


def test_a_server_that_cannot_start_is_named(machines: Machines, port: int):
    machines.write("venv/bin/jax-agent-rl", "#!/usr/bin/env bash\necho 'error: no memory'; exit 2\n")
    result = machines.launch(*ready(port))
    assert result.returncode == 1 and "[server-0] error: no memory" in result.stdout
    assert "server-0 on localhost ended (exit status 2)" in result.stderr


def test_a_port_that_is_taken_is_found_before_anything_starts(machines: Machines, port: int):

    with socket.create_server(("127.0.0.1", port)):
        result = machines.launch(*ready(port))
    assert result.returncode == 1 and machines.processes("rollout-server") == []
    assert f"localhost: cannot listen on 127.0.0.1:{port}: Address already in use" in result.stderr


def test_without_nvidia_smi_the_missing_driver_is_named(machines: Machines):
    machines.write("path/nvidia-smi", "#!/usr/bin/env bash\nexit 127\n")
    result = machines.launch("--no-install")
    assert result.returncode == 1
    assert "localhost: there is no nvidia-smi, so no NVIDIA driver: install driver 580 or newer" in result.stderr


def test_a_driver_that_does_not_answer_is_quoted(machines: Machines):
    machines.write("path/nvidia-smi", "#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'; exit 9\n")
    result = machines.launch("--no-install")
    assert (
        result.returncode == 1 and "localhost: nvidia-smi finds no usable GPU: NVIDIA-SMI has failed" in result.stderr
    )


def test_every_host_that_will_not_do_is_named_at_once(machines: Machines):
    machines.gpus(2, host="127.0.0.3", driver="535.183.01")
    machines.write("refuses-127.0.0.4")
    result = machines.launch("--hosts", f"{TWO_HOSTS},127.0.0.4")
    assert result.returncode == 1 and not machines.processes("rollout-server")
    assert (
        "127.0.0.3: NVIDIA driver 535.183.01 is too old; torch and jax for CUDA 13 need 580 or newer" in result.stderr
    )
    assert "127.0.0.4: ssh failed: ssh: connect to host 127.0.0.4 port 22: Connection refused" in result.stderr


def test_a_wrong_key_is_reported_before_anything_starts(machines: Machines, port: int):
    result = machines.launch(*ready(port, "trainer.step=3"))
    assert result.returncode == 1 and "trainer.step: unknown key; did you mean trainer.steps?" in result.stderr
    assert not machines.processes("rollout-server") and not machines.processes("train")


def test_a_ray_worker_that_fails_is_named_and_the_head_ends(machines: Machines, port: int):
    machines.write("ray-fails-127.0.0.3")
    result = machines.launch(*ready(port, "--hosts", TWO_HOSTS, "--ray-port", str(port + 2)))
    assert result.returncode == 1, result.stdout
    assert "[ray 127.0.0.3] ray: port 6379 is in use" in result.stdout
    assert "ray 127.0.0.3 on 127.0.0.3 ended (exit status 1)" in result.stderr
    (head,) = machines.processes("ray")
    assert not is_running(head) and is_free(port + 2, "127.0.0.2")


def test_ctrl_c_while_servers_start_ends_ray_on_every_host(machines: Machines, port: int):
    process = machines.start(*ready(port, "--hosts", TWO_HOSTS, "--ray-port", str(port + 2)))
    read_until(process, "waiting for 3 rollout server(s)")
    rest = "".join(ended_after(process, signal.SIGTERM))
    assert process.returncode == 130, rest
    assert rest.index("stopping servers") < rest.index("stopping ray 127.0.0.3") < rest.index("stopping ray 127.0.0.2")
    assert not any(map(is_running, machines.processes("ray"))) and is_free(port + 2, "127.0.0.2")


def test_hosts_of_a_cluster_are_reached_by_ssh_and_this_one_is_not(machines: Machines):
    machines.write("refuses-127.0.0.3")
    machines.launch("--hosts", TWO_HOSTS, "--no-install")
    assert sorted(machines.calls()) == ["nvidia-smi on here", "ssh 127.0.0.3"]
