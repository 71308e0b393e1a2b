"""``kvgrpc topology``: which prefill ranks owe what to which decode ranks. Asks nobody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import click

from kvgrpc.cli.connection import json_option
from kvgrpc.cli.names import share_of_tokens
from kvgrpc.cli.output import show_table

if TYPE_CHECKING:
    from kvgrpc.model import Layout
    from kvgrpc.transfer.layout.engines import Owed
    from kvgrpc.transfer.layout.topology import Coordinates

_SIZES = ("dp", "pp", "cp", "tp")
_DCP = "dcp"


class Sizes(NamedTuple):
    """Of an engine. ``dcp``: decode context parallel ranks, among its tensor-parallel ones."""

    layout: Layout
    dcp: int


def read_sizes(context: click.Context, parameter: click.Parameter, text: str) -> Sizes:
    """ "tp=8,pp=2" as sizes; those that are not there are 1."""
    from kvgrpc.model import Layout

    sizes = dict.fromkeys((*_SIZES, _DCP), 1)
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in sizes or not value.isdecimal() or not int(value):
            raise click.BadParameter(f"{item!r} is none of dp=N, pp=N, cp=N, tp=N, dcp=N", context, parameter)
        sizes[name] = int(value)
    dcp = sizes.pop(_DCP)
    if sizes["tp"] % dcp:
        raise click.BadParameter(
            f"dcp={dcp} does not divide tp={sizes['tp']}, among whose ranks it is", context, parameter
        )
    return Sizes(Layout(**sizes), dcp)


@click.command()
@click.option("--prefill", required=True, callback=read_sizes, help="Sizes of the sender: tp=8, or tp=4,pp=2.")
@click.option("--decode", required=True, callback=read_sizes, help="Sizes of the receiver; with --mla dcp=N too.")
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Key and value heads of the model.")
@click.option("--mla", is_flag=True, help="No heads: each rank holds all of the cache.")
@click.option("--layers", type=click.IntRange(1), default=32, show_default=True, help="Layers of the model.")
@click.option("--axes", default="token,head,dim", show_default=True, help="Axis order inside a page.")
@click.option("--page-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens in one page.")
@json_option
def topology(
    prefill: Sizes, decode: Sizes, heads: int, mla: bool, layers: int, axes: str, page_tokens: int, as_json: bool
) -> None:
    """Show which ranks of a prefill engine owe what to which ranks of a decode engine, and what a page costs."""
    from kvgrpc.transfer.layout import engines
    from kvgrpc.transfer.layout.token_shares import axes_of_shares

    count = 0 if mla else heads
    sender, receiver = (
        engines.EngineShape(layout, count, layers, axes if dcp == 1 else axes_of_shares(dcp), page_tokens)
        for layout, dcp in (prefill, decode)
    )
    owed = engines.topology(sender, receiver)
    if as_json:
        for line in owed:
            print(json.dumps(as_fields(line, decode.dcp)))
        return
    columns = ("prefill", "decode", "layers", "heads" if decode.dcp == 1 else "tokens", "aux", "#descriptors a page")
    rows = [
        (
            place(line.prefill),
            place(line.decode),
            "owes nothing" if line.part.empty else span(line.part.layer_start, line.part.layer_count),
            held(line, decode.dcp, mla=mla),
            line.part.aux,
            line.descriptors,
        )
        for line in owed
    ]
    show_table("Who owes what", columns, rows, "nobody owes anything")


def held(line: Owed, dcp: int, *, mla: bool) -> str:
    """The part of each layer that a decode rank gets, heads or tokens, in words."""
    if line.part.empty:
        return ""
    if dcp > 1:
        return share_of_tokens(share(line, dcp), dcp)
    return "all" if mla else span(line.part.head_start, line.part.head_count)


def share(line: Owed, dcp: int) -> int:
    """The number of the share of the tokens, of ``dcp``, that the decode rank keeps, as engines deal them out."""
    return line.decode[_SIZES.index("tp")] % dcp


def as_fields(line: Owed, dcp: int) -> dict[str, object]:
    """``dcp``: of decode; the share of each of its ranks is told where there are several."""
    part = line.part
    shares = {"tokensOver": dcp, "tokensAt": share(line, dcp)} if dcp > 1 else {}
    return {
        "prefill": dict(zip(_SIZES, line.prefill, strict=True)),
        "decode": dict(zip(_SIZES, line.decode, strict=True)),
        "layerStart": part.layer_start,
        "layerCount": part.layer_count,
        "headStart": part.head_start,
        "headCount": part.head_count,
        "aux": part.aux,
        "descriptorsPerPage": line.descriptors,
        **shares,
    }


def place(coordinates: Coordinates) -> str:
    """ "pp0 cp0 tp3": any dp replica serves any other."""
    return " ".join(f"{name}{at}" for name, at in list(zip(_SIZES, coordinates, strict=True))[1:])


def span(start: int, count: int) -> str:
    """ "0 to 7", or one number."""
    return str(start) if count == 1 else f"{start} to {start + count - 1}"
