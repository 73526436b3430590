"""Writes train.jsonl and heldout.jsonl beside this file.

A line is a JSON object, the row of a question. A row needs a ``prompt`` and whatever the reward
reads. docs/write/data.md of the source folder has the columns that mean something.
"""

import json
import random
from pathlib import Path

from tools import MINUTES

FOLDER = Path(__file__).parent
SYSTEM = "Call minutes to answer questions about trains."
# The prompt shows two questions with their calls, results and answers: this model was never taught
# to call tools. A model that was is shown the tools by its chat template (agent.tool_prompt:
# template), and needs no examples.
EXAMPLES = [
    {"role": "user", "content": "How long is a single trip to Oak?"},
    {"role": "assistant", "content": '[minutes(station="Oak", trip="single")]'},
    {"role": "tool", "content": "95"},
    {"role": "assistant", "content": "= 95"},
    {"role": "user", "content": "How long is a return trip to Ash?"},
    {"role": "assistant", "content": '[minutes(station="Ash", trip="return")]'},
    {"role": "tool", "content": "28"},
    {"role": "assistant", "content": "= 28"},
]
QUESTIONS = (
    "How long is a {trip} trip to {station}?",
    "How many minutes is a {trip} trip to {station}?",
    "A {trip} trip to {station}: how many minutes?",
)
SHOWN = ("Oak", "Ash")
HELDOUT = ("Pine", "Rowan", "Willow")  # never trained on


def rows(stations: list[str]) -> list[dict]:
    """Return a row for every station and wording."""
    result = []
    for station in stations:
        for trip in ("single", "return"):
            minutes = MINUTES[station] if trip == "single" else 2 * MINUTES[station]
            for wording in QUESTIONS:
                question = {"role": "user", "content": wording.format(trip=trip, station=station)}
                result.append(
                    {
                        # Chooses the reward; there are metrics for each data source as well.
                        "data_source": f"trains/{trip}",
                        "agent_name": "tool_agent",  # replies, calls and results in turn
                        "prompt": [{"role": "system", "content": SYSTEM}, *EXAMPLES, question],
                        "reward_model": {"ground_truth": str(minutes)},
                    }
                )
    return result


def write(name: str, stations: list[str]) -> None:
    """Write the rows of some stations, in an order that mixes their kinds."""
    mixed = rows(stations)
    random.Random(0).shuffle(mixed)
    lines = [json.dumps(row) for row in mixed]
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write("heldout.jsonl", list(HELDOUT))
    write("train.jsonl", [station for station in MINUTES if station not in SHOWN + HELDOUT])
