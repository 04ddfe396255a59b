"""A resumable table of simulated plans: SQLite, keyed by content."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

from sim.errors import InputError

__all__ = ["RunTable", "run_key"]


def run_key(problem_hash: str, plan_hash: str, version: str, *, contention: bool) -> str:
    """Identity of one simulation: what was simulated, how, and by which version."""
    text = f"{problem_hash} {plan_hash} {version} contention={contention}"
    return hashlib.sha256(text.encode()).hexdigest()


class RunTable:
    """Step times of simulated plans, kept in a file.

    The rollback journal is used, not WAL, which needs shared memory that network file systems lack;
    one writer at a time, others wait.

    Args:
        path: of the file; made when it is missing.

    Raises:
        InputError: the file is not such a table, or cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with closing(self._connect()) as db, db:
                db.execute(
                    "CREATE TABLE IF NOT EXISTS runs "
                    "(key TEXT PRIMARY KEY, plan TEXT NOT NULL, step_time_s REAL NOT NULL)"
                )
                db.execute("SELECT key, plan, step_time_s FROM runs LIMIT 1")
        except sqlite3.Error as error:
            raise InputError(
                "cannot use the run table",
                file=str(path),
                found=str(error),
                expected="a file that an earlier search wrote, or a new name",
            ) from error

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=60.0)
        db.execute("PRAGMA journal_mode = DELETE")
        return db

    def get(self, key: str) -> float | None:
        """Return the step time of a run [s], or None when it is not known."""
        with closing(self._connect()) as db:
            row = db.execute("SELECT step_time_s FROM runs WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: str, plan: str, step_time_s: float) -> None:
        """Remember a run.

        Args:
            key: see ``run_key``. plan: its name, for people. step_time_s: [s].
        """
        with closing(self._connect()) as db, db:
            db.execute(
                "INSERT OR REPLACE INTO runs (key, plan, step_time_s) VALUES (?, ?, ?)",
                (key, plan, step_time_s),
            )

    def __len__(self) -> int:
        with closing(self._connect()) as db:
            return int(db.execute("SELECT COUNT(*) FROM runs").fetchone()[0])
