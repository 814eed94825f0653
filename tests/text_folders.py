"""Small model folders with tokenizers in the published layouts, made on the spot."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.paths import REFS

# DeepSeek's names, with its flags: only the first two count as special.
DEEPSEEK_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
DEEPSEEK_TURNS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
        "<think>",
        "</think>",
    ),
)
DEEPSEEK_TEMPLATE = (REFS / "tiny_text" / "chat_template.jinja").read_text()
KIMI_NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>", 22: "<think>", 23: "</think>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
KIMI_TEMPLATE = """\
{%- macro content_of(m) -%}
    {%- if m['content'] is string -%}{{ m['content'] }}
    {%- elif m['content'] -%}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
    {%- if m['role'] == 'user' -%}<|im_user|>
    {%- elif m['role'] == 'assistant' -%}<|im_assistant|>
    {%- else -%}<|im_system|>
    {%- endif -%}
    {{ m.get('name') or m['role'] }}<|im_middle|>
    {%- if m['role'] == 'tool' -%}{{ '## Return of ' ~ m['tool_call_id'] ~ '\\n' }}{%- endif -%}
    {{ content_of(m) }}
    {%- if m['tool_calls'] -%}<|tool_calls_section_begin|>
        {%- for call in m['tool_calls'] -%}
            <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
            {{- call['function']['arguments'] }}<|tool_call_end|>
        {%- endfor -%}<|tool_calls_section_end|>
    {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


@cache
def tokenizer_json() -> str:
    """A tokenizer.json in DeepSeek's layout, of 512 tokens, trained on a README of this repository."""
    return (REFS / "tiny_text" / "tokenizer.json").read_text()


def deepseek(folder: Path, **settings: Any) -> Path:
    """A folder in DeepSeek's layout, of 512 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    names = {"bos_token": {"content": DEEPSEEK_SPECIAL[0]}, "eos_token": {"content": DEEPSEEK_SPECIAL[1]}}
    write(
        folder / "tokenizer_config.json",
        {**names, "add_bos_token": True, "chat_template": DEEPSEEK_TEMPLATE, **settings},
    )
    return folder


def ranks(merges: int = 0) -> list[bytes]:
    """The 256 bytes, and common pieces of English and Chinese that byte pairs lead up to."""
    tokens = [bytes([i]) for i in range(256)]
    for word in (" the", "ing", "你好", "世界", "12", "\n\n", "  ", "'s", "ed", " a"):
        for end in range(2, len(word.encode()) + 1):
            if word.encode()[:end] not in tokens:
                tokens.append(word.encode()[:end])
    return tokens[: 256 + merges]


def kimi(folder: Path, merges: int = 0, **settings: Any) -> Path:
    """A folder in Kimi's layout: 256 bytes, some merges, 256 control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = ranks(merges)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(tokens) + i): {"content": n, "special": n not in ("<think>", "</think>")} for i, n in KIMI_NAMES.items()
    }
    write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
        }
        | settings,
    )
    (folder / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    write(folder / "generation_config.json", {"eos_token_id": len(tokens) + 2})
    return folder
