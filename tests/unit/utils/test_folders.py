"""A folder that a user names and that cannot be made is told by its name, whoever would make it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from jax_agent_rl.data.tasks import prepare_calculator, prepare_shop
from jax_agent_rl.deploy.quickstart import model
from jax_agent_rl.deploy.quickstart.commands import write_task
from jax_agent_rl.errors import JaxAgentRLError, StorageError
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.models.convert import convert
from jax_agent_rl.observe.report.command import RunData, write_page
from jax_agent_rl.observe.run_dir import Records, RunDir
from jax_agent_rl.tinker_server.database import Database
from jax_agent_rl.utils.files import make_folder, replacing_folder, require_new


def fill(folder: Path) -> None:
    with replacing_folder(folder):
        pass


NO_RECORDS = Records(file=Path("trajectories.jsonl"), is_valid=lambda record: True)
MAKERS: Mapping[str, Callable[[Path], object]] = {
    "prepare shop": prepare_shop,
    "prepare calculator": prepare_calculator,
    "init": write_task,
    "convert": lambda folder: convert(Path("model.gguf"), folder / "model", dtype="bfloat16"),
    "a run": RunDir,
    "a report": lambda folder: write_page(
        RunData(name="run", trajectories=NO_RECORDS), folder / "report.html"
    ),
    "a collection": lambda folder: Journal(folder / "rows.journal", {}),
    "the database": Database,
    "a folder made whole": fill,
    "any other": make_folder,
}
IMPOSSIBLE = {
    "below a file": "file/folder",
    "too long": "x" * 300,
    "no place for it": "/proc/folder",
}


@pytest.fixture(autouse=True)
def beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")


@pytest.mark.parametrize("folder", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_folder_that_cannot_be_made_is_named(make: Callable[[Path], object], folder: str):
    with pytest.raises(JaxAgentRLError) as caught:
        make(Path(folder))
    assert folder.split("/")[0] in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["file"]


@pytest.mark.parametrize("folder", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_cache_that_cannot_be_made_is_named_with_its_variable(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_AGENT_RL_CACHE", folder)
    with pytest.raises(StorageError, match="JAX_AGENT_RL_CACHE"):
        model.fetch_quickstart_model()


def test_a_name_that_is_too_long_is_that_of_a_new_folder():
    require_new(Path("x" * 300))  # it fails when it is made, with its name
