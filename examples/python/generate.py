"""One prompt over gRPC, tokens as they come. The stubs are made from the .proto file on the way.

Usage: generate.py HOST:PORT "A prompt"
"""

import importlib
import os
import pathlib
import sys
import tempfile

import grpc
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto" / "proto"


def stubs(directory: str):
    """Messages and services of inference.proto."""
    name = "tandem/v1/inference.proto"
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={directory}", f"--grpc_python_out={directory}", name]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    sys.path.insert(0, directory)
    return importlib.import_module("tandem.v1.inference_pb2"), importlib.import_module("tandem.v1.inference_pb2_grpc")


def main(address: str, prompt: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        messages, services = stubs(directory)
        key = os.environ.get("TANDEM_API_KEY")
        metadata = [("authorization", f"Bearer {key}")] if key else []
        request = messages.GenerateRequest(text=prompt, max_tokens=16, priority=0)
        with grpc.insecure_channel(address) as channel:
            # The timeout is the deadline of every phase, in the router and on the nodes.
            for message in services.InferenceStub(channel).Generate(request, timeout=60, metadata=metadata):
                if message.HasField("token"):
                    print(message.token.text, end="", flush=True)
                elif message.HasField("finish"):
                    finish = message.finish
                    print(finish.text)
                    print(f"{finish.completion_tokens} tokens, TTFT {finish.timings.ttft_ms:.1f} ms, trace {finish.trace_id}")


if __name__ == "__main__":
    main(*sys.argv[1:])
