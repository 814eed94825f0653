"""Text as it grows: however the tokens come, the same text, whole characters only, nothing of what ends it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdtp.text.files import TextError
from kdtp.text.stream import Detokenizer, StopStrings, TextStream
from kdtp.text.tokenizer import Tokenizer, load
from tests import text_folders as folders

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load(folders.kimi(tmp_path_factory.mktemp("kimi"), 20))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Tokenizer:
    return load(folders.deepseek(tmp_path_factory.mktemp("deepseek")))


def grouped(items, sizes):
    """`items` in groups of `sizes`, the last of which repeats."""
    groups, at = [], 0
    while at < len(items):
        size = sizes[min(len(groups), len(sizes) - 1)]
        groups.append(items[at : at + size])
        at += size
    return groups


sizes = st.lists(st.integers(0, 4), max_size=20).map(lambda some: [*some, 1])
ids = st.lists(st.integers(0, 511))


@PROPERTY
@given(ids=ids, sizes=sizes)
def test_the_parts_are_the_whole(tokenizer, deepseek, ids, sizes):
    for each in (tokenizer, deepseek):
        stream = Detokenizer(each)
        texts = [stream.push(group) for group in grouped(ids, sizes)] + [stream.finish()]
        assert "".join(texts) == each.decode(ids)


@PROPERTY
@given(text=st.text())
def test_no_part_of_a_character_is_shown(tokenizer, text):
    stream, shown = Detokenizer(tokenizer), ""
    for token in tokenizer.encode(text):
        shown += stream.push([token])
        assert text.startswith(shown)
    assert shown == text and stream.finish() == ""


def test_an_incomplete_character_at_the_end(tokenizer):
    stream = Detokenizer(tokenizer)
    assert [stream.push([byte]) for byte in "é😀".encode()[:-1]] == ["", "é", "", "", ""]
    assert stream.finish() == "\ufffd" and stream.finish() == ""
    # A hidden token in the middle of a character goes by.
    assert [stream.push([i]) for i in (0xC3, 276 + 2, 0xA9)] == ["", "", "é"]
    assert stream.push([276 + 22, 65]) == "<think>A"


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What should be shown of a text: growing it by a character until it ends with a stop."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="ab\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


@PROPERTY
@given(text=letters, stops=stop_lists, sizes=sizes)
@example(text="abcd", stops=["abcd", "bc"], sizes=[4])
@example(text="aab", stops=["ab"], sizes=[1])
def test_stop_strings(text, stops, sizes):
    matcher, shown = StopStrings(stops), ""
    want, found = cut(text, stops)
    for group in grouped(text, sizes):
        shown += matcher.push(group)
        assert want.startswith(shown)
        if matcher.found is None:
            assert len(matcher._held) <= max(map(len, stops), default=1) - 1
    assert shown + matcher.finish() == want and matcher.found == found
    if found:
        assert matcher.push("more") == ""


def test_no_more_is_held_back_than_needed():
    matcher = StopStrings(["DEFGHIJ", "\n\n"])
    assert [matcher.push(c) for c in "ABC\nDEFX"] == ["A", "B", "C", "", "\n", "", "", "DEFX"]
    assert matcher.push("DEFGHI") == "" and matcher.found is None
    assert matcher.push("J and on") == "" and matcher.found == "DEFGHIJ"


@PROPERTY
@given(ids=ids, sizes=sizes, stop_ids=st.sets(st.integers(0, 511), max_size=20), stops=stop_lists)
def test_a_stream_is_the_same_for_every_grouping(tokenizer, ids, sizes, stop_ids, stops):
    """Also when tokens after the stop come with it, as a draft's do."""
    one, many = (TextStream(tokenizer, stop_ids, stops) for _ in range(2))
    first = "".join([one.push([token]) for token in ids]) + one.finish()
    second = "".join([many.push(group) for group in grouped(ids, sizes)]) + many.finish()
    assert (first, one.used, one.stopped) == (second, many.used, many.stopped)
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
    want, found = cut(tokenizer.decode(ids[:end]), stops)
    assert first == want and one.stopped == (found is not None or end < len(ids))
    assert found is not None or one.used == min(end + 1, len(ids))


def test_how_many_tokens_were_used(tokenizer):
    stream = TextStream(tokenizer, [276 + 2], ["cd"])
    assert stream.push(b"abcdef") == "ab" and stream.used == 4 and stream.stopped
    assert stream.push(b"x") == "" and stream.finish() == "" and stream.used == 4
    stream = TextStream(tokenizer, [276 + 2], ["cd"])
    assert stream.push([*b"abc", 276 + 2, *b"d"]) == "abc" and stream.used == 4 and stream.stopped
    stream = TextStream(tokenizer, [], ["cd"])
    assert stream.push(b"abc") == "ab" and stream.finish() == "c" and not stream.stopped


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        ([""], r"stop\[0\] = '': must be at least one character"),
        (["x"] * 33, "33 strings of 33 characters: must be at most 32 of 4096 together"),
        (["x" * 4097], "1 strings of 4097 characters"),
    ],
)
def test_stop_strings_that_cannot_be(stops, words):
    with pytest.raises(TextError, match=words):
        StopStrings(stops)
