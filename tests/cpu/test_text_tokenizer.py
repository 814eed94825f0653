"""Tokenizers against the libraries they stand on, on any text; what they refuse."""

from __future__ import annotations

import base64
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.text import kimi, template
from kdtp.text.files import TextError
from kdtp.text.marks import Marks
from kdtp.text.tokenizer import Part, Tokenizer, load
from tests import text_folders as folders

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)

TRICKY = (
    "don't DON'T we'll I'd you're 'tis it'S",
    "你好世界hello世界 Hello世界abc",
    "1234567 12 3,456.78 ١٢٣٤ ⅷ²",
    "a\n\nb\r\n  c \t\n d   ",
    " \n \n\n  x",
    "naïve café Ünïcode ΑΒΓδ ǅungla ʰe ー",
    "😀👨‍👩‍👧 🇩🇪 é é \u200d\ufeff",
    "{'a': [1, 2]} <|im_end|> [EOS] // -- !!!\n",
    "\x00\x1c\x85\u2028\u3000",
    "",
)
texts = st.text(max_size=60) | st.sampled_from(TRICKY) | st.lists(st.sampled_from(TRICKY)).map("".join)
MERGES = 20


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Tokenizer:
    return load(folders.deepseek(tmp_path_factory.mktemp("deepseek")), 512)


@pytest.fixture(scope="module")
def kimi_like(tmp_path_factory) -> Tokenizer:
    return load(folders.kimi(tmp_path_factory.mktemp("kimi"), MERGES))


# ---------------------------------------------------------------- tokenizer.json


@cache
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(folders.tokenizer_json())


@PROPERTY
@given(text=texts)
def test_plain_text_as_the_library_encodes_it(deepseek, text):
    ids = deepseek.encode(text)
    if not any(name in text for name in deepseek.controls):
        assert ids == library().encode(text, add_special_tokens=False).ids
    assert deepseek.decode(ids) == text == library().decode(ids, skip_special_tokens=True)


PIECES = [*folders.DEEPSEEK_SPECIAL, *folders.DEEPSEEK_TURNS, "a b", " ", "\n", "你", "'s", "<", "think>"]


@PROPERTY
@given(text=st.lists(st.sampled_from(PIECES)).map("".join))
def test_text_with_control_tokens_as_the_library_encodes_it(deepseek, text):
    ids = deepseek.encode_parts(deepseek.split(text))
    assert ids == library().encode(text, add_special_tokens=False).ids
    assert deepseek.decode(ids) == library().decode(ids, skip_special_tokens=True)
    # The same text from a user has none of them.
    plain = deepseek.encode(text)
    assert not {*plain} & {*deepseek.controls.values()} and deepseek.decode(plain) == text


@PROPERTY
@given(ids=st.lists(st.integers(0, 511)))
def test_any_ids_decode_as_the_library_decodes_them(deepseek, ids):
    assert deepseek.decode(ids) == library().decode(ids, skip_special_tokens=True)


def test_every_control_token(deepseek, kimi_like):
    for tokenizer, special in ((deepseek, folders.DEEPSEEK_SPECIAL), (kimi_like, ())):
        for name, token in tokenizer.controls.items():
            assert tokenizer.split(f"x{name}y") == ["x", token, "y"]
            assert tokenizer.encode_parts([token]) == [token] and tokenizer.token_bytes(token) == name.encode()
            hidden = name in special or (not special and "think" not in name)
            assert tokenizer.decode([token]) == ("" if hidden else name), name
            assert token not in tokenizer.encode(name) and tokenizer.decode(tokenizer.encode(name)) == name


def test_what_the_files_say(deepseek, kimi_like):
    assert deepseek.vocab_size == 512 and deepseek.begin == (0,) and deepseek.stop_ids == {1}
    assert {*deepseek.controls} == {*folders.DEEPSEEK_SPECIAL, *folders.DEEPSEEK_TURNS} and deepseek.hidden == {0, 1}
    base = 256 + MERGES
    assert kimi_like.vocab_size == base + 256 and kimi_like.begin == ()
    assert kimi_like.stop_ids == {base + 1, base + 2}  # the tokenizer's [EOS], and <|im_end|> of generation_config
    assert kimi_like.controls[f"<|reserved_token_{base + 5}|>"] == base + 5
    assert deepseek.token_bytes(512) == kimi_like.token_bytes(base + 256) == b""


