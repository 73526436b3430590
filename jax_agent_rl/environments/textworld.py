"""TextWorld's games: rooms, objects, a quest, and commands in plain English.

A row names a compiled game (``tw-make … --output game.z8``)::

    "extra_info": {"environment_kwargs": {"name": "textworld", "game": "data/textworld/train-0.z8"}}

Needs the extra ``environments``.
"""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.environments.base import Environment, Observation, in_thread, register_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.rewards.rules import tagged

if TYPE_CHECKING:
    from jax_agent_rl.chat.formats.base import Reply

_LOCK = threading.Lock()
"""TextWorld's parser is one object of the whole process; calls take milliseconds, so they go one after the other."""

_MAX_COMMAND = 120
_UNSAFE = re.compile(r"[^a-z0-9' -]")
"""Never reaches the game's interpreter, a C library in this process that a NUL byte crashes."""
_INTERPRETER = frozenset(
    "quit q restart restore save script unscript transcript undo verbose brief superbrief notify version verify "
    "pronouns nouns yes y no oops".split()
)
"""Commands to the interpreter instead of the game."""


@register_environment("textworld")
class TextWorldEnvironment(Environment):
    """One game. An instance that is reset to the game it has just played need not load it again."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._game: Any = None
        self._score = 0.0
        self._show_commands = True
        self._admissible: list[str] = []
        self._max_score = 1.0

    async def reset(self, *, game: str, show_commands: bool = True) -> Observation:
        """Start a game and show its objective and the first room.

        Args:
            game: path of a compiled game, with its ``.json`` beside it.
            show_commands: list the commands that would do something, after each observation.
        """
        self._show_commands = show_commands
        self._score = 0.0
        state = await in_thread(lambda: self._start(Path(game).expanduser()), name="game start")
        self._max_score = float(state.max_score or 1)
        return Observation.say(self._with_commands(f"{state.objective}\n\n{_clean(state.description)}", state))

    async def step(self, reply: Reply) -> Observation:
        """Play a command: the text in ``<command>…</command>``, else the last line.

        The score is the share of the game's points that it earned.
        """
        command = parse_command(reply.content)
        if not command or command.split()[0] in _INTERPRETER:
            nothing = f"{command!r} is not a command of this game." if command else "Say what you want to do."
            return Observation.say(nothing, metrics={"textworld/won": 0.0, "textworld/inadmissible": 1.0})
        known = command in self._admissible
        state, points, done = await in_thread(lambda: self._play(command), name="game step")
        score, self._score = (points - self._score) / self._max_score, float(points)
        return Observation.say(
            _clean(state.feedback) if done else self._with_commands(_clean(state.feedback), state),
            score=score,
            done=done,
            metrics={"textworld/won": float(bool(state.won)), "textworld/inadmissible": float(not known)},
        )

    async def close(self) -> None:
        """End the game."""
        if self._game is not None:
            await in_thread(self._close, name="game close")

    def _start(self, path: Path) -> Any:
        if self._path != path:
            self._close()
            self._game = _load(path)
            self._path = path
        with _LOCK:
            return self._game.reset()

    def _play(self, command: str) -> tuple[Any, float, bool]:
        with _LOCK:
            return self._game.step(command)

    def _close(self) -> None:
        if self._game is not None:
            with _LOCK:
                self._game.close()
        self._game, self._path = None, None

    def _with_commands(self, text: str, state: Any) -> str:
        self._admissible = sorted(state.admissible_commands or ())
        if not self._show_commands:
            return text
        return f"{text}\n\nYou can: {', '.join(self._admissible)}"


def parse_command(text: str) -> str:
    r"""Return the command of a reply: one line of lower-case ASCII letters, digits, spaces, hyphens and apostrophes.

    >>> parse_command("I should leave.\n> go east")
    'go east'
    """
    lines = [line for line in (tagged(text, "command") or text).splitlines() if line.strip()]
    letters = _UNSAFE.sub(" ", (lines or [""])[-1].lower())
    return " ".join(letters.split())[:_MAX_COMMAND].strip()


def _load(path: Path) -> Any:
    try:
        import textworld
    except ImportError:
        raise EnvironmentFailedError(
            "textworld is not installed; install the extra: pip install 'jax_agent_rl[environments]'"
        ) from None
    if not path.is_file():
        raise EnvironmentFailedError(f"game {str(path)!r} does not exist; make it with tw-make … --output {path}")
    wanted = textworld.EnvInfos(
        objective=True,
        description=True,
        feedback=True,
        admissible_commands=True,
        score=True,
        max_score=True,
        won=True,
    )
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not fully supported": TextWorld itself keeps the score, not the interpreter
        return textworld.start(str(path), request_infos=wanted)


def _clean(text: str | None) -> str:
    """Remove the interpreter's final prompt and status line, and runs of empty lines."""
    body = (text or "").rsplit("\n>", 1)[0].partition("Would you like to RESTART")[0]
    lines = [line.strip() for line in body.splitlines()]
    kept = [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]
    return "\n".join(kept).strip()
