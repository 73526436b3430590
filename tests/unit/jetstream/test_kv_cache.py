"""Rows gathered from pages and written back, against numpy that knows where every position is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.jetstream.kv_cache import (
    KVCache,
    LayerKV,
    align_to_pages,
    copy_page,
    count_pages,
    gather_pages,
    write_back,
    write_pages,
)
from tests.examples import examples

SIZE = 4
COUNT = 5
CHUNK = 6
STEPS = 7
PAGES = np.array(
    [[3, 1, 6, 2, 8], [3, 1, 4, 7, 0]], np.int32
)  # two rows that begin alike; the second has four pages
NUM_PAGES = (5, 4)
ALONE = 2 * SIZE  # from here on each row has pages of its own

chunk_written = jax.jit(
    lambda cache, new, starts, into: write_pages(
        cache, align_to_pages(cache, KVCache((new,)), starts, into[:, 0]), into
    )
)
steps_written = jax.jit(functools.partial(write_back, steps=STEPS))
rows_of = jax.jit(gather_pages)
FULL = np.full(2, COUNT * SIZE)


def in_rows(cache: KVCache, pages: np.ndarray) -> KVCache:
    """Return the cache as rows with all that the pages hold."""
    return rows_of(cache, pages, FULL)


def layer(seed: int, count: int, length: int) -> LayerKV:
    """A layer of two heads of 3, with scales."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = (count, 2, 3, length), (count, 2, length, 3), (count, 2, 2, length)
    return LayerKV(*(jnp.asarray(draw(shape), jnp.float32) for shape in shapes))


def at(row: LayerKV, index: int, position: int) -> list[np.ndarray]:
    """What a row (or page) holds of a position."""
    return [
        np.asarray(x[index]).take(position, axis)
        for x, axis in zip(jax.tree.leaves(row), (2, 1, 2), strict=True)
    ]


def assert_holds(cache: KVCache, row: int, position: int, wanted: list[np.ndarray]) -> None:
    page = PAGES[row, position // SIZE]
    within = position % SIZE
    for stored, expected in zip(at(cache.layers[0], page, within), wanted, strict=True):
        np.testing.assert_array_equal(stored, expected)


def test_a_row_has_the_positions_of_its_pages_in_order():
    cache = KVCache((layer(0, 9, SIZE),))
    rows = in_rows(cache, PAGES)
    for row in range(2):
        for position in range(COUNT * SIZE):
            assert_holds(cache, row, position, at(rows.layers[0], row, position))


def test_a_row_has_nothing_behind_its_context():
    cache = KVCache((layer(0, 9, SIZE),))
    counts = np.array([7, 16])
    rows = rows_of(cache, PAGES, counts)
    full = in_rows(cache, PAGES)
    for row, count in enumerate(counts):
        for position in range(COUNT * SIZE):
            for read, held in zip(
                *(at(x.layers[0], row, position) for x in (rows, full)), strict=True
            ):
                np.testing.assert_array_equal(read, held if position < count else 0)


@settings(max_examples=examples(25))
@given(starts=st.tuples(*[st.integers(ALONE, 4 * SIZE - 1)] * 2))
def test_a_chunk_stands_behind_what_was_there_and_nothing_else_changes(starts: tuple[int, int]):
    cache = KVCache((layer(0, 9, SIZE),))
    new = layer(1, 2, CHUNK)
    into = np.zeros((2, count_pages(CHUNK, SIZE)), np.int32)
    for row, start in enumerate(starts):
        own_pages = PAGES[row, start // SIZE :][: into.shape[1]]
        into[row, : len(own_pages)] = own_pages
    updated = chunk_written(cache, new, jnp.array(starts), into)
    for row, start in enumerate(starts):
        end = min(start + CHUNK, NUM_PAGES[row] * SIZE)  # behind its last page nothing is kept
        for position in range(start):
            assert_holds(updated, row, position, at(in_rows(cache, PAGES).layers[0], row, position))
        for position in range(start, end):
            assert_holds(updated, row, position, at(new, row, position - start))
    for page in (0, 5):  # of nobody, of another
        np.testing.assert_array_equal(updated.layers[0].keys[page], cache.layers[0].keys[page])


@settings(max_examples=examples(25))
@given(positions=st.tuples(*[st.integers(ALONE, 4 * SIZE - 1)] * 2))
def test_steps_write_what_is_new_and_shared_pages_stay(positions: tuple[int, int]):
    cache = KVCache((layer(0, 9, SIZE),))
    rows = in_rows(cache, PAGES)
    new = layer(1, 2, COUNT * SIZE)
    behind = jnp.arange(COUNT * SIZE) >= jnp.array(positions)[:, None]

    def changed(axis: int, old: jax.Array, new_value: jax.Array) -> jax.Array:
        return jnp.where(
            jnp.expand_dims(behind, [i for i in (1, 2, 3) if i != axis]), new_value, old
        )

    changed_rows = rows.layers[0].by_position(changed, new)
    updated = steps_written(cache, KVCache((changed_rows,)), PAGES, jnp.array(positions))
    for row, start in enumerate(positions):
        for position in range(min(start + STEPS, NUM_PAGES[row] * SIZE)):
            assert_holds(updated, row, position, at(changed_rows, row, position))
    for page in (0, 1, 3, 5):
        np.testing.assert_array_equal(updated.layers[0].keys[page], cache.layers[0].keys[page])


def test_a_page_is_copied_over_another():
    cache = KVCache((layer(0, 9, SIZE),))
    copied = copy_page(cache, np.array([3, 5]))
    for held, original in zip(jax.tree.leaves(copied), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(held[5], original[3])
        np.testing.assert_array_equal(held[3], original[3])