def changed(folder: Path, change, name: str = "tokenizer.json") -> Path:
    """A folder in DeepSeek's layout with one of its files changed."""
    file = folders.deepseek(folder) / name
    value = json.loads(file.read_text()) if file.exists() else {}
    change(value)
    folders.write(file, value)
    return folder


def test_a_control_token_that_is_also_in_the_vocabulary(tmp_path):
    """It is reached by no merge, nor as a whole word, which ignore_merges would allow."""

    def change(file):
        model = file["model"]
        model["ignore_merges"] = True
        model["vocab"]["<th"] = 512
        model["vocab"]["<thi"] = 513
        model["merges"] += [["<", "th"], ["<th", "i"]]
        file["added_tokens"].append(dict(file["added_tokens"][0], id=513, content="<thi"))
        file["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "use_regex": False,
            "trim_offsets": True,
        }

    folder = changed(tmp_path, change)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    assert library.encode("<thi").ids == [513]  # the library's own way to switch specials off would let it through
    tokenizer = load(folder)
    assert 513 not in tokenizer.encode("<thi") and tokenizer.decode(tokenizer.encode("<thi")) == "<thi"
    assert tokenizer.encode("<th") == [512]


def test_added_tokens_that_are_text_keep_their_ids(tmp_path):
    def change(file):
        plain = {"special": False, "normalized": True, "lstrip": False, "rstrip": False, "single_word": False}
        file["added_tokens"] += [{"id": 512, "content": "☃", **plain}, {"id": 513, "content": "    ", **plain}]

    tokenizer = load(changed(tmp_path, change))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a☃b ☃", "x     y", "    "):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert {512, 513} & {*tokenizer.encode("☃    ")} == {512, 513} and not {"☃", "    "} & {*tokenizer.controls}


def test_texts_side_by_side_are_one(deepseek, kimi_like):
    for tokenizer in (deepseek, kimi_like):
        end = tokenizer.roles["eos_token"]
        parts: list[Part] = ["", "kd", "tp", "", tokenizer.controls[end], "你", "好", " the"]
        assert tokenizer.encode_parts(parts) == tokenizer.encode_parts(tokenizer.split(f"kdtp{end}你好 the"))


def test_of_two_names_at_one_place_the_longer_counts(tmp_path):
    def change(file):
        file["added_tokens"].append(dict(file["added_tokens"][-1], id=512, content="<think"))

    tokenizer = load(changed(tmp_path, change))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<think><think <thinker"
    assert tokenizer.split(text) == [510, 512, " ", 512, "er"]
    assert tokenizer.encode_parts(tokenizer.split(text)) == library.encode(text, add_special_tokens=False).ids
    assert Marks(tokenizer.controls).parts(Marks(tokenizer.controls).put(text)) != tokenizer.split(text)  # two secrets
    marks = Marks(tokenizer.controls)
    assert marks.parts(marks.put(text)) == tokenizer.split(text) and marks.show(marks.put(text)) == text


def test_spaces_that_a_control_token_swallows(tmp_path):
    def change(file):
        for entry in file["added_tokens"]:
            if entry["content"] == "<think>":
                entry["lstrip"] = entry["rstrip"] = True

    tokenizer = load(changed(tmp_path, change))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "a  <think> \n b<think><think>  </think> c"
    assert tokenizer.encode_parts(tokenizer.split(text)) == library.encode(text, add_special_tokens=False).ids


