"""Compiles three candidates for sm_90 in a crew, as a tuning does, and prints what came of each; run by `test_tuning.py`.

A process of its own: it must not see the interpreter.
"""

import json
from dataclasses import asdict, replace

from tilewire.kernels.autotune.compiling import Compiler, Recipe
from tilewire.kernels.autotune.workloads import Product
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.members import family_of
from tilewire.kernels.runtime.targets import KNOWN

H100 = KNOWN["nvidia_h100"]
FITS = Config("tma", 64, 64, 64, num_warps=4, num_stages=3)
TOO_DEEP = replace(FITS, block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=6)
SPILLS = replace(FITS, block_m=128, block_n=256, num_warps=4)

if __name__ == "__main__":
    problem = Product(4096, 4096, 4096).problem
    recipes = [Recipe(family_of(problem, each, is_plain=True), each, H100) for each in (FITS, TOO_DEEP, SPILLS)]
    found: dict[int, list[object]] = {}

    def keep(recipe, facts):
        found[recipes.index(recipe)] = [facts.objection(H100), asdict(facts)]

    with Compiler(num_workers=2) as compiler:
        compiler.compile(recipes, keep, lambda: False)
    print(json.dumps([found[number] for number in range(len(recipes))]))
