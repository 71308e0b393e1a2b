"""Opens a side by the name of its protocol; imports only that one."""

from __future__ import annotations

from benchmarks.sides.base import DecodeSide, PrefillSide, Setting


def open_prefill(setting: Setting) -> PrefillSide:
    if setting.protocol == "seed":
        from benchmarks.sides.seed import SeedPrefill

        return SeedPrefill(setting)
    if setting.protocol == "sglang":
        from benchmarks.sides.sglang import SglangPrefill

        return SglangPrefill(setting)
    if setting.protocol == "bare":
        from benchmarks.sides.bare import BarePrefill

        return BarePrefill(setting)
    from benchmarks.sides.ours import KvgrpcPrefill

    return KvgrpcPrefill(setting)


def open_decode(setting: Setting, bootstrap: str) -> DecodeSide:
    if setting.protocol == "seed":
        from benchmarks.sides.seed import SeedDecode

        return SeedDecode(setting, bootstrap)
    if setting.protocol == "sglang":
        from benchmarks.sides.sglang import SglangDecode

        return SglangDecode(setting, bootstrap)
    if setting.protocol == "bare":
        from benchmarks.sides.bare import BareDecode

        return BareDecode(setting, bootstrap)
    from benchmarks.sides.ours import KvgrpcDecode

    return KvgrpcDecode(setting, bootstrap)
