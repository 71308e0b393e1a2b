"""Tiny models with random weights, and what transformers' greedy decoding makes of a prompt."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Cohere2Config, Cohere2ForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
# How far apart the two best logits must be, in parts of the spread: then another token is a wrong KV cache.
SURE = 1e-3


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    positions: int = 8192  # the longest prompt with its answer


TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2)  # 2 KiB of KV cache a token
STAGED = Size(layers=5, hidden=64, heads=4, kv_heads=2)  # two pipeline stages have other numbers of them
WINDOWED = Size(layers=4, hidden=64, heads=4, kv_heads=2)
MIXED = Size(layers=6, hidden=64, heads=4, kv_heads=2)  # of two kinds in turn; two stages have other numbers of each
SINGLE = Size(layers=1, hidden=64, heads=2, kv_heads=2)
CARRIED = slice(56, 64)  # of SINGLE's hidden states: which eighth of the vocabulary the next token is of
WINDOW = 64
# With the first request of models of latents, or with windows, torch compiles their norms.
COMPILING_SECONDS = 300.0
LATENT_BYTES = (512 + 64) * 4  # of a token and layer, in float32
LONG = replace(TINY, positions=65_536)
WIDE = Size(layers=8, hidden=256, heads=8, kv_heads=8)  # 32 KiB: 4 MiB for 128 tokens


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    tokens: list[int]


class Reference:
    """A Llama, written to ``folder``/model for engines to load."""

    def __init__(self, folder: Path, size: Size = TINY, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._model = self._make(size).float().eval()
        self._draw = random.Random(seed)
        self.path = folder / "model"
        self._model.save_pretrained(self.path)

    def _make(self, size: Size) -> Any:
        return LlamaForCausalLM(LlamaConfig(head_dim=64, rms_norm_eps=1e-5, **_sizes(size)))

    def renamed(self, name: str) -> Path:
        """The same in a folder of another name, which is where it is from now on."""
        self.path = self.path.rename(self.path.with_name(name))
        return self.path

    def configure(self, **more: Any) -> None:
        """What an engine reads of it, before it does."""
        file = self.path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    def random_token(self) -> int:
        return self._draw.randrange(3, VOCABULARY)

    def case(self, length: int, new_tokens: int = 8, prefix: list[int] | None = None) -> Case:
        """A random prompt of ``length`` tokens that begins with ``prefix``, and its greedy continuation."""
        while True:
            start = list(prefix or [])
            prompt = start + [self.random_token() for _ in range(length - len(start))]
            tokens = self._continue(prompt, new_tokens)
            if tokens is not None:
                return Case(prompt, tokens)

    @torch.no_grad()
    def _continue(self, prompt: list[int], new_tokens: int) -> list[int] | None:
        """None when a token was won by too little."""
        inputs, cache, tokens = torch.tensor([prompt]), None, []
        for _ in range(new_tokens):
            out = self._model(inputs, past_key_values=cache, use_cache=True)
            logits, cache = out.logits[0, -1], out.past_key_values
            best = logits.topk(2).values
            if best[0] - best[1] <= SURE * (logits.max() - logits.min()):
                return None
            inputs = logits.argmax().view(1, 1)
            tokens.append(int(inputs))
        return tokens


class WindowReference(Reference):
    """A Cohere 2: every other layer sees the last ``WINDOW`` tokens alone, of a pool of its own; or, ``halves``, those
    of the first half."""

    def __init__(self, folder: Path, seed: int = 0, *, halves: bool = False) -> None:
        self._halves = halves
        super().__init__(folder, WINDOWED, seed)

    def for_sglang(self) -> WindowReference:
        """Before SGLang loads it. That pool is for models that SGLang knows for it, or that say so."""
        return self.for_vllm(is_hybrid_swa=True, hybrid_layer_pattern=[1, 0] * (WINDOWED.layers // 2))

    def for_vllm(self, **more: Any) -> WindowReference:
        """Before vLLM loads it, where these layers are a group of their own."""
        # Here it counts the tokens before the one that sees them.
        self.configure(**more, sliding_window=WINDOW - 1)
        return self

    def _make(self, size: Size) -> Any:
        kinds = ["sliding_attention", "full_attention"] * (size.layers // 2)
        if self._halves:
            kinds.sort(reverse=True)
        more = {"tie_word_embeddings": True, "pad_token_id": 0, "logit_scale": 1.0}
        return Cohere2ForCausalLM(Cohere2Config(**{**_sizes(size), **more}, sliding_window=WINDOW, layer_types=kinds))


class StagedWindowReference(Reference):
    """A Mellum without experts, with windows as a Cohere 2 has them; SGLang divides its layers into stages."""

    def __init__(self, folder: Path, size: Size = MIXED, seed: int = 0) -> None:
        super().__init__(folder, size, seed)

    def _make(self, size: Size) -> Any:
        layers = {"layer_types": ["sliding_attention", "full_attention"] * (size.layers // 2)}
        layers["mlp_layer_types"] = ["dense"] * size.layers
        config = transformers.MellumConfig(**_sizes(size), **layers, sliding_window=WINDOW, head_dim=32)
        return transformers.MellumForCausalLM(config)


class ChunkReference(Reference):
    """A Llama 4 without experts: every other layer sees no token before the chunk of ``WINDOW`` that it computes in."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        super().__init__(folder, WINDOWED, seed)

    def _make(self, size: Size) -> Any:
        chunks = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0] * (size.layers // 2)}
        dense = {"interleave_moe_layer_step": 0, "moe_layers": [], "intermediate_size_mlp": 2 * size.hidden}
        more = {"head_dim": 32, "attn_implementation": "eager"}
        return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**_sizes(size), **chunks, **dense, **more))