def test_begin_from_the_post_processor(tmp_path):
    def change(file):
        special = {"SpecialToken": {"id": folders.DEEPSEEK_SPECIAL[0], "type_id": 0}}
        template = {"type": "TemplateProcessing", "single": [special, {"Sequence": {"id": "A", "type_id": 0}}]}
        file["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}

    folder = changed(tmp_path, change)
    assert load(folder).begin == (0,)
    changed(tmp_path, change)
    folders.write(folder / "tokenizer_config.json", {})
    assert load(folder).begin == (0,)
    folders.write(folder / "tokenizer_config.json", {"add_bos_token": False})
    assert load(folder).begin == ()


# ---------------------------------------------------------------- tiktoken.model

# The published pat_str in one piece.
PUBLISHED = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def bpe() -> tiktoken.Encoding:
    """Of the same ranks and control tokens as `kimi_like`."""
    ranks = {token: rank for rank, token in enumerate(folders.ranks(MERGES))}
    special = {folders.KIMI_NAMES.get(i, f"<|reserved_token_{276 + i}|>"): 276 + i for i in range(256)}
    return tiktoken.Encoding("test", pat_str=PUBLISHED, mergeable_ranks=ranks, special_tokens=special)


@PROPERTY
@given(text=texts)
def test_plain_text_as_tiktoken_encodes_it(kimi_like, text):
    ids = kimi_like.encode(text)
    assert ids == bpe().encode_ordinary(text) and kimi_like.decode(ids) == text


@PROPERTY
@given(
    text=st.lists(st.sampled_from([*folders.KIMI_NAMES.values(), "a b", " ", "\n", "你好", "[", "EOS]"])).map("".join)
)
def test_text_with_control_tokens_as_tiktoken_encodes_it(kimi_like, text):
    own = bpe().encode(text, allowed_special="all")
    assert kimi_like.encode_parts(kimi_like.split(text)) == own
    assert not {*kimi_like.encode(text)} & {*kimi_like.controls.values()}


@PROPERTY
@given(text=texts)
def test_the_pattern_by_another_engine(kimi_like, text):
    """Python's regex module knows the same syntax (class intersections, Han)."""
    pieces = regex.findall(PUBLISHED, text, regex.V1)
    assert "".join(pieces) == text
    assert kimi_like.encode(text) == [i for piece in pieces for i in bpe()._encode_single_piece(piece)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("don't DON'T we'll", ["don't", " DON'T", " we'll"]),
        ("你好hello世界", ["你好", "hello", "世界"]),
        ("1234567", ["123", "456", "7"]),
        ("HelloWorld CamelCASE", ["Hello", "World", " Camel", "CASE"]),
        ("a\n\n  b", ["a", "\n\n", " ", " b"]),
        ("x!!!\n\ny", ["x", "!!!\n\n", "y"]),
        ("   z  ", ["  ", " z", "  "]),
    ],
)
def test_the_pattern_on_tricky_texts(text, pieces):
    assert regex.findall(kimi.PATTERN, text, regex.V1) == pieces and kimi.PATTERN == PUBLISHED


def published_pieces(text: str, piece: int, run: int) -> list[str]:
    """The published class's cuts, character by character."""
    found = []
    for begin in range(0, len(text), piece):
        part = text[begin : begin + piece]
        count, start = 0, 0
        for i, character in enumerate(part):
            same = i > 0 and character.isspace() == part[i - 1].isspace()
            count = count + 1 if same else 1
            if count > run:
                found.append(part[start:i])
                start, count = i, 1
        found.append(part[start:])
    return found


@PROPERTY
@given(text=st.text(alphabet="ab \n", max_size=80), piece=st.integers(1, 30), run=st.integers(1, 9))
def test_long_texts_are_cut_where_the_published_class_cuts_them(text, piece, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi, "LONGEST_PIECE", piece)
        patch.setattr(kimi, "LONGEST_RUN", run)
        places = [0, *kimi.cuts(text), len(text)]
        assert places == sorted(places)
        pieces = [text[a:b] for a, b in pairwise(places)]
        assert pieces == (published_pieces(text, piece, run) or [""])


@PROPERTY
@given(
    text=st.lists(st.sampled_from(["[EOS]", "<|im_end|>", "ab", " ", "\n\n", "你好", "12"]), max_size=30).map("".join)
)
def test_cuts_are_counted_over_texts_and_control_tokens(kimi_like, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi, "LONGEST_PIECE", 1 << 30)
        patch.setattr(kimi, "LONGEST_RUN", 8)
        pieces = published_pieces(text, 1 << 30, 8)
        whole = all(sum(p.count(name) for p in pieces) == text.count(name) for name in ("[EOS]", "<|im_end|>"))
        ids = kimi_like.encode_parts(kimi_like.split(text))
        if whole:  # the published class would cut a control token in two
            assert ids == [i for piece in pieces for i in bpe().encode(piece, allowed_special="all")]
        assert kimi_like.decode([i for i in ids if i < 256 + MERGES]) == text.replace("[EOS]", "").replace(
            "<|im_end|>", ""
        )


