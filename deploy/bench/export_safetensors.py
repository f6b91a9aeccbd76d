"""Writes a Llama GGUF as a Hugging Face directory (bf16 safetensors, config.json, tokenizer.json), for engines that read
no GGUF or are slow with it: export_safetensors.py FILE.gguf DIR. Needs numpy and PyPI's gguf."""
import json
import pathlib
import re
import struct
import sys

import numpy
from gguf import GGUFReader, dequantize

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def main(source, target):
    reader = GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    target = pathlib.Path(target)
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / "config.json", config(meta, any(t.name == "output.weight" for t in reader.tensors)))
    write_json(target / "tokenizer.json", tokenizer(meta))
    write_json(target / "tokenizer_config.json", tokenizer_config(meta))
    write_json(target / "generation_config.json", {"bos_token_id": bos(meta), "eos_token_id": eos(meta)})
    write_safetensors(target / "model.safetensors", tensors(reader, meta))


def llama(meta, key):
    return meta["llama." + key]


def bos(meta):
    return int(meta["tokenizer.ggml.bos_token_id"])


def eos(meta):
    return int(meta["tokenizer.ggml.eos_token_id"])


def config(meta, untied):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": llama(meta, "embedding_length"), "intermediate_size": llama(meta, "feed_forward_length"),
            "num_hidden_layers": llama(meta, "block_count"), "num_attention_heads": llama(meta, "attention.head_count"),
            "num_key_value_heads": llama(meta, "attention.head_count_kv"), "vocab_size": len(meta["tokenizer.ggml.tokens"]),
            "max_position_embeddings": llama(meta, "context_length"), "rope_theta": float(llama(meta, "rope.freq_base")),
            "rms_norm_eps": float(llama(meta, "attention.layer_norm_rms_epsilon")), "tie_word_embeddings": not untied,
            "attention_bias": False, "mlp_bias": False, "bos_token_id": bos(meta), "eos_token_id": eos(meta)}


def tokenizer(meta):
    """Byte-level BPE, as `router` builds it from the same metadata."""
    words, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i, (word, kind) in enumerate(zip(words, kinds)) if kind == 3]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
            "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {word: i for i, word in enumerate(words)}, "merges": meta["tokenizer.ggml.merges"]}}


def tokenizer_config(meta):
    words = meta["tokenizer.ggml.tokens"]
    return {"bos_token": words[bos(meta)], "eos_token": words[eos(meta)], "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": meta["tokenizer.chat_template"]}


def tensors(reader, meta):
    heads = {"attn_q": llama(meta, "attention.head_count"), "attn_k": llama(meta, "attention.head_count_kv")}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        if name in heads:  # GGUF interleaves the halves that RoPE turns
            values = values.reshape(heads[name], values.shape[0] // heads[name] // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        yield (f"model.layers.{layer}." if layer else "") + NAMES[name] + ".weight", values


def bf16(values):
    bits = numpy.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def write_safetensors(path, named):
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in named:
        data = bf16(values).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
