"""``python -m bench.quality run`` captures, asks and measures, ``tables`` reports.

``run`` writes one JSON line a question and ranking to ``bench/results/quality/``; captures are
kept below ``bench/results/captures`` (about 200 MB a document, not in git). With fixed seeds two
runs differ only by what another BLAS or thread count changes in the last bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"


def run(args: argparse.Namespace) -> None:
    """Ask every question of a set and write the records."""
    import numpy as np
    import torch

    from . import smollm2
    from .documents import build, captured, load_queries
    from .evaluate import Evaluation, Options
    from .facts import CHOOSE, REPORT
    from .rankings import all_rankings, grouped

    torch.set_num_threads(args.threads)
    model, tokenizer = smollm2.load()
    captures = args.results / "captures"
    # A mean query of other text: of the texts to choose with, where no reported question is.
    means = []
    for name, facts in CHOOSE.items():
        path = captured(build(name, facts, tokenizer, args.seed), model, captures)
        means.append([grouped(layer).mean(0) for layer in load_queries(path)])
    options = Options(
        query_tokens=args.query_tokens,
        retrieved=args.retrieved,
        chunk=args.chunk,
        sink=args.sink,
        seed=args.seed,
        rankings=all_rankings(),
    )
    texts = CHOOSE if args.set == "choose" else REPORT
    names = list(texts)
    groups = [names[i : i + 4] for i in range(0, len(names), 4)]
    for number, group in enumerate(groups):
        if args.group is not None and number != args.group:
            continue
        stem = (
            f"{args.set}-{number}-q{args.query_tokens}-r{args.retrieved}-c{args.chunk}-s{args.sink}"
        )
        path = args.results / "quality" / f"{stem}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        evaluation = Evaluation(
            model,
            tokenizer,
            {n: texts[n] for n in group},
            np.mean(means, axis=0),
            captures,
            options,
        )
        with path.open("w", encoding="utf-8") as out:
            for record in evaluation.run():
                out.write(json.dumps(record) + "\n")
                out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: bench/results")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="ask every question of a set (about an hour of one core)")
    one.add_argument("--set", choices=["choose", "report"], default="report")
    one.add_argument("--group", type=int, help="only these four documents of the set: 0, 1")
    one.add_argument("--query-tokens", type=int, default=8)
    one.add_argument("--retrieved", type=int, default=640, help="tokens")
    one.add_argument("--chunk", type=int, default=64, help="tokens of an entry: 16, 32, 64, 128")
    one.add_argument("--sink", type=int, default=0, help="first tokens that stay in the cache")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--threads", type=int, default=1)
    two = commands.add_parser("tables", help="CSV and markdown of the records")
    two.add_argument("--out", type=Path, default=Path(__file__).parent / "tables")
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    else:
        from .report import write_tables

        write_tables(args.results / "quality", args.out)


if __name__ == "__main__":
    main()
