"""Reads and writes safetensors files with the standard library, for tests that alter checkpoints."""

import json
import struct

CODES = {"F32": "f", "I32": "i", "I64": "q", "U8": "B", "BF16": "H", "F16": "e"}


def read(path):
    """-> {name: (dtype, shape, bytes)}."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    base = 8 + length
    return {name: (entry["dtype"], entry["shape"], data[base + entry["data_offsets"][0]:base + entry["data_offsets"][1]])
            for name, entry in header.items()}


def write(path, tensors):
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            out.write(data)


def values(tensor):
    """Flat list of numbers."""
    dtype, _, data = tensor
    code = CODES[dtype]
    numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
    if dtype == "BF16":
        return [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in numbers]
    return numbers


def rows(tensor):
    """A list of rows of a 2-D tensor."""
    flat, width = values(tensor), tensor[1][-1]
    return [flat[i:i + width] for i in range(0, len(flat), width)]
