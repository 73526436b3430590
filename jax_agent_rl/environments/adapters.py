"""Adapters of reasoning-gym's and TextWorld's tasks.

Each imports its package when it is first used. reasoning-gym's tasks are procedural: one question,
one answer, checked by the task's own verifier. A row names the question, it does not hold it::

    "extra_info": {
        "environment_kwargs": {
            "name": "reasoning_gym", "dataset": "chain_sum", "seed": 0, "index": 17,
            "config": {"min_terms": 2, "max_terms": 2}
        }
    }

TextWorld's tasks are games: rooms, objects, a quest, and commands in plain English. A row names a
compiled game (``tw-make … --output game.z8``)::

    "extra_info": {"environment_kwargs": {"name": "textworld", "game": "data/textworld/train-0.z8"}}

Both need the extra ``environments``.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.environments.base import Environment, Observation, in_thread, register_environment
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.rewards.rules import tagged
from jax_agent_rl.utils.packages import import_installed, install_command

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply


@register_environment("reasoning_gym")
class ReasoningGymEnvironment(Environment):
    """One question of a data set; the answer is the text in the last ``<answer>…</answer>``."""

    async def reset(
        self,
        *,
        dataset: str,
        index: int,
        seed: int = 0,
        config: Mapping[str, Any] | str | None = None,
        partial_credit: bool = False,
    ) -> Observation:
        """Ask a question.

        Args:
            dataset: name of the task family.
            index: number of the question.
            seed: seed of the dataset. reasoning-gym adds it to ``index`` for most families, so
                seeds of training and held-out rows must lie further apart than their indices.
            config: the family's settings (JSON text where a Parquet file cannot hold a mapping).
            partial_credit: keep scores between 0 and 1. Off by default: many verifiers give partial
                scores to wrong answers that contain the right one, which a policy soon learns to
                exploit.
        """
        self._partial_credit = partial_credit
        settings = config
        if not isinstance(settings, str):
            settings = json.dumps(dict(settings or {}), sort_keys=True)
        self._dataset, self._entry = await in_thread(
            lambda: _question(dataset, seed, settings, index), name="question"
        )
        return Observation.say(self._entry["question"])

    async def step(self, reply: Reply) -> Observation:
        """Score the answer and end the episode."""
        answer = tagged(reply.content)
        score = 0.0
        if answer:
            verdict = await in_thread(
                lambda: self._dataset.score_answer(answer, self._entry), name="verifier"
            )
            score = float(verdict)
        if not self._partial_credit:
            score = float(score >= 1.0)
        metrics = {"reasoning_gym/answered": float(answer is not None)}
        return Observation(score=score, done=True, metrics=metrics)


def _question(dataset: str, seed: int, settings: str, index: int) -> tuple[Any, dict[str, Any]]:
    """Return a dataset, which scores answers, and one of its entries."""
    opened = _open_dataset(dataset, seed, settings)
    return opened, opened[index]


@functools.lru_cache(maxsize=64)
def _open_dataset(name: str, seed: int, settings: str) -> Any:
    try:
        reasoning_gym = import_installed("reasoning_gym")
    except ImportError:
        raise EnvironmentFailedError(
            f"reasoning-gym is not installed; install the extra: {install_command('environments')}"
        ) from None
    try:
        return reasoning_gym.create_dataset(name, seed=seed, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise EnvironmentFailedError(
            f"reasoning_gym: dataset {name!r} with {settings}: {error}"
        ) from None


_LOCK = threading.Lock()
"""TextWorld's parser is one object of the whole process; calls take milliseconds, so they go one
after the other."""

_MAX_COMMAND = 120
_UNSAFE = re.compile(r"[^a-z0-9' -]")
"""Characters that never reach the game's interpreter, a C library in this process that a NUL byte
crashes."""
_INTERPRETER = frozenset(
    "quit q restart restore save script unscript transcript undo verbose brief superbrief notify"
    " version verify pronouns nouns yes y no oops".split()
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
        opening = f"{state.objective}\n\n{_clean(state.description)}"
        return Observation.say(self._with_commands(opening, state))

    async def step(self, reply: Reply) -> Observation:
        """Play a command: the text in ``<command>…</command>``, else the last line.

        The score is the share of the game's points that it earned.
        """
        command = parse_command(reply.content)
        if not command or command.split()[0] in _INTERPRETER:
            objection = "Say what you want to do."
            if command:
                objection = f"{command!r} is not a command of this game."
            return Observation.say(
                objection, metrics={"textworld/won": 0.0, "textworld/inadmissible": 1.0}
            )

        is_admissible = command in self._admissible
        state, points, done = await in_thread(lambda: self._play(command), name="game step")
        score = (points - self._score) / self._max_score
        self._score = float(points)

        text = _clean(state.feedback)
        if not done:
            text = self._with_commands(text, state)
        metrics = {
            "textworld/won": float(bool(state.won)),
            "textworld/inadmissible": float(not is_admissible),
        }
        return Observation.say(text, score=score, done=done, metrics=metrics)

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
        self._game = None
        self._path = None

    def _with_commands(self, text: str, state: Any) -> str:
        """Note the commands that would do something now; list them below the text if asked to."""
        self._admissible = sorted(state.admissible_commands or ())
        if not self._show_commands:
            return text
        return f"{text}\n\nYou can: {', '.join(self._admissible)}"


def parse_command(text: str) -> str:
    r"""Return the command of a reply, empty if it has none.

    It is one line of lower-case ASCII letters, digits, spaces, hyphens and apostrophes.

    >>> parse_command("I should leave.\n> go east")
    'go east'
    """
    last_line = ""
    for line in (tagged(text, "command") or text).splitlines():
        if line.strip():
            last_line = line
    words = _UNSAFE.sub(" ", last_line.lower()).split()
    return " ".join(words)[:_MAX_COMMAND].strip()


def _load(path: Path) -> Any:
    try:
        textworld = import_installed("textworld")
    except ImportError:
        raise EnvironmentFailedError(
            f"textworld is not installed; install the extra: {install_command('environments')}"
        ) from None
    if not path.is_file():
        raise EnvironmentFailedError(
            f"game {str(path)!r} does not exist; make it with tw-make … --output {path}"
        )

    infos = textworld.EnvInfos(
        objective=True,
        description=True,
        feedback=True,
        admissible_commands=True,
        score=True,
        max_score=True,
        won=True,
    )
    with _LOCK, warnings.catch_warnings():
        # "not fully supported": TextWorld itself keeps the score, not the interpreter
        warnings.simplefilter("ignore")
        return textworld.start(str(path), request_infos=infos)


def _clean(text: str | None) -> str:
    """Remove the interpreter's final prompt and status line, and runs of empty lines."""
    before_prompt = (text or "").rsplit("\n>", 1)[0]
    body, _, _ = before_prompt.partition("Would you like to RESTART")

    lines: list[str] = []
    for line in body.splitlines():
        line = line.strip()
        if line or (lines and lines[-1]):  # of several empty lines, the first stays
            lines.append(line)
    return "\n".join(lines).strip()
