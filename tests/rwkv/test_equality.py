"""With everything retrieved, every position equals one upstream prefill that keeps all rows."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridmem.integrations import rwkv_x

from .helpers import (
    EVERYTHING,
    MARKS,
    TOLERANCE,
    largest,
    load,
    reference,
    run,
    text,
    torch,
)

pytestmark = MARKS


def test_prefill_then_decode(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(300)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=16) as memory:
        logits, _ = run(model, tokens, [250] + [1] * 50)
        assert len(memory.store) > 20
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


@pytest.mark.parametrize(
    "pieces",
    [[240], [150, 90], [1, 40, 1, 100, 98], [3, 1, 1, 1, 234], [48] * 5],
    ids=lambda pieces: "+".join(map(str, pieces)),
)
def test_one_prompt_in_pieces(checkpoint: Path, tmp_path: Path, pieces: list[int]) -> None:
    tokens = text(240, seed=2)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8):
        logits, _ = run(model, tokens, pieces)
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


def test_first_prefill_is_bit_for_bit_upstream(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(100)
    expected, _ = run(load(checkpoint, 8), tokens, [100])
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem"):
        logits, _ = run(model, tokens, [100])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("first", [1, 2, 7, 8, 9, 64])
def test_decode_from_the_first_token_on(checkpoint: Path, tmp_path: Path, first: int) -> None:
    tokens = text(first + 60, seed=first)
    model = load(checkpoint, 4)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8):
        logits, _ = run(model, tokens, [first] + [1] * 60)
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


@pytest.mark.parametrize("search_every", [1, 3, 64])
def test_no_row_falls_between_two_searches(
    checkpoint: Path, tmp_path: Path, search_every: int
) -> None:
    tokens = text(150)
    model = load(checkpoint, 4)
    options = {"top_k": EVERYTHING, "chunk_tokens": 5, "search_every": search_every}
    with rwkv_x.attach(model, tmp_path / "mem", **options):
        logits, _ = run(model, tokens, [20] + [1] * 50 + [40] + [1] * 40)
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


def test_bfloat16_to_its_own_rounding(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(200)
    expected = reference(checkpoint, tokens, precision="bf16").float()
    rounding = largest(expected - reference(checkpoint, tokens))
    model = load(checkpoint, 8, precision="bf16")
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        logits, _ = run(model, tokens, [100, 50] + [1] * 50)
        assert memory.store.config.kv_dtype == "bfloat16"
    assert largest(logits.float() - expected) < rounding


def test_int8_store_is_close(
    checkpoint: Path, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    tokens = text(200)
    model = load(checkpoint, 8)
    options = {"top_k": EVERYTHING, "chunk_tokens": 16, "quantize_stored": True}
    with rwkv_x.attach(model, tmp_path / "mem", **options):
        logits, _ = run(model, tokens, [100, 50] + [1] * 50)
    error = (logits - reference(checkpoint, tokens)).abs()
    record_property("int8_logits_mean_error", float(error.mean()))
    assert 1e-4 < float(error.max()) < 1.0
    assert float(error.mean()) < 0.1


_OTHER_PROCESS = """
import sys
import numpy as np
from rwkv.helpers import load, run
from pathlib import Path
from hybridmem.integrations import rwkv_x

checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
model = load(checkpoint, 8)
with rwkv_x.attach(model, folder / "mem", top_k=10**6, chunk_tokens=8) as memory:
    state = memory.load(folder / "conversation.pt")
    tokens = np.load(folder / "tokens.npy").tolist()
    logits, state = run(model, tokens, [1] * 20 + [len(tokens) - 30] + [1] * 10, state)
    np.save(folder / "logits.npy", logits.numpy())
"""


def test_another_process_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(260)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state = run(model, tokens[:150], [100, 20] + [1] * 30)
        memory.save(state, tmp_path / "conversation.pt")
        run(model, text(90, seed=9), [30] * 3)  # another conversation fills the same store
    np.save(tmp_path / "tokens.npy", np.array(tokens[150:]))
    subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, checkpoint, tmp_path],
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    logits = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert largest(logits - reference(checkpoint, tokens)[150:]) < TOLERANCE


def test_interleaved_branches_do_not_see_each_other(checkpoint: Path, tmp_path: Path) -> None:
    root, left, right = text(90), text(60, seed=3), text(60, seed=4)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state_left = run(model, root, [60] + [1] * 30)
        before = len(memory.store)
        state_right = copy.deepcopy(state_left)
        assert len(memory.store) == before  # a branch copies no keys and values
        out: dict[str, list[object]] = {"left": [], "right": []}
        for at in range(0, 60, 10):
            pieces = [10] if at % 20 else [1] * 10
            logits, state_left = run(model, left[at : at + 10], pieces, state_left)
            out["left"].append(logits)
            logits, state_right = run(model, right[at : at + 10], pieces, state_right)
            out["right"].append(logits)
    for name, branch in (("left", left), ("right", right)):
        expected = reference(checkpoint, root + branch)[90:]
        assert largest(torch.cat(out[name]) - expected) < TOLERANCE
