"""Real vLLM engines as a router sees them: see engine.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgrpc.transfer import room_from_transfer_id
from tests.engines.engine import LOCAL, ROOT, Engine, Pair, Request, common_environment, free_ports

BLOCK = 32
CONNECTOR = {"kv_connector": "KvGrpcConnector", "kv_connector_module_path": "kvgrpc.engines.vllm"}
IN_TREE_CONNECTOR = {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
# docs/engines/vllm.md, "On a machine without a GPU".
WITHOUT_GPU = (
    f"--dtype float32 --block-size {BLOCK} --enforce-eager --max-num-seqs 8 --max-model-len 512"
    " --num-gpu-blocks-override 129 --skip-tokenizer-init -cc.custom_ops+=none"
).split()
LATENT_BLOCK = 16  # of vLLM's kernel for CPUs, whatever it is asked for
# vLLM's MLA for CPUs computes a prompt in one step, and keeps no prefix.
ON_CPU_MLA = {
    "attention_backend": "CPU_MLA",
    "block_size": LATENT_BLOCK,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
}
# Of Qwen's and Mamba's layers, and for vLLM's prefix cache.
IN_32_BITS = {"VLLM_ON_CPU_PLUGIN": "tests.engines.recurrent_on_cpu:register"}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class VllmEngine(Engine):
    """One vLLM engine; see Engine."""

    worker = "tests.engines.vllm_worker"
    start_seconds = 400.0

    @staticmethod
    def environment(folder: Path, arguments: Mapping[str, Any], more: Mapping[str, str]) -> dict[str, str]:
        return {
            **common_environment(folder, foreign=("VLLM_",)),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engines/standins/vllm'}",  # as they are here, not as installed
            "VLLM_HOST_IP": LOCAL,
            "VLLM_CACHE_ROOT": str(folder),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
            **more,
        }

    def accepted(self) -> int:
        """Tokens of drafts that were the model's own, so far."""
        return self.counted("vllm:spec_decode_num_accepted_tokens")

    def counted(self, name: str, **labels: str) -> int:
        """A counter of its metrics, without its ``_total``, where it has any (disable_log_stats)."""
        asked = self._ask("counted", name=name, labels=labels)
        asked.result()
        return int(asked.value)

    def reason(self) -> str:
        """What the last line of its log about a hand-off that failed says."""
        lines = [line for line in self.log().splitlines() if "kvgrpc: hand-off of request" in line]
        return lines[-1] if lines else ""


class VllmPair(Pair):
    """Both sides get their parameters at once, as from the proxy of vLLM's Mooncake connector.

    ``transfer``: what ``kv_transfer_config`` says beside the role; ``prefill`` and ``decode``: more arguments of one
    side, of which "transfer" is merged into its ``kv_transfer_config``.
    """

    prefill_engine: type[VllmEngine] = VllmEngine
    sends_chunks = False
    both_sides_at_once = False
    prefill: VllmEngine
    decode: VllmEngine

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        tp: int = 1,
        transfer: Mapping[str, Any] = CONNECTOR,
        environment: Mapping[str, str] | None = None,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        port = free_ports(int((prefill or {}).get("data_parallel_size", 1)))  # one for each replica
        self.engine_ids: dict[str, str] = {}
        self._starts = itertools.count(1)
        common = vllm_arguments(model, tp)
        arguments = {
            role: {
                **common,
                **{name: value for name, value in (more or {}).items() if name != "transfer"},
                "kv_transfer_config": {
                    "kv_role": ROLES[role],
                    **transfer,
                    **(more or {}).get("transfer", {}),
                },
            }
            for role, more in (("prefill", prefill), ("decode", decode))
        }
        self._open(folder, port, arguments, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), **(environment or {})})

    def start(self, role: str, **more: Any) -> VllmEngine:
        """One more engine of that role, with an id of its own as vLLM gives it; the caller waits and closes."""
        self.engine_ids[role] = f"{role}-{self.bootstrap_port}-{next(self._starts)}"
        arguments = {**self._arguments[role], **more}
        arguments["kv_transfer_config"] = {"engine_id": self.engine_ids[role], **arguments["kv_transfer_config"]}
        kind = self.prefill_engine if role == "prefill" else VllmEngine
        return kind(role, self._folder, arguments, self._environment)

    def reason_of(self, request: Request | None, room: int) -> str:
        """vLLM tells its clients no reason: it is in the log of the engine that was asked."""
        if request is None or request.error is None:
            return ""
        about = f"room {self.number_of(room)}: "
        return "\n".join(line for line in request.engine.log().splitlines() if about in line)

    def number_of(self, room: int) -> int:
        return room_from_transfer_id(f"xfer-{room}")

    def at_prefill(self, room: int) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{room}"}

    def at_decode(self, room: int) -> dict[str, Any]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": f"xfer-{room}",
            "remote_engine_id": self.engine_ids["prefill"],
            "remote_bootstrap_addr": f"http://{LOCAL}:{self.bootstrap_port}",
        }


def vllm_arguments(model: Path, tp: int) -> dict[str, Any]:
    """What lets vLLM run without a GPU, in a small pool; torch.compile is on, as it is by default."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "tensor_parallel_size": tp,
        "block_size": BLOCK,
        "compilation_config": {"custom_ops": ["none"]},
        "max_num_seqs": 8,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 8 * 512 // BLOCK + 1,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }


def stages(count: int) -> dict[str, Any]:
    """Compiled, as by default: without, vLLM's worker for CPUs has no memory to receive what the stage before it
    computed."""
    return {} if count == 1 else {"pipeline_parallel_size": count, "distributed_executor_backend": "mp"}
