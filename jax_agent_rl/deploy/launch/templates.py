"""Files of ``launch/templates``."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jax_agent_rl.deploy.launch.arguments import ROOT
from jax_agent_rl.errors import LaunchError


def render_template(name: str, **values: Any) -> str:
    """Render a file of ``launch/templates``.

    Raises:
        LaunchError: jinja2 is not installed; the launchers need no packages otherwise.
    """
    try:
        import jinja2
    except ImportError:
        raise LaunchError(
            "--render needs jinja2: pip install jinja2, or PYTHON=.venv/bin/python of an"
            " environment that has it"
        ) from None
    loader = jinja2.FileSystemLoader(ROOT / "launch" / "templates")
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": shlex.quote, "json": json.dumps}
    return environment.get_template(name).render(values)
