"""What was found, on disk: one SQLite file in the user's cache, which all processes share.

Each use opens it anew: a connection must not go through a fork, and SQLite's own locks keep processes apart. A file
that is damaged is put aside, and a new one begun, while no process has it open: SQLite finds a file's journal by name,
so one that still had the damaged file would take the new file's journal for its own and undo it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from xopt import config
from xopt.capabilities import capabilities
from xopt.tuning.tuned import Tuned

MOST_ENTRIES = 20_000
"""In the file; the oldest go first."""
_SECONDS_TO_WAIT = 30.0  # for another process's lock
_KEY = "machine, version, level, threads, kernel, dtype, sizes"
_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS tuned (
        machine TEXT NOT NULL, cpu TEXT NOT NULL, version TEXT NOT NULL, level TEXT NOT NULL, threads INTEGER NOT NULL,
        kernel TEXT NOT NULL, dtype TEXT NOT NULL, sizes TEXT NOT NULL, choice TEXT NOT NULL, instance TEXT NOT NULL,
        seconds REAL NOT NULL, default_seconds REAL NOT NULL, PRIMARY KEY ({_KEY})
    )
"""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    cpu: str
    version: str
    """Of xopt."""
    tuned: Tuned


def machine_identity() -> str:
    """What else than level and threads a choice holds for: the CPU, what it can do, its caches."""
    found = capabilities()
    facts = {
        "cpu": found.cpu,
        "features": list(found.present_features),
        "caches": [found.caches.l1d_bytes, found.caches.l2_bytes, found.caches.l3_bytes],
        "emulated": found.emulated,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


_file: Path | None = None


def use_file(path: Path | None) -> None:
    """Another file than the user's, for this process; None: the user's."""
    global _file
    _file = path


def open_store() -> Store:
    return Store(_file or config.cache_folder() / "tuning-1.sqlite")


class Store:
    """Where the file cannot be read or written, it holds nothing: what is tuned then is tuned again in each process. A
    warning says so, once for each file and problem."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Tuned]:
        """What holds for this machine and this version of xopt."""
        mine = machine_identity(), capabilities().xopt_version
        return [entry.tuned for machine, entry in self._rows() if (machine, entry.version) == mine]

    def entries(self) -> list[Entry]:
        """Of all machines and versions."""
        return [entry for _, entry in self._rows()]

    def _rows(self) -> list[tuple[str, Entry]]:
        nothing: list[tuple[str, Entry]] = []
        return self._use(_select, nothing)

    def write(self, found: Sequence[Tuned]) -> None:
        """In the place of what is known of the same calls."""
        if not found:
            return
        machine, version, cpu = machine_identity(), capabilities().xopt_version, capabilities().cpu
        rows = [
            (
                *(machine, cpu, version, one.level, one.threads, one.kernel, one.dtype, json.dumps(one.sizes)),
                *(json.dumps(one.choice), one.instance, one.seconds, one.default_seconds),
            )
            for one in found
        ]

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(f"INSERT OR REPLACE INTO tuned VALUES ({', '.join('?' * len(rows[0]))})", rows)
            keep = "SELECT rowid FROM tuned ORDER BY rowid DESC LIMIT ?"
            connection.execute(f"DELETE FROM tuned WHERE rowid NOT IN ({keep})", (MOST_ENTRIES,))
            connection.execute("COMMIT")

        self._use(insert, None)

    def clear(self) -> int:
        """Forgets everything: how many entries there were."""

        def delete(connection: sqlite3.Connection) -> int:
            return connection.execute("DELETE FROM tuned").rowcount

        return self._use(delete, 0)

    def _use(self, work: Callable[[sqlite3.Connection], Result], nothing: Result) -> Result:
        for _ in range(2):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with self._locked(fcntl.LOCK_SH), self._connected() as connection:
                        return work(connection)
                except sqlite3.Error as error:
                    if not _is_damage(error):
                        raise
                    self._put_aside()
            except (OSError, sqlite3.Error) as error:
                warnings.warn(f"xopt: {self.path} cannot be used: {error}", RuntimeWarning, stacklevel=3)
                return nothing
        warnings.warn(f"xopt: {self.path} is damaged, and could not be replaced", RuntimeWarning, stacklevel=3)
        return nothing

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_SECONDS_TO_WAIT, isolation_level=None)) as connection:
            connection.execute(_SCHEMA)
            yield connection

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Shared while the file is in use, exclusive to put it aside. In a folder where nothing can be written, nothing
        can be put aside either, and the file is read without."""
        try:
            lock = open(self.path.with_suffix(".lock"), "a")  # noqa: SIM115 - closed below
        except OSError as error:
            if kind == fcntl.LOCK_SH and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                yield
                return
            raise
        with lock:
            fcntl.flock(lock, kind)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would leave it to a fork made meanwhile

    def _put_aside(self) -> None:
        """Unless another process has just done so."""
        with self._locked(fcntl.LOCK_EX):
            try:
                with self._connected() as connection:
                    _select(connection)
            except sqlite3.Error as error:
                if not _is_damage(error):
                    return
                aside = self.path.with_suffix(".damaged")
                os.replace(self.path, aside)
                warnings.warn(
                    f"xopt: {self.path} is damaged ({error}): a new one is begun, and the old one kept as {aside.name}",
                    RuntimeWarning,
                    stacklevel=5,
                )


def _is_damage(error: Exception) -> bool:
    """Whether the file is no database or another one, rather than locked or out of reach."""
    if isinstance(error, sqlite3.OperationalError):
        return "column" in str(error)
    return isinstance(error, sqlite3.DatabaseError)


def _select(connection: sqlite3.Connection) -> list[tuple[str, Entry]]:
    columns = f"cpu, {_KEY}, choice, instance, seconds, default_seconds"
    found = []
    for row in connection.execute(f"SELECT {columns} FROM tuned ORDER BY rowid"):
        cpu, machine, version, level, threads, kernel, dtype, sizes, choice, instance, seconds, default_seconds = row
        numbers = tuple(json.loads(sizes)), tuple(json.loads(choice))
        tuned = Tuned(kernel, dtype, level, threads, *numbers, instance, seconds, default_seconds)
        found.append((machine, Entry(cpu, version, tuned)))
    return found
