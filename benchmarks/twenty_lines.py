"""What people write today for a product with a weight on the GPU, in twenty lines. `bench_http` compares with it."""

import os

import torch
from fastapi import FastAPI, Request, Response
from safetensors.torch import load_file

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = load_file(os.environ["WEIGHT"])["w"].to(device)
app = FastAPI()


@app.post("/matmul")
async def matmul(request: Request) -> Response:
    """Multiplies the rows of bfloat16 in the body by the weight."""
    rows = torch.frombuffer(bytearray(await request.body()), dtype=torch.bfloat16).view(-1, weight.shape[0])
    out = rows.to(device) @ weight
    return Response(out.cpu().view(torch.uint8).numpy().tobytes(), media_type="application/octet-stream")
