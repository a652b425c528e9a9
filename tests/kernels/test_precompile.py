"""Compiling ahead: into a cache of its own, in processes, and found again; what is broken is ignored."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilewire.kernels.build.precompile import deal_out
from tilewire.kernels.runtime.targets import KNOWN, parse_target

ROOT = Path(__file__).parents[2]
# A target with three binaries: the real ones take minutes.
CODE = """
import json, sys
import tilewire.kernels.selection.catalogue as catalogue, tilewire.kernels.build.precompile as ahead
from tilewire.kernels.runtime.targets import KNOWN, parse_target
target = KNOWN["nvidia_h100"]
few = tuple(variant for variant in catalogue.variants(target) if variant.kernel.__name__ == "copy_ranges_kernel")[:3]
catalogue.variants = ahead.variants = lambda _target: few
part = ahead._compile_some(target, range(len(few)))
print(json.dumps([sorted(part.fresh.items()), part.failures, ahead.images_of(target) is None]))
ahead._mark(target, [part.images[number] for number in range(len(few))])
images = ahead.images_of(target)
print(json.dumps([image.file for image in images.values()]))
print(json.dumps([images[variant].metadata["name"] for variant in few]))
print(json.dumps([ahead.fingerprint(KNOWN[name]) for name in ("nvidia_h100", "nvidia_b200", "nvidia_h100")]))
"""

# Triton's key of every kernel, in the order in which a process may come to compile them, in the opposite one, and after the
# name of the cache's index, which engines ask for first.
KEYS = """
import json, sys
from tilewire.kernels.build.precompile import fingerprint
from tilewire.kernels.runtime.targets import KNOWN, parse_target
from tilewire.kernels.selection.catalogue import variants
if WITH_INDEX:
    fingerprint(KNOWN["nvidia_h200"])
of_kernels = {one.kernel.__name__: one for one in variants(KNOWN["nvidia_h200"])}
keys = {name: of_kernels[name].source().hash() for name in sorted(of_kernels, reverse=IS_REVERSED)}
print(json.dumps(dict(sorted(keys.items()))))
"""


def run(code, cache):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with three binaries, and what was said of them and of fingerprints."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, run(CODE, cache)[0]


@pytest.mark.slow
def test_what_is_compiled_is_found_again(compiled):
    cache, (first, files, names, _fingerprints) = compiled
    assert first == [[["staging", 3]], [], True]
    assert [(cache / file).read_bytes()[:4] for file in files] == [b"\x7fELF"] * 3
    assert names == ["copy_ranges_kernel"] * 3
    assert not list(cache.glob("*/*.ttir")), "only binaries are kept"
    (second, *_), _ = run(CODE, cache)
    assert second == [[], [], False]


@pytest.mark.slow
def test_a_worker_frees_garbage_once_it_has_much_memory(tmp_path):
    code = """
import gc, json
import tilewire.kernels.build.precompile as ahead
from tilewire.kernels.runtime.targets import KNOWN, parse_target
ahead.end_with_parent = lambda: None
ahead._begin_worker()
found = []
for ahead.MAX_WORKER_BYTES in (1 << 50, 0):
    ahead._compile_some(KNOWN["nvidia_h100"], ())
    found.append(gc.isenabled())
print(json.dumps(found))
"""
    ((before, after),), _ = run(code, tmp_path)
    assert not before
    assert after


@pytest.mark.slow
def test_an_index_that_cannot_be_right_is_ignored(compiled, tmp_path):
    cache = shutil.copytree(compiled[0], tmp_path / "cache")
    (index,) = cache.glob("tilewire-*.json")
    texts = ["", "{", "[]", '{"images": []}', '{"images": [{"file": 1}]}', '{"images": 7}']
    code = CODE.split("part =", maxsplit=1)[0]
    code += f"""
from pathlib import Path
for text in {texts!r}:
    Path({str(index)!r}).write_text(text)
    print(json.dumps(ahead.images_of(target)))
"""
    found, log = run(code, cache)
    assert found == [None] * len(texts)
    assert log.count("is ignored") == len(texts)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_targets_are_named_by_backend_and_architecture(name):
    target = KNOWN[name]
    # H100 and H200 are one chip, with the same binaries.
    assert parse_target(f"{target.backend}:{target.arch}").chip == target.chip
    assert parse_target(name) == target


@pytest.mark.parametrize("text", ["", "cuda", "cuda:", "cuda:12", "gfx942", "hip:gfx1"])
def test_an_unknown_target_is_refused_with_those_that_there_are(text):
    with pytest.raises(ValueError, match=r"target: .*hip:gfx942"):
        parse_target(text)


@pytest.mark.slow
def test_the_fingerprint_tells_targets_apart(compiled):
    first, other, again = compiled[1][-1]
    assert first == again != other


@pytest.mark.parametrize("total", [1, 7, 2285])
@pytest.mark.parametrize("begin", [0.0, 0.25, 0.5, 0.875])
def test_engines_begin_at_places_of_their_own_and_compile_everything(total, begin):
    parts, first = deal_out(total, 64, begin), deal_out(total, 64, 0.0)
    assert sorted(number for part in parts for number in part) == list(range(total))
    assert parts[0] == first[int(begin * len(first))]


@pytest.mark.slow
def test_a_kernels_key_does_not_depend_on_what_was_compiled_before(tmp_path):
    """Else processes that share a cache would not find each other's binaries."""
    ways = ((False, False), (True, False), (False, True))
    code = "IS_REVERSED, WITH_INDEX = %s, %s" + KEYS
    first, *others = (run(code % way, tmp_path)[0] for way in ways)
    assert others == [first, first]
    assert len(first[0]) > 20
