"""Text as it streams: whole characters, no part of a stop, and joined the same as the full decode."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text import Tokenizer
from jaxserve.text.detokenize import Detokenizer, Piece, StopCut
from jaxserve.text.vocabulary import Vocabulary

SPECIAL = 256


class NoEncoder:
    def encode(self, text: str, *, at_start: bool) -> list[int]:
        raise AssertionError

    def save(self, folder) -> dict[str, object]:
        raise AssertionError


def tokenizer_of(*tokens: bytes, strips: bool = False) -> Vocabulary:
    """Ids 0 to 255 are bytes, 256 is <eos>, and the given tokens follow."""
    return Vocabulary(
        encoder=NoEncoder(),
        table=[*(bytes([i]) for i in range(256)), b"<eos>", *tokens],
        bos_id=None,
        eos_ids=(SPECIAL,),
        special_tokens={"<eos>": SPECIAL},
        adds_bos=False,
        strips_leading_space=strips,
    )


BYTES = tokenizer_of()
# Few letters and many of their combinations: stops overlap, begin inside one another and end in the middle of tokens.
LETTERS = tokenizer_of(b"ab", b"ba", b"aab", b"abab", b"bb", b"", b"a\xc3", b"\xa9b", b" a", b" ", strips=True)
LETTER_IDS = st.sampled_from([ord("a"), ord("b"), SPECIAL, *range(257, 267)])
STOPS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "bb", "aba", "abab", "bab", "é", "éb", "b a", " "]), max_size=4)


def run(
    tokenizer: Vocabulary, ids: list[int], groups: list[int], **options
) -> tuple[list[str], int | None, str | None]:
    """The deltas, the count of tokens kept when a stop was found, and the stop."""
    detokenizer, deltas, start = Detokenizer(tokenizer, **options), [], 0
    for size in [*groups, len(ids)]:
        piece = detokenizer.feed(ids[start : start + size])
        deltas.append(piece.text)
        if piece.cut:
            assert detokenizer.flush() == ""
            return deltas, start + piece.cut.keep, piece.cut.stop
        start += size
    deltas.append(detokenizer.flush())
    return deltas, None, None


def slow(tokenizer: Vocabulary, ids: list[int], stop: list[str], *, include_stop: bool, skip_special: bool):
    """The same by definition: after each token decode everything anew and search it."""
    for count in range(1, len(ids) + 1):
        text = certain(tokenizer.decode(ids[:count], skip_special=skip_special))
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            begin, _, match = min(found)
            return text[: begin + len(match) if include_stop else begin], count, match
    return tokenizer.decode(ids, skip_special=skip_special), None, None


def certain(text: str) -> str:
    """Without an unfinished last character (in these alphabets only a lone first byte of é can stand there)."""
    return text.removesuffix("\ufffd")


GROUPS = st.lists(st.integers(0, 4), max_size=12)


@given(st.lists(LETTER_IDS, max_size=25), GROUPS, STOPS, st.booleans(), st.booleans())
def test_stops_cut_where_the_definition_says(ids, groups, stop, include_stop, skip_special):
    options = {"stop": stop, "include_stop": include_stop, "skip_special": skip_special}
    deltas, keep, match = run(LETTERS, ids, groups, **options)
    text, slow_keep, slow_match = slow(LETTERS, ids, **options)
    assert (keep, match) == (slow_keep, slow_match)
    assert "".join(deltas) == text


@given(st.lists(LETTER_IDS, max_size=25), GROUPS, STOPS)
def test_no_delta_holds_more_back_than_the_start_of_a_stop(ids, groups, stop):
    detokenizer, sent = Detokenizer(LETTERS, stop=stop), ""
    for count in range(1, len(ids) + 1):
        piece = detokenizer.feed(ids[count - 1 : count])
        if piece.cut:
            return
        sent += piece.text
        known = certain(LETTERS.decode(ids[:count]))
        held = max((n for s in stop for n in range(1, len(s)) if known.endswith(s[:n])), default=0)
        assert sent == known[: len(known) - held]


@given(st.binary(max_size=60), GROUPS)
def test_any_bytes_join_to_the_full_decode(data, groups):
    deltas, _, _ = run(BYTES, list(data), groups)
    assert "".join(deltas) == BYTES.decode(list(data)) == data.decode(errors="replace")


@given(st.text(max_size=30), GROUPS)
def test_no_replacement_character_before_the_end(text, groups):
    # Cut anywhere, also inside characters: nothing but the text's own characters is ever shown.
    deltas, _, _ = run(BYTES, list(text.encode()), groups)
    assert "".join(deltas) == text
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@pytest.mark.parametrize("text", ["🫠", "鿜", "👩‍👩‍👧‍👦", "e\u0301", "𠀀"])
def test_a_character_over_several_tokens_comes_whole(text: str):
    detokenizer = Detokenizer(BYTES)
    deltas = [detokenizer.feed([byte]).text for byte in text.encode()]
    assert [delta for delta in deltas if delta] == list(text)


def test_an_unfinished_character_ends_as_a_replacement():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.feed(list("a🫠".encode()[:3])).text == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_can_never_be_a_character_are_replaced_at_once():
    assert Detokenizer(BYTES).feed([0xFF, ord("a")]).text == "\ufffda"
    assert Detokenizer(BYTES).feed([0xE2, 0x28]).text == "\ufffd("


def test_real_tokens_stream_to_the_full_decode(smollm2: Tokenizer):
    text = "Grüße 🫠 鿜 👩‍👩‍👧‍👦\n\tdef f(x): return 'é' # 你好，世界" * 3
    ids = smollm2.encode(text)
    detokenizer = Detokenizer(smollm2)
    deltas = [detokenizer.feed([i]).text for i in ids]
    assert "".join(deltas) + detokenizer.flush() == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_stop_over_token_and_call_borders_is_never_seen():
    tokenizer = tokenizer_of(b"EN", b"D\n", b"x")
    detokenizer = Detokenizer(tokenizer, stop=["END\n"])
    assert detokenizer.feed([259, 257]) == Piece("x")
    assert detokenizer.feed([258, 259]) == Piece("", StopCut(1, "END\n"))


def test_the_stop_is_included_when_asked_for():
    detokenizer = Detokenizer(tokenizer_of(b"a END b"), stop=["END"], include_stop=True)
    assert detokenizer.feed([257]) == Piece("a END", StopCut(1, "END"))


def test_the_earliest_stop_wins_and_then_the_longest():
    tokenizer = tokenizer_of(b"one two three")
    assert Detokenizer(tokenizer, stop=["three", "two", "one t", "one"]).feed([257]) == Piece("", StopCut(1, "one t"))
    assert Detokenizer(tokenizer, stop=["three", "two"]).feed([257]) == Piece("one ", StopCut(1, "two"))


def test_a_stop_inside_the_beginning_of_another_is_found():
    detokenizer = Detokenizer(BYTES, stop=["abcd", "bc"])
    assert detokenizer.feed(list(b"xabc")) == Piece("xa", StopCut(4, "bc"))


def test_a_tail_that_could_have_been_a_stop_is_flushed():
    detokenizer = Detokenizer(BYTES, stop=["END\n"])
    assert detokenizer.feed(list(b"the END")).text == "the "
    assert detokenizer.flush() == "END"


def test_tokens_after_a_stop_in_one_call_do_not_count():
    piece = Detokenizer(BYTES, stop=["b"]).feed(list(b"abcdef"))
    assert piece == Piece("a", StopCut(2, "b"))


def test_special_tokens_are_hidden_or_shown():
    ids = [ord("a"), SPECIAL, ord("b")]
    assert Detokenizer(BYTES).feed(ids).text == "ab"
    assert Detokenizer(BYTES, skip_special=False).feed(ids).text == "a<eos>b"
    assert Detokenizer(BYTES, skip_special=False, stop=["<eos>"]).feed(ids) == Piece("a", StopCut(2, "<eos>"))


def test_a_hidden_token_inside_a_character_does_not_break_it():
    first, second = "é".encode()
    assert Detokenizer(BYTES).feed([first, SPECIAL, second]).text == "é"


@pytest.mark.parametrize("strips", [True, False])
def test_the_leading_space_goes_only_where_the_tokenizer_put_it(strips: bool):
    tokenizer = tokenizer_of(b" the", b"  x", strips=strips)
    for ids in ([257, 257], [SPECIAL, 257, 257], [258]):
        detokenizer = Detokenizer(tokenizer)
        streamed = "".join(detokenizer.feed([i]).text for i in ids)
        assert streamed == tokenizer.decode(ids)
        assert streamed.startswith(" ") == (not strips or ids == [258])


def per_token(detokenizer: Detokenizer, count: int) -> float:
    begin = time.process_time()
    for i in range(count):
        detokenizer.feed((97 + i % 20,))
    return (time.process_time() - begin) / count


def test_work_for_a_token_does_not_grow_with_the_text():
    detokenizer = Detokenizer(BYTES, stop=["never", "ever again"])
    early = min(per_token(detokenizer, 2_000) for _ in range(3))
    per_token(detokenizer, 100_000)
    late = min(per_token(detokenizer, 2_000) for _ in range(3))
    assert late < 3 * early


def test_a_step_of_32_rows_costs_well_under_a_third_of_a_millisecond():
    stops = ["\n\nUser:", "</answer>", "Observation: ", "#### END ####"]
    tokenizer = tokenizer_of(b" the", b"er and", b" #", b"<")
    rows = [Detokenizer(tokenizer, stop=stops) for _ in range(32)]
    times = []
    for step in range(200):
        begin = time.thread_time()
        for i, row in enumerate(rows):
            row.feed((257 + (step + i) % 4,))
        times.append(time.thread_time() - begin)
    assert sorted(times)[len(times) // 2] < 0.3e-3


def test_long_stops_cost_no_more_than_short_ones():
    # A scan that compared the tail with every beginning of a stop would need seconds here.
    stop = "a" * 20_000 + "b"
    detokenizer = Detokenizer(tokenizer_of(b"a" * 50), stop=[stop])
    begin = time.process_time()
    for _ in range(2_000):
        detokenizer.feed([257])
    assert time.process_time() - begin < 2.0
