"""Slots of recurrent states: one for each running context, the others for checkpoints. No device.

A recurrent layer has no key and value for each position, but one state for a whole context. A state
is of exactly the ids that were fed: what came after a shorter prefix cannot be taken out again. For
later contexts there are *checkpoints*, copies of states after some prefix. Each belongs to the page
of the block manager that this prefix ends in, and vanishes with it, so that states and KV cannot
disagree about ids, adapter or weights::

    (page of ids 1 … 4) ── (page of ids 5 … 8) ── (page of ids 9, 10)
                             └─ after 5 … 8          └─ after 9

A running context computes in a slot of its own, which begins as a copy of a checkpoint. When it
ends or is preempted, the slot becomes the checkpoint after its last id. Checkpoints give way when
slots are needed: first those that no session waits for, then the least recently used. With host
slots, those that a session waits for move to the host instead.

Slot 0 is the null slot: zeros, the state before the first id. Writes to it are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

NULL_STATE = 0


class StatePage(Protocol):
    """What a page of the block manager keeps of states."""

    checkpoints: dict[int, StateCheckpoint]
    sessions: set[str]


@dataclass(eq=False, slots=True)
class StateCheckpoint:
    """A state after the first ``offset`` ids of a page.

    Attributes:
        slot: where it is; on the host, its host slot.
        page: the page it belongs to.
        offset: ids of the page that were fed.
        on_host: whether it moved to the host.
        is_pinned: whether an admission that is planned writes it, or reads it from the host. It
            does not give way.
    """

    slot: int
    page: StatePage
    offset: int
    on_host: bool = False
    is_pinned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StateAllocation:
    """The state of an admitted context.

    Attributes:
        slot: where the context computes.
        source: the slot that is copied to it first; None if the state comes from the host.
        host_source: the host slot that is copied to it first; None if the state is on the device.
        checkpoints: positions of the prefill after which the state is copied, ascending, and the
            slots it is copied to.
    """

    slot: int
    source: int | None = NULL_STATE
    host_source: int | None = None
    checkpoints: tuple[tuple[int, int], ...] = ()


@dataclass
class StateSlots:
    """Slots 1 to ``max_running + max_checkpoints``, and host slots from 0 on.

    Attributes:
        max_running: most contexts that run at once.
        max_checkpoints: slots besides.
        host_slots: slots on the host.
        running: slots of running contexts.
        checkpoints: all checkpoints, the least recently used first.
        saved: slots to copy to host slots before anything is written.
    """

    max_running: int
    max_checkpoints: int
    host_slots: int = 0
    free_slots: list[int] = field(init=False)
    free_host_slots: list[int] = field(init=False)
    running: set[int] = field(init=False, default_factory=set)
    checkpoints: dict[StateCheckpoint, None] = field(init=False, default_factory=dict)
    saved: list[tuple[int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        count = self.max_running + self.max_checkpoints
        self.free_slots = list(range(count, 0, -1))
        self.free_host_slots = list(range(self.host_slots))
        self._pinned: list[StateCheckpoint] = []

    @property
    def has_room(self) -> bool:
        """Whether another context can run."""
        return len(self.running) < self.max_running

    # --- running contexts -------------------------------------------------------------------------

    def start(self) -> int:
        """Return a slot for a context; a checkpoint gives way if none is free.

        One always can: fewer contexts run than may, and at most ``max_checkpoints`` are pinned.
        """
        if not self.free_slots:
            self._evict()
        slot = self.free_slots.pop()
        self.running.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free the slot of a context whose state nobody can use."""
        self.running.remove(slot)
        self.free_slots.append(slot)

    def keep(self, slot: int, page: StatePage, offset: int) -> None:
        """Make the state of a context that ends a checkpoint."""
        existing = page.checkpoints.get(offset)
        if existing is not None:  # another context's, of the same ids
            self.use(existing)
            self.release(slot)
            return
        self.running.remove(slot)
        self._add(StateCheckpoint(slot, page, offset))

    # --- checkpoints ------------------------------------------------------------------------------

    def plan(self, page: StatePage, offset: int, *, evict: bool) -> int | None:
        """Return the slot of a new checkpoint, which a prefill will write.

        It does not give way until :meth:`settle`.

        Args:
            page: the page it belongs to.
            offset: ids of the page that will have been fed.
            evict: whether another one may give way for it.

        Returns:
            None if there is no slot for it.
        """
        num_planned = sum(not checkpoint.on_host for checkpoint in self._pinned)
        if num_planned == self.max_checkpoints:
            return None
        if not self.free_slots:
            if not evict or not self._evictable():
                return None
            self._evict()
        checkpoint = StateCheckpoint(self.free_slots.pop(), page, offset)
        self._add(checkpoint)
        self._pin(checkpoint)
        return checkpoint.slot

    def settle(self) -> None:
        """Note that all planned admissions have run."""
        for checkpoint in self._pinned:
            checkpoint.is_pinned = False
        self._pinned.clear()

    def use(self, checkpoint: StateCheckpoint) -> None:
        """Make a checkpoint the most recently used, as a context begins with it."""
        del self.checkpoints[checkpoint]
        self.checkpoints[checkpoint] = None
        # On the device, the order of the plan lets it be read before its slot is written again.
        if checkpoint.on_host and not checkpoint.is_pinned:
            self._pin(checkpoint)

    def _pin(self, checkpoint: StateCheckpoint) -> None:
        checkpoint.is_pinned = True
        self._pinned.append(checkpoint)

    def drop(self, checkpoint: StateCheckpoint) -> None:
        """Forget a checkpoint and free its slot."""
        del self.checkpoints[checkpoint]
        del checkpoint.page.checkpoints[checkpoint.offset]
        if checkpoint.is_pinned:
            self._pinned.remove(checkpoint)
        if checkpoint.on_host:
            self.free_host_slots.append(checkpoint.slot)
        else:
            self.free_slots.append(checkpoint.slot)

    def reset(self) -> None:
        """Drop all checkpoints; running contexts keep their slots."""
        for checkpoint in list(self.checkpoints):
            self.drop(checkpoint)
        self.saved.clear()

    def _add(self, checkpoint: StateCheckpoint) -> None:
        checkpoint.page.checkpoints[checkpoint.offset] = checkpoint
        self.checkpoints[checkpoint] = None

    # --- eviction ---------------------------------------------------------------------------------

    def _evictable(self, *, on_host: bool = False) -> list[StateCheckpoint]:
        """Return the checkpoints that can give way in one place, least recently used first."""
        evictable = []
        for checkpoint in self.checkpoints:
            if checkpoint.on_host == on_host and not checkpoint.is_pinned:
                evictable.append(checkpoint)
        return evictable

    def _evict(self) -> None:
        """Free a slot: move a checkpoint to the host if a session waits for it, or drop one."""
        checkpoint = _least_valuable(self._evictable())
        if not checkpoint.page.sessions or not self._make_host_room():
            self.drop(checkpoint)
            return
        host_slot = self.free_host_slots.pop()
        self.saved.append((checkpoint.slot, host_slot))
        self.free_slots.append(checkpoint.slot)
        checkpoint.slot = host_slot
        checkpoint.on_host = True

    def _make_host_room(self) -> bool:
        """Free a host slot if none is; False if there is none to free."""
        if not self.free_host_slots:
            on_host = self._evictable(on_host=True)
            if on_host:
                self.drop(_least_valuable(on_host))
        return bool(self.free_host_slots)


def _least_valuable(checkpoints: list[StateCheckpoint]) -> StateCheckpoint:
    """Return the first checkpoint that no session waits for, or else the first."""
    return min(checkpoints, key=lambda checkpoint: bool(checkpoint.page.sessions))
