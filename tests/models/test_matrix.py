"""The tables of docs/models.md are what the families do, measured on two ranks."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")

from models.families import FAMILIES, REFUSED
from models.matrix import PAGE, TOLERANCE, Row, compiled_error, measure, message_of, tables, tables_of_page

Measured = tuple[dict[str, Row], list[list[list[int]]]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(list(FAMILIES))


def test_families_train_exactly(measured: Measured) -> None:
    rows, micro_batches = measured
    for name, row in rows.items():
        errors = (row.logits, row.gradient, row.checkpointed, row.loss, row.exported)
        assert max(errors) <= TOLERANCE, (name, row)
        assert row.tied == FAMILIES[name].tied, name
        assert 0.9 < row.cost < 1.05, (name, row.cost)
    for first, second in zip(*micro_batches, strict=True):  # of the two ranks, in each minibatch of a family
        assert [sorted(counts) for counts in zip(first, second, strict=True)] == [[1, 2]] * 2


def test_tables_of_the_page(measured: Measured) -> None:
    right, found = tables(measured[0]).splitlines(), tables_of_page(PAGE.read_text()).splitlines()
    if found != right:
        wrong = "\n".join(line for line in right if line not in found)
        pytest.fail(
            "docs/models.md: PYTHONPATH=tests python -m models.matrix --write would change its tables; new "
            f"lines:\n{wrong}",
            pytrace=False,
        )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    message = message_of(REFUSED[name])
    assert message is not None
    assert re.search(REFUSED[name].message, message), message


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_blocks(name: str) -> None:
    assert (compiled_error(FAMILIES[name], "aot_eager") <= TOLERANCE) == FAMILIES[name].compiles
