"""Time a tokenizer on a megabyte of text, common and nasty, and its text stream token by token.

    python scripts/bench_text.py DIR

DIR: a folder with tokenizer files. Seconds are processor time of one thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.text.stream import Detokenizer  # noqa: E402
from kdtp.text.tokenizer import load  # noqa: E402

MEGABYTE = 1 << 20
LONG = {
    "prose": "The quick brown fox, don't you know? 12345! 你好世界\n\n" * 20_000,
    "one word": "a" * MEGABYTE,
    "spaces": " " * MEGABYTE,
    "line ends": "\r\n" * (MEGABYTE // 2),
    "signs": "<|" * (MEGABYTE // 2),
    "digits": "7" * MEGABYTE,
    "emoji": "👩‍👧" * (MEGABYTE // 12),
    "Han": "汉" * (MEGABYTE // 3),
    "control names": "<｜User｜><|im_end|>" * (MEGABYTE // 24),
}


def main(folder: str) -> int:
    """Print the table."""
    started = time.process_time()
    tokenizer = load(folder)
    print(f"{folder}: {tokenizer.vocab_size} tokens, loaded in {time.process_time() - started:.2f} s\n")
    print("| text | MB | tokens | encode s | stream us/token |")
    print("|---|---|---|---|---|")
    for name, text in LONG.items():
        started = time.process_time()
        ids = tokenizer.encode(text)
        encoded = time.process_time()
        stream = Detokenizer(tokenizer)
        back = "".join([stream.push([token]) for token in ids])
        each = (time.process_time() - encoded) / len(ids) * 1e6
        assert back == text, name
        print(f"| {name} | {len(text.encode()) / 1e6:.2f} | {len(ids)} | {encoded - started:.2f} | {each:.2f} |")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        sys.exit(main(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"bench_text: {error}")
