"""How many examples hypothesis tries: few in the quick tests, more with ``--all``, many at night.

``TEST_EXAMPLES`` names the profile; ``launch/test.sh`` sets it.
"""

import math
import os

import hypothesis

USUAL = 100
SHARES = {"quick": 0.2, "all": 0.5, "nightly": 10.0}
LEAST = 5


def examples(usual: int = USUAL) -> int:
    """Return how many examples a test tries now, given the number that is written in it."""
    return max(min(usual, LEAST), math.ceil(usual * SHARES[_profile()]))


def load_profile() -> None:
    """Set what holds for all tests. How long an example takes is up to the machine.

    Continuous integration tries the same examples each time, but at night: others each night.
    """
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize="CI" in os.environ and _profile() != "nightly",
        max_examples=examples(),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


def _profile() -> str:
    profile = os.environ.get("TEST_EXAMPLES", "quick")
    if profile not in SHARES:
        raise ValueError(f"TEST_EXAMPLES={profile!r}: one of {', '.join(SHARES)}")
    return profile
