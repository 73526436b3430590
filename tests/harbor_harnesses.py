"""Small harnesses for Harbor, and a task: one asks the model beside the environment, one inside.

Both take what the model says for a command of the shell until it says "done".
"""

# pyright: reportMissingImports=false
# Harbor is in an environment of its own (launch/harbor_environment.sh).

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext

from jax_agent_rl.agents import HarborAgent
from jax_agent_rl.types import Trajectory
from tests.agent_testbed import AgentHarness, assert_token_exact

PROGRAM = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    command = message["content"]
    if command == "done":
        break
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    messages += [message, {"role": "user", "content": "output: " + result.stdout}]
"""


class Beside(BaseAgent):
    """Asks the model from this process."""

    def __init__(self, *args: Any, exit_after: int | None = None, **kwargs: Any) -> None:
        self._exit_after = exit_after
        super().__init__(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "beside"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return None

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        messages = [{"role": "user", "content": instruction}]
        headers = {"Authorization": f"Bearer {self._get_env('OPENAI_API_KEY')}"}
        base_url = self._get_env("OPENAI_BASE_URL") or ""
        async with httpx.AsyncClient(base_url=base_url, headers=headers) as client:
            turns = 0
            while True:
                body = {"model": "m", "messages": messages}
                answer = await client.post("/chat/completions", json=body, timeout=None)
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                turns += 1
                if turns == self._exit_after:
                    raise RuntimeError("the harness gave up")
                if message["content"] == "done":
                    return
                result = await environment.exec(message["content"])
                output = f"output: {result.stdout}{result.stderr}"
                messages += [message, {"role": "user", "content": output}]


class Inside(Beside):
    """Runs a program in the environment, which asks the model."""

    @staticmethod
    def name() -> str:
        return "inside"

    async def setup(self, environment: BaseEnvironment) -> None:
        program = self.logs_dir / "inside.py"
        program.write_text(PROGRAM)
        await environment.upload_file(program, "/installed-agent/inside.py")

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        result = await environment.exec(
            f"python3 /installed-agent/inside.py {json.dumps(instruction)}"
        )
        if result.return_code != 0:
            raise RuntimeError(f"exit status {result.return_code}: {result.stderr}")


class Quiet(Beside):
    """Ends without asking the model anything."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        return None


class Elsewhere(BaseEnvironment):
    """An environment of another provider: it takes every command, and its tests give 1."""

    @staticmethod
    def type() -> str:
        return "elsewhere"

    def _validate_definition(self) -> None:
        return None

    async def start(self, force_build: bool) -> None:
        return None

    async def stop(self, delete: bool) -> None:
        return None

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        return ExecResult(stdout="", stderr="", return_code=0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        return None

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        return None

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        return None

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        if source_dir == "/logs/verifier":
            Path(target_dir, "reward.txt").write_text("1")


TEST_SH = (
    "python3 -P /tests/check.py && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"
)
CHECK = (
    "text = open('/work/answer.txt').read()\nassert text.strip() == '77', text\nprint('right')\n"
)


def write_task(
    folder: Path,
    *,
    dockerfile: str = "FROM ubuntu:24.04\nWORKDIR /work\nCOPY data /work/data\n",
    settings: str = "",
    test_sh: str = TEST_SH,
) -> Path:
    """Write a task in Harbor's format: write the number in ``data/number.txt`` twice."""
    files = {
        "task.toml": (
            'schema_version = "1.1"\n'
            "[agent]\ntimeout_sec = 300.0\n[verifier]\ntimeout_sec = 120.0\n" + settings
        ),
        "instruction.md": "Write the number twice into answer.txt.",
        "environment/Dockerfile": dockerfile,
        "environment/data/number.txt": "7",
        "tests/test.sh": test_sh,
        "tests/check.py": CHECK,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- trials ---------------------------------------------------------------------------------------

BESIDE = f"{__name__}:Beside"
INSIDE = f"{__name__}:Inside"
_LIMITS = ("run_timeout", "max_response_length", "max_assistant_turns")


def row(task: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a task."""
    return {
        "prompt": [{"role": "user", "content": "write it twice"}],
        "data_source": "harbor",
        "extra_info": {"task": str(task) if isinstance(task, Path) else task},
    }


def stage(script: Any, *, agent: str = BESIDE, **settings: Any) -> AgentHarness:
    """Return the agent on a scripted engine; settings are those of ``agent.harbor``."""
    limits = {name: settings.pop(name) for name in _LIMITS if name in settings}
    return AgentHarness(HarborAgent, script, harbor={"agent": agent, **settings}, **limits)


async def play(
    script: Any, task: Path | Mapping[str, Any], **settings: Any
) -> tuple[Trajectory, dict[str, Any]]:
    """Play a trajectory, which is checked to be exact; return it and its output."""
    harness = stage(script, **settings)
    try:
        await harness.agent.preflight()
        trajectory = await harness.run(row(task))
    finally:
        await harness.agent.close()
    assert_token_exact(trajectory, harness.backend.requests)
    return trajectory, trajectory.row["extra_info"]["agent_output"]
