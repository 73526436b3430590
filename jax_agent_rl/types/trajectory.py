"""Trajectories: the turns of a rollout, its token ids, and where it branched off.

The package's docstring has a worked example.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.checks import as_score
from jax_agent_rl.errors import DropReason, FinishReason
from jax_agent_rl.types.supports import Support
from jax_agent_rl.types.token_output import TokenOutput, TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallRecord:
    """One tool call of a turn, for rewards, metrics and display.

    Attributes:
        name: tool name the model wrote ("" when the call could not be decoded).
        arguments: decoded arguments, or None when they could not be decoded.
        observation: text the model read back (after truncation).
        error: None, or the kind: ``malformed``, ``unknown_tool``, ``bad_arguments``, ``timeout``,
            ``raised``, ``over_parallel_limit``, ``invalid_action`` (no tool of the tool server took
            it).
        reward: reward the tool itself gave.
        seconds: wall time of the call.
        call_id: the id the model gave the call, in formats that have one.
        media: images and videos it returned, by kind: ``{"image": (…,)}``.
    """

    name: str
    arguments: Mapping[str, Any] | None
    observation: str
    error: str | None = None
    reward: float = 0.0
    seconds: float = 0.0
    call_id: str | None = None
    media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reward = as_score(self.reward, f"the reward of the call of {self.name!r:.100}")
        object.__setattr__(self, "reward", reward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One assistant turn and what was appended after it.

    Attributes:
        appended_ids: ids inserted after it (boundary, tool results, next generation prompt); mask
            0.
        appended_media: images and videos ``appended_ids`` show, by kind, in order of their
            placeholders.
        tool_calls: the calls made in this turn, in order.
        score: what a simulated user or an environment gave this turn, or None.
        learn_appended: ``appended_ids`` carry loss as well (``agent.mask_observations=false``).
        number: which call of its session sampled it, in order of completion; None outside of
            recorded sessions.
        note: where its call left the recorded conversations, as text; empty if it continued one.
    """

    output: TokenOutput
    appended_ids: tuple[int, ...] = ()
    appended_media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tool_calls: tuple[ToolCallRecord, ...] = ()
    score: float | None = None
    learn_appended: bool = False
    number: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.score is not None:
            object.__setattr__(self, "score", as_score(self.score, "the score of a turn"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a trajectory branched off another one of its tree.

    The inherited ids are equal one by one and never sampled again::

        parent  = [20 21 2] [30 31 32] [40 41 2]
        fork    = turns 1, tokens 1
        branch  = [20 21 2] [30 31 32] [40] + [50 2]        newly sampled: 50 2

    Attributes:
        tree_id: the first trajectory of the tree.
        parent_id: the trajectory it branched off.
        turns: number of whole inherited turns, with what was appended to them.
        tokens: number of inherited ids of the turn after those.
    """

    tree_id: str
    parent_id: str
    turns: int
    tokens: int = 0

    @property
    def at_prompt(self) -> bool:
        """Whether it inherits the prompt alone: a new chain that counts as part of the tree."""
        return self.turns == self.tokens == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One complete rollout, unpadded. Build it with :meth:`from_turns`, which keeps the invariants.

    Attributes:
        trajectory_id: unique within a run.
        group_id: trajectories of one prompt share it.
        agent_name: the agent loop that made it.
        prompt_ids: token ids of the prompt. They and ``turns`` are the source of truth; the next
            four are derived.
        turns: the assistant turns, in order.
        response_ids: sampled and inserted token ids of all turns; the module has a worked example.
        response_mask: 1 for every id that the policy sampled.
        rollout_logprobs: log-prob of every sampled id in the distribution it was sampled from; 0
            elsewhere.
        policy_versions: version of the weights that sampled the id; -1 elsewhere.
        finish_reason: why the trajectory ended.
        no_loss: None, or why its ids carry no loss although its reward counts in its group.
        reward: the score less the penalties of ``algorithm.shaping``; 0 until scored. It and the
            rewards of turns are learned from.
        raw_score: None, or the score before those penalties, see :attr:`score`.
        reward_parts: other numbers that the reward function returned, and the penalties, by name.
        metrics: seconds and counts (``generate_seconds``, ``tool_seconds``, ...).
        row: the dataset row it came from.
        messages: the conversation as text, derived from the ids, for people and reward functions. A
            message that shows images or videos lists their kinds under ``media``; they themselves
            are in :attr:`multi_modal`.
        tool_scores: what each tool's ``calc_reward`` made of the whole trajectory, by tool.
        segments: further contexts the same rollout sampled in, for agents that edit their history
            or hold several conversations. Each sampled id is in exactly one sequence with mask 1.
            Segments share this trajectory's fate and advantage; they have no reward and no segments
            of their own.
        fork: None, or where it branched off another trajectory of its group.
        history_window: None, or how many earlier turns each turn was sampled after, besides the
            prompt. The response arrays still hold all turns in order; :attr:`sequences` are the
            contexts that the turns were sampled in.
        prompt_media: images and videos ``prompt_ids`` show; in a sequence of a history window also
            the images and videos of the earlier turns it shows.
        role: the role it played in its episode, None if there is but one. Baselines are by group
            and role.
        adapter: the adapter in training that sampled it, see ``agent.role_adapters``; None: the
            policy itself.
        teacher_scores: of every id in the loss, sequence after sequence, by a teacher that is
            served elsewhere.
        feedback: what the reward function said about it, as text.
        teacher_prompt_ids: the prompt under which the policy is its own teacher
            (``algorithm.kl.reference=feedback``); empty: the one it had.
    """

    trajectory_id: str
    group_id: str
    agent_name: str
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    no_loss: DropReason | None = None
    reward: float = 0.0
    raw_score: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    tool_scores: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[Trajectory, ...] = ()
    fork: Fork | None = None
    history_window: int | None = None
    prompt_media: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    role: str | None = None
    adapter: str | None = None
    teacher_scores: TokenScores | None = None
    feedback: str = ""
    teacher_prompt_ids: tuple[int, ...] = ()

    @classmethod
    def from_turns(
        cls, *, prompt_ids: Sequence[int], turns: Sequence[Turn], **fields: Any
    ) -> Trajectory:
        """Build a trajectory, its turns laid out as flat response arrays.

        Raises:
            ValueError: no prompt, or no sampled id at all.
        """
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for turn in turns:
            output = turn.output
            num_appended = len(turn.appended_ids)
            ids += output.token_ids + turn.appended_ids
            mask += [1] * len(output.token_ids) + [0] * num_appended
            logprobs += output.log_probs + (0.0,) * num_appended
            versions += output.policy_versions + (-1,) * num_appended

        if not prompt_ids or not any(mask):
            raise ValueError(
                f"a trajectory needs a prompt and a sampled id, got {len(prompt_ids)} and"
                f" {sum(mask)}"
            )
        return cls(
            prompt_ids=tuple(prompt_ids),
            turns=tuple(turns),
            response_ids=tuple(ids),
            response_mask=tuple(mask),
            rollout_logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
            **fields,
        )

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """All sequences to train on: the segments, then the last context.

        With a history window, turn k is sampled after the prompt and the ``window`` turns before
        it. So one sequence holds the turns that were sampled after all earlier ones, and every
        later turn is a sequence of its own::

            window 1, turns a b c d      prompt | a b      prompt b | c      prompt c | d
        """
        return (*self.segments, *self._windows())

    def _windows(self) -> Iterator[Trajectory]:
        window = self.history_window
        num_turns = len(self.turns)
        if window is None or num_turns <= window + 1:
            yield self
            return

        yield self._window(window, 0, window + 1)
        for index in range(window + 1, num_turns):
            yield self._window(window, index, index + 1)

    def _window(self, window: int, start: int, end: int) -> Trajectory:
        """Return the sequence that learns turns ``start`` to ``end``.

        Its prompt is this trajectory's and the ``window`` turns before ``start``.
        """
        prompt_ids = self.prompt_ids
        media = [self.prompt_media]
        for turn in self.turns[max(0, start - window) : start]:
            prompt_ids += turn.output.token_ids + turn.appended_ids
            media.append(turn.appended_media)

        # What was appended after its last turn is part of the next sequence's prompt.
        *turns, last = self.turns[start:end]
        if not last.learn_appended:
            last = replace(last, appended_ids=(), appended_media={})
        return Trajectory.from_turns(
            prompt_ids=prompt_ids,
            turns=(*turns, last),
            trajectory_id=f"{self.trajectory_id}#{end}",
            group_id=self.group_id,
            agent_name=self.agent_name,
            finish_reason=self.finish_reason,
            prompt_media=join_media(media),
        )

    @property
    def score(self) -> float:
        """What the reward function returned, whatever shaped the reward since.

        The module ``outcomes`` tells who reads the score and who reads the reward.
        """
        if self.raw_score is None:
            return self.reward
        return self.raw_score

    @property
    def episode_id(self) -> str:
        """Id that the trajectories of all roles of one run of the agent share."""
        return self.trajectory_id.partition("/")[0]

    @property
    def num_turns(self) -> int:
        """Number of assistant turns."""
        return len(self.turns)

    @property
    def num_sampled(self) -> int:
        """Number of ids sampled by the policy."""
        return sum(self.response_mask)

    @property
    def tree_id(self) -> str:
        """Id of the first trajectory of its tree: its own, if it is not a branch."""
        return self.fork.tree_id if self.fork else self.trajectory_id

    @property
    def num_inherited(self) -> int:
        """Number of sampled ids inherited from its parent."""
        if self.fork is None:
            return 0
        inherited_turns = self.turns[: self.fork.turns]
        return sum(len(turn.output.token_ids) for turn in inherited_turns) + self.fork.tokens

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each response id in the loss.

        These are freely sampled ids, and appended ids with ``learn_appended``. An appended id has
        no rollout log-prob, since it was not sampled; that of a constrained id (see
        :class:`TokenOutput`) is not the policy's.
        """
        mask: list[int] = []
        for turn in self.turns:
            mask += turn.output.loss_mask
            mask += [int(turn.learn_appended)] * len(turn.appended_ids)
        return tuple(mask)

    @property
    def supports(self) -> tuple[Support | None, ...]:
        """The support of each response id's draw.

        It is None for a draw from all ids, and for appended ids.
        """
        supports: list[Support | None] = []
        for turn in self.turns:
            supports += turn.output.supports or [None] * len(turn.output.token_ids)
            supports += [None] * len(turn.appended_ids)
        return tuple(supports)

    @property
    def restricted(self) -> bool:
        """Whether any of its draws has a support."""
        return any(turn.output.supports for turn in self.turns)

    @property
    def turn_scores(self) -> tuple[float, ...]:
        """Scores by a simulated user or an environment, in order of the scored turns."""
        return tuple(turn.score for turn in self.turns if turn.score is not None)

    @property
    def tool_calls(self) -> tuple[ToolCallRecord, ...]:
        """All tool calls, segment by segment."""
        calls: list[ToolCallRecord] = []
        for sequence in (*self.segments, self):
            for turn in sequence.turns:
                calls += turn.tool_calls
        return tuple(calls)

    @property
    def multi_modal(self) -> dict[str, tuple[Any, ...]]:
        """Unprocessed images and videos the ids show, by kind, in order of their placeholders."""
        return join_media([self.prompt_media, *(turn.appended_media for turn in self.turns)])


def join_media(parts: Iterable[Mapping[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    """Join images and videos from several mappings into one by kind, in order.

    >>> join_media([{"image": ("a",)}, {}, {"image": ("b",), "video": ("c",)}])
    {'image': ('a', 'b'), 'video': ('c',)}
    """
    joined: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for kind, items in part.items():
            joined[kind] = joined.get(kind, ()) + tuple(items)
    return joined
