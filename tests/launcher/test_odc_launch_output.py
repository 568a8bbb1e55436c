"""Cutting output into lines, and writing it without blocking."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from odc_launcher import output
from odc_launcher.output import LINE_BYTES, LineSplitter, LogFile, Screen


def lines_of(*pieces: bytes, now: float = 0.0) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece, now)]
    return lines + splitter.finish()


def test_lines() -> None:
    assert lines_of(b"") == []
    assert lines_of(b"a\n\nb") == [b"a", b"", b"b"]
    assert lines_of(b"a", b"b", b"c\nd\n") == [b"abc", b"d"]
    assert lines_of(b"a\r\nb\r\n") == [b"a", b"b"]
    assert lines_of(b"a\r", b"\nb\n") == [b"a", b"b"]


def test_progress_shows_states_once_a_second_and_the_last() -> None:
    splitter = LineSplitter()
    shown = []
    for step in range(100):
        shown += splitter.feed(b"\r%d%%" % step, now=step * 0.1)
    shown += splitter.feed(b"\r100%\nnext\n", now=9.9)
    assert shown[:3] == [b"0%", b"10%", b"20%"]
    assert shown[-2:] == [b"100%", b"next"]
    assert len(shown) <= 13


def test_progress_with_trailing_return_shows_its_last_state_once() -> None:
    assert lines_of(b"50%\r", b"100%\r", b"\n", b"done\n") == [b"50%", b"100%", b"done"]
    assert lines_of(b"100%\r") == [b"100%"]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_lines_do_not_depend_on_how_the_output_was_cut(data: bytes, cuts: list[int]) -> None:
    data = data.replace(b"\r", b"\n")
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    expected = data.split(b"\n")
    assert lines_of(*pieces) == (expected if expected[-1] else expected[:-1])


def test_long_lines_come_in_pieces_that_cut_no_character() -> None:
    text = "x" + "\u00e9" * LINE_BYTES
    for pieces in (
        [text.encode()],
        [text.encode()[i : i + 1000] for i in range(0, len(text.encode()), 1000)],
    ):
        lines = lines_of(*pieces, b"\nshort\n")
        assert lines[-1] == b"short"
        assert max(map(len, lines)) <= LINE_BYTES + len(b"... ")
        assert not lines[0].startswith(b"... ")
        assert all(line.startswith(b"... ") for line in lines[1:-1])
        assert "".join(line.decode().removeprefix("... ") for line in lines[:-1]) == text


def test_long_invalid_bytes_are_cut_too() -> None:
    data = b"\x80" * (3 * LINE_BYTES)
    assert b"".join(line.removeprefix(b"... ") for line in lines_of(data)) == data


def test_log_survives_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "full.log").symlink_to("/dev/full")
    log = LogFile(str(tmp_path / "full.log"))
    log.write(b"lost")
    assert log.lost_bytes == 4
    assert log.error is not None
    assert log.error.errno == errno.ENOSPC
    log.close()


def is_full(screen: Screen) -> bool:
    return screen.full


def test_screen_never_blocks_and_gives_back_pressure_for_a_while() -> None:
    read_end, write_end = os.pipe()
    screen = Screen(write_end)
    started = time.monotonic()
    while not is_full(screen):
        screen.write(b"x" * 9999 + b"\n")
    assert time.monotonic() - started < 30  # nobody reads: a write that blocks would do so for ever
    screen._moved_at -= 11  # nobody has read for longer than its patience
    assert not is_full(screen)
    screen.write(b"dropped\n")
    assert screen.dropped_bytes == 8
    data = os.read(read_end, 1 << 20)
    screen.pump()  # the reader is back
    assert not screen._stuck()
    os.set_blocking(read_end, False)
    while screen.pending:
        data += os.read(read_end, 1 << 20)
        screen.pump()
    screen.write(b"end\n")
    data += os.read(read_end, 1 << 20)
    assert data.endswith(b"x\nend\n")
    assert data.count(b"\n") == len(data) // 10000 + 1
    os.close(read_end)
    os.close(write_end)


def test_screen_whose_reader_is_gone() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    screen = Screen(write_end)
    screen.write(b"text\n")
    assert screen.error is not None
    assert screen.error.errno == errno.EPIPE
    screen.write(b"more\n")
    assert not screen.pending
    os.close(write_end)


def test_drain_gives_up_on_a_reader_that_does_not_read() -> None:
    read_end, write_end = os.pipe()
    screen = Screen(write_end)
    screen.write(b"x" * output._SCREEN_BYTES)
    screen.drain(0.1)
    assert screen.dropped_bytes > 0
    assert not screen.pending
    os.close(read_end)
    os.close(write_end)
