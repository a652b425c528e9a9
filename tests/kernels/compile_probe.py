"""Cross-compiles kernels for one target and prints what the machine code holds; run by `test_compile.py`.

A process of its own: it must not see the interpreter, and LLVM takes one AMD architecture a process.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import triton

# The texts on the way to the machine code, which the kernels' own cache does without, are what is looked at here.
os.environ["TRITON_STORE_BINARY_ONLY"] = "0"
os.environ["TRITON_CACHE_DIR"] = str(Path.home() / ".triton" / "cache-with-texts")

from tilewire.kernels.add.op import Problem as AddProblem
from tilewire.kernels.add.op import build as build_add
from tilewire.kernels.add.op import choose as choose_add
from tilewire.kernels.matmul.configs import OUT_DTYPES, Problem, takes_limbs
from tilewire.kernels.matmul.grouped.op import GroupKind
from tilewire.kernels.matmul.members import (
    CLUSTERS,
    ELEMENTS,
    is_supported,
    shares_k,
    specialization_of,
    tiles_of,
)
from tilewire.kernels.matmul.select import select as choose
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.normalize.op import Problem as NormalizeProblem
from tilewire.kernels.normalize.op import choose as choose_normalize
from tilewire.kernels.normalize.op import variant as normalize_variant
from tilewire.kernels.pointwise.op import Problem as PointwiseProblem
from tilewire.kernels.pointwise.op import build as build_pointwise
from tilewire.kernels.pointwise.op import choose as choose_pointwise
from tilewire.kernels.reduce.configs import STATES
from tilewire.kernels.reduce.configs import Problem as ReduceProblem
from tilewire.kernels.reduce.configs import choose as choose_reduce
from tilewire.kernels.reduce.op import build as build_reduce
from tilewire.kernels.registry import kernel_op
from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import KNOWN
from tilewire.kernels.search.configs import FINISH, tile_for
from tilewire.kernels.search.configs import Problem as SearchProblem
from tilewire.kernels.search.configs import choose as choose_search
from tilewire.kernels.search.variants import (
    distances_variant,
    finish_variant,
    product_variant,
    score_variant,
    tile_variant,
)
from tilewire.kernels.selection.tables import is_tuned
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.configs import select as choose_softmax
from tilewire.kernels.softmax.kernel import softmax_across_kernel
from tilewire.kernels.softmax.op import KERNELS
from tilewire.kernels.softmax.op import build as build_softmax
from tilewire.kernels.topk.configs import Problem as TopKProblem
from tilewire.kernels.topk.configs import choose as choose_topk
from tilewire.kernels.topk.op import built, select_variant

# Of a multiprocessor: its registers, and what is kept of its shared memory for each program.
REGISTERS, KEPT_BYTES = 1 << 16, 1024
PATTERNS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "mfma": r"v_mfma",
    "fma": r"fma\.rn\.f32|v_fma|v_fmac|v_pk_fma",
    "wide_load": (
        r"cp\.async\.cg\.[^;]*0x10|ld\.global[^;]*\.v4\.b32|ld\.global[^;]*\.v2\.b64|_load_dwordx4|bulk\.tensor"
    ),
    "scratch": r"scratch_(load|store)",
}


def matmul_problems(target):
    for dtype in ("bfloat16", "float16"):
        for a_major, b_major in (("k", "n"), ("k", "k"), ("m", "n")):
            yield Problem(4096, 4096, 4096, 1, dtype, dtype, a_major, b_major)
        yield Problem(16, 4096, 4096, 1, dtype, dtype)
        yield Problem(1823, 781, 1001, 1, dtype, dtype, is_aligned_in=False, is_aligned_out=False)
    yield Problem(4096, 4096, 4096, 1, "int8", "int32", b_major="k")
    yield Problem(4096, 4096, 4096, 1, "float32", "float32", precision="tf32")
    yield Problem(4096, 4096, 4096, 1, "float32", "float32")
    if target.arch not in (80, "gfx90a"):
        yield Problem(4096, 4096, 4096, 1, "float8_e5m2", "bfloat16", b_major="k")


def table_variants(target):
    """Every configuration of the target's own table."""
    if not is_tuned(target):
        return
    dtypes = {"half": "bfloat16", "int8": "int8", "float8": "float8_e4m3fn"}
    for key, tiles in tiles_of(target).items():
        name, _, more = key.partition(" ")
        dtype = dtypes.get(name, "float32")
        out_dtype = {"int8": "int32", "float8_e4m3fn": "bfloat16"}.get(dtype, dtype)
        is_wide = more != "scalar"
        precision = name if dtype == "float32" else "fast" if more == "fast" else "ieee"
        for index, tile in enumerate(tiles):
            rows = tile.config.block_m if tile.config.kernel == "vector" else 4096
            problem = Problem(rows, 4096, 4096, 1, dtype, out_dtype, "k", "k", precision)
            problem = replace(
                problem,
                is_aligned_in=is_wide,
                is_padded_a=is_wide,
                is_padded_b=is_wide,
                is_aligned_out=is_wide,
                is_boxed_out=is_wide,
                is_copyable=False,
            )
            # Scalar units, by choice or for want of others, and operands read element by element are named so.
            read_by = replace(tile.config, is_copied=takes_limbs(problem, tile.config.kernel))
            prefix = "vector" if tile.config.kernel == "vector" or name == "ieee" else "table"
            shown = f"{prefix} {key} {index}{'' if is_wide else ' unaligned'}"
            yield shown, build(specialization_of(problem, read_by, is_plain=True), tile.config, target)
            if tile.config.kernel == "wgmma" and shares_k(problem, tile.config):
                for splits in CLUSTERS:
                    shared = replace(tile.config, split_k=splits)
                    specialization = specialization_of(problem, shared, is_plain=False)
                    yield f"{shown} shared by {splits}", build(specialization, tile.config, target)


