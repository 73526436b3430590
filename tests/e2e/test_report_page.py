"""The report in a real browser: it opens, loads nothing, shows, filters, colours, and lets nothing out of its texts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jax_agent_rl.observe.report import command
from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.utils.text import printable
from tests.report_runs import HOSTILE, decode, make_run, open_browser, step_line
from tests.trajectories import session, trajectory


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """Address of the report of a run with hostile texts."""
    run = make_run(tmp_path_factory.mktemp("report") / "run", hostile=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "decoder", lambda config, notes: decode)
        return write_report(run).as_uri()


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


class Page:
    """The report in a tab of its own.

    Attributes:
        troubles: errors and messages of its scripts, and everything it asked the network for.
    """

    def __init__(self, browser, address: str, scheme: str = "light") -> None:
        self.tab = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
        self.tab.set_default_timeout(10_000)
        self.troubles: list[str] = []
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.on("console", lambda message: self.troubles.append(message.text))
        self.tab.on("request", lambda request: self.troubles.append(request.url))
        self.tab.goto(address)
        self.troubles.remove(address.partition("#")[0])

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_inner_texts()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)

    def listed(self) -> list[str]:
        return self.texts(".row .id")

    def choose(self, label: str, value: str) -> None:
        self.tab.get_by_label(label, exact=True).select_option(value)


@pytest.fixture
def page(browser, report):
    page = Page(browser, report)
    yield page
    page.tab.close()
    assert page.troubles == []


def test_the_curves_are_drawn_first(page):
    titles = page.tab.locator(".card h2").all_text_contents()
    assert titles[0] == "Reward" and "Entropynats" in titles and titles[-1] == "own_metric"
    assert page.tab.locator(".card polyline").count() >= 5
    assert page.texts(".tile b")[0] == "3 of 5"


def test_pointing_at_a_step_shows_its_values_and_a_click_opens_its_trajectories(page):
    picture = page.tab.locator(".card", has_text="Reward").first.locator("svg")
    box = picture.bounding_box()
    page.tab.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + 40)
    assert page.texts("#tip") == ["step 3"]
    page.tab.mouse.click(box["x"] + 0.98 * box["width"], box["y"] + 40)
    assert page.listed() == [f"train-3-0-{n}" for n in range(5)]


def test_pointing_at_a_step_of_a_long_run_shows_a_value_in_every_chart(browser, tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    for step in range(1, 2001):
        more = {"entropy": step * 7919 % 1009 / 1009, "loss": step * 6007 % 997 / 997, "kl": step * 523 % 499 / 499}
        run_dir.add_metrics(step_line(step, **more))
    page = Page(browser, write_report(run_dir.path).as_uri())
    assert page.tab.locator("svg[aria-label='Tool errors'] rect").count() == 286
    box = page.tab.locator(".card", has_text="Reward").first.locator("svg").bounding_box()
    for place in (0.3, 0.5, 0.77):
        page.tab.mouse.move(box["x"] + place * box["width"], box["y"] + 40)
        values = page.texts(".pane > .charts .legend b")
        assert len(values) >= 10 and "–" not in values
    assert page.troubles == []


def test_the_timeline_has_both_rows_and_the_traced_trajectories(page):
    page.press("2")
    names = page.tab.locator("svg .name").all_text_contents()
    assert names == ["learner", "engines", "train-1-0-0", "train-1-0-1"]
    page.tab.locator("svg .name.link").first.click()
    assert page.texts(".bar h2") == ["train-1-0-0"]


@pytest.mark.parametrize(
    ("label", "value", "numbers"),
    [
        ("tool error", "timeout", [2, 7, 12]),
        ("tool error", "any", [2, 4, 7, 9, 12, 14]),
        ("ended with", "response_length", [3, 8, 13]),
        ("a turn stopped by", "eos", range(15)),
        ("split", "train", range(15)),
    ],
)
def test_filters_by_name(page, label, value, numbers):
    page.press("3")
    page.choose(label, value)
    assert page.listed() == [f"train-{1 + n // 5}-0-{n % 5}" for n in numbers]


def test_filters_by_number_and_text_hold_together_and_are_cleared(page):
    page.press("3")
    page.tab.get_by_placeholder("least").fill("0.25")
    page.tab.get_by_placeholder("from").fill("2")
    assert page.listed() == ["train-2-0-0", "train-2-0-3", "train-3-0-0", "train-3-0-3"]
    page.tab.get_by_placeholder("text, id or group").fill("hello")
    assert page.listed() == ["train-2-0-0", "train-3-0-0"]
    page.tab.get_by_text("clear filters").click()
    assert page.texts(".status span") == ["15 of 15 trajectories"]


def test_best_and_worst_first(page):
    page.press("3")
    page.choose("order", "-reward")
    assert page.listed()[0] == "train-1-0-0"
    page.choose("order", "reward")
    assert page.listed()[0] == "train-1-0-2"


def test_keys_walk_through_trajectories_and_tokens(page):
    page.press("3", "j", "j", "k")
    assert page.texts(".bar h2") == ["train-1-0-1"]
    page.tab.locator(".toks").nth(1).focus()
    page.press("ArrowRight", "ArrowRight")
    tip = page.texts("#tip")[0]
    assert "<|im_end|>" in tip and "log-prob" in tip and "-1.000" in tip and "p = 0.37" in tip


def test_pointing_at_a_token_shows_id_text_and_numbers(page):
    page.press("3")
    page.tab.locator(".toks").nth(1).locator("span").first.hover()
    lines = page.texts("#tip")[0].split("\n")
    assert lines[0] == "hello␣"
    assert {"id\t4", "position\t0", "learner's\t-1.500 (gap 0.5)", "advantage\t1.000", "version\t0"} <= set(lines)


def test_colours_say_what_the_mode_says(page):
    page.press("3")

    def colours() -> list[str]:
        spans = page.tab.locator(".turn:not(:first-of-type) .toks span")
        return spans.evaluate_all("all => all.map((one) => one.style.background)")

    seen = {}
    for mode in ("mask", "log-prob", "advantage", "version", "gap"):
        page.tab.get_by_role("button", name=mode, exact=True).click()
        seen[mode] = colours()
        assert page.tab.locator(".modes [aria-pressed=true]").inner_text() == mode
    assert len({tuple(c) for c in seen.values()}) == 5
    sampled, inserted = seen["mask"][0], seen["mask"][2]
    assert sampled != inserted and seen["mask"] == [sampled, sampled, inserted, sampled, sampled]
    assert all(seen[mode][2] == "" for mode in ("log-prob", "advantage", "version", "gap"))


def test_a_gap_that_rounding_would_make_is_hardly_painted(browser, tmp_path: Path):
    run = make_run(tmp_path / "run")
    first, *others = (run / "trajectories.jsonl").read_text().splitlines()
    near = json.loads(first) | {
        "rollout_logprobs": [-0.1234995, -0.7, 0.0, -1.0, -1.0],
        "old_logprobs": [-0.1235005, -0.7, 0.0, -1.0, -1.0],
    }
    (run / "trajectories.jsonl").write_text("\n".join([json.dumps(near), *others]) + "\n")
    page = Page(browser, write_report(run).as_uri() + "#trajectory=train-1-0-0")
    page.tab.get_by_role("button", name="gap", exact=True).click()
    spans = page.tab.locator(".turn:not(:first-of-type) .toks span")
    painted = spans.evaluate_all("all => all.map((one) => one.style.background)")
    assert painted[0] == painted[1] and "0%" in painted[0]
    spans.first.hover()
    assert "(gap 1.0e-6)" in page.texts("#tip")[0]
    assert page.troubles == []


def test_a_session_shows_which_segment_left_which_and_then_their_tokens(browser, tmp_path: Path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.add_metrics(step_line(1))
    run_dir.add_trajectories(1, "train", [session()])
    page = Page(browser, write_report(run_dir.path).as_uri() + "#trajectory=g-0")
    first, second, third = page.texts(".session li")
    assert first == "segment 1 calls 1, 5 · 3 trained tokens (43 %)"
    assert second.endswith("leaves segment 1 after turn 1 (shared ids: 4)")
    assert third.endswith(
        "in the prompt (shared ids: 1): message 1 of 1 (user) has 'help' where the recorded one (user) has 'question'"
    )
    assert page.texts(".detail h3") == ["segment 1", "segment 2", "segment 3"]
    indents = page.tab.locator(".session li").evaluate_all("all => all.map((one) => one.getBoundingClientRect().left)")
    assert indents[0] < indents[1] == indents[2]
    assert [text.strip() for text in page.texts(".toks")[:4]] == ["[1][3]", "[4][2]", "[7]", "[5]"]
    assert page.troubles == []


def test_the_legend_says_what_was_trained_on(browser, tmp_path: Path):
    run = make_run(tmp_path / "run")
    learning = trajectory([1], [4, 2, 7, 8, 5], mask=[1, 1, 0, 0, 1], group="learning")
    learning = replace(learning, turns=tuple(replace(turn, learn_appended=True) for turn in learning.turns))
    token_values = {learning.trajectory_id: {"advantages": [0.5, 0.5, -1.0, 0.25, 0.5]}}
    RunDir(run).add_trajectories(1, "train", [learning], token_values=token_values)
    address = write_report(run).as_uri() + "#trajectory="
    sampled, inserted = "sampled by the policy ({}trained on)", "inserted: tool results, template"
    for name, legend in {
        "train-1-0-0": [sampled.format(""), inserted],
        "train-1-0-3": [sampled.format("not "), inserted],
        "learning-0": [sampled.format(""), inserted + " (trained on)"],
    }.items():
        page = Page(browser, address + name)
        assert page.texts(".scale span") == legend and page.troubles == []
    page.tab.get_by_role("button", name="advantage", exact=True).click()
    page.tab.locator(".toks").nth(2).locator("span").first.hover()
    tip = page.texts("#tip")[0].split("\n")
    assert {"kind\tinserted", "advantage\t-1.000"} <= set(tip)
    painted = page.tab.locator(".turn:not(:first-of-type) .toks span")
    assert all(painted.evaluate_all("all => all.map((one) => one.style.background)"))


def test_a_mode_without_numbers_is_off(page):
    page.press("3", "j", "j", "j")
    assert page.texts(".bar h2") == ["train-1-0-3"]
    assert page.tab.get_by_role("button", name="advantage", exact=True).is_disabled()


def test_a_letter_of_two_tokens_is_one_letter(page):
    page.press("3", "j", "j", "j")
    assert page.texts(".toks")[1] == "éworld "


def test_a_group_is_shown_as_a_tree_and_a_leaf_opens_its_trajectory(page):
    page.press("3", "t")
    assert page.tab.locator(".node").count() == 8
    assert page.tab.locator(".edge").count() == 4
    page.tab.locator(".node").nth(2).click()
    assert page.texts(".bar h2") == ["train-1-0-1"]


def test_what_a_model_wrote_is_shown_and_never_runs(page):
    page.press("3", "j", "j", "j", "j")
    assert page.texts(".bar h2") == ["train-1-0-4"]
    shown = " ".join(page.texts(".toks"))
    for text in HOSTILE[:4]:
        assert text in shown
    assert printable(HOSTILE[4]) in shown, "what is hidden or turns the text round is spelt out as on the terminal"
    assert HOSTILE[4] not in shown
    for mode in ("log-prob", "version", "tree"):
        page.tab.get_by_role("button", name=mode, exact=True).click()
    page.tab.locator(".node").first.hover()
    page.press("2")
    page.tab.locator("svg rect[rx='2']").first.hover()
    assert page.tab.evaluate("window.owned") is None
    assert page.tab.locator("#body img").count() == 0


def test_the_keys_are_listed(page):
    page.press("?")
    shown = page.texts("#help")[0]
    assert "walk through the tokens" in shown and "[object" not in shown
    assert {"1", "j", "/", "?"} <= set(page.texts("#help kbd"))
    page.press("Escape")
    assert not page.tab.locator("#help").is_visible()


def test_light_and_dark_follow_the_system_and_can_be_changed(browser, report):
    grounds = []
    for scheme in ("light", "dark"):
        page = Page(browser, report, scheme)
        grounds.append(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.press("l")
    grounds.append(page.tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] == grounds[2] != grounds[1]


def test_a_link_opens_its_trajectory(browser, report):
    page = Page(browser, report + "#trajectory=train-2-0-1")
    assert page.texts(".bar h2") == ["train-2-0-1"]


def test_a_run_that_has_only_begun_opens(browser, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    page = Page(browser, write_report(run).as_uri())
    assert "No step has been finished yet." in page.texts("#body")[0]
    page.press("2", "3")
    assert "No trajectory has been written yet." in page.texts("#body")[0]
    assert page.troubles == []


def test_thousands_of_trajectories_make_a_list_of_few_elements(browser, tmp_path: Path):
    run = make_run(tmp_path / "run", steps=600)
    page = Page(browser, write_report(run, limit=0).as_uri() + "#trajectories")
    assert page.texts(".status span") == ["2400 of 2400 trajectories"]
    assert page.tab.locator(".row").count() < 60
    page.tab.locator(".rows").evaluate("list => list.scrollTop = list.scrollHeight")
    page.tab.locator(".row .id", has_text="train-600-0-3").wait_for()
    assert page.troubles == []
