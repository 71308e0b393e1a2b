"""The layers that have a sliding window, and those that have none, by SGLang's pool of them. Imports nothing of SGLang.

Of states a request SGLang tells its transfer backends which layers they are of; of windows its pool alone knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvgrpc.engines.sglang.rank import SLIDING_WINDOW, kind_of


def telling(is_ours: Callable[[], bool]) -> Callable[..., None]:
    """A hook after ``setup_state_kv_args``: what it leaves empty of a pool of windows is there as it is of states.

    Layers of a draft model, behind the others, have none: with them nothing is told.
    """

    def tell(result: object, kv_args: Any, token_to_kv_pool: Any, *unused: object, **more: object) -> None:
        places = getattr(token_to_kv_pool, "layers_mapping", None)
        has_windows_alone = [kind_of(state) for state in kv_args.state_types] == [SLIDING_WINDOW]
        if places and is_ours() and has_windows_alone and not getattr(kv_args, "num_draft_entries", 0):
            rest, windows = (_in_order(places, has_window) for has_window in (False, True))
            kv_args.kv_layer_ids = _of_entries(rest, len(kv_args.kv_item_lens))
            kv_args.state_layer_ids = [_of_entries(windows, len(kv_args.state_item_lens[0]))]

    return tell


def _in_order(places: Mapping[int, tuple[int, bool]], has_window: bool) -> list[int]:
    """Layers by their place in the pool that they have their keys and values in."""
    return sorted(
        (layer for layer, (_, its) in places.items() if its == has_window), key=lambda layer: places[layer][0]
    )


def _of_entries(layers: Sequence[int], entries: int) -> list[int]:
    """Keys of all, then values of all, or latents; empty where there are others."""
    return [*layers, *layers][:entries] if entries in (len(layers), 2 * len(layers)) else []