def element_variants(target):
    """The tiles for small products, of every dtype: other types take other ways to the store."""
    for dtype, (out_dtype, *_) in OUT_DTYPES.items():
        problem = Problem(3, 3, 3, 1 << 16, dtype, out_dtype)
        for tile in ELEMENTS if is_supported(dtype, target) else ():
            specialization = specialization_of(problem, tile.config, is_plain=True)
            name = f"vector {dtype} {tile.config.block_m} {tile.config.lanes} unaligned"
            yield name, build(specialization, tile.config, target)


def variants(target):
    yield from table_variants(target)
    yield from element_variants(target)
    for problem in matmul_problems(target):
        config = choose(problem, target, is_plain=False)
        name = f"matmul {problem.m} {problem.dtype} {problem.a_major}{problem.b_major} {problem.precision}"
        if not problem.is_aligned_in:
            name += " unaligned"
        yield name, build(specialization_of(problem, config, is_plain=False), config, target)
    for rows, n in ((4096, 256), (4096, 8192), (4096, 16_000), (4096, 65536), (1, 1_000_000)):
        for dtype in ("float32", "bfloat16"):
            problem = SoftmaxProblem(rows, n, dtype, dtype)
            whole = choose_softmax(problem, target)
            for kernel in KERNELS[whole.kernel]:
                yield f"softmax {n} {dtype} {kernel.__name__}", build_softmax(kernel, problem, whole, target)
    for dtype, out_dtype, n in itertools.product(
        ("float32", "bfloat16"), ("float32", "bfloat16"), (4, 16, 64, 256, 1000)
    ):
        problem = SoftmaxProblem(4096, n, dtype, out_dtype, is_contiguous=False, is_aligned=False)
        whole = choose_softmax(problem, target)
        name = f"softmax {n} {dtype} {out_dtype} across unaligned"
        (kernel,) = KERNELS[whole.kernel]
        yield name, build_softmax(kernel, problem, whole, target)
    for dtype, n in itertools.product(("float32", "bfloat16"), (64, 256, 2048)):
        whole_piece = 16 // ITEM_BYTES[dtype]
        problem = SoftmaxProblem(4096, n, dtype, dtype, is_contiguous=False, is_aligned=False, side_by_side=whole_piece)
        whole = choose_softmax(problem, target)
        yield f"softmax {n} {dtype} in pieces", build_softmax(softmax_across_kernel, problem, whole, target)
        across_rows = NormalizeProblem(
            4096, n, dtype, dtype, dtype, False, is_contiguous=False, side_by_side=whole_piece
        )
        yield (
            f"normalize {n} {dtype} in pieces",
            normalize_variant(across_rows, choose_normalize(across_rows, target), target),
        )
    for dtype in ("float32", "bfloat16", "int64"):
        problem = AddProblem(1, 1 << 20, dtype, dtype)
        yield f"add {dtype}", build_add(problem.specialization, choose_add(problem, target), target)
        for across, out_dtype in itertools.product((0, 1 << 20), (dtype, "float16")):
            problem = AddProblem(1 << 20, 50, dtype, out_dtype, False, outer_rank=3, across=across)
            name = f"add {dtype} {out_dtype} {'across' if across else 'each'} unaligned"
            yield name, build_add(problem.specialization, choose_add(problem, target), target)
    yield from grouped_variants(target)
    yield from ranking_variants(target)
    yield from row_variants(target)
    for index, variant in enumerate(kernel_op("staging").variants(target)):
        # Words of 1 to 8 bytes at addresses that promise no more: never 16 at once.
        yield f"staging unaligned {index}", variant


