"""What people write today for a product of two operands on the GPU, in twenty lines. `bench_shared_memory` compares with it."""

import torch
from fastapi import FastAPI, Request, Response

device = "cuda" if torch.cuda.is_available() else "cpu"
app = FastAPI()


@app.post("/matmul/{m}/{k}/{n}")
async def matmul(m: int, k: int, n: int, request: Request) -> Response:
    """Multiplies two bfloat16 operands that follow one another in the body."""
    both = torch.frombuffer(bytearray(await request.body()), dtype=torch.bfloat16).to(device)
    out = both[: m * k].view(m, k) @ both[m * k :].view(k, n)
    return Response(out.cpu().view(torch.uint8).numpy().tobytes(), media_type="application/octet-stream")
