"""Every Python block of the README and of docs/ runs.

The info string of a fence decides: ``python`` runs everywhere (use ``device="emulator"``), ``python gpu`` only where
there is a GPU, anything else (``console``, ``text``) never.  The blocks of one file run in order in one namespace.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]
FENCE = re.compile(r"^ {0,3}(```+)\s*([^`\n]*)$")


def python_blocks(text: str) -> list[tuple[int, str, str]]:
    """(line number of the first line, info string, code) of each fenced block whose language is python."""
    blocks, fence, first, info, lines = [], "", 0, "", []
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if not fence:
            if match:
                fence, info, first, lines = match[1], match[2].strip(), number + 1, []
        elif match and not match[2] and len(match[1]) >= len(fence):
            if info.split()[:1] == ["python"]:
                blocks.append((first, info, "\n".join(lines) + "\n"))
            fence = ""
        else:
            lines.append(line)
    assert not fence, f"line {first - 1}: the fence is not closed"
    return blocks


def test_readme_exists():
    assert (ROOT / "README.md").is_file()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_run(path, has_gpu, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # whatever a block writes
    namespace = {"__name__": "documentation"}
    for first, info, code in python_blocks(path.read_text(encoding="utf-8")):
        assert info in ("python", "python gpu"), f"{path.name}:{first - 1}: unknown info string {info!r}"
        if info == "python gpu" and not has_gpu:
            continue
        # Blank lines in front make tracebacks, and inspect.getsource, point into the page.
        exec(compile("\n" * (first - 1) + code, str(path), "exec"), namespace)


def test_the_fences_are_understood():
    page = "a\n```python\nx = 1\n```\n```console\n$ no\n```\n"
    page += "````text\n```python\nno\n```\n````\n```python gpu\ny = 2\n```\n"
    assert python_blocks(page) == [(3, "python", "x = 1\n"), (14, "python gpu", "y = 2\n")]


def test_a_failing_block_names_its_line(tmp_path):
    page = "intro\n\n```python\nx = 1\n1 / 0\n```\n"
    ((first, _, code),) = python_blocks(page)
    with pytest.raises(ZeroDivisionError) as failure:
        exec(compile("\n" * (first - 1) + code, "page.md", "exec"), {})
    assert failure.traceback[-1].lineno + 1 == page.splitlines().index("1 / 0") + 1
