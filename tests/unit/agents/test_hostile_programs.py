"""Programs that want a reward for nothing, or to harm the trainer, in the real sandbox."""

import importlib.util
import json
import os
import socket
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jax_agent_rl.agents.command.agent import read_verdict
from jax_agent_rl.agents.command.machines import ISOLATED, SandboxedTask
from jax_agent_rl.agents.command.pytest_task import TEST_SH
from jax_agent_rl.agents.command.runner import environment, read_back
from jax_agent_rl.agents.command.task import CommandTask
from jax_agent_rl.agents.command.workspace import WorkspaceLimits
from jax_agent_rl.errors import DataError
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, find_bwrap
from tests.capabilities import needs_bwrap
from tests.messages import raises
from tests.planted_files import PLANTS

pytestmark = needs_bwrap
LIMITS = WorkspaceLimits(max_bytes=1 << 20, max_entries=200)
ROOT = Path(__file__).parents[3]


def example_tests(expected):
    """The verifier of ``examples/terminal_tasks``, as it is written there."""
    path = ROOT / "examples" / "terminal_tasks" / "prepare.py"
    spec = importlib.util.spec_from_file_location("prepare", path)
    assert spec is not None
    assert spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    return {
        "test.sh": TEST_SH.encode(),
        "test_state.py": prepare.TEST_PY.format(expected=expected).encode(),
    }


def open_here(limits=None, *, as_root=True):
    bwrap = find_bwrap()
    assert bwrap is not None
    isolation = Bubblewrap(bwrap, Path(sys.executable))
    if not as_root:
        isolation.is_root = False
    limits = limits or SandboxLimits(
        wall_seconds=30, cpu_seconds=30, output_bytes=LIMITS.result_bytes
    )
    return Sandbox(isolation, limits, max_running=2)


@asynccontextmanager
async def task_machine(
    tmp_path, tests, *, verifier=("bash", "/tests/test.sh"), files=None, as_root=True, env=None
):
    endpoint = tmp_path / "endpoint.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(endpoint))
        listener.listen()
        task = CommandTask(
            instruction="", files=files or {}, tests=tests, verifier=verifier, env=env or {}
        )
        machine = SandboxedTask(open_here(as_root=as_root), task, LIMITS)

        async def run_program(program, *, seconds=20.0):
            argv = ["python3", "-c", textwrap.dedent(program)]
            return await machine.run_program(argv, {}, {}, endpoint, seconds=seconds)

        yield machine, run_program


async def scored(tmp_path, program, tests, *, seconds=20.0, **machine_settings):
    """What the program earns, its own result, and that of the tests."""
    async with task_machine(tmp_path, tests, **machine_settings) as (machine, run_program):
        result = await run_program(program, seconds=seconds)
        verdict = await machine.run_tests(20.0)
    return read_verdict(verdict)[0], result, verdict


def script(text):
    return {"test.sh": textwrap.dedent(text).encode()}


# --- what tests load ------------------------------------------------------------------------------


async def test_the_examples_verifier_pays_for_the_task_alone(tmp_path):
    tests = example_tests({"answer.txt": "right"})
    assert (await scored(tmp_path, "open('answer.txt', 'w').write('right')", tests))[0] == 1.0
    (tmp_path / "endpoint.sock").unlink()
    reward, result, verdict = await scored(tmp_path, PLANTS, tests)
    assert result.exit_code == 0, result.stderr
    assert reward == 0.0
    assert "PLANTED" not in verdict.stdout + verdict.stderr
    assert "test_files_are_as_asked" in verdict.stdout, verdict


@pytest.mark.parametrize(
    "verifier",
    [
        "python3 /tests/check.py",
        "python3 -P /tests/check.py",
        "python3 -m pytest -q -p no:cacheprovider /tests/test_check.py",
        "python3 -m pytest -q -p no:cacheprovider /tests",
    ],
)
async def test_no_verifier_loads_what_is_planted(tmp_path, verifier):
    check = b"def test_answer():\n    assert open('/app/answer.txt').read() == '77'\n"
    tests = {
        "check.py": check + b"import helper\nhelper.yes()\ntest_answer()",
        "test_check.py": check,
    }
    tests["helper.py"] = b"def yes(): pass\n"
    env = {
        "PATH": f".:/app:{Path(open_here().python).parent}:/usr/bin:/bin",
        "PYTHONPATH": "/app:/app/x",
        "BASH_ENV": "/app/.bashrc",
        "PYTHONSTARTUP": "/app/pytest.py",
        "PYTEST_ADDOPTS": "-p conftest",
    }
    settings = {"verifier": tuple(verifier.split()), "env": env}
    reward, _, verdict = await scored(tmp_path, PLANTS, tests, **settings)
    assert reward == 0.0 and "PLANTED" not in verdict.stdout + verdict.stderr, verdict
    (tmp_path / "endpoint.sock").unlink()
    honest = "open('answer.txt', 'w').write('77')\n" + PLANTS
    reward, _, verdict = await scored(tmp_path, honest, tests, **settings)
    assert reward == 1.0 and "PLANTED" not in verdict.stdout + verdict.stderr, verdict


