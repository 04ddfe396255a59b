"""Files that hetlab writes: whole or not at all, and plain data as YAML."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sim.errors import InputError

__all__ = ["write_whole", "yaml_text"]

WIDTH = 10_000
"""Long sources stay on one line, so that files can be searched line by line."""


def yaml_text(data: dict[str, Any]) -> str:
    """Return plain data as YAML 1.2 that ``sim.spec.load`` reads back equal."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = WIDTH
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def write_whole(path: Path, text: str) -> Path:
    """Write a text file: beside the target first, then renamed.

    Raises:
        InputError: the file cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8", newline="")
        beside.replace(path)
    except OSError as error:
        raise InputError(
            "cannot write it", str(path), found=error.strerror or str(error)
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return path
