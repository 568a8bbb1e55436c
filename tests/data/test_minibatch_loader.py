"""The loader: the same minibatches for any number of ranks, each sample once, positions that resume."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from odcengine.balance.plan import STRATEGIES
from odcengine.data import MicroBatch, Minibatch, MinibatchLoader, TokenDataset, pack_samples
from odcengine.data.vocabulary import check_micro_batch
from odcengine.errors import ConfigError, UsageError

PLANNED = [strategy for strategy in STRATEGIES if strategy != "dynamic"]  # ranks draw that together

# USER_CASES 9.
LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SUPERVISED = [2, 0, 3, 0, 4, 8, 1, 5, 4, 0]


def make_samples() -> list[dict[str, Any]]:
    """Ten samples whose last ``SUPERVISED[i]`` tokens are to be learned; tokens are distinct."""
    samples = []
    for index, (length, supervised) in enumerate(zip(LENGTHS, SUPERVISED, strict=True)):
        mask = np.zeros(length, dtype=bool)
        mask[length - supervised :] = True
        samples.append({"input_ids": 100 * index + np.arange(length), "loss_mask": mask})
    return samples


def make_loader(dataset: Any = None, **arguments: Any) -> MinibatchLoader:
    defaults: dict[str, Any] = {
        "train_batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "strategy": "lb_mini",
        "max_tokens": 10,
        "shuffle": False,
    }
    dataset = TokenDataset.from_samples(make_samples()) if dataset is None else dataset
    return MinibatchLoader(dataset, **{**defaults, **arguments})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", PLANNED)
@pytest.mark.parametrize("as_list", [False, True])
def test_counts_of_every_minibatch(world_size: int, strategy: str, as_list: bool) -> None:
    """USER_CASES 9: 5, 18 and 4 targets, whatever the ranks; the short minibatch counts fully."""
    dataset = make_samples() if as_list else None
    counts, without, samples, targets = [], [], [0, 0, 0], [0, 0, 0]
    for rank in range(world_size):
        loader = make_loader(dataset, rank=rank, world_size=world_size, strategy=strategy)
        assert len(loader) == 3
        minibatches = list(loader)
        counts.append([minibatch.num_targets_global for minibatch in minibatches])
        without.append([minibatch.num_samples_without_targets for minibatch in minibatches])
        for minibatch in minibatches:
            for micro_batch in minibatch:
                assert micro_batch.num_tokens <= 10
                samples[minibatch.index] += micro_batch.num_samples
                targets[minibatch.index] += micro_batch.num_targets
    assert counts == [[5, 18, 4]] * world_size
    assert without == [[2, 0, 1]] * world_size
    assert samples == [4, 4, 2]
    assert targets == [5, 18, 4]


@pytest.mark.parametrize("strategy", PLANNED)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_sample_once_an_epoch(strategy: str, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        loader = make_loader(rank=rank, world_size=world_size, strategy=strategy, shuffle=True, seed=3)
        for minibatch in loader:
            for batch in minibatch:
                seen += batch.sample_ids
                starts = batch.cu_seqlens[:-1].tolist()
                assert batch.input_ids[0, starts].tolist() == [100 * index for index in batch.sample_ids]
    assert sorted(seen) == list(range(10))


def test_minibatches_do_not_depend_on_ranks() -> None:
    def order(**arguments: Any) -> list[tuple[int, ...]]:
        loader = make_loader(shuffle=True, **arguments)
        return [minibatch.sample_ids for _ in range(2) for minibatch in loader]

    reference = order()
    assert len(set(reference)) == 6
    assert order(world_size=3, rank=2) == reference
    assert order(world_size=2, strategy="local_sort", max_samples=1, max_tokens=9) == reference
    assert order(seed=1) != reference


def test_order_is_pinned() -> None:
    """The order of a seed is part of what a run can be repeated from; it must not change by accident."""
    assert make_loader(shuffle=True, seed=7, train_batch_size=10).minibatch(0).sample_ids == PINNED_ORDER


PINNED_ORDER = (6, 3, 4, 9, 0, 2, 8, 7, 5, 1)


def test_ranks_have_the_same_plans() -> None:
    plans = {
        rank: [minibatch.plan.to_json() for minibatch in make_loader(rank=rank, world_size=3, shuffle=True)]
        for rank in range(3)
    }
    assert plans[0] == plans[1] == plans[2]


def test_epochs() -> None:
    loader = make_loader(shuffle=True)
    first = [minibatch.sample_ids for minibatch in loader]
    assert (loader.epoch, loader.index) == (1, 0)
    second = [minibatch.sample_ids for minibatch in loader]
    assert first != second
    assert sorted(sum(first, ())) == sorted(sum(second, ())) == list(range(10))
    loader.set_epoch(0)
    assert [minibatch.sample_ids for minibatch in loader] == first


def test_left_loop_goes_on() -> None:
    loader = make_loader()
    for minibatch in loader:
        if minibatch.index == 0:
            break
    assert [minibatch.index for minibatch in loader] == [1, 2]
    # Left after the last one: the next loop, and set_epoch of the same epoch, know that it is over.
    for minibatch in loader:
        if minibatch.index == 2:
            break
    loader.set_epoch(2)
    assert [(minibatch.epoch, minibatch.index) for minibatch in loader] == [(2, 0), (2, 1), (2, 2)]


def test_set_epoch_of_the_present_epoch_keeps_the_position() -> None:
    """A resumed script that calls set_epoch in its loop must not start the epoch again."""
    loader = make_loader()
    next(iter(loader))
    loader.set_epoch(0)
    assert [minibatch.index for minibatch in loader] == [1, 2]
    with pytest.raises(UsageError, match="epoch is -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 3])
def test_resume(stop_after: int, world_size: int) -> None:
    """The state after n steps continues with step n+1, also on another number of ranks."""

    def steps(loader: MinibatchLoader) -> Any:
        while True:
            for minibatch in loader:
                yield (minibatch.epoch, minibatch.index, minibatch.sample_ids)

    whole = steps(make_loader(shuffle=True))
    expected = [next(whole) for _ in range(7)]
    loader = make_loader(shuffle=True)
    run = steps(loader)
    assert [next(run) for _ in range(stop_after)] == expected[:stop_after]
    state = loader.state_dict()
    resumed = make_loader(shuffle=True, world_size=world_size, strategy="lb_micro")
    resumed.load_state_dict(state)
    rest = steps(resumed)
    assert [next(rest) for _ in range(7 - stop_after)] == expected[stop_after:]


def test_foreign_state_is_refused_with_every_difference() -> None:
    state = make_loader().state_dict()
    with pytest.raises(UsageError, match="train_batch_size was 4, is 5; seed was 0, is 1"):
        make_loader(train_batch_size=5, seed=1).load_state_dict(state)
    with pytest.raises(UsageError, match="num_samples was None, is 10"):
        make_loader().load_state_dict({})
    for wrong in ({"index": 3}, {"index": -1}, {"index": None}):
        with pytest.raises(UsageError, match=r"index is .*, but an epoch has 3 minibatches"):
            make_loader().load_state_dict({**state, **wrong})
    with pytest.raises(UsageError, match="epoch is -1"):
        make_loader().load_state_dict({**state, "epoch": -1})


def test_state_of_another_data_set_of_the_same_size_is_refused() -> None:
    def loader(*lengths: int, max_length: int) -> MinibatchLoader:
        data = TokenDataset.from_samples([{"input_ids": [1] * length} for length in lengths])
        return MinibatchLoader(
            data, train_batch_size=1, rank=0, world_size=1, strategy="lb_mini", max_tokens=None,
            max_length=max_length, too_long="truncate",
        )  # fmt: skip

    state = loader(5, 6, 7, max_length=6).state_dict()
    loader(5, 6, 7, max_length=4).load_state_dict(state)  # the order is the same
    with pytest.raises(UsageError, match=r"lengths_sha256 was '[0-9a-f]{16}', is '"):
        loader(6, 5, 7, max_length=6).load_state_dict(state)


def test_drop_last() -> None:
    loader = make_loader(drop_last=True)
    assert len(loader) == 2
    assert [minibatch.num_samples_global for minibatch in loader] == [4, 4]
    with pytest.raises(ConfigError, match="10 samples are less than train_batch_size 11"):
        make_loader(drop_last=True, train_batch_size=11)


@pytest.mark.parametrize("strategy", ["local_sort", "lb_micro"])
def test_empty_micro_batches(strategy: str) -> None:
    """Two samples on three ranks: a dummy that changes nothing, or nothing where none is wanted."""
    dummies = 0
    for rank in range(3):
        minibatch = make_loader(rank=rank, world_size=3, strategy=strategy).minibatch(2)
        assert len(minibatch) == 1
        for batch in minibatch:
            assert minibatch.is_dummy == batch.is_dummy
            dummies += batch.is_dummy
            assert batch.num_targets == 0 or not batch.is_dummy
        assert not minibatch.is_dummy
        skipping = make_loader(rank=rank, world_size=3, strategy=strategy, run_empty=False).minibatch(2)
        assert [batch.sample_ids for batch in skipping] == [b.sample_ids for b in minibatch if not b.is_dummy]
    assert dummies == 1


def test_minibatch_can_be_repeated() -> None:
    minibatch = make_loader().minibatch(1)
    assert isinstance(minibatch, Minibatch)
    first = [batch.input_ids.tolist() for batch in minibatch]
    assert [batch.input_ids.tolist() for batch in minibatch] == first
    assert len(first) == len(minibatch) == 3
    with pytest.raises(UsageError, match="minibatch 3 of an epoch of 3"):
        make_loader().minibatch(3)


def test_too_long_is_an_error_by_default() -> None:
    message = r"3 of 10 samples are longer than the limit of 5 .* 5 with 9 tokens; raise the limit to 9"
    dataset = make_samples()
    dataset[8] = {"input_ids": np.arange(7)}
    with pytest.raises(ValueError, match=message):
        make_loader(dataset, max_tokens=5)


def test_too_long_can_be_truncated(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(max_tokens=5, too_long="truncate")
    assert "2 of 10 samples are longer" in caplog.text
    batches = [batch for minibatch in loader for batch in minibatch]
    assert sum(batch.num_tokens for batch in batches) == sum(min(length, 5) for length in LENGTHS)
    # Sample 5: 8 of 9 tokens to be learned, 4 are left; sample 7: 5 of 6, 4 are left.
    assert [minibatch.num_targets_global for minibatch in loader] == [5, 18 - 4 - 1, 4]
    assert sum(batch.num_targets for batch in batches) == 5 + 13 + 4


def test_max_length_is_a_limit_of_its_own() -> None:
    loader = make_loader(max_tokens=20, max_length=5, too_long="truncate")
    assert max(loader.lengths) == 5
    assert make_loader(max_tokens=5, max_length=20, too_long="truncate").lengths.max() == 5
    with pytest.raises(ConfigError, match="longer than the limit of 5 tokens"):
        make_loader(max_tokens=None, max_length=5)


def test_too_long_can_be_skipped() -> None:
    loader = make_loader(max_tokens=5, too_long="skip")
    assert sum((minibatch.sample_ids for minibatch in loader), ()) == (0, 1, 2, 3, 4, 6, 8, 9)
    with pytest.raises(ConfigError, match="nothing is left when they are skipped"):
        make_loader([{"input_ids": [1, 2, 3]}], max_tokens=2, too_long="skip")


def test_truncated_row_that_belies_its_length() -> None:
    class Liar(list[dict[str, Any]]):
        lengths = [1] * 10

    with pytest.raises(UsageError, match=r"correct the data set's attribute lengths"):
        list(make_loader(Liar(make_samples()), max_tokens=8).minibatch(1))


def test_padding_never_counts() -> None:
    for minibatch in make_loader(pad_to_multiple_of=16):
        for batch in minibatch:
            assert batch.input_ids.shape[1] == 16
            assert batch.num_tokens <= 10
            assert (batch.labels != -100).sum() == batch.num_targets


# ---- data sets that are not tokens ---------------------------------------------------------------------


def test_any_map_style_dataset() -> None:
    """Tensors without lengths: every sample has length 1, torch's collation, a limit of samples."""
    dataset = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    values: list[int] = []
    for rank in range(2):
        loader = make_loader(dataset, rank=rank, world_size=2, max_tokens=None, max_samples=1)
        for minibatch in loader:
            assert minibatch.num_targets_global is None
            assert minibatch.num_samples_without_targets is None
            for features, labels in minibatch:
                assert features.shape == (1, 1)
                values += labels.tolist()
    assert sorted(values) == list(range(10))


