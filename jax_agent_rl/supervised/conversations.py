"""Rows of files to the sequences that are trained on: exact token ids, and which carry loss.

::

    {"messages": […], "tools": […]}                   a conversation
    {"prompt": […], "completion": […]}                the same; only the completion carries loss
    {"prompt": […], "chosen": […], "rejected": […]}   a preference; without a prompt, it is the
                                                      messages that both begin with
    {"prompt_ids": […], "response_ids": […], …}       a sequence that ``jax-agent-rl rollout`` wrote
    {"prompt_ids": […], "turns": […], …}              a line of a run's ``trajectories.jsonl``

A conversation is encoded as a rollout would have built it, turn by turn, so that it is tokenized as
the policy will see it: the assistant's ids, with the one that ends the turn, carry loss, and what
the template writes between turns does not. Trajectories keep the ids that were sampled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from jax_agent_rl.learner.sequences import TrainingSequence
from jax_agent_rl.observe.run_dir import restore_trajectory
from jax_agent_rl.types.sequences import common_prefix_length

Example = tuple[TrainingSequence, ...]
"""A conversation, or a trajectory, which may have been sampled in several contexts."""
RankedExample = tuple[float, Example]
"""The reward of an example, and the example."""
_TrajectoryGroup = dict[str, tuple[float, list[TrainingSequence]]]
"""Reward and sequences of each trajectory of a group, by its id."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A preference."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes rows.

    Attributes:
        config: the section of the rows.
        pack_length: number of tokens of a packed row, and so of the longest sequence.
    """

    codec: ChatCodec
    config: ConversationsConfig
    pack_length: int

    def examples(self, sources: Sequence[DataSource]) -> list[Example]:
        """Return the conversations and trajectories of files, in order.

        Raises:
            DataError: a row is invalid, or too long; or nothing is left to train on.
        """
        best_of = None
        if isinstance(self.config, SftDataConfig):
            best_of = self.config.best_of

        # All rows are encoded before any is refused for its length.
        encoded: list[Example] = []
        for group in self._groups(sources):
            encoded += [example for _, example in _best(group, best_of)]
        examples = [example for example in encoded if self._fits(example)]
        _require_some(examples, sources)
        return examples

    def pairs(self, sources: Sequence[DataSource]) -> list[Pair]:
        """Return the preferences of files.

        Of a group of trajectories, they are the best and the worst if their rewards differ.

        Raises:
            DataError: as :meth:`examples`.
        """
        encoded: list[Pair] = []
        for group in self._groups(sources, pairs=True):
            if isinstance(group, Pair):
                encoded.append(group)
                continue
            ranked = _best(group, None)
            if len(ranked) < 2:
                continue
            best_reward, best = ranked[0]
            worst_reward, worst = ranked[-1]
            if best_reward > worst_reward:
                encoded.append(Pair(chosen=best, rejected=worst))

        pairs = []
        for pair in encoded:
            if self._fits(pair.chosen) and self._fits(pair.rejected):
                pairs.append(pair)
        _require_some(pairs, sources)
        return pairs

    def _groups(self, sources: Sequence[DataSource], *, pairs: bool = False) -> Iterator[Any]:
        """Yield conversations, preferences, and groups of trajectories with their rewards.

        Each conversation is a group of its own.
        """
        for source in sources:
            for file in find_files(source):
                yield from self._groups_of_file(file, pairs=pairs)

    def _groups_of_file(self, file: Path, *, pairs: bool) -> Iterator[Any]:
        groups: dict[str, _TrajectoryGroup] = {}
        for location, row in read_row_file(file):
            with _located(location):
                if "prompt_ids" in row:
                    self._add_trajectory(groups, row)
                elif pairs:
                    yield self._pair(row)
                else:
                    yield [(0.0, (self.conversation(row),))]
        for group in groups.values():
            yield [(reward, tuple(sequences)) for reward, sequences in group.values()]

    def _add_trajectory(self, groups: dict[str, _TrajectoryGroup], row: Row) -> None:
        """Add the sequences of a trajectory's row to its group.

        They are left out if nothing of them carries loss, or the reward is too low.
        """
        reward = float(row["reward"])
        min_reward = self.config.min_reward
        if row.get("no_loss"):
            return
        if min_reward is not None and reward < min_reward:
            return

        if "turns" in row:
            parts = [
                (sequence.prompt_ids, sequence.response_ids, sequence.loss_mask)
                for sequence in restore_trajectory(row).sequences
            ]
        else:
            parts = [(row["prompt_ids"], row["response_ids"], row["loss_mask"])]

        group = groups.setdefault(row["group_id"], {})
        _, sequences = group.setdefault(row["trajectory_id"], (reward, []))
        for prompt_ids, response_ids, loss_mask in parts:
            if any(loss_mask):
                prompt_mask = [0] * len(prompt_ids)
                sequences.append(
                    _sequence([*prompt_ids, *response_ids], [*prompt_mask, *loss_mask])
                )

    def conversation(self, row: Row) -> TrainingSequence:
        """Return a row's conversation, or its prompt and completion, as a sequence to train on."""
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
        chosen = row["chosen"]
        rejected = row["rejected"]
        prompt = row.get("prompt")
        if prompt is None:
            # The messages that both begin with carry no loss.
            begin = common_prefix_length(chosen, rejected)
        else:
            begin = len(prompt)
            chosen = [*prompt, *chosen]
            rejected = [*prompt, *rejected]
        return Pair(
            chosen=(self._encode(row, chosen, begin=begin),),
            rejected=(self._encode(row, rejected, begin=begin),),
        )

    def _encode(self, row: Row, messages: Sequence[Message], *, begin: int = 0) -> TrainingSequence:
        """Encode messages, of which those before ``begin`` carry no loss."""
        tools = row.get("tools") or ()
        if isinstance(tools, str):
            tools = json.loads(tools)
        train_on: Collection[str] = ("assistant",)
        if isinstance(self.config, SftDataConfig):
            train_on = self.config.train_on

        def carries_loss(number: int, message: Message) -> bool:
            if number < begin or message["role"] not in train_on:
                return False
            return message.get("weight", 1) != 0

        codec = self.codec.with_template_kwargs(row.get("chat_template_kwargs"))
        ids, mask = encode_conversation(codec, normalize_messages(messages), tools, carries_loss)
        if not any(mask):
            raise DataError(f"no message of role {' or '.join(train_on)} carries loss")
        return _sequence(ids, mask)

    def _fits(self, example: Example) -> bool:
        """Return whether an example is short enough for ``data.max_length``."""
        length = max(len(sequence.token_ids) for sequence in example)
        max_length = self.config.max_length
        if max_length is not None and length > max_length:
            return False
        if length > self.pack_length:
            raise DataError(
                f"a sequence has {length} tokens, a packed row {self.pack_length}; set"
                f" learner.pack_length >= {length}, or data.max_length to leave it out"
            )
        return True


