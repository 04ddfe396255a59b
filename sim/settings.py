"""What the environment says; the only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

__all__ = ["Settings", "read_settings", "state_folder"]


class Settings(msgspec.Struct, frozen=True):
    """Settings that come from the environment.

    Args:
        color: False when NO_COLOR is set to anything but the empty string (no-color.org).
        debug: True when HETLAB_DEBUG is set: tracebacks and debug logs, as with ``--debug``.
    """

    color: bool = True
    debug: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: variables to read; None means those of this process.
    """
    env = os.environ if environ is None else environ
    return Settings(color=not env.get("NO_COLOR"), debug=bool(env.get("HETLAB_DEBUG")))


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of what a user's commands remember (XDG base directories).

    Args:
        environ: as of ``read_settings``.

    >>> str(state_folder({"XDG_STATE_HOME": "/state"}))
    '/state/hetlab'
    """
    env = os.environ if environ is None else environ
    base = env.get("XDG_STATE_HOME", "")
    # The specification has a path that is not absolute ignored.
    home = Path(env.get("HOME") or Path.home())
    return (Path(base) if Path(base).is_absolute() else home / ".local" / "state") / "hetlab"
