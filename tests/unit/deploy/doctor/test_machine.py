"""The machine: versions against requirements, devices against what is there, room, ports."""

import shutil
import socket
from importlib import metadata
from pathlib import Path

import pytest

from jax_agent_rl.deploy.doctor import machine
from jax_agent_rl.deploy.doctor.machine import (
    Devices,
    Finding,
    Reporter,
    Status,
    compare_devices,
    find_hardware,
)

PYTEST = metadata.version("pytest")


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("pytest>=1", None),
        ("pytest>=999", f"pytest {PYTEST} is installed, >=999 is needed"),
        ("no-such-package-here>=2", "no-such-package-here>=2 is not installed"),
        ("no-such-package-here>=2; sys_platform == 'win32'", None),
        ("no-such-package-here>=2; extra == 'more'", None),
    ],
)
def test_requirements_are_compared_with_what_is_installed(requirement, problem):
    assert list(machine.missing([requirement], extra=None)) == ([problem] if problem else [])


def test_an_extra_is_its_own_requirements_and_those_of_extras_it_is_made_of():
    requirements = [
        "no-such-base",
        "pytest>=1; extra == 'ray'",
        "no-such-tool; extra == 'tools'",
        "jax_agent_rl[ray,tools]; extra == 'dev'",
    ]
    assert list(machine.missing(requirements, extra="ray")) == []
    assert list(machine.missing(requirements, extra="dev")) == ["no-such-tool is not installed"]


def test_a_package_with_an_extra_needs_what_the_extra_requires(monkeypatch):
    requirements = {"pytest": ["no-such-plugin; extra == 'parallel'", "no-such-other"]}
    monkeypatch.setattr(machine.metadata, "requires", requirements.get)
    needed = ["pytest[parallel]>=1; extra == 'dev'"]
    assert list(machine.missing(needed, extra="dev")) == ["no-such-plugin is not installed"]


def disk(folder: Path, *, need: int) -> Finding:
    report = Reporter("disk")
    machine.check_disk(report, folder, need=need, key="run_dir")
    (finding,) = report.findings
    return finding


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_will_be(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    finding = disk(tmp_path / "runs" / "new", need=1)
    assert finding.status is Status.OK
    assert not (tmp_path / "runs").exists()
    finding = disk(tmp_path / "runs" / "new", need=2 * free)
    assert finding.status is Status.FAIL
    assert "run_dir=" in finding.text
    assert "make space" in finding.text


def test_a_port_that_somebody_listens_on_is_not_free():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert not machine.is_free("127.0.0.1", port)


async def test_the_checks_of_this_very_machine_all_answer():
    for check in (
        machine.interpreter,
        machine.packages,
        machine.processors,
        machine.cache_disk,
        machine.limits,
    ):
        report = Reporter("x")
        await check(report)
        assert [f.text for f in report.findings]


def make(root, *files):
    for file, text in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def test_accelerators_are_known_by_their_devices(tmp_path):
    gpu = make(tmp_path / "gpu", ("dev/nvidia0", ""), ("dev/nvidiactl", ""))
    tpu = make(
        tmp_path / "tpu",
        ("dev/vfio/0", ""),
        ("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n"),
    )
    none = make(
        tmp_path / "none",
        ("dev/nvidiactl", ""),
        ("sys/bus/pci/devices/0000:00:04.0/vendor", "0x1ae0\n"),
    )
    assert (find_hardware(gpu), find_hardware(tpu), find_hardware(none)) == (
        {"gpu"},
        {"tpu"},
        set(),
    )


CPU = Devices(platform="cpu", kind="cpu", count=1)


def compared(seen: Devices | str, present: set[str], *, need: int, forced: str) -> list[Finding]:
    report = Reporter("accelerators")
    compare_devices(
        report,
        seen,
        present,
        need=need,
        forced=forced,
        find_idle=lambda count: [f"0 of {count} idle"],
    )
    return report.findings


@pytest.mark.parametrize(
    ("seen", "present", "forced", "statuses", "said"),
    [
        (CPU, set(), "", ["ok"], "jax computes on 1 x cpu"),
        (CPU, {"gpu"}, "", ["ok", "warn"], "pip install -U 'jax[cuda13]'"),
        (CPU, {"tpu"}, "", ["ok", "warn"], "pip install -U 'jax[tpu]'"),
        (CPU, {"gpu"}, "cpu", ["ok", "warn"], "unset JAX_PLATFORMS (it is 'cpu')"),
        (
            Devices(platform="gpu", kind="H200", count=8),
            {"gpu"},
            "",
            ["ok", "warn"],
            "8 x H200 (gpu) 0 of 8 idle",
        ),
        ("RuntimeError: the TPU is in use", {"tpu"}, "", ["fail"], "in use"),
    ],
)
def test_a_device_that_jax_does_not_use_is_told_with_what_to_do(
    seen, present, forced, statuses, said
):
    findings = compared(seen, present, need=1, forced=forced)
    assert [f.status for f in findings] == statuses
    assert said in " ".join(f.text for f in findings)


def test_meshes_larger_than_the_machine_fail():
    *_, finding = compared(CPU, set(), need=4, forced="")
    assert finding.status is Status.FAIL
    assert "need 4 devices, there are 1" in finding.text
    assert "xla_force_host_platform_device_count=4" in finding.text