def test_own_lengths_and_collation() -> None:
    words = ["a", "bbbb", "cc", "dddddd", "e", "ff"]
    loader = make_loader(
        words, train_batch_size=6, max_tokens=7, length_fn=len, collate_fn=lambda samples: "".join(samples)
    )
    assert loader.lengths.tolist() == [1, 4, 2, 6, 1, 2]
    packed = list(loader.minibatch(0))
    assert sorted("".join(packed)) == sorted("".join(words))
    assert max(map(len, packed)) <= 7
    with pytest.raises(ConfigError, match="only samples with input_ids that the loader packs itself"):
        make_loader(words, max_tokens=5, length_fn=len, too_long="truncate")


class Measured(list[dict[str, Any]]):
    """A data set that tells its lengths, so that nothing is read before its turn."""

    lengths = np.array([2, 5, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_ids": [1, 2, 9, 4, 10]},
            "sample 1 has the token id 10, but the model's vocabulary is 0 to 9; tok",
        ),
        ({"input_ids": [1, 2, -1, 4, 5]}, "sample 1 has the token id -1, but the"),
        (
            {"labels": [-100, -100, 5, -1, 6]},
            "the label -1, but the .* that is not to be learned has the label -100",
        ),
        ({"labels": [-100, -100, 5, 11, 6]}, "sample 1 has the label 11, but the model's"),
    ],
)
def test_tokens_outside_of_the_vocabulary(changes: dict[str, Any], message: str) -> None:
    """Found before training where the samples are read for their lengths, else when their turn comes."""
    samples = [{"input_ids": [0, 9]}, {"input_ids": [1, 2, 3, 4, 5], **changes}, {"input_ids": [7, 8]}]
    with pytest.raises(UsageError, match=message):
        make_loader(samples, vocab_size=10)
    for prefetch in (0, 2):
        for num_samples in (1, 3):
            loader = make_loader(
                Measured(samples),
                vocab_size=10,
                prefetch=prefetch,
                max_samples=num_samples,
                train_batch_size=3,
            )
            with pytest.raises(UsageError, match=message):
                list(next(iter(loader)))
            loader.close()
    loader = make_loader(Measured(samples), train_batch_size=3)
    assert sum(batch.num_tokens for batch in next(iter(loader))) == 9  # nobody knows the vocabulary


