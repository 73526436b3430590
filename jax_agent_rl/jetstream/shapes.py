"""The static shapes an engine compiles for: a few sizes of everything, to which inputs are padded."""

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
        num_speculative_tokens: most drafted ids of a context that are verified together.
        shortest_span: compile for shorter contexts than a quarter of the longest, too, from this
            one on and doubling.
    """

    max_model_len: int
    max_concurrent_decodes: int
    kv_cache_tokens: int
    decode_steps: int
    prefill_buckets: tuple[int, ...]
    patch_buckets: tuple[int, ...] = ()
    kv_offloading_bytes: int = 0
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
    def cache_length(self) -> int:
        """Positions in the pages of the longest context."""
        return self.context_pages * self.page

    def pages_of_slot(self, slot: int) -> range:
        """Return the pages of a slot of a cache that has, after the null page, the longest context's for each slot."""
        first = 1 + slot * self.context_pages
        return range(first, first + self.context_pages)

    @property
    def slot_buckets(self) -> tuple[int, ...]:
        """Slot counts compiled for, the maximum included."""
        return (
            *(s for s in SLOT_COUNTS if s < self.max_concurrent_decodes),
            self.max_concurrent_decodes,
        )

    @property
    def span_buckets(self) -> tuple[int, ...]:
        """Context lengths compiled for: quarters of the longest of at least 64, and all, in whole pages."""
        spans = {round_up(-(-self.cache_length * i // 4), self.page) for i in (1, 2, 3, 4)}
        shorter = round_up(self.shortest_span or self.cache_length, self.page)
        quarter = min(spans)
        while shorter < quarter:
            spans.add(shorter)
            shorter *= 2
        return tuple(sorted(span for span in spans if span >= min(64, self.cache_length)))

    @property
    def prefill_spans(self) -> tuple[int, ...]:
        """Cached positions a prompt chunk attends to: none, half of the longest context, all."""
        return (0, *self.span_buckets[::-2][::-1])

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """Prefill buckets that can occur: up to the first that holds a whole context."""
        enough = next(
            (i for i, b in enumerate(self.prefill_buckets) if b >= self.max_model_len), None
        )
        return self.prefill_buckets if enough is None else self.prefill_buckets[: enough + 1]


def round_up(count: int, unit: int) -> int:
    """Round ``count`` up to a multiple of ``unit``."""
    return -(-count // unit) * unit


def page_size(max_model_len: int) -> int:
    """Return 32, so that last pages waste little; for long contexts 128, a TPU tile and fewer pages."""
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
    largest = min(round_up(max_prompt_len, 128 if max_prompt_len > 128 else 32), MAX_CHUNK)
    return (*(size for size in (32, 128, 512) if size < largest), largest)


def bucket(buckets: tuple[int, ...], need: int) -> int:
    """Return the smallest bucket >= need, or the largest."""
    return next((b for b in buckets if b >= need), buckets[-1])