def test_long_texts_of_full_length(kimi_like):
    text = "x" * 30_000 + " " * 60_000 + "word " * 70_000 + "你" * 30_000
    pieces = published_pieces(text, 400_000, 25_000)
    assert len(pieces) == 6
    assert kimi_like.encode(text) == [i for piece in pieces for i in bpe().encode_ordinary(piece)]


def test_spaces_are_the_same_characters_for_both_ways_to_ask():
    everything = "".join(map(chr, (i for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000)))
    assert [c for c in everything if c.isspace()] == list(
        kimi._RUN.sub(lambda m: "" if m[0].strip() else m[0], everything)
    )


# ---------------------------------------------------------------- refusals


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


BYTES = [line(bytes([i]), i) for i in range(256)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*BYTES, b"!!! 256\n"], "line 257: b'!!! 256': base64: "),
        ([*BYTES, b"YWI 256\n"], "line 257: b'YWI 256': base64: "),
        ([*BYTES, b"YWI=\n"], "line 257: b'YWI=': must be base64 of a token, a space and its rank"),
        ([*BYTES, b"YWI= -1\n"], "must be base64 of a token, a space and its rank"),
        ([*BYTES, b" 256\n"], "must be base64 of a token, a space and its rank"),
        ([*BYTES, line(b"ab", 256), line(b"cd", 256)], "line 258: rank 256 is also in line 257"),
        ([*BYTES, line(b"ab", 256), line(b"ab", 257)], "line 258: token b'ab' is also in line 257"),
        ([*BYTES, line(b"ab", 300)], "257 tokens, but none of rank 256"),
        ([*BYTES[:7], *BYTES[8:]], "255 tokens, but none of rank 7"),
        ([line(bytes([i]), i) for i in range(255)], "no token for the byte 0xff"),
        ([], "no token for the byte 0x00"),
    ],
)
def test_broken_ranks(tmp_path, lines, words):
    folder = folders.kimi(tmp_path)
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    with pytest.raises(TextError) as error:
        load(folder)
    assert words in str(error.value) and "tiktoken.model" in str(error.value)


def test_empty_lines_and_other_line_ends(tmp_path):
    folder = folders.kimi(tmp_path)
    (folder / "tiktoken.model").write_bytes(b"".join(BYTES).replace(b"\n", b"\r\n") + b"\n\n")
    assert load(folder).vocab_size == 512


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is 'QWenTokenizer'; only TikTokenTokenizer"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder: must be an object"),
        ({"added_tokens_decoder": {"256": "x"}}, "added_tokens_decoder['256'] = 'x': must be an object"),
        ({"added_tokens_decoder": {"255": {"content": "x"}}}, "must be an id of 256..511"),
        ({"added_tokens_decoder": {"512": {"content": "x"}}}, "must be an id of 256..511"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "must be an id of 256..511"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "must be an id of 256..511"),
        (
            {"added_tokens_decoder": {"300": {"content": "x"}, "301": {"content": "x"}}},
            "'x' names both token 300 and token 301",
        ),
        ({"eos_token": "<no>"}, "eos_token = '<no>': the tokenizer has no such token"),
        ({"eos_token": 5}, "eos_token = 5: must be a token's name"),
        ({"add_bos_token": True, "bos_token": None}, "add_bos_token is set, but there is no bos_token"),
    ],
)
def test_bad_settings(tmp_path, settings_, words):
    with pytest.raises(TextError) as error:
        load(folders.kimi(tmp_path, **settings_))
    assert words in str(error.value)


