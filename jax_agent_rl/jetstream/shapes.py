"""The static shapes an engine compiles for: a few sizes of everything, and what comes is padded to the next."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_CHUNK = 2048
"""Ids of a prompt computed together at most: enough to keep any device busy with one matrix product."""
SLOT_COUNTS = (2, 8, 16, 32, 128, 512, 2048)
"""Every count is a program to compile. They are closest where an agent's groups spend most of their steps, and where on
CPUs each slot adds to a step's time."""


@dataclass(frozen=True, kw_only=True)
class EngineShapes:
    """The static shapes an engine compiles for.

    Attributes:
        max_model_len: most ids in one context.
        max_concurrent_decodes: most slots of one dispatch.
        kv_cache_tokens: positions whose KV is kept, of contexts that run or wait for a turn; at least one context fits.
        decode_steps: most steps of one dispatch.
        prefill_buckets: padded chunk lengths, ascending.
        patch_buckets: numbers of patches looked at together, ascending; for models that see.
    """

    max_model_len: int
    max_concurrent_decodes: int
    kv_cache_tokens: int
    decode_steps: int
    prefill_buckets: tuple[int, ...]
    patch_buckets: tuple[int, ...] = ()

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

    @property
    def slot_buckets(self) -> tuple[int, ...]:
        """Slot counts compiled for, and the maximum."""
        return (*(s for s in SLOT_COUNTS if s < self.max_concurrent_decodes), self.max_concurrent_decodes)

    @property
    def span_buckets(self) -> tuple[int, ...]:
        """Positions of a context compiled for: quarters of the longest where that is at least 64, and all, in pages."""
        quarters = {whole(-(-self.cache_length * i // 4), self.page) for i in (1, 2, 3, 4)}
        return tuple(sorted(q for q in quarters if q >= min(64, self.cache_length)))

    @property
    def prefill_spans(self) -> tuple[int, ...]:
        """Positions a prompt chunk attends to: none, half of the longest context, all."""
        return (0, *self.span_buckets[::-2][::-1])

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """Prefill buckets that can occur: up to the first that holds a whole context."""
        enough = next((i for i, b in enumerate(self.prefill_buckets) if b >= self.max_model_len), None)
        return self.prefill_buckets if enough is None else self.prefill_buckets[: enough + 1]


def whole(count: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``count``."""
    return -(-count // unit) * unit


def page_size(max_model_len: int) -> int:
    """32, so that little of a last page is empty; for long contexts 128: a TPU's tile, and fewer to look after."""
    return 32 if max_model_len < 1024 else 128


def kv_cache_tokens(max_model_len: int, slots: int, in_flight: int) -> int:
    """What a cache keeps where nothing else is said: enough for every slot to run to the end of the longest context, so
    that nothing is preempted, and half of it for every other trajectory in flight. They are at all stages of their
    lives, and those of a group share their prompt.

    >>> kv_cache_tokens(4096, slots=32, in_flight=256)
    589824
    """
    longest = whole(max_model_len, page_size(max_model_len))
    return slots * longest + max(0, in_flight - slots) * (longest // 2)


def prefill_buckets(longest: int) -> tuple[int, ...]:
    """Chunk lengths for prompts up to ``longest``, and for the shorter chunks that later turns bring.

    >>> prefill_buckets(512), prefill_buckets(1000), prefill_buckets(30000)
    ((32, 128, 512), (32, 128, 512, 1024), (32, 128, 512, 2048))
    """
    most = min(whole(longest, 128 if longest > 128 else 32), LONGEST_CHUNK)
    return (*(size for size in (32, 128, 512) if size < most), most)


def bucket(buckets: tuple[int, ...], need: int) -> int:
    """Smallest bucket >= need; the largest if none is."""
    return next((b for b in buckets if b >= need), buckets[-1])
