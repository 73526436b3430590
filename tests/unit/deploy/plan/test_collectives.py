"""Texts are cut from programs compiled for v5e:2x2 and 2x4; what they come to is worked out by
hand.
"""

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_agent_rl.deploy.plan.hlo import Collective, Hlo, collectives, parse
from jax_agent_rl.models.sharding import MESH_AXES


class Chip:
    """As much of a described device as a mesh and the reader look at."""

    platform = "tpu"
    device_kind = "TPU v5 lite"
    process_index = 0

    def __init__(self, number: int, slice_index: int = 0) -> None:
        self.id = number
        self.slice_index = slice_index


def mesh(*, slices: int = 1, **sizes: int) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    count = int(np.prod(shape))
    chips = np.empty(count, object)
    chips[:] = [Chip(number, number * slices // count) for number in range(count)]
    return Mesh(chips.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def program(*lines: str, preamble: str = "") -> Hlo:
    entry = "".join(f"  {line}\n" for line in lines)
    return parse(f"{preamble}ENTRY %main.1 (p.1: f32[8]) -> f32[8] {{\n{entry}}}\n")


def one(line: str, over: Mesh) -> Collective:
    (collective,) = collectives(program(line), over)
    return collective


FSDP_TENSOR = mesh(fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3}}", ("tensor",)),
        ("{{0,2},{1,3}}", ("fsdp",)),
        ("{}", ("fsdp", "tensor")),
        ("[2,2]<=[4]", ("tensor",)),
        ("[2,2]<=[2,2]T(1,0)", ("fsdp",)),
        ("[1,4]<=[4]", ("fsdp", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", ("fsdp",)),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_2'}", ("tensor",)),
        ("mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_0'}", ("tensor",)),
        (
            "mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_0','axis_1'}",
            ("fsdp", "tensor"),
        ),
    ],
)
def test_groups_are_axes_however_they_are_written(groups, axes):
    line = (
        f"%r = f32[8]{{0:T(256)}} all-reduce(%p), channel_id=1, replica_groups={groups},"
        " use_global_device_ids=true"
    )
    assert one(line, FSDP_TENSOR).axes == axes


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        # 2 chips, a result of 256 x 128 bfloat16: 64 KiB, of which each has half and sends that.
        ("bf16[1,256,128]{2,1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=[2,2]<=[4], "
         "dimensions={1}", "", 32768),
        # A part of the sum is sent and the whole of it comes back: twice 1/2 of 3 + 1 floats.
        ("(f32[3]{0:T(256)}, /*index=1*/f32[]{:T(128)}) all-reduce(%p, %q), "
         "replica_groups=[2,2]<=[4]", "", 16),
        # The result is what each chip keeps of the sum.
        ("f32[16]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}", "", 3 * 64),
        ("s32[8,2]{1,0} all-to-all(%p), replica_groups=[1,4]<=[4], dimensions={0}", "", 48),
        # A beginning gives operand and result, and two numbers of its own.
        ("(bf16[64]{0}, bf16[64]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%p), "
         "source_target_pairs={{0,1},{1,0}}", "collective-permute", 128),
        ("(f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={{0,1},{2,3}}",
         "all-gather", 32),
        # Two operands and their results, which are what each of four chips keeps.
        ("((f32[16]{0}, f32[8]{0}), (f32[4]{0}, f32[2]{0})) reduce-scatter-start(%p, %q), "
         "replica_groups=[1,4]<=[4], dimensions={0}", "reduce-scatter", 3 * 24),
    ],
)  # fmt: skip
def test_bytes_are_those_a_chip_sends_around_a_ring(line, kind, sent):
    collective = one(f"%r = {line}", FSDP_TENSOR)
    assert collective.bytes == sent
    assert kind in ("", collective.kind)