async def test_the_runner_loads_nothing_that_lies_beside_it(tmp_path):
    """Its folder is the program's home: what is imported late, or by the next Python, could come
    from there.
    """
    program = """
        import os
        names = "json base64 shutil stat encodings codecs _strptime selectors"
        for name in names.split():
            open(f"/tmp/{name}.py", "w").write("import os; os._exit(3)")
    """
    reward, result, verdict = await scored(tmp_path, program, script("exit 0"))
    assert result.exit_code == 0 and reward == 1.0, (result, verdict)
    assert "-I" in ISOLATED


def test_a_verifiers_environment_names_nothing_of_the_working_folder(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    inside = tmp_path / "app" / "bin"
    inside.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inside)
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin", "LD_PRELOAD": "/x.so"})
    env = {
        "PATH": f".:{inside}:{tmp_path / 'link'}::{outside}",
        "PYTHONPATH": f"{inside}:{outside}",
        "A": "1",
    }
    job = {"verifies": True, "env": env, "workdir": str(tmp_path / "app"), "tests": "/tests"}
    assert environment(job) == {
        "PATH": str(outside),
        "PYTHONPATH": f"/tests:{outside}",
        "A": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
    }
    assert environment(job | {"verifies": False}) == {"LD_PRELOAD": "/x.so", **env}


# --- what comes back ------------------------------------------------------------------------------


async def test_an_honest_working_folder_reaches_the_tests_unchanged(tmp_path):
    program = """
        import os, socket
        os.makedirs("täst/deep/er", exist_ok=True)
        open("täst/ü ñ 漢.txt", "w").write("ü")
        open(b"latin-\\xfc.txt", "w").write("bytes")
        open("run.sh", "w").write("x"); os.chmod("run.sh", 0o750)
        open("locked", "w").write("x"); os.chmod("locked", 0)
        os.makedirs("closed/inside"); os.chmod("closed", 0o500)
        os.symlink("../run.sh", "täst/link"); os.symlink("/app/täst", "whole")
        open("n" * 255, "w").close()
    """
    check = """
        set -e
        test "$(cat 'täst/ü ñ 漢.txt')" = ü
        test "$(cat $'latin-\\374.txt')" = bytes
        test "$(stat -c %a run.sh locked closed | tr '\\n' ' ')" = "750 0 500 "
        test "$(readlink täst/link) $(readlink whole)" = "../run.sh /app/täst"
        test -d whole/deep/er -a -d closed/inside
        test "$(cat whole/link)" = x
        ls | grep -q "^n\\{255\\}$"
        test $(find . | wc -l) = 13
    """
    reward, result, verdict = await scored(tmp_path, program, script(check))
    assert reward == 1.0, (result, verdict)
    assert result.left_out == 0


async def test_what_could_lead_the_tests_elsewhere_is_left_out_and_named(tmp_path):
    program = """
        import os, socket
        os.mkfifo("pipe")
        socket.socket(socket.AF_UNIX).bind("socket")
        os.symlink("/tests/secret", "out")
        os.symlink("../tests", "up")
        os.symlink("app/../../tests", "around")
        os.symlink(".", "here")
        os.symlink("here/../tests", "through")
        open("\\x1b[31mred", "w").close()
        os.link("/tmp/runner.py", "hard") if os.access("/tmp/runner.py", os.W_OK) else None
    """
    reward, result, verdict = await scored(
        tmp_path, program, script('test "$(ls -A | tr "\\n" " ")" = "here "')
    )
    assert reward == 1.0, (result, verdict)
    assert result.left_out == 7
    assert "'pipe'" in verdict.stderr
    assert "\\x1b" in verdict.stderr + repr(result.left_out_names)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nfor i in range(201): open(str(i), 'w').close()", "too large"),
        ("open('a', 'wb').truncate(32 << 20)", "too large"),
        (
            (
                "import os\n"
                "open('a', 'w').write('x' * 9000)\n"
                "for i in range(150): os.link('a', f'l{i}')"
            ),
            "too large",
        ),
        (
            "import os\nos.chdir('/tmp'); os.rename('app', 'away'); os.symlink('/etc', 'app')",
            "not a folder any more",
        ),
        (
            "import os\nos.chdir('/tmp'); os.rename('app', 'away'); os.mkfifo('app')",
            "not a folder any more",
        ),
        ("import os\nos.chdir('/tmp'); os.rename('app', 'away')", "No such file"),
    ],
)
async def test_a_working_folder_that_cannot_be_handed_on_earns_nothing(tmp_path, program, reason):
    reward, result, verdict = await scored(tmp_path, program, script("exit 0"))
    assert reward == 0.0 and reason in (verdict.stopped or ""), (result, verdict)


