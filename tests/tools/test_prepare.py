"""``odc prepare`` with real files and tokenizers that are trained on the spot."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import sentencepiece
import yaml
from odc_tools import _prepare_progress, _prepare_workers
from odc_tools import prepare as prepare_module
from odc_tools._sources import open_sources
from odc_tools.cli import main

import odcengine
from odcengine.data import MinibatchLoader, TokenDataset
from odcengine.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("", "launcher", "tools"))

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As some reasoning models do it: the thoughts of earlier turns are dropped.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system turn, please') }}{% endif %}"
    + CHATML
)
ASCII_WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "dog", "wizards", "boil", "42", "frogs"]
WORDS = [*ASCII_WORDS, "caf\u00e9", "\U0001f600"]


def sentence(rng: random.Random, longest: int = 12, words: list[str] = WORDS) -> str:
    return " ".join(rng.choices(words, k=rng.randint(1, longest)))


def conversation(rng: random.Random, words: list[str] = WORDS) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": sentence(rng, words=words)})
        messages.append({"role": "assistant", "content": sentence(rng, words=words)})
    return {"messages": messages, "id": rng.random()}


def pair(rng: random.Random) -> dict[str, Any]:
    return {"prompt": sentence(rng) + "\n", "completion": sentence(rng)}


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, records: list[Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for record in records for name in record)
    table = pyarrow.Table.from_pylist([{name: record.get(name) for name in names} for record in records])
    pyarrow.parquet.write_table(table, path, **options)
    return path


def train_sentencepiece(path: Path, **options: Any) -> Path:
    rng, model = random.Random(1), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence(rng) for _ in range(400)]),
        model_writer=model,
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


def train_transformers(
    path: Path, template: str | None, *, metaspace: bool = False, eos: bool = True
) -> Path:
    """A byte-level BPE (as GPT-2's, Llama 3's, Qwen's), or one with blanks put in front (as Llama 2's)."""
    rng = random.Random(1)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>" if metaspace else None))
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    if metaspace:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        alphabet = list("\n\u2581") + [chr(i) for i in range(33, 127)]
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([sentence(rng) for _ in range(400)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    if not metaspace:
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>" if eos else None
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers by name."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "sp": train_sentencepiece(folder / "plain.model"),
        "no_eos": train_sentencepiece(folder / "no_eos.model", eos_id=-1),
        "chat": train_transformers(folder / "chat", CHATML),
        "rewriting": train_transformers(folder / "rewriting", REWRITING),
        "strict": train_transformers(folder / "strict", STRICT),
        "bare": train_transformers(folder / "bare", None, eos=False),
        "metaspace": train_transformers(folder / "metaspace", CHATML, metaspace=True),
    }


def prepare(tools: dict[str, Path], tokenizer: str, *arguments: Any, out: Path) -> TokenDataset:
    """Runs the command in this process; it must succeed."""
    words = ["prepare", *map(str, arguments), "--tokenizer", str(tools[tokenizer]), "--out", str(out)]
    if "--workers" not in words:
        words += ["--workers", "1"]
    assert main(words) == 0
    return TokenDataset.open(out)


def refusal(
    capsys: pytest.CaptureFixture[str], tools: dict[str, Path], tokenizer: str, *arguments: Any, out: Path
) -> str:
    """Runs the command, which must refuse with exit code 2 and leave nothing behind; returns its message."""
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    words = ["prepare", *map(str, arguments), "--tokenizer", str(tools.get(tokenizer, tokenizer))]
    assert main([*words, "--out", str(out), "--workers", "1"]) == 2
    assert sorted(out.parent.iterdir()) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("odc prepare: error: ")
    return captured.err


def learned(decode: Any, dataset: TokenDataset, index: int) -> list[str]:
    """The learned stretches of a sample as text."""
    sample = dataset[index]
    mask, tokens = sample["loss_mask"], sample["input_ids"].tolist()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int))).tolist()
    return [decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# ---- what is learned -----------------------------------------------------------------------------------


def test_pairs_with_sentencepiece(tools: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(2)
    records = [pair(rng) for _ in range(50)] + [
        {"prompt": "", "completion": "fox"},
        {"prompt": "a", "completion": ""},
    ]
    dataset = prepare(tools, "sp", write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "tokens")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tools["sp"]))
    assert len(dataset) == 52
    for record, sample in zip(records, dataset, strict=True):
        ids = model.encode(record["prompt"] + record["completion"])
        assert sample["input_ids"].tolist() == [model.bos_id(), *ids, model.eos_id()]
        prompt = model.encode(record["prompt"])
        assert ids[: len(prompt)] == prompt
        mask = [0] * (1 + len(prompt)) + [1] * (len(ids) - len(prompt) + 1)
        assert sample["loss_mask"].tolist() == [bool(x) for x in mask]
    assert dataset.metadata["source"]["num_straddling"] == 0


@pytest.mark.parametrize("tokenizer", ["sp", "chat", "metaspace"])
def test_text(tools: dict[str, Path], tmp_path: Path, tokenizer: str) -> None:
    dataset = prepare(
        tools, tokenizer, write_lines(tmp_path / "a.jsonl", [{"text": "the fox jumps"}, {"text": ""}]),
        out=tmp_path / "tokens",
    )  # fmt: skip
    for sample in dataset:
        assert sample["loss_mask"].tolist() == [False] + [True] * (len(sample["input_ids"]) - 1)
    assert dataset.num_targets.tolist() == (dataset.lengths - 1).tolist()
    assert dataset.lengths[1] == 2  # beginning and end of an empty text


@pytest.mark.parametrize("tokenizer", ["chat", "metaspace"])
def test_conversations(tools: dict[str, Path], tmp_path: Path, tokenizer: str) -> None:
    """Exactly what the template adds for the assistant's turns is learned; tokens are the whole text's."""
    rng = random.Random(3)
    words = ASCII_WORDS if tokenizer == "metaspace" else WORDS
    records = [conversation(rng, words) for _ in range(40)]
    records.append({"messages": [{"role": "user", "content": "nobody answers"}]})
    dataset = prepare(tools, tokenizer, write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "tokens")
    own = transformers.AutoTokenizer.from_pretrained(tools[tokenizer])
    for index, record in enumerate(records):
        expected = own.apply_chat_template(record["messages"], tokenize=False)
        ids = own(expected, add_special_tokens=False)["input_ids"]
        assert dataset[index]["input_ids"].tolist() == ids
        turns = [m["content"] + "<|im_end|>\n" for m in record["messages"] if m["role"] == "assistant"]
        texts = learned(own.decode, dataset, index)
        if tokenizer == "metaspace":  # without a decoder, pieces come with their marks
            texts = [text.replace(" ", "").replace("\u2581", " ").lstrip() for text in texts]
            turns = [turn.lstrip() for turn in turns]
            assert [t.replace(" ", "") for t in texts] == [t.replace(" ", "") for t in turns]
        else:
            assert texts == turns
    assert dataset.num_targets[-1] == 0
    assert dataset.metadata["source"]["num_straddling"] == 0


def test_tools_reach_the_template(tools: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHATML)
    tool = {"type": "function", "function": {"name": "wizard", "parameters": {"type": "object"}}}
    records = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "tools": given,
        }
        for given in ([tool], None)
    ]
    dataset = prepare(
        tools,
        "chat",
        write_lines(tmp_path / "a.jsonl", records),
        "--chat-template",
        template,
        out=tmp_path / "t",
    )
    own = transformers.AutoTokenizer.from_pretrained(tools["chat"])
    texts = [own.decode(sample["input_ids"].tolist()) for sample in dataset]
    assert texts[0] == "[wizard]" + texts[1]
    assert learned(own.decode, dataset, 0) == learned(own.decode, dataset, 1) == ["b<|im_end|>\n"]


@pytest.mark.parametrize("tokenizer", ["sp", "chat", "slow"])
def test_tokens_over_the_border(
    tools: dict[str, Path], tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that begins in the prompt and ends in the completion is learned, and counted."""
    if tokenizer == "slow":
        monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "is_fast", False)
        tokenizer = "chat"
    records = [{"prompt": "the wiz", "completion": "ards boil"}, {"prompt": "the", "completion": " fox"}]
    dataset = prepare(tools, tokenizer, write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "tokens")
    assert dataset.metadata["source"]["num_straddling"] == 1
    decode = (
        sentencepiece.SentencePieceProcessor(model_file=str(tools["sp"])).decode
        if tokenizer == "sp"
        else lambda ids: transformers.AutoTokenizer.from_pretrained(tools["chat"]).decode(
            ids, skip_special_tokens=True
        )
    )
    assert [text.strip() for text in learned(decode, dataset, 0)] == ["wizards boil"]
    assert [text.strip() for text in learned(decode, dataset, 1)] == ["fox"]
    prepare_module._tokenizer.cache_clear()  # a tokenizer that was made slow


