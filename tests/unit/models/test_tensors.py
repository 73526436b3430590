"""Parameters that share a tensor or are stored transposed, and weights in MXFP4 and
FP8.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.tensors import Packed, named_tensors, open_tensors, read_slice
from tests.fp8 import floats_of, fp8_of, save_with_fp8
from tests.messages import raises

SHAPE = (2, 3, 4)


def test_parts_lie_behind_each_other_or_alternate_in_any_order_of_axes():
    """Written out by hand."""
    gate = np.array([[1, 2], [3, 4]])
    up = np.array([[5, 6], [7, 8]])
    assert Packed(name="x", count=2).pack([gate, up]).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    alternating = Packed(name="x", count=2, axis=1, interleaved=True)
    assert alternating.pack([gate, up]).tolist() == [[1, 5, 2, 6], [3, 7, 4, 8]]
    turned = Packed(name="x", count=2, axis=1, interleaved=True, transposed=True)
    assert turned.pack([gate, up]).tolist() == [[1, 5, 3, 7], [2, 6, 4, 8]]


@given(
    count=st.integers(1, 3),
    axis=st.integers(0, 2),
    interleaved=st.booleans(),
    transposed=st.booleans(),
    slices=st.tuples(
        *(st.tuples(st.integers(0, size - 1), st.integers(0, size)) for size in SHAPE)
    ),
)
def test_any_slice_of_any_part_is_read_back(
    tmp_path_factory, count, axis, interleaved, transposed, slices
):
    parts = np.random.default_rng(0).standard_normal((count, *SHAPE)).astype(np.float32)
    stored = [
        Packed(
            name="x",
            number=i,
            count=count,
            axis=axis,
            interleaved=interleaved,
            transposed=transposed,
        )
        for i in range(count)
    ]
    folder: Path = tmp_path_factory.mktemp("packed")
    save_file(dict(named_tensors(zip(stored, parts, strict=True))), folder / "x.safetensors")
    tensors = open_tensors([folder / "x.safetensors"])
    index = tuple(slice(begin, max(begin, end)) for begin, end in slices)
    for where, part in zip(stored, parts, strict=True):
        np.testing.assert_array_equal(read_slice(tensors, where, index, SHAPE, "here"), part[index])


def test_a_packed_tensor_of_another_shape_is_named(tmp_path: Path):
    save_file({"x": np.zeros((6, 2), np.float32)}, tmp_path / "x.safetensors")
    tensors = open_tensors([tmp_path / "x.safetensors"])
    with raises(ModelError, key=("x", "config.json"), value=("(6, 2)", "(8, 2)")):
        read_slice(tensors, Packed(name="x", count=2), (slice(None),) * 2, (4, 2), "here")


def test_mxfp4_is_read_as_transformers_dequantizes_it(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(110, 140, (2, 6, 3)).astype(np.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "w.safetensors")
    expected = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    ).numpy()
    tensor = open_tensors([tmp_path / "w.safetensors"])["w"]()
    assert tuple(tensor.get_shape()) == expected.shape == (2, 96, 6)
    for index in ((slice(None),) * 3, (slice(1, 2), slice(5, 40), slice(2, 5)), (slice(0, 0),) * 3):
        np.testing.assert_array_equal(tensor[index], expected[index])


@given(
    shape=st.tuples(st.sampled_from([1, 100, 128, 300]), st.sampled_from([1, 128, 200, 257])),
    begins=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@example(shape=(1, 128), begins=(0.0, 1.0), ends=(0.0, 1.0))
def test_any_slice_of_fp8_is_its_numbers_times_their_blocks_scales(
    tmp_path_factory, shape, begins, ends
):
    folder: Path = tmp_path_factory.mktemp("fp8")
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    numbers, scales = fp8_of(matrix)
    save_with_fp8(folder / "w.safetensors", {"w": numbers})
    # The scales of a shard's matrices may be in another shard.
    save_file({"w_scale_inv": scales}, folder / "scales.safetensors")

    tensors = open_tensors([folder / "scales.safetensors", folder / "w.safetensors"])
    assert tensors.keys() == {"w"}
    tensor = tensors["w"]()
    assert tuple(tensor.get_shape()) == shape
    expected = floats_of(numbers, scales)
    np.testing.assert_allclose(expected, matrix, atol=0.2)  # 3 bits after the first

    index = []
    for begin, end, size in zip(begins, ends, shape, strict=True):
        low, high = sorted((round(begin * size), round(end * size)))
        index.append(slice(low, high))
    np.testing.assert_array_equal(tensor[tuple(index)], expected[tuple(index)])
    np.testing.assert_array_equal(tensor[slice(None), slice(None)], expected)


def test_fp8_without_scales_or_with_scales_of_other_blocks_is_refused_by_name(tmp_path: Path):
    numbers, scales = fp8_of(np.ones((200, 130), np.float32))
    weights = tmp_path / "w.safetensors"
    save_with_fp8(weights, {"w": numbers})
    everything = (slice(None), slice(None))
    with raises(ModelError, key="w", fix="use float weights"):
        read_slice(open_tensors([weights]), "w", everything, (200, 130), "here")

    scale_file = tmp_path / "scales.safetensors"
    save_file({"w_scale_inv": scales[:, :1]}, scale_file)
    with raises(ModelError, key="w", value=("[2, 1]", "[2, 2]")):
        read_slice(open_tensors([weights, scale_file]), "w", everything, (200, 130), "here")

    save_file({"w": np.ones((200, 130), np.float32)}, weights)
    with raises(ModelError, key="w", value="F32"):
        read_slice(open_tensors([weights, scale_file]), "w", everything, (200, 130), "here")
