"""Names of slices, without the compiler that knows them."""

import pytest

from jax_agent_rl.config import load
from jax_agent_rl.deploy.launch.tpu.gcloud import GENERATIONS, SHAPES, parse_topology
from jax_agent_rl.deploy.plan.topology import CHIPS, Slice, choose_engine_mesh, place_devices
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.utils.packages import install_command
from tests.messages import raises
from tests.unit.deploy.plan.recipe import recipe
from tests.unit.deploy.plan.slices import described


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        ("v5e:4x4", 16),
        ("v5p:4x4x8", 128),
        ("v4:2x2x2", 8),
        ("V6E:2x4", 8),
        ("2*v5e:16x16", 512),
        ("h100:8", 8),
        ("H200:1", 1),
        ("2*b200:8", 16),
    ],
)
def test_a_slice_is_known_by_its_name(text, chips):
    parsed = Slice.parse(text)
    assert parsed.chips == chips
    assert Slice.parse(parsed.name) == parsed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("v5e-16", {"fix": "v5e:4x4"}),
        ("v5x:4x4", {"value": "'v5x'", "fix": "did you mean"}),
        ("v5p:4x4", {"key": "v5p", "fix": "2x2x1, 2x2x2"}),
        ("v5e:0x4", {"key": "v5e", "fix": "1x1, 2x2"}),
        ("v5e:4x2", {"key": "v5e", "fix": "1x1, 2x2, 2x4"}),
        ("v6e:32x32", {"key": "v6e", "fix": "16x16"}),
        ("0*v5e:2x2", {"value": "not a slice", "fix": "leave out '0*'"}),
        ("h100:16", {"key": "h100", "fix": "1, 2, 4, 8"}),
        ("h10:8", {"value": "'h10'", "fix": "did you mean"}),
    ],
)
def test_a_name_that_is_none_is_refused_with_one_that_is(text, named):
    with raises(ConfigError, **named):
        Slice.parse(text)


def test_slices_are_those_that_the_launcher_makes():
    tpus = {name for name, chip in CHIPS.items() if chip.gpu is None}
    assert tpus == SHAPES.keys() == GENERATIONS.keys()
    for generation, shapes in SHAPES.items():
        for shape in shapes:
            assert (
                Slice.parse(f"{generation}:{shape}").chips
                == parse_topology(f"{generation}:{shape}").chips
            )


def test_without_the_compiler_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, fix=install_command("plan")):
        len(Slice.parse("v5e:2x2").devices)


def test_without_the_cuda_compiler_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, fix=install_command("cuda")):
        len(Slice.parse("h100:8").devices)


def test_more_than_a_host_of_gpus_are_whole_hosts():
    larger = Slice.parse("h100:4").larger
    assert larger is not None and larger.name == "h100:8"
    assert larger.larger is not None and larger.larger.name == "2*h100:8"


def test_a_described_gpu_leaves_programs_less_than_its_memory():
    """The description is that of the CUDA compiler: an H100 has 132 multiprocessors of sm_90."""
    gpus = [chip for chip in CHIPS.values() if chip.gpu is not None]
    for chip in gpus:
        assert chip.gpu is not None
        assert chip.hbm_bytes < chip.gpu.memory_bytes
        assert f"device_memory_size: {chip.gpu.memory_bytes}\n" in chip.gpu.as_text()
    target = CHIPS["h100"].gpu
    assert target is not None
    assert "cuda_compute_capability { major: 9 minor: 0 }" in target.as_text()
    assert "core_count: 132\n" in target.as_text()


def test_the_launch_pages_own_command_samples_on_all_chips(tmp_path):
    """``--topology v5e:4x4 learner.mesh.fsdp=16``, of a model with two key/value heads."""
    config = load(
        recipe(tmp_path),
        ["learner.mesh.fsdp=16", "learner.mesh.tensor=1", "rollout.jetstream.mesh.tensor=null"],
    )
    slice = described("v5e:4x4", hosts=4)
    model = load_config(config.model.path)
    for device in slice.devices:
        device.platform = "tpu-like"  # for which jax knows no coordinates
    chosen = choose_engine_mesh(config, model, slice)
    assert (chosen.rollout.jetstream.mesh.data, chosen.rollout.jetstream.mesh.tensor) == (4, 1)
    where = place_devices(chosen, slice.devices)
    assert where.engine_count == 16
    assert len(where.engines) == 4
    assert {device.id for mesh in where.engines for device in mesh.devices.flat} == set(range(16))


def test_an_engine_of_a_process_of_its_own_has_the_chips_of_one_host(tmp_path):
    def placed(*overrides: str, hosts: int) -> int:
        config = load(
            recipe(tmp_path / f"{hosts} hosts"),
            ["rollout.placement=separate", "trainer.mode=one_step_off", *overrides],
        )
        slice = described("v5e:2x4", hosts=hosts)
        for device in slice.devices:
            device.platform = "tpu-like"  # for which jax knows no coordinates
        return place_devices(config, slice.devices).engine_count

    meshes = (
        "learner.mesh.fsdp=4",
        "learner.mesh.tensor=1",
        "rollout.jetstream.mesh.data=1",
        "rollout.jetstream.mesh.tensor=4",
    )
    assert placed(*meshes, hosts=2) == 1
    with raises(ConfigError, key="rollout.jetstream.mesh", value="2 hosts"):
        placed(*meshes, hosts=4)


def test_a_run_that_several_hosts_would_refuse_is_refused_before_it_is_compiled(tmp_path):
    config = load(
        recipe(tmp_path),
        ["learner.mesh.fsdp=8", "learner.mesh.tensor=1", "rollout.deterministic=true"],
    )
    one_host = described("v5e:2x4", hosts=1)
    assert place_devices(config, one_host.devices).engine_count == 1
    with raises(
        ConfigError, key="one process", value="there are 2", fix="rollout.deterministic=false"
    ):
        place_devices(config, described("v5e:2x4", hosts=2).devices)
