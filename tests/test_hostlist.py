"""SLURM's compressed lists (user case 1), without scontrol."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odcengine.errors import ConfigError
from odcengine.hostlist import expand_counts, expand_hostlist, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("linux[1,2]", "linux1 linux2"),
        ("alpha,beta,gamma", "alpha beta gamma"),
        ("big-site-ia810", "big-site-ia810"),
        (
            "node[001-004,007],gpu-a[1-2]",
            "node001 node002 node003 node004 node007 gpu-a1 gpu-a2",
        ),
        ("c[1-2]", "c1 c2"),
        ("host-[001-002]", "host-001 host-002"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[3,1-2]", "n3 n1 n2"),
        ("r[1-2]n[01-02]-ib.site", "r1n01-ib.site r1n02-ib.site r2n01-ib.site r2n02-ib.site"),
        ("n[5]", "n5"),
        ("b,a,b", "b a b"),
    ],
)
def test_host_lists_keep_padding_and_order(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name is missing"),
        ("a,", "a name is missing"),
        ("a,,b", "a name is missing"),
        ("a[1-2", "a bracket is not closed"),
        ("a1]", "bracket at position 3 has no partner"),
        ("a[1[2]]", "bracket at position 4 has no partner"),
        ("a[]", "'' is no range"),
        ("a[1,]", "'' is no range"),
        ("a[1-]", "'1-' is no range"),
        ("a[x-y]", "'x-y' is no range"),
        ("a[4-1]", "'4-1' runs backwards"),
        ("a[1-010]", "'1-010' are padded differently"),
        ("a[010-9]", "'010-9' runs backwards"),
        ("a[001-9]", "'001-9' are padded differently"),
        ("a b", "'a b' is no host name"),
        ("a[1-2]{3}", "is no host name"),
        ("(null)", "is no host name"),
    ],
)
def test_what_is_not_understood_is_quoted(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_hostlist(text, "SLURM_JOB_NODELIST")
    assert f"SLURM_JOB_NODELIST={text!r} is not understood" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["a[1-99999999]", "a[1-300]b[1-300]", "a[1-60000],b[1-60000]"])
def test_a_slip_does_not_fill_the_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="more than 65536 hosts"):
        expand_hostlist(text)


@given(st.text(alphabet="ab0129-[],. ", max_size=14))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ConfigError as error:
        hosts = [str(error).partition(repr(text))[1]]  # refused: the text is quoted
    assert hosts
    assert all(hosts)
    assert hosts == [repr(text)] or not any(set(host) & set("[], ") for host in hosts)


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-a", "x1-"]), st.integers(0, 999), st.integers(1, 4)),
        min_size=1,
        max_size=30,
    )
)
def test_compressing_by_hand_and_expanding_gives_the_same(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{number:0{width}d}]" for name, number, width in parts)
    assert expand_hostlist(text) == [f"{name}{number:0{width}d}" for name, number, width in parts]


def test_counts_a_node() -> None:
    assert expand_counts("4(x2),2") == [4, 4, 2]
    assert expand_counts("8") == [8]
    for text in ("", "4(x0)", "4x2", "4(x2", "-1", "4(x2),", "4(x999999999)"):
        with pytest.raises(ConfigError) as caught:
            expand_counts(text, "SLURM_STEP_TASKS_PER_NODE")
        assert f"SLURM_STEP_TASKS_PER_NODE={text!r}" in str(caught.value)


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# order of ranks\nn2\nn1*2\n\nn[3-4] # two\n")
    assert read_hostfile(str(file)) == ["n2", "n1", "n1", "n3", "n4"]
    file.write_text("n2\nn[1\n")
    with pytest.raises(ConfigError, match=r"hosts line 2='n\[1' is not understood"):
        read_hostfile(str(file))
    file.write_text("n2*x\n")
    with pytest.raises(ConfigError, match=r"line 1: 'n2\*x' is not understood"):
        read_hostfile(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(str(file))
    with pytest.raises(ConfigError, match="nosuch: the file cannot be read: No such file"):
        read_hostfile(str(tmp_path / "nosuch"))
