"""Programs in sandboxes and containers as agents, on a real engine: they reach the endpoint and are
trained on.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("openai")

from jax_agent_rl.agents.command.agent import CommandAgent
from jax_agent_rl.agents.command.task import read_harbor_task, read_task
from jax_agent_rl.config import load
from jax_agent_rl.errors import ConfigError, DataError, TrajectoryError
from jax_agent_rl.rewards import rules
from jax_agent_rl.types import SamplingParams
from tests.agent_testbed import episode_request
from tests.capabilities import CONTAINER_IMAGE, find_container_runtime, needs_bwrap
from tests.killed_trainer import SLEEPS, assert_sleepers_end_with
from tests.messages import raises
from tests.tiny_chat import assert_exact, tiny_context

CHAT = """
import os, openai
client = openai.OpenAI()
messages = [{"role": "user", "content": os.environ["TASK_INSTRUCTION"]}]
for _ in range(3):
    answer = client.chat.completions.create(model="m", messages=messages)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "more"})
open("answer.txt", "w").write(open("number.txt").read() * 2)
print("done")
"""
URLLIB_ASK = """
import json, os, urllib.request
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
ASKS_GOOGLE = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/m:generateContent",
    json.dumps({"contents": [{"parts": [{"text": "hello"}]}]}).encode(),
    {"X-Goog-Api-Key": os.environ["GEMINI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["candidates"][0]["content"]["role"])
"""
HANGS = "import time; time.sleep(600)"
TESTS = {
    "check.py": "assert open('/app/answer.txt').read() == '77', open('/app/answer.txt').read()"
}


def row(**extra):
    return {
        "prompt": [{"role": "user", "content": "write it twice"}],
        "data_source": "command",
        "extra_info": extra,
    }


async def run(
    program: str, row, tmp_path: Path, *, argv=("python3", "/tmp/agent/main.py"), **settings
):
    (tmp_path / "main.py").write_text(program)
    command = {"argv": list(argv), "program_dir": str(tmp_path), **settings}
    async with tiny_context(command=command, run_timeout=30.0) as context:
        loop = CommandAgent(context)
        try:
            await loop.preflight()
            sampling = SamplingParams(max_tokens=8, seed=1)
            trajectory = await loop.play(episode_request(row, sampling))
        finally:
            await loop.close()
        assert_exact(trajectory, context.client.pool.servers[0].backend)
    return trajectory, trajectory.row["extra_info"]["agent_output"]


@needs_bwrap
async def test_a_program_is_one_exact_trajectory_whose_tests_give_its_reward(tmp_path: Path):
    task = row(files={"number.txt": "7"}, tests=TESTS, verifier="python3 /tests/check.py")
    trajectory, output = await run(CHAT, task, tmp_path)
    assert trajectory.num_turns == 3
    assert trajectory.segments == ()
    assert output["exit_code"] == 0
    assert output["stdout"] == "done\n"
    assert rules.command(output) == 1.0


@needs_bwrap
async def test_wrong_failing_and_hanging_programs_are_scored_by_their_files(
    tmp_path: Path,
):
    for end, exit_code, seconds, failure in (
        ("", 0, 120, None),
        ("raise SystemExit(3)", 3, 120, "program_error"),
        (HANGS, None, 8, "program_timeout"),
    ):
        task = row(files={"number.txt": "7"}, tests=TESTS, verifier="python3 /tests/check.py")
        argv = ["python3", "-c", f"{URLLIB_ASK}ask([{{'role': 'user', 'content': 'x'}}])\n{end}"]
        async with tiny_context(command={"argv": argv}, run_timeout=float(seconds)) as context:
            loop = CommandAgent(context)
            trajectory = await loop.play(
                episode_request(task, SamplingParams(max_tokens=8, seed=1))
            )
            await loop.close()
        output = trajectory.row["extra_info"]["agent_output"]
        assert output["exit_code"] == exit_code
        for name in ("program_error", "program_timeout"):
            assert trajectory.metrics[name] == float(name == failure)
        assert output["reward"] == 0.0
        assert "No such file" in output["verifier"]


@needs_bwrap
async def test_a_program_finds_the_policy_behind_the_api_of_google(tmp_path: Path):
    trajectory, output = await run(ASKS_GOOGLE, row(), tmp_path)
    assert trajectory.num_turns == 1
    assert output["stdout"] == "model\n"


@needs_bwrap
async def test_a_program_sees_neither_tests_nor_network_nor_other_files(tmp_path: Path):
    spy = CHAT + textwrap.dedent("""
        import pathlib, socket
        assert not list(pathlib.Path("/tests").iterdir())
        assert not pathlib.Path("/home").exists() and not pathlib.Path("/etc/hostname").exists()
        for port in (22, 80, 5000):
            try:
                socket.create_connection(("127.0.0.1", port), 2)
                raise SystemExit(f"port {port} is reachable")
            except OSError:
                pass
        try:
            socket.create_connection(("1.1.1.1", 443), 2)
            raise SystemExit("the network is reachable")
        except OSError:
            pass
        pathlib.Path("/tests/check.py").write_text("")
    """)
    task = row(files={"number.txt": "8"}, tests=TESTS, verifier="python3 /tests/check.py")
    _, output = await run(spy, task, tmp_path)
    assert output["exit_code"] == 0, output["stderr"]
    assert output["reward"] == 0.0  # what it wrote under /tests is not what runs


@needs_bwrap
async def test_a_program_sees_mounted_folders_and_its_tests_do_not(tmp_path: Path):
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "name.txt").write_text("9")
    program = f"""{URLLIB_ASK}
ask([{{"role": "user", "content": "x"}}])
try:
    open("/tmp/harness/new.txt", "w")
except OSError:
    open("answer.txt", "w").write(open("/tmp/harness/name.txt").read())
"""
    check = (
        "import os; assert open('/app/answer.txt').read() == '9';"
        " assert not os.path.exists('/tmp/harness')"
    )
    task = row(tests={"check.py": check}, verifier="python3 /tests/check.py")
    mounts = {"harness": str(tmp_path / "harness")}
    (tmp_path / "program").mkdir()
    _, output = await run(program, task, tmp_path / "program", mounts=mounts)
    assert output["reward"] == 1.0, output["stderr"] + output["verifier"]


@pytest.mark.parametrize("name", ["app", "a/b", "..", "0.tree", ""])
def test_a_mount_is_a_folder_of_its_own(name: str):
    with raises(ConfigError, key="agent.command.mounts", value=name):
        load("quickstart", [f"agent.command.mounts={json.dumps({name: '/usr'})}"])


async def test_a_mount_that_is_no_folder_is_refused():
    mounts = {"harness": "/no/such"}
    async with tiny_context(command={"argv": ["true"], "mounts": mounts}) as context:
        with raises(ConfigError, key="agent.command.mounts.harness", value="/no/such"):
            await CommandAgent(context).preflight()


@needs_bwrap
async def test_a_program_that_asks_nothing_is_lost_with_its_reason(tmp_path: Path):
    with raises(TrajectoryError, value="asking the model"):
        await run("print(1)", row(), tmp_path)


async def test_a_task_that_cannot_be_read_costs_its_own_trajectory_alone(tmp_path: Path):
    async with tiny_context(command={"argv": ["true"]}) as context:
        with raises(TrajectoryError, key="task.toml"):
            await CommandAgent(context).play(
                episode_request(row(task=str(tmp_path)), SamplingParams(max_tokens=8))
            )


async def test_a_command_that_is_missing_names_its_key():
    async with tiny_context() as context:
        with raises(ConfigError, key="agent.command.argv"):
            await CommandAgent(context).preflight()


# --- Harbor's task folders ------------------------------------------------------------------------


def harbor(
    folder: Path,
    dockerfile: str | None = "FROM ubuntu:24.04\nWORKDIR /work\nCOPY data /work/data\n",
) -> Path:
    for name, text in {
        "task.toml": (
            'version = "1.0"\n[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 15.0\n'
        ),
        "instruction.md": "Write the number twice.",
        "environment/data/number.txt": "7",
        "tests/test.sh": "python3 /tests/check.py && echo 0.5 > /logs/verifier/reward.txt\n",
        "tests/check.py": "assert open('/work/answer.txt').read() == '77'",
        **({"environment/Dockerfile": dockerfile} if dockerfile is not None else {}),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_task_folder_is_read_unchanged(tmp_path: Path):
    task = read_task(row(task=str(harbor(tmp_path))))
    assert task.instruction == "Write the number twice."
    assert task.workdir == "/work"
    assert task.files == {"data/number.txt": b"7"}
    assert sorted(task.tests) == ["check.py", "test.sh"]
    assert (task.agent_seconds, task.verifier_seconds) == (20.0, 15.0)
    (tmp_path / "environment" / "Dockerfile").unlink()
    assert read_harbor_task(tmp_path).files == {"data/number.txt": b"7"}


@pytest.mark.parametrize("seconds", ["0", "-1.5", "nan", "inf", '"20"'])
def test_a_time_limit_that_is_none_is_refused_with_its_key(tmp_path: Path, seconds: str):
    harbor(tmp_path)
    (tmp_path / "task.toml").write_text(f"[agent]\ntimeout_sec = {seconds}\n")
    with raises(DataError, key="[agent] timeout_sec", value=seconds.strip('"')):
        read_harbor_task(tmp_path)


@pytest.mark.parametrize(
    ("dockerfile", "named"),
    [
        (
            "FROM ubuntu:24.04\nRUN apt-get update && \\\n  apt-get install -y git\n",
            {"key": "line 2", "fix": "a container"},
        ),
        ("FROM ubuntu:24.04\nCOPY x /etc/x\n", {"value": "outside the working folder"}),
        ("FROM ubuntu:24.04\nCOPY missing .\n", {"value": "no 'missing'"}),
        (
            "FROM gcc AS b\nFROM ubuntu:24.04\nCOPY --from=b /x .\n",
            {"key": "line 3", "fix": "a container"},
        ),
        ("FROM ubuntu:24.04\nENV PATH=/opt/x:$PATH\n", {"value": "a variable"}),
        ("FROM ubuntu:24.04\nCOPY data .\nWORKDIR /other\n", {"value": "after files were copied"}),
        ("FROM ubuntu:24.04\nCOPY ../tests .\n", {"value": "from outside"}),
        ("FROM ubuntu:24.04\nCOPY data\n", {"value": "no source and target"}),
        ("FROM ubuntu:24.04\nCOPY 'data .\n", {"key": "line 2", "value": "cannot be read"}),
        ('FROM ubuntu:24.04\nENV A="1\n', {"key": "line 2", "value": "cannot be read"}),
    ],
)
def test_a_task_that_needs_a_container_says_so(dockerfile: str, named: dict, tmp_path: Path):
    with raises(DataError, **named):
        read_harbor_task(harbor(tmp_path, dockerfile))


def test_sources_of_a_dockerfile_begin_at_its_folder(tmp_path: Path):
    folder = harbor(tmp_path, "FROM ubuntu:24.04\nCOPY /data/number.txt number.txt\n")
    assert read_harbor_task(folder).files == {"number.txt": b"7"}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("environment/data/key", "key"),
        ("environment/data/keys", "."),
        ("tests/key", "key"),
        ("instruction.md", "key"),
        ("environment/Dockerfile", "key"),
    ],
)
def test_no_link_of_a_task_shows_a_file_of_this_machine(name: str, target: str, tmp_path: Path):
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "key").write_text("of this machine")
    task = harbor(tmp_path / "task", "FROM ubuntu:24.04\nCOPY . .\n")
    (task / name).unlink(missing_ok=True)
    (task / name).symlink_to(secrets / target)
    with raises(DataError, key=name):
        read_harbor_task(task)


def test_links_within_a_tasks_folder_are_followed(tmp_path: Path):
    task = harbor(tmp_path)
    (task / "environment" / "data" / "same.txt").symlink_to("number.txt")
    assert read_harbor_task(task).files["data/same.txt"] == b"7"


@pytest.mark.parametrize("text", ["environment = 3\n", 'agent = "x"\n', "verifier = []\n"])
def test_a_section_that_is_no_table_is_named(text: str, tmp_path: Path):
    task = harbor(tmp_path)
    (task / "task.toml").write_text(text)
    with raises(DataError, key=text.split()[0]):
        read_harbor_task(task)


def test_a_dockerfile_that_is_no_text_is_refused(tmp_path: Path):
    task = harbor(tmp_path)
    (task / "environment" / "Dockerfile").write_bytes(b"FROM \xff\n")
    with raises(DataError, key="Dockerfile"):
        read_harbor_task(task)


@needs_bwrap
async def test_a_task_with_more_files_than_tests_are_handed_is_lost_with_the_setting_to_change():
    files = {f"{number}.txt": "" for number in range(10_000)}
    async with tiny_context(command={"argv": ["true"]}) as context:
        loop = CommandAgent(context)
        with raises(TrajectoryError, value="10000 entries", fix="workspace_entries"):
            await loop.play(episode_request(row(files=files), SamplingParams(max_tokens=8)))
        await loop.close()


def test_variables_of_a_dockerfile_are_read_in_both_forms(tmp_path: Path):
    folder = harbor(tmp_path, 'FROM ubuntu:24.04\nENV GREETING hello world\nENV A=1 B="2 3"\n')
    assert read_harbor_task(folder).env == {"GREETING": "hello world", "A": "1", "B": "2 3"}


def test_an_incomplete_task_folder_says_what_is_missing(tmp_path: Path):
    (harbor(tmp_path) / "tests" / "test.sh").unlink()
    with raises(DataError, key="tests/test.sh"):
        read_harbor_task(tmp_path)
    (tmp_path / "task.toml").unlink()
    with raises(DataError, key="task.toml"):
        read_harbor_task(tmp_path)


@needs_bwrap
async def test_a_harbor_task_runs_with_its_paths_and_its_reward_file(tmp_path: Path):
    program = CHAT.replace("number.txt", "/work/data/number.txt")
    folder = harbor(tmp_path / "task")
    _, output = await run(program, row(task=str(folder)), tmp_path)
    assert output["reward"] == 0.5, output


@needs_bwrap
async def test_a_killed_trainer_leaves_no_program_running():
    await assert_sleepers_end_with(f"""
import asyncio
from jax_agent_rl.agents.command.agent import CommandAgent
from tests.agent_testbed import AgentHarness
harness = AgentHarness(CommandAgent, [], command={{"argv": ["bash", "-c", {SLEEPS!r}]}})
row = {{"prompt": [{{"role": "user", "content": "x"}}], "data_source": "command"}}
asyncio.run(harness.run(row))
""")


# --- containers -----------------------------------------------------------------------------------

URLLIB_CHAT = f"""{URLLIB_ASK}
messages = [{{"role": "user", "content": os.environ["TASK_INSTRUCTION"]}}]
messages += [ask(messages), {{"role": "user", "content": "more"}}]
ask(messages)
open("answer.txt", "w").write(open("number.txt").read() * 2)
"""
DOCKERFILE = (
    f"FROM {CONTAINER_IMAGE}\nWORKDIR /work\nRUN echo built > /etc/built\nCOPY data/ /work/\n"
)


@pytest.fixture
def container() -> str:
    runtime = find_container_runtime()
    if runtime is None:
        pytest.skip(f"a container runtime with {CONTAINER_IMAGE}")
    return runtime


async def test_a_harbor_task_runs_in_a_container_built_from_its_dockerfile(
    tmp_path: Path, container: str
):
    spy = """
import pathlib, socket
assert pathlib.Path("/etc/built").read_text() == "built\\n"
pathlib.Path("/etc/left").write_text("left")
pathlib.Path("/logs/verifier/reward.txt").write_text("1000")
pathlib.Path("/tests").mkdir(exist_ok=True)
pathlib.Path("/tests/check.py").write_text("")
pathlib.Path("/tests/sitecustomize.py").write_text("")
try:
    socket.create_connection(("1.1.1.1", 443), 2)
    raise SystemExit("the network is reachable")
except OSError:
    pass
"""
    folder = harbor(tmp_path / "task", DOCKERFILE)
    check = (
        "import os;"
        " assert os.listdir('/tests') and 'sitecustomize.py' not in os.listdir('/tests')\n"
    )
    check += (
        "assert open('/etc/left').read() == 'left' and open('/work/answer.txt').read() == '77'\n"
    )
    (folder / "tests" / "check.py").write_text(check)
    trajectory, output = await run(
        URLLIB_CHAT + spy, row(task=str(folder)), tmp_path, container=container
    )
    assert trajectory.num_turns == 2
    assert output["exit_code"] == 0, output
    assert output["reward"] == 0.5, output
    list_containers = [container, "ps", "--all", "--quiet", "--filter", "label=jax_agent_rl"]
    assert subprocess.run(list_containers, capture_output=True, text=True, check=True).stdout == ""


async def test_rows_without_a_folder_run_in_the_configured_image(tmp_path: Path, container: str):
    task = row(files={"number.txt": "7"}, tests=TESTS, verifier="python3 /tests/check.py")
    settings = {"container": container, "image": CONTAINER_IMAGE}
    _, output = await run(URLLIB_CHAT, task, tmp_path, **settings)
    assert output["reward"] == 1.0, output
    _, output = await run(URLLIB_CHAT + HANGS, task, tmp_path, **settings)
    assert output["exit_code"] is None and output["reward"] == 1.0, output  # its files are judged


@pytest.mark.parametrize(
    ("change", "is_forbidden"),
    [
        ("os.link(sys.executable, '/usr/local/bin/bash')", True),
        ("open(os.path.dirname(os.__file__) + '/pytest.py', 'w').close()", True),
        ("open('/etc/ld.so.preload', 'w').close()", True),
        (
            "shutil.rmtree('/tests'); os.symlink('/work', '/tests'); os.mkfifo('/tmp/stdout.txt')",
            False,
        ),
    ],
)
async def test_what_a_program_changed_of_its_image_decides_no_test(
    tmp_path: Path, container: str, change: str, is_forbidden: bool
):
    task = row(files={"number.txt": "7"}, tests=TESTS, verifier="python3 -P /tests/check.py")
    settings = {"container": container, "image": CONTAINER_IMAGE}
    _, output = await run(
        f"{URLLIB_CHAT}\nimport os, shutil, sys\n{change}", task, tmp_path, **settings
    )
    assert output["reward"] == (0.0 if is_forbidden else 1.0), output
    assert ("changed what its tests run on" in output["verifier"]) == is_forbidden
    list_containers = [container, "ps", "--all", "--quiet", "--filter", "label=jax_agent_rl"]
    assert subprocess.run(list_containers, capture_output=True, text=True, check=True).stdout == ""


async def test_a_container_runtime_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    async with tiny_context(command={"argv": ["true"], "container": "podman"}) as context:
        with raises(ConfigError, key="agent.command.container", value="podman"):
            await CommandAgent(context).preflight()
