"""Targets without any protection: what an attack must be able to break."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase

UNPROTECTED_SECONDS = 8.0
"""A program may run so long: even an unprotected target ends it, or the tests would not end."""


class UnprotectedPrograms:
    """Runs programs as the user, in one folder, with the user's environment."""

    name = "no sandbox"

    async def run(self, program: str) -> str:
        def run_program() -> str:
            with tempfile.TemporaryFile() as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", program], stdout=output, stderr=output
                )
                try:
                    process.wait(UNPROTECTED_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                output.seek(0)
                return output.read().decode(errors="replace")

        return await asyncio.to_thread(run_program)


class UnprotectedTests:
    """Runs a program and its tests in one process; status 0 passes."""

    name = "tests beside the program"

    async def passes(self, program: str, tests: str) -> bool:
        def run_tests() -> bool:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "tests.py").write_text(tests)
                source = f"{program}\ntests = open('tests.py').read()\nexec(tests)\n"
                command = [sys.executable, "-c", source]
                done = subprocess.run(command, cwd=folder, capture_output=True, timeout=30)
                return done.returncode == 0

        return await asyncio.to_thread(run_tests)


class UnprotectedChat:
    """Renders messages as text, and tokenizes the whole: control tokens are control tokens."""

    name = "template and tokenizer"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    async def prompt_length(self, messages: Sequence[Mapping[str, Any]] | str) -> int:
        """Return the length of a conversation, or of an answer to be graded."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": f"Grade this: {messages}"}]
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    async def grade(self, answer: str, *, reply: str) -> float | None:
        """Read the last grade of the conversation, wherever it stands."""
        text = answer + reply
        grade = text.rpartition("[[")[2].partition("]]")[0]
        return float(grade) / 10 if grade else None


async def _take_everything(request: web.Request) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    return web.Response(text="ok")


async def _read_file(request: web.Request) -> web.Response:
    return web.Response(text=Path("/" + request.match_info["path"]).read_text())


def unprotected_app() -> web.Application:
    """An application that reads all, asks nobody who they are, and serves every file."""
    app = web.Application(client_max_size=1 << 40)
    app.router.add_post("/json", _take_everything)
    app.router.add_get("/{path:.*}", _read_file)
    return app
