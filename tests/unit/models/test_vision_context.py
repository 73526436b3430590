"""Contexts with images: which ids are whose, and that keys are equal where ids and images are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models.vision_context import ImageKeys, MultimodalContext, VisionProcessor
from tests.examples import examples
from tests.messages import raises
from tests.tiny_vision import IMAGE, TINY_VISION, VIDEO, drawn

# Without a patcher: patches are made here.
PROCESSOR = VisionProcessor(vision=TINY_VISION, patcher=None)  # type: ignore[arg-type]
IMAGES = [drawn(seed, (1, 4, 4)) for seed in range(2)] + [
    drawn(2, (1, 2, 4)),
    drawn(3, (1, 4, 4), "video"),
]
pieces = st.lists(
    st.one_of(st.integers(3, 5), st.sampled_from(range(len(IMAGES))).map(lambda i: -1 - i)),
    max_size=6,
)


def multimodal(parts: list[int]) -> MultimodalContext:
    """A context of ids, and of images by their negative numbers."""
    ids: list[int] = []
    media: dict = {"image": [], "video": []}
    for part in parts:
        if part >= 0:
            ids.append(part)
            continue
        image = IMAGES[-1 - part]
        ids += [TINY_VISION.placeholders[image.kind]] * (len(image.patches) // 4)
        media[image.kind].append(image)
    return PROCESSOR.make_context(ids, media)


@given(pieces, pieces)
@settings(max_examples=examples(200))
def test_keys_are_equal_as_far_as_ids_and_images_are(a: list[int], b: list[int]):
    names = ImageKeys()
    ours = names.keys(multimodal(a))
    theirs = names.keys(multimodal(b))
    alike = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    expected = len(multimodal(a[:alike]).ids)
    length = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:length] != theirs[:length])
    assert (differ[0] if len(differ) else length) == min(expected, length)


def test_keys_of_text_are_its_ids_and_placeholders_without_an_image_are_text():
    context = PROCESSOR.make_context([5, *[IMAGE] * 4, 6, IMAGE, VIDEO], {"image": IMAGES[:1]})
    keys = ImageKeys().keys(context)
    assert keys.tolist() == [5, -1, -2, -3, -4, 6, IMAGE, VIDEO]
    assert context.ids.tolist() == [5, *[IMAGE] * 4, 6, IMAGE, VIDEO]  # as they were
    assert (
        context.offset == 2 - 4
    )  # two rows and columns of features stand in the place of four ids


def test_an_image_without_its_placeholders_is_refused():
    with raises(ValueError, key="image 1 of 1", value="4 placeholders"):
        PROCESSOR.make_context([5, IMAGE, IMAGE, 6], {"image": IMAGES[:1]})
