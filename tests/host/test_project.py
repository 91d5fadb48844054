"""The package as a user meets it: a quick import, its types, its version."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
HEAVY = ("cupy", "torch", "numba")
IMPORT_SECONDS = 1.0

PROBE = f"""
import json, sys, time
start = time.perf_counter()
import nbverify
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {HEAVY} if name in sys.modules]]))
"""


def fresh_python(code: str) -> str:
    """What ``code`` prints in a new interpreter, started in the checkout."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_light():
    # The best of three: the first may read from a cold disk, and other tests share the machine.
    runs = [json.loads(fresh_python(PROBE)) for _ in range(3)]
    assert runs[0][1] == [], "import nbverify must not import these"
    assert min(seconds for seconds, _ in runs) < IMPORT_SECONDS


def test_version_is_that_of_pyproject():
    declared = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)[1]  # tomllib needs Python 3.11
    assert fresh_python("import nbverify; print(nbverify.__version__)").strip() == declared


def test_types_are_shipped():
    assert (ROOT / "nbverify" / "py.typed").is_file()
    package_data = re.search(r"^\[tool\.setuptools\.package-data\]\nnbverify = (\[.*\])$", PYPROJECT, re.MULTILINE)[1]
    assert "py.typed" in json.loads(package_data)


def test_the_figures_in_the_readme_belong_to_the_record_beside_them():
    measured = (ROOT / "README.md").read_text().split("## Measured")[1].split("## ")[0]
    record = json.loads((ROOT / re.search(r"\((benchmarks/results/[^)]+)\)", measured)[1]).read_text())
    assert f"`{record['head']['source_hash']}`" in measured
    launch, bind = record["calls_us"]["launch"], record["calls_us"]["bind"]
    assert f"| {launch['p50']:.1f} us ({launch['p10']:.1f}-{launch['p90']:.1f}) |" in measured
    assert f"| {bind['p50']:.0f} us ({bind['p10']:.0f}-{bind['p90']:.0f}) |" in measured
    for row in record["kernel"]:
        if (row["requests"], row["nodes"]) in ((1, 8), (1, 33), (8, 8)):
            assert f"| {row['requests']} x {row['nodes']} | {row['device_us']['p50']:,.0f} us" in measured


def test_the_speed_in_the_readme_is_what_the_kept_records_say():
    """Mend with ``python -m benchmarks.readme``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.replaced(text, readme.section(readme.kept())) == text


@pytest.mark.parametrize("path, record", readme.kept().items() or [(None, None)])
def test_a_kept_record_belongs_to_the_kernel_sources(path, record):
    """Else its figures are of other code: measure again, or remove it."""
    assert record is None or readme.why_not(record) == ""
