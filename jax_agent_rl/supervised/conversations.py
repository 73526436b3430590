"""Rows of files to the sequences that are trained on: exact ids, and which of them carry loss.

::

    {"messages": […], "tools": […]}                     a conversation
    {"prompt": […], "completion": […]}                  the same; only the completion carries loss
    {"prompt": […], "chosen": […], "rejected": […]}     a preference; prompt may be left out where both begin alike
    {"prompt_ids": […], "response_ids": […], …}         a sequence that ``jax-agent-rl rollout`` wrote
    {"prompt_ids": […], "turns": […], …}                a line of a run's ``trajectories.jsonl``

A conversation is encoded as a rollout would have built it, turn by turn, so that it is tokenized as
the policy will see it: the assistant's ids, with the one that ends the turn, carry loss, and what
the template writes between turns does not. Trajectories keep the ids that were sampled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.formats.base import Message
from jax_agent_rl.chat.messages import normalize_messages
from jax_agent_rl.config.commands import ConversationsConfig, SftDataConfig
from jax_agent_rl.config.task import DataSource
from jax_agent_rl.data.dataset import find_files
from jax_agent_rl.data.reader import Row, located, read_row_file
from jax_agent_rl.data.rows import describe_columns
from jax_agent_rl.errors import DataError, TemplateError
from jax_agent_rl.learner.batch import TrainingSequence
from jax_agent_rl.observe.run_dir import restore_trajectory

Example = tuple[TrainingSequence, ...]
"""A conversation, or a trajectory, which may have been sampled in several contexts."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A preference."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes rows.

    Attributes:
        codec: of the model.
        config: the rows' section.
        longest: tokens of a packed row.
    """

    codec: ChatCodec
    config: ConversationsConfig
    longest: int

    def examples(self, sources: Sequence[DataSource]) -> list[Example]:
        """Return the conversations and trajectories of files, in order.

        Raises:
            DataError: a row is invalid, or too long; or nothing is left to train on.
        """
        config = self.config
        best_of = config.best_of if isinstance(config, SftDataConfig) else None
        made = [example for group in self._groups(sources) for _, example in _best(group, best_of)]
        return _required([example for example in made if self._fits(example)], sources)

    def pairs(self, sources: Sequence[DataSource]) -> list[Pair]:
        """Return the preferences of files; of a group of trajectories, the best and the worst if their rewards differ.

        Raises:
            DataError: as :meth:`examples`.
        """
        made = []
        for group in self._groups(sources, pairs=True):
            if isinstance(group, Pair):
                made.append(group)
                continue
            ranked = _best(group, None)
            if len(ranked) > 1 and ranked[0][0] > ranked[-1][0]:
                made.append(Pair(chosen=ranked[0][1], rejected=ranked[-1][1]))
        return _required(
            [pair for pair in made if self._fits(pair.chosen) and self._fits(pair.rejected)],
            sources,
        )

    def _groups(self, sources: Sequence[DataSource], *, pairs: bool = False) -> Iterator[Any]:
        """Yield conversations, each a group of its own, preferences, and groups of trajectories with their rewards."""
        for file in (file for source in sources for file in find_files(source)):
            groups: dict[str, dict[str, tuple[float, list[TrainingSequence]]]] = {}
            for place, row in read_row_file(file):
                with _located(place):
                    if "prompt_ids" in row:
                        self._add(groups, row)
                    elif pairs:
                        yield self._pair(row)
                    else:
                        yield [(0.0, (self._conversation(row),))]
            for group in groups.values():
                yield [(reward, tuple(sequences)) for reward, sequences in group.values()]

    def _add(
        self, groups: dict[str, dict[str, tuple[float, list[TrainingSequence]]]], row: Row
    ) -> None:
        """Add a sequence of a trajectory to its group, unless nothing of it carries loss or its reward is too low."""
        reward, least = float(row["reward"]), self.config.min_reward
        if row.get("no_loss") or least is not None and reward < least:
            return
        if "turns" in row:
            sequences = [
                (s.prompt_ids, s.response_ids, s.loss_mask)
                for s in restore_trajectory(row).sequences
            ]
        else:
            sequences = [(row["prompt_ids"], row["response_ids"], row["loss_mask"])]
        _, own = groups.setdefault(row["group_id"], {}).setdefault(
            row["trajectory_id"], (reward, [])
        )
        own += [
            _sequence([*prompt, *ids], [0] * len(prompt) + list(mask))
            for prompt, ids, mask in sequences
            if any(mask)
        ]

    def _conversation(self, row: Row) -> TrainingSequence:
        if "messages" in row:
            return self._encode(row, row["messages"])
        if "prompt" in row and "completion" in row:
            return self._encode(row, [*row["prompt"], *row["completion"]], begin=len(row["prompt"]))
        raise DataError(
            f"{describe_columns(row)}; a row needs messages, prompt and completion, or a"
            " trajectory's prompt_ids and response_ids"
        )

    def _pair(self, row: Row) -> Pair:
        if "chosen" not in row or "rejected" not in row:
            raise DataError(
                f"{describe_columns(row)}; a preference needs chosen and rejected, each a list of"
                " messages"
            )
        chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
        if prompt is None:
            shared = sum(
                1
                for _ in itertools.takewhile(
                    lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)
                )
            )
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        begin = len(prompt)
        return Pair(
            chosen=(self._encode(row, [*prompt, *chosen], begin=begin),),
            rejected=(self._encode(row, [*prompt, *rejected], begin=begin),),
        )

    def _encode(self, row: Row, messages: Sequence[Message], *, begin: int = 0) -> TrainingSequence:
        """Encode messages, of which those before ``begin`` carry no loss."""
        tools = row.get("tools") or ()
        codec = self.codec.with_template_kwargs(row.get("chat_template_kwargs"))
        train_on = (
            self.config.train_on if isinstance(self.config, SftDataConfig) else ("assistant",)
        )
        ids, mask = encode_conversation(
            codec,
            normalize_messages(messages),
            json.loads(tools) if isinstance(tools, str) else tools,
            lambda number, message: (
                number >= begin and message["role"] in train_on and message.get("weight", 1) != 0
            ),
        )
        if not any(mask):
            raise DataError(f"no message of role {' or '.join(train_on)} carries loss")
        return _sequence(ids, mask)

    def _fits(self, example: Example) -> bool:
        length, most = max(len(sequence.token_ids) for sequence in example), self.config.max_length
        if most is not None and length > most:
            return False
        if length > self.longest:
            raise DataError(
                f"a sequence has {length} tokens, a packed row {self.longest}; set"
                f" learner.pack_length >= {length}, or data.max_length to leave it out"
            )
        return True


def encode_conversation(
    codec: ChatCodec,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    carries_loss: Callable[[int, Message], bool],
) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, built turn by turn as in a rollout, and 1 for each that carries loss.

    The messages between two assistant turns are encoded together, with the generation prompt after
    them, and carry loss if one of them does. The first id of all never does.

    Args:
        codec: of the model.
        messages: with at least one of the assistant, none of which follows another directly.
        tools: schemas that the template shows.
        carries_loss: from a message and its number.

    Raises:
        DataError: the assistant says nothing, begins, or speaks twice in a row.
        TemplateError: the template refuses a message.
    """
    blocks = [
        (role, [(number, messages[number]) for number, _ in block])
        for role, block in itertools.groupby(
            enumerate(messages), lambda item: item[1]["role"] == "assistant"
        )
    ]
    if not any(is_assistant for is_assistant, _ in blocks):
        raise DataError("there is no message of the assistant; add its answer")
    if blocks[0][0]:
        raise DataError("the conversation begins with the assistant; begin it with what it answers")
    ids: list[int] = []
    mask: list[int] = []
    turn: list[int] = []  # the last assistant turn, until what follows it is known
    for is_assistant, block in blocks:
        loss = [int(carries_loss(number, message)) for number, message in block]
        if is_assistant:
            if len(block) > 1:
                raise DataError(
                    f"messages {block[0][0]} and {block[1][0]} are both the assistant's; join them"
                )
            turn = codec.encode_turn(block[0][1], tools)
            ids += turn
            mask += loss * len(turn)
            continue
        following = [message for _, message in block]
        if not ids:
            ids = codec.encode_prompt(following, tools)
            mask = [0] + [max(loss)] * (len(ids) - 1)
            continue
        appended = codec.encode_append(turn, following, tools=tools)
        if codec.replaces_end(turn, appended):
            del ids[-1], mask[-1]
        ends_turn = (
            appended[:1] != []
            and turn[-1] not in codec.eos_token_ids
            and appended[0] in codec.eos_token_ids
        )
        mask += [mask[-1] if ends_turn else max(loss)] + [max(loss)] * (len(appended) - 1)
        ids += appended
    return ids, mask


def _sequence(ids: Iterable[int], mask: Sequence[int]) -> TrainingSequence:
    return TrainingSequence(token_ids=np.array(list(ids), np.int32), loss_mask=np.array(mask, bool))


def _best(group: list[tuple[float, Example]], count: int | None) -> list[tuple[float, Example]]:
    """Return the members with the highest rewards first; the first of equals comes first."""
    return sorted((member for member in group if member[1]), key=lambda member: -member[0])[:count]


def _required(made: list[Any], sources: Sequence[DataSource]) -> list[Any]:
    if not made:
        raise DataError(
            f"{', '.join(map(str, sources))}: nothing is left to train on; look at data.min_reward"
            " and data.max_length"
        )
    return made


@contextlib.contextmanager
def _located(place: str) -> Iterator[None]:
    """Name file and row in a problem."""
    try:
        with located(place):
            yield
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{place}: {what}") from error
