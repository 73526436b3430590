"""Memory that a process may use, with files as Linux writes them."""

from pathlib import Path

from jax_agent_rl.utils.memory import available_memory, usable_memory

MIB = 2**20


def meminfo(folder: Path, *, available: int) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    return file


def container(folder: Path, limit: str, used: int) -> Path:
    cgroup = folder / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{used}\n")
    return cgroup


def test_what_is_available_is_the_machines_without_a_container(tmp_path):
    file = meminfo(tmp_path, available=512 * MIB)
    assert available_memory(tmp_path / "none", file) == 512 * MIB
    assert available_memory(container(tmp_path, "max", 7), file) == 512 * MIB
    assert available_memory(tmp_path / "none", tmp_path / "nothing") == 0


def test_a_container_has_no_more_than_its_limit(tmp_path):
    cgroup = container(tmp_path, str(300 * MIB), 100 * MIB)
    assert available_memory(cgroup, meminfo(tmp_path, available=512 * MIB)) == 200 * MIB
    assert available_memory(cgroup, meminfo(tmp_path, available=50 * MIB)) == 50 * MIB
    assert usable_memory(cgroup) == 300 * MIB


def test_a_container_beyond_its_limit_has_nothing_left(tmp_path):
    cgroup = container(tmp_path, str(100 * MIB), 300 * MIB)
    assert available_memory(cgroup, meminfo(tmp_path, available=512 * MIB)) == 0
