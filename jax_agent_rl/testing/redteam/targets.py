"""What can be attacked: this installation's parts, and adapters to programs of others.

An adapter is small. A sandbox of another stack needs this much::

    class MySandbox:
        name = "my sandbox"

        async def run(self, program: str) -> str:
            return …  # what the program printed
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.errors import ConfigError, RewardError, ToolError
from jax_agent_rl.rewards import ModelJudge
from jax_agent_rl.testing.redteam.attack import NotApplicableError
from jax_agent_rl.tool_server.sandbox import Sandbox
from jax_agent_rl.types import SamplingParams, StopReason, TokenOutput
from jax_agent_rl.types.token_ids import digest_ids
from jax_agent_rl.utils.network import JsonService, is_loopback

REQUEST_SECONDS = 60.0


def require_loopback(url: str) -> str:
    """Return a URL whose host is this machine, without a slash at its end.

    Raises:
        ConfigError: it is not a URL, or another machine's: only what runs here is attacked.
    """
    try:
        address = urllib.parse.urlsplit(url)
        host = address.hostname
        _ = address.port  # a ValueError if it is no port
    except ValueError as error:
        raise ConfigError(f"{url} is not a URL: {error}") from None
    if host is None or not is_loopback(host):
        raise ConfigError(
            f"{url} is not on this machine; redteam attacks servers on loopback only, such as"
            " http://127.0.0.1:8000"
        )
    return url.rstrip("/")


async def post_json(url: str, body: Any) -> Any:
    """Return the JSON that a server answers.

    Raises:
        ToolError: it gave no such answer.
        TimeoutError: it did not answer within :data:`REQUEST_SECONDS`.
    """
    service = JsonService(
        url=url,
        url_key="url",
        timeout=REQUEST_SECONDS,
        timeout_key="the limit of an attack",
        error=ToolError,
    )
    try:
        return await service.post(body)
    finally:
        await service.close()


# --- programs -------------------------------------------------------------------------------------


class ProgramRunner(Protocol):
    """Runs Python programs that a model wrote, and returns what they printed."""

    name: str

    async def run(self, program: str) -> str: ...


class OwnSandbox:
    """This installation's sandbox."""

    name = "sandbox of this installation"

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, program: str) -> str:
        result = await self._sandbox.run(
            [self._sandbox.python, "main.py"], files={"main.py": program.encode()}
        )
        return result.stdout + result.stderr

    async def passes(self, program: str, tests: str) -> bool:
        """Return whether a program passes tests."""
        result = await self._sandbox.run_tests(program, tests)
        return result.ok


@dataclass(frozen=True, kw_only=True)
class ToolServerPrograms:
    """A tool server that speaks verl-tool's protocol, with a Python tool.

    Attributes:
        url: its address, without ``/get_observation``.
        begin, end: what its Python tool looks for around a program.
    """

    url: str
    begin: str = "<python>"
    end: str = "</python>"

    @property
    def name(self) -> str:
        return f"tool server {self.url}"

    async def run(self, program: str) -> str:
        body = {
            "trajectory_ids": ["redteam"],
            "actions": [f"{self.begin}{program}{self.end}"],
            "extra_fields": [{}],
            "finish": [False],
        }
        answer = await post_json(f"{self.url}/get_observation", body)
        return json.dumps(answer)


@dataclass(frozen=True, kw_only=True)
class SandboxFusionPrograms:
    """A server that speaks SandboxFusion's protocol: ``POST /run_code``."""

    url: str

    @property
    def name(self) -> str:
        return f"SandboxFusion server {self.url}"

    async def run(self, program: str) -> str:
        body = {"code": program, "language": "python"}
        answer = await post_json(f"{self.url}/run_code", body)
        return json.dumps(answer)


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServerTarget:
    """A server, and a path of it that takes JSON by POST.

    Attributes:
        url: its address.
    """

    url: str
    path: str

    @property
    def name(self) -> str:
        return f"server {self.url}{self.path}"


# --- models ---------------------------------------------------------------------------------------


class ChatTarget(Protocol):
    """Turns conversations into token ids, as they are answered."""

    name: str

    async def prompt_length(self, messages: Sequence[Mapping[str, Any]]) -> int: ...


@dataclass(frozen=True, kw_only=True)
class EndpointTarget:
    """A server of OpenAI's chat completions that reports ``usage.prompt_tokens``.

    Attributes:
        url: what clients take as ``base_url``.
        model: its model's name.
    """

    url: str
    model: str

    @property
    def name(self) -> str:
        return f"endpoint {self.url}"

    async def prompt_length(self, messages: Sequence[Mapping[str, Any]]) -> int:
        body = {"model": self.model, "messages": list(messages), "max_tokens": 1}
        answer = await post_json(f"{self.url}/chat/completions", body)
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise NotApplicableError("its answers have no usage.prompt_tokens")
        return usage["prompt_tokens"]


class CodecTarget:
    """This installation's chat codec, which every agent and the endpoint use.

    Args:
        codec: of a model.
        model: its name.
    """

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self.name = f"chat codec with {model}"
        self._codec = codec

    async def prompt_length(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return len(self._codec.encode_prompt(messages))


class OwnJudge:
    """This installation's judge; what its model writes is given.

    Args:
        codec: of the judge's model.
    """

    name = "judge of this installation"

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._prompt_length = 0
        self._reply_ids: list[int] = []

    async def prompt_length(self, answer: str) -> int:
        """Return the length of the prompt in which an answer is graded."""
        await self.grade(answer, reply="[[5]]")
        return self._prompt_length

    async def grade(self, answer: str, *, reply: str) -> float | None:
        """Return the grade of an answer; None if the judge's reply holds none.

        Args:
            reply: what the judge's model writes about it.
        """
        self._reply_ids = [*self._codec.encode_text(reply), self._codec.eos_token_ids[0]]
        judge = ModelJudge(self, self._codec, sampling=SamplingParams(max_tokens=64))
        try:
            return await judge.grade(question="What is 2 + 2?", answer=answer)
        except RewardError:
            return None

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams
    ) -> TokenOutput:
        """Return the given reply, as an engine returns what it sampled."""
        self._prompt_length = len(prompt_ids)
        ids = tuple(self._reply_ids)
        return TokenOutput(
            token_ids=ids,
            log_probs=(0.0,) * len(ids),
            policy_versions=(0,) * len(ids),
            stop_reason=StopReason.EOS,
            context_digest=digest_ids([*prompt_ids, *ids]),
        )
