"""What operators say of ranks: how it is written, checked, told, and what another incarnation may not change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.registry.model import Labels, labels_of, row_differences
from kvgrpc.registry.wire import PoolCache, row_from_pb, row_to_pb, rows_to_register
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.registry_builders import row

POOLS = PoolCache()


def registered(labels: Labels) -> Labels:
    request = pb.RegisterRequest(rows=[row_to_pb(replace(row(), labels=labels), POOLS)])
    (read,) = rows_to_register(request, POOLS, peer_is_local=True)
    return read.labels


def test_labels_are_written_as_names_and_values() -> None:
    assert labels_of(["zone=a", "rack=7=left", "spare="]) == (("rack", "7=left"), ("spare", ""), ("zone", "a"))


@pytest.mark.parametrize("wrong", [["zone"], ["=a"], ["zone=a", "zone=b"], ["n" * 129 + "=a"], ["n=" + "v" * 129]])
def test_what_is_no_label_is_refused(wrong: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        labels_of(wrong)
    assert refused.value.metadata["field"] == "labels"


def test_a_registry_keeps_sixteen_and_refuses_more() -> None:
    labels = tuple((f"name{at:02}", "v") for at in range(17))
    assert registered(labels[:16]) == labels[:16]
    with pytest.raises(InvalidRequest, match=r"rows\[0\]\.labels: must be at most 16"):
        registered(labels)


def test_a_row_has_its_labels_wherever_it_is_told_and_they_are_part_of_it() -> None:
    labelled = replace(row(), labels=labels_of(["zone=a", "rack=7"]))
    assert row_from_pb(row_to_pb(labelled, None), POOLS).labels == (("rack", "7"), ("zone", "a"))
    assert list(row_differences(row(), labelled)) == ["labels"]
