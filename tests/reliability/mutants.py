"""Mutants of our own code: without one sync, rename, checksum or lock, some test fails.

`python -m tests.reliability.mutants` edits a copy of the package, once for each mutant, runs the
tests that are named with it, and prints which one fails. A mutant that survives is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

POWER = "tests/reliability/test_crash_states.py -k power_cut[{}]"
FULL = "tests/reliability/test_crash_states.py -k disk_that_was_full"
ERRORS = "tests/contract/test_errors.py"
LOCKS = "tests/contract/test_modes_locks.py"
HOSTILE = "tests/reliability/test_hostile.py"
SESSIONS = "tests/sessions"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit of one place, and the tests of which one must fail.

    Attributes
    ----------
    old, new : str
        What stands there exactly once, and what is put in its place.
    tests : str
        Arguments of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


def _pass(name: str, file: str, old: str, tests: str) -> Mutant:
    """Leave out the sync or rename of some lines."""
    new = re.sub(r"\S+\.(?:_?sync|rename)\(.*\)(?=$|\n)", "pass", old)
    return Mutant(name, file, old, new, tests)


MUTANTS = (
    # -- syncs ------------------------------------------------------------------------------------
    _pass("no sync of new files", "_fileio",
          "                self._sync(fd, what, calls.fsync)",
          POWER.format("plain")),
    _pass("no sync of records", "_fileio",
          "                self._sync(fd, name, calls.fdatasync)", POWER.format("plain")),
    _pass("no sync of the reserve file", "_fileio",
          "calls.ftruncate(fd, len(data)))\n                self._sync(fd, name, calls.fsync)",
          FULL),
    _pass("no sync of the parent directory", "_fileio",
          "                    parent.sync()", POWER.format("plain")),
    Mutant("no sync of the directory at all", "_fileio",
           "        self._sync(self._fd, self.path, calls.fsync)", "        pass",
           POWER.format("plain")),
    _pass("no sync of names before a flush commits", "_commit",
          "if flush.manifest is not None:\n            self._directory.sync()",
          POWER.format("plain")),
    _pass("no sync of names before a compaction commits", "_commit",
          "[(0, records)])\n            self._directory.sync()",
          POWER.format("evictions-one-shard")),
    _pass("no sync of the commit", "_commit",
          "self._directory.rename(name, INDEX_NAME)\n        self._directory.sync()",
          POWER.format("plain")),
    _pass("no sync of the records' last name", "_commit",
          "this rename does not.\n            self._directory.sync()",
          FULL),
    _pass("no sync when a store is made", "_snapshot",
          "INDEX_NAME), INDEX_NAME)\n    directory.sync()\n    return manifest",
          POWER.format("plain")),
    _pass("no sync before a recovery", "_snapshot",
          "be promised on top of it.\n    directory.sync()",
          "tests/reliability/test_crash_states.py -k recovery"),
    # -- renames and order ------------------------------------------------------------------------
    Mutant("index.json written in place", "_commit",
           "            name = self._directory.write_temporary([(0, [data])], INDEX_NAME)",
           "            name = INDEX_NAME\n"
           "            self._directory.update_file(name, [(0, [data])])\n"
           "            self._directory.truncate_file(name, len(data))",
           POWER.format("plain")),
    _pass("no rename of index.json", "_commit",
          "self._committing = True\n        self._directory.rename(name, INDEX_NAME)",
          "tests/contract/test_lifecycle.py"),
    _pass("no rename of compacted records", "_commit",
          "            self._directory.rename(name, ENTRIES_NAME)",
          "tests/contract/test_evict_compact.py " + POWER.format("evictions-one-shard")),
    Mutant("old shards removed before the commit", "_commit",
           "            manifest = manifest.replace(entries_crc=tuple(crcs))\n",
           "            manifest = manifest.replace(entries_crc=tuple(crcs))\n"
           "            for number in known.keys() - live.keys():\n"
           "                self._directory.remove(shard_name(number))\n",
           POWER.format("evictions-one-shard")),
    _pass("a recovery does not finish the rename", "_snapshot",
          "        directory.rename(entries_name, ENTRIES_NAME)",
          "tests/reliability/test_crash_states.py -k evictions-one-shard"),
    Mutant("a torn tail is not cut", "_snapshot",
           "    if size > manifest.n_records * table.dtype.itemsize:", "    if False:",
           "tests/contract/test_format_entries.py"),
    Mutant("orphans are not removed", "_snapshot",
           "            directory.remove(name)", "            pass",
           "tests/contract/test_index_json.py"),
    Mutant("a failed write leaves its file", "_fileio",
           "            self.remove(name)\n            raise failure(error, f\"writing {what}\")",
           "            raise failure(error, f\"writing {what}\")",
           "tests/reliability/test_faults.py -k flush"),
    # -- failures ---------------------------------------------------------------------------------
    Mutant("a failed sync is tried again", "_fileio",
           "            again(sync, fd)\n        except OSError as error:\n",
           "            again(sync, fd)\n        except OSError as error:\n"
           "            return again(sync, fd)\n", ERRORS),
    Mutant("a writer goes on after a failed sync", "_commit",
           "        if self._committing or isinstance(error, UnknownOutcomeError):",
           "        if False:",
           ERRORS),
    Mutant("no reserve on a full disk", "_commit",
           "            if self._reserve < len(data):", "            if True:",
           "tests/reliability/test_mounts.py " + FULL),
    # -- checksums and checks ---------------------------------------------------------------------
    Mutant("no checksum of index.json", "_format",
           "    if checked and crc32c(", "    if False and crc32c(",
           "tests/contract/test_index_json.py"),
    Mutant("no checksum of records", "_entries",
           "crc32c(rows) != manifest.entries_crc[number]:",
           "crc32c(rows) == manifest.entries_crc[number]:", ERRORS),
    Mutant("no checksum of shard headers", "_shards",
           "        if crc32c(text) != info.header_crc:", "        if False:",
           "tests/reliability/test_mutations.py -k source"),
    Mutant("no checksum of tensors", "_shards",
           "                    if crc32c(raw) != part.crc:",
           "                    if False:", ERRORS),
    Mutant("no checksum of records in verify", "_examine",
           "        if end > count or extend_checksums((), 0, raw[first:end]) != [crc]:",
           "        if end > count:", "tests/reliability/test_verify.py"),
    Mutant("no size of shards at open", "_shards",
           "        if size != info.size:\n            raise CorruptStoreError(",
           "        if False:\n            raise CorruptStoreError(",
           "tests/reliability/test_reported.py"),
    Mutant("no rules for records", "_entries",
           "            if broken.any():", "            if False:",
           HOSTILE + " -k field_of_a_record"),
    Mutant("shapes are not compared with records", "_codec",
           "        fault = self.mismatch(tensors, n_tokens, embed_dim)", "        fault = None",
           HOSTILE + " -k field_of_a_record"),
    Mutant("any number of lists in JSON", "_format",
           "    if lists > free + len(data) // list_bytes:", "    if False:",
           HOSTILE + " -k test_index_json"),
    Mutant("index.json of any size", "_fileio",
           "            if size > limit:", "            if False:",
           HOSTILE + " -k test_index_json"),
    # -- files ------------------------------------------------------------------------------------
    Mutant("links are followed", "_syscalls",
           'getattr(os, "O_NOFOLLOW", 0)', "0", HOSTILE + " -k no_file"),
    Mutant("opening waits for the other end of a pipe", "_syscalls",
           'getattr(os, "O_NONBLOCK", 0)', "0", HOSTILE + " -k no_file"),
    Mutant("a lock that is no file is taken", "_fileio",
           "            if not stat.S_ISREG(again(calls.fstat, fd).st_mode):",
           "            if False:", HOSTILE + " -k no_file"),
    # -- locks ------------------------------------------------------------------------------------
    Mutant("no lock", "_fileio",
           "            again(lambda: calls.flock(fd))", "            pass", LOCKS),
    Mutant("a lock that was replaced is not noticed", "_fileio",
           "        if not is_ours:", "        if False:", "tests/reliability/test_processes.py"),
    Mutant("a child writes", "store",
           "        self._forked = True\n", "", LOCKS),
    Mutant("a child unlocks", "_fileio",
           "            os.close(self._lock_fd)\n            self._lock_fd = -1",
           "            import fcntl\n\n            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)\n"
           "            os.close(self._lock_fd)\n            self._lock_fd = -1", LOCKS),
    Mutant("no lock between threads", "_reading",
           "        self._lock = threading.RLock()\n        self._closed = False",
           "        import contextlib\n\n        self._lock = contextlib.nullcontext()\n"
           "        self._closed = False",
           "tests/contract/test_threads.py tests/reliability/test_processes.py"),
    # -- more than one store ----------------------------------------------------------------------
    Mutant("files of a session go before its name", "_sessions",
           "                parent.rename(name, dropped)\n                parent.sync()",
           "                parent.rename(name, dropped)", SESSIONS),
    Mutant("a session in use is dropped", "_sessions",
           "                    directory.lock()\n", "                    pass\n", SESSIONS),
    Mutant("a session that was made anew is dropped", "_sessions",
           "                if not _is_in_place(directory):", "                if False:",
           SESSIONS),
    Mutant("a session that was dropped is opened", "_sessions",
           "            if mode == \"r\" or _is_in_place(store._directory):",
           "            if True:", SESSIONS),
    Mutant("a store is left in a session that is dropped", "_sessions",
           "                directory.remove(INDEX_NAME)\n", "", SESSIONS),
    Mutant("a pack is written to", "opening",
           "            if SUMS_NAME in names:", "            if False:", "tests/test_packs.py"),
    Mutant("checksums of a pack are not looked at", "verify",
           "(*report.faults, *check_sums(directory))", "report.faults", "tests/test_packs.py"),
    Mutant("a list of checksums may be cut short", "_sums",
           "set(directory.names()) - listed", "set()", "tests/test_packs.py"),
    Mutant("an export inside the store", "archive",
           "        check_outside(store.path, path)\n", "", "tests/contract/test_archive.py"),
    Mutant("a reader goes on with another store", "_reading",
           "            if manifest.store_id != self._manifest.store_id:", "            if False:",
           "tests/test_packs.py"),
    Mutant("an entry that went during a search of several stores is found", "_finding",
           "        if self._removals != self.finder._signatures.removals:", "        if False:",
           "tests/test_layered_life.py -k goes_during"),
)  # fmt: skip


def place(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """Return the file of a mutant and its text; AssertionError unless the edit fits it once."""
    path = package / f"{mutant.file}.py"
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places in {path}"
    assert mutant.new != mutant.old, mutant.name
    return path, text


def killer(mutant: Mutant, copy: Path) -> str:
    """Return the name of a test that fails with a mutant and not without; empty if none does."""
    path, text = place(mutant, copy / "hybridmem")
    for group in re.findall(r"\S+(?: -k \S+)?", mutant.tests):
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            failed = _first_failure(group.split(), copy)
        finally:
            path.write_text(text)
        if failed and not _first_failure([failed], copy):
            return failed.rpartition("/")[2]
    return ""


def _first_failure(arguments: list[str], copy: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
         "--no-header", "--tb=no", *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.fspath(copy)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    return failed[1] if failed else ""


def run(names: str = "", until: float = float("inf")) -> dict[str, str]:
    """Return for each mutant the test that fails with it, empty if none does."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        skipped = shutil.ignore_patterns("__pycache__", "*.c")
        for part in ("hybridmem", "tests", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in MUTANTS:
            if names in mutant.name and time.monotonic() < until:
                found[mutant.name] = killer(mutant, copy)
                print(f"| {mutant.name} | {found[mutant.name] or 'SURVIVES'} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="", help="only those whose name holds this")
    found = run(parser.parse_args().names)
    survivors = [name for name, test in found.items() if not test]
    print(f"{len(found)} mutants, {len(survivors)} survive")
    if survivors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