LOOP = """%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r.1 = f32[8]{0:T(256)} all-reduce(%x), channel_id=7, replica_groups=[2,2]<=[4], to_apply=%add
  %f.1 = f32[8]{0:T(256)} fusion(%r.1), kind=kLoop, calls=%fused.1
  %f.2 = f32[8]{0:T(256)} fusion(%r.1), kind=kLoop, calls=%fused.2
  ROOT %t.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%i, %r.1)
}

%fused.1 (p.2: f32[8]) -> f32[16] {
  ROOT %g.1 = f32[16]{0:T(256)} all-gather(%p.2), channel_id=8, replica_groups=[2,2]<=[4], \
dimensions={0}
}

%fused.2 (p.3: f32[8]) -> f32[16] {
  ROOT %g.2 = f32[16]{0:T(256)} all-gather(%p.3), channel_id=8, replica_groups=[2,2]<=[4], \
dimensions={0}
}

"""
COUNTED = """%until.1 (p.4: (s32[], f32[8])) -> pred[] {
  %constant.5 = s32[]{:T(128)} constant(30)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.4), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %constant.5), direction=LT
}

"""
FOUND = COUNTED.replace("compare(%i.1, %constant.5), direction=LT", "and(%a, %b)")
WHILE = "%w = (s32[], f32[8]{0}) while(%t), condition=%until.1, body=%body.1"


@pytest.mark.parametrize(("condition", "times"), [(COUNTED, 30), (FOUND, 16)])
def test_a_loop_counts_by_its_condition_or_else_by_its_caller(condition, times):
    exchanges = collectives(program(WHILE, preamble=LOOP + condition), FSDP_TENSOR, loops=16)
    assert {(each.kind, each.times, each.bytes) for each in exchanges} == {
        ("all-reduce", times, 32.0 * times),
        ("all-gather", times, 32.0 * times),
    }


def test_an_exchange_spread_over_fusions_counts_once():
    exchanges = collectives(program(WHILE, preamble=LOOP + COUNTED), FSDP_TENSOR)
    assert sorted(each.kind for each in exchanges) == ["all-gather", "all-reduce"]


def test_a_sum_of_which_a_fusion_keeps_a_part_is_a_reduce_scatter():
    inner = """%all-reduce-scatter.2 (p.2: f32[16]) -> f32[8] {
  %r.1 = f32[16]{0} all-reduce(%p.2), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add
  ROOT %d.1 = f32[8]{0} dynamic-slice(%r.1, %i), dynamic_slice_sizes={8}
}

"""
    (collective,) = collectives(
        program(
            "%f = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2", preamble=inner
        ),
        FSDP_TENSOR,
    )
    assert (collective.kind, collective.bytes) == ("reduce-scatter", 32.0)


def test_what_leaves_a_slice_is_told_apart():
    two = mesh(slices=2, data=2, tensor=2)
    between = one("%r = f32[8]{0} all-reduce(%p), replica_groups={{0,2},{1,3}}", two)
    within = one("%r = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}", two)
    assert (between.axes, between.between_slices) == (("data",), True)
    assert (within.axes, within.between_slices) == (("tensor",), False)


@pytest.mark.parametrize(
    ("said", "kind", "sent"),
    [
        # Each sends half of a sum's 32 bytes to the other slice's chip, then the half it added up.
        ("ALL_REDUCE", "all-reduce", 32),
        ("ALL_GATHER", "all-gather", 32),
        ("REDUCE_SCATTER", "reduce-scatter", 16),
        ("ONE_TO_ONE", "collective-permute", 32),
    ],
)
def test_what_hosts_send_between_slices_counts_for_their_chips(said, kind, sent):
    line = (
        "%send.1 = (f32[8]{0:T(256)}, u32[], token[]) send(%p, %after), channel_id=3,"
        " is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_megascale_target="{{1,2}}x{{0:1}}",_xla_megascale_transfer_type="{said}"}}'
    )
    collective = one(line, mesh(slices=2, data=2, tensor=2))
    assert (collective.kind, collective.bytes, collective.axes, collective.between_slices) == (
        kind,
        sent,
        ("data",),
        True,
    )


def test_all_branches_count_and_unknown_groups_are_over_no_axis():
    branch = """%yes.1 (p.2: f32[8]) -> f32[8] {
  ROOT %r.1 = f32[8]{0} all-reduce(%p.2), replica_groups=ragged<1>, to_apply=%add
}

"""
    line = "%c = f32[8]{0} conditional(%i, %a, %b), branch_computations={%yes.1, %yes.1}"
    exchanges = collectives(program(line, preamble=branch), FSDP_TENSOR)
    assert [(each.axes, each.times) for each in exchanges] == [((), 1), ((), 1)]