def test_offsets_and_prefixes_agree(tools: dict[str, Path]) -> None:
    """The two ways of finding the learned tokens give the same masks, within characters of many bytes too."""
    from odcengine.data.tokenizer import TextTokenizer, load_tokenizer

    tokenizer, rng = load_tokenizer(tools["chat"]), random.Random(4)
    texts, spans = [], []
    for _ in range(100):
        parts = [sentence(rng, 4) + rng.choice(["\n", " ", ". "]) for _ in range(5)]
        edges = np.cumsum([0, *map(len, parts)]).tolist()
        texts.append("".join(parts))
        spans.append([(edges[1], edges[2]), (edges[3], edges[5])])
    fast = tokenizer.encode_marked(texts, spans)
    slow = TextTokenizer.encode_marked(tokenizer, texts, spans)
    for one, other in zip(fast, slow, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.loss_mask.sum() > 0
        # They may differ where a blank ends a span: tokens take it along to the next.
        assert np.abs(one.loss_mask.astype(int) - other.loss_mask).sum() <= 2


# ---- the same for any number of workers ----------------------------------------------------------------


def test_workers_and_cuts_do_not_matter(tools: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(5)
    first = write_lines(tmp_path / "a.jsonl", [conversation(rng) for _ in range(700)])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(pair(rng)) + "\n\n" for _ in range(600))
    contents = []
    for workers in (1, 2, 3):
        out = tmp_path / f"tokens{workers}"
        dataset = prepare(
            tools, "chat", first, tmp_path / "b.jsonl.gz", "--workers", workers,
            "--max-length", 80, "--too-long", "skip", out=out,
        )  # fmt: skip
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert set(contents[0]) == {"samples.arrow", "meta.json"}
    source = dataset.metadata["source"]
    assert [entry["num_records"] for entry in source["inputs"]] == [700, 600]
    assert [entry["kind"] for entry in source["inputs"]] == ["messages", "prompt, completion"]
    assert source["num_records"] == 1300
    assert 0 < source["num_skipped"] == 1300 - len(dataset)
    assert dataset.lengths.max() <= 80


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("die", "a worker process died, perhaps killed"), ("hang", "a worker has made no progress for 1 s")],
)
def test_lost_worker(
    tools: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    message: str,
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 6000)
    monkeypatch.setattr(prepare_module, "_tokenize", {"die": die, "hang": hang}[trouble])
    if trouble == "hang":
        monkeypatch.setattr(_prepare_workers, "_CHUNK_TIMEOUT_S", 1.0)
    words = ["prepare", str(path), "--tokenizer", str(tools["sp"]), "--out", str(tmp_path / "t")]
    children = set(multiprocessing.active_children())
    started = time.monotonic()
    assert main([*words, "--workers", "2"]) == 1
    assert time.monotonic() - started < 200  # far less than either takes by itself
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert set(multiprocessing.active_children()) <= children


