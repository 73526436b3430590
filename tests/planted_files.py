"""A program that leaves files which its tests might load."""

PLANTS = """
import os, pathlib
PASS = "import os; os.write(2, b'PLANTED'); os._exit(0)"
for name in ("_pytest", "pytest_plugins", "__pycache__", "encodings"):
    os.makedirs(name)
for name in (
    "pytest.py sitecustomize.py usercustomize.py conftest.py json.py pathlib.py os.py ast.py "
    "types.py random.py _pytest/__init__.py encodings/__init__.py pluggy.py py.py test_state.py "
    "__main__.py pytest/__main__.py iniconfig.py string.py setup.py"
).split():
    path = pathlib.Path(name)
    if path.parent.name == "pytest" and not path.parent.exists():
        path.parent.mkdir()
    path.write_text(PASS)
for name in ("pytest.ini", ".pytest.ini", "tox.ini"):
    pathlib.Path(name).write_text("[pytest]\\naddopts = --collect-only\\n")
pathlib.Path("setup.cfg").write_text("[tool:pytest]\\naddopts = --collect-only\\n")
pathlib.Path("pyproject.toml").write_text(
    "[tool.pytest.ini_options]\\naddopts = '--collect-only'\\n"
)
pathlib.Path("x.pth").write_text(PASS)
pathlib.Path("pyvenv.cfg").write_text("home = /app\\n")
for name in (
    "python3", "python", "bash", "sh", "pytest", "echo", "env",
    ".bashrc", ".profile", ".bash_profile",
):
    path = pathlib.Path(name)
    if not path.exists():
        path.write_text("#!/bin/sh\\necho PLANTED >&2; exit 0\\n")
        path.chmod(0o755)
"""
"""Plants every name by which pytest, Python or bash would load something of a working folder."""
