#!/usr/bin/env python3
"""Checkpoints of the sizes that people serve, with random weights: shapes and keys of Llama-3.1-8B-Instruct,
Llama-3.2-1B-Instruct and Qwen2.5-7B-Instruct, to see how such a model loads, what it takes and how fast it computes. Its
answers say nothing.

  big_checkpoints.py llama-3.1-8b safetensors OUT        a directory, BF16: config.json, tokenizer.json, two or more shards
  big_checkpoints.py llama-3.1-8b gguf OUT.gguf          BF16; --type q8_0|q4_0|q4_k|f16 for another type
  --layers N         fewer layers (32, 16 or 28 in the real ones): a small file for tests
  --parts N          a GGUF in N parts, as gguf-split cuts it; OUT.gguf becomes OUT-00001-of-0000N.gguf
  --ends             the output matrix has only tokens that end an answer: answers end with their first token (bf16, f16)

The GGUF's keys are those of the public files of these models: Llama-3.1 without `add_bos_token`, `eot_token_id` and
`rope.scaling`, with a tensor of frequency factors; Qwen2.5 with `add_bos_token`. The vocabulary has the real size and the
real named tokens; its other tokens are bytes, common pairs of them, and fillers.

Standard library only. Random numbers are a block of some MiB at changing offsets: what a real file does to memory, disk and
caches it does, too. Prints nothing; writes as fast as the disk."""
import argparse
import json
import math
import os
import random
import struct
import sys

CHUNK = 8 << 20
SHARD_BYTES = 5 << 30

LLAMA_TOKENS = dict(
    vocab=128256, context=131072, theta=500000.0, eps=1e-5, bias=False, pre="llama-bpe", bos=128000, eos=128009,
    ends=[128001, 128008, 128009], add_bos=None,
    named={128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128004: "<|finetune_right_pad_id|>",
           128006: "<|start_header_id|>", 128007: "<|end_header_id|>", 128008: "<|eom_id|>", 128009: "<|eot_id|>",
           128010: "<|python_tag|>"}, first_named=128000,
    template="{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
             "{{ m.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n")

MODELS = {
    "llama-3.1-8b": dict(
        arch="llama", title="Llama 3.1 8B Instruct", hidden=4096, layers=32, heads=32, kv_heads=8, feed_forward=14336,
        tied=False, rope_factor=8.0, **LLAMA_TOKENS),
    "llama-3.2-1b": dict(
        arch="llama", title="Llama 3.2 1B Instruct", hidden=2048, layers=16, heads=32, kv_heads=8, feed_forward=8192,
        tied=True, rope_factor=32.0, **LLAMA_TOKENS),
    "qwen2.5-7b": dict(
        arch="qwen2", title="Qwen2.5 7B Instruct", tied=False, hidden=3584, layers=28, heads=28, kv_heads=4, feed_forward=18944,
        vocab=152064, context=32768, theta=1000000.0, eps=1e-6, bias=True, pre="qwen2", bos=151643, eos=151645,
        ends=[151645, 151643], add_bos=False,
        named={151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151662: "<|fim_pad|>",
               151663: "<|repo_name|>", 151664: "<|file_sep|>"}, first_named=151643,
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                 "<|im_start|>assistant\n"),
}

# GGML's number, values and bytes of a group, and which of its bytes begin an f16 scale.
TYPES = {"f32": (0, 1, 4, ()), "f16": (1, 1, 2, ()), "bf16": (30, 1, 2, ()), "q4_0": (2, 32, 18, (0,)),
         "q8_0": (8, 32, 34, (0,)), "q4_k": (12, 256, 144, (0, 2))}


