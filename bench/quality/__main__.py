"""``python -m bench.quality`` measures retrieval on a real model and writes the tables.

Records, one JSON line a question and ranking, go to ``bench/results/quality``, captures (about 200
MB a document) to ``bench/results/captures``; neither is in git. With the same seed two runs differ
only by what another processor, BLAS or number of threads changes in the last bits.
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
    rankings = [r for r in all_rankings() if not args.only or r.name in args.only]
    if len(rankings) < len(args.only):
        raise SystemExit(f"--only: the rankings are {[r.name for r in all_rankings()]}")
    texts = CHOOSE if args.set == "choose" else REPORT
    names = list(texts)
    groups = [names[i : i + 4] for i in range(0, len(names), 4)]
    for number, group in enumerate(groups):
        if args.group is not None and number != args.group:
            continue
        stem = (
            f"{args.set}-{number}-q{args.query_tokens}-r{args.retrieved}-c{args.chunk}-s{args.sink}"
        )
        stem += f"-{args.label}" if args.label else ""
        path = args.results / "quality" / f"{stem}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        done = set()
        if path.exists():  # an interrupted run goes on, and a new ranking joins the others
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                done.add((record["document"], record["fact"], record["ranking"]))
        questions = [(name, number) for name in group for number in range(len(texts[name]))]
        missing = [r for r in rankings if any((*q, r.name) not in done for q in questions)]
        if not missing:
            continue
        evaluation = Evaluation(
            model,
            tokenizer,
            {n: texts[n] for n in group},
            np.mean(means, axis=0),
            captures,
            Options(
                query_tokens=args.query_tokens,
                retrieved=args.retrieved,
                chunk=args.chunk,
                sink=args.sink,
                seed=args.seed,
                rankings=missing,
            ),
        )
        with path.open("a", encoding="utf-8") as out:
            for records in evaluation.run(done):
                # in one write: whoever stops a run leaves whole questions behind
                out.write("".join(json.dumps(record) + "\n" for record in records))
                out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality",
        description="Retrieval on a real model: capture, ask, measure, and write the tables.",
    )
    parser.add_argument("what", nargs="?", choices=["all", "run", "tables"], default="all")
    parser.add_argument("--set", choices=["choose", "report"], default="report")
    parser.add_argument("--group", type=int, help="only these four documents of the set: 0, 1")
    parser.add_argument("--query-tokens", type=int, default=8)
    parser.add_argument("--retrieved", type=int, default=640, help="tokens")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of an entry: 16 to 128")
    parser.add_argument("--only", action="append", default=[], metavar="RANKING")
    parser.add_argument("--label", help="keep records and tables apart from those of other runs")
    parser.add_argument("--sink", type=int, default=4, help="first tokens that a cache keeps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: bench/results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables")
    args = parser.parse_args()
    if args.what != "tables":
        run(args)
    if args.what != "run":
        from .report import write_tables

        write_tables(args.results / "quality", args.out)


if __name__ == "__main__":
    main()
