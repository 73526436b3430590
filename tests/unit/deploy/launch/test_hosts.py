"""Hosts, and what nvidia-smi says of them."""

from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.hosts import Command, Host, make_hosts, usable_gpus
from jax_agent_rl.errors import LaunchError

HOST = Host(name="me@gpu-1", address="10.0.0.1", local=False)
LISTING = "0, GPU-a, NVIDIA H200, 580.95.05\n1, GPU-b, NVIDIA H200, 580.95.05\n"


def test_gpus_are_read_from_nvidia_smi():
    assert [(gpu.index, gpu.uuid, gpu.driver) for gpu in usable_gpus(HOST, LISTING)] == [
        (0, "GPU-a", "580.95.05"),
        (1, "GPU-b", "580.95.05"),
    ]


@pytest.mark.parametrize("visible", ["1", "GPU-b", "1,7"])
def test_cuda_visible_devices_restricts_them(visible: str):
    assert [gpu.index for gpu in usable_gpus(HOST, LISTING, visible)] == [1]


@pytest.mark.parametrize(
    "listing, visible, message",
    [
        ("0, GPU-a, [Unknown Error]\n", None, "me@gpu-1: nvidia-smi is not understood: '0, GPU-a"),
        ("", None, "me@gpu-1: nvidia-smi lists no GPU"),
        (LISTING, "", "me@gpu-1: no GPU is left: CUDA_VISIBLE_DEVICES=''"),
        (
            "0, GPU-a, NVIDIA A100, 535.183.01\n",
            None,
            "me@gpu-1: NVIDIA driver 535.183.01 is too old.*need 580 or newer",
        ),
    ],
)
def test_a_host_that_will_not_do_is_named_with_the_reason(listing: str, visible: str | None, message: str):
    with pytest.raises(LaunchError, match=message):
        usable_gpus(HOST, listing, visible)


def test_a_command_for_another_host_is_quoted_for_its_shell():
    command = Command(name="x", host=HOST, argv=("echo", "it's", "$HOME"), env={"A": "b c"})
    argv = command.local_argv(Path("/opt/a folder"))
    assert argv[0] == "ssh" and argv[-2] == "me@gpu-1"
    assert argv[-1] == """cd '/opt/a folder' || exit 66; exec env 'A=b c' echo 'it'"'"'s' '$HOME'"""


@pytest.mark.parametrize(
    "names, message",
    [
        (["127.0.0.2", "-oProxyCommand=x"], "are not host names"),
        (["127.0.0.2", "h;reboot"], "are not host names"),
        (["127.0.0.2", "127.0.0.2"], "names a host twice"),
        (["192.0.2.77", "127.0.0.2"], "192.0.2.77 .* is not an address of this machine"),
        (["127.0.0.2", "nowhere.invalid"], "nowhere.invalid: its address cannot be found"),
        (["localhost", "127.0.0.2"], "localhost: other hosts cannot reach it at the loopback address"),
    ],
)
def test_wrong_hosts_are_refused(names: list[str], message: str):
    with pytest.raises(LaunchError, match=message):
        make_hosts(names)


def test_this_machine_comes_first_and_a_user_name_is_for_ssh_only():
    head, worker = make_hosts(["127.0.0.2", "me@127.0.0.3"])
    assert head.local and not worker.local
    assert (worker.name, worker.address) == ("me@127.0.0.3", "127.0.0.3")
    assert [host.address for host in make_hosts([])] == ["127.0.0.1"]