def test_tokens_outside_of_the_vocabulary_in_a_pair() -> None:
    pair = {"sequences": [{"input_ids": [1, 2]}, {"input_ids": [1, 12, 2]}]}
    with pytest.raises(UsageError, match="sample 1, sequence 1 has the token id 12"):
        make_loader([{"sequences": [{"input_ids": [3]}]}, pair], vocab_size=10)
    batch = pack_samples([{"input_ids": [9, 9]}, pair, {"input_ids": [3]}], sample_ids=[7, 8, 9])
    with pytest.raises(UsageError, match="sample 8 has the token id 12"):
        check_micro_batch(batch, 10)
    check_micro_batch(batch, 13)
    check_micro_batch(pack_samples([], pad_to_multiple_of=4), 1)


def test_own_collation_of_token_samples() -> None:
    loader = make_loader(
        make_samples(), collate_fn=lambda samples: [sample["input_ids"] for sample in samples]
    )
    assert not any(isinstance(batch, MicroBatch) for batch in loader.minibatch(0))


def test_dummy_of_other_data_is_a_stand_in() -> None:
    """The minibatch's first sample, marked: whoever runs it must not count its loss."""
    given = []
    for rank in range(3):
        loader = make_loader(list("ab"), world_size=3, rank=rank, strategy="lb_micro", collate_fn="".join)
        minibatch = loader.minibatch(0)
        for text in minibatch:
            assert loader.is_dummy == minibatch.is_dummy
            given.append((text, loader.is_dummy))
        assert not loader.is_dummy
    assert sorted(given) == [("a", False), ("a", True), ("b", False)]


