"""What is mutated, and the quick tests that must notice."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# By name: files below kvgrpc/ (patterns with spaces between), tests below tests/.
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "protocol": (
        "transfer/protocol/*.py transfer/protocol/*/*.py",
        (
            *("unit/transfer/test_prefill_rooms.py", "unit/transfer/test_prefill_writes.py"),
            *("unit/transfer/test_prefill_streams.py", "unit/transfer/test_prefill_records.py"),
            *("unit/transfer/test_decode_rooms.py", "unit/transfer/test_decode_loss.py"),
            *("unit/transfer/test_decode_evidence.py", "unit/transfer/test_decode_checksums.py"),
            "unit/transfer/test_fan_out.py",
            *("unit/transfer/test_alignment.py", "unit/transfer/test_coverage.py", "unit/transfer/test_destination.py"),
            *("unit/transfer/test_deadlines.py", "unit/transfer/test_pending_rooms.py", "simulation/test_cases.py"),
            *("unit/transfer/test_chunks.py", "unit/transfer/test_decode_pair.py", "simulation/test_rules.py"),
            *("unit/transfer/test_types.py", "unit/transfer/test_prefill_bounds.py", "simulation/test_hostile.py"),
            *("unit/transfer/test_prefill_memory.py", "unit/transfer/test_decode_bounds.py"),
        ),
    ),
    "layout": (
        "transfer/layout/*.py",
        (
            *("unit/transfer/test_topology.py", "unit/transfer/test_plan.py", "unit/transfer/test_engines_topology.py"),
            *("unit/transfer/test_translation.py", "unit/transfer/test_pages.py"),
        ),
    ),
    "log": (
        "events/log/*.py",
        (
            *("unit/events/test_journal.py", "unit/events/test_snapshot.py", "unit/events/test_digest.py"),
            *("unit/events/test_batch_queue.py", "unit/events/test_publisher.py"),
        ),
    ),
    "following": (
        "events/following/*.py",
        (
            *("unit/events/test_following.py", "unit/events/test_index.py", "unit/events/test_follower_core.py"),
            *("unit/events/test_digest.py", "unit/events/test_follower_failures.py", "simulation/test_followers.py"),
        ),
    ),
    "registry": ("registry/*.py", ("unit/registry",)),
    "tree": ("prefetch/tree/prefix_tree.py", ("unit/prefetch/test_tree_uses.py", "unit/prefetch/test_tree.py")),
    "codec": (
        "events/codec/*.py events/model.py",
        ("unit/events/test_codec.py", "unit/events/test_hostile.py", "unit/events/test_snapshot.py"),
    ),
    "prefetch": (
        "prefetch/protocol/prefetch.py prefetch/protocol/backup.py prefetch/protocol/operation.py"
        " prefetch/protocol/order.py prefetch/protocol/book.py",
        ("unit/prefetch/test_operations_alone.py", "simulation/prefetch/test_replicas.py"),
    ),
    # Shells, which do I/O: a fault lives in a fork, so their tests begin no gRPC before it.
    "runtime": (
        "transfer/runtime/resolve.py transfer/runtime/room_locator.py transfer/runtime/death_proofs.py"
        " transfer/runtime/writing/worker.py transfer/runtime/guarded.py transfer/runtime/writing/gather.py"
        " transfer/runtime/writing/queues.py transfer/runtime/dead_peers.py transfer/runtime/past_rooms.py",
        (
            *(
                "unit/transfer/test_prefill_resolver.py",
                "unit/transfer/test_room_locator.py",
                "unit/transfer/test_worker.py",
            ),
            *("unit/transfer/test_guarded.py", "unit/transfer/test_gather.py", "unit/transfer/test_summing.py"),
            *("unit/transfer/test_fair_queue.py", "unit/transfer/test_dead_peers.py"),
            "unit/transfer/test_past_rooms.py",
        ),
    ),
    "managers": (
        "transfer/runtime/manager.py transfer/runtime/decode_manager.py transfer/runtime/prefill_manager.py"
        " transfer/runtime/hello.py transfer/runtime/sessions.py transfer/runtime/boundary.py",
        (
            "contract/transfer/test_sessions.py",
            "contract/transfer/test_session_rooms.py",
            "contract/transfer/test_limits.py",
        ),
    ),
    "rpc": (
        "rpc/*.py rpc/credentials/*.py rpc/interceptors/*.py",
        ("unit/rpc", "contract/rpc/test_security.py", "contract/rpc/test_tls.py", "contract/rpc/test_callers.py"),
    ),
    "server": (
        "server/*.py server/*/*.py",
        (
            "unit/server",
            "contract/server/test_open_rank.py",
            "contract/server/test_status.py",
            "contract/server/test_lifecycle.py",
        ),
    ),
    "store": ("registry/store/*.py", ("unit/registry",)),
    "storage": (
        "prefetch/storage/*.py prefetch/storage/file/*.py prefetch/runtime/*.py prefetch/threads/*.py",
        (
            *("unit/prefetch/storage", "unit/prefetch/test_a_hung_store.py", "unit/prefetch/test_operations_alone.py"),
            "unit/prefetch/test_operations_ending.py",
        ),
    ),
    "engines": (
        # Those that load without an engine; the others' tests are in tests/engines.
        "engines/addresses.py engines/compatibility.py engines/identity.py engines/sglang/clearing.py"
        " engines/sglang/deadlines.py engines/sglang/held.py engines/sglang/samples.py engines/sglang/rank.py",
        ("unit/engines",),
    ),
    "rest": (
        "hashing.py net.py paging.py arrays.py model.py prefetch/protocol/votes.py"
        " prefetch/threads/queue_threads.py prefetch/storage/keys.py",
        (
            *("unit/test_hashing.py", "unit/test_net.py", "unit/test_arrays.py", "unit/test_flat_ranks.py"),
            *("unit/test_model.py", "unit/test_paging.py"),
            *("unit/registry/test_parts.py", "unit/transfer/test_topology.py", "unit/transfer/test_plan.py"),
            *("unit/prefetch/test_queues.py", "unit/prefetch/storage/test_keys.py", "unit/prefetch/test_tree_uses.py"),
            *("unit/prefetch/test_tree.py", "unit/prefetch/test_votes.py"),
            *("simulation/test_agreement.py", "simulation/test_agreement_stalls.py"),
        ),
    ),
}
# Parts of these folders that do I/O: tests of servers and processes notice their faults.
NOT_PURE = {
    *("events/log/stream.py", "events/following/index_servicer.py", "registry/servicer.py", "registry/wire.py"),
    *("registry/watching.py", "registry/feed.py", "client/engine_mirror.py", "registry/addresses.py"),
}


def files_of(target: str) -> list[Path]:
    base = ROOT / "kvgrpc"
    found = sorted(path for pattern in TARGETS[target][0].split() for path in base.glob(pattern))
    return [path for path in found if path.relative_to(base).as_posix() not in NOT_PURE and path.name != "__init__.py"]
