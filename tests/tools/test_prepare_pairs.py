"""``odc prepare`` with preference pairs: texts, conversations, tokens; what is learned, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from odc_tools.cli import main
from test_prepare import (
    CHATML,
    prepare,
    refusal,
    train_sentencepiece,
    train_transformers,
    write_lines,
    write_parquet,
)

from odcengine.data import TokenDataset


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "sp": train_sentencepiece(folder / "plain.model"),
        "chat": train_transformers(folder / "chat", CHATML),
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def texts(tools: dict[str, Path], dataset: TokenDataset, index: int) -> list[tuple[str, str]]:
    """Of both sequences of a pair the whole text and what is learned of it."""
    decode = transformers.AutoTokenizer.from_pretrained(tools["chat"]).decode
    return [
        (
            decode(sequence["input_ids"].tolist()),
            decode(sequence["input_ids"][sequence["loss_mask"]].tolist()),
        )
        for sequence in dataset[index]["sequences"]
    ]


PAIR = {"prompt": "the quick\n", "chosen": "fox jumps", "rejected": "dog"}


def test_texts(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As prompt and completion, twice; from Parquet, under other names, and with scores beside them."""
    single = [{"prompt": PAIR["prompt"], "completion": PAIR[key]} for key in ("chosen", "rejected")]
    right = prepare(tools, "sp", write_lines(tmp_path / "single.jsonl", single), out=tmp_path / "single")
    records = [{**PAIR, "score": 1}, {**PAIR, "rejected": PAIR["chosen"]}, PAIR]
    renamed = [
        {"question": r["prompt"], "good": r["chosen"], "bad": r["rejected"], "text": "not this"}
        for r in records
    ]
    columns = ["--column", "prompt=question", "--column", "chosen=good", "--column", "rejected=bad"]
    for path, options in (
        (write_lines(tmp_path / "a.jsonl", records), []),
        (write_parquet(tmp_path / "a.parquet", renamed), columns),
    ):
        dataset = prepare(
            tools, "sp", path, *options, "--workers", 2, out=tmp_path / f"{path.suffix[1:]}_out"
        )
        assert "samples     2 of 4 sequences; 1 with equal answers, left out" in capsys.readouterr().out
        assert dataset.metadata["version"] == 3
        for pair in dataset:
            for sequence, sample in zip(pair["sequences"], right, strict=True):
                assert sequence.keys() == {"input_ids", "loss_mask"}
                for key, values in sequence.items():
                    assert values.tolist() == sample[key].tolist()
        assert dataset.lengths.tolist() == [right.lengths.sum()] * 2
        assert dataset.num_targets.tolist() == [right.num_targets.sum()] * 2
        assert main(["prepare", "--info", str(tmp_path / f"{path.suffix[1:]}_out")]) == 0


def test_conversations(tools: dict[str, Path], tmp_path: Path) -> None:
    """Answers alone and whole conversations are the same pair; what both have in common is not learned."""
    before = [user("a dog"), answer("boil"), user("frogs")]
    both = {"chosen": [*before, answer("fox")], "rejected": [*before, answer("over 42")]}
    alone = {key: messages[3:] for key, messages in both.items()}
    long = {"chosen": [*before, answer("fox"), user("over"), answer("wizards")], "rejected": both["rejected"]}
    asked = {"chosen": [user("frogs"), answer("fox")], "rejected": [user("frogs"), answer("dog")]}
    records: list[dict[str, Any]] = [
        both,
        {**both, "prompt": before},
        {**both, "prompt": " frogs ", "messages": both["chosen"]},  # as data sets of the hub have it
        {**alone, "prompt": before},
        {"prompt": "frogs", **{key: asked[key][1:] for key in asked}},
        asked,
        long,
    ]
    dataset = prepare(tools, "chat", write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "tokens")
    assert len(dataset) == len(records)
    end = "<|im_end|>\n"
    for index in range(4):
        (whole, chosen), (_, rejected) = texts(tools, dataset, index)
        assert (chosen, rejected) == (f"fox{end}", f"over 42{end}")
        assert whole.startswith("<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\nboil<|im_end|>\n")
    assert texts(tools, dataset, 4) == texts(tools, dataset, 5)
    assert texts(tools, dataset, 4)[0][0] == f"<|im_start|>user\nfrogs{end}<|im_start|>assistant\nfox{end}"
    assert texts(tools, dataset, 6)[0][1] == f"fox{end}wizards{end}"
    last = prepare(tools, "chat", tmp_path / "a.jsonl", "--turns", "last", out=tmp_path / "last")
    assert texts(tools, last, 6)[0][1] == f"wizards{end}"


