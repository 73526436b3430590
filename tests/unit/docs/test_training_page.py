"""docs/training.md lists what may change when a run is resumed."""

import re

from jax_agent_rl.config import Config
from jax_agent_rl.config.commands import DpoConfig, SftConfig
from jax_agent_rl.config.reference import list_keys
from jax_agent_rl.config.resume import MAY_CHANGE
from tests.unit.docs.pages import DOCS


def test_the_page_lists_every_key_that_may_change_and_no_other():
    trees = (Config, SftConfig, DpoConfig)
    keys = {key.path for tree in trees for key in list_keys(tree).values() if not key.is_section}
    section = (
        (DOCS / "training.md")
        .read_text()
        .partition("## Resuming with other settings")[2]
        .partition("\n## ")[0]
    )
    listed = set()
    for name in re.findall(
        r"`([a-z_.]+(?:\.\*)?)`", "\n".join(re.findall(r"^\|.*", section, re.MULTILINE))
    ):
        matching = {
            key for key in keys if key == name or (name.endswith("*") and key.startswith(name[:-1]))
        }
        assert matching, f"there is no key {name!r}"
        listed |= matching
    assert listed == frozenset().union(*MAY_CHANGE.values()) & keys
