"""Parameters in a folder: written shard by shard, read chunk by chunk, and refused if they are not
what was written.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models import stored
from tests.messages import raises
from tests.simulated import run_on_devices
from tests.tiny import TINY, tiny_params

SHAPES = TINY.parameter_shapes()
HERE = jax.tree.map(
    lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)


def write(root: Path, version: int, seed: int) -> tuple[str, str]:
    folder = stored.version_folder(str(root), version)
    return folder, stored.store(folder, tiny_params(seed))


def read(folder: str, digest: str | None) -> dict:
    return stored.StoredParams(folder, manifest_digest=digest).read(
        SHAPES, dtype=jnp.float32, shardings=HERE
    )


def test_what_is_read_is_what_was_written_and_a_removed_version_is_gone(tmp_path: Path):
    first, _ = write(tmp_path, 1, seed=1)
    second, digest = write(tmp_path, 10, seed=2)
    stored.remove(first)
    assert [path.name for path in tmp_path.iterdir()] == ["v10"]
    jax.tree.map(np.testing.assert_array_equal, read(second, digest), tiny_params(2))
    with raises(WeightUpdateError, key="/v1/", fix="rollout.weight_dir"):
        read(first, None)


def test_a_version_is_not_there_before_all_parts_are(tmp_path: Path):
    folder = stored.version_folder(str(tmp_path), 1)
    stored.write_part(folder, tiny_params(), part=0)
    with raises(WeightUpdateError, value="no manifest.json"):
        read(folder, None)
    with raises(OSError, key="process 1"):
        stored.publish(folder, parts=2)
    with raises(WeightUpdateError, value="no manifest.json"):
        read(folder, None)


def test_a_chunk_or_manifest_that_is_another_is_refused_by_name(tmp_path: Path):
    folder, digest = write(tmp_path, 1, seed=1)
    other_folder, other_digest = write(tmp_path, 2, seed=2)
    chunk = tmp_path / "v1" / "embed/c/0/0"
    of_other = tmp_path / "v2" / "embed/c/0/0"
    ours = chunk.read_bytes()
    theirs = of_other.read_bytes()
    for spoilt in (theirs, ours[:-1] + b"x", ours[:-4], None):
        chunk.unlink()
        if spoilt is not None:
            chunk.write_bytes(spoilt)
        with pytest.raises(WeightUpdateError, match="embed"):
            read(folder, digest)
        chunk.write_bytes(ours)
    with raises(WeightUpdateError, key="v2/manifest.json"):
        read(other_folder, digest)
    jax.tree.map(np.testing.assert_array_equal, read(other_folder, other_digest), tiny_params(2))


def test_a_scalar_comes_back(tmp_path: Path):
    params = {"scale": jnp.float32(2.5)}
    folder = stored.version_folder(str(tmp_path), 1)
    digest = stored.store(folder, params)
    found = stored.StoredParams(folder, manifest_digest=digest).read(
        {"scale": ()}, dtype=jnp.float32, shardings={"scale": params["scale"].sharding}
    )
    assert found == params


def test_a_chunk_that_its_manifest_misdescribes_is_refused(tmp_path: Path):
    folder, _ = write(tmp_path, 1, seed=1)
    manifest = tmp_path / "v1" / stored.MANIFEST
    entries = json.loads(manifest.read_text())
    for wrong in ({"dtype": "nothing"}, {"dtype": "float16"}):
        manifest.write_text(json.dumps(entries | {"embed": entries["embed"] | wrong}))
        with raises(WeightUpdateError, key="embed/c/0/0"):
            read(folder, None)


def test_a_version_below_any_folder_is_removed(tmp_path: Path):
    folder, _ = write(tmp_path / "100%25", 1, seed=1)  # TensorStore reads an address as a URL
    assert list(tmp_path.rglob(stored.MANIFEST))
    stored.remove(folder)
    assert not list(tmp_path.rglob("v1"))


def test_another_models_parameters_are_refused_with_both_shapes(tmp_path: Path):
    folder, digest = write(tmp_path, 1, seed=1)
    shapes = {**SHAPES, "final_norm": (33,)}
    with raises(WeightUpdateError, key="final_norm", value=("(32,)", "(33,)")):
        stored.StoredParams(folder, manifest_digest=digest).read(
            shapes, dtype=jnp.float32, shardings=HERE
        )


MESHES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from jax_agent_rl.config import MeshConfig
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.jetstream.sharding import make_engine_mesh, learner_shardings
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings, place
from jax_agent_rl.models import stored
from tests.tiny import TINY, tiny_params

model = replace(TINY, vocab_size=96, num_heads=8)
shapes, params = model.parameter_shapes(), tiny_params(config=model)
mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
folder = stored.version_folder(sys.argv[1], 1)
digest = stored.store(folder, jax.tree.map(place, params, parameter_shardings(mesh, shapes)))
for tensor in (1, 4):
    mesh = make_engine_mesh(EngineMeshConfig(tensor=tensor), device_offset=3)
    places = learner_shardings(model, mesh)
    reader = stored.StoredParams(folder, manifest_digest=digest)
    found = reader.read(shapes, dtype=jnp.bfloat16, shardings=places)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b.astype(jnp.bfloat16)))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(places), strict=True)
    assert all(x.sharding == place for x, place in pairs)
    print(json.dumps([reader.bytes_read, sum(x.nbytes for x in jax.tree.leaves(params))]))
"""


def test_any_mesh_reads_what_any_mesh_wrote_each_byte_once(tmp_path: Path):
    for line in run_on_devices(MESHES, str(tmp_path)):
        read, total = json.loads(line)
        assert read == total
