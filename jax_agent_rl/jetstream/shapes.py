"""The static shapes an engine compiles for: a few sizes of each input, which is padded to one."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHUNK = 2048
"""Ids of a prompt computed together, enough to keep any device busy."""
SLOT_COUNTS = (2, 8, 16, 32, 128, 512, 2048)
"""Each count is a program to compile. They are densest where groups spend most steps."""


@dataclass(frozen=True, kw_only=True)
class EngineShapes:
    """The static shapes an engine compiles for.

    Attributes:
        max_model_len: most ids in one context.
        max_concurrent_decodes: most slots of one dispatch.
        kv_cache_tokens: positions of the KV cache; at least one context fits.
        decode_steps: most steps of one dispatch.
        prefill_buckets: padded chunk lengths, ascending.
        patch_buckets: numbers of image patches encoded together, ascending; for vision models.
        kv_offloading_bytes: host memory for KV of waiting sessions.
        state_checkpoints: recurrent states kept besides the slots' own, for models that have
            them; None keeps as many.
        num_speculative_tokens: most drafted ids of a context that are verified together.
        shortest_span: also compile for contexts shorter than a quarter of the longest, from this
            one on and doubling.
    """

    max_model_len: int
    max_concurrent_decodes: int
    kv_cache_tokens: int
    decode_steps: int
    prefill_buckets: tuple[int, ...]
    patch_buckets: tuple[int, ...] = ()
    kv_offloading_bytes: int = 0
    state_checkpoints: int | None = None
    num_speculative_tokens: int = 0
    shortest_span: int | None = None

    @property
    def page(self) -> int:
        """Positions of a page."""
        return page_size(self.max_model_len)

    @property
    def context_pages(self) -> int:
        """Pages of the longest context."""
        return -(-self.max_model_len // self.page)

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return max(self.context_pages, self.kv_cache_tokens // self.page)

    @property
    def num_state_checkpoints(self) -> int:
        """Recurrent states kept besides the slots' own."""
        if self.state_checkpoints is None:
            return self.max_concurrent_decodes
        return self.state_checkpoints

    @property
    def num_states(self) -> int:
        """Slots of recurrent states: the null slot, one for each context, and checkpoints."""
        return 1 + self.max_concurrent_decodes + self.num_state_checkpoints

    @property
    def cache_length(self) -> int:
        """Positions in the pages of the longest context."""
        return self.context_pages * self.page

    def pages_of_slot(self, slot: int) -> range:
        """Return the pages of a slot in a cache without a block manager.

        After the null page, such a cache has as many pages for each slot as the longest context.
        """
        first = 1 + slot * self.context_pages
        return range(first, first + self.context_pages)

    @property
    def slot_buckets(self) -> tuple[int, ...]:
        """Slot counts compiled for, the maximum included."""
        smaller = [count for count in SLOT_COUNTS if count < self.max_concurrent_decodes]
        return (*smaller, self.max_concurrent_decodes)

    def width(self, count: int) -> int:
        """Return the slots of the program that decodes ``count`` contexts."""
        return bucket(self.slot_buckets, count)

    @property
    def span_buckets(self) -> tuple[int, ...]:
        """Context lengths compiled for, in whole pages.

        These are the quarters of the longest context of at least 64, and all of it; and shorter
        ones from ``shortest_span`` on.
        """
        spans = set()
        for quarters in (1, 2, 3, 4):
            spans.add(round_up(-(-self.cache_length * quarters // 4), self.page))

        shorter = round_up(self.shortest_span or self.cache_length, self.page)
        quarter = min(spans)
        while shorter < quarter:
            spans.add(shorter)
            shorter *= 2

        shortest = min(64, self.cache_length)
        return tuple(sorted(span for span in spans if span >= shortest))

    @property
    def prefill_spans(self) -> tuple[int, ...]:
        """Cached positions a prompt chunk attends to: none, half of the longest context, all."""
        every_other = self.span_buckets[::-2]  # from the longest on
        return (0, *reversed(every_other))

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """Prefill buckets that can occur: up to the first that holds a whole context."""
        for i, size in enumerate(self.prefill_buckets):
            if size >= self.max_model_len:
                return self.prefill_buckets[: i + 1]
        return self.prefill_buckets


def round_up(count: int, unit: int) -> int:
    """Round ``count`` up to a multiple of ``unit``."""
    return -(-count // unit) * unit


def page_size(max_model_len: int) -> int:
    """Return the positions of a page.

    Short pages waste little of the last one. For long contexts a page is a TPU tile, and there are
    fewer of them.
    """
    return 32 if max_model_len < 1024 else 128


def kv_cache_tokens(max_model_len: int, slots: int, in_flight: int) -> int:
    """Return the default size of the KV cache, in positions.

    Every slot can reach the longest context without preemption, and every other trajectory in
    flight has half of it, since they are at all stages and groups share their prompt.

    >>> kv_cache_tokens(4096, slots=32, in_flight=256)
    589824
    """
    context = round_up(max_model_len, page_size(max_model_len))
    return slots * context + max(0, in_flight - slots) * (context // 2)


def prefill_buckets(max_prompt_len: int) -> tuple[int, ...]:
    """Return chunk lengths for prompts up to ``max_prompt_len``, and shorter ones for later turns.

    >>> prefill_buckets(512), prefill_buckets(1000), prefill_buckets(30000)
    ((32, 128, 512), (32, 128, 512, 1024), (32, 128, 512, 2048))
    """
    unit = 128 if max_prompt_len > 128 else 32
    largest = min(round_up(max_prompt_len, unit), MAX_CHUNK)
    smaller = [size for size in (32, 128, 512) if size < largest]
    return (*smaller, largest)


def bucket(buckets: tuple[int, ...], needed: int) -> int:
    """Return the smallest bucket that holds ``needed``, or the largest."""
    for size in buckets:
        if size >= needed:
            return size
    return buckets[-1]