class Noise:
    """Bytes of weights of a type, normal with a standard deviation of about 0.02."""

    def __init__(self, seed):
        self.random, self.blocks = random.Random(seed), {}

    def block(self, kind):
        if kind not in self.blocks:
            make = getattr(self, "_" + ("half" if kind in ("f16", "bf16", "f32") else "groups"))
            self.blocks[kind] = make(kind)
        return self.blocks[kind]

    def _half(self, kind):
        values = [self.random.gauss(0, 0.02) for _ in range(1 << 16)]
        if kind == "f32":
            unit = struct.pack(f"<{len(values)}f", *values)
        elif kind == "f16":
            unit = struct.pack(f"<{len(values)}e", *values)
        else:
            unit = b"".join(struct.pack("<f", value)[2:] for value in values)
        return unit * (CHUNK // len(unit))

    def _groups(self, kind):
        _, _, size, scales = TYPES[kind]
        unit = bytearray(self.random.randbytes(size * 4096))
        scale = {"q4_0": 0.004, "q8_0": 0.0003, "q4_k": 0.0001}[kind]
        for at in range(0, len(unit), size):
            for offset in scales:
                unit[at + offset:at + offset + 2] = struct.pack("<e", scale)
            for i in range(size if kind == "q8_0" else 0):
                # GGML writes no -128.
                if unit[at + i] == 0x80 and i >= 2:
                    unit[at + i] = 0
        return bytes(unit) * max(1, CHUNK // len(unit))

    def write(self, out, kind, count):
        """`count` bytes; a whole number of groups."""
        block, size = self.block(kind), TYPES[kind][2]
        while count:
            start = self.random.randrange(len(block) // size // 2) * size
            piece = block[start:start + min(count, len(block) - start)]
            out.write(piece)
            count -= len(piece)


def names_of_bytes():
    """GPT-2's printable character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in plain)
    names = {b: chr(b) for b in plain}
    names.update({b: chr(256 + i) for i, b in enumerate(others)})
    return names


def vocabulary(model):
    """Tokens, their types (1 normal, 3 control), and merges."""
    names = names_of_bytes()
    tokens, merges = [names[b] for b in range(256)], []
    for left in "Ġetaoinshrdlucmfwygpbvk":
        for right in "etaoinshrdlucmfwygpbvk":
            tokens.append(left + right)
            merges.append(left + " " + right)
    while len(tokens) < model["first_named"]:
        tokens.append(f"filler{len(tokens)}")
    types = [1] * len(tokens)
    while len(tokens) < model["vocab"]:
        tokens.append(model["named"].get(len(tokens), f"<|reserved_special_token_{len(tokens)}|>"))
        types.append(3)
    return tokens, types, merges


def tensors(model, layers):
    """Names in GGUF and in transformers, shapes [out, in], and whether it is a norm (ones) or a bias."""
    head = model["hidden"] // model["heads"]
    hidden, kv, wide = model["hidden"], model["kv_heads"] * head, model["feed_forward"]
    yield "token_embd.weight", "model.embed_tokens.weight", [model["vocab"], hidden]
    yield "output_norm.weight", "model.norm.weight", [hidden]
    if not model["tied"]:
        yield "output.weight", "lm_head.weight", [model["vocab"], hidden]
    for i in range(layers):
        a, b = f"blk.{i}.", f"model.layers.{i}."
        yield a + "attn_norm.weight", b + "input_layernorm.weight", [hidden]
        for part, name, rows in (("q", "q_proj", hidden), ("k", "k_proj", kv), ("v", "v_proj", kv)):
            yield a + f"attn_{part}.weight", b + f"self_attn.{name}.weight", [rows, hidden]
            if model["bias"]:
                yield a + f"attn_{part}.bias", b + f"self_attn.{name}.bias", [rows]
        yield a + "attn_output.weight", b + "self_attn.o_proj.weight", [hidden, hidden]
        yield a + "ffn_norm.weight", b + "post_attention_layernorm.weight", [hidden]
        yield a + "ffn_gate.weight", b + "mlp.gate_proj.weight", [wide, hidden]
        yield a + "ffn_up.weight", b + "mlp.up_proj.weight", [wide, hidden]
        yield a + "ffn_down.weight", b + "mlp.down_proj.weight", [hidden, wide]


def vector(kind, name, n):
    """Norms are ones, biases zeros, factors ones; in f32 or bf16."""
    value = struct.pack("<f", 0.0 if name.endswith("bias") else 1.0)
    return (value if kind == "f32" else value[2:]) * n


def favour(model, kind, dims, write_rows):
    """An output matrix of zeros but for two tokens that end an answer, all ones and all minus ones: whatever the sum of the
    hidden state is, the logit of one of the two is above all others."""
    other = next(end for end in model["ends"] if end != model["eos"])
    numbers = {model["eos"]: 1.0, other: -1.0}
    row_bytes = dims[1] // TYPES[kind][1] * TYPES[kind][2]
    for row in range(dims[0]):
        sign = numbers.get(row)
        if sign is None or kind not in ("bf16", "f16", "f32"):
            write_rows(bytes(row_bytes))
            continue
        number = {"f32": struct.pack("<f", sign), "f16": struct.pack("<e", sign), "bf16": struct.pack("<f", sign)[2:]}
        write_rows(number[kind] * dims[1])


def size_of(kind, dims):
    _, values, size, _ = TYPES[kind]
    return math.prod(dims) // values * size


def write_tensor(out, noise, model, options, kind, name, dims):
    if len(dims) == 1:
        out.write(vector(kind, name, dims[0]))
    elif options.ends and name == "output.weight":
        favour(model, kind, dims, out.write)
    else:
        noise.write(out, kind, size_of(kind, dims))


def safetensors(model, options):
    os.makedirs(options.out, exist_ok=True)
    noise, layers = Noise(options.seed), options.layers or model["layers"]
    shards, size = [[]], 0
    for gguf_name, name, dims in tensors(model, layers):
        bytes_ = size_of("bf16", dims)
        if size and size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((gguf_name, name, dims, bytes_))
        size += bytes_
    files = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for _, name, dims, bytes_ in shard:
            header[name] = dict(dtype="BF16", shape=dims, data_offsets=[at, at + bytes_])
            files[name] = file
            at += bytes_
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(options.out, file), "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for gguf_name, _, dims, _ in shard:
                write_tensor(out, noise, model, options, "bf16", gguf_name, dims)

    def put(name, content):
        with open(os.path.join(options.out, name), "w", encoding="utf-8") as out:
            json.dump(content, out, ensure_ascii=False)

    if len(shards) > 1:
        put("model.safetensors.index.json", dict(weight_map=files))
    config = dict(
        architectures=["LlamaForCausalLM" if model["arch"] == "llama" else "Qwen2ForCausalLM"], model_type=model["arch"],
        hidden_size=model["hidden"], intermediate_size=model["feed_forward"], num_hidden_layers=layers,
        num_attention_heads=model["heads"], num_key_value_heads=model["kv_heads"], vocab_size=model["vocab"],
        max_position_embeddings=model["context"], rms_norm_eps=model["eps"], rope_theta=model["theta"], hidden_act="silu",
        tie_word_embeddings=model["tied"], torch_dtype="bfloat16", bos_token_id=model["bos"])
    if model["arch"] == "llama":
        config.update(eos_token_id=model["ends"], rope_scaling=dict(
            rope_type="llama3", factor=model["rope_factor"], low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192))
    else:
        # As published: windows are off, and the two keys about them are there.
        config.update(eos_token_id=model["eos"], use_sliding_window=False, sliding_window=131072, max_window_layers=28)
        put("generation_config.json", dict(eos_token_id=model["ends"], bos_token_id=model["bos"]))
    put("config.json", config)
    tokens, types, merges = vocabulary(model)
    split = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
             "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
    if model["arch"] != "llama":
        split = split.replace("{1,3}", "")
    added = [dict(id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
             for i, (token, kind) in enumerate(zip(tokens, types)) if kind == 3]
    steps = [dict(type="Split", pattern=dict(Regex=split), behavior="Isolated", invert=False),
             dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)]
    byte_level = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
    put("tokenizer.json", dict(
        version="1.0", truncation=None, padding=None, added_tokens=added,
        normalizer=None if model["arch"] == "llama" else dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=steps), post_processor=None, decoder=byte_level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=False, byte_fallback=False, ignore_merges=model["arch"] == "llama",
                   vocab={token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == 1}, merges=merges)))
    named = dict(bos_token=model["named"][model["bos"]], eos_token=model["named"][model["eos"]])
    put("tokenizer_config.json", dict(chat_template=model["template"], add_bos_token=model["arch"] == "llama", **named))


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_keys(model, options, layers):
    """Pairs of a key and its type and value, in bytes."""
    arch = model["arch"]
    string = lambda value: struct.pack("<I", 8) + text(value)
    u32 = lambda value: struct.pack("<II", 4, value)
    f32 = lambda value: struct.pack("<If", 6, value)
    array = lambda kind, items: struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)
    tokens, types, merges = vocabulary(model)
    keys = [
        ("general.architecture", string(arch)), ("general.name", string(model["title"])),
        ("general.file_type", u32({"bf16": 32, "f16": 1, "q8_0": 7, "q4_0": 2, "q4_k": 15}[options.type])),
        (f"{arch}.block_count", u32(layers)), (f"{arch}.context_length", u32(model["context"])),
        (f"{arch}.embedding_length", u32(model["hidden"])), (f"{arch}.feed_forward_length", u32(model["feed_forward"])),
        (f"{arch}.attention.head_count", u32(model["heads"])), (f"{arch}.attention.head_count_kv", u32(model["kv_heads"])),
        (f"{arch}.rope.freq_base", f32(model["theta"])),
        (f"{arch}.attention.layer_norm_rms_epsilon", f32(model["eps"])),
        ("tokenizer.ggml.model", string("gpt2")), ("tokenizer.ggml.pre", string(model["pre"])),
        ("tokenizer.ggml.tokens", array(8, [text(token) for token in tokens])),
        ("tokenizer.ggml.token_type", array(5, [struct.pack("<i", kind) for kind in types])),
        ("tokenizer.ggml.merges", array(8, [text(merge) for merge in merges])),
        ("tokenizer.ggml.bos_token_id", u32(model["bos"])), ("tokenizer.ggml.eos_token_id", u32(model["eos"])),
        ("tokenizer.chat_template", string(model["template"])), ("general.quantization_version", u32(2)),
    ]
    if arch == "llama":
        keys += [(f"{arch}.vocab_size", u32(model["vocab"])),
                 (f"{arch}.rope.dimension_count", u32(model["hidden"] // model["heads"]))]
    if model["add_bos"] is not None:
        keys.append(("tokenizer.ggml.add_bos_token", struct.pack("<I?", 7, model["add_bos"])))
    return keys


def gguf(model, options):
    noise, layers = Noise(options.seed), options.layers or model["layers"]
    kind_of = lambda dims: "f32" if len(dims) == 1 else options.type
    # As llama.cpp stores them: vectors in f32. A public Llama-3.1 has the factors of its frequencies in a tensor.
    every = [(name, dims, kind_of(dims)) for name, _, dims in tensors(model, layers)]
    if model["arch"] == "llama":
        every.insert(0, ("rope_freqs.weight", [model["hidden"] // model["heads"] // 2], "f32"))
    base, parts = options.out.removesuffix(".gguf"), options.parts
    share = math.ceil(len(every) / parts)
    for number in range(parts):
        own = every[number * share:(number + 1) * share]
        keys = gguf_keys(model, options, layers) if number == 0 else []
        if parts > 1:
            keys += [("split.no", struct.pack("<IH", 2, number)), ("split.count", struct.pack("<IH", 2, parts)),
                     ("split.tensors.count", struct.pack("<Ii", 5, len(every)))]
        header, at = b"GGUF" + struct.pack("<IQQ", 3, len(own), len(keys)), 0
        header += b"".join(text(key) + value for key, value in keys)
        for name, dims, kind in own:
            header += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *reversed(dims))
            header += struct.pack("<IQ", TYPES[kind][0], at)
            at += -(-size_of(kind, dims) // 32) * 32
        name = options.out if parts == 1 else f"{base}-{number + 1:05}-of-{parts:05}.gguf"
        with open(name, "wb") as out:
            out.write(header + bytes(-len(header) % 32))
            for name, dims, kind in own:
                write_tensor(out, noise, model, options, kind, name, dims)
                out.write(bytes(-size_of(kind, dims) % 32))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("form", choices=["safetensors", "gguf"])
    parser.add_argument("out")
    parser.add_argument("--type", default="bf16", choices=["bf16", "f16", "q8_0", "q4_0", "q4_k"])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--ends", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.ends and MODELS[options.model]["tied"]:
        parser.error(f"--ends: {options.model} has no output matrix of its own")
    if options.ends and options.type not in ("bf16", "f16"):
        parser.error("--ends wants an output matrix of bf16 or f16")
    {"safetensors": safetensors, "gguf": gguf}[options.form](MODELS[options.model], options)


if __name__ == "__main__":
    sys.exit(main())