def ranking_variants(target):
    """Top-k and search; what gathers rows or keys is called unaligned, since it has no wide loads to look for."""
    for k, n in ((10, 1_000_000), (50, 4000), (1000, 4000)):
        problem = TopKProblem(64, n, k, "float32")
        blocks = choose_topk(problem, target)
        for role, variant in built(problem.dtype, blocks, target).items():
            yield f"topk {k} {n} {role}{' unaligned' if role == 'finish' else ''}", variant
        for of_keys, block in itertools.product((False, True), blocks.select):
            yield f"topk select {block.block_n} {of_keys} unaligned", select_variant(block, of_keys, target)
    for dtype, m, k, is_plain in (
        ("bfloat16", 1, 768, True),
        ("bfloat16", 64, 128, True),
        ("bfloat16", 256, 768, True),
        ("bfloat16", 256, 768, False),
        ("int8", 256, 768, False),
        ("float32", 64, 256, False),
    ):
        search = SearchProblem(m, 1_000_000, k, 10, dtype, is_plain=is_plain)
        config = choose_search(search, target)
        name = f"search {m} {k} {dtype} {is_plain}"
        yield name, product_variant(search, config, target)
        yield f"{name} again unaligned", score_variant(search, config, target)
        if not is_plain:
            yield f"{name} distances unaligned", distances_variant(search, config, target)
    for dtype in ("bfloat16", "int8", "float32"):
        search = SearchProblem(64, 64, 64, 10, dtype, is_aligned=False, is_plain=False, is_distance=True)
        yield f"search distances {dtype} unaligned", tile_variant(search, tile_for(target), target)
    for block, is_scores in itertools.product(FINISH, (False, True)):
        # Keys begin anywhere, and what is sorted is read one by one.
        name = f"search finish {block.block_n} {block.sort}{' unaligned' if block.sort or not is_scores else ''}"
        yield name, finish_variant(block, is_scores, target)


def row_variants(target):
    """Reductions, normalisations and pointwise functions."""
    for dtype in ("float32", "bfloat16"):
        for state in STATES:
            for is_row, is_cut in ((True, False), (True, True), (False, False)):
                problem = ReduceProblem(64, 4096, 1_000_000, dtype, state, is_row=is_row, is_cut=is_cut)
                name = f"reduce {dtype} {state} {'cut ' * is_cut}{'row' if is_row else 'column'}"
                yield name, build_reduce(problem, choose_reduce(problem, target), target)
        for n, is_aligned in ((4096, True), (50_000, True), (50_001, False), (3_000_000, True)):
            rows = NormalizeProblem(8192, n, dtype, dtype, dtype, is_aligned)
            name = f"normalize {dtype} {n}{'' if is_aligned else ' unaligned'}"
            yield name, normalize_variant(rows, choose_normalize(rows, target), target)
        for out_dtype, n in itertools.product(("float32", "bfloat16"), (4, 16, 64, 256, 1000)):
            vector_dtype = dtype if dtype == out_dtype else "float32"
            rows = NormalizeProblem(8192, n, dtype, out_dtype, vector_dtype, is_aligned=False, is_contiguous=False)
            name = f"normalize {n} {dtype} {out_dtype} across unaligned"
            yield name, normalize_variant(rows, choose_normalize(rows, target), target)
        rows = NormalizeProblem(8192, 16, dtype, dtype, dtype)
        yield f"normalize {dtype} 16", normalize_variant(rows, choose_normalize(rows, target), target)
        for is_binary in (True, False):
            elements = PointwiseProblem(1, 1 << 20, dtype, dtype, is_binary=is_binary)
            yield (
                f"pointwise {dtype}",
                build_pointwise(elements.specialization, choose_pointwise(elements, target), target),
            )
            for across in (0, 1 << 20):
                elements = PointwiseProblem(
                    1 << 20, 50, dtype, dtype, False, outer_rank=3, is_binary=is_binary, across=across
                )
                name = f"pointwise {dtype} {is_binary} {'across' if across else 'each'} unaligned"
                yield name, build_pointwise(elements.specialization, choose_pointwise(elements, target), target)


def grouped_variants(target):
    for dtype in ("bfloat16", "float32", "int8"):
        for is_aligned in (True, False):
            name = f"matmul grouped{'' if is_aligned else ' unaligned'} {dtype} kn ieee"
            yield name, GroupKind(dtype, "ieee", "n", is_aligned, OUT_DTYPES[dtype][0]).variant(target)


