"""The journal: whatever ended the process that wrote it, the next one goes on without doubling or
forgetting.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.evaluate.journal import Journal
from tests.examples import examples
from tests.messages import raises

SETTINGS = {"seed": 0, "sampling": {"temperature": 1.0}}


def records(number: int, members: int = 2) -> list[dict]:
    return [{"trajectory_id": f"rollout-0-{number}-{i}", "row": number} for i in range(members)]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "out.parquet.partial.jsonl"


def test_what_was_added_is_there_for_the_next_process_in_any_order(file):
    with Journal(file, SETTINGS) as journal:
        journal.add(3, records(3), {"backend_error": 1})
        journal.add(1, records(1, 1), {})
        journal.lose({"cancelled": 4})
    with Journal(file, SETTINGS) as journal:
        assert sorted(journal.sizes) == [1, 3]
        assert journal.num_trajectories == 3
        assert journal.dropped == {"backend_error": 1, "cancelled": 4}
        assert journal.started == 8
        assert list(journal.lines([1, 3])) == [records(1, 1), records(3)]


@settings(max_examples=examples(30))
@given(data=st.data())
def test_cut_anywhere_it_keeps_the_whole_lines_and_goes_on(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("journal") / "journal"
    ends = []
    with Journal(file, SETTINGS) as journal:
        for number in range(4):
            journal.add(number, records(number), {})
            ends.append(file.stat().st_size)
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    file.write_bytes(content[:cut])
    complete_lines = sum(end <= cut for end in ends)
    with Journal(file, SETTINGS) as journal:
        assert sorted(journal.sizes) == list(range(complete_lines))
        journal.add(9, records(9), {})
    with Journal(file, SETTINGS) as journal:
        assert list(journal.lines([9])) == [records(9)]
        assert journal.num_trajectories == 2 * (complete_lines + 1)


def test_a_prompt_of_which_nothing_came_is_not_done_but_its_losses_count(file):
    with Journal(file, SETTINGS) as journal:
        journal.add(0, records(0), {})
        journal.add(1, [], {"tool_server_error": 2})
    with Journal(file, SETTINGS) as journal:
        assert list(journal.sizes) == [0]
        assert journal.dropped == {"tool_server_error": 2}


def test_other_settings_are_refused_by_name(file):
    with Journal(file, SETTINGS) as journal:
        journal.add(0, records(0), {})
    with raises(ConfigError, key="sampling.temperature", value=("was 1.0", "is 0.5"), fix="--out"):
        Journal(file, SETTINGS | {"sampling": {"temperature": 0.5}})


def test_other_settings_may_replace_a_journal_of_which_nothing_came(file):
    with Journal(file, SETTINGS) as journal:
        journal.add(0, [], {"prompt_too_long": 2})
    with Journal(file, SETTINGS | {"seed": 1}) as journal:
        assert journal.started == 0
        journal.add(0, records(0), {})
    with Journal(file, SETTINGS | {"seed": 1}) as journal:
        assert journal.num_trajectories == 2


def test_rollout_servers_have_to_serve_the_weights_that_were_sampled_from(file):
    with Journal(file, SETTINGS) as journal:
        journal.require_served({"version": 2, "weights": "a"})
        journal.require_served({"version": 3, "weights": "b"})  # nothing was sampled yet
        journal.add(0, records(0), {})
    with Journal(file, SETTINGS) as journal:
        journal.require_served({"version": 3, "weights": "b"})
        with raises(ConfigError, key="weights", value=("was 'b'", "is 'c'")):
            journal.require_served({"version": 3, "weights": "c"})


def test_two_processes_do_not_write_one_journal(file):
    with Journal(file, SETTINGS), raises(ConfigError, value="another process"):
        Journal(file, SETTINGS)
