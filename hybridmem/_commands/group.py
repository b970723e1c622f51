"""What the commands share: the group, its exit codes, options, and how stores are opened."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

import hybridmem
from hybridmem import errors

__all__ = [
    "DAMAGED",
    "as_json",
    "commands",
    "emit",
    "fail",
    "json_option",
    "pread_option",
    "progress_bar",
    "read_store",
    "read_stores",
    "refuse",
    "store_argument",
    "stores_argument",
    "wants_json",
    "working",
    "write_store",
]

F = TypeVar("F", bound=Callable[..., Any])

FAILED, DAMAGED, NO_STORE, LOCKED, NO_SPACE = 1, 3, 4, 5, 6

_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.CorruptStoreError, DAMAGED),
    (errors.StoreNotFoundError, NO_STORE),
    (errors.StoreLockedError, LOCKED),
    (errors.StoreFullError, NO_SPACE),
    (errors.HybridMemError, FAILED),
)


class _Commands(click.Group):
    """A group that turns the errors of a store into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.HybridMemError as error:
            message = _in_a_shell(error)
            _report(ctx, error, message)
            click.echo(f"Error: {message}", err=True)
            sys.exit(next(code for kind, code in _CODES if isinstance(error, kind)))
        except click.ClickException as error:
            _report(ctx, error, error.format_message())
            raise


def _in_a_shell(error: errors.HybridMemError) -> str:
    """Return the message of an error, with another advice where that is for programs."""
    if isinstance(error, errors.SnapshotGoneError):
        return "a program that writes to the store compacted it meanwhile: run this again"
    return str(error)


def _report(ctx: click.Context, error: Exception, message: str) -> None:
    if ctx.meta.get(_JSON):
        click.echo(as_json({"error": {"type": type(error).__name__, "message": message}}))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the store is damaged, 4 there is no store, "
        "5 another process is writing to it, 6 no space is left."
    ),
)
@click.version_option(hybridmem.__version__, prog_name="hybridmem", message="%(prog)s %(version)s")
def commands() -> None:
    """Look at, check and tidy HybridMem stores: keys and values on disk that left a model's cache.

    STORE is the directory of a store. Commands that only look open it as a reader, beside a
    program that writes to it; the others need it for themselves.
    """


_JSON = "hybridmem.json"


def _remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_JSON] = value  # shared by all contexts of the call, so that errors know of it too
    return value


def wants_json() -> bool:
    """Whether --json was given."""
    return bool(click.get_current_context().meta.get(_JSON))


def json_option(command: F) -> F:
    """Give a command the option --json."""
    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_remember,
        help="Print one JSON object instead of text; sizes are bytes.",
    )(command)


def store_argument(command: F) -> F:
    """Give a command the argument STORE."""
    return click.argument("store", type=click.Path())(command)


def stores_argument(command: F) -> F:
    """Give a command the argument STORE..., one or several."""
    return click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=click.Path())(
        command
    )


def pread_option(command: F) -> F:
    """Give a command the option --pread."""
    return click.option(
        "--pread",
        "io",
        flag_value="pread",
        default="mmap",
        help="Read files instead of mapping them: for a store that something else may shorten.",
    )(command)


def read_store(path: str, io: str = "mmap") -> hybridmem.Store:
    """Open a store as a reader."""
    try:
        return hybridmem.open(path, mode="r", io=io)
    except errors.StoreNotFoundError:
        if not Path(path, "cluster.json").exists():
            raise
        raise errors.StoreNotFoundError(
            f"{path} holds partitions of a cluster, which are stores: name them, as in "
            f"{path}/partition-*"
        ) from None


@contextlib.contextmanager
def read_stores(paths: Sequence[str], io: str = "mmap") -> Iterator[hybridmem.Layered]:
    """Open one or several stores as readers that answer as one."""
    with contextlib.ExitStack() as opened:
        stores = [opened.enter_context(read_store(path, io)) for path in paths]
        try:
            memory = hybridmem.layered(stores)
        except ValueError as error:
            refuse(str(error))
        yield opened.enter_context(memory)


def write_store(path: str) -> hybridmem.Store:
    """Open a store as the one writer."""
    try:
        return hybridmem.open(path, mode="r+")
    except errors.StoreLockedError:
        raise errors.StoreLockedError(
            f"another program has {path} open for writing: wait until it closes it; commands that "
            "only look need not wait"
        ) from None
    except errors.ReadOnlyError:
        raise errors.ReadOnlyError(
            f"{path} is a memory pack, which does not change: make a store of it with `hybridmem "
            "snapshot`, and write to that"
        ) from None
    except errors.StoreIOError as error:
        why = error.__cause__
        if isinstance(why, OSError) and why.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise errors.StoreIOError(
                f"{path} cannot be written to: {why.strerror}; commands that only look can read it"
            ) from None
        raise


def as_json(value: Any) -> str:
    """Return a document as JSON text; an infinite or undefined number is null there."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def emit(document: Any, lines: Iterable[str]) -> None:
    """Print the document where --json was given, else the lines."""
    if wants_json():
        click.echo(as_json(document))
    else:
        for line in lines:
            click.echo(line)


def refuse(message: str) -> NoReturn:
    """End the command as wrongly used."""
    raise click.UsageError(message)


def fail(message: str) -> NoReturn:
    """End the command as failed."""
    raise click.ClickException(message)


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows progress on a terminal, once it has taken a second."""
    from tqdm import tqdm

    bar: Any = tqdm(
        desc=label, unit=" entries", delay=1, leave=False, disable=not sys.stderr.isatty()
    )
    with bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextlib.contextmanager
def working(label: str) -> Iterator[None]:
    """Show the time that goes by on a terminal, once it is a second, where no end is known."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    bar: Any = tqdm(desc=label, bar_format="{desc} {elapsed}", delay=1, leave=False)

    def tick() -> None:
        while not done.wait(0.25):
            bar.update()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        bar.close()