class HeadReference(Reference):
    """One layer, and a draft head of that same layer for speculation by ``method``, eagle, eagle3 or mtp (then a MiMo).
    What it says is the model's own next token more often than not, if it has seen the prompt.

    Its first token is the prompt's second. What the layer adds is large beside the embedding, which EAGLE-3 leaves out.
    """

    def __init__(self, folder: Path, method: str, seed: int = 0) -> None:
        self._method = method
        super().__init__(folder, SINGLE, seed)
        self.head = self.path if method == "mtp" else folder / "head"
        self._save_head()

    def for_sglang(self) -> HeadReference:
        """Before SGLang loads it."""
        weights = load_file(self.head / "head.safetensors")
        config = json.loads((self.head / "config.json").read_text())
        if self._method == "eagle":
            weights["fc.bias"] = torch.zeros(SINGLE.hidden)
            config["architectures"] = ["LlamaForCausalLMEagle"]
        else:
            # What the head is given of one of the model's layers alone, SGLang does not put through ``fc``.
            self._add_layers_that_add_nothing(2)
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
            weights["fc.weight"] = torch.cat([torch.zeros_like(weights["fc.weight"]), weights["fc.weight"]], dim=1)
            weights["lm_head.weight"] = self._model.lm_head.weight.detach().clone()
            config.update(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCABULARY)
        save_file(weights, self.head / "head.safetensors")
        (self.head / "config.json").write_text(json.dumps(config))
        return self

    def _add_layers_that_add_nothing(self, count: int) -> None:
        weights = load_file(self.path / "model.safetensors")
        for name, weight in [each for each in weights.items() if "layers.0." in each[0]]:
            idle = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(1, 1 + count):
                own = torch.zeros_like(weight) if idle else weight.clone()
                weights[name.replace("layers.0.", f"layers.{layer}.")] = own
        save_file(weights, self.path / "model.safetensors", {"format": "pt"})
        self.configure(num_hidden_layers=1 + count)

    def _make(self, size: Size) -> Any:
        kind = transformers.Qwen2ForCausalLM if self._method == "mtp" else LlamaForCausalLM
        return self._for_a_head(kind(kind.config_class(rms_norm_eps=1e-8, **_sizes(size))))

    @torch.no_grad()
    def _for_a_head(self, model: Any) -> Any:
        """The embedding as a norm leaves it, which EAGLE's layer does not apply and MTP's does; and what the layer adds
        is large beside it."""
        table = model.model.embed_tokens.weight
        table /= table.square().mean(1, keepdim=True).sqrt()
        model.model.layers[0].self_attn.o_proj.weight *= 8
        return model

    def _save_head(self) -> None:
        layer = {name: weight.clone() for name, weight in self._model.model.layers[0].state_dict().items()}
        norm = layer["input_layernorm.weight"]  # ones, as all others
        token = torch.eye(len(norm))
        nothing = torch.zeros_like(token)
        config = json.loads((self.path / "config.json").read_text())
        if self._method == "eagle":
            del layer["input_layernorm.weight"]
            weights = {f"layers.0.{name}": weight for name, weight in layer.items()}
            weights["fc.weight"] = torch.cat([token, nothing], dim=1)
        elif self._method == "eagle3":
            for name in ("q", "k", "v"):
                own = layer[f"self_attn.{name}_proj.weight"]
                layer[f"self_attn.{name}_proj.weight"] = torch.cat([own, torch.zeros_like(own)], dim=1)
            weights = {f"midlayer.{name}": weight for name, weight in layer.items()}
            weights.update({"midlayer.hidden_norm.weight": norm.clone(), "norm.weight": norm.clone()})
            weights["fc.weight"] = nothing
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [SINGLE.layers]}
        else:
            layer["input_proj.weight"] = torch.cat([nothing, token], dim=1)
            layer.update({f"{name}_layernorm.weight": norm.clone() for name in ("token", "hidden", "final")})
            weights = {f"model.mtp_layers.0.{name}": weight for name, weight in layer.items()}
            config.update(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
        self.head.mkdir(exist_ok=True)
        save_file(weights, self.head / "head.safetensors")
        (self.head / "config.json").write_text(json.dumps(config))


class CarriedHeadReference(HeadReference):
    """The same, by eagle or eagle3, but that the head has half of what it needs from hidden states alone.

    The model's second head of attention finds the same tokens of all that it has seen, whatever the last one is, and
    writes to ``CARRIED``, where nothing else writes. The draft head has no such head: it takes over what stood there.
    """

    _RMS = 32.0  # of the hidden states before their last norm, which eagle's head does without

    def _make(self, size: Size) -> Any:
        model = super()._make(size)
        table, layer, head = model.model.embed_tokens.weight, model.model.layers[0], model.lm_head.weight
        query, out, down = layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight
        second = slice(len(query) // 2, None)
        with torch.no_grad():
            table[:, CARRIED] = table[:, 0] = 0
            table /= table.square().mean(1, keepdim=True).sqrt()
            table[:, 0] = 1  # the same of all tokens is all that the second head asks by,
            query[second, 1:] = 0
            query[second].view(2, -1, size.hidden)[:, :8] = 0  # and that RoPE turns slowly
            query[second] *= 6
            out[CARRIED, : second.start] = out[: CARRIED.start, second] = down[CARRIED] = 0
            for weight in (table, out, down):
                weight /= self._RMS
            head[:, CARRIED] = 30 * torch.eye(8).repeat(VOCABULARY // 8, 1)
        return model

    def _save_head(self) -> None:
        super()._save_head()
        weights = load_file(self.head / "head.safetensors")
        for name, weight in weights.items():
            if name.endswith("o_proj.weight"):
                weight[:, weight.shape[1] // 2 :] = 0
            elif self._method == "eagle" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                weight *= self._RMS
                weight[:, CARRIED] = 0
        carried = torch.zeros(SINGLE.hidden, SINGLE.hidden)
        carried[CARRIED, CARRIED] = torch.eye(8)
        weights["fc.weight"][:, -SINGLE.hidden :] = carried
        save_file(weights, self.head / "head.safetensors")


class ExpertReference(Reference):
    """A Mixtral: each token is computed by two of four experts."""

    def _make(self, size: Size) -> Any:
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": None}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_sizes(size), **experts))


class LatentReference(Reference):
    """A DeepSeek V2 without experts: one latent a token and layer, whatever the number of heads (MLA)."""

    def _make(self, size: Size) -> Any:
        return transformers.DeepseekV2ForCausalLM(
            transformers.DeepseekV2Config(
                **_latents(size),
                first_k_dense_replace=size.layers,
                n_routed_experts=4,
                moe_layer_freq=1,  # SGLang asks for it
                num_experts_per_tok=2,
            )
        )


class LatentHeadReference(HeadReference):
    """A DeepSeek V3 without experts, whose one layer is also the layer of its draft (MTP), which has latents too."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        super().__init__(folder, "mtp", seed)

    def _make(self, size: Size) -> Any:
        kind = transformers.DeepseekV3ForCausalLM
        one_group = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
        config = kind.config_class(**_latents(size), **one_group, first_k_dense_replace=size.layers + 1)
        return self._for_a_head(kind(config))

    def _save_head(self) -> None:
        layer = {name: weight.clone() for name, weight in self._model.model.layers[0].state_dict().items()}
        norm = layer["input_layernorm.weight"]  # ones, as all others
        token = torch.eye(len(norm))
        layer["eh_proj.weight"] = torch.cat([token, torch.zeros_like(token)], dim=1)
        layer.update({f"{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")})
        layer["shared_head.head.weight"] = self._model.lm_head.weight.detach().clone()
        layer["embed_tokens.weight"] = self._model.model.embed_tokens.weight.detach().clone()
        weights = load_file(self.path / "model.safetensors")
        weights.update({f"model.layers.{SINGLE.layers}.{name}": weight for name, weight in layer.items()})
        save_file(weights, self.path / "model.safetensors", {"format": "pt"})
        self.configure(num_nextn_predict_layers=1)


class RecurrentReference(Reference):
    """Every other layer keeps, instead of its tokens, one state of a fixed size. ``kind``: as vLLM calls such layers,
    GDN_ATTN (a Qwen 3.5), MAMBA2 (a Granite 4) or SHORT_CONV (an LFM 2); or KDA (a Kimi Linear, its others are MLA).
    """

    def __init__(self, folder: Path, kind: str, size: Size = WINDOWED, seed: int = 0) -> None:
        self._kind, self._layers = kind, size.layers
        super().__init__(folder, size, seed)

    def for_sglang(self) -> RecurrentReference:
        """Before SGLang loads it, which reads what the models' authors wrote, not what transformers writes."""
        if self._kind == "GDN_ATTN":
            self.configure(full_attention_interval=2)
        if self._kind == "KDA":
            layers = range(1, self._layers + 1)
            which = {"kda_layers": [*layers[::2]], "full_attn_layers": [*layers[1::2]]}
            delta = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, **which}
            self.configure(linear_attn_config=delta, num_experts=None)
            file = self.path / "model.safetensors"  # where these are the layers without experts too
            weights = {name.replace(".block_sparse_moe.", ".mlp."): own for name, own in load_file(file).items()}
            save_file(weights, file, {"format": "pt"})
        return self

    def _make(self, size: Size) -> Any:
        kinds = ["conv" if self._kind == "SHORT_CONV" else "linear_attention", "full_attention"] * (size.layers // 2)
        common = {**_sizes(size), "layer_types": kinds}
        wide = {"num_attention_heads": 2, "num_key_value_heads": 2}  # heads of 32, the smallest of vLLM's for CPUs
        if self._kind == "SHORT_CONV":
            lfm = {"conv_L_cache": 4, "conv_dim": size.hidden, "block_dim": size.hidden}
            lfm.update(block_auto_adjust_ff_dim=False, tie_word_embeddings=True)
            return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**common, **wide, **lfm}))
        if self._kind == "MAMBA2":
            granite = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
            granite.update(num_local_experts=0, shared_intermediate_size=2 * size.hidden)
            config = transformers.GraniteMoeHybridConfig(**{**common, **wide, **granite}, attention_multiplier=0.25)
            return transformers.GraniteMoeHybridForCausalLM(config)
        if self._kind == "KDA":
            latents = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
            latents.update(num_key_value_heads=size.heads, pad_token_id=0)
            delta = {"linear_head_dim": 16, "linear_num_heads": 4, "mlp_layer_types": ["dense"] * size.layers}
            return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**{**common, **latents, **delta}))
        state = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
        width = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 64}
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**common, **state, **width))


class StatesReference(Reference):
    """A Mamba 2: none of its layers keeps a token."""

    def _make(self, size: Size) -> Any:
        own = {name: value for name, value in _sizes(size).items() if name != "num_key_value_heads"}
        state = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32, "conv_kernel": 4}
        return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**own, **state, pad_token_id=0))

    @torch.no_grad()
    def _continue(self, prompt: list[int], new_tokens: int) -> list[int] | None:
        """Without a cache, which transformers hands on otherwise here."""
        tokens = list[int]()
        for _ in range(new_tokens):
            logits = self._model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            best = logits.topk(2)
            if best.values[0] - best.values[1] <= SURE * (logits.max() - logits.min()):
                return None
            tokens.append(int(best.indices[0]))
        return tokens


def _sizes(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": size.positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.3 if size.hidden <= 64 else 0.1,
    }


def _latents(size: Size) -> dict[str, Any]:
    return {
        **_sizes(size),
        "num_key_value_heads": size.heads,
        "kv_lora_rank": 512,  # with the rope part the only size that vLLM's kernel for CPUs has
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": None,
    }