def test_long_pairs(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, longer = " ".join(["frogs"] * 30), " ".join(["wizards"] * 60)
    records = [PAIR, {**PAIR, "chosen": long}, {**PAIR, "prompt": longer}]
    path, out = write_lines(tmp_path / "a.jsonl", records), tmp_path / "tokens"
    assert "a.jsonl:2: the sample has " in refusal(capsys, tools, "sp", path, "--max-length", 20, out=out)
    limit = ["--max-length", 20, "--too-long"]
    assert len(prepare(tools, "sp", path, *limit, "skip", out=tmp_path / "skipped")) == 1
    capsys.readouterr()
    cut = prepare(
        tools, "sp", path, *limit, "truncate", out=tmp_path / "cut"
    )  # of the third no answer is left
    assert "samples     2 of 4 sequences; 1 too long, left out; 1 too long, cut" in capsys.readouterr().out
    assert [len(sequence["input_ids"]) for sequence in cut[1]["sequences"]] == [
        20,
        len(cut[0]["sequences"][1]["input_ids"]),
    ]
    known = write_lines(
        tmp_path / "b.jsonl", [{**r, "ref_chosen_logps": -1, "ref_rejected_logps": -2.5} for r in records]
    )
    assert "but its log-probabilities are of whole answers" in refusal(
        capsys, tools, "sp", known, *limit, "truncate", out=out
    )
    dataset = prepare(tools, "sp", known, *limit, "skip", out=tmp_path / "known")
    assert [sequence["ref_logprobs"] for sequence in dataset[0]["sequences"]] == [-1, -2.5]


def test_tokens(tools: dict[str, Path], tmp_path: Path) -> None:
    """Pairs that are tokens already, and pairs that are held out."""
    pairs = [
        {"sequences": [{"input_ids": [1, number, 3], "loss_mask": [0, 1, 1], "ref_logprobs": -number}] * 2}
        for number in range(1, 10)
    ]
    path, out = write_lines(tmp_path / "a.jsonl", pairs), tmp_path / "tokens"
    assert main(["prepare", str(path), "--out", str(out), "--workers", "1", "--hold-out", "1/3"]) == 0
    dataset, held_out = TokenDataset.open(out), TokenDataset.open(out / "held_out")
    found = [[pair["sequences"][1]["ref_logprobs"] for pair in part] for part in (dataset, held_out)]
    assert found == [[-1, -2, -4, -5, -7, -8], [-3, -6, -9]]
    assert dataset[1]["sequences"][0]["input_ids"].tolist() == [1, 2, 3]
    assert held_out[2]["sequences"][0]["loss_mask"].tolist() == [False, True, True]


CHAT_PAIR = {"chosen": [user("a"), answer("b")], "rejected": [user("a"), answer("c")]}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"chosen": "a", "rejected": "b"}], "prompt must be the text before both, but is NoneType None"),
        ([{**PAIR, "chosen": [answer("a")]}], "both must be text, or lists of messages"),
        ([PAIR, {"prompt": "a", "completion": "b"}], "a.jsonl:2: the record has the keys of `prompt, comp"),
        ([{**CHAT_PAIR, "chosen": [user("b"), answer("b")]}], "have no message in common"),
        ([{**CHAT_PAIR, "chosen": [user("a")]}], "is only the beginning of the other"),
        (
            [{key: [user("a"), user(key)] for key in ("chosen", "rejected")}],
            "part at message 1, of the role user",
        ),
        (
            [{key: [answer(key)] for key in ("chosen", "rejected")}],
            "begins with the assistant, and there is no",
        ),
        ([{**CHAT_PAIR, "prompt": "other"}], "does not begin with prompt; leave prompt away"),
        ([{**CHAT_PAIR, "chosen": [{"role": "user"}]}], "content of message 0 of chosen must be text"),
        ([{**PAIR, "rejected": PAIR["chosen"]}], "the same in all pairs; there is nothing to learn"),
        ([{**PAIR, "ref_chosen_logps": -1.0}], "ref_rejected_logps must be a finite number, but is NoneType"),
        (
            [{**PAIR, "ref_chosen_logps": -1, "ref_rejected_logps": -1}, PAIR],
            "are known of some sequences only",
        ),
    ],
)
def test_what_is_refused(
    tools: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    records: list[Any],
    message: str,
) -> None:
    path = write_lines(tmp_path / "a.jsonl", records)
    shown = refusal(capsys, tools, "chat", path, out=tmp_path / "tokens")
    assert message in shown
    assert "a.jsonl" in shown


def test_options_that_are_refused(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", [PAIR])
    singles = write_lines(tmp_path / "singles.jsonl", [{"text": "fox"}])
    out = tmp_path / "tokens"
    message = refusal(capsys, tools, "sp", pairs, singles, out=out)
    assert "pairs.jsonl has preference pairs, " in message
    assert "singles.jsonl has none; a data set holds one kind of samples" in message
    for text in ("chosen", "better=chosen"):
        message = refusal(capsys, tools, "sp", pairs, "--column", text, out=out)
        assert f"--column {text}: it must be KEY=NAME with KEY one of chosen, completion, " in message
    # Without one answer it is no pair: then the other keys say what it is.
    as_text = prepare(
        tools, "sp", pairs, "--column", "rejected=", "--column", "completion=chosen", out=tmp_path / "single"
    )
    assert as_text.sequences is None
    assert json.loads((tmp_path / "single" / "meta.json").read_text())["version"] == 2
    assert np.array_equal(as_text.lengths, [as_text.num_tokens])
