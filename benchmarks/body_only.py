"""A FastAPI route that reads its body and does nothing with it: the cost of HTTP alone. `bench_http` compares with it."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.post("/read")
async def read(request: Request) -> Response:
    """Answers how many bytes came."""
    return Response(str(len(await request.body())), media_type="text/plain")
