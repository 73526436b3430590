"""A program sees no path of the host."""

import os
import sys
from pathlib import Path

import pytest

from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tool_server.sandbox.isolation import install
from tests.capabilities import needs_bwrap

NAMES_OF_THE_HOST = """
import os, sys, sysconfig
words = [sys.executable, sys.prefix, sys.base_prefix, *sys.path]
words += [*sysconfig.get_paths().values(), *os.environ.values()]
for path in (
    "/proc/cmdline", "/proc/self/cmdline", "/proc/self/environ",
    "/proc/self/maps", "/proc/self/mounts",
):
    words.append(open(path).read())
for folder in ("/", "/opt", sys.prefix, sys.prefix + "/bin"):
    words += [os.path.realpath(os.path.join(folder, name)) for name in os.listdir(folder)]
print("\\n".join(words))
"""


@needs_bwrap
@pytest.mark.parametrize("user_namespace", [False, True])
async def test_no_path_of_the_host_is_shown(user_namespace, monkeypatch):
    if user_namespace:
        monkeypatch.setattr(
            "jax_agent_rl.tool_server.sandbox.isolation.maps_every_user", lambda: False
        )
    sandbox = await open_sandbox()
    result = await sandbox.run(
        [sandbox.python, "main.py"], files={"main.py": NAMES_OF_THE_HOST.encode()}
    )
    assert result.ok, result.stderr
    folders = {
        Path(prefix).resolve()
        for prefix in (sys.prefix, sys.base_prefix, sys.executable, os.getcwd())
    }
    leaked = [
        folder
        for folder in map(str, folders)
        if not folder.startswith("/usr") and folder in result.stdout
    ]
    assert not leaked
    boot = Path("/proc/cmdline").read_text().strip()
    assert not boot or boot not in result.stdout


@needs_bwrap
async def test_the_files_that_describe_the_host_are_empty():
    sandbox = await open_sandbox()
    source = (
        "for name in ('cmdline', 'partitions', 'swaps'): print(open('/proc/' + name).read() == '')"
    )
    assert (await sandbox.run([sandbox.python, "-c", source])).stdout == "True\n" * 3


def test_an_environment_keeps_only_its_settings_of_packages(tmp_path):
    import venv

    venv.create(tmp_path / "env", with_pip=False, system_site_packages=True, symlinks=True)
    environment = install(tmp_path / "env" / "bin" / "python")
    (settings,) = environment.contents.values()
    assert b"include-system-site-packages = true" in settings
    assert str(tmp_path).encode() not in settings
    assert environment.python == Path("/opt/environment/bin/python")
    assert f"home = {environment.interpreter.parent}".encode() in settings
    assert str(tmp_path / "env" / "bin") not in " ".join(environment.options)