async def test_folders_within_folders_end_somewhere(tmp_path):
    program = """
        import os
        for _ in range(1500):
            os.mkdir("d"); os.chdir("d")
    """
    reward, result, _ = await scored(tmp_path, program, script("test -d d/d/d"))
    assert reward == 1.0
    assert result.left_out == 1


FORGED = json.dumps(
    {"exit_code": 0, "stdout": "", "stderr": "", "workspace": "", "read_back": "1", "entries": []}
)
SPEAKS = f"""
import os, signal
for pid in sorted(set(filter(str.isdigit, os.listdir("/proc"))) | {{"self"}}):
    for fd in range(12):
        try:
            with open(f"/proc/{{pid}}/fd/{{fd}}", "wb", buffering=0) as file:
                os.set_blocking(file.fileno(), False)
                file.write({FORGED!r}.encode() + b"\\n\\n")
        except (OSError, ValueError):
            pass
    try:
        with open(f"/proc/{{pid}}/mem", "rb") as file:
            if pid not in ("self", str(os.getpid()), "1"):
                open("read.txt", "w").write(pid)
    except OSError:
        pass
"""


@pytest.mark.parametrize("as_root", [True, False])
async def test_a_program_cannot_speak_for_the_runner(tmp_path, as_root):
    """Nor can what the tests run, even if it ends the runner."""
    if as_root and os.geteuid() != 0:
        pytest.skip("root")
    reward, result, verdict = await scored(
        tmp_path, SPEAKS, script("test -e read.txt"), as_root=as_root
    )
    assert reward == 0.0 and result.workspace == (), (result, verdict)
    (tmp_path / "endpoint.sock").unlink()
    ends = (
        SPEAKS
        + "\nfor pid in range(2, 40):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError:"
        " pass"
    )
    tests = {"check.py": ends.encode(), "test.sh": b"python3 /tests/check.py; exit 1"}
    reward, result, verdict = await scored(tmp_path, "", tests, as_root=as_root)
    assert reward == 0.0 and verdict.exit_code != 0, (result, verdict)


async def test_no_process_of_the_program_outlives_it(tmp_path):
    """It would change files while they are read."""
    program = """
        import os
        for number in range(4):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    while True:
                        for name in range(20):
                            open(f"{number}-{name}", "w").close()
                        for name in range(20):
                            os.unlink(f"{number}-{name}")
                os._exit(0)
        while len(os.listdir(".")) < 20:
            pass
    """
    reward, result, verdict = await scored(tmp_path, program, script("exit 0"))
    assert reward == 1.0 and result.pack_problem is None and result.workspace, (result, verdict)


async def test_output_is_read_from_its_end_alone(tmp_path):
    program = """
        import os, sys
        for _ in range(30): os.write(1, b"x" * (1 << 20))
        os.write(1, "the end ü".encode())
        for name in ("stdout.txt", "stderr.txt"):
            try: os.unlink(f"/tmp/{name}")
            except OSError: pass
            os.mkfifo(f"/tmp/{name}")
        os.ftruncate(2, 40 << 20)
    """
    reward, result, _ = await scored(tmp_path, program, script("exit 0"))
    assert reward == 1.0
    assert result.stdout.endswith("xthe end ü")
    assert len(result.stdout) == 16_000
    assert set(result.stderr) == {"\0"}


# --- the reward file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "commands",
    [
        "ln -s /dev/zero /logs/verifier/reward.txt",
        "ln -s /app/one /logs/verifier/reward.txt",
        "mkfifo /logs/verifier/reward.txt",
        "mkdir /logs/verifier/reward.txt",
        "rmdir /logs/verifier; ln -s /app /logs/verifier; cp one reward.txt",
        "rm -r /logs/verifier; mkfifo /logs/verifier",
        "head -c 5000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt",
        "head -c 50000000 /dev/zero > /logs/verifier/reward.txt",
        "printf '\\3771' > /logs/verifier/reward.txt",
        "echo nan > /logs/verifier/reward.txt",
        "echo 1 > /logs/verifier/reward.txt; sleep 100",
    ],
)
async def test_only_a_small_regular_file_with_a_number_is_a_reward(tmp_path, commands):
    async with task_machine(tmp_path, script(commands)) as (machine, run_program):
        await run_program("open('one', 'w').write('1')")
        reward, note = read_verdict(await machine.run_tests(5.0))
    assert reward == 0.0
    assert note


def test_a_file_that_is_read_back_is_found_through_folders_alone(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("1")
    (tmp_path / "link").symlink_to("a")
    assert read_back(tmp_path, "a/b/file") == ("1", None)
    assert read_back(tmp_path, "a/b/none") == (None, None)
    assert read_back(tmp_path, "link/b/file")[1] is not None


# --- what a row asks for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a\0b", "", "a/../../b", "n" * 300, "a\nb"], ids=ascii
)
@pytest.mark.parametrize("kind", ["files", "tests"])
def test_files_of_a_row_lie_below_their_folder(kind, name):
    with raises(DataError, key=kind):
        CommandTask(instruction="", **{kind: {name: b""}})
