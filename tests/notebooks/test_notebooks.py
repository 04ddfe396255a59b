"""Notebooks run from top to bottom, quickly enough, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_SECONDS = 30


def test_there_are_notebooks() -> None:
    assert [n.name for n in NOTEBOOKS] == ["30_asynchronous.ipynb", "60_compose.ipynb"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_is_kept_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert code and all(not c.outputs and c.execution_count is None for c in code)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda f: f.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    began: dict[int, float] = {}
    took: dict[int, float] = {}

    def start(cell: Any, cell_index: int) -> None:
        began[cell_index] = monotonic()

    def end(cell: Any, cell_index: int, execute_reply: Any) -> None:
        took[cell_index] = monotonic() - began[cell_index]

    client = NotebookClient(
        notebook,
        timeout=4 * CELL_SECONDS,
        resources={"metadata": {"path": str(tmp_path)}},
        on_cell_execute=start,
        on_cell_executed=end,
    )
    client.execute()
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert sorted(took) == [i for i, c in enumerate(notebook.cells) if c.cell_type == "code"]
    shown = [o for c in code for o in c.outputs]
    assert not [o for o in shown if o.output_type == "error" or o.get("name") == "stderr"]
    pictures = [o for o in shown if "image/png" in o.get("data", {})]
    assert len(pictures) == sum("draw_" in c.source and "import" not in c.source for c in code)
    assert max(took.values()) < CELL_SECONDS, took
