"""Reading ahead in a thread: the same micro-batches, a bounded number of them, errors where they belong."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks, values
from torch import nn

import odcengine
from odcengine.data import MicroBatch, MinibatchLoader, TokenDataset
from odcengine.data import prefetch as prefetch_module
from odcengine.data.loader import PREFETCH
from odcengine.data.prefetch import Reader, pinned
from odcengine.errors import ConfigError, UsageError


def token_dataset(count: int = 60) -> TokenDataset:
    dice = np.random.default_rng(0)
    return TokenDataset.from_samples(
        {"input_ids": dice.integers(1, 50, dice.integers(2, 30))} for _ in range(count)
    )


class Watched:
    """A data set that notes who reads what, and can hold readers up or fail."""

    def __init__(self, count: int = 60) -> None:
        self.data = token_dataset(count)
        self.lengths = self.data.lengths
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.at_once = self.most_at_once = 0
        self.broken: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.gate.wait(120)
        if index in self.broken:
            raise OSError("stale file handle")
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        self.at_once -= 1
        return self.data[index]


def make_loader(dataset: Any, **options: Any) -> MinibatchLoader:
    defaults: dict[str, Any] = {
        "train_batch_size": 12,
        "rank": 0,
        "world_size": 1,
        "strategy": "lb_mini",
        "max_tokens": 40,
    }
    return MinibatchLoader(dataset, **{**defaults, **options})


def facts(batch: Any) -> tuple[Any, ...]:
    assert isinstance(batch, MicroBatch)
    return batch.sample_ids, batch.input_ids.tolist(), batch.labels.tolist(), batch.segments.boundaries


def settle(watched: Watched, count: int) -> list[int]:
    """What has been read when so many samples are, and a moment later: nothing more is read."""
    deadline = time.monotonic() + 60
    while len(watched.read) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return watched.read.copy()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and readers():
        time.sleep(0.01)
    assert not readers()


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "odc-read"]


@pytest.mark.parametrize("strategy", ["local_sort", "lb_micro", "lb_mini"])
@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_the_same_micro_batches(strategy: str, prefetch: int) -> None:
    """In two epochs, on each of three ranks, also where a rank has none."""
    for rank in range(3):
        options: dict[str, Any] = {"rank": rank, "world_size": 3, "strategy": strategy, "train_batch_size": 7}
        loaders = [make_loader(token_dataset(), prefetch=number, **options) for number in (0, prefetch)]
        seen = []
        for loader in loaders:
            seen.append(
                [
                    (minibatch.epoch, minibatch.index, facts(batch), loader.is_dummy, minibatch.is_dummy)
                    for _ in range(2)
                    for minibatch in loader
                    for batch in minibatch
                ]
            )
            loader.close()
        assert seen[0] == seen[1]
        assert seen[0]


def test_of_drawn_work_the_expected_is_read_ahead() -> None:
    """One micro-batch; and the first of the next minibatch, which is not drawn."""
    watched = Watched()
    loader = make_loader(watched, strategy="dynamic", prefetch=3)
    assert len(loader.minibatch(0).planned or ()) > 2
    planned = [ids for index in range(len(loader)) for ids in loader.minibatch(index).planned or ()]
    planned += list(loader.minibatch(0, epoch=1).planned or ())
    watched.read.clear()
    watched.threads.clear()
    handed_out = 0
    for minibatch in loader:
        for batch in minibatch:
            assert batch.sample_ids == planned[handed_out]
            handed_out += 1
            ahead = list(itertools.chain(*planned[: handed_out + 1]))
            assert settle(watched, len(ahead)) == ahead
        assert list(minibatch) == []
    assert handed_out == len(planned) - len(loader.minibatch(0, epoch=1).planned or ())
    assert watched.threads == {"odc-read"}
    assert watched.most_at_once == 1
    loader.close()


class Counter:
    """Two ranks draw: this one, and another one that takes what it is told to in between."""

    def __init__(self) -> None:
        self.serial = self.next = 0
        self.taken: list[int] = []  # by the other one, before each draw of this one

    def __call__(self, serial: int, total: int) -> int:
        if serial != self.serial:
            self.serial, self.next = serial, 0
        self.next += self.taken.pop(0) if self.taken else 0
        self.next += 1
        return self.next - 1


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [[0, 1, 2, 0, 3], [2, 0, 0, 1], [5, 1], [100], []])
def test_where_others_were_faster_what_was_drawn_is_read(prefetch: int, taken: list[int]) -> None:
    counter = Counter()
    loader = make_loader(
        token_dataset(),
        strategy="dynamic",
        prefetch=prefetch,
        train_batch_size=30,
        world_size=2,
        rank=1,
        draw=counter,
    )
    plain = make_loader(token_dataset(), strategy="dynamic", prefetch=0)
    for minibatch in itertools.islice(itertools.chain(loader, loader), 4):  # also over the end of an epoch
        counter.taken = list(taken)
        drawn, numbers = minibatch.plan.drawn, []
        for batch in minibatch:
            numbers.append(minibatch.drawn_last)
            group = drawn[numbers[-1]] if numbers[-1] >= 0 else minibatch.plan.begins_with(1)
            ids = tuple(minibatch.sample_ids[position] for position in group)
            assert facts(batch) == facts(plain._load(minibatch, ids))
        expected, place = [-1], 0
        for steps in [*taken, *[0] * len(drawn)]:
            place += steps
            expected += [place] if place < len(drawn) else []
            place += 1
        assert numbers == expected[: len(numbers)]
        assert len(numbers) == len([number for number in expected if number < len(drawn)])
    loader.close()
    plain.close()


def test_what_the_next_minibatch_begins_with_is_read_when_it_is_drawn_from_already() -> None:
    loader = make_loader(token_dataset(), strategy="dynamic", prefetch=1)
    plain, gate = make_loader(token_dataset(), strategy="dynamic", prefetch=0), threading.Event()
    minibatches = iter(loader)
    first = next(minibatches)
    for batch in first:
        if len(first.expected()) == 1:  # the last one is being read; what comes behind it waits
            loader._ahead._reader.submit("nothing", functools.partial(gate.wait, 60))
        assert isinstance(batch, MicroBatch)
    second = next(minibatches)
    gate.set()
    assert [facts(batch) for batch in second] == [facts(batch) for batch in plain.minibatch(1)]
    loader.close()


def test_what_was_read_ahead_and_went_to_another_rank_may_be_broken() -> None:
    """An error in it is not this rank's; in what this rank draws, it is."""
    watched, counter = Watched(), Counter()
    loader = make_loader(
        watched, strategy="dynamic", prefetch=2, train_batch_size=30, world_size=2, draw=counter
    )
    minibatch = next(iter(loader))
    (_, first), (number, expected), *_ = minibatch.expected()
    watched.broken = set(expected)
    counter.taken = [number + 1]
    batches = iter(minibatch)
    assert next(batches).sample_ids == first
    seen = settle(watched, len(first))
    assert not set(seen) & watched.broken
    assert next(batches).sample_ids == tuple(
        minibatch.sample_ids[position] for position in minibatch.plan.drawn[number + 1]
    )
    watched.broken = set(watched.data.lengths.argsort().tolist())
    with pytest.raises(UsageError, match="cannot be read"):
        for _ in batches:
            pass
    watched.broken = set()
    loader.close()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_bounded_number_is_read_ahead(prefetch: int) -> None:
    """Of the next minibatch, too; never two samples at once, and never here."""
    watched = Watched()
    loader = make_loader(watched, prefetch=prefetch)
    planned = [
        sample_ids for index in range(len(loader)) for sample_ids in loader.minibatch(index).planned or ()
    ]
    planned += list(loader.minibatch(0, epoch=1).planned or ())
    watched.read.clear()
    watched.threads.clear()
    handed_out = 0
    for minibatch in loader:
        for batch in minibatch:
            assert batch.sample_ids == planned[handed_out]
            handed_out += 1
            ahead = list(itertools.chain(*planned[: handed_out + prefetch]))
            assert settle(watched, len(ahead)) == ahead
    assert watched.threads == {"odc-read"}
    assert watched.most_at_once == 1
    loader.close()


