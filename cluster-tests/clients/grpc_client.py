"""Two gRPC clients: one with stubs made here from the .proto (grpcio-tools), one that knows reflection only (grpc-requests).

Usage: grpc_client.py http://host:port
"""

import importlib
import pathlib
import sys
import tempfile

import grpc
import grpc_requests
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto" / "proto"


def stubs(directory: str):
    """Generated messages and services of inference.proto."""
    name = "tandem/v1/inference.proto"
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={directory}", f"--grpc_python_out={directory}", name]
    assert protoc.main(arguments) == 0
    sys.path.insert(0, directory)
    return importlib.import_module("tandem.v1.inference_pb2"), importlib.import_module("tandem.v1.inference_pb2_grpc")


def with_stubs(address: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        messages, services = stubs(directory)
        with grpc.insecure_channel(address) as channel:
            inference = services.InferenceStub(channel)
            request = messages.GenerateRequest(text="The capital of France is", max_tokens=8)
            answer = list(inference.Generate(request, timeout=60))
            finish = answer[-1].finish
            text = "".join(message.token.text for message in answer) + finish.text
            assert "Paris" in text, text
            assert finish.completion_tokens == len(answer) - 1
            assert finish.trace_id and finish.timings.ttft_ms > 0
            print("stubs:", text, f"ttft {finish.timings.ttft_ms:.1f} ms, trace {finish.trace_id}")
            try:
                list(inference.Generate(messages.GenerateRequest(), timeout=60))
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
                print("refused:", error.details())
            else:
                raise AssertionError("a request without input was accepted")
            return text


def with_reflection(address: str) -> str:
    client = grpc_requests.Client.get_by_endpoint(address)
    assert "tandem.v1.Inference" in client.service_names, client.service_names
    request = {"text": "The capital of France is", "max_tokens": 8}
    answer = list(client.request("tandem.v1.Inference", "Generate", request))
    text = "".join(message.get("token", {}).get("text", "") for message in answer) + answer[-1]["finish"].get("text", "")
    print("reflection:", text)
    health = client.request("grpc.health.v1.Health", "Check", {"service": "tandem.v1.Inference"})
    assert health["status"] == "SERVING", health
    return text


def main(url: str) -> None:
    address = url.removeprefix("http://")
    assert with_stubs(address) == with_reflection(address)
    print("gRPC clients: passed")


if __name__ == "__main__":
    main(sys.argv[1])
