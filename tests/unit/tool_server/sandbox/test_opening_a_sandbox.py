"""A sandbox that cannot hold is refused at the start; nothing falls back to running unprotected."""

import sys
from pathlib import Path

import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.sandbox import SandboxLimits, StopCause, open_sandbox, seccomp
from tests.capabilities import needs_bwrap
from tests.messages import raises

MODULE = "jax_agent_rl.tool_server.sandbox.sandbox"


async def test_without_bwrap_it_is_refused_and_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(f"{MODULE}.find_bwrap", lambda: None)
    with raises(ConfigError, fix=("apt install bubblewrap", "sandbox=unsafe_local")):
        await open_sandbox()


async def test_a_sandbox_that_does_not_isolate_is_refused(monkeypatch, tmp_path):
    """The trial's program sees two network interfaces."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 64 2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(f"{MODULE}.find_bwrap", lambda: fake)
    with raises(ConfigError, value=("expected '64 1'", "got '64 2'")):
        await open_sandbox()


async def test_a_bwrap_that_fails_is_refused_with_its_words(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(f"{MODULE}.find_bwrap", lambda: fake)
    with pytest.raises(ConfigError, match="No permissions"):
        await open_sandbox()


async def test_another_system_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with raises(ConfigError, key="Linux", value="darwin"):
        await open_sandbox()


async def test_unsafe_local_runs_without_bwrap_and_keeps_limits_of_time_and_output(monkeypatch):
    monkeypatch.setattr(f"{MODULE}.find_bwrap", lambda: None)
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    sandbox = await open_sandbox(
        "unsafe_local", limits=SandboxLimits(wall_seconds=60, output_bytes=1000)
    )

    async def run(source, limits=None):
        return await sandbox.run(
            [sandbox.python, "main.py"], files={"main.py": source.encode()}, limits=limits
        )

    folder = (
        await run("import os\nprint(os.getcwd(), 'HOST_SECRET' in os.environ)")
    ).stdout.split()
    assert folder[1] == "False" and not Path(folder[0]).exists(), "its folder is removed"
    short = SandboxLimits(wall_seconds=1)
    assert (await run("import time\ntime.sleep(600)", short)).stopped is StopCause.WALL
    assert (await run("while True: print('x' * 100)")).stopped is StopCause.OUTPUT


@needs_bwrap
async def test_another_interpreter_brings_its_own_packages(tmp_path):
    import venv

    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "only_there.py").write_text("answer = 42")
    sandbox = await open_sandbox(python=tmp_path / "env" / "bin" / "python")
    result = await sandbox.run(
        [sandbox.python, "-c", "import only_there; print(only_there.answer)"]
    )
    assert result.stdout == "42\n", result.stderr


@pytest.mark.parametrize("name", SandboxLimits.__slots__)
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        SandboxLimits(**{name: 0})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_system_call_filter_is_well_formed(machine):
    import struct

    code = list(struct.iter_unpack("<HBBI", seccomp.build_filter(machine)))
    for index, (operation, then, otherwise, _) in enumerate(code):
        if operation & 0x07 == 0x05:
            assert index + 1 + max(then, otherwise) < len(code)
    assert code[-1][:3] == (0x06, 0, 0)