def test_repeating_leaving_and_moving() -> None:
    watched = Watched()
    loader, plain = make_loader(watched, prefetch=2), make_loader(token_dataset())
    first = next(iter(loader))
    whole = [facts(batch) for batch in first]
    assert [facts(batch) for batch in first] == whole == [facts(batch) for batch in plain.minibatch(0)]
    next(iter(first))  # left after its first micro-batch
    second = next(iter(loader))
    assert [facts(batch) for batch in second] == [facts(batch) for batch in plain.minibatch(1)]
    # Another position than the one that was read ahead.
    loader.set_epoch(4)
    moved = next(iter(loader))
    assert [facts(batch) for batch in moved] == [facts(batch) for batch in plain.minibatch(0, epoch=4)]
    state = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(state)
    again = next(iter(loader))
    assert [facts(batch) for batch in again] == [facts(batch) for batch in plain.minibatch(1, epoch=4)]
    # Any other minibatch between two micro-batches.
    for batch, other in zip(next(iter(loader)), plain.minibatch(2, epoch=4), strict=True):
        assert facts(batch) == facts(other)
        assert list(map(facts, loader.minibatch(0))) == list(map(facts, plain.minibatch(0, epoch=4)))
    loader.close()


def test_by_default_only_data_sets_that_bear_it() -> None:
    assert make_loader(token_dataset()).prefetch == PREFETCH
    assert make_loader(Watched()).prefetch == 0
    assert make_loader(token_dataset(), collate_fn=list).prefetch == 0
    assert make_loader(token_dataset(), prefetch=0).prefetch == 0
    with pytest.raises(ConfigError, match="prefetch is -1"):
        make_loader(token_dataset(), prefetch=-1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_when_its_turn_comes(prefetch: int) -> None:
    watched = Watched()
    loader = make_loader(watched, prefetch=prefetch)
    planned = loader.minibatch(0).planned
    assert planned is not None
    assert len(planned) > 3
    watched.broken = {planned[2][-1]}
    batches = iter(next(iter(loader)))
    assert [next(batches).sample_ids for _ in range(2)] == list(planned[:2])
    with pytest.raises(UsageError, match=rf"data: sample {planned[2][-1]} cannot be read \(OSError: stale"):
        next(batches)
    watched.broken = set()
    assert [batch.sample_ids for batch in loader.minibatch(0)] == list(planned)
    loader.close()


def test_a_collate_fn_that_fails_names_its_samples() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("ragged")

    for prefetch in (0, 2):
        loader = make_loader(token_dataset(), collate_fn=collate, prefetch=prefetch)
        with pytest.raises(
            UsageError, match=r"data: samples \[.*\] cannot be put together \(ValueError: rag"
        ):
            next(iter(next(iter(loader))))
        loader.close()


def test_waiting_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "_POLL_S", 0.02)
    watched = Watched()
    loader = make_loader(watched, prefetch=2, timeout_s=0.2)
    minibatch = next(iter(loader))
    assert minibatch.planned is not None
    watched.gate.clear()
    with pytest.raises(
        UsageError, match=r"reading samples \[\d.*\] takes longer than 0.2 s \(odc.timeout_s\)"
    ):
        next(iter(minibatch))
    watched.gate.set()
    loader.close()


