"""Labels: what an operator says of a rank, for whoever chooses among engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvgrpc.errors import InvalidRequest, Violation

# Names and values, by name.
Labels = tuple[tuple[str, str], ...]
MAX_LABELS, MAX_CHARS = 16, 128
_FIELD = "labels"


def labels_of(texts: Iterable[str]) -> Labels:
    """Reads "NAME=VALUE" of each. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for text in texts:
        name, is_one, value = text.partition("=")
        if not is_one or name in found:
            raise InvalidRequest.of(_FIELD, text, "NAME=VALUE, no name twice")
        found[name] = value
    for violation in wrong_labels(found, _FIELD):
        raise InvalidRequest.of(violation.field, violation.value, violation.description)
    return tuple(sorted(found.items()))


def wrong_labels(labels: Mapping[str, str], path: str) -> Iterator[Violation]:
    """Yields one for each that cannot be."""
    if len(labels) > MAX_LABELS:
        yield Violation(path, f"at most {MAX_LABELS}", f"{len(labels)} of them")
    for name, value in labels.items():
        if not 0 < len(name) <= MAX_CHARS or len(value) > MAX_CHARS:
            yield Violation(path, f"a name of 1 to {MAX_CHARS} characters, and a value of at most as many", name)
