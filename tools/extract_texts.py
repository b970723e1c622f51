"""Cut the texts of bench/quality/texts out of Debian packages that carry public-domain books.

Every book's copyright has expired (the newest was printed in 1911); the excerpts leave out the
title pages, notes and licence text of the editions they come from. Run it only to make the texts
again::

    apt-get download r-cran-janeaustenr golang-github-jdkato-prose-dev \\
        golang-github-klauspost-compress-dev golang-1.19-src dict-devil
    apt-get source --download-only snappy          # its testdata directory has two of the books
    # unpack all of it (dpkg-deb -x, tar -x) below one directory, then
    python tools/extract_texts.py DIRECTORY bench/quality/texts
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

LENGTH = 40_000  # characters: a little more than 8,000 tokens of the densest text


@dataclass(frozen=True)
class Source:
    """One excerpt: the file it is in, and the words it starts with."""

    name: str
    pattern: str
    start: str
    verse: bool = False
    drop: str | None = None  # paragraphs that match are left out (figure captions, foot-notes)


SOURCES = (
    Source("alice", "**/alice29.txt", "Alice was beginning to get very tired"),
    Source("emma", "**/emma.rda", "Emma Woodhouse, handsome, clever"),
    Source(
        "tom_sawyer",
        "**/compress/testdata/Mark.Twain-Tom.Sawyer.txt",
        "ONE of the reasons why Tom's mind had drifted",
    ),
    Source(
        "opticks",
        "**/src/testdata/Isaac.Newton-Opticks.txt",
        "I took a black oblong stiff Paper",
        drop=r"^(\[Illustration|\[[A-Z]\]|_?Illustration)",
    ),
    Source(
        "red_headed_league",
        "**/prose/testdata/sherlock.txt",
        "I had called upon my friend, Mr. Sherlock",
    ),
    Source(
        "speckled_band",
        "**/prose/testdata/sherlock.txt",
        "On glancing over my notes of the seventy",
    ),
    Source("pride_prejudice", "**/prideprejudice.rda", "It is a truth universally acknowledged"),
    Source("persuasion", "**/persuasion.rda", "Sir Walter Elliot, of Kellynch Hall"),
    Source("sense_sensibility", "**/sensesensibility.rda", "The family of Dashwood had long been"),
    Source("mansfield_park", "**/mansfieldpark.rda", "About thirty years ago Miss Maria Ward"),
    Source("devils_dictionary", "**/devil.dict.dz", "CABBAGE, n."),
    Source("paradise_lost", "**/plrabn12.txt", "Of Man's first disobedience", verse=True),
)


def read_text(path: Path) -> str:
    """The text of a plain, gzip-compressed or R data file, one line of the book a line."""
    data = path.read_bytes()
    if path.suffix == ".dz":
        data = gzip.decompress(data)
    if path.suffix != ".rda":
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("latin-1")
    # R's XDR form of a character vector: each string is flags (type 9), length, bytes.
    unpack = bz2.decompress if data[:3] == b"BZh" else lzma.decompress
    data = unpack(data)
    lines = []
    for match in re.finditer(rb"\x00[\x04\x00][\x00-\xff]\x09(\x00\x00[\x00-\xff]{2})", data):
        size = int.from_bytes(match.group(1), "big")
        lines.append(data[match.end() : match.end() + size].decode("latin-1"))
    return "\n".join(lines)


def paragraphs(text: str, source: Source) -> list[str]:
    """Paragraphs with the printer's line breaks, italics marks and captions taken out."""
    text = text.replace("\r\n", "\n").replace("`", "'")
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = [" ".join(line.split()) for line in block.splitlines()]
        joined = ("\n" if source.verse else " ").join(line for line in lines if line)
        joined = re.sub(r"\[[A-Z]\]", "", joined.replace("_", ""))
        if joined and not (source.drop and re.match(source.drop, joined)):
            kept.append(joined)
    return kept


def excerpt(text: str, source: Source) -> str:
    """About ``LENGTH`` characters of whole paragraphs (or lines of verse) from ``start`` on."""
    at = text.find(source.start)
    if at < 0:
        raise ValueError(f"{source.name}: {source.start!r} is not in the file")
    out: list[str] = []
    size = 0
    for part in paragraphs(text[at : at + 2 * LENGTH], source):
        pieces = part.splitlines(keepends=True) if source.verse else [part]
        for piece in pieces:
            if size >= LENGTH:
                break
            out.append(piece)
            size += len(piece)
        if source.verse:
            out.append("\n")
    return ("".join(out) if source.verse else "\n\n".join(out)).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="directory of the unpacked packages")
    parser.add_argument("out", type=Path, help="directory to write the texts to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        path = next(args.packages.glob(source.pattern))
        text = excerpt(read_text(path), source)
        (args.out / f"{source.name}.txt").write_text(text, encoding="utf-8")
        print(f"{source.name}: {len(text)} characters of {path.name}")


if __name__ == "__main__":
    main()
