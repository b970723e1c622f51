"""A copy of a partition where files are kept that outlive nodes: any URL that fsspec knows.

    <url>/partition-0003/shards/shard_0000.safetensors
    <url>/partition-0003/commits/<generation>/entries.bin
    <url>/partition-0003/commits/<generation>/index.json       the last file of a commit

Shards never change, so each is copied once. Files of older commits go when a newer one is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridmem._fileio import Buffer, Directory
from hybridmem._format import shard_number
from hybridmem._manifest import INDEX_NAME
from hybridmem.errors import StoreIOError, StoreNotFoundError

__all__ = ["check_url", "download", "upload"]

_PIECE_BYTES = 8 << 20


def check_url(url: str) -> None:
    """Raise what is wrong with a URL, or that fsspec is missing."""
    try:
        import fsspec
    except ImportError:
        raise ImportError("remote needs fsspec: pip install 'hybridmem[remote]'") from None
    fsspec.core.url_to_fs(url)


@contextlib.contextmanager
def _named(what: str, url: str) -> Iterator[None]:
    """Whatever a file system of fsspec raises, it is an error of the store."""
    try:
        yield
    except StoreNotFoundError:
        raise
    except Exception as error:  # each of them has its own
        raise StoreIOError(f"{what} {url}: {type(error).__name__}: {error}") from error


def upload(snapshot: Path, generation: int, url: str) -> None:
    """Copy a snapshot; it is there whole or not at all."""
    import fsspec

    with _named("copying to", url), contextlib.closing(Directory(snapshot)) as directory:
        fs, base = fsspec.core.url_to_fs(url)
        shards, commit = f"{base}/shards", f"{base}/commits/{generation:020d}"
        fs.makedirs(shards, exist_ok=True)
        fs.makedirs(commit, exist_ok=True)
        names = sorted(directory.names(), key=lambda name: name == INDEX_NAME)
        there = _sizes(fs, shards)
        for name in names:
            is_shard = shard_number(name) is not None
            if is_shard and there.get(name) == directory.size(name):
                continue
            fs.put_file(str(snapshot / name), f"{shards if is_shard else commit}/{name}")
        for old in fs.ls(f"{base}/commits", detail=False):
            if old.rstrip("/").rsplit("/", 1)[1] < f"{generation:020d}":
                fs.rm(old, recursive=True)
        for name in there.keys() - set(names):
            fs.rm_file(f"{shards}/{name}")


def download(url: str) -> Iterator[tuple[str, Iterator[Buffer]]]:
    """Yield the names of the files of the last whole commit, and their pieces."""
    import fsspec

    with _named("fetching", url):
        fs, base = fsspec.core.url_to_fs(url)
        commits = fs.ls(f"{base}/commits", detail=False) if fs.exists(f"{base}/commits") else []
        whole = sorted(one for one in commits if fs.exists(f"{one}/{INDEX_NAME}"))
        if not whole:
            raise StoreNotFoundError(f"no copy in {url}")
        files = [*_paths(fs, f"{base}/shards"), *_paths(fs, whole[-1])]
        for path in files:
            yield path.rsplit("/", 1)[1], _pieces(fs, path)


def _paths(fs: Any, path: str) -> list[str]:
    return [one for one in fs.ls(path, detail=False) if not one.endswith("/")]


def _sizes(fs: Any, path: str) -> dict[str, int]:
    return {one["name"].rsplit("/", 1)[1]: one["size"] for one in fs.ls(path, detail=True)}


def _pieces(fs: Any, path: str) -> Iterator[Buffer]:
    with fs.open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
