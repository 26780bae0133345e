"""Stop strings are found wherever the text is cut, and nothing of them leaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.worker.stops import StopMatch, StopMatcher


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    emitted = ""
    for piece in pieces:
        match = matcher.push(piece)
        emitted += match.text
        if match.stop is not None:
            return emitted, match.stop
    return emitted + matcher.flush(), None


def test_a_stop_across_pieces_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abcE") == StopMatch("abc")
    assert matcher.push("N") == StopMatch("")
    assert matcher.push("Dxyz") == StopMatch("", "END")


def test_a_false_start_is_released() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == StopMatch("")
    assert matcher.push("ENX") == StopMatch("ENENX")
    assert matcher.flush() == ""


def test_included_stop() -> None:
    assert feed(StopMatcher(["\n\n"], include=True), ["one\n", "\ntwo"]) == ("one\n\n", "\n\n")


def test_without_stops_everything_passes() -> None:
    assert StopMatcher([]).push("text") == StopMatch("text")


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_cutting_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    emitted, stop = feed(StopMatcher(stops), pieces)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        assert (emitted, stop) == (text, None)
    else:
        _, start, first = min(ends)
        assert (emitted, stop) == (text[:start], first)
