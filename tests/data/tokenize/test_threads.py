"""What threads do beside the encoder comes in order, in bounded number, and fails aloud."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.running import TIMEOUT

from dtt.data.tokenize.threads import BackgroundWriter, ahead


def test_items_come_in_order_and_only_one_is_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    with ThreadPoolExecutor(1) as reader:
        for i, item in enumerate(ahead(items(), reader)):
            assert item == i
            assert len(made) <= i + 2
    assert made == list(range(20))


def test_an_error_of_the_reader_reaches_the_loop() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("a bad file")

    with (
        ThreadPoolExecutor(1) as reader,
        pytest.raises(ValueError, match="a bad file"),
    ):
        assert list(ahead(items(), reader)) == [1]


def test_no_more_actions_wait_than_allowed() -> None:
    """With room for two beside the one being done, the fourth call returns when that is done."""
    go, returned = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        go.wait(TIMEOUT)

    def caller() -> None:
        with BackgroundWriter(2) as behind:
            for _ in range(4):
                behind.do(wait)
                returned.release()

    thread = threading.Thread(target=caller)
    thread.start()
    assert all(returned.acquire(timeout=TIMEOUT) for _ in range(3))
    assert not returned.acquire(timeout=0.1)
    go.set()
    assert returned.acquire(timeout=TIMEOUT)
    thread.join()


def test_an_error_of_the_writer_is_raised_and_stops_further_actions() -> None:
    go = threading.Event()
    done: list[int] = []

    def fail() -> None:
        go.wait(TIMEOUT)
        raise OSError("disk full")

    def use() -> None:
        with BackgroundWriter(5) as behind:
            behind.do(fail)
            for i in range(5):
                behind.do(done.append, i)
            go.set()
            while True:
                behind.do(done.append, 5)

    with pytest.raises(OSError, match="disk full"):
        use()
    assert done == []


def test_an_error_of_the_last_action_is_raised_on_exit() -> None:
    with pytest.raises(OSError, match="disk full"), BackgroundWriter(5) as behind:
        behind.do(lambda: (_ for _ in ()).throw(OSError("disk full")))