def encode_conversation(
    codec: ChatCodec,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    carries_loss: Callable[[int, Message], bool],
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and 1 for each that carries loss, else 0.

    It is built turn by turn, as in a rollout. The messages between two assistant turns are encoded
    together, with the generation prompt after them, and carry loss if one of them does. The first
    id of all never does.

    Args:
        messages: with at least one of the assistant, none of which follows another directly.
        tools: schemas that the template shows.
        carries_loss: returns whether a message does, from its index and the message.

    Raises:
        DataError: the assistant says nothing, begins, or speaks twice in a row.
        TemplateError: the template refuses a message.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("there is no message of the assistant; add its answer")
    if messages[0]["role"] == "assistant":
        raise DataError("the conversation begins with the assistant; begin it with what it answers")

    ids: list[int] = []
    mask: list[int] = []
    turn: list[int] = []  # the last assistant turn, until what follows it is known
    for is_assistant, block in itertools.groupby(
        enumerate(messages), lambda item: item[1]["role"] == "assistant"
    ):
        numbered = list(block)
        block_messages = [message for _, message in numbered]
        loss = int(any(carries_loss(number, message) for number, message in numbered))

        if is_assistant:
            if len(numbered) > 1:
                first = numbered[0][0]
                raise DataError(
                    f"messages {first} and {first + 1} are both the assistant's; join them"
                )
            turn = codec.encode_turn(block_messages[0], tools)
            ids += turn
            mask += [loss] * len(turn)
            continue

        if not ids:
            ids = codec.encode_prompt(block_messages, tools)
            mask = [0] + [loss] * (len(ids) - 1)
            continue

        appended = codec.encode_append(turn, block_messages, tools=tools)
        if codec.replaces_end(turn, appended):
            ids.pop()
            mask.pop()
        appended_mask = [loss] * len(appended)
        if appended and _ends_turn(codec, turn, appended):
            appended_mask[0] = mask[-1]  # the end is the turn's, as if it had been sampled
        mask += appended_mask
        ids += appended
    return ids, mask


def _ends_turn(codec: ChatCodec, turn: Sequence[int], appended: Sequence[int]) -> bool:
    """Return whether the first appended id ends a turn that has no end of its own."""
    return turn[-1] not in codec.eos_token_ids and appended[0] in codec.eos_token_ids


def _sequence(ids: Iterable[int], mask: Sequence[int]) -> TrainingSequence:
    return TrainingSequence(token_ids=np.array(list(ids), np.int32), loss_mask=np.array(mask, bool))


def _best(group: list[RankedExample], count: int | None) -> list[RankedExample]:
    """Return the members with the highest rewards; the first of equals comes first.

    Members without a sequence that carries loss are left out.
    """
    members = [(reward, example) for reward, example in group if example]
    members.sort(key=lambda member: -member[0])
    return members[:count]


def _require_some(examples: Sequence[Any], sources: Sequence[DataSource]) -> None:
    if not examples:
        raise DataError(
            f"{', '.join(str(source) for source in sources)}: nothing is left to train on; look at"
            " data.min_reward and data.max_length"
        )


@contextlib.contextmanager
def _located(location: str) -> Iterator[None]:
    """Name file and row in a problem."""
    try:
        with located(location):
            yield
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"{location}: {problem}") from error
