"""The same search by faiss on the processor, exact. `bench_resident` compares with it."""

import asyncio
import os

import faiss
import torch
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from safetensors.torch import load_file

items = load_file(os.environ["ITEMS"])["w"].float().numpy()
index = faiss.IndexFlatIP(items.shape[1])
index.add(items)
app = FastAPI()
# faiss uses every core for one search, and its library of products bears no more than one at a time.
lock = asyncio.Lock()


@app.post("/search")
async def search(request: Request) -> Response:
    """Finds the ten items with the largest product for each bfloat16 row of the body."""
    rows = torch.frombuffer(bytearray(await request.body()), dtype=torch.bfloat16).view(-1, items.shape[1])
    async with lock:
        _, best = await run_in_threadpool(index.search, rows.float().numpy(), 10)
    return Response(best.tobytes(), media_type="application/octet-stream")
