"""What one step costs at least: the bytes and operations of a GGUF model, at the bandwidth and rate that this machine
was measured to have. Knows nothing of engines. The bound of each matrix is the slower of the two; a step is their sum."""
import struct
from dataclasses import dataclass

# GGML type: (name, elements of a block, bytes of a block)
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
         7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
         14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2)}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass
class Model:
    matrices: list  # (elements, bytes) of each matrix of the layers
    head: tuple  # the same of the matrix that gives the logits
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, element_bytes):
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, code):
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self):
        size = self.scalar("Q")
        self.at += size
        return self.data[self.at - size:self.at].decode("utf-8", "replace")

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, size = self.scalar("I"), self.scalar("Q")
        return [self.value(kind) for _ in range(size)]


def read_gguf(path):
    with open(path, "rb") as file:
        reader = Reader(file.read())
    if reader.scalar("I") != 0x46554747:
        raise ValueError(f"{path} is no GGUF file")
    reader.scalar("I")
    tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
    meta = {}
    for _ in range(pairs):
        key = reader.string()
        meta[key] = reader.value(reader.scalar("I"))
    sizes = {}
    for _ in range(tensors):
        name = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        _, block, block_bytes = TYPES[reader.scalar("I")]
        reader.scalar("Q")
        elements = 1
        for side in shape:
            elements *= side
        if len(shape) == 2:
            sizes[name] = (elements, elements // block * block_bytes)
    arch = meta["general.architecture"]
    heads = meta[f"{arch}.attention.head_count"]
    return Model(matrices=[size for name, size in sizes.items() if name.startswith("blk.")],
                 head=sizes.get("output.weight", sizes["token_embd.weight"]),
                 layers=meta[f"{arch}.block_count"], heads=heads,
                 kv_heads=meta.get(f"{arch}.attention.head_count_kv", heads),
                 head_dim=meta.get(f"{arch}.attention.key_length", meta[f"{arch}.embedding_length"] // heads))


def bound_ms(model, row, gb_per_s, gflop_per_s, kv_element_bytes=2):
    """Least milliseconds of `prefill<N>` or of a step of `decode<B>x<C>`, weights in the file's format."""
    def slower(byte_count, operations):
        return max(byte_count / gb_per_s, operations / gflop_per_s) / 1e6

    if row.startswith("prefill"):
        rows = int(row.removeprefix("prefill"))
        head_rows, keys, kv_tokens = 1, rows * (rows + 1) // 2, rows
    else:
        rows, context = map(int, row.removeprefix("decode").split("x"))
        head_rows, keys, kv_tokens = rows, rows * (context + 1), rows * (context + 1)
    weights = sum(slower(size, 2 * rows * elements) for elements, size in model.matrices)
    head = slower(model.head[1], 2 * head_rows * model.head[0])
    attention = slower(kv_tokens * model.kv_bytes(kv_element_bytes), 4 * keys * model.layers * model.heads * model.head_dim)
    return weights + head + attention