def report(name, variant, target):
    compiled = variant.compile(target)
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    found = {key: len(re.findall(pattern, text)) for key, pattern in PATTERNS.items()}
    usage = usage_cuda(compiled) if target.backend == "cuda" else ""
    spills = sum(map(int, re.findall(r"STACK:(\d+)", usage))) if usage else spilled_amd(text)
    registers = max(map(int, re.findall(r"REG:(\d+)", usage)), default=0)
    # A scalar without a register goes to a lane of a vector register on AMD: a move, no memory.
    moved = [int(count) for count in re.findall(r"\.sgpr_spill_count:\s*(\d+)", text)]
    shared = compiled.metadata.shared
    more = {"registers": registers, "moved_scalars": sum(moved)}
    form = dict(variant.constants).get("FORM")
    wanted = {form.columns, form.tail_columns} - {0} if form else set()
    columns = set(map(int, re.findall(r"wgmma\.mma_async\.\S*m64n(\d+)k", text)))
    lists = {"columns": sorted(columns), "wanted_columns": sorted(wanted), "rows_stored": rows_stored(compiled)}
    if form:
        more["waits"] = what_waits(text)
        # Programs that run on a multiprocessor at a time, as the launch believes, by the registers they are given.
        at_start = dict(variant.options).get("maxnreg")
        threads = 32 * compiled.metadata.num_warps
        more["programs_on"] = REGISTERS // (at_start * threads) if at_start else 1
        more["room"] = (target.shared_bytes + KEPT_BYTES) // (shared + KEPT_BYTES)
        more["sharers"], more["splits"], more["consumers"] = form.sharers, form.splits, form.consumers
        more["loads_for_all"] = len(re.findall(r"multicast::cluster", text))
        more["told"] = len(re.findall(r"mapa\.shared::cluster", text))
        more["own_arrivals"] = len(re.findall(r"mbarrier\.arrive\.shared(::cta)?\.b64", text))
        lists["clusters"] = re.findall(r"\.reqnctapercluster (.*)", text)
        more["sent"] = len(re.findall(r"cp\.async\.bulk\.shared::cluster\.shared::cta", text))
        lists["sides"] = sides_that_begin(text)
    return {"name": name, "shared": shared, "spilled_bytes": spills, **lists, **more, **found}


def sides_that_begin(text):
    """For a program in a cluster: whether barriers are made among its warps that begin, and among those that wait for work.

    They part at the first branch. Those that wait have said before that they are there.
    """
    parting = re.search(r"bra\s+(\S+);\n\s*barrier\.cluster\.arrive\.relaxed;\n\s*bra\.uni\s+(\S+);", text)
    sides = parting.groups() if parting else ()
    return [any("fence.mbarrier_init" in block for block in blocks_from(side, text)) for side in sides]


def blocks_from(label, text):
    """The blocks of a program that are run from the one with this label on."""
    parts = re.split(r"^(\$L\w+):", text, flags=re.MULTILINE)
    blocks = dict(zip(parts[1::2], parts[2::2], strict=True))
    following = dict(itertools.pairwise(parts[1::2]))
    found, left = {}, [label]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = blocks[name]
            left += re.findall(r"\$L__\w+", blocks[name])
            is_ended = re.search(r"^\s*(bra\.uni\s|ret;|brx\.idx)[^\n]*\s*\Z", blocks[name], re.MULTILINE)
            left += [following[name]] if name in following and not is_ended else []
    return list(found.values())


def rows_stored(compiled):
    """Rows that the threads of a warp store at a time, for each way in which tiles are stored."""
    text = str(compiled.asm["ttgir"])
    rows = dict(re.findall(r"^#(blocked\d*) = .*threadsPerWarp = \[(\d+), \d+\]", text, re.MULTILINE))
    return sorted({int(rows[name]) for name in re.findall(r" tt\.store .*#(blocked\d*)>", text) if name in rows})


def what_waits(text):
    """What the assembler says of matrix instructions that it lets wait for one another; empty where all stay in flight."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", str(binary)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return "\n".join(line for line in said.splitlines() if "Performance Loss" in line)


def usage_cuda(compiled):
    """What cuobjdump says of registers and the stack frame, which holds what was spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return usage.stdout + usage.stderr


def spilled_amd(text):
    return sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)) + sum(
        int(size) for size in re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text)
    )


if __name__ == "__main__":
    chosen = KNOWN[sys.argv[1]]
    print(json.dumps([report(name, variant, chosen) for name, variant in variants(chosen)]))