def die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*arguments: Any) -> None:
    time.sleep(1000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tools: dict[str, Path], tmp_path: Path, number: signal.Signals) -> None:
    """Nothing is left, neither files nor processes, and no traceback is shown."""
    write_lines(tmp_path / "b.jsonl", [{"text": "fox " * 2000}] * 20000)
    words = [
        "prepare",
        tmp_path / "b.jsonl",
        "--tokenizer",
        tools["sp"],
        "--out",
        tmp_path / "t",
        "--workers",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "odc_tools", *map(str, words)],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".t.*.tmp/samples.arrow")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]
    deadline = time.monotonic() + 30
    while [p for p in psutil.process_iter() if is_of_session(p, process.pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def test_error_of_a_worker(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first broken record in the data's order is named, whichever worker was first."""
    lines = [json.dumps({"text": "a"})] * 2000
    lines[700] = lines[1500] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        str(tools["sp"]),
        "--out",
        str(tmp_path / "t"),
    ]
    assert main([*words, "--workers", "3"]) == 2
    assert "a.jsonl:701: not JSON" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


# ---- Hugging Face data sets ----------------------------------------------------------------------------


def test_datasets_of_hugging_face(
    tools: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rng = random.Random(6)
    records = [{"messages": conversation(rng)["messages"]} for _ in range(300)]
    records[0]["messages"][0]["name"] = "anna"  # a column that is null in all other messages
    reference = prepare(tools, "chat", write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "reference")
    single = datasets.Dataset.from_list(records)
    single.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": single, "test": single.select(range(5))}).save_to_disk(tmp_path / "both")
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", records)
    for number, arguments in enumerate(
        ([tmp_path / "single"], [tmp_path / "both", "--split", "train"], [f"hf:{tmp_path / 'files'}"])
    ):
        found = prepare(tools, "chat", *arguments, "--workers", "2", out=tmp_path / f"tokens{number}")
        assert len(found) == 300
        for one, other in zip(found, reference, strict=True):
            assert one["input_ids"].tolist() == other["input_ids"].tolist()
            assert one["loss_mask"].tolist() == other["loss_mask"].tolist()
        (entry,) = found.metadata["source"]["inputs"]
        assert entry["size"] > 0
        assert len(entry["sha256"]) == 64

    out = tmp_path / "no"
    several = refusal(capsys, tools, "chat", tmp_path / "both", out=out)
    assert "it has several splits; give --split, one of train, test" in several
    assert "no split dev" in refusal(capsys, tools, "chat", tmp_path / "both", "--split", "dev", out=out)
    assert "single data set" in refusal(
        capsys, tools, "chat", tmp_path / "single", "--split", "train", out=out
    )
    assert "datasets cannot open it" in refusal(capsys, tools, "chat", f"hf:{tmp_path / 'nothing'}", out=out)
    assert "no data set that save_to_disk wrote and without Parquet files" in refusal(
        capsys, tools, "chat", tmp_path / "files", out=out
    )
    datasets.Dataset.from_list(
        [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    ).save_to_disk(tmp_path / "holes")
    message = refusal(capsys, tools, "chat", tmp_path / "holes", out=out)
    assert f"{tmp_path / 'holes'} row 1: the record has" in message


# ---- Parquet, and tokens that are there already -------------------------------------------------------


def test_parquet(tools: dict[str, Path], tmp_path: Path) -> None:
    """The same samples as from JSONL, however files and row groups are cut."""
    rng = random.Random(7)
    records = [{"messages": conversation(rng)["messages"], "id": number} for number in range(700)]
    records[3]["messages"][0]["name"] = "anna"  # a column that is null in all other messages
    reference = prepare(tools, "chat", write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "reference")
    one = write_parquet(tmp_path / "one.parquet", records, row_group_size=90)
    unnamed = write_parquet(tmp_path / "unnamed", records, row_group_size=700, compression="zstd")
    folder = tmp_path / "folder"
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", records[:300])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", records[300:])
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", records[:5])
    write_parquet(folder / ".cache" / "train-00000-of-00001.parquet", records[:5])
    for number, arguments in enumerate(
        ([one], [one, "--workers", "3"], [unnamed], [folder, "--split", "train", "--workers", "2"])
    ):
        found = prepare(tools, "chat", *arguments, out=tmp_path / f"tokens{number}")
        assert len(found) == 700
        for sample, other in zip(found, reference, strict=True):
            assert sample["input_ids"].tolist() == other["input_ids"].tolist()
            assert sample["loss_mask"].tolist() == other["loss_mask"].tolist()
        inputs = found.metadata["source"]["inputs"]
        assert sum(entry["num_records"] for entry in inputs) == 700
        assert {entry["kind"] for entry in inputs} == {"messages"}
        assert [entry["size"] for entry in inputs] == [
            path.stat().st_size
            for path in (sorted((folder / "data").glob("train*")) if number == 3 else [arguments[0]])
        ]


def test_parquet_that_cannot_be_used(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "no"
    records = [{"text": "fox"}] * 600
    path = write_parquet(tmp_path / "a.parquet", [*records, {"text": None}])
    message = refusal(capsys, tools, "sp", path, out=out)
    assert f"{path} row 600: the record has text (null); expected" in message
    column = pyarrow.array([*[b"fox"] * 300, b"caf\xe9"]).cast(pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(column), column.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert f"{path} row 300: not UTF-8" in refusal(capsys, tools, "sp", path, out=out)
    write_parquet(path, [{"words": "fox", "id": 3}])
    assert f"{path} row 0: the record has id, words; expected" in refusal(capsys, tools, "sp", path, out=out)
    write_parquet(
        path, [{"text": str(number)} for number in range(5000)], compression=None, row_group_size=500
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 2000] = bytes(2000)
    path.write_bytes(content)
    assert re.search(
        r"a.parquet row \d+: (cannot be read|text must be)", refusal(capsys, tools, "sp", path, out=out)
    )
    path.write_text("no Parquet")
    assert "a.parquet: cannot be read as Parquet (" in refusal(capsys, tools, "sp", path, out=out)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    assert "no records; there is nothing to train on" in refusal(capsys, tools, "sp", path, out=out)

    folder = tmp_path / "folder"
    for name in ("validation.parquet", "train/0.parquet"):
        write_parquet(folder / name, records[:3])
    several = refusal(capsys, tools, "sp", folder, out=out)
    assert f"{folder}: it has several splits; give --split, one of train, validation" in several
    message = refusal(capsys, tools, "sp", folder, "--split", "dev", out=out)
    assert f"{folder}: it has no split dev; give --split, one of train, validation" in message
    assert "--subset x: it chooses a configuration of hf:NAME" in refusal(
        capsys, tools, "sp", folder, "--split", "train", "--subset", "x", out=out
    )


def test_a_large_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    """Of forty megabytes in one row group a few are in memory at a time; other columns are not read."""
    records = [{"text": f"{number} " * 300, "picture": bytes(2000)} for number in range(20_000)]
    path = write_parquet(tmp_path / "a.parquet", records, row_group_size=20_000, use_dictionary=False)
    (source,) = open_sources([str(path)], subset=None, split=None, keys=("text",))
    before, most, number = pyarrow.total_allocated_bytes(), 0, 0
    for chunk in source.chunks():
        assert chunk.first == number
        assert len(chunk.content[0]) < 3 * 2**20
        number += chunk.num_rows
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == 20_000
    assert chunk.position == source.size
    assert most < 16 * 2**20
    assert source.read(chunk)[-1].value == {"text": "19999 " * 300}


def test_tokens_that_are_there_already(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: list[dict[str, Any]] = [
        {"input_ids": [1, 5, 7], "labels": [-100, 5, 7], "text": "not looked at"},
        {"input_ids": [4, 4], "loss_mask": [1, 0]},
        {"input_ids": [3, 2, 9, 8]},
    ]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 10}')
    model = ("--model", str(tmp_path / "model"))
    for path in (
        write_lines(tmp_path / "a.jsonl", samples * 200),
        write_parquet(tmp_path / "a.parquet", samples * 200),
    ):
        out = tmp_path / f"tokens{path.suffix}"
        assert main(["prepare", str(path), "--out", str(out), "--workers", "2", *model]) == 0
        found = TokenDataset.open(out)
        assert len(found) == 600
        for index, mask in ((0, [0, 1, 1]), (1, [1, 0]), (599, [1, 1, 1, 1])):
            assert found[index]["input_ids"].tolist() == samples[index % 3]["input_ids"]
            assert found[index]["loss_mask"].tolist() == mask
        assert found.metadata["source"]["tokenizer"] is None
        assert found.metadata["source"]["inputs"][0]["kind"] == "input_ids"
    cut = [
        "prepare",
        str(path),
        "--max-length",
        "2",
        "--too-long",
        "truncate",
        "--out",
        str(tmp_path / "cut"),
    ]
    assert main([*cut, "--workers", "1"]) == 0
    assert TokenDataset.open(tmp_path / "cut")[0]["loss_mask"].tolist() == [False, True]
    assert TokenDataset.open(tmp_path / "cut").metadata["source"]["num_truncated"] == 400
    capsys.readouterr()
    for records, arguments, message in (
        (
            [{"text": "fox"}],
            [],
            "row 0: the record has text, and no tokens (input_ids); give --tokenizer PATH",
        ),
        (
            [samples[1], {"input_ids": [11]}],
            model,
            "row 1: it has the token id 11, but the vocabulary of --model",
        ),
        ([samples[1], {"input_ids": []}], [], "row 1: input_ids has shape [0]"),
        ([samples[0], {"input_ids": [1], "labels": [2]}], [], "row 1: labels must have the shape"),
        ([samples[0]], ["--max-length", "2"], "row 0: the sample has 3 tokens, more than --max-length 2"),
        ([samples[0]], ["--chat-template", "x"], "--chat-template: tokens need none"),
    ):
        write_parquet(path, records)
        assert main(["prepare", str(path), "--out", str(tmp_path / "no"), "--workers", "1", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_training_on_raw_data_is_refused_with_the_command(tmp_path: Path) -> None:
    write_parquet(tmp_path / "folder" / "train" / "0.parquet", [{"text": "fox"}])
    for path, what in (
        (tmp_path / "folder", "a directory of Parquet files"),
        (tmp_path / "folder" / "train" / "0.parquet", "a file"),
        ("hf:name", "a data set of the Hugging Face hub"),
    ):
        with pytest.raises(ConfigError) as caught:
            TokenDataset.open(path)
        assert f"{path}: it is {what}, but training reads tokens" in str(caught.value)
        assert f"odc prepare {path} --tokenizer PATH --out DIR" in str(caught.value)


# ---- what is refused -----------------------------------------------------------------------------------

GOOD = '{"text": "fox"}\n'


@pytest.mark.parametrize(
    ("tokenizer", "content", "message"),
    [
        (
            "sp",
            GOOD + "\n{'text': 1}\n",
            r"a.jsonl:3: not JSON \(.* at column 2\); expected one object a line",
        ),
        ("sp", GOOD + '{"text": "fo', r"a.jsonl:2: not JSON"),
        ("sp", GOOD + "[" * 100_000 + "\n", r"a.jsonl:2: not JSON"),
        ("sp", GOOD.encode() + b'{"text": "caf\xe9"}', r"a.jsonl:2: not UTF-8 \(byte 14 of the line\)"),
        (
            "sp",
            GOOD + '{"text": "\\ud83d"}',
            r"a.jsonl:2: the text holds half of a surrogate pair \('\\ud83d'\)",
        ),
        ("sp", GOOD + '["text"]', r"a.jsonl:2: a record must be an object with the keys .*, but is list"),
        (
            "sp",
            GOOD + '{"txt": "a", "id": 1}',
            r"a.jsonl:2: the record has id, txt; expected the keys messages,",
        ),
        (
            "sp",
            '{"prompt": "a", "completion": null}',
            r"the record has completion \(null\), prompt; expected",
        ),
        ("sp", GOOD + '{"text": 5}', r"a.jsonl:2: text must be text, but is int 5"),
        (
            "sp",
            GOOD + '{"prompt": "a", "completion": "b"}',
            r"a.jsonl:2: the record has the keys of `prompt, completion`, but the first of this file those "
            r"of `text`; a file holds one kind of records, so split it",
        ),
        ("sp", "", r"a.jsonl: no records; there is nothing to train on"),
        ("sp", "\n \n", r"a.jsonl: no records"),
        (
            "sp",
            '\n{"messages": [{"role": "user", "content": "a"}]}',
            r"a.jsonl:2: records with messages need a chat template, but the tokenizer .*plain.model has "
            r"none; give a tokenizer directory of transformers",
        ),
        ("bare", '{"messages": [{"role": "user", "content": "a"}]}', r"give one by --chat-template FILE"),
        ("bare", GOOD, r"a.jsonl:1: .* has no such token; set eos_token in its tokenizer_config.json"),
        ("no_eos", GOOD, r"sentencepiece: train with eos_id"),
        ("chat", '{"messages": []}', r"a.jsonl:1: messages must be a list of at least one, but is list \[\]"),
        (
            "chat",
            '{"messages": ["hi"]}',
            r"message 0 must be an object with role and content, but is str 'hi'",
        ),
        ("chat", '{"messages": [{"role": "user", "content": ["a"]}]}', r"content of message 0 must be text"),
        ("chat", '{"messages": [{"content": "a"}]}', r"role of message 0 must be text, but is NoneType None"),
        (
            "strict",
            '{"messages": [{"role": "system", "content": "a"}]}',
            r"a.jsonl:1: the chat template refuses the conversation: No system turn, please",
        ),
        (
            "chat",
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            r"a.jsonl:1: the conversation begins with the assistant, and the chat template has no text",
        ),
        ("chat", '{"messages": [{"role": "user", "content": "a"}]}', r"no record has anything to learn"),
    ],
)
def test_broken_input(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    tokenizer: str, content: str | bytes, message: str,
) -> None:  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(message, refusal(capsys, tools, tokenizer, path, out=tmp_path / "tokens"))


def test_template_that_rewrites_earlier_turns(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        ("user", "a"),
        ("assistant", "<think>hm</think>b"),
        ("user", "c"),
        ("assistant", "<think>x</think>d"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages[:2]}, {"messages": messages}])
    message = refusal(capsys, tools, "rewriting", path, out=tmp_path / "tokens")
    assert "a.jsonl:2: the loss mask cannot be derived from the chat template: around message 1" in message
    assert "'<think>hm</think>b<|im_end|>\\n' became 'b<|im_end|>\\n" in message
    assert "learn only the last turn by --turns last" in message
    last = prepare(tools, "rewriting", path, "--turns", "last", out=tmp_path / "last")
    decode = transformers.AutoTokenizer.from_pretrained(tools["rewriting"]).decode
    assert learned(decode, last, 0) == ["<think>hm</think>b<|im_end|>\n"]
    assert learned(decode, last, 1) == ["<think>x</think>d<|im_end|>\n"]
    assert "b<|im_end|>\n<|im_start|>user\nc" in decode(last[1]["input_ids"].tolist())
    # Or a template that leaves them alone; and one turn is no problem.
    (tmp_path / "chatml.jinja").write_text(CHATML)
    prepare(tools, "rewriting", path, "--chat-template", tmp_path / "chatml.jinja", out=tmp_path / "tokens")
    prepare(tools, "rewriting", write_lines(path, [{"messages": messages[:2]}]), out=tmp_path / "one")


def test_too_long(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["fox", " ".join(["frogs"] * 30), "dog", " ".join(["wizards"] * 40)]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    whole = prepare(tools, "sp", path, out=tmp_path / "whole")
    message = refusal(capsys, tools, "sp", path, "--max-length", "20", out=tmp_path / "tokens")
    assert f"a.jsonl:2: the sample has {whole.lengths[1]} tokens, more than --max-length 20" in message
    skipped = prepare(tools, "sp", path, "--max-length", 20, "--too-long", "skip", out=tmp_path / "skipped")
    assert skipped.lengths.tolist() == whole.lengths[[0, 2]].tolist()
    assert "samples     2; 2 too long, left out" in capsys.readouterr().out
    cut = prepare(tools, "sp", path, "--max-length", 20, "--too-long", "truncate", out=tmp_path / "cut")
    assert cut.lengths.tolist() == np.minimum(whole.lengths, 20).tolist()
    assert cut[3]["input_ids"].tolist() == whole[3]["input_ids"][:20].tolist()
    assert cut.metadata["source"]["num_truncated"] == 2
    message = refusal(
        capsys, tools, "sp", path, "--max-length", 1, "--too-long", "skip", out=tmp_path / "tokens"
    )
    assert "all 4 records are longer than --max-length 1" in message


def test_samples_held_out(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A share of them, evenly spread, in a data set of their own inside; whatever the workers."""
    rng = random.Random(5)
    path = write_lines(tmp_path / "a.jsonl", [{"text": sentence(rng)} for _ in range(600)])
    whole = prepare(tools, "sp", path, out=tmp_path / "whole")
    for workers in (1, 2):
        out = tmp_path / f"parts{workers}"
        rest = prepare(tools, "sp", path, "--hold-out", "0.3", "--workers", workers, out=out)
        assert "held out    180 samples, " in capsys.readouterr().out
        held_out = TokenDataset.open(out / "held_out")
        apart = [number for number in range(600) if (number + 1) * 3 // 10 > number * 3 // 10]
        for part, numbers in ((held_out, apart), (rest, sorted(set(range(600)) - set(apart)))):
            assert part.lengths.tolist() == whole.lengths[numbers].tolist()
            assert part.num_targets.tolist() == whole.num_targets[numbers].tolist()
            for at in (0, len(part) - 1):
                assert part[at]["input_ids"].tolist() == whole[numbers[at]]["input_ids"].tolist()
        assert held_out.metadata["source"]["part"] == "held_out"
        prepare(tools, "sp", path, "--overwrite", out=out)
        assert not (out / "held_out").exists()
    for share in ("0", "1", "some", "1/0"):
        message = refusal(capsys, tools, "sp", path, "--hold-out", share, out=tmp_path / "tokens")
        assert f"--hold-out {share}: it must be a share between 0 and 1" in message
    message = refusal(capsys, tools, "sp", path, "--hold-out", "1/601", out=tmp_path / "tokens")
    assert "--hold-out 1/601: that is none of 600 samples" in message


def test_model_that_does_not_fit(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}])
    model = tmp_path / "model"
    model.mkdir()
    size = sentencepiece.SentencePieceProcessor(model_file=str(tools["sp"])).vocab_size()
    config = model / "config.json"
    out = tmp_path / "tokens"
    config.write_text(json.dumps({"vocab_size": size - 1}))
    message = refusal(capsys, tools, "sp", path, "--model", model, out=out)
    assert f"its vocabulary has {size - 1} tokens, but the tokenizer" in message
    assert f" has {size}; use the model's own tokenizer" in message
    config.write_text(json.dumps({"text_config": {"vocab_size": 32000}}))
    message = refusal(capsys, tools, "sp", path, "--model", model, out=out)
    assert "vocabulary has 32000 tokens" in message
    assert f"only {size}, so it is hardly the model's own" in message
    config.write_text("{}")
    assert "has no vocab_size" in refusal(capsys, tools, "sp", path, "--model", model, out=out)
    assert "cannot be read" in refusal(capsys, tools, "sp", path, "--model", tmp_path, out=out)
    config.write_text("[" * 100_000)
    assert "cannot be read" in refusal(capsys, tools, "sp", path, "--model", model, out=out)
    config.write_text(json.dumps({"vocab_size": None, "text_config": {"vocab_size": 1}}))
    assert "its vocabulary has 1 tokens" in refusal(capsys, tools, "sp", path, "--model", model, out=out)
    config.write_text(json.dumps({"vocab_size": size + 64}))  # padded, as embeddings are
    prepare(tools, "sp", path, "--model", model, out=out)


def test_wrong_arguments(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tokens"
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}])
    assert main(["prepare", "--max-length", "0", "--workers", "0"]) == 2
    message = capsys.readouterr().err
    for part in ("INPUT is required", "--out is req", "--max-length 0", "--workers 0"):
        assert part in message
    assert "needs --max-length" in refusal(capsys, tools, "sp", path, "--too-long", "skip", out=out)
    message = refusal(capsys, tools, "sp", tmp_path / "b.jsonl", "c", out=out)
    assert message.count("does not exist; a data set of the Hugging Face hub is written hf:NAME") == 2
    assert "all inputs are files" in refusal(capsys, tools, "sp", path, "--split", "train", out=out)
    assert "does not exist; give a sentencepiece" in refusal(capsys, tools, "nothing", path, out=out)
    assert "is no sentencepiece model" in refusal(capsys, tools, str(path), path, out=out)
    assert "transformers cannot read the directory" in refusal(capsys, tools, str(tmp_path), path, out=out)
    message = refusal(capsys, tools, str(tools["chat"] / "tokenizer.json"), path, out=out)
    assert f"give its directory, {tools['chat']}" in message
    message = refusal(capsys, tools, "chat", path, "--chat-template", tmp_path / "no.jinja", out=out)
    assert "no.jinja: cannot be read" in message
    message = refusal(capsys, tools, "sp", path, "--chat-template", path, out=out)
    assert "is a sentencepiece model, which has no tokens for the turns" in message
    assert main(["prepare", "a", "--info", str(out)]) == 2
    assert "--info DIR goes alone" in capsys.readouterr().err
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    assert "x.jsonl.gz: cannot be read" in refusal(capsys, tools, "sp", tmp_path / "x.jsonl.gz", out=out)
    packed = gzip.compress(GOOD.encode() * 100)
    (tmp_path / "x.jsonl.gz").write_bytes(packed[:-10])
    assert "x.jsonl.gz: cannot be read" in refusal(capsys, tools, "sp", tmp_path / "x.jsonl.gz", out=out)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
        ("{% if", "unexpected 'end of template'"),
    ],
)
def test_template_that_fails(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, message: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [conversation(random.Random(0))])
    (tmp_path / "t.jinja").write_text(template)
    words = (path, "--chat-template", tmp_path / "t.jinja")
    text = refusal(capsys, tools, "chat", *words, out=tmp_path / "tokens")
    assert "a.jsonl:1: the chat template refuses the conversation: " in text
    assert message in text


def test_nothing_to_learn(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "fox " * 9, "completion": "dog"}] * 3)
    words = ("--max-length", 4, "--too-long", "truncate")
    message = refusal(capsys, tools, "sp", path, *words, out=tmp_path / "tokens")
    assert "no record has anything to learn" in message
    write_lines(path, [{"prompt": "fox " * 9, "completion": "dog"}, {"prompt": "a", "completion": "dog"}])
    assert (prepare(tools, "sp", path, *words, out=tmp_path / "tokens").num_targets > 0).tolist() == [0, 1]


def test_gzip_by_content(tools: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(GOOD.encode() * 3))
        assert len(prepare(tools, "sp", tmp_path / name, out=tmp_path / f"{name}.tokens")) == 3


def test_places_that_cannot_be_used(
    tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}])
    message = refusal(capsys, tools, "sp", "/dev/null", out=tmp_path / "tokens")
    assert "/dev/null: it is no regular file" in message
    (tmp_path / "empty.model").write_bytes(b"")
    message = refusal(capsys, tools, str(tmp_path / "empty.model"), path, out=tmp_path / "tokens")
    assert "is no sentencepiece model (the file is empty)" in message
    for out in (path / "tokens", tmp_path / ("x" * 240)):
        assert main(["prepare", str(path), "--tokenizer", str(tools["sp"]), "--out", str(out)]) == 2
        assert f"{out} cannot be made: " in capsys.readouterr().err


def test_full_disk(tools: dict[str, Path], tmp_path: Path) -> None:
    """A limit of the file size stands for it: the write fails with an OSError as well."""
    write_lines(tmp_path / "a.jsonl", [{"text": "the quick brown fox " * 20}] * 20_000)
    words = ["-m", "odc_tools", "prepare", "a.jsonl", "--tokenizer", str(tools["sp"]), "--out", "tokens"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", sys.executable, *words, "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    # On a slow machine some lines of progress come before.
    assert re.fullmatch(r"(odc prepare: \d+%, .*\n)*odc prepare: error: .*File too large\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_missing_packages(
    tools: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}])
    prepare_module._tokenizer.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        assert "pip install 'odcengine[hf]'" in refusal(capsys, tools, "chat", path, out=tmp_path / "t")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        message = refusal(capsys, tools, "sp", "hf:something", out=tmp_path / "t")
        assert "hf:something: data sets of Hugging Face need datasets" in message
        assert "pip install 'odcengine[hf]'" in message
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert "pip install 'pyarrow>=" in refusal(capsys, tools, "sp", path, out=tmp_path / "t")


# ---- the result ----------------------------------------------------------------------------------------


def test_existing_output(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}] * 3)
    out = tmp_path / "tokens"
    old = prepare(tools, "sp", path, out=out)
    message = refusal(capsys, tools, "sp", write_lines(path, [{"text": "dog"}]), out=out)
    assert "there is a data set already; choose another name, or --overwrite" in message
    # A refusal after the work began keeps it as well; a success replaces it, and open ones stay readable.
    path.write_text(GOOD + "broken")
    refusal(capsys, tools, "sp", path, "--overwrite", out=out)
    assert len(TokenDataset.open(out)) == 3
    write_lines(path, [{"text": "dog"}])
    assert len(prepare(tools, "sp", path, "--overwrite", out=out)) == 1
    assert len(old) == 3
    assert old[2]["input_ids"].tolist() == old[0]["input_ids"].tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "tokens"]
    (tmp_path / "thesis").mkdir()
    for name in ("thesis", "a.jsonl"):
        message = refusal(capsys, tools, "sp", path, "--overwrite", out=tmp_path / name)
        assert "it exists and is no data set; choose another name" in message


def test_output_behind_a_link(tools: dict[str, Path], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}])
    (tmp_path / "disk").mkdir()
    prepare(tools, "sp", path, out=tmp_path / "disk" / "tokens")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "tokens")
    write_lines(path, [{"text": "dog"}] * 2)
    assert len(prepare(tools, "sp", path, "--overwrite", out=tmp_path / "link")) == 2
    assert (tmp_path / "link").is_symlink()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["tokens"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "disk", "link"]


def test_fingerprint(tools: dict[str, Path], tmp_path: Path) -> None:
    """Equal for equal contents, whatever the names; different for anything that matters."""
    rng = random.Random(7)
    records = [conversation(rng) for _ in range(5)]
    path = write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "chatml.jinja").write_text("{# the same, but another file #}" + CHATML)
    cases: dict[str, tuple[Any, ...]] = {
        "first": ("chat", path),
        "again": ("chat", write_lines(tmp_path / "b.jsonl", records), "--workers", "2"),
        "tokenizer": ("strict", write_lines(tmp_path / "d.jsonl", [{"text": "a"}])),
        "other tokenizer": ("chat", tmp_path / "d.jsonl"),
        "option": ("chat", path, "--max-length", "500"),
        "turns": ("chat", path, "--turns", "last"),
        "template": ("chat", path, "--chat-template", tmp_path / "chatml.jinja"),
        "data": ("chat", write_lines(tmp_path / "c.jsonl", records[:4])),
    }
    found = {}
    for name, (tokenizer, *arguments) in cases.items():
        dataset = prepare(tools, tokenizer, *arguments, out=tmp_path / name)
        found[name] = dataset.metadata["source"]["fingerprint"]
    assert found.pop("again") == found["first"]
    assert len(set(found.values())) == len(found)


def test_report_and_info(tools: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}]}] + [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "fox " * n}]}
        for n in range(1, 100)
    ]
    dataset = prepare(tools, "chat", write_lines(tmp_path / "a.jsonl", records), out=tmp_path / "tokens")
    report = capsys.readouterr().out.splitlines()
    rank = {q: int(np.sort(dataset.lengths)[round(q / 100 * 99)]) for q in (10, 50, 90, 99)}
    targets = int(dataset.num_targets.sum())
    assert report[:4] == [
        "samples     100",
        f"tokens      {dataset.num_tokens:,}, largest id {max(int(s['input_ids'].max()) for s in dataset)}",
        f"targets     {targets:,}; 1 samples without any",
        "lengths     p10/50/90/99/max "
        f"{rank[10]:,} {rank[50]:,} {rank[90]:,} {rank[99]:,} {dataset.lengths.max():,}",
    ]
    assert re.fullmatch(r"speed       [\d,]+ samples/s, [\d,]+ tokens/s \([\d.]+ s, 1 worker\)", report[5])
    assert main(["prepare", "--info", str(tmp_path / "tokens")]) == 0
    info = capsys.readouterr().out.splitlines()
    assert info[:5] == report[:5]
    assert json.loads("\n".join(info[5:])) == dataset.metadata
    assert dataset.metadata["source"]["inputs"][0]["name"] == "a.jsonl"
    assert main(["prepare", "--info", str(tmp_path)]) == 2
    assert "not a data set of odcengine" in capsys.readouterr().err


def test_loader_reads_it(tools: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(8)
    path = write_lines(tmp_path / "a.jsonl", [conversation(rng) for _ in range(20)])
    dataset = prepare(tools, "chat", path, out=tmp_path / "tokens")
    loader = MinibatchLoader(
        dataset, train_batch_size=8, rank=0, world_size=1, strategy="lb_mini", max_tokens=400
    )
    seen: list[int] = []
    for minibatch in loader:
        batches = list(minibatch)
        assert sum(batch.num_targets for batch in batches) == minibatch.num_targets_global
        seen += [index for batch in batches for index in batch.sample_ids]
    assert sorted(seen) == list(range(20))


# ---- the command as a user runs it ---------------------------------------------------------------------


def test_on_a_terminal(tools: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own, with a terminal for stderr: a bar there, the report on stdout."""
    rng = random.Random(9)
    path = write_lines(tmp_path / "a.jsonl", [pair(rng) for _ in range(3000)])
    master, slave = pty.openpty()
    words = ["prepare", path, "--tokenizer", tools["sp"], "--out", tmp_path / "tokens", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "odc_tools", *map(str, words)],
        env={**os.environ, "PYTHONPATH": PATHS, "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    shown = b""
    try:
        while block := os.read(master, 4096):
            shown += block
    except OSError:  # the other end is closed
        pass
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown.decode()
    assert "samples     3,000" in out
    assert "2 workers" in out
    if prepare_module_has_rich():
        assert "3,000 records" in shown.decode()
        assert "100%" in shown.decode()


def prepare_module_has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def test_progress_without_a_terminal(
    tools: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_prepare_progress, "_LINE_EVERY_S", 0.0)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fox"}] * 1000)
    prepare(tools, "sp", path, path, out=tmp_path / "tokens")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"odc prepare: 13%, 256 records, 768 tokens, [\d,]+ tokens/s", lines[0])
    assert lines[-1].startswith("odc prepare: 100%, 2,000 records, 6,000 tokens, ")


def test_page_for_users(
    tools: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command and every piece of code of docs/data.md, in its order."""
    datasets = pytest.importorskip("datasets")
    rng = random.Random(10)
    monkeypatch.chdir(tmp_path)
    write_lines(Path("train.jsonl"), [conversation(rng) for _ in range(300)])
    write_lines(Path("pairs.jsonl"), [pair(rng) for _ in range(10)])
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list([pair(rng) for _ in range(4)]) for name in ("train", "test")}
    ).save_to_disk("my_dataset")
    for split in ("train", "test"):
        write_parquet(Path(f"my_folder/{split}-00000-of-00001.parquet"), [pair(rng) for _ in range(5)])
    write_parquet(Path("tokenised/0.parquet"), [{"input_ids": [1, 5, 2]}] * 6)
    Path("tokenizer").symlink_to(tools["chat"])
    Path("tokenizer.model").symlink_to(tools["sp"])
    Path("template.jinja").write_text(CHATML)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"vocab_size": 512}')
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(sh|python|yaml)\n(.*?)```", page, re.DOTALL)
    commands = 0
    for language, text in blocks:
        if language == "yaml":
            config = odcengine.load_config({"train_batch_size": 8, **yaml.safe_load(text)})
            assert config.data.path is not None
            assert Path(config.data.path).is_dir()
            continue
        if language == "python":
            exec(compile(text, "docs/data.md", "exec"), {})
            continue
        for line in text.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "odc"
            assert main(words[1:]) == 0, (line, capsys.readouterr().err)
            commands += 1
    assert commands >= 8
    made = {path.name: len(TokenDataset.open(path)) for path in tmp_path.glob("tokens*")}
    assert made.pop("tokens_short") < made["tokens"] == made["tokens_cut"] == 300
    assert (made["tokens_pairs"], made["tokens_hf"], made["tokens_own"]) == (10, 4, 3)
    assert (made["tokens_parquet"], made["tokens_ready"]) == (5, 6)
