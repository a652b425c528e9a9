"""Drives the console in a browser: fills its form, reads its answer, and has reports that the server may give it."""

from __future__ import annotations

from playwright.sync_api import Page, expect

KERNELS = {
    "devices": [
        {
            "device": "cuda:0",
            "device_name": "NVIDIA H100 80GB HBM3",
            "backend": "gpu",
            "target": "cuda:90",
            "table": "nvidia_h100",
            "roofline": {
                "bandwidth_bytes_per_second": 3e12,
                "tflops": {"bfloat16": 790.0, "float16": 785.0, "float32": 60.0},
            },
            "variants": [
                {
                    "op": op,
                    "kernel": kernel,
                    "config": {"BLOCK_M": 128, "num_warps": 8},
                    "source": "tuned",
                    "registers": 168,
                    "spills": 0,
                    "shared_bytes": 196608,
                }
                for op, kernel in (("matmul", "matmul_tma"), ("softmax", "softmax_rows"))
            ],
            "tuned": [],
        }
    ]
}
WARMING = {
    "ready": False,
    "engines": [{"device": "cuda:0", "state": "warming", "stage": "load", "done": 12, "total": 340}],
}


def fill(page: Page, **operands: str) -> None:
    """Types operands."""
    for name, text in operands.items():
        page.locator(f"#in-{name}").fill(text)


def choose(page: Page, name: str) -> None:
    """Chooses an op, as soon as the page has the list."""
    expect(page.locator(f"#op option[value='{name}']")).to_be_attached()
    page.get_by_label("Operation").select_option(name)


def compute(page: Page) -> None:
    """Sends the form by the keyboard, as soon as the page has the list of ops.

    Figures above it may grow, and move the button between the press of a mouse and its release: then nothing is clicked.
    """
    expect(page.locator("#op option").first).to_be_attached()
    page.get_by_role("button", name="Compute").press("Enter")


def result(page: Page) -> list[list[str]]:
    """Reads the cells of the answer, row by row."""
    rows = page.locator("#answer table.result tr")
    expect(rows.first).to_be_visible()
    return [row.locator("td").all_inner_texts() for row in rows.all()]
