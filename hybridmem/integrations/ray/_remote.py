"""A copy of a partition where files are kept that outlive nodes: any URL that fsspec knows.

    <url>/cluster.json
    <url>/partition-0003/shards/shard_0000-<checksum>.safetensors
    <url>/partition-0003/commits/<how far it came>-<digest>-<hex>/entries.bin
    <url>/partition-0003/commits/<how far it came>-<digest>-<hex>/index.json    the last file

Replicas have files of one name that differ, so names tell what is in them, and nothing is replaced.
Files that only older commits need go when a newer one is whole.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridmem import opening
from hybridmem._entries import ENTRIES_NAME
from hybridmem._fileio import Buffer, Directory
from hybridmem._format import shard_name
from hybridmem._manifest import INDEX_NAME, Manifest, ShardInfo, read_manifest
from hybridmem.errors import StoreExistsError, StoreIOError, StoreNotFoundError
from hybridmem.integrations.ray._views import digest_of, encoded, mark_of

__all__ = ["abandon", "check_url", "claim", "download", "upload"]

_PIECE_BYTES = 8 << 20


def check_url(url: str) -> None:
    """Raise what is wrong with a URL, or that fsspec is missing."""
    if not isinstance(url, str):
        raise TypeError(f"remote: got {type(url).__name__}, want a URL")
    try:
        import fsspec
    except ImportError:
        raise ImportError("remote needs fsspec: pip install 'hybridmem[remote]'") from None
    fsspec.core.url_to_fs(url)


def claim(url: str, name: str, about: dict[str, Any]) -> None:
    """Write down of which cluster the copies are: with it and them it can be made again.

    Raises
    ------
    StoreExistsError
        If there are copies of another.
    """
    import fsspec

    with _named("copying to", url):
        fs, base = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()
        if fs.exists(f"{base}/{name}"):
            raise StoreExistsError(f"remote: {url} holds copies of a cluster; give another URL")
        fs.makedirs(base, exist_ok=True)
        fs.pipe_file(f"{base}/{name}", encoded(about))


def abandon(url: str, name: str) -> None:
    """Take back what `claim` has written, as far as that goes."""
    import fsspec

    with contextlib.suppress(StoreIOError), _named("removing from", url):
        fs, base = fsspec.core.url_to_fs(url)
        fs.rm_file(f"{base}/{name}")


@contextlib.contextmanager
def _named(what: str, url: str) -> Iterator[None]:
    """Whatever a file system of fsspec raises, it is an error of the store."""
    try:
        yield
    except (StoreExistsError, StoreNotFoundError):
        raise
    except Exception as error:  # each of them has its own
        raise StoreIOError(f"{what} {url}: {type(error).__name__}: {error}") from error


def upload(snapshot: Path, url: str) -> None:
    """Copy a snapshot, if there is none of the same entries; it is there whole or not at all."""
    import fsspec

    with _named("copying to", url), contextlib.closing(Directory(snapshot)) as directory:
        manifest = read_manifest(directory)
        far = "-".join(f"{part:020d}" for part in mark_of(manifest))
        with opening.open(snapshot, mode="r") as store:
            same = f"{far}-{digest_of(store):08x}"
        fs, base = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()
        newest = max(map(_name, _whole_commits(fs, base)), default="")
        if newest.startswith(same):
            return
        if newest > far:
            raise StoreIOError(
                "the copy there has come further than the partition, which has gone on from an "
                "older one: let repair() take the copy, or remove it"
            )
        commit = f"{same}-{secrets.token_hex(4)}"
        fs.makedirs(f"{base}/shards", exist_ok=True)
        fs.makedirs(f"{base}/commits/{commit}", exist_ok=True)
        there = {_name(one["name"]): one["size"] for one in fs.ls(f"{base}/shards", detail=True)}
        for shard in manifest.shards:
            if there.pop(_shard_name(shard), None) != shard.size:
                here = str(snapshot / shard_name(shard.number))
                fs.put_file(here, f"{base}/shards/{_shard_name(shard)}")
        for name in (ENTRIES_NAME, INDEX_NAME):
            fs.put_file(str(snapshot / name), f"{base}/commits/{commit}/{name}")
        commits = fs.ls(f"{base}/commits", detail=False)
        for old in commits:
            if _name(old) < commit:
                fs.rm(old, recursive=True)
        if max(map(_name, commits)) == commit:
            for name in there:
                fs.rm_file(f"{base}/shards/{name}")


def download(url: str) -> Iterator[tuple[str, Iterator[Buffer]]]:
    """Yield the names of the files of the last whole commit, and their pieces."""
    import fsspec

    with _named("fetching", url):
        fs, base = fsspec.core.url_to_fs(url)
        fs.invalidate_cache()
        whole = _whole_commits(fs, base)
        if not whole:
            raise StoreNotFoundError(f"no copy in {url}")
        commit = max(whole, key=_name)
        manifest = Manifest.decode(fs.cat_file(f"{commit}/{INDEX_NAME}"))
        for shard in manifest.shards:
            path = f"{base}/shards/{_shard_name(shard)}"
            yield shard_name(shard.number), _pieces(fs, path)
        for name in (ENTRIES_NAME, INDEX_NAME):
            yield name, _pieces(fs, f"{commit}/{name}")


def _whole_commits(fs: Any, base: str) -> list[str]:
    if not fs.exists(f"{base}/commits"):
        return []
    commits: list[str] = fs.ls(f"{base}/commits", detail=False)
    return [one for one in commits if fs.exists(f"{one}/{INDEX_NAME}")]


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _shard_name(shard: ShardInfo) -> str:
    stem, suffix = shard_name(shard.number).split(".")
    return f"{stem}-{shard.header_crc:08x}.{suffix}"


def _pieces(fs: Any, path: str) -> Iterator[Buffer]:
    with fs.open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