def _append(entry):
    return lambda file: file["added_tokens"].append(entry)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["model"].update(type="Unigram"), "model.type = 'Unigram': must be BPE"),
        (lambda f: f.pop("model"), "model.type = None: must be BPE"),
        (lambda f: f["model"].pop("merges"), "must have a vocab object and a list of merges"),
        (lambda f: f.update(decoder={"type": "Metaspace"}), "decoder = 'Metaspace': must be ByteLevel"),
        (lambda f: f["model"]["vocab"].update(zz=-1), "model.vocab['zz'] = -1: must be a token id"),
        (lambda f: f["model"]["vocab"].update(zz=70), "both have id 70"),
        (_append({"id": 1, "content": "<x>"}), "'<x>' has id 1, which is '<｜end▁of▁sentence｜>'"),
        (_append({"id": 600, "content": "<think>"}), "'<think>' has id 600 and id 510"),
        (_append({"id": True, "content": "<x>"}), "must have an id and its content"),
        (_append("x"), "must have an id and its content"),
        (_append({"id": 600, "content": "<x>", "single_word": True}), "single_word is not supported"),
        (lambda f: f["model"]["merges"].append(["zq", "zq"]), "tokenizer.json: "),
        (lambda f: f.update(pre_tokenizer={"type": "Magic"}), "tokenizer.json: "),
        (lambda f: f["model"].update(merges=[1]), "model.merges[0] = 1: must be two tokens"),
        (lambda f: f["model"].update(merges=["a"]), "model.merges[0] = 'a': must be two tokens"),
        (lambda f: f["model"].update(vocab={}), "must have a vocab object and a list of merges"),
        (lambda f: f.update(added_tokens=5), "added_tokens = 5: must be a list"),
        (lambda f: f.update(post_processor=5), "post_processor = 5: is none that is known"),
        (lambda f: f.update(post_processor={"single": [{"SpecialToken": {"id": []}}]}), "[] is no added token"),
    ],
)
def test_bad_tokenizer_json(tmp_path, change, words):
    with pytest.raises(TextError) as error:
        load(changed(tmp_path, change))
    assert words in str(error.value)


@pytest.mark.parametrize("value", ["x", [1, "2"], -1, True, 1.5, {"a": 1}])
def test_bad_end_ids(tmp_path, value):
    folder = changed(tmp_path, lambda file: file.update(eos_token_id=value), "generation_config.json")
    with pytest.raises(
        TextError, match=r"generation_config.json: eos_token_id = .*: must be a token id, or a list of them"
    ):
        load(folder)


def test_end_ids_of_all_files(tmp_path):
    changed(tmp_path, lambda file: file.update(eos_token_id=[5, 6]), "generation_config.json")
    changed(tmp_path, lambda file: file.update(eos_token_id=7, text_config={"eos_token_id": 8}), "config.json")
    assert load(tmp_path).stop_ids == {1, 5, 6, 7, 8}
    changed(tmp_path, lambda file: file.update(eos_token_id=512), "config.json")
    with pytest.raises(TextError, match=r"config.json: eos_token_id = 512: must be below 512"):
        load(tmp_path, 512)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_files_that_are_no_json(tmp_path, name, content):
    (folders.deepseek(tmp_path) / name).write_bytes(content)
    with pytest.raises(TextError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_have_no_end(tmp_path, name):
    path = folders.deepseek(tmp_path) / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    with pytest.raises(TextError, match=f"{name}: want a regular file, found a device or pipe"):
        template.load(load(tmp_path))
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(TextError, match=f"{name}: 1073741824 bytes: must be at most"):
        template.load(load(tmp_path))


def test_a_regular_expression_without_end(tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load(changed(tmp_path, lambda f: f.update(pre_tokenizer=split)))
    with pytest.raises(TextError, match=r"tokenizer.json: Onig: Regex search error"):
        tokenizer.encode("a" * 40 + "b")


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(TextError, match=r"no tokenizer; looked for tiktoken.model or tokenizer.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TextError, match=r"sentencepiece tokenizer.model, which is not read"):
        load(tmp_path)


def test_more_tokens_than_the_model(tmp_path):
    with pytest.raises(TextError, match="the tokenizer has 512 tokens, the model only 511"):
        load(folders.kimi(tmp_path), 511)
    assert load(tmp_path, 600).vocab_size == 512


@pytest.mark.parametrize("bad", ["\ud800", "a\udfffb"])
def test_half_a_character_is_refused(deepseek, kimi_like, bad):
    for tokenizer in (deepseek, kimi_like):
        with pytest.raises(TextError, match="half a surrogate pair"):
            tokenizer.encode(bad)


def test_a_replaced_file_is_read_anew(tmp_path):
    folder = folders.kimi(tmp_path)
    assert len(load(folder).encode("zz")) == 2
    (folder / "tiktoken.model").write_bytes(b"".join([*BYTES, line(b"zz", 256)]))
    folders.write(folder / "tokenizer_config.json", {})
    (folder / "generation_config.json").unlink()
    assert load(folder).encode("zz") == [256]
