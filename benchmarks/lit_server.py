"""The same product on LitServe, with its batching: `bench_http` compares with it.

    WEIGHT=weight.safetensors python -m benchmarks.lit_server --port 8000 --api-servers 4

Bodies and answers are raw bfloat16, as on the twenty-line server: JSON would be slower by far.
"""

# LitServe reads the annotation of `request` at run time: no postponed annotations here.
import argparse
import os
from typing import Annotated, Any

import litserve as ls
import torch
from fastapi import Body, Response
from safetensors.torch import load_file

OCTETS = "application/octet-stream"


class Product(ls.LitAPI):  # type: ignore[misc]
    """Multiplies the rows of bfloat16 in a body by the weight."""

    def setup(self, device: str) -> None:
        """LitServe's call, in the worker that has the device."""
        self.weight = load_file(os.environ["WEIGHT"])["w"].to(device)

    def decode_request(self, request: Annotated[bytes, Body(media_type=OCTETS)]) -> torch.Tensor:
        """Bytes to rows."""
        return torch.frombuffer(bytearray(request), dtype=torch.bfloat16).view(-1, self.weight.shape[0])

    def batch(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """One taller operand."""
        return torch.cat(inputs), [len(rows) for rows in inputs]

    def predict(self, x: Any) -> tuple[torch.Tensor, list[int]]:
        """One product for the whole batch."""
        rows, counts = x
        return (rows.to(self.weight.device) @ self.weight).cpu(), counts

    def unbatch(self, output: Any) -> list[torch.Tensor]:
        """The rows of each request."""
        rows, counts = output
        return list(rows.split(counts))

    def encode_response(self, output: torch.Tensor) -> Response:
        """Rows to bytes."""
        return Response(output.view(torch.uint8).numpy().tobytes(), media_type=OCTETS)


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--batch-timeout", type=float, default=0.001)
    parser.add_argument("--fast-queue", action="store_true")
    arguments = parser.parse_args()
    product = Product(max_batch_size=64, batch_timeout=arguments.batch_timeout)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    server = ls.LitServer(product, accelerator=accelerator, devices=1, timeout=False, fast_queue=arguments.fast_queue)
    server.run(
        host="127.0.0.1",
        port=arguments.port,
        num_api_servers=arguments.api_servers,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
