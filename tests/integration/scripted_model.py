"""A model directory with any tokenizer, whose model says what the test wrote down.

The layers of golden qwen3_moe are kept but add nothing (their output projections are zero), so that a token's
successor depends on that token alone: its embedding is one axis, and the rows of lm_head on that axis name what
follows. All other tokens embed to zero and are followed by token 0.
"""

import json
import shutil
import struct

import harness
import safetensors_io

FIRST, SECOND = 10.0, 5.0  # weights of a token's first and second choice: logits 80 and 40


def bf16(value):
    return struct.pack("<f", value)[2:]


def make(target, tokenizer, vocab, successors):
    """`tokenizer`: a directory with tokenizer.json; `successors`: {token: [next, next when that is banned]}."""
    source = harness.golden("qwen3_moe")
    target.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, target / file)
    config = json.loads((source / "config.json").read_text())
    hidden = config["hidden_size"]
    assert len(successors) <= hidden
    config.update(vocab_size=vocab, bos_token_id=None, eos_token_id=None)
    (target / "config.json").write_text(json.dumps(config))

    tensors = safetensors_io.read(source / "model.safetensors")
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = (dtype, shape, bytes(len(data)))
    tensors["model.norm.weight"] = ("BF16", [hidden], bf16(1.0) * hidden)
    embedding, head = bytearray(2 * vocab * hidden), bytearray(2 * vocab * hidden)
    for axis, (token, follow) in enumerate(successors.items()):
        put(embedding, hidden, token, axis, 1.0)
        for choice, weight in zip(follow, (FIRST, SECOND)):
            put(head, hidden, choice, axis, weight)
    tensors["model.embed_tokens.weight"] = ("BF16", [vocab, hidden], bytes(embedding))
    tensors["lm_head.weight"] = ("BF16", [vocab, hidden], bytes(head))
    safetensors_io.write(target / "model.safetensors", tensors)
    return target


def put(matrix, width, row, column, value):
    at = 2 * (row * width + column)
    matrix[at:at + 2] = bf16(value)
