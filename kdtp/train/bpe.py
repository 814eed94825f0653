"""A byte-level BPE for program text, trained with `tokenizers` and stored as DeepSeek stores its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kdtp import files

BEGIN, END, UNKNOWN, PAD = CONTROLS = ("[BOS]", "[EOS]", "[UNK]", "[PAD]")
LEAST, MOST = 256 + len(CONTROLS), 1 << 16  # tokens: all bytes; ids of texts are kept in 16 bits
# A line break goes with the indentation behind it, a word with the space before it; numbers come in at most 3 digits.
_SPLIT = r"[\r\n]+[ \t]*| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+"


def train(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json of `vocab_size` tokens; the control tokens are the first ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    files.write(folder / "tokenizer.json", tokenizer.to_str())
    settings = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "pad_token": PAD, "add_bos_token": True}
    files.write(folder / "tokenizer_config.json", json.dumps(settings, indent=1))
