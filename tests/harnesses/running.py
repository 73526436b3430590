"""Runs an installed harness, unmodified, as the agent ``command``, over a policy that is scripted.

::

    harness ──HTTP──► relay ──► endpoint ──► recorder ──► ScriptedPolicy
    (sandbox)

The tokenizer and the chat template are SmolLM2's, so that ids come as they do in training.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.agents.command.agent import CommandAgent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import AgentConfig
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput, Trajectory
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.files import cache_root
from tests.agent_testbed import episode_request
from tests.fakes import ScriptedBackend
from tests.tiny_chat import assert_sampled_once

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("JAX_AGENT_RL_HARNESSES", ROOT / ".harnesses")).resolve()
"""Where ``launch/harnesses.sh`` installed them."""
INSTALLED = pytest.mark.skipif(
    not (FOLDER / ".stamp").exists(), reason="harnesses (./launch/test.sh --only-harnesses)"
)
WITH_PYTHON = pytest.mark.skipif(
    not (FOLDER / "python").exists(), reason="harnesses in Python, which need 3.12 or 3.13"
)
MODEL = cache_root() / "models" / "smollm2-135m-instruct"
LONGEST = 65_536
"""Ids of a context; prompts of harnesses have up to 25,000."""

TASK = "The program total.py prints 7, and it has to print 6. Find out why, and change the file."
TASK_MARK = "total.py prints 7"
"""What prompts of the task hold."""
FILES = {"total.py": "numbers = [1, 2, 4]\nprint(sum(numbers))\n"}
CHECK = """
import subprocess, sys
output = subprocess.run([sys.executable, "/app/total.py"], capture_output=True, text=True).stdout
assert output == "6\\n", output
"""
ROW: Mapping[str, Any] = {
    "prompt": [{"role": "user", "content": TASK}],
    "data_source": "command",
    "extra_info": {
        "files": FILES,
        "tests": {"check.py": CHECK},
        "verifier": "python3 -P /tests/check.py",
    },
}
PROGRAMS = ROOT / "examples" / "harnesses" / "program"
"""What starts them; in the sandbox ``/tmp/agent``."""
LIMITS: Mapping[str, Any] = {
    "memory_mb": 1
    << 20,  # of address space, which the runtimes of JavaScript reserve and do not use
    "processes": 512,
    "disk_mb": 512,
}


@functools.cache
def codec() -> ChatCodec:
    return ChatCodec.from_pretrained(MODEL)


class ScriptedPolicy(ScriptedBackend):
    """Says, in each conversation, one line after the other.

    Args:
        lines: what it says, by a text that stands before the conversation's first turn or behind
            its last one; the last line is repeated. Where there is none, it says ``otherwise``.

    Attributes:
        calls: what it was asked and what it answered, in ids.
    """

    def __init__(self, lines: Mapping[str, Sequence[str]], otherwise: str = "done") -> None:
        capabilities = Capabilities(
            max_model_len=LONGEST,
            max_concurrent=64,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            weight_payloads=frozenset({"arrays"}),
        )
        super().__init__(codec(), self._say, capabilities=capabilities)  # pyright: ignore[reportArgumentType]
        self._lines = lines
        self._otherwise = otherwise
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        output = await super().generate(request)
        self.calls.append((request.prompt_ids, output.token_ids))
        return output

    def _say(self, request: GenerateRequest) -> Sequence[int]:
        prompt = codec().decode(request.prompt_ids, skip_special_tokens=False)
        beginning, *turns, _ = prompt.split("<|im_start|>assistant\n")
        said_to_it = beginning
        if turns:
            said_to_it += turns[-1].partition("<|im_end|>")[2]
        line = self._otherwise
        for mark, lines in self._lines.items():
            if mark in said_to_it:
                line = lines[min(len(turns), len(lines) - 1)]
                break
        return [*codec().encode_text(line), codec().eos_token_ids[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a harness's run left.

    Attributes:
        calls: what the policy was asked and what it answered, in ids.
        refused: the first request of each kind that the endpoint refused, as it reports them.
    """

    trajectory: Trajectory
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]]
    refused: list[str]

    @property
    def output(self) -> dict[str, Any]:
        return self.trajectory.row["extra_info"]["agent_output"]

    def assert_all_on_record(self) -> None:
        """Every call of the policy is in the trajectory, once, in exactly its context."""
        assert_sampled_once(self.trajectory, self.calls)
        recorded = sum(sequence.num_turns for sequence in self.trajectory.sequences)
        assert recorded == len(self.calls)
        assert self.trajectory.metrics["lost_requests"] == 0


def call(name: str, **arguments: Any) -> str:
    """Return a call of a tool as the policy says it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


MINI_SWE_AGENT_REPLIES = (
    "I look at it. " + call("bash", command="cat total.py"),
    call("bash", command="sed -i s/4/3/ total.py"),
    call("bash", command="python3 total.py"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
OPENCODE_REPLIES = (
    call("read", filePath="/tmp/app/total.py"),
    call("edit", filePath="/tmp/app/total.py", oldString="4", newString="3"),
    call("bash", command="python3 total.py", description="run it"),
    "It prints 6 now.",
)
OPENCODE_TITLE = {"title generator": ["Wrong sum"]}
OPENHANDS_REPLIES = (
    call("run", command="cat total.py"),
    call("run", command="sed -i s/4/3/ total.py"),
    call("run", command="python3 total.py"),
    call("finish", message="It prints 6 now."),
)


def mounts() -> dict[str, str]:
    """Return the folders that harnesses need: their own, and of what they run on."""
    folders = {"harnesses": str(FOLDER)}
    interpreters = {"node": Path(shutil.which("node") or "/usr/bin/node")}
    python = FOLDER / "python" / "bin" / "python"
    if python.exists():
        interpreters["python"] = python
    for name, path in interpreters.items():
        real_path = path.resolve()
        if not real_path.is_relative_to("/usr"):  # which every sandbox shows
            folders[name] = str(real_path.parent.parent)
    return folders


async def run(
    script: str,
    lines: Mapping[str, Sequence[str]],
    *,
    seconds: float = 400.0,
    longest: int = LONGEST,
    **limits: Any,
) -> Run:
    """Run a harness on :data:`ROW` to its end.

    Args:
        script: for the sandbox's shell.
        lines: what the policy says, see :class:`ScriptedPolicy`.
        longest: ids of its context.
        limits: further keys of the ``agent`` section.
    """
    policy = ScriptedPolicy(lines)
    command = {
        "argv": ["sh", "-c", script],
        "program_dir": str(PROGRAMS),
        "mounts": mounts(),
        **LIMITS,
    }
    reported: list[str] = []
    context = AgentContext(
        client=LLMServerClient([AsyncServer(policy)]),
        codec=codec(),
        limits=AgentConfig.model_validate(
            {
                "command": command,
                "run_timeout": seconds,
                "max_prompt_length": longest // 2,
                "max_response_length": longest // 2,
                "max_assistant_turns": 40,
                "max_user_turns": 40,
                **limits,
            }
        ),
        max_model_len=longest,
        failures=FailureLog(emit=reported.append),
    )
    loop = CommandAgent(context)
    try:
        await loop.preflight()
        request = episode_request(ROW, SamplingParams(max_tokens=2048, seed=1))
        trajectory = await loop.play(request)
    finally:
        await loop.close()
    refused = [text for text in reported if text.startswith("the endpoint refused")]
    return Run(trajectory=trajectory, calls=policy.calls, refused=refused)
