"""Writes a Qwen3-MoE model directory as a set of GGUF files, as converters do: experts stacked, byte-level
tokens with their types and merges, the chat template inside. Weights stay BF16 but for the experts, which
become Q8_0 or stay. For tests."""

import json
import struct

import safetensors_io

U16, U32, I32, F32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
BF16, Q8_0 = 30, 8
ALIGNMENT = 32


def _string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind, value):
    if kind == STRING:
        return _string(value)
    return struct.pack({U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def _array(kind, values):
    return struct.pack("<IQ", kind, len(values)) + b"".join(_value(kind, value) for value in values)


class File:
    def __init__(self):
        self.values, self.infos, self.data = [], [], bytearray()

    def add(self, key, kind, value):
        self.values.append(_string(key) + struct.pack("<I", kind) + _value(kind, value))

    def add_array(self, key, kind, values):
        self.values.append(_string(key) + struct.pack("<I", ARRAY) + _array(kind, values))

    def tensor(self, name, shape, kind, data):
        self.data.extend(bytes(-len(self.data) % ALIGNMENT))
        self.infos.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind,
                                                      len(self.data)))
        self.data.extend(data)

    def write(self, path):
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.infos), len(self.values))
        head += b"".join(self.values) + b"".join(self.infos)
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + self.data)


def quantize_q8_0(bf16):
    """32 weights a block: F16 scale (largest magnitude over 127), 32 signed bytes."""
    bits = struct.unpack(f"<{len(bf16) // 2}H", bf16)
    values = struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *(b << 16 for b in bits)))
    blocks = []
    for at in range(0, len(values), 32):
        block = values[at:at + 32]
        scale = max(map(abs, block)) / 127
        inverse = 1 / scale if scale else 0
        blocks.append(struct.pack("<e32b", scale, *(round(v * inverse) for v in block)))
    return b"".join(blocks)


TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp"}


def _keys(directory, file):
    config = json.loads((directory / "config.json").read_text())
    file.add("general.architecture", STRING, "qwen3moe")
    for key, hub in {"context_length": "max_position_embeddings", "embedding_length": "hidden_size",
                     "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
                     "attention.head_count": "num_attention_heads",
                     "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
                     "attention.value_length": "head_dim", "expert_count": "num_experts",
                     "expert_used_count": "num_experts_per_tok",
                     "expert_feed_forward_length": "moe_intermediate_size"}.items():
        file.add(f"qwen3moe.{key}", U32, config[hub])
    file.add("qwen3moe.rope.freq_base", F32, config["rope_theta"])
    file.add("qwen3moe.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"])
    return config


def _tokenizer(directory, config, file):
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    unused, normal, control, user_defined = 5, 1, 3, 4
    texts = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [unused] * len(texts)
    for text, i in tokenizer["model"]["vocab"].items():
        texts[i], types[i] = text, normal
    for token in tokenizer["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = control if token["special"] else user_defined
    file.add("tokenizer.ggml.model", STRING, "gpt2")
    file.add("tokenizer.ggml.pre", STRING, "qwen2")
    file.add_array("tokenizer.ggml.tokens", STRING, texts)
    file.add_array("tokenizer.ggml.token_type", I32, types)
    merges = tokenizer["model"]["merges"]
    file.add_array("tokenizer.ggml.merges", STRING, [m if isinstance(m, str) else " ".join(m) for m in merges])
    file.add("tokenizer.ggml.eos_token_id", U32, config["eos_token_id"])
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    file.add("tokenizer.chat_template", STRING, template)


def _tensors(directory, config, quantized_layers):
    """(name, shape, type, data) in GGUF's terms."""
    tensors = safetensors_io.read(directory / "model.safetensors")
    for hub, name in TOP.items():
        dtype, shape, data = tensors[hub]
        assert dtype == "BF16"
        yield name, shape, BF16, data
    for layer in range(config["num_hidden_layers"]):
        hub_prefix, prefix = f"model.layers.{layer}.", f"blk.{layer}."
        for hub, name in LAYER.items():
            _, shape, data = tensors[f"{hub_prefix}{hub}.weight"]
            yield f"{prefix}{name}.weight", shape, BF16, data
        for part in ("gate", "up", "down"):
            experts = [tensors[f"{hub_prefix}mlp.experts.{e}.{part}_proj.weight"]
                       for e in range(config["num_experts"])]
            data = b"".join(e[2] for e in experts)
            shape = [len(experts), *experts[0][1]]
            name = f"{prefix}ffn_{part}_exps.weight"
            if layer in quantized_layers:
                yield name, shape, Q8_0, quantize_q8_0(data)
            else:
                yield name, shape, BF16, data


def convert(directory, output, quantized_layers=(), files=1):
    """Writes `output`.gguf, or `output`-0000I-of-0000N.gguf; returns the path to name."""
    first = File()
    config = _keys(directory, first)
    _tokenizer(directory, config, first)
    tensors = list(_tensors(directory, config, quantized_layers))
    parts = [first] + [File() for _ in range(files - 1)]
    for number, part in enumerate(parts):
        if files > 1:
            part.add("split.no", U16, number)
            part.add("split.count", U16, files)
            part.add("split.tensors.count", I32, len(tensors))
        for tensor in tensors[number::files]:
            part.tensor(*tensor)
    if files == 1:
        path = output.with_name(output.name + ".gguf")
        first.write(path)
        return path
    paths = [output.with_name(f"{output.name}-{n + 1:05}-of-{files:05}.gguf") for n in range(files)]
    for part, path in zip(parts, paths):
        part.write(path)
    return paths[0]