def test_closing_has_a_limit_and_leaves_a_loader_that_reads_itself(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    loader = make_loader(watched, prefetch=2)
    minibatch = next(iter(loader))
    batches = iter(minibatch)
    first = next(batches)
    settle(watched, sum(map(len, (minibatch.planned or ())[:3])))
    watched.gate.clear()
    second = next(batches)  # was there already
    deadline = time.monotonic() + 60
    while not watched.at_once and time.monotonic() < deadline:
        time.sleep(0.01)  # until another one is being read
    start = time.monotonic()
    loader.close(timeout_s=0.1)
    assert time.monotonic() - start < 60  # the reading itself takes twice that
    assert "the thread that reads ahead is busy after 0.1 s; left alone" in caplog.text
    watched.gate.set()
    loader.close()
    rest = [batch.sample_ids for batch in batches]
    assert [first.sample_ids, second.sample_ids, *rest] == list(minibatch.planned or ())
    watched.threads.clear()
    assert len(list(loader)) == len(loader) - 1
    assert [b.sample_ids for b in loader.minibatch(1)] == list(loader.minibatch(1).planned or ())
    assert watched.threads == {"MainThread"}


def test_a_loader_that_is_dropped_ends_its_thread() -> None:
    loader = make_loader(token_dataset())
    next(iter(next(iter(loader))))
    assert readers()
    gone = weakref.ref(loader)
    del loader
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (gone() is not None or readers()):
        gc.collect()  # it knows its minibatches, and they it; what is being read holds it, too
        time.sleep(0.01)
    assert gone() is None


def test_an_error_is_not_the_end_of_the_thread() -> None:
    reader = Reader(None, None)
    readings = [reader.submit("a", lambda: 1 / 0), reader.submit("b", lambda: 5)]
    assert reader.wait(readings[1]) == 5
    with pytest.raises(ZeroDivisionError):
        reader.wait(readings[0])
    reader.close()


def test_what_is_read_while_closing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that was left alone ends its reading late."""
    monkeypatch.setattr(prefetch_module, "_POLL_S", 0.02)
    reader, gate = Reader(None, None), threading.Event()
    reading = reader.submit("a", lambda: gate.wait(60))
    while not reading.future.running():
        time.sleep(0.001)
    reader.close(timeout_s=0.01)
    threading.Timer(0.2, gate.set).start()
    assert reader.wait(reading) is True


def test_what_is_pinned() -> None:
    class Batch:
        def __init__(self, name: str) -> None:
            self.name = name

        def pin_memory(self) -> Batch:
            return Batch(self.name + " pinned")

    found = pinned({"a": [Batch("x"), 3], "b": (Batch("y"), None), "c": "text"})
    assert found["a"][0].name == "x pinned"
    assert found["b"][0].name == "y pinned"
    assert (found["a"][1], found["b"][1], found["c"]) == (3, None, "text")


@pytest.mark.gpu
def test_micro_batches_for_a_gpu_are_in_pinned_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for collate_fn in (
        None,
        lambda samples: {"ids": [torch.tensor(s["input_ids"].astype(int)) for s in samples]},
    ):
        options: dict[str, Any] = {"collate_fn": collate_fn, "prefetch": 2}
        here, there = (
            make_loader(token_dataset(), **options),
            make_loader(token_dataset(), device=device, **options),
        )
        for minibatch, other in zip(here, there, strict=True):
            for batch, from_pinned in zip(minibatch, other, strict=True):
                if isinstance(batch, MicroBatch):
                    assert from_pinned.input_ids.is_pinned()
                    assert from_pinned.cu_seqlens.is_pinned()
                    assert facts(from_pinned) == facts(batch)
                    moved = from_pinned.to(device)
                    assert torch.equal(moved.labels.cpu(), batch.labels)
                else:
                    assert all(tensor.is_pinned() for tensor in from_pinned["ids"])
        here.close()
        there.close()


def _train(rank: int, world_size: int, prefetch: int) -> tuple[list[float], int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    engine, _, loader, _ = odcengine.initialize(
        model=model,
        config={
            "train_batch_size": 12,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "balance": {"max_tokens_per_micro_batch": 40},
            "data": {"prefetch": prefetch},
        },
        training_data=token_dataset(),
        loss_fn=lambda model, batch: nn.functional.cross_entropy(
            model(batch.input_ids)[0], batch.labels[0], reduction="sum"
        ),
    )
    assert loader is not None
    losses = []
    for minibatch in loader:
        for batch in minibatch:
            engine.backward(engine(batch))
        losses.append(engine.step().loss)
    during = len(readers())
    engine.close()
    return losses, during, len(readers())


def test_training_reads_ahead_and_ends_its_thread() -> None:
    (plain, none, after), *_ = values(run_ranks(_train, 2, 0))
    (ahead, during, left), *_ = values(run_ranks(_train, 2, 2))
    assert plain == pytest.approx(ahead, rel=1e-6)
    assert (none, after, during, left) == (0, 0, 1, 0)