def test_what_a_loop_that_is_left_early_has_not_come_to() -> None:
    minibatch = make_loader(max_samples=1).minibatch(0)
    assert minibatch.left_early
    next(iter(minibatch))
    assert minibatch.left_early
    assert minibatch.explain_left() == "after 1 of 4 micro-batches, with 3 samples left"
    assert len(list(itertools.islice(minibatch, 4))) == 4  # all of them, though not to the end
    assert not minibatch.left_early
    list(minibatch)
    assert not minibatch.left_early
    idle = [
        make_loader(list("ab"), world_size=3, rank=rank, strategy="lb_micro", collate_fn="".join).minibatch(0)
        for rank in range(3)
    ]
    assert sum(share.left_early for share in idle) == 2  # a stand-in is no loss


def test_bad_arguments_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        make_loader(train_batch_size=0, strategy="best", too_long="ignore", max_samples=0)
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match="no samples"):
        make_loader([])
    with pytest.raises(ConfigError, match="rank 2 is not in 0 to 1"):
        make_loader(rank=2, world_size=2)


def test_iterable_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="a generator; the loader needs a map-style data set"):
        make_loader(sample for sample in make_samples())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("tokens", "the data set is the path tokens; give TokenDataset.open"),
        (["a text"], "sample 0 is text, but training reads tokens"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "sample 0 has messages and no input_ids"),
        ([{"prompt": "a", "completion": "b"}], "sample 0 has prompt and no input_ids"),
    ],
)
def test_text_and_paths_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(dataset)


def test_text_is_for_a_collate_fn_of_the_users() -> None:
    loader = make_loader([{"text": "ab"}, {"text": "c"}], collate_fn=len, train_batch_size=2)
    assert [list(minibatch) for minibatch in loader] == [[2]]


def test_lengths_that_do_not_fit() -> None:
    class Short(list[int]):
        lengths = (1, 2)

    with pytest.raises(UsageError, match=r"has 3 samples, but lengths of shape \[2\]"):
        make_loader(Short([1, 2, 3]))
    with pytest.raises(UsageError, match="sample 1 has length 0"):
        make_loader(["a", ""], length_fn=len)
