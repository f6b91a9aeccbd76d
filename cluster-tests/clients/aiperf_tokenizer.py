"""Writes the tokenizer of a GGUF model as a Hugging Face directory, for aiperf. Needs numpy and PyPI's gguf.

Usage: aiperf_tokenizer.py FILE.gguf DIRECTORY
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy" / "bench"))
import export_safetensors as export  # noqa: E402


def main(source: str, target: str) -> None:
    reader = export.GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    directory = pathlib.Path(target)
    directory.mkdir(parents=True, exist_ok=True)
    export.write_json(directory / "tokenizer.json", export.tokenizer(meta))
    export.write_json(directory / "tokenizer_config.json", export.tokenizer_config(meta))
    export.write_json(directory / "config.json", {"model_type": "llama"})


if __name__ == "__main__":
    main(*sys.argv[1:])
