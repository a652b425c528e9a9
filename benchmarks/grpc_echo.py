"""A plain grpc.aio server with generated messages, as gRPC's own tutorial has it, that answers each tensor with itself.

    python -m benchmarks.grpc_echo --port 9000

What `bench_grpc` compares with: the same service, messages and tensors, and no computation, no checks and no other process.
"""

from __future__ import annotations

import argparse
import asyncio

import grpc

from tilewire.service.gateway.grpc.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from tilewire.service.gateway.grpc.paths import SERVICE


class Echo:
    """The servicer."""

    async def infer(self, request: ModelInferRequest, _context: object) -> ModelInferResponse:
        """Answers the first tensor."""
        answer = ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        given = request.inputs[0]
        answer.outputs.add(name="out", datatype=given.datatype, shape=given.shape)
        answer.raw_output_contents.append(request.raw_input_contents[0])
        return answer


async def serve(port: int) -> None:
    """Serves until the process is ended."""
    server = grpc.aio.server()
    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            Echo().infer,
            request_deserializer=ModelInferRequest.FromString,
            response_serializer=ModelInferResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
